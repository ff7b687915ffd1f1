"""Makes room in a tier: asks the policy what is coldest, obeys the leaf rule, moves capacity.

The caller holds the lock. Slots of the arena are free on return; slots of the disk become free when
`StoreState.free_unused_slots` has committed it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvstore.prefix_index.page_table import HELD
from kvstore.state import DISK, HOST
from kvstore.tiers.segment import payload_class
from kvstore.tiers.tier import SLOT_INDEX_BITS, aligned

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from kvstore.state import StoreState
    from kvstore.tiers.tier import Container

# Evict a few more than are asked for: a sweep over all pages must not be paid for each one.
BATCH_PART = 64
BATCH_PAGES_MAX = 256


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
        slot_bytes = aligned(payload_bytes)
        roots = [
            root
            for root, info in self._state.trees.items()
            if info.tenant == tenant and aligned(info.page_bytes) == slot_bytes
        ]
        evicted = self._evict_coldest(HOST, roots, count)
        if evicted == 0:
            others = [
                item
                for item in host.containers()
                if (item.tenant, item.slot_bytes) != (tenant, slot_bytes)
            ]
            evicted = self._empty_one(HOST, others)
        self._state.counters.host_evictions += evicted
        return evicted

    def make_room_disk(self, payload_bytes: int, count: int) -> int:
        """Take up to `count` pages of that size off the disk; how many pages left it."""
        roots = [
            root
            for root, info in self._state.trees.items()
            if payload_class(info.page_bytes) == payload_class(payload_bytes)
        ]
        evicted = self._evict_coldest(DISK, roots, count)
        self._state.counters.disk_evictions += evicted
        return evicted

    def empty_segment(self, slot_bytes: int) -> int:
        """Take all pages off one segment of other slots, so that it can be remade."""
        disk = self._state.disk
        if disk is None:
            return 0
        others = [item for item in disk.containers() if item.slot_bytes != slot_bytes]
        evicted = self._empty_one(DISK, others)
        self._state.counters.disk_evictions += evicted
        return evicted

    def _evict_coldest(self, tier: int, roots: list[bytes], count: int) -> int:
        state = self._state
        wanted = max(count, min(len(state.index) // BATCH_PART, BATCH_PAGES_MAX))
        victims = self._coldest(tier, roots, wanted)
        if tier == HOST and state.unwritten:
            waiting = victims[np.isin(victims, list(state.unwritten))]
            if len(waiting) and self._demote(waiting[::-1]):  # parents first
                state.counters.demotions += len(waiting)
                victims = self._coldest(tier, roots, wanted)
        self._leave(tier, victims)
        return len(victims)

    def _coldest(self, tier: int, roots: list[bytes], wanted: int) -> NDArray[np.int32]:
        state = self._state
        everything = len(roots) == len(state.trees)
        return state.index.coldest(
            tier,
            state.clock(),
            pages=wanted,
            scores=state.policy.scores(state.index.table.last_use),
            roots=None if everything else roots,
        )

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
