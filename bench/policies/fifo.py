"""S3-FIFO and SIEVE, put into scores: what a hand would do when it comes by is done at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvstore.tiers.eviction import PAGES_FIRST, grown
from policies.columns import ColumnPolicy, within

if TYPE_CHECKING:
    from kvstore.tiers.eviction import Ids, Keys, Run, Scores

SMALL_PART = 0.1
_BAND = 2.0**40


class S3FifoPolicy(ColumnPolicy):
    """A small queue for new pages; those used twice there, or known to a ghost, go to the main one.

    In the main queue each use is worth one more round of it.
    """

    name = "s3-fifo"
    remembers = False

    def __init__(self, capacity_pages: int) -> None:
        super().__init__(capacity_pages)
        self.main = np.zeros(PAGES_FIRST, bool)
        self.small = 0
        self.round_s = 0.0

    def insert(self, pages: Ids, keys: Keys, run: Run, now: float) -> None:
        known = self.ghosts.find(keys)[1]
        super().insert(pages, keys, run, now)
        self.main = grown(self.main, pages)
        self.main[pages] = known
        self.small += len(pages) - int(known.sum())
        self.uses[pages] = 0

    def touch(self, pages: Ids, now: float) -> None:
        self.uses[pages] = np.minimum(self.uses[pages] + 1, 3)
        up = pages[~self.main[pages] & (self.uses[pages] > 1)]
        self.main[up] = True
        self.small -= len(up)
        self.first[up], self.uses[up] = now, 0

    def scores(self, pages: Ids, now: float, tier: int = 0) -> Scores:
        spared = self.small > SMALL_PART * self.capacity
        place = self.first[pages] + self.uses[pages] * self.round_s * self.main[pages]
        return within(place + np.where(self.main[pages] == spared, _BAND, 0.0))

    def left(self, pages: Ids, now: float, tier: int = 0) -> None:
        old = pages[self.main[pages]]
        if len(old):
            self.round_s += 0.05 * (float((now - self.first[old]).mean()) - self.round_s)

    def remove(self, pages: Ids, keys: Keys, now: float) -> None:
        super().remove(pages, keys, now)
        self.small -= int((~self.main[pages]).sum())
        self.main[pages] = True


class SievePolicy(ColumnPolicy):
    """One queue and a hand from old to new: visited pages lose their mark where it has passed."""

    name = "sieve"
    remembers = False

    def __init__(self, capacity_pages: int) -> None:
        super().__init__(capacity_pages)
        self.marked = np.zeros(PAGES_FIRST, bool)
        self.hand = 0.0

    def insert(self, pages: Ids, keys: Keys, run: Run, now: float) -> None:
        super().insert(pages, keys, run, now)
        self.marked = grown(self.marked, pages)
        self.marked[pages] = False

    def touch(self, pages: Ids, now: float) -> None:
        self.marked[pages] = True

    def scores(self, pages: Ids, now: float, tier: int = 0) -> Scores:
        first = self.first[pages]
        ahead = np.where(first >= self.hand, 0.0, _BAND)
        return within(first + ahead + np.where(self.marked[pages], 2 * _BAND, 0.0))

    def left(self, pages: Ids, now: float, tier: int = 0) -> None:
        reached = float(self.first[pages[-1]])
        passed = (self.first >= self.hand) & (self.first <= reached)
        if reached < self.hand:  # it has gone round
            passed = (self.first >= self.hand) | (self.first <= reached)
        self.marked[: len(passed)] &= ~passed[: len(self.marked)]
        self.hand = reached
