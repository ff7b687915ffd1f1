"""Makes room in a tier: asks whose turn it is to give, asks the policy what is coldest, obeys the
leaf rule, moves capacity.

The caller holds the lock. Slots of the arena are free on return; slots of the disk become free when
`StoreState.free_unused_slots` has committed it. Who gives is decided in shares.py: no page leaves
for another tenant while its own is within its share.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvstore.emptying import Emptier
from kvstore.ghost_list import Left
from kvstore.quantity import format_bytes
from kvstore.shares import Claims
from kvstore.state import DISK, HOST, PIECE_PAGES
from kvstore.tiers.arena_use import NOTHING
from kvstore.tiers.segment import payload_class
from kvstore.tiers.tier import aligned

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from numpy.typing import NDArray

    from kvstore.prefix_index.page_table import PageTable
    from kvstore.state import StoreState
    from kvstore.tiers.tier import Container

# Rank more than are asked for: a sweep over all pages must not be paid for each one. They leave in
# pieces, each in one hold of the lock.
BATCH_PART = 64
BATCH_PAGES_MAX = 256
PLANS_MAX = 64
# The coldest of so many pages that may leave are cold enough: a score of each costs 30 ns.
LEAVES_ENOUGH = 1 << 15
FULL = "full"

_log = logging.getLogger("kvstore.store")


@dataclass(slots=True)
class Plan:
    """Pages in the order in which they would leave, as a sweep found them."""

    pages: NDArray[np.int32]
    sequences: NDArray[np.uint64]
    last_use: NDArray[np.float64]
    at: int = 0

    @staticmethod
    def of(table: PageTable, pages: NDArray[np.int32]) -> Plan:
        """Of pages that were ranked this moment."""
        return Plan(pages, table.sequence[pages], table.last_use[pages])

    def take(self, table: PageTable, count: int) -> NDArray[np.int32] | None:
        """The next ones, less those that have gone or were used since; None at the end."""
        if self.at >= len(self.pages):
            return None
        part = slice(self.at, self.at + count)
        self.at += count
        pages = self.pages[part]
        same = (table.sequence[pages] == self.sequences[part]) & (table.node[pages] >= 0)
        same &= table.last_use[pages] == self.last_use[part]
        fresh: NDArray[np.int32] = pages[same]
        return fresh


class Evictor:
    """Frees slots for (tenant, size) in the host or the disk tier."""

    def __init__(self, state: StoreState, demote: Callable[[NDArray[np.int32]], int]) -> None:
        """`demote` queues pages that are only in the arena for writing to disk and says how many
        it took; what it took leaves the arena in a later call."""
        self._state = state
        self._demote = demote
        self._plans: dict[tuple[int, tuple[bytes, ...]], Plan] = {}  # by tier and roots
        self._hints = 0  # given when those were made
        self._emptier = Emptier(state, self._leave)
        # Of the page table, by tier and roots: where to look next. Each has its own, else two who
        # ask in turn would each see only every other one.
        self._windows: dict[tuple[int, tuple[bytes, ...]], int] = {}
        self._sweeps = 0
        self._why = Left.ROOM  # that pages leave in the call under way

    def take_host(self, tenant: str, payload_bytes: int, count: int) -> list[int]:
        """Slots of the arena that are free now, as many as the tenant's quota allows."""
        host = self._state.host
        if host is None:
            return []
        most = self._state.tenancy.host.most(tenant)
        if most is None:
            return host.reserve(tenant, payload_bytes, count)
        count = min(count, self._host_room(tenant) // aligned(payload_bytes))
        if count <= 0:
            return []
        return host.reserve(tenant, payload_bytes, count, extent_bytes_max=most)

    def why_no_host(self, tenant: str, payload_bytes: int) -> str:
        """Why take_host and make_room_host found nothing: "full", or the quota, with numbers."""
        most = self._state.tenancy.host.most(tenant)
        if most is None or not self._is_at_host_max(tenant, aligned(payload_bytes)):
            return FULL
        had = most - self._host_room(tenant)
        return (
            f"quota: {format_bytes(had)} of host_bytes_max = {format_bytes(most)} are in use and "
            f"none can leave; a page takes {format_bytes(aligned(payload_bytes))}"
        )

    def make_room_host(self, tenant: str, payload_bytes: int, count: int) -> int:
        """Free up to `count` slots of the arena; how many pages left it.

        None leave while memory is still being populated: there will be room without that.
        """
        host = self._state.host
        if host is None:
            return 0
        self._state.drop_idle_remote(0.0)  # a page stays as long as another is known below it
        slot_bytes = aligned(payload_bytes)
        at_most = self._is_at_host_max(tenant, slot_bytes)
        self._why = Left.QUOTA if at_most else Left.ROOM
        if not at_most and not host.wait_populated(0.0):
            return 0
        claims, asker = self._host_claims(), (HOST, tenant, slot_bytes)
        self._emptier.drop_idle()
        evicted = self._go_on(asker, claims, at_most=at_most)
        if evicted:
            self._state.counters.host_evictions += evicted
            return evicted
        # Half an extent: the arena's last one may be smaller than the others, by less than half.
        donors = [] if at_most else claims.donors(tenant, host.extent_bytes // 2)
        evicted = self._take_extent(asker, donors, claims)
        if not evicted and donors and self._ask_back(donors):
            evicted = self._take_extent(asker, donors, claims)
        if not evicted:
            mine = self._roots(tenant, lambda size: aligned(size) == slot_bytes)
            evicted = self._evict_coldest(HOST, mine, count)
        if not evicted:
            other_sizes = [
                item
                for item in host.containers()
                if item.tenant == tenant and item.slot_bytes != slot_bytes
            ]
            evicted = self._emptier.start(asker, other_sizes, _any_may_go)
        if not evicted and not at_most:
            evicted = self._take_extent(asker, claims.richer(tenant), claims)
        self._state.counters.host_evictions += evicted
        return evicted

    def disk_room(self, tenant: str, slot_bytes: int, count: int) -> tuple[int, int]:
        """How many more pages of this size the tenant's quota allows on disk, and how many of its
        own coldest have left for that now; as long as some do, ask again."""
        most = self._state.tenancy.disk.most(tenant)
        if most is None:
            return count, 0
        room = max(0, (most - self._state.disk_use.get(tenant, 0)) // slot_bytes)
        if room >= count:
            return count, 0
        self._why = Left.QUOTA
        mine, wanted = self._roots(tenant), min(count - room, PIECE_PAGES)
        left = self._count_disk(self._evict_coldest(DISK, mine, wanted, exactly=True))
        room = max(0, (most - self._state.disk_use.get(tenant, 0)) // slot_bytes)
        return min(room, count), left

    def why_no_disk(self, tenant: str, slot_bytes: int) -> str:
        """What disk_room found, in words, with the numbers of the quota."""
        most = self._state.tenancy.disk.most(tenant)
        assert most is not None
        return (
            f"quota: {format_bytes(self._state.disk_use.get(tenant, 0))} of disk_bytes_max = "
            f"{format_bytes(most)} are in use and none can leave; a page takes "
            f"{format_bytes(slot_bytes)}"
        )

    def make_room_disk(self, tenant: str, payload_bytes: int, slot_bytes: int, count: int) -> int:
        """Take up to `count` pages of that size off the disk; how many pages left it."""
        self._state.drop_idle_remote(0.0)
        claims, kind = self._disk_claims(), payload_class(payload_bytes)
        self._why = Left.ROOM
        within = min(count, -claims.over(tenant) // slot_bytes)
        donors = claims.donors(tenant, slot_bytes)
        evicted = self._take_pages(donors, claims, kind, slot_bytes, within)
        if not evicted and donors and self._ask_back(donors):
            evicted = self._take_pages(donors, claims, kind, slot_bytes, within)
        if not evicted:
            mine = self._roots(tenant, lambda size: payload_class(size) == kind)
            evicted = self._evict_coldest(DISK, mine, count)
        if not evicted:
            evicted = self._take_pages(claims.richer(tenant), claims, kind, slot_bytes, count)
        return self._count_disk(evicted)

    def empty_segment(self, tenant: str, slot_bytes: int) -> int:
        """Take some pages off one segment of other slots, so that it can be remade when all have
        gone; see is_emptying.

        Its pages are the asker's own, or borrowed by tenants who stay above their shares.
        """
        disk = self._state.disk
        if disk is None:
            return 0
        claims, self._why = self._disk_claims(), Left.ROOM
        givers = claims.donors(tenant, slot_bytes) or claims.richer(tenant)

        def may_go(pages: NDArray[np.int32]) -> bool:
            slots = self._state.index.table.slot[DISK][pages]
            lost = self._state.disk_bytes_by_tenant(pages, slots)
            return all(
                owner == tenant or (owner in givers and size <= claims.over(owner))
                for owner, size in lost.items()
            )

        asker = (DISK, tenant, slot_bytes)
        evicted = self._emptier.go_on(asker, may_go)
        if not evicted:
            others = [item for item in disk.containers() if item.slot_bytes != slot_bytes]
            evicted = self._emptier.start(asker, others, may_go)
        return self._count_disk(evicted)

    def is_emptying(self, tenant: str, slot_bytes: int) -> bool:
        """Whether empty_segment has begun with a segment, and is to be called again."""
        return self._emptier.container((DISK, tenant, slot_bytes)) is not None

    # Who has what

    def _host_room(self, tenant: str) -> int:
        """Bytes until the tenant has its most."""
        state = self._state
        assert state.host is not None
        most = state.tenancy.host.most(tenant)
        assert most is not None
        used = state.host.tenant_use().get(tenant, NOTHING).used_bytes
        return most - used - state.staging_use(tenant)

    def _is_at_host_max(self, tenant: str, slot_bytes: int) -> bool:
        state = self._state
        most = state.tenancy.host.most(tenant)
        if most is None or state.host is None:
            return False
        has = state.host.tenant_use().get(tenant, NOTHING)
        return self._host_room(tenant) < slot_bytes or has.extent_bytes >= most

    def _host_claims(self) -> Claims:
        host = self._state.host
        assert host is not None
        use = {tenant: each.extent_bytes for tenant, each in host.tenant_use().items()}
        return Claims(self._state.tenancy.host.in_units(host.extent_bytes), use)

    def _disk_claims(self) -> Claims:
        """Shares of what segments have: the catalog and its like take some of the capacity."""
        state = self._state
        assert state.disk is not None
        there = sum(item.slots * item.slot_bytes for item in state.disk.containers())
        use = {tenant: size for tenant, size in state.disk_use.items() if size}
        return Claims(state.tenancy.disk.of_what_is_left(there), use)

    def _roots(self, tenant: str, fits: Callable[[int], bool] = lambda size: True) -> list[bytes]:
        """Trees of a tenant whose page size fits."""
        trees = self._state.trees.items()
        return [root for root, info in trees if info.tenant == tenant and fits(info.page_bytes)]

    # Taking from others

    def _take_extent(
        self, asker: tuple[int, str, int], donors: Iterable[str], claims: Claims
    ) -> int:
        """Begin with an extent of the first tenant that can give one and keep what it is
        guaranteed."""
        host = self._state.host
        assert host is not None
        containers = host.containers()
        for donor in donors:
            fits = [
                item
                for item in containers
                if item.tenant == donor and self._gives(item, claims, asker)
            ]
            evicted = self._emptier.start(asker, fits, _any_may_go)
            if evicted:
                return evicted
        return 0

    def _gives(self, extent: Container, claims: Claims, asker: tuple[int, str, int]) -> bool:
        """Whether its tenant has borrowed as much as that, and as what others are emptying of it:
        that counts as its own until it has changed hands."""
        lost = [extent, *self._emptier.taken_from(HOST, extent.tenant, asker)]
        return claims.over(extent.tenant) >= sum(map(self._extent_bytes, lost))

    def _extent_bytes(self, extent: Container) -> int:
        host = self._state.host
        assert host is not None
        return min(host.extent_bytes, extent.slots * extent.slot_bytes)

    def _go_on(self, asker: tuple[int, str, int], claims: Claims, *, at_most: bool) -> int:
        """With the extent that is being emptied for this asker, while its tenant may lose it, and
        the asker may have it."""
        extent = self._emptier.container(asker)
        if extent is None:
            return 0
        if extent.tenant != asker[1] and (at_most or not self._gives(extent, claims, asker)):
            self._emptier.stop(asker)
            return 0
        return self._emptier.go_on(asker, _any_may_go)

    def _take_pages(
        self, donors: Iterable[str], claims: Claims, kind: int, slot_bytes: int, count: int
    ) -> int:
        """Take pages of one size off the disk, from each tenant no more than it has borrowed."""
        evicted = 0
        for donor in donors:
            wanted = min(count - evicted, claims.over(donor) // slot_bytes)
            if wanted <= 0:
                continue
            theirs = self._roots(donor, lambda size: payload_class(size) == kind)
            evicted += self._evict_coldest(DISK, theirs, wanted, exactly=True)
        return evicted

    def _ask_back(self, donors: list[str]) -> bool:
        """Pins do not hold what is borrowed; leases there are asked back. Whether a pin ended."""
        state = self._state
        state.wanted_back.update(donors)
        broken = [
            page
            for page in state.index.pins
            if state.trees[state.index.root_of(page)].tenant in donors
        ]
        for page in broken:
            state.index.unpin(page)
        if broken:
            state.counters.pins_broken += len(broken)
            _log.warning(
                "%d pins ended: their tenants are above their shares, and another needs its own",
                len(broken),
            )
        return bool(broken)

    # Taking pages out

    def _count_disk(self, evicted: int) -> int:
        self._state.counters.disk_evictions += evicted
        return evicted

    def _evict_coldest(
        self, tier: int, roots: list[bytes], count: int, *, exactly: bool = False
    ) -> int:
        state = self._state
        wanted = count if exactly else max(count, min(self.batch(count), PIECE_PAGES))
        victims = self._coldest(tier, roots, wanted)
        if tier == HOST and state.unwritten:
            waiting = victims[np.isin(victims, list(state.unwritten))]
            waiting = state.admission.worth_writing(waiting)
            if len(waiting) and self._demote(waiting[::-1]):  # parents first
                state.counters.demotions += len(waiting)
                self._plans.pop((tier, tuple(roots)), None)
                victims = self._until_unwritten(self._coldest(tier, roots, wanted))
            if state.admission.keeps_back:
                lost = np.isin(victims, list(state.unwritten))
                state.counters.pages_not_admitted += int(np.count_nonzero(lost))
        state.policy.left(victims, tier)
        if tier == DISK:
            state.admission.evicted(victims)
        self._leave(tier, victims)
        return len(victims)

    def batch(self, count: int) -> int:
        """How many pages to evict in all where `count` are asked for."""
        return max(count, min(len(self._state.index) // BATCH_PART, BATCH_PAGES_MAX))

    def _until_unwritten(self, victims: NDArray[np.int32]) -> NDArray[np.int32]:
        """Victims before the first that has to be written: the disk is at it, and they wait."""
        state = self._state
        if state.config.write_policy == "through" or not len(victims):
            return victims
        kept = state.admission.worth_writing(victims[np.isin(victims, list(state.unwritten))])
        return victims[: int(np.isin(victims, kept).argmax())] if len(kept) else victims

    def _coldest(self, tier: int, roots: list[bytes], wanted: int) -> NDArray[np.int32]:
        """The next of those that the last sweep ranked and nobody has touched since; if there are
        none, sweep again."""
        state, name = self._state, (tier, tuple(roots))
        if self._hints != state.policy.hints:
            self._hints = state.policy.hints
            self._plans.clear()
        while plan := self._plans.get(name):
            order = plan.take(state.index.table, wanted)
            if order is None:
                del self._plans[name]
                break
            victims = state.index.victims(tier, order, state.clock())
            if len(victims):
                return victims
        # Whole pieces: what is left over would leave as a piece of its own, at the same price.
        pieces = -(-self.batch(wanted) // wanted) if wanted else 0
        ranked = self._rank(tier, roots, pieces * wanted)
        if len(ranked) > wanted:
            if len(self._plans) >= PLANS_MAX:
                self._plans.clear()
            self._plans[name] = Plan.of(state.index.table, ranked[wanted:])
        return ranked[:wanted]

    def _rank(self, tier: int, roots: list[bytes], count: int) -> NDArray[np.int32]:
        """The coldest of all that may leave; of a part of them, where there are very many."""
        state, now = self._state, self._state.clock()
        asked, name = None if len(roots) == len(state.trees) else roots, (tier, tuple(roots))
        self._sweeps += 1
        window = self._windows.pop(name, self._sweeps)
        leaves, self._windows[name] = state.index.some_evictable(
            tier, now, asked, window, LEAVES_ENOUGH
        )
        if len(self._windows) > PLANS_MAX:
            del self._windows[next(iter(self._windows))]
        return state.index.coldest(
            tier,
            now,
            pages=count,
            score=lambda pages: state.policy.scores(pages, tier),
            leaves=leaves,
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
        state.remove_pages(goes, self._why)
        state.changed.notify_all()


def _any_may_go(pages: NDArray[np.int32]) -> bool:
    return True
