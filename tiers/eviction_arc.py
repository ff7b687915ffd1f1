"""ARC: two lists, of pages used once and of pages used again, and a target size for the first.

Megiddo and Modha, FAST'03: a miss that a ghost of the first list remembers grows the target, one
that a ghost of the second remembers shrinks it. By leaves: what leaves is the least recently used
leaf of the list that is over its target, or of the other where that has none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvstore.tiers.eviction import PAGES_FIRST, SCORE_MAX, SCORE_MIN, Policy, grown
from kvstore.tiers.ghost_table import GhostTable

if TYPE_CHECKING:
    from kvstore.tiers.eviction import Ids, Keys, Run, Scores, Study

ONCE = 1
AGAIN = 2
_BEHIND = 2.0**40  # seconds: a list that is not to give stands behind the other by this


class ArcPolicy(Policy):
    """Adaptive replacement, after as many ghosts as there are pages."""

    name = "arc"
    moves = True

    def __init__(self, capacity_pages: int) -> None:
        self._capacity = capacity_pages
        self._last = np.zeros(PAGES_FIRST)
        self._list = np.zeros(PAGES_FIRST, np.uint8)  # 0: no page in this row
        self._ghosts = GhostTable(capacity_pages)
        self._pages = [0, 0, 0]  # by list
        self._ghosts_of = [0, 0, 0]
        self._target = 0.0  # pages of the list ONCE

    def insert(self, pages: Ids, keys: Keys, run: Run, now: float) -> None:
        self._last = grown(self._last, pages)
        self._list = grown(self._list, pages)
        rows, known = self._ghosts.find(keys)
        lists = np.full(len(pages), ONCE, np.uint8)
        if known.any():
            back = rows[known]
            once = int((self._ghosts.a[back] == ONCE).sum())
            self._adapt(once, len(back) - once)
            self._ghosts.forget(back)
            lists[known] = AGAIN
        self._last[pages] = now
        self._list[pages] = lists
        again = int((lists == AGAIN).sum())
        self._pages[AGAIN] += again
        self._pages[ONCE] += len(pages) - again

    def restore(self, pages: Ids, keys: Keys, run: Run, last: Scores) -> None:
        self._last = grown(self._last, pages)
        self._list = grown(self._list, pages)
        self._last[pages] = last
        again = 0 if run.uses is None else int((run.uses > 1).sum())
        self._list[pages] = ONCE if run.uses is None else np.where(run.uses > 1, AGAIN, ONCE)
        self._pages[AGAIN] += again
        self._pages[ONCE] += len(pages) - again

    def touch(self, pages: Ids, now: float) -> None:
        self._last[pages] = now
        moved = int((self._list[pages] == ONCE).sum())
        self._list[pages] = AGAIN
        self._pages[ONCE] -= moved
        self._pages[AGAIN] += moved

    def scores(self, pages: Ids, now: float, tier: int = 0) -> Scores:
        """Seconds of the last use, and a long time more for the list that is within its target."""
        spared = AGAIN if self._pages[ONCE] > self._target else ONCE
        behind = np.where(self._list[pages] == spared, _BEHIND, 0.0)
        found: Scores = np.clip(self._last[pages] + behind, SCORE_MIN, SCORE_MAX)
        return found

    def left(self, pages: Ids, now: float, tier: int = 0) -> None:
        """Nothing to learn; the ghosts will tell."""

    def remove(self, pages: Ids, keys: Keys, now: float) -> None:
        ghosts, lists = self._ghosts, self._list[pages]
        rows, known = ghosts.find(keys)
        lost = ghosts.a[rows[(ghosts.tag[rows] != 0) & ~known]]
        for each in (ONCE, AGAIN):
            gone = int((lists == each).sum())
            self._pages[each] -= gone
            self._ghosts_of[each] += gone - int((lost == each).sum())
        ghosts.put(keys, self._last[pages], lists, np.zeros(len(pages), np.uint8))
        self._list[pages] = 0

    def study(self, now: float) -> Study | None:
        return None

    def _adapt(self, once: int, again: int) -> None:
        """So many ghosts of each list were asked for."""
        ghosts = [max(1, each) for each in self._ghosts_of]
        grow = once * max(1.0, ghosts[AGAIN] / ghosts[ONCE])
        shrink = again * max(1.0, ghosts[ONCE] / ghosts[AGAIN])
        self._target = min(max(0.0, self._target + grow - shrink), float(self._capacity))
        self._ghosts_of[ONCE] -= once
        self._ghosts_of[AGAIN] -= again
