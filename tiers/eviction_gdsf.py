"""GDSF: how often a page was used times what recomputing it costs, with aging (Cherkasova, 1998).

A page's worth is L + uses * cost / bytes; L is the worth of the last one that left, so what was
worth much once does not stay for ever. Cost is prefill time, which grows with the depth of a page,
attention being quadratic (page_cost.py); counts of uses outlive a page in its ghost.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvstore.tiers.eviction import PAGES_FIRST, SCORE_MIN, Policy, grown
from kvstore.tiers.ghost_table import GhostTable
from kvstore.tiers.page_cost import PageCost

if TYPE_CHECKING:
    from kvstore.tiers.eviction import Ids, Keys, Run, Scores, Study

GHOSTS_PER_PAGE = 8
_BY_RECENCY = 1e-9  # a second: it decides between equals


class GdsfPolicy(Policy):
    """Greedy dual size frequency."""

    name = "gdsf"
    moves = False

    def __init__(self, capacity_pages: int, cost: PageCost | None = None) -> None:
        self._cost_of = cost or PageCost()
        self._age = 0.0
        self._began = 0.0  # when it was told something first
        self._uses = np.zeros(PAGES_FIRST, np.uint8)
        self._cost = np.ones(PAGES_FIRST)
        self._worth = np.full(PAGES_FIRST, SCORE_MIN)
        self._ghosts = GhostTable(GHOSTS_PER_PAGE * capacity_pages)

    def insert(self, pages: Ids, keys: Keys, run: Run, now: float) -> None:
        self._make_room(pages)
        rows, known = self._ghosts.find(keys)
        uses = np.zeros(len(pages), np.uint8)
        uses[known] = self._ghosts.a[rows[known]]
        self._ghosts.forget(rows[known])
        self._uses[pages] = uses
        self._cost[pages] = self._cost_of.of(run)
        self.touch(pages, now)

    def restore(self, pages: Ids, keys: Keys, run: Run, last: Scores) -> None:
        self._make_room(pages)
        self._uses[pages] = uses = 1 if run.uses is None else run.uses
        self._cost[pages] = self._cost_of.of(run)
        self._worth[pages] = self._age + uses * self._cost[pages] + self._recency(last)

    def touch(self, pages: Ids, now: float) -> None:
        uses = self._uses[pages]
        uses += uses < 255
        self._uses[pages] = uses
        self._worth[pages] = self._age + uses * self._cost[pages] + self._recency(now)

    def scores(self, pages: Ids, now: float, tier: int = 0) -> Scores:
        found: Scores = np.maximum(self._worth[pages], SCORE_MIN)
        return found

    def left(self, pages: Ids, now: float, tier: int = 0) -> None:
        self._age = max(self._age, float(self._worth[pages].max()))

    def remove(self, pages: Ids, keys: Keys, now: float) -> None:
        none = np.zeros(len(pages), np.uint8)
        self._ghosts.put(keys, np.full(len(pages), now), self._uses[pages], none)

    def study(self, now: float) -> Study | None:
        return None

    def _recency(self, last: Scores | float) -> Scores | float:
        """Far less than any use is worth, also where clocks began long ago."""
        if not self._began:
            self._began = float(np.max(last))
        return _BY_RECENCY * (last - self._began)

    def _make_room(self, pages: Ids) -> None:
        if len(pages) and int(pages.max()) < len(self._uses):
            return
        self._uses = grown(self._uses, pages)
        self._cost = grown(self._cost, pages)
        self._worth = grown(self._worth, pages)
