"""Replays a trace through a policy on virtual time: what a cache of a given size would have hit.

A request hits its blocks from the first on, up to the first that is not there, and then stores the
rest; its own path stays meanwhile. What does not fit even so is not stored. Nothing here knows the
future: belady.py does.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvstore.tiers.eviction import Run, study_at_once
from kvstore.tiers.eviction_hints import HintedPolicy
from kvstore.tiers.leaf_tree import NO_BLOCK, LeafTree
from kvstore.tiers.page_cost import EVEN_TOKENS

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.tiers.eviction import Ids, Keys, Policy
    from kvstore.trace import Trace

PROGRESS_REQUESTS = 500
AHEAD_PAGES_MAX = 256  # as evictor.BATCH_PAGES_MAX


@dataclass(frozen=True, slots=True)
class Hits:
    """What of a trace was hit, from the first request on or after the warm-up."""

    policy: str
    capacity: int
    requests: int
    references: int
    hit_blocks: int
    tokens: int
    hit_tokens: int
    block_ratio: float
    token_ratio: float
    compute_ratio: float  # of the prefill work of the whole trace
    ttft_ratio: float  # of each request's own, on average: by how much the mean one waits less
    evicted: int
    references_per_s: float  # of the whole trace, by the time of one core
    host_capacity: int = 0  # of memory, where a disk was replayed behind it
    host_block_ratio: float = 0.0  # hit in memory

    def to_dict(self) -> dict[str, object]:
        return {name: getattr(self, name) for name in self.__slots__}


class Tally:
    """Adds up hits over a trace."""

    def __init__(self, trace: Trace, warmup_s: float = 0.0, even_tokens: float = EVEN_TOKENS):
        self._starts = trace.starts
        before = trace.depths().astype(np.int64) * trace.block_tokens
        work = trace.tokens * (1.0 + (before + trace.tokens / 2) / even_tokens)
        self._tokens = np.concatenate([[0], np.cumsum(trace.tokens, dtype=np.int64)])
        self._work = np.concatenate([[0.0], np.cumsum(work)])
        self.first = int(np.searchsorted(trace.times_s, trace.times_s[0] + warmup_s))
        self._hits = np.zeros(trace.requests, np.int64)

    def add(self, request: int, hit_blocks: int) -> None:
        self._hits[request] = hit_blocks

    def result(
        self, policy: str, capacity: int, evicted: int, seconds: float, host: Hits | None = None
    ) -> Hits:
        """The figures; `host`: of memory alone, where a disk was replayed behind it."""
        starts, ends = self._starts[self.first : -1], self._starts[self.first + 1 :]
        hits = self._hits[self.first :]
        references, hit = int((ends - starts).sum()), int(hits.sum())
        tokens = int((self._tokens[ends] - self._tokens[starts]).sum())
        hit_tokens = int((self._tokens[starts + hits] - self._tokens[starts]).sum())
        works = self._work[ends] - self._work[starts]
        saves = self._work[starts + hits] - self._work[starts]
        saved, asked = float(saves.sum()), works > 0
        ttft = float((saves[asked] / works[asked]).sum())
        return Hits(
            policy=policy,
            capacity=capacity,
            requests=len(starts),
            references=references,
            hit_blocks=hit,
            tokens=tokens,
            hit_tokens=hit_tokens,
            block_ratio=hit / max(1, references),
            token_ratio=hit_tokens / max(1, tokens),
            compute_ratio=saved / max(float(works.sum()), 1e-9),
            ttft_ratio=ttft / max(1, int(asked.sum())),
            evicted=evicted,
            references_per_s=int(self._starts[-1]) / max(seconds, 1e-9),
            host_capacity=host.capacity if host else 0,
            host_block_ratio=host.block_ratio if host else 0.0,
        )

    def hits_of(self) -> npt.NDArray[np.int64]:
        """Blocks hit by each request of the trace."""
        return self._hits


def replay(
    trace: Trace,
    policy: Policy,
    capacity: int,
    *,
    warmup_s: float = 0.0,
    even_tokens: float = EVEN_TOKENS,
    ahead_part: int = 0,
    lookahead: int = 0,
    progress: Callable[[int], None] | None = None,
) -> Hits:
    """Run one policy at one capacity, in blocks of the trace.

    ahead_part: as the store does, evict at least this part of all pages (64: one in 64) at once.
    lookahead: hint the next uses that so many queued requests make known.
    """
    tally = Tally(trace, warmup_s, even_tokens)
    run = Replay(trace, policy, capacity, ahead_part=ahead_part)
    queue = Queue(trace, policy, lookahead) if isinstance(policy, HintedPolicy) else None
    began = time.thread_time()
    for request in range(trace.requests):
        if queue is not None:
            queue.look_ahead(request, run.now(request))
        tally.add(request, run.step(request))
        if queue is not None:
            queue.step(request, run.now(request))
        if progress is not None and request % PROGRESS_REQUESTS == 0:
            progress(request)
    return tally.result(policy.name, capacity, run.evicted, time.thread_time() - began)


class Replay:
    """One tier on its way through a trace."""

    def __init__(self, trace: Trace, policy: Policy, capacity: int, *, ahead_part: int = 0) -> None:
        self.trace = trace
        self.policy = policy
        self.capacity = capacity
        self._ahead_part = ahead_part
        self.tree = LeafTree(trace.parent.tolist(), policy)
        self.evicted = 0
        self._keys: Keys = np.arange(trace.unique, dtype=np.uint64)
        self._starts = trace.starts.tolist()
        self._times: list[float] = trace.times_s.tolist()
        self._offset_s = 1.0 - self._times[0]  # scores are times: they must be above 0

    def now(self, request: int) -> float:
        """Virtual time of a request, above 0."""
        return float(self._times[request] + self._offset_s)

    def step(self, request: int) -> int:
        """The next request; how many of its blocks were hit."""
        path = self.trace.blocks[self._starts[request] : self._starts[request + 1]]
        if not len(path):
            return 0
        now = self.now(request)
        hit = self.tree.hit(path)
        if hit:
            self.policy.touch(path[:hit], now)
            self.tree.rescore(path[:hit])
        if hit < len(path):
            self._store(path, hit, now)
        study_at_once(self.policy, now)
        return hit

    def _store(self, path: Ids, hit: int, now: float) -> None:
        tree, parent = self.tree, int(path[hit - 1]) if hit else NO_BLOCK
        run = path[hit : max(hit, self.capacity)]
        missing = tree.used + len(run) - self.capacity
        if missing > 0:
            if hit:
                tree.hold(parent)
            if self._ahead_part:
                missing_ahead = max(missing, min(tree.used // self._ahead_part, AHEAD_PAGES_MAX))
            else:
                missing_ahead = missing
            gone = np.array(tree.evict(missing_ahead, now), np.int32)
            if len(gone):
                self.policy.left(gone, now)
                self.policy.remove(gone, self._keys[gone], now)
                self.evicted += len(gone)
            if hit:
                tree.let_go(parent)
            run = run[: len(run) - max(0, missing - len(gone))]
        if len(run):
            whole = Run.of(run, parent, hit, self.trace.block_tokens)
            self.policy.insert(run, self._keys[run], whole, now)
            tree.add(run, parent)


class Queue:
    """What a router knows: the next requests, told as hints of when their blocks are used."""

    def __init__(self, trace: Trace, policy: HintedPolicy, requests: int) -> None:
        self._trace = trace
        self._policy = policy
        self._requests = requests
        self._following = next_uses(trace)

    def look_ahead(self, request: int, now: float) -> None:
        """The request is about to be served: hint what those that are new in the queue ask for."""
        trace = self._trace
        if not self._requests:
            return
        newest = min(request + self._requests, trace.requests - 1)
        for each in range(newest if request else 1, newest + 1):
            path = trace.blocks[trace.starts[each] : trace.starts[each + 1]]
            path = path[~np.isfinite(self._policy.expected(path))]
            self._hint(path, np.full(len(path), each), request, now)

    def step(self, request: int, now: float) -> None:
        """The request has been served: hint when what it used is asked for again."""
        if self._requests:
            first, last = self._trace.starts[request], self._trace.starts[request + 1]
            self._hint(self._trace.blocks[first:last], self._following[first:last], request, now)

    def _hint(self, path: Ids, uses: npt.NDArray[np.int64], request: int, now: float) -> None:
        known = uses <= min(request + self._requests, self._trace.requests - 1)
        if known.any():
            times = self._trace.times_s
            wait_s = times[uses[known]] - times[request]
            self._policy.expect(path[known], now + wait_s)


def next_uses(trace: Trace) -> npt.NDArray[np.int64]:
    """For each block reference the request that asks for the block next; `requests` if none."""
    request = np.repeat(np.arange(trace.requests), np.diff(trace.starts))
    order = np.lexsort((request, trace.blocks))
    following = np.full(trace.references, trace.requests, np.int64)
    same = trace.blocks[order[1:]] == trace.blocks[order[:-1]]
    following[order[:-1][same]] = request[order[1:][same]]
    return following
