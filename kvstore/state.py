"""What the parts of one open store share: index, tiers, the lock, counters, names of trees.

One lock guards the index and all that follows from it; nothing holds it over I/O, copies or hashes.
`changed` is notified whenever a waiter may find something new: a page staged, a run committed or
dropped, room made. Threads with a queue of their own wait for that only: woken by each look-up that
ends, they would take the interpreter from the next.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

import numpy as np

from kvstore.conversations import Conversations
from kvstore.errors import ClosedError
from kvstore.ghost_list import GhostList, Left
from kvstore.meters import Meters
from kvstore.prefix_index.page_table import DISK, HOST, LOCAL_TIERS, NO_PAGE, REDIS, rows_of
from kvstore.shares import NO_QUOTAS
from kvstore.tiers.tier import PageRecord

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from kvstore.accounts import DiskRecount
    from kvstore.config import StoreConfig
    from kvstore.disk_admission import DiskAdmission
    from kvstore.page_policy import PagePolicy
    from kvstore.prefix_index.index import PrefixIndex
    from kvstore.recorder import Recorder
    from kvstore.shares import Tenancy
    from kvstore.tiers.disk_tier import DiskTier
    from kvstore.tiers.host_tier import HostTier
    from kvstore.tiers.redis_tier import RedisTier

__all__ = [
    "BREATH_S",
    "DISK",
    "HOST",
    "NO_PAGE",
    "PIECE_PAGES",
    "REDIS",
    "TIER_NAMES",
    "Counters",
    "StoreState",
    "TreeInfo",
]

TIER_NAMES = ("host", "disk", "redis")
LOCAL_BITS = (1 << LOCAL_TIERS) - 1
WRITERS_MAX = 65_536
PIECE_PAGES = 16  # that work on many pages looks at in one hold of the lock
BREATH_S = 5e-5  # between two such holds, so that whoever waits for the lock gets it
SEQUENCE_BITS = 40  # of a page's sequence number; the bits above name the boot that made it


@dataclass(frozen=True, slots=True)
class TreeInfo:
    """What every page of one radix tree has in common."""

    root: bytes
    tenant: str
    namespace: bytes
    page_tokens: int
    page_bytes: int


@dataclass(slots=True)
class Counters:
    """Events since the store was opened; each only grows."""

    lookups: int = 0
    lookup_hits: int = 0
    lookup_tokens: int = 0
    hit_tokens: int = 0
    hit_pages: int = 0
    hit_pages_disk: int = 0  # of them, those that no faster tier had
    lookups_cut: int = 0  # their answers are shorter than what is stored: leases at their limit
    pages_cut: int = 0  # by how much
    pages_committed: int = 0
    pages_staged: int = 0
    stage_joined: int = 0  # pages that another request was already staging
    stage_timeouts: int = 0
    pages_prefetched: int = 0
    prefetched_used: int = 0
    disk_reads: int = 0
    disk_pages_written: int = 0
    disk_bytes_written: int = 0  # of their slots
    pages_not_admitted: int = 0  # left memory, and the disk was not to have them
    disk_write_failures: int = 0
    demotions: int = 0
    corrupt_pages: int = 0
    stale_pages: int = 0
    key_missing: int = 0  # encrypted pages whose key is gone
    disk_read_errors: int = 0
    host_evictions: int = 0
    disk_evictions: int = 0
    pages_dropped: int = 0  # left their last tier
    reservations_refused: int = 0
    slots_recovered: int = 0  # in use and of no page: given back by the housekeeper
    pins_broken: int = 0  # on borrowed bytes that another tenant took within its share
    redis_lookups: int = 0  # prompts that Redis was asked about
    redis_hits: int = 0  # of them, those of which it had more than the store
    redis_lookup_timeouts: int = 0
    redis_pages_found: int = 0
    redis_pages_read: int = 0
    redis_pages_written: int = 0
    redis_pages_present: int = 0  # need no writing: another store had
    redis_dropped: int = 0  # not written: the queue was full, or Redis out of reach or memory
    redis_bad_pages: int = 0  # altered, cut or misplaced in Redis
    redis_errors: int = 0
    redis_breaker_opened: int = 0

    def to_dict(self) -> dict[str, int]:
        return {item.name: getattr(self, item.name) for item in fields(self)}


@dataclass(slots=True)
class StoreState:
    """Shared by session, stager, disk writer and evictor. Fields below `lock` need it held."""

    config: StoreConfig
    index: PrefixIndex
    host: HostTier | None
    disk: DiskTier | None
    policy: PagePolicy
    admission: DiskAdmission
    secret: bytes
    clock: Callable[[], float] = time.monotonic
    wall_clock: Callable[[], float] = time.time
    pid: int = field(default_factory=os.getpid)
    lock: threading.RLock = field(default_factory=threading.RLock)
    # Held while slots go from the lists below to the tier; taken before `lock`.
    freeing: threading.Lock = field(default_factory=threading.Lock)
    changed: threading.Condition = field(init=False)
    disk_work: threading.Condition = field(init=False)  # the disk writer waits here
    closed: bool = False
    warm: bool = True  # False while the trees are being rebuilt from disk
    trees: dict[bytes, TreeInfo] = field(default_factory=dict)
    writers: list[str] = field(default_factory=lambda: [""])
    writer_ids: dict[str, int] = field(default_factory=lambda: {"": 0})
    pending: set[tuple[bytes, bytes]] = field(default_factory=set)  # (root, key) being written
    condemned: dict[int, Left] = field(default_factory=dict)  # and why each has to go
    unwritten: set[int] = field(default_factory=set)  # pages that the disk did not take so far
    counters: Counters = field(default_factory=Counters)
    ghosts: GhostList = field(default_factory=GhostList)
    meters: Meters = field(default_factory=Meters)
    conversations: Conversations = field(default_factory=Conversations)
    next_sequence: int = 1
    # Told the keys of pages that leave the disk, before their slots can be used again.
    on_left_disk: Callable[[list[bytes]], None] | None = None
    # On disk, no page's any more: to be freed, or wiped and freed, without holding the lock.
    unused_slots: list[int] = field(default_factory=list)
    wiped_slots: list[int] = field(default_factory=list)
    # Pages that Redis has are in the index while somebody needs them. Such a page is in no other
    # tier, and neither is any below it: so what Redis loses never costs a page of this store.
    redis: RedisTier | None = None

    recorder: Recorder | None = None  # of look-ups, if asked for
    tenancy: Tenancy = NO_QUOTAS
    disk_use: dict[str, int] = field(default_factory=dict)  # bytes of slots on disk, by tenant
    disk_recounts: list[DiskRecount] = field(default_factory=list)  # under way, in pieces
    staging_use: Callable[[str], int] = lambda tenant: 0  # bytes, besides the arena
    # Tenants above their share whose leases keep others from theirs: a server ends some of them.
    wanted_back: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.changed = threading.Condition(self.lock)
        self.disk_work = threading.Condition(self.lock)

    def require_open(self) -> None:
        """Raise unless this store may be used by this process now."""
        if os.getpid() != self.pid:
            raise RuntimeError(
                "this store was opened by another process and does not survive fork(); "
                "open it after the fork, or start workers with the 'spawn' method"
            )
        if self.closed:
            raise ClosedError("the store is closed; open it again with Store.open()")

    def breathe(self) -> None:
        """Between two holds of the lock by one thread: a lock that is free for no time at all goes
        to nobody else."""
        time.sleep(BREATH_S)

    def end_pins(self) -> None:
        """End the pins whose time has come, in short holds of the lock."""
        while True:
            with self.lock:
                if self.closed or not self.index.expire_pins(self.clock(), PIECE_PAGES):
                    return
            self.breathe()

    def pieces(self, count: int) -> Iterator[slice]:
        """Parts of so many items, each to be worked on in one hold of the lock, which the caller
        takes: what is true of an item may have changed when its turn comes."""
        for at in range(0, count, PIECE_PAGES):
            if at:
                self.breathe()
            yield slice(at, at + PIECE_PAGES)

    def lease_bytes_max(self, tenant: str) -> int | None:
        """Bytes of pages that a tenant's sessions together may keep from moving: its share of the
        arena, or one extent if that is more. None: nobody has a share."""
        if tenant not in self.tenancy.quotas or self.host is None:
            return None
        return max(self.tenancy.host.share(tenant), self.host.extent_bytes)

    def take_wanted_back(self) -> set[str]:
        """Tenants above their shares whose leases keep another from its share, since last asked."""
        if not self.wanted_back:
            return set()
        with self.lock:
            wanted, self.wanted_back = self.wanted_back, set()
        return wanted

    @property
    def host_populated(self) -> bool:
        """Whether all memory of the arena is there; at start it comes in the background."""
        return self.host is None or self.host.wait_populated(0.0)

    def take_sequences(self, count: int) -> int:
        """The first of `count` sequence numbers that no page of this directory ever had."""
        first = self.next_sequence
        self.next_sequence += count
        return first

    def writer_id(self, name: str) -> int:
        """Intern a writer's name; past WRITERS_MAX names all share the empty one."""
        known = self.writer_ids.get(name)
        if known is not None:
            return known
        if len(self.writers) >= WRITERS_MAX:
            return 0
        self.writers.append(name)
        self.writer_ids[name] = len(self.writers) - 1
        return len(self.writers) - 1

    def record(self, page: int) -> PageRecord:
        """All that names a page, as the disk tier stores and compares it."""
        table = self.index.table
        parent = int(table.parent[page])
        tree = self.index.tree_of(page)
        info = self.trees[tree.root]
        return PageRecord(
            root=info.root,
            tenant=info.tenant,
            namespace=info.namespace,
            key=table.key[page].tobytes(),
            parent_key=table.key[parent].tobytes() if parent != NO_PAGE else bytes(16),
            sequence=int(table.sequence[page]),
            parent_sequence=int(table.sequence[parent]) if parent != NO_PAGE else 0,
            page_index=int(table.depth[page]),
            tokens=tree.tokens_of(page),
            extras=table.extras.get(page, b""),
            payload_bytes=int(table.payload_bytes[page]),
            checksum=table.checksum[page].tobytes(),
            writer=self.writers[int(table.writer[page])],
            created_s=int(table.created[page]),
        )

    def in_tier(self, pages: NDArray[np.int32], tier: int) -> NDArray[np.bool_]:
        """Which of these pages are in a tier."""
        here: NDArray[np.bool_] = (self.index.table.state[rows_of(pages)] >> tier) & 1 == 1
        return here

    def resident_pages(self, tier: int) -> int:
        """How many pages are in a tier."""
        return self.index.count_in(tier)

    def root_pages(self, root: bytes) -> list[int]:
        """First pages of a tree's chains; none for an unknown or empty tree."""
        tree = self.index.find_tree(root)
        return tree.children(NO_PAGE) if tree is not None else []

    def is_leased(self, page: int) -> bool:
        return self.index.leases_of(page) > 0

    def is_pinned(self, page: int) -> bool:
        return self.index.is_pinned(page)

    def cut_condemned(self, pages: NDArray[np.int32]) -> NDArray[np.int32]:
        """The leading pages of a chain that are not waiting to be dropped."""
        if not self.condemned:
            return pages
        for position, page in enumerate(pages.tolist()):
            if page in self.condemned:
                return pages[:position]
        return pages

    def drop_subtree(self, page: int, why: Left = Left.DAMAGE) -> bool:
        """Remove a page and all below it from every tier; False when someone still reads there.

        A page that can't go now is condemned: no look-up finds it, and the next release tries
        again.
        """
        pages = self.index.subtree(page)
        if any(self.is_leased(item) for item in pages.tolist()):
            self.condemned.setdefault(page, why)
            return False
        self.remove_pages(pages[::-1], why)
        return True

    def remove_pages(
        self, pages: NDArray[np.int32], why: Left = Left.ROOM, *, wipe: bool = False
    ) -> None:
        """Take pages (children first, none leased) out of all tiers and out of the index.

        With `wipe` their slots wait for `free_wiped_slots`, which leaves no header of them on disk.
        """
        if len(pages) == 0:
            return
        for page in pages.tolist():
            self.index.unpin(page)
            self.condemned.pop(page, None)
            self.unwritten.discard(page)
        tiers = self.index.table.state[pages] & LOCAL_BITS
        mine = tiers != 0
        keys = self.index.table.key[pages[mine]]
        self.ghosts.note(keys, tiers[mine], why, self.wall_clock())
        self.admission.gone(keys)
        self.leave_host(pages)
        self.leave_disk(pages, wipe=wipe)
        remote = self.leave_redis(pages)
        self.index.remove(pages)
        self.counters.pages_dropped += len(pages) - remote
        self.changed.notify_all()

    def leave_host(self, pages: NDArray[np.int32]) -> int:
        """Take those of `pages` that are in the arena out of it; how many there were."""
        resident = pages[self.in_tier(pages, HOST)]
        if len(resident) and self.host is not None:
            self.host.free_many(self.index.clear_tier(resident, HOST).tolist())
        return len(resident)

    def leave_disk(self, pages: NDArray[np.int32], *, wipe: bool = False) -> int:
        """Take those of `pages` that are on disk off it; `free_unused_slots` ends their life."""
        resident = pages[self.in_tier(pages, DISK)]
        if len(resident):
            if self.on_left_disk is not None:
                self.on_left_disk([self.index.table.key_of(page) for page in resident.tolist()])
            slots = self.wiped_slots if wipe else self.unused_slots
            left = self.index.clear_tier(resident, DISK)
            self.count_disk(resident, left, -1)
            slots.extend(left.tolist())
            self.disk_work.notify_all()
        return len(resident)

    def enter_disk(self, pages: NDArray[np.int32], slots: NDArray[np.int64]) -> None:
        """Pages are on disk now too."""
        self.index.set_tier(pages, DISK, slots)
        self.count_disk(pages, slots, 1)

    def count_disk(self, pages: NDArray[np.int32], slots: NDArray[np.int64], sign: int) -> None:
        """Keep `disk_use` in step: these live pages have come (1) to those slots, or left (-1)."""
        for recount in self.disk_recounts:
            recount.moved(pages, slots, sign)
        for tenant, size in self.disk_bytes_by_tenant(pages, slots).items():
            self.disk_use[tenant] = self.disk_use.get(tenant, 0) + sign * size

    def disk_bytes_by_tenant(
        self, pages: NDArray[np.int32], slots: NDArray[np.int64]
    ) -> dict[str, int]:
        """Bytes of the slots that these pages have on disk."""
        found: dict[str, int] = {}
        if self.disk is None or len(pages) == 0:
            return found
        groups = self.index.by_root(pages)
        for root, ids in groups:
            tenant = self.trees[root].tenant
            mine = slots if len(groups) == 1 else slots[np.isin(pages, ids)]
            found[tenant] = found.get(tenant, 0) + self.disk.slots_bytes(mine)
        return found

    def leave_redis(self, pages: NDArray[np.int32]) -> int:
        """Know no longer that Redis has those of `pages` that it has; how many there were."""
        resident = pages[self.in_tier(pages, REDIS)]
        if len(resident) and self.redis is not None:
            self.redis.forget(self.index.clear_tier(resident, REDIS).tolist())
        return len(resident)

    def cut_remote(self, pages: NDArray[np.int32]) -> NDArray[np.int32]:
        """The leading pages of a chain that this store has itself."""
        if self.redis is None:
            return pages
        here = self.index.table.state[pages] & LOCAL_BITS != 0
        return pages if here.all() else pages[: int(here.argmin())]

    def drop_remote(self, page: int) -> bool:
        """Forget a page that only Redis has, and all below it; False when someone needs them."""
        pages = self.index.subtree(page)
        if any(self.is_leased(item) for item in pages.tolist()):
            return False
        self.remove_pages(pages[::-1])
        return True

    def drop_idle_remote(self, idle_s: float) -> int:
        """Forget pages that only Redis has and nobody asked for lately; how many."""
        if self.redis is None or not self.redis.usage().used_slots:
            return 0
        now = self.clock()
        pages = self.index.coldest(REDIS, now)
        recent = self.index.table.last_use[pages] > now - idle_s
        idle = pages[: int(recent.argmax())] if recent.any() else pages
        self.remove_pages(idle)
        return len(idle)

    def free_unused_slots(self) -> None:
        """Free what eviction left behind. Call it without the lock: it does I/O."""
        with self.freeing:
            with self.lock:
                slots, self.unused_slots = self.unused_slots, []
            if slots and self.disk is not None:
                self.disk.free_many(slots)

    def free_wiped_slots(self) -> None:
        """Wipe and free what was evicted on somebody's word. Call it without the lock.

        Commits what had left the disk before as well, so that no crash brings any of it back.
        Raises TierError when the disk fails: then something may be left to read.
        """
        self.free_unused_slots()
        with self.freeing:  # also waits for the slots that another thread is wiping
            with self.lock:
                slots, self.wiped_slots = self.wiped_slots, []
            if self.disk is None:
                return
            self.disk.free_many(slots, erase=True)

    def forget_empty_trees(self) -> None:
        """Drop what is known of trees that have no page: salts would pile up otherwise."""
        busy = {root for root, _ in self.pending}
        for root in [root for root in self.trees if self.index.find_tree(root) is None]:
            if root not in busy:
                del self.trees[root]

    def retry_condemned(self) -> None:
        """Drop what could not be dropped while it was leased."""
        for page, why in list(self.condemned.items()):
            if page in self.condemned:
                self.drop_subtree(page, why)
