"""CSL: classes of pages, and for each a survival curve learnt from all uses, ghosts included.

A page's class is how often it was used (kept in ghosts), and how many tokens came with it. What
leaves is what is worth least: the best chance of a use for each second held (survival.py), by cost
if asked to. With nothing learnt it is least recently used.

Its parents: reuse by category ("KVCache Cache in the Wild", ATC'25), hit density (LHD), cost
(GDSF), ghosts (ARC), Kaplan-Meier, Gittins' index. Weighed and refused: the chance of a use within
the age at which pages leave (it feeds back on itself: 3 points lost where tau fell), more classes
of frequency than 1, 2 and above (1 point lost, as each has to be learnt), classes by depth, and by
how many requests had ended on the path when the page came (nothing won).
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvstore.tiers.eviction import PAGES_FIRST, Policy, Study, grown, rows_of
from kvstore.tiers.ghost_table import GhostTable
from kvstore.tiers.page_cost import PageCost
from kvstore.tiers.survival import SurvivalTable

if TYPE_CHECKING:
    import numpy.typing as npt

    from kvstore.tiers.eviction import Ids, Keys, Run, Scores

FREQUENCY_EDGES = (2, 3)  # buckets 1 | 2 | 3+
TOKEN_EDGES = (2048, 8192, 32768)
FREQUENCIES = len(FREQUENCY_EDGES) + 1
LENGTHS = len(TOKEN_EDGES) + 1
GHOSTS_PER_PAGE = 8
REFIT_EVENTS = 50
# Rows looked at, of pages and of ghosts, to count open intervals: a sample of the table.
SAMPLE_ROWS = 1 << 14
_BY_RECENCY = 1e-12  # so much of a score is the age alone: it decides between equals

_bucket = np.zeros(256, np.uint8)
for _edge in FREQUENCY_EDGES:
    _bucket[_edge:] += 1


class CslPolicy(Policy):
    """See above. `cost` says what a use of a page is worth."""

    name = "csl"
    moves = True

    def __init__(self, capacity_pages: int, cost: PageCost | None = None) -> None:
        self._cost_of = cost or PageCost()
        self._weighs = False  # whether any page was ever worth something else than 1
        self._last = np.zeros(PAGES_FIRST)
        self._frequency = np.zeros(PAGES_FIRST, np.uint8)  # 0: no page in this row
        self._length = np.zeros(PAGES_FIRST, np.uint8)  # bucket of the tokens that it came with
        self._cost = np.ones(PAGES_FIRST)
        self._rows = 0
        self._ghosts = GhostTable(GHOSTS_PER_PAGE * capacity_pages)
        self._table = SurvivalTable(FREQUENCIES * LENGTHS)
        self._events = 0

    def insert(self, pages: Ids, keys: Keys, run: Run, now: float) -> None:
        self._make_room(pages)
        rows, known = self._ghosts.find(keys)
        frequency = np.ones(len(pages), np.uint8)
        length = bisect_right(TOKEN_EDGES, run.tokens)
        lengths = np.full(len(pages), length, np.uint8)
        if known.any():
            back = rows[known]
            old, kept = self._ghosts.a[back], self._ghosts.b[back]
            self._table.close(_class(old, kept), now - self._ghosts.time[back])
            frequency[known] = old + (old < 255)
            lengths[known] = kept
            self._ghosts.forget(back)
        self._last[pages] = now
        self._frequency[pages] = frequency
        self._length[pages] = lengths
        self._weigh(pages, run)
        self._events += 1

    def restore(self, pages: Ids, keys: Keys, run: Run, last: Scores) -> None:
        self._make_room(pages)
        self._last[pages] = last
        self._frequency[pages] = 1 if run.uses is None else run.uses
        self._weigh(pages, run)

    def touch(self, pages: Ids, now: float) -> None:
        rows = rows_of(pages)
        frequency = self._frequency[rows]
        self._table.close(_class(frequency, self._length[rows]), now - self._last[rows])
        self._last[rows] = now
        self._frequency[rows] = frequency + (frequency < 255)
        self._events += 1

    def scores(self, pages: Ids, now: float, tier: int = 0) -> Scores:
        """Hits a second at best, times what a hit is worth."""
        ages = np.maximum(now - self._last[pages], 0.0)
        worth = self._table.worth(_class(self._frequency[pages], self._length[pages]), ages)
        if self._weighs:
            worth *= self._cost[pages]
        found: Scores = worth + _BY_RECENCY / (1.0 + ages)
        return found

    def left(self, pages: Ids, now: float, tier: int = 0) -> None:
        """Nothing to learn: what is remembered is that it was used, and when."""

    def remove(self, pages: Ids, keys: Keys, now: float) -> None:
        ghosts = self._ghosts
        rows, known = ghosts.find(keys)
        older = rows[(ghosts.tag[rows] != 0) & ~known]
        if len(older):
            self._table.lose(_class(ghosts.a[older], ghosts.b[older]), now - ghosts.time[older])
        ghosts.put(keys, self._last[pages], self._frequency[pages], self._length[pages])
        self._frequency[pages] = 0

    def study(self, now: float) -> Study | None:
        """Survival is to be learnt anew after some events, from a sample of open intervals."""
        if self._events < REFIT_EVENTS:
            return None
        step = 1 + self._rows // SAMPLE_ROWS
        rows = slice(0, self._rows, step)
        pages = _Intervals(
            step,
            now,
            self._last[rows].copy(),
            self._frequency[rows].copy(),
            self._length[rows].copy(),
        )
        ghosts = self._ghosts
        step = 1 + len(ghosts) // SAMPLE_ROWS
        there = ghosts.tag[::step] != 0
        a, b, time = ghosts.a[::step][there], ghosts.b[::step][there], ghosts.time[::step][there]
        gone = _Intervals(step, now, time, a, b)
        study = Refit(self._table, (pages, gone), self._events)
        self._events = 0
        return study

    def learn_from(self, other: CslPolicy) -> None:
        """Go by what another has learnt, of the same kind of load."""
        self._table = other._table.copy()

    def _weigh(self, pages: Ids, run: Run) -> None:
        if self._weighs or self._cost_of.weighs(run):
            self._weighs = True
            self._cost[pages] = self._cost_of.of(run)

    def _make_room(self, pages: Ids) -> None:
        rows = int(pages.max()) + 1 if len(pages) else 0
        self._rows = max(self._rows, rows)
        if rows <= len(self._last):
            return
        self._last = grown(self._last, pages)
        self._frequency = grown(self._frequency, pages)
        self._length = grown(self._length, pages)
        known = len(self._cost)
        self._cost = grown(self._cost, pages)
        self._cost[known:] = 1.0


@dataclass(frozen=True, slots=True)
class _Intervals:
    """One in `step` of the intervals that are open, each by its page."""

    step: int
    now: float
    last: Scores
    frequency: npt.NDArray[np.uint8]
    length: npt.NDArray[np.uint8]

    def histogram(self, table: SurvivalTable) -> Scores:
        """By class and age, of all."""
        used = self.frequency != 0
        classes = _class(self.frequency[used], self.length[used])
        return self.step * table.histogram(classes, self.now - self.last[used])


class Refit(Study):
    """Learns survival on copies: some milliseconds, in which the policy goes by the last one."""

    def __init__(
        self, table: SurvivalTable, intervals: tuple[_Intervals, ...], events: int
    ) -> None:
        self._table, self._copy = table, table.copy()
        self._intervals = intervals
        self._events = events

    def work(self) -> None:
        still_open = [each.histogram(self._copy) for each in self._intervals]
        self._copy.refit(np.sum(still_open, axis=0))

    def adopt(self) -> None:
        self._table.adopt(self._copy, self._events)


def _class(
    frequency: npt.NDArray[np.uint8], length: npt.NDArray[np.uint8]
) -> npt.NDArray[np.uint8]:
    found: npt.NDArray[np.uint8] = length * np.uint8(FREQUENCIES) + _bucket[frequency]
    return found
