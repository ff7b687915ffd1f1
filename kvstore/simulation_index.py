"""The same replay through the store's own prefix index: its trees, its leaf rule, its sweep.

Slower than simulation.py by an order of magnitude, and there to hold it to the truth: a test
replays traces through both and compares every request. Pages hold one token each, its number.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from kvstore.prefix_index.index import PrefixIndex
from kvstore.prefix_index.page_table import HOST, NO_PAGE
from kvstore.simulation import PROGRESS_REQUESTS, Hits, Tally
from kvstore.tiers.eviction import Run, study_at_once
from kvstore.tiers.page_cost import EVEN_TOKENS

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.tiers.eviction import Ids, Keys, Policy
    from kvstore.trace import Trace

_ROOT = bytes(32)


class IndexReplay:
    """One tier of the real index on its way through a trace; a copy of Replay's rules."""

    def __init__(self, trace: Trace, policy: Policy, capacity: int) -> None:
        self.trace = trace
        self.policy = policy
        self.capacity = capacity
        self.index = PrefixIndex(pages_expected=min(capacity, trace.unique) + 1)
        self.evicted = 0
        self._offset_s = 1.0 - float(trace.times_s[0])
        self._sequence = 1

    def step(self, request: int) -> int:
        """The next request; how many of its blocks were hit."""
        starts = self.trace.starts
        path = self.trace.blocks[starts[request] : starts[request + 1]]
        now = float(self.trace.times_s[request]) + self._offset_s
        if not len(path):
            return 0
        found = self.index.match(_ROOT, path)
        hit = len(found)
        if hit:
            self.index.touch(found, now)
            self.policy.touch(found, now)
        if hit < len(path):
            self._store(path, found, now)
        study_at_once(self.policy, now)
        return hit

    def _store(self, path: Ids, found: Ids, now: float) -> None:
        index, hit = self.index, len(found)
        parent = int(found[-1]) if hit else NO_PAGE
        run = path[hit : max(hit, self.capacity)]
        missing = len(index) + len(run) - self.capacity
        if missing > 0:
            if hit:
                index.lease(parent)
            gone = index.coldest(
                HOST, now, pages=missing, score=lambda pages: self.policy.scores(pages, now)
            )
            if len(gone):
                self.policy.left(gone, now)
                self.policy.remove(gone, self._keys(gone), now)
                index.clear_tier(gone, HOST)
                index.remove(gone)
                self.evicted += len(gone)
            if hit:
                index.unlease(parent)
            run = run[: len(run) - (missing - len(gone))]
        if len(run):
            self._insert(run, parent, hit, now)

    def _insert(self, run: Ids, parent: int, hit: int, now: float) -> None:
        count, index = len(run), self.index
        keys = np.zeros((count, 2), np.uint64)
        keys[:, 0] = run
        pages = index.insert(
            _ROOT,
            1,
            parent,
            run.astype("<i4").tobytes(),
            None,
            keys.tobytes(),
            np.arange(self._sequence, self._sequence + count, dtype=np.uint64),
            1,
            np.zeros((count, 2), np.uint64),
            now,
        )
        self._sequence += count
        index.set_tier(pages, HOST, np.arange(count, dtype=np.int64))
        whole = Run.of(pages, parent, hit, self.trace.block_tokens)
        self.policy.insert(pages, keys[:, 0], whole, now)

    def _keys(self, pages: Ids) -> Keys:
        keys: Keys = self.index.table.key[pages, 0]
        return keys


def replay_index(
    trace: Trace,
    policy: Policy,
    capacity: int,
    *,
    warmup_s: float = 0.0,
    even_tokens: float = EVEN_TOKENS,
    progress: Callable[[int], None] | None = None,
) -> Hits:
    """What simulation.replay does, through the real index."""
    tally, run = Tally(trace, warmup_s, even_tokens), IndexReplay(trace, policy, capacity)
    began = time.thread_time()
    for request in range(trace.requests):
        tally.add(request, run.step(request))
        if progress is not None and request % PROGRESS_REQUESTS == 0:
            progress(request)
    return tally.result(policy.name, capacity, run.evicted, time.thread_time() - began)
