"""What is counted over all pages, counted again piece by piece while pages come, go and move.

A walk looks at the rows of the page table in order. What changes behind it is told as it happens
and counted at once; what changes before it will be seen. So at any moment the numbers are those of
the rows behind the walk, and at its end, and from then on, those of all pages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvstore.prefix_index.page_table import HAS_EXTRAS, NO_PAGE, PAGES_MAX, TIERS, Ids

if TYPE_CHECKING:
    from kvstore.prefix_index.page_table import PageTable
    from kvstore.prefix_index.residency import Residency


class Recount:
    """Pages by tier and by tree, and of each page its active children by tier."""

    def __init__(self, table: PageTable) -> None:
        self._table = table
        self._stop = 0  # rows below it are behind the walk
        self.counts = [0] * TIERS
        self.pages: dict[int, int] = {}  # by number of a tree
        self.with_extras: dict[int, int] = {}
        self._below = [np.zeros(0, np.int32) for _ in range(TIERS)]

    def look(self, live: Ids, trees: Ids, stop: int, residency: Residency) -> None:
        """At the live pages of the next rows, and their trees; the rows end at `stop`."""
        self._stop = stop
        for tier in range(TIERS):
            self.counts[tier] += int(np.count_nonzero(self._table.state[live] >> tier & 1))
            self._add(live[residency.active(live, tier)], tier, 1)
        for number in np.unique(trees).tolist():
            self.came(number, live[trees == number], 1)

    def end(self) -> None:
        """All rows are behind it, those to come included."""
        self._stop = PAGES_MAX

    def below(self, pages: Ids, tier: int) -> Ids:
        """Active children of these pages, as counted."""
        self._make_room(tier)
        return self._below[tier][pages]

    def moved(self, pages: Ids, tier: int, step: int) -> None:
        """Pages have come into a tier (1), or left it (-1)."""
        self.counts[tier] += step * int(np.count_nonzero(pages < self._stop))

    def turned(self, pages: Ids, tier: int, step: int) -> None:
        """Pages have turned active in a tier (1), or inactive (-1)."""
        self._add(pages[pages < self._stop], tier, step)

    def came(self, tree: int, pages: Ids, step: int) -> None:
        """Pages are in a tree now (1), or about to be forgotten (-1)."""
        seen = pages[pages < self._stop]
        flagged = np.count_nonzero(self._table.state[seen] & HAS_EXTRAS)
        self.pages[tree] = self.pages.get(tree, 0) + step * len(seen)
        self.with_extras[tree] = self.with_extras.get(tree, 0) + step * int(flagged)

    def _add(self, pages: Ids, tier: int, step: int) -> None:
        if not len(pages):
            return
        self._make_room(tier)
        parents = self._table.parent[pages]
        np.add.at(self._below[tier], parents[parents != NO_PAGE], step)

    def _make_room(self, tier: int) -> None:
        rows = len(self._table.state)
        if len(self._below[tier]) < rows:
            longer = np.zeros(rows, np.int32)
            longer[: len(self._below[tier])] = self._below[tier]
            self._below[tier] = longer
