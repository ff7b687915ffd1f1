"""The tree of a simulated tier: which blocks are resident, and who leaves next.

The leaf rule of the real index on nothing but columns by block number: a block is a leaf as long as
no child of it is resident. Policies whose scores stand still are kept in a heap of leaves, one push
a request; those whose scores move are asked about all leaves each time. Invariant: what is resident
is whole chains.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    from kvstore.tiers.eviction import Ids, Policy

NO_BLOCK = -1
HEAP_SPARE = 4096  # entries of blocks that are no leaf any more, or warmer, before they are dropped
_RUN = 32  # so many ancestors are scored at once when the first of them has become a leaf


class LeafTree:
    """Resident blocks of one tier, and the policy that chooses among their leaves."""

    def __init__(self, parent: list[int], policy: Policy, tier: int = 0) -> None:
        """parent: of each block, NO_BLOCK where it has none. Of an absent block it may change."""
        self._policy = policy
        self._tier = tier
        self._parent = parent
        self._score = np.zeros(len(parent))
        self.resident = np.zeros(len(parent), bool)
        self.children = np.zeros(len(parent), np.int32)  # resident, or holding
        self._leaf = np.zeros(len(parent), bool)
        self._heap: list[tuple[float, int]] = []
        self.used = 0

    def hit(self, path: Ids) -> int:
        """How many blocks of a request are there, from its first on."""
        here = self.resident[path]
        return len(path) if here.all() else int(here.argmin())

    def hold(self, block: int) -> None:
        """The block and all above it stay until let_go()."""
        self.children[block] += 1
        self._leaf[block] = False

    def let_go(self, block: int) -> None:
        self.children[block] -= 1
        self._offer(block)

    def add(self, run: Ids, parent: int) -> None:
        """A run of one chain becomes resident; the policy knows it already."""
        self.resident[run] = True
        self.children[run[:-1]] += 1
        if parent != NO_BLOCK:
            self.children[parent] += 1
            self._leaf[parent] = False
        self.used += len(run)
        self.rescore(run)
        self._offer(int(run[-1]))

    def rescore(self, blocks: Ids) -> None:
        """Blocks were used: their scores have changed."""
        if not self._policy.moves and len(blocks):
            self._score[blocks] = self._policy.scores(blocks, 0.0, self._tier)
            last = int(blocks[-1])
            if self._leaf[last]:
                heapq.heappush(self._heap, (float(self._score[last]), last))
                if len(self._heap) > 2 * self.used + HEAP_SPARE:
                    self._refill()

    def evict(self, count: int, now: float) -> list[int]:
        """Up to `count` victims, coldest first, gone from here when it returns."""
        if count <= 0:
            return []
        gone = self._sweep(count, now) if self._policy.moves else self._pop(count)
        self.used -= len(gone)
        return gone

    def take_out(self, block: int) -> None:
        """A leaf leaves on somebody else's word."""
        self._leave(block)
        self.used -= 1
        above = self._parent[block]
        if above != NO_BLOCK:
            self._offer(above)

    def is_leaf(self, block: int) -> bool:
        return bool(self._leaf[block])

    def rebuild(self, resident: npt.NDArray[np.bool_]) -> None:
        """Go on with some of the blocks; the parents of those have changed to resident ones."""
        self.resident[:] = resident
        self.used = int(resident.sum())
        parents = np.array(self._parent, np.int32)[resident]
        counted = np.bincount(parents[parents != NO_BLOCK], minlength=len(resident))
        self.children[:] = counted
        self._leaf[:] = resident & (counted == 0)
        self._refill()

    def check(self) -> None:
        """Recount; raises AssertionError with the numbers."""
        assert int(self.resident.sum()) == self.used, f"{self.used} counted"
        parents = np.array(self._parent, np.int32)[self.resident]
        parents = parents[parents != NO_BLOCK]
        assert self.resident[parents].all(), "a block is resident without its parent"
        counted = np.bincount(parents, minlength=len(self.resident))
        assert (counted == self.children).all(), "children are miscounted"
        assert (self._leaf == (self.resident & (counted == 0))).all(), "leaves are wrong"

    def _offer(self, block: int) -> None:
        if self.resident[block] and not self.children[block]:
            self._leaf[block] = True
            if not self._policy.moves:
                heapq.heappush(self._heap, (float(self._score[block]), block))

    def _refill(self) -> None:
        """The heap without entries that say nothing any more."""
        leaves = np.flatnonzero(self._leaf)
        self._heap = list(zip(self._score[leaves].tolist(), leaves.tolist(), strict=True))
        heapq.heapify(self._heap)

    def _leave(self, block: int) -> int:
        """Take a leaf out; its parent if that is a leaf now."""
        self.resident[block] = False
        self._leaf[block] = False
        above = self._parent[block]
        if above == NO_BLOCK:
            return NO_BLOCK
        left = self.children[above] - 1
        self.children[above] = left
        if left or not self.resident[above]:
            return NO_BLOCK
        self._leaf[above] = True
        return above

    def _pop(self, count: int) -> list[int]:
        """By the heap: entries of blocks that are no leaf any more, or warmer, are skipped."""
        heap, score, leaf = self._heap, self._score, self._leaf
        gone: list[int] = []
        while len(gone) < count and heap:
            worth, block = heapq.heappop(heap)
            if not leaf[block] or score[block] != worth:
                continue
            while True:
                gone.append(block)
                above = self._leave(block)
                if above == NO_BLOCK:
                    break
                worth = float(score[above])
                if len(gone) == count or (heap and heap[0][0] < worth):
                    heapq.heappush(heap, (worth, above))
                    break
                block = above
        return gone

    def _sweep(self, count: int, now: float) -> list[int]:
        """By the scores of all leaves at this moment, and of what becomes one."""
        leaves = np.flatnonzero(self._leaf).astype(np.int32)
        scores = self._policy.scores(leaves, now, self._tier)
        if len(leaves) > count:
            best = np.argpartition(scores, count - 1)[:count]
            leaves, scores = leaves[best], scores[best]
        order = np.argsort(scores, kind="stable")
        heap = list(zip(scores[order].tolist(), leaves[order].tolist(), strict=True))
        known: dict[int, float] = {}
        gone: list[int] = []
        while len(gone) < count and heap:
            block = heapq.heappop(heap)[1]
            gone.append(block)
            above = self._leave(block)
            if above != NO_BLOCK:
                worth = known.get(above)
                if worth is None:
                    worth = self._score_run(above, min(_RUN, count - len(gone)), now, known)
                heapq.heappush(heap, (worth, above))
        return gone

    def _score_run(self, block: int, count: int, now: float, known: dict[int, float]) -> float:
        """Score a block, and those above it that will soon be leaves."""
        run = [block]
        while len(run) < count and (block := self._parent[block]) != NO_BLOCK:
            if self.children[block] != 1 or not self.resident[block]:
                break
            run.append(block)
        scores = self._policy.scores(np.array(run, np.int32), now, self._tier).tolist()
        known.update(zip(run, scores, strict=True))
        return float(scores[0])
