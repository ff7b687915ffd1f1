"""Makes room in a tier: asks the policy what is coldest, obeys the leaf rule, moves capacity.

The caller holds the lock. Slots of the arena are free on return; slots of the disk become free when
`StoreState.free_unused_slots` has committed it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvstore.prefix_index.page_table import HELD
from kvstore.state import DISK, HOST
from kvstore.tiers.tier import SLOT_INDEX_BITS, aligned

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from kvstore.state import StoreState
    from kvstore.tiers.tier import Container

# Evict at least one part in this many of a tier's slots at a time: ranking costs a pass over all
# pages, so it must not be paid for each page.
BATCH_PART = 64
RANK_PAGES_MIN = 256


class Evictor:
    """Frees slots for (tenant, size) in the host or the disk tier."""

    def __init__(self, state: StoreState, demote: Callable[[NDArray[np.int32]], int]) -> None:
        """`demote` queues pages that are only in the arena for writing to disk and says how many
        it took; what it took leaves the arena in a later call."""
        self._state = state
        self._demote = demote

    def make_room_host(self, tenant: str, payload_bytes: int, count: int) -> int:
        """Free up to `count` slots of the arena; how many pages left it.

        None leave while memory is still being populated: there will be room without that.
        """
        host = self._state.host
        if host is None or not host.wait_populated(0.0):
            return 0
        slot_bytes, containers = aligned(payload_bytes), host.containers()
        alike = [item.tenant == tenant and item.slot_bytes == slot_bytes for item in containers]
        evicted = self._evict(HOST, containers, alike, count)
        self._state.counters.host_evictions += evicted
        return evicted

    def make_room_disk(self, slot_bytes: int, count: int) -> int:
        """Take up to `count` pages off slots of that size on disk; how many pages left it."""
        disk = self._state.disk
        if disk is None:
            return 0
        containers = disk.containers()
        alike = [item.slot_bytes == slot_bytes for item in containers]
        evicted = self._evict(DISK, containers, alike, count)
        self._state.counters.disk_evictions += evicted
        return evicted

    def _evict(self, tier: int, containers: list[Container], alike: list[bool], count: int) -> int:
        """Coldest pages from containers of the right kind, else all pages of one of another."""
        right = [item for item, same in zip(containers, alike, strict=True) if same]
        other = [item for item, same in zip(containers, alike, strict=True) if not same]
        evicted = self._evict_coldest(tier, [item.container_id for item in right], count)
        return evicted or self._empty_one(tier, other)

    def _evict_coldest(self, tier: int, containers: list[int], count: int) -> int:
        state, table = self._state, self._state.index.table
        pages = state.index.candidates(tier, state.clock())
        pages = pages[np.isin(table.slot[tier][pages] >> SLOT_INDEX_BITS, containers)]
        if len(pages) == 0:
            return 0
        wanted = max(count, len(pages) // BATCH_PART)
        limit = max(RANK_PAGES_MIN, 2 * wanted)
        while True:
            order = pages[state.policy.rank(table.last_use[pages], table.depth[pages], limit)]
            evicted = self._take(tier, order, wanted)
            # Leased subtrees may fill the cold end: look further before giving up.
            if evicted or limit >= len(pages):
                return evicted
            limit *= 8

    def _take(self, tier: int, order: NDArray[np.int32], wanted: int) -> int:
        state = self._state
        if tier == HOST and state.disk is not None:
            order = order[self._demote_first(order, wanted)]
        victims = state.index.victims(tier, order, state.clock(), pages=wanted)
        self._leave(tier, victims)
        return len(victims)

    def _demote_first(self, order: NDArray[np.int32], wanted: int) -> NDArray[np.bool_]:
        """Queue what never reached the disk for it; a mask of what may go right now.

        A page that the disk has had and evicted is colder than all that is there: it just goes.
        """
        table, unwritten = self._state.index.table, self._state.unwritten
        everything = np.ones(len(order), dtype=np.bool_)
        if not unwritten:
            return everything
        waits = np.isin(order, np.fromiter(unwritten, np.int32, len(unwritten)))
        head = order[:wanted][waits[:wanted]]
        if len(head) == 0:
            return everything
        # An ancestor goes to disk before its descendants: shallowest first.
        taken = self._demote(head[np.argsort(table.depth[head], kind="stable")])
        self._state.counters.demotions += taken
        return ~waits if taken else everything

    def _leave(self, tier: int, victims: NDArray[np.int32]) -> None:
        state = self._state
        if len(victims) == 0:
            return
        elsewhere = state.in_tier(victims, HOST if tier == DISK else DISK)
        stays, goes = victims[elsewhere], victims[~elsewhere]
        if tier == HOST:
            state.leave_host(stays)
        else:
            state.leave_disk(stays)
        state.remove_pages(goes)
        state.changed.notify_all()

    def _empty_one(self, tier: int, containers: list[Container]) -> int:
        """Empty the container of another size or tenant that costs least: it can be remade."""
        state, table = self._state, self._state.index.table
        live = table.live()
        resident = live[state.in_tier(live, tier)]
        homes = table.slot[tier][resident] >> SLOT_INDEX_BITS
        best: NDArray[np.int32] | None = None
        for container in containers:
            inside = resident[homes == container.container_id]
            pages = self._with_descendants(tier, inside)
            if pages is None or (best is not None and len(pages) >= len(best)):
                continue
            if len(inside) == container.used_slots:
                best = pages
        if best is None:
            return 0
        order = best[np.argsort(-table.depth[best], kind="stable")]
        victims = state.index.victims(tier, order, state.clock())
        self._leave(tier, victims)
        return len(victims)

    def _with_descendants(self, tier: int, pages: NDArray[np.int32]) -> NDArray[np.int32] | None:
        """Pages and all below them in this tier; None when one of them is leased or pinned."""
        state, table = self._state, self._state.index.table
        seen: set[int] = set()
        for page in pages.tolist():
            if page not in seen:
                seen.update(state.index.subtree(page).tolist())
        closure = np.fromiter(seen, dtype=np.int32, count=len(seen))
        if np.any(table.state[closure] & HELD):
            return None
        return closure[state.in_tier(closure, tier)]
