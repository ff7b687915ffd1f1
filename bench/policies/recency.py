"""LRU-2 and segmented LRU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvstore.tiers.eviction import PAGES_FIRST, grown
from policies.columns import ColumnPolicy, within

if TYPE_CHECKING:
    from kvstore.tiers.eviction import Ids, Keys, Run, Scores

_ONCE = 2.0**-20  # of pages without a second last use: among themselves by the last one
PROTECTED_PART = 0.8


class Lru2Policy(ColumnPolicy):
    """The second last use decides (O'Neil, 1993); ghosts keep the last one of pages that left."""

    name = "lru-2"
    moves = False

    def __init__(self, capacity_pages: int) -> None:
        super().__init__(capacity_pages)
        self.before = np.zeros(PAGES_FIRST)

    def insert(self, pages: Ids, keys: Keys, run: Run, now: float) -> None:
        rows, known = self.ghosts.find(keys)
        before = np.where(known, self.ghosts.time[rows], 0.0)
        super().insert(pages, keys, run, now)
        self.before = grown(self.before, pages)
        self.before[pages] = before

    def touch(self, pages: Ids, now: float) -> None:
        self.before[pages] = self.last[pages]
        super().touch(pages, now)

    def scores(self, pages: Ids, now: float, tier: int = 0) -> Scores:
        before = self.before[pages]
        return within(np.where(before > 0, before, self.last[pages] * _ONCE))


class SlruPolicy(ColumnPolicy):
    """Pages used again are protected, as long as they are at most PROTECTED_PART of all."""

    name = "slru"
    remembers = False

    def __init__(self, capacity_pages: int) -> None:
        super().__init__(capacity_pages)
        self.protected = np.zeros(PAGES_FIRST, bool)

    def insert(self, pages: Ids, keys: Keys, run: Run, now: float) -> None:
        super().insert(pages, keys, run, now)
        self.protected = grown(self.protected, pages)
        self.protected[pages] = False

    def touch(self, pages: Ids, now: float) -> None:
        super().touch(pages, now)
        self.protected[pages] = True
        most = int(PROTECTED_PART * self.capacity)
        inside = np.flatnonzero(self.protected)
        if len(inside) > most:
            oldest = np.argpartition(self.last[inside], len(inside) - most)[: len(inside) - most]
            self.protected[inside[oldest]] = False

    def remove(self, pages: Ids, keys: Keys, now: float) -> None:
        super().remove(pages, keys, now)
        self.protected[pages] = False

    def scores(self, pages: Ids, now: float, tier: int = 0) -> Scores:
        return within(self.last[pages] + np.where(self.protected[pages], 2.0**40, 0.0))
