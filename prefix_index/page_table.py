"""The page table: the state of every page, as a struct of arrays. A page's id is its row.

Invariant: a row is live from allocate() to release(), keeps its id meanwhile, and is in the free
list otherwise. Must not be here: edges and children (radix_tree.py), who may leave (residency.py).

Leases and pins are few beside millions of pages, so residency.py keeps them in dicts and only their
flag stands here. Everything else is a column of private anonymous memory, not of the heap: room for
pages to come costs nothing until it is used, and a column that was outgrown goes back to the system
(malloc kept 100 bytes a page of such holes, measured with 1 M pages).
"""

from __future__ import annotations

import mmap
from array import array
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Sequence

Ids: TypeAlias = npt.NDArray[np.int32]

# Tiers by number: columns and bits are indexed by it.
HOST = 0
DISK = 1
REDIS = 2
TIERS = 3
LOCAL_TIERS = 2  # this store's own: those below it, by number
NO_PAGE = -1
NO_SLOT = -1

# The state byte, from bit 0: in host | in disk | in redis;  bit 6: leased or pinned, 7: has extras
TIER_BITS = (1 << TIERS) - 1
HELD = 1 << 6
HAS_EXTRAS = 1 << 7

PAGES_MAX = 1 << 28
PAGES_FIRST = 1024
CONSECUTIVE_MIN = 32  # of fewer rows, looking costs as much as picking


