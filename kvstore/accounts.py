"""Whether what the tiers have in use agrees with the index: found in short holds of the lock.

What a page says of itself is compared in the hold that looks at it. Sums over all pages are kept in
step behind the walk (DiskRecount), so they are exact where it ends, whatever came and went. What is
compared across pieces, two pages that share a slot, is looked at again in one hold before it is
reported. Whoever holds the lock around a call gets one look at one moment.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kvstore.page_sweep import ROWS_A_HOLD, each_rows
from kvstore.state import DISK, HOST, LOCAL_BITS, NO_PAGE, REDIS

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvstore.state import StoreState

SLOTS_A_HOLD = 1024  # that seem to be shared, looked at again


class DiskRecount:
    """Bytes on disk by tenant, of the pages in rows that the walk has behind it.

    `StoreState.count_disk` tells it of pages that come and go meanwhile: those behind the walk
    count, those before it will be seen.
    """

    def __init__(self, state: StoreState) -> None:
        self._state = state
        self._stop = 0
        self._bytes: dict[str, int] = {}

    def look(self, pages: NDArray[np.int32], stop: int) -> None:
        """The live pages of the next rows, which end at `stop`."""
        resident = pages[self._state.in_tier(pages, DISK)]
        self._add(resident, self._state.index.table.slot[DISK][resident], 1)
        self._stop = stop

    def moved(self, pages: NDArray[np.int32], slots: NDArray[np.int64], sign: int) -> None:
        """Pages have come to slots of the disk (1), or left them (-1)."""
        seen = pages < self._stop
        if seen.any():
            self._add(pages[seen], slots[seen], sign)

    def compare(self) -> None:
        """At the end of the walk, in its last hold."""
        counted = {tenant: size for tenant, size in self._bytes.items() if size}
        noted = {tenant: size for tenant, size in self._state.disk_use.items() if size}
        if counted != noted:
            raise AssertionError(f"tenants have {counted} bytes on disk, counted: {noted}")

    def _add(self, pages: NDArray[np.int32], slots: NDArray[np.int64], sign: int) -> None:
        for tenant, size in self._state.disk_bytes_by_tenant(pages, slots).items():
            self._bytes[tenant] = self._bytes.get(tenant, 0) + sign * size


def check(state: StoreState, rows: int = ROWS_A_HOLD) -> None:
    """Compare each tier's used slots with the index; raises AssertionError with the numbers.

    A tier may use more slots than the index has pages in it, by what is being written or read at
    this moment; never fewer, and no two pages share one.
    """
    recount = DiskRecount(state)
    places = _Places(state)

    def look(first: int, stop: int) -> None:
        if not first:
            state.disk_recounts.append(recount)
        pages = state.index.table.live(first, stop)
        _check_remote(state, pages)
        places.look(pages)
        recount.look(pages, stop)
        if stop == state.index.table.rows:
            recount.compare()
            _check_used(state)

    try:
        each_rows(state, look, rows=rows)
    finally:
        with state.lock:
            if recount in state.disk_recounts:
                state.disk_recounts.remove(recount)
    places.check()


def check_index(state: StoreState) -> None:
    """The index's own check, in short holds; raises AssertionError with the numbers."""
    steps = state.index.check_in_pieces()
    try:
        while True:
            with state.lock:
                state.require_open()
                if next(steps, None) is None:
                    return
            state.breathe()
    finally:
        with state.lock:
            steps.close()


def used_slots(state: StoreState, tier: int) -> int:
    """Slots of a tier that are not free, by its own count."""
    if tier == REDIS:
        return state.redis.usage().used_slots if state.redis is not None else 0
    medium = state.host if tier == HOST else state.disk
    return sum(each.used_slots for each in medium.containers()) if medium is not None else 0


def _check_remote(state: StoreState, pages: NDArray[np.int32]) -> None:
    """Of these pages: what Redis has is nowhere else, and nothing of this store is below it."""
    table = state.index.table
    remote = state.in_tier(pages, REDIS)
    if np.any(table.state[pages[remote]] & LOCAL_BITS):
        raise AssertionError("a page of Redis is in a tier of this store too")
    parents = table.parent[pages[~remote]]
    if np.any(state.in_tier(parents[parents != NO_PAGE], REDIS)):
        raise AssertionError("a page of this store hangs below one that only Redis has")


def _check_used(state: StoreState) -> None:
    """At one moment: no tier uses fewer slots than it has pages."""
    for tier, medium in ((HOST, state.host), (DISK, state.disk), (REDIS, state.redis)):
        pages = state.index.count_in(tier)
        if medium is not None and used_slots(state, tier) < pages:
            raise AssertionError(
                f"tier {tier}: {pages} pages, {used_slots(state, tier)} slots used"
            )


class _Places:
    """The slot of each page in each tier, as a walk finds them."""

    def __init__(self, state: StoreState) -> None:
        self._state = state
        tiers = ((HOST, state.host), (DISK, state.disk), (REDIS, state.redis))
        self._parts: dict[int, list[tuple[NDArray[Any], ...]]] = {
            tier: [] for tier, medium in tiers if medium is not None
        }

    def look(self, pages: NDArray[np.int32]) -> None:
        table = self._state.index.table
        for tier, parts in self._parts.items():
            mine = pages[self._state.in_tier(pages, tier)]
            parts.append((mine, table.sequence[mine], table.slot[tier][mine]))

    def check(self) -> None:
        """Raise AssertionError where two pages share a slot at one moment."""
        for tier, parts in self._parts.items():
            pages, sequences, slots = map(np.concatenate, zip(*parts, strict=True))
            ordered = np.sort(slots)
            twice = np.unique(ordered[1:][ordered[1:] == ordered[:-1]])
            for at in range(0, len(twice), SLOTS_A_HOLD):
                some = np.isin(slots, twice[at : at + SLOTS_A_HOLD])
                self._check_again(tier, pages[some], sequences[some])

    def _check_again(
        self, tier: int, pages: NDArray[np.int32], sequences: NDArray[np.uint64]
    ) -> None:
        """A slot that went from one page to another meanwhile was found with both of them."""
        with self._state.lock:
            self._state.require_open()
            table = self._state.index.table
            same = (table.node[pages] >= 0) & (table.sequence[pages] == sequences)
            pages = pages[same]
            slots = table.slot[tier][pages[self._state.in_tier(pages, tier)]]
            if len(np.unique(slots)) != len(slots):
                raise AssertionError(f"tier {tier}: two pages share a slot")
