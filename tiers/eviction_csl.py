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
from typing import TYPE_CHECKING

import numpy as np

from kvstore.tiers.eviction import PAGES_FIRST, Policy, grown
from kvstore.tiers.ghost_table import GhostTable
from kvstore.tiers.survival import SurvivalTable

if TYPE_CHECKING:
    import numpy.typing as npt

    from kvstore.tiers.eviction import Ids, Keys, Scores

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
    """See above. `gamma` weighs cost: 0 hits, 0.5 balanced, 1 prefill work saved."""

    name = "csl"
    moves = True

    def __init__(self, capacity_pages: int, gamma: float = 0.0, even_pages: float = 60.0) -> None:
        """even_pages: how deep a page costs twice what the first one does."""
        self._gamma = gamma
        self._even = even_pages
        self._last = np.zeros(PAGES_FIRST)
        self._frequency = np.zeros(PAGES_FIRST, np.uint8)  # 0: no page in this row
        self._length = np.zeros(PAGES_FIRST, np.uint8)  # bucket of the tokens that it came with
        self._depth = np.zeros(PAGES_FIRST, np.int32)
        self._rows = 0
        self._ghosts = GhostTable(GHOSTS_PER_PAGE * capacity_pages)
        self._table = SurvivalTable(FREQUENCIES * LENGTHS)
        self._until_refit = REFIT_EVENTS

    def insert(self, pages: Ids, keys: Keys, depth: int, tokens: int, now: float) -> None:
        self._make_room(pages)
        rows, known = self._ghosts.find(keys)
        frequency = np.ones(len(pages), np.uint8)
        length = bisect_right(TOKEN_EDGES, len(pages) * tokens)
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
        self._depth[pages] = np.arange(depth, depth + len(pages))
        self._count(now)

    def restore(self, pages: Ids, last: Scores) -> None:
        self._make_room(pages)
        self._last[pages] = last
        self._frequency[pages] = 1

    def touch(self, pages: Ids, now: float) -> None:
        frequency = self._frequency[pages]
        self._table.close(_class(frequency, self._length[pages]), now - self._last[pages])
        self._last[pages] = now
        self._frequency[pages] = frequency + (frequency < 255)
        self._count(now)

    def scores(self, pages: Ids, now: float, tier: int = 0) -> Scores:
        """Hits a second at best, times cost to the power of gamma."""
        ages = np.maximum(now - self._last[pages], 0.0)
        worth = self._table.worth(_class(self._frequency[pages], self._length[pages]), ages)
        if self._gamma:
            worth *= (1.0 + self._depth[pages] / self._even) ** self._gamma
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

    def _count(self, now: float) -> None:
        self._until_refit -= 1
        if self._until_refit <= 0:
            self._until_refit = REFIT_EVENTS
            self._table.refit(self._open(now))

    def _open(self, now: float) -> Scores:
        """Open intervals by class and age, estimated from a sample of pages and ghosts."""
        step = 1 + self._rows // SAMPLE_ROWS
        rows = slice(0, self._rows, step)
        used = self._frequency[rows] != 0
        classes = _class(self._frequency[rows][used], self._length[rows][used])
        found = step * self._table.histogram(classes, now - self._last[rows][used])
        ghosts = self._ghosts
        step = 1 + len(ghosts) // SAMPLE_ROWS
        used = ghosts.tag[::step] != 0
        classes = _class(ghosts.a[::step][used], ghosts.b[::step][used])
        found += step * self._table.histogram(classes, now - ghosts.time[::step][used])
        return found

    def _make_room(self, pages: Ids) -> None:
        self._last = grown(self._last, pages)
        self._frequency = grown(self._frequency, pages)
        self._length = grown(self._length, pages)
        self._depth = grown(self._depth, pages)
        self._rows = max(self._rows, int(pages.max()) + 1)


def _class(
    frequency: npt.NDArray[np.uint8], length: npt.NDArray[np.uint8]
) -> npt.NDArray[np.int64]:
    return length.astype(np.int64) * FREQUENCIES + _bucket[frequency]
