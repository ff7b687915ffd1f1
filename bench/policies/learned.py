"""LHD (NSDI'18) and the workload-aware policy of "KVCache Cache in the Wild" (ATC'25)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvstore.tiers.survival import BINS, age_place
from policies.columns import ColumnPolicy, within

if TYPE_CHECKING:
    from kvstore.tiers.eviction import Ids, Keys, Run, Scores

REFIT_EVENTS = 50
FADE = 0.98
DEPTHS = 6
USES = 4


class LhdPolicy(ColumnPolicy):
    """Hit density: hits over lifetime still to come, by class of depth and uses, and by age."""

    name = "lhd"

    def __init__(self, capacity_pages: int) -> None:
        super().__init__(capacity_pages)
        self.hits = np.ones((DEPTHS * USES, BINS)) * 1e-3
        self.ends = np.ones((DEPTHS * USES, BINS)) * 1e-3
        self.density = np.tile(np.linspace(1.0, 0.1, BINS), (DEPTHS * USES, 1))
        self.events = 0

    def classes(self, uses: np.ndarray, depth: np.ndarray) -> np.ndarray:
        by_depth = np.minimum(np.log2(depth + 1.0).astype(np.int64), DEPTHS - 1)
        return by_depth * USES + np.minimum(np.log2(np.maximum(uses, 1)).astype(np.int64), USES - 1)

    def count(self, table: np.ndarray, pages: Ids, now: float) -> None:
        ages = age_place(np.maximum(now - self.last[pages], 0.0)).astype(np.int64)
        np.add.at(table, (self.classes(self.uses[pages], self.depth[pages]), ages), 1.0)
        self.events += 1
        if self.events % REFIT_EVENTS == 0:
            self.refit()

    def touch(self, pages: Ids, now: float) -> None:
        self.count(self.hits, pages, now)
        super().touch(pages, now)

    def insert(self, pages: Ids, keys: Keys, run: Run, now: float) -> None:
        rows, known = self.ghosts.find(keys)
        back = pages[known]
        if len(back):  # what would have hit: unbiased only with ghosts
            ages = age_place(np.maximum(now - self.ghosts.time[rows[known]], 0.0)).astype(np.int64)
            depths = run.depths[known]
            cells = self.classes(self.ghosts.a[rows[known]], depths), ages
            np.add.at(self.hits, cells, 1.0)
        super().insert(pages, keys, run, now)

    def left(self, pages: Ids, now: float, tier: int = 0) -> None:
        self.count(self.ends, pages, now)

    def refit(self) -> None:
        width = 0.5 * (1.45 ** np.arange(1, BINS + 1) - 1.45 ** np.arange(BINS))
        events = self.hits + self.ends
        hits = self.hits[:, ::-1].cumsum(axis=1)[:, ::-1]
        alive = events[:, ::-1].cumsum(axis=1)[:, ::-1]
        self.density = hits / (alive * width)[:, ::-1].cumsum(axis=1)[:, ::-1]
        self.hits *= FADE
        self.ends *= FADE

    def scores(self, pages: Ids, now: float, tier: int = 0) -> Scores:
        ages = np.maximum(now - self.last[pages], 0.0)
        classes = self.classes(self.uses[pages], self.depth[pages])
        return within(self.density[classes, age_place(ages).astype(np.int64)] + 1e-9 / (1 + ages))


class WildPolicy(ColumnPolicy):
    """By category (uses) an exponential time to reuse; the chance of one within the usual life of
    an unused page, and of equals the deepest leaves."""

    name = "wild"
    moves = True

    def __init__(self, capacity_pages: int) -> None:
        super().__init__(capacity_pages)
        self.mean_s = np.full(USES, 60.0)
        self.seen = np.ones(USES)
        self.again = np.ones(USES) * 0.5
        self.life_s = 60.0

    def category(self, uses: np.ndarray) -> np.ndarray:
        return np.minimum(uses.astype(np.int64) - 1, USES - 1) % USES

    def learn(self, uses: np.ndarray, ages: Scores) -> None:
        for each in range(USES):
            mine = ages[self.category(uses) == each]
            if len(mine):
                self.mean_s[each] += 0.05 * (float(mine.mean()) - self.mean_s[each])
                self.again[each] += len(mine)

    def insert(self, pages: Ids, keys: Keys, run: Run, now: float) -> None:
        rows, known = self.ghosts.find(keys)
        if known.any():
            self.learn(self.ghosts.a[rows[known]], now - self.ghosts.time[rows[known]])
        super().insert(pages, keys, run, now)
        self.seen += np.bincount(self.category(self.uses[pages]), minlength=USES)

    def touch(self, pages: Ids, now: float) -> None:
        self.learn(self.uses[pages], now - self.last[pages])
        super().touch(pages, now)
        self.seen += np.bincount(self.category(self.uses[pages]), minlength=USES)

    def left(self, pages: Ids, now: float, tier: int = 0) -> None:
        self.life_s += 0.02 * (float((now - self.last[pages]).mean()) - self.life_s)

    def scores(self, pages: Ids, now: float, tier: int = 0) -> Scores:
        each = self.category(self.uses[pages])
        ages, mean = now - self.last[pages], self.mean_s[each]
        chance = np.exp(-ages / mean) * -np.expm1(-max(self.life_s, 1.0) / mean)
        chance *= np.minimum(self.again[each] / self.seen[each], 1.0)
        return within(chance + 1e-9 / (1.0 + self.depth[pages]) + 1e-12 / (1.0 + ages))
