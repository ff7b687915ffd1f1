"""A rehearsal of pages leaving one tier: which may go, if those taken so far have gone.

So a policy gets a whole chain, tail first, in one call, and nothing is changed before the bytes
have really moved. The leaf rule itself is residency's; here its counts are lowered on a copy, page
by page, so the work is proportional to the pages taken.
"""

from __future__ import annotations

import heapq
from itertools import chain
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from kvstore.prefix_index.page_table import (
    HELD,
    LOCAL_TIERS,
    NO_PAGE,
    TIER_BITS,
    Ids,
    PageTable,
    as_ids,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Score: TypeAlias = Callable[[Ids], npt.NDArray[np.float64]]

PAGES_NO_LIMIT = 1 << 31
BYTES_NO_LIMIT = 1 << 62
# So many leaves are sorted at first, then twice as many: few are needed of all that there are.
_PART = 4096
_SCORED = 32  # pages of a chain whose scores are asked for at once
_LAST = (float("inf"), NO_PAGE)


class Departure:
    """Pages that would leave one tier, in order. Good until the page table changes."""

    def __init__(
        self,
        table: PageTable,
        tier: int,
        pages: int = PAGES_NO_LIMIT,
        payload_bytes: int = BYTES_NO_LIMIT,
    ) -> None:
        self._table = table
        self._tier = tier
        self._bit = 1 << tier
        self._holds = HELD if tier < LOCAL_TIERS else 0  # what keeps the ancestors there
        self._below = table.below[tier]
        self._others = [below for number, below in enumerate(table.below) if number != tier]
        self._lowered: dict[int, int] = {}  # below[tier], where a child has gone
        self._gone: dict[int, None] = {}  # in order
        self._pages_left = pages
        self._bytes_left = payload_bytes

    @property
    def taken(self) -> Ids:
        return as_ids(list(self._gone))

    @property
    def enough(self) -> bool:
        return self._pages_left <= 0 or self._bytes_left <= 0

    def may_leave(self, page: int) -> bool:
        """Leaf rule and last-tier rule as if `taken` had left."""
        state = int(self._table.state[page])
        if not state & self._bit or state & HELD or page in self._gone:
            return False
        lowered = self._lowered.get(page)
        if self._below[page] if lowered is None else lowered:
            return False
        last = state & TIER_BITS == self._bit
        return not last or not any(below[page] for below in self._others)

    def take(self, page: int) -> int:
        """The page goes. Returns the ancestor that has no descendant in the tier now, if any."""
        self._gone[page] = None
        self._pages_left -= 1
        self._bytes_left -= int(self._table.payload_bytes[page])
        while (page := int(self._table.parent[page])) != NO_PAGE:
            count = self._lowered.get(page)
            count = (int(self._below[page]) if count is None else count) - 1
            self._lowered[page] = count
            state = int(self._table.state[page])
            if count or state & self._holds:
                return NO_PAGE
            if state & self._bit:
                return page
        return NO_PAGE

    def take_in_order(self, order: Ids) -> None:
        """Take pages first to last until enough; one that waits for children goes after them."""
        waiting = set()
        parts = (order[at : at + _PART].tolist() for at in range(0, len(order), _PART))
        for page in chain.from_iterable(parts):
            if not self.may_leave(page):
                waiting.add(page)
                continue
            while not self.enough:
                page = self.take(page)
                if page not in waiting or not self.may_leave(page):
                    break
            if self.enough:
                return

    def take_coldest(self, leaves: Ids, score: Score) -> None:
        """Take the page of lowest score that may leave, again and again, until enough.

        `leaves` are the pages that may leave now; those above them join as they come free. Of equal
        scores a page that came free goes first.
        """
        leaf_stream = _ascending(leaves, score(leaves))
        freed: list[tuple[float, int, int]] = []
        known: dict[int, float] = {}
        depth = self._table.depth
        worth, leaf = next(leaf_stream, _LAST)
        while not self.enough and (freed or leaf != NO_PAGE):
            if freed and freed[0][0] <= worth:
                page = heapq.heappop(freed)[2]
            else:
                page = leaf
                worth, leaf = next(leaf_stream, _LAST)
            above = self.take(page)
            if above != NO_PAGE and self.may_leave(above):
                if above not in known:
                    self._score_chain(above, score, known)
                heapq.heappush(freed, (known[above], -int(depth[above]), above))

    def _score_chain(self, page: int, score: Score, known: dict[int, float]) -> None:
        """Ask for the scores of a page and of those above it at once: they may be next."""
        run: list[int] = []
        parent = self._table.parent
        while page != NO_PAGE and len(run) < min(_SCORED, max(1, self._pages_left)):
            run.append(page)
            page = int(parent[page])
        known.update(zip(run, score(as_ids(run)).tolist(), strict=True))


def _ascending(ids: Ids, scores: npt.NDArray[np.float64]) -> Iterator[tuple[float, int]]:
    """Scores and ids by ascending score, sorted part by part as they are needed."""
    part = _PART
    while len(ids):
        if len(ids) > part:
            parted = np.argpartition(scores, part)
            head, rest = parted[:part], parted[part:]
        else:
            head, rest = np.arange(len(ids)), np.arange(0)
        head = head[np.argsort(scores[head], kind="stable")]
        yield from zip(scores[head].tolist(), ids[head].tolist(), strict=True)
        ids, scores = ids[rest], scores[rest]
        part *= 2