class PageTable:
    """Columns by page id. Arrays are replaced when they grow: never keep one over an insert."""

    def __init__(self, pages_expected: int = PAGES_FIRST) -> None:
        self._rows = 0  # rows ever used; those above were never live
        self._free = array("i")
        self.extras: dict[int, bytes] = {}
        self.state = np.zeros(0, np.uint8)
        self.slot = tuple(np.zeros(0, np.int64) for _ in range(TIERS))
        self.below = tuple(np.zeros(0, np.int32) for _ in range(TIERS))
        self.payload_bytes = np.zeros(0, np.uint32)
        self.checksum = np.zeros((0, 2), np.uint64)
        self.key = np.zeros((0, 2), np.uint64)
        self.sequence = np.zeros(0, np.uint64)
        self.parent = np.zeros(0, np.int32)
        self.depth = np.zeros(0, np.int32)  # page index in the chain, from 0
        self.node = np.zeros(0, np.int32)  # the edge that holds the page; -1 = the row is free
        self.last_use = np.zeros(0, np.float64)
        self.created = np.zeros(0, np.uint32)  # Unix seconds
        self.hits = np.zeros(0, np.uint32)
        self.writer = np.zeros(0, np.uint32)
        self._grow(pages_expected)

    def __len__(self) -> int:
        """Live pages."""
        return self._rows - len(self._free)

    @property
    def rows(self) -> int:
        """Rows that were ever live: what a sweep over a column has to look at."""
        return self._rows

    @property
    def nbytes(self) -> int:
        """Bytes of all rows ever used and of the free list; extras count as tokens."""
        row_bytes = sum(column[:1].nbytes for column in self._columns())
        return self._rows * row_bytes + len(self._free) * self._free.itemsize

    def is_live(self, page: int) -> bool:
        return 0 <= page < self._rows and bool(self.node[page] >= 0)

    def live(self, first: int = 0, stop: int | None = None) -> Ids:
        """Ids of all live pages, or of those in rows [first, stop), ascending."""
        stop = self._rows if stop is None else min(stop, self._rows)
        return (np.flatnonzero(self.node[first:stop] >= 0) + first).astype(np.int32)

    def allocate(self, count: int) -> Ids:
        """Rows for `count` new pages, zeroed but for slots; the caller fills them in.

        Reused rows come first. Raises ValueError past PAGES_MAX.
        """
        reused = min(count, len(self._free))
        fresh = count - reused
        if self._rows + fresh > PAGES_MAX:
            raise ValueError(f"page table: {self._rows + fresh} rows asked, at most {PAGES_MAX}")
        ids = np.empty(count, np.int32)
        if reused:
            ids[:reused] = self._free[-reused:][::-1]
            del self._free[-reused:]
        if fresh:
            ids[reused:] = np.arange(self._rows, self._rows + fresh, dtype=np.int32)
            if self._rows + fresh > len(self.state):
                self._grow(max(self._rows + fresh, 2 * len(self.state)))
            for slot in self.slot:
                slot[self._rows : self._rows + fresh] = NO_SLOT
            self.node[self._rows : self._rows + fresh] = NO_PAGE
            self._rows += fresh
        return ids

    def release(self, ids: Ids) -> None:
        """Free the rows of pages that nothing refers to any more."""
        extras = ids[self.state[ids] & HAS_EXTRAS != 0]
        for page in extras.tolist():
            del self.extras[page]
        for column in self._columns():
            column[ids] = 0
        for slot in self.slot:
            slot[ids] = NO_SLOT
        self.node[ids] = NO_PAGE
        self._free.frombytes(ids.tobytes())

    def key_of(self, page: int) -> bytes:
        return bytes(self.key[page].tobytes())

    def check(self) -> None:
        """Recount rows; raises AssertionError with the numbers when something is off."""
        free = np.frombuffer(self._free, np.int32)
        assert len(np.unique(free)) == len(free), "a row is twice in the free list"
        assert not len(free) or (free.min() >= 0 and free.max() < self._rows), "free row unknown"
        assert (self.node[free] == NO_PAGE).all(), "a live page is in the free list"
        assert not self.state[free].any(), "a page in the free list is in a tier, leased or pinned"
        live = np.count_nonzero(self.node[: self._rows] >= 0)
        assert live == len(self), f"{live} rows live, {len(self)} counted"
        flagged = np.flatnonzero(self.state[: self._rows] & HAS_EXTRAS).tolist()
        assert set(flagged) == set(self.extras), f"{len(flagged)} flags, {len(self.extras)} extras"
        self.check_rows(0, self._rows)

    def check_rows(self, first: int, stop: int) -> None:
        """What the rows [first, stop) say of themselves; raises AssertionError. Part of check()."""
        state = self.state[first:stop]
        assert not state[self.node[first:stop] < 0].any(), "a free row is in a tier or held"
        flagged = np.flatnonzero(state & HAS_EXTRAS) + first
        missing = [page for page in flagged.tolist() if page not in self.extras]
        assert not missing, f"{len(missing)} pages are flagged and have no extras"
        for tier in range(TIERS):
            resident = state & (1 << tier) != 0
            placed = self.slot[tier][first:stop] != NO_SLOT
            assert (resident == placed).all(), f"tier {tier}: slots and bits differ"

    def free_rows(self) -> Ids:
        """A copy of the free list."""
        return np.frombuffer(self._free, np.int32).copy()

    def _columns(self) -> list[npt.NDArray[np.generic]]:
        columns: list[npt.NDArray[np.generic]] = []
        for value in vars(self).values():
            if isinstance(value, np.ndarray):
                columns.append(value)
            elif isinstance(value, tuple):
                columns += value
        return columns

    def _grow(self, rows: int) -> None:
        for name, value in list(vars(self).items()):
            if isinstance(value, np.ndarray):
                setattr(self, name, _longer(value, rows))
            elif isinstance(value, tuple):
                setattr(self, name, tuple(_longer(column, rows) for column in value))


def _longer(column: npt.NDArray[np.generic], rows: int) -> npt.NDArray[np.generic]:
    """A copy in zeroed memory of its own with room for `rows`."""
    shape = (rows, *column.shape[1:])
    size = int(np.prod(shape)) * column.itemsize
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    longer = np.frombuffer(memory, column.dtype).reshape(shape)
    longer[: len(column)] = column
    return longer


def rows_of(ids: Ids) -> Ids | slice:
    """What picks those rows of a column fastest: pages stored together mostly stand together.

    A slice makes a view where ids make a copy: don't keep it over a change of the column.
    """
    count = len(ids)
    if count < CONSECUTIVE_MIN or int(ids[-1]) - int(ids[0]) != count - 1:
        return ids
    return slice(int(ids[0]), int(ids[-1]) + 1) if (ids[1:] - ids[:-1] == 1).all() else ids


def as_ids(ids: Sequence[int] | Ids) -> Ids:
    """Page ids as the int32 array that all calls take."""
    return np.asarray(ids, np.int32)
