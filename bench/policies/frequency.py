"""LFU with dynamic aging, and RAGCache's prefix-aware GDSF."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvstore.tiers.eviction import PAGES_FIRST, grown
from policies.columns import ColumnPolicy, within

if TYPE_CHECKING:
    from kvstore.tiers.eviction import Ids, Keys, Run, Scores

_BY_RECENCY = 1e-9


class LfuDaPolicy(ColumnPolicy):
    """Uses plus the worth of the last page that left (Arlitt, 1999). Uses are kept in ghosts."""

    name = "lfu-da"
    moves = False

    def __init__(self, capacity_pages: int) -> None:
        super().__init__(capacity_pages)
        self.age = 0.0
        self.worth = np.zeros(PAGES_FIRST)

    def insert(self, pages: Ids, keys: Keys, run: Run, now: float) -> None:
        super().insert(pages, keys, run, now)
        self.worth = grown(self.worth, pages)
        self.weigh(pages, now)

    def touch(self, pages: Ids, now: float) -> None:
        super().touch(pages, now)
        self.weigh(pages, now)

    def weigh(self, pages: Ids, now: float) -> None:
        self.worth[pages] = self.age + self.gain(pages) + _BY_RECENCY * now

    def gain(self, pages: Ids) -> Scores:
        return self.uses[pages].astype(np.float64)

    def scores(self, pages: Ids, now: float, tier: int = 0) -> Scores:
        return within(self.worth[pages])

    def left(self, pages: Ids, now: float, tier: int = 0) -> None:
        self.age = max(self.age, float(self.worth[pages].max()))


class PgdsfPolicy(LfuDaPolicy):
    """Uses times the mean cost of a token over the prefix that a use of this page needs."""

    name = "pgdsf"

    def gain(self, pages: Ids) -> Scores:
        return self.uses[pages] * (1.0 + self.depth[pages] / 2 / 30.0)
