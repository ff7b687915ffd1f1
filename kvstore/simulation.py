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

from kvstore.simulated_tree import SimulatedTree
from kvstore.trace import NO_BLOCK

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.tiers.eviction import Ids, Keys, Policy
    from kvstore.trace import Trace

# Prefill costs 1 + position / this many tokens a token: where attention costs as much as the rest.
# About 30 K for a model of 8 B parameters, 3 K for one of 135 M.
EVEN_TOKENS = 30_000
PROGRESS_REQUESTS = 500


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
    evicted: int
    references_per_s: float

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

    def result(self, policy: str, capacity: int, evicted: int, seconds: float) -> Hits:
        starts, ends = self._starts[self.first : -1], self._starts[self.first + 1 :]
        hits = self._hits[self.first :]
        references, hit = int((ends - starts).sum()), int(hits.sum())
        tokens = int((self._tokens[ends] - self._tokens[starts]).sum())
        hit_tokens = int((self._tokens[starts + hits] - self._tokens[starts]).sum())
        work = float((self._work[ends] - self._work[starts]).sum())
        saved = float((self._work[starts + hits] - self._work[starts]).sum())
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
            compute_ratio=saved / work if work else 0.0,
            evicted=evicted,
            references_per_s=int(self._starts[-1]) / max(seconds, 1e-9),
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
    progress: Callable[[int], None] | None = None,
) -> Hits:
    """Run one policy at one capacity, in blocks of the trace."""
    tally = Tally(trace, warmup_s, even_tokens)
    run = Replay(trace, policy, capacity)
    began = time.perf_counter()
    for request in range(trace.requests):
        tally.add(request, run.step(request))
        if progress is not None and request % PROGRESS_REQUESTS == 0:
            progress(request)
    return tally.result(policy.name, capacity, run.evicted, time.perf_counter() - began)


class Replay:
    """One tier on its way through a trace."""

    def __init__(self, trace: Trace, policy: Policy, capacity: int) -> None:
        self.trace = trace
        self.policy = policy
        self.capacity = capacity
        self.tree = SimulatedTree(trace, policy)
        self.evicted = 0
        self._keys: Keys = np.arange(trace.unique, dtype=np.uint64)
        self._starts = trace.starts.tolist()
        self._times = trace.times_s.tolist()
        self._offset_s = 1.0 - self._times[0]  # scores are times: they must be above 0

    def step(self, request: int) -> int:
        """The next request; how many of its blocks were hit."""
        path = self.trace.blocks[self._starts[request] : self._starts[request + 1]]
        if not len(path):
            return 0
        now = self._times[request] + self._offset_s
        hit = self.tree.hit(path)
        if hit:
            self.policy.touch(path[:hit], now)
            self.tree.rescore(path[:hit])
        if hit < len(path):
            self._store(path, hit, now)
        return hit

    def _store(self, path: Ids, hit: int, now: float) -> None:
        tree, parent = self.tree, int(path[hit - 1]) if hit else NO_BLOCK
        run = path[hit : max(hit, self.capacity)]
        missing = tree.used + len(run) - self.capacity
        if missing > 0:
            if hit:
                tree.hold(parent)
            gone = np.array(tree.evict(missing, now), np.int32)
            if len(gone):
                self.policy.left(gone, now)
                self.policy.remove(gone, self._keys[gone], now)
                self.evicted += len(gone)
            if hit:
                tree.let_go(parent)
            run = run[: len(run) - (missing - len(gone))]
        if len(run):
            self.policy.insert(run, self._keys[run], hit, self.trace.block_tokens, now)
            tree.add(run, parent)
