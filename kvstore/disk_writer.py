"""The one thread that writes pages to disk: in order, in groups, never in anybody's way.

A queued page is leased, so it can't leave the arena before it is written. A page goes to disk only
after its parent (or with it, in one group), so what is on disk is always whole chains. A group is
worked on in pieces, so that look-ups get the lock in between.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from kvstore.shares import queue_room
from kvstore.state import DISK, HOST, NO_PAGE, PIECE_PAGES
from kvstore.tiers.packed_page import as_packed
from kvstore.tiers.tier import PageRecord, TierError, aligned

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import NDArray

    from kvstore.evictor import Evictor
    from kvstore.state import StoreState
    from kvstore.tiers.disk_tier import DiskTier

GROUP_BYTES_MAX = 64 * 1024 * 1024
GROUP_PAGES_MAX = 4096
GROUP_WAIT_S = 0.010
NO_BOUND = 1 << 62
IDLE_WAIT_S = 1.0
# A write that takes longer than this is a disk that hangs: commits then stay in memory only.
STALL_S = 2.0

# Pages that are stored alike: by owner, bytes of the page, bytes stored of it, bytes of its slot.
Shape: TypeAlias = tuple[str, int, int, int]

_log = logging.getLogger("kvstore.disk")


@dataclass(slots=True, eq=False)
class Ticket:
    """Somebody waits for these pages to be on disk."""

    remaining: set[int]
    failed: set[int] = field(default_factory=set)
    only_queue: bool = False  # pages evicted meanwhile need no writing, and are no failure


class DiskWriter:
    """Queue and thread. All but `run`'s I/O happens under the store's lock."""

    def __init__(self, state: StoreState, disk: DiskTier) -> None:
        self._state = state
        self._disk = disk
        self._evictor: Evictor | None = None
        self._queue: deque[int] = deque()
        self._queued: dict[int, str] = {}  # in the queue or being written; whose each page is
        self._writing: set[int] = set()
        self._tickets: list[Ticket] = []
        self._oldest_s = 0.0
        self._stopping = False
        self.dirty_bytes = 0
        self._dirty: dict[str, int] = {}  # of them, each tenant's
        self._over_quota: dict[str, str] = {}  # tenants whose last pages their quota kept off disk
        self._progress_s = state.clock()
        self._thread = threading.Thread(target=self._run, name="kvstore-disk-writer", daemon=True)

    def start(self, evictor: Evictor) -> None:
        self._evictor = evictor
        self._thread.start()

    @property
    def stalled(self) -> bool:
        """Whether a write has been going on for so long that nobody should wait for it."""
        return bool(self._writing) and self._state.clock() - self._progress_s > STALL_S

    def enqueue(self, pages: Iterable[int]) -> int:
        """Queue pages (parents before children) with those of their ancestors that need it."""
        if not self._disk.writable or self._stopping or self.stalled:
            return 0
        table, index = self._state.index.table, self._state.index
        taken = 0
        for page in pages:
            line = []
            while page != NO_PAGE and not self._on_disk(page) and page not in self._queued:
                line.append(page)
                page = int(table.parent[page])
            owner = self._state.trees[index.root_of(line[0])].tenant if line else ""
            for item in reversed(line):
                index.lease(item)
                self._queued[item] = owner
                self._queue.append(item)
                self._count(owner, int(table.payload_bytes[item]))
            taken += len(line)
        if taken:
            if len(self._queue) == taken:
                self._oldest_s = self._state.clock()
            self._state.disk_work.notify_all()
        return taken

    def ticket(self, pages: Iterable[int]) -> Ticket:
        """Watch pages and all their ancestors; those not on disk are queued at once."""
        chain = list(pages)
        self.enqueue(chain)
        table = self._state.index.table
        waiting: set[int] = set()
        lost: set[int] = set()
        for page in chain:
            while page != NO_PAGE and not self._on_disk(page) and page not in waiting:
                (waiting if page in self._queued else lost).add(page)
                page = int(table.parent[page])
        ticket = Ticket(waiting, lost)
        if waiting:
            self._tickets.append(ticket)
            self._state.disk_work.notify_all()  # what is queued waits for no more
        return ticket

    def wait(self, ticket: Ticket, deadline: float) -> bool:
        """True when all of the ticket's pages reached the disk by `deadline` (store's clock)."""
        state = self._state
        with state.lock:
            while ticket.remaining and not state.closed:
                left = deadline - state.clock()
                if left <= 0:
                    break
                state.changed.wait(left)
            if ticket in self._tickets:
                self._tickets.remove(ticket)
            return not ticket.remaining and not ticket.failed

    def flush(self, deadline: float) -> bool:
        """Wait until all that is queued now is on disk."""
        with self._state.lock:
            ticket = Ticket(set(self._queued), only_queue=True)
            if ticket.remaining:
                self._tickets.append(ticket)
                self._state.disk_work.notify_all()
        return self.wait(ticket, deadline)

    def cancel(self, pages: set[int]) -> None:
        """Take pages that are about to be evicted out of the queue, unless being written now."""
        going = (pages & self._queued.keys()) - self._writing
        if not going:
            return
        self._queue = deque(page for page in self._queue if page not in going)
        for ticket in self._tickets:
            if ticket.only_queue:
                ticket.remaining -= going
        self._finish(going, set())

    def room(self, tenant: str) -> int:
        """Bytes that the tenant may have queued besides what it has; others can't take its part.

        Unbounded while the disk hangs: then nothing is queued, and pages stay in memory only.
        """
        config, quotas = self._state.config, self._state.tenancy.quotas
        if self.stalled:
            return NO_BOUND
        return queue_room(tenant, self._dirty, config.dirty_bytes_max, quotas)

    def dirty_of(self, tenant: str) -> int:
        """Bytes of its pages that wait for the disk."""
        return self._dirty.get(tenant, 0)

    def why_lost(self, tenant: str) -> str:
        """Why pages of this tenant that were to be written are not on disk."""
        return self._over_quota.get(tenant, "the disk tier failed or is full")

    @property
    def is_busy(self) -> bool:
        """Whether pages are on their way this moment. The lock is held."""
        return bool(self._writing)

    def is_writing(self, pages: set[int]) -> bool:
        """Whether one of these pages is on its way to the disk this moment."""
        return not self._writing.isdisjoint(pages)

    def stop(self, deadline: float) -> bool:
        """Flush, then end the thread; False when the disk did not keep up."""
        done = self.flush(deadline)
        with self._state.lock:
            self._stopping = True
            self._state.disk_work.notify_all()
        self._thread.join(max(0.1, deadline - self._state.clock()))
        return done and not self._thread.is_alive()

    # The thread

    def _run(self) -> None:
        while True:
            group = self._next_group()
            if group is None:
                return
            self._progress_s = self._state.clock()
            if group:
                self._write_group(group)
            self._state.free_unused_slots()

    def _next_group(self) -> list[int] | None:
        """Wait for work; None when stopped, [] when only freed slots wait."""
        state = self._state
        with state.lock:
            while not self._queue:
                if self._stopping:
                    return None
                if state.unused_slots:
                    return []
                state.disk_work.wait(IDLE_WAIT_S)
            while not self._group_is_due():
                state.disk_work.wait(GROUP_WAIT_S)
            return self._pop_group()

    def _group_is_due(self) -> bool:
        return (
            self._stopping
            or bool(self._tickets)
            or self.dirty_bytes >= GROUP_BYTES_MAX
            or len(self._queue) >= GROUP_PAGES_MAX
            or self._state.clock() - self._oldest_s >= GROUP_WAIT_S
        )

    def _pop_group(self) -> list[int]:
        table = self._state.index.table
        group: list[int] = []
        size = 0
        while self._queue and len(group) < GROUP_PAGES_MAX:
            size += int(table.payload_bytes[self._queue[0]])
            if group and size > GROUP_BYTES_MAX:
                break
            group.append(self._queue.popleft())
        self._writing.update(group)
        self._oldest_s = self._state.clock()
        return group

    def _write_group(self, group: list[int]) -> None:
        written: dict[int, int] = {}
        try:
            payloads = self._payloads(group)
            slots = self._reserve(group, payloads)
            written = self._write(slots, payloads)
        except TierError as exc:
            _log.error("disk tier: write failed, its pages stay in memory only: %s", exc)
        except Exception:  # our bug; the thread must live on, or every later commit would wait
            _log.exception("disk tier: write failed, its pages stay in memory only")
        for part in self._state.pieces(len(group)):
            with self._state.lock:
                self._publish(group[part], written)

    def _payloads(self, group: list[int]) -> dict[int, memoryview]:
        """What to write of each page: its bytes in the arena, or these packed where that pays."""
        host, table = self._state.host, self._state.index.table
        if host is None:
            return {}
        sizes: list[int] = []
        places: list[int] = []
        for part in self._state.pieces(len(group)):
            with self._state.lock:
                sizes += table.payload_bytes[group[part]].tolist()
                places += table.slot[HOST][group[part]].tolist()
        raw = [host.view(place, aligned(size)) for place, size in zip(places, sizes, strict=True)]
        if self._state.config.disk_codec == "raw":
            return dict(zip(group, raw, strict=True))
        packed = self._disk.pack_many([view[:size] for view, size in zip(raw, sizes, strict=True)])
        return {
            page: view if better is None else better
            for page, view, better in zip(group, raw, packed, strict=True)
        }

    def _reserve(self, group: list[int], payloads: dict[int, memoryview]) -> dict[int, int]:
        """A disk slot for each page, as far as they go."""
        wants: dict[Shape, list[int]] = {}
        longest: dict[Shape, int] = {}  # metadata among them
        for part in self._state.pieces(len(group)):
            with self._state.lock:
                for shape, metadata, page in self._shapes(group[part], payloads):
                    wants.setdefault(shape, []).append(page)
                    longest[shape] = max(metadata, longest.get(shape, 0))
        slots: dict[int, int] = {}
        for shape, alike in wants.items():
            got = self._reserve_alike(*shape[:3], longest[shape], len(alike))
            slots.update(zip(alike, got, strict=False))
        return {page: slots[page] for page in group if page in slots}

    def _shapes(
        self, pages: list[int], payloads: dict[int, memoryview]
    ) -> Iterator[tuple[Shape, int, int]]:
        """The shape of each page, its metadata, and its id."""
        index = self._state.index
        for root, ids in index.by_root(pages):
            tree = index.find_tree(root)
            assert tree is not None, "pages that are queued are leased"
            sizes = index.table.payload_bytes[ids].tolist()
            for page, size in zip(ids.tolist(), sizes, strict=True):
                metadata = tree.page_bytes + len(index.table.extras.get(page, b""))
                stored = min(size, len(payloads[page]))
                slot_bytes = self._disk.slot_bytes(stored, metadata)
                yield (self._queued[page], size, stored, slot_bytes), metadata, page

    def _reserve_alike(
        self, owner: str, payload_bytes: int, stored_bytes: int, metadata_bytes: int, count: int
    ) -> list[int]:
        assert self._evictor is not None
        slot_bytes = self._disk.slot_bytes(stored_bytes, metadata_bytes)
        while True:  # its own coldest leave where its quota asks for that
            with self._state.lock:
                fits, left = self._evictor.disk_room(owner, slot_bytes, count)
            if fits >= count or not left:
                break
            self._state.breathe()
        self._note_quota(owner, slot_bytes, is_short=fits < count)
        count = fits
        slots = self._take(stored_bytes, metadata_bytes, count)
        while len(slots) < count:
            wanted = count - len(slots)
            evicted = self._make_room(owner, payload_bytes, slot_bytes, wanted)
            more = self._take(stored_bytes, metadata_bytes, wanted)
            if not more:  # its kind has nothing to give: take a segment from another
                evicted += self._empty_segment(owner, slot_bytes)
                more = self._take(stored_bytes, metadata_bytes, wanted)
            if not more and evicted == 0:
                break
            slots += more
        return slots

    def _note_quota(self, owner: str, slot_bytes: int, *, is_short: bool) -> None:
        assert self._evictor is not None
        with self._state.lock:
            self._over_quota.pop(owner, None)
            if is_short:
                self._over_quota[owner] = self._evictor.why_no_disk(owner, slot_bytes)

    def _make_room(self, owner: str, payload_bytes: int, slot_bytes: int, wanted: int) -> int:
        """Take pages off the disk, a piece at a time: their slots are freed by one commit."""
        assert self._evictor is not None
        wanted = self._evictor.batch(wanted)
        evicted = 0
        while evicted < wanted:
            count = min(PIECE_PAGES, wanted - evicted)
            with self._state.lock:
                left = self._evictor.make_room_disk(owner, payload_bytes, slot_bytes, count)
            if not left:
                break
            evicted += left
            self._state.breathe()
        return evicted

    def _empty_segment(self, owner: str, slot_bytes: int) -> int:
        """Take all pages off one segment, a piece at a time; how many."""
        assert self._evictor is not None
        evicted = 0
        while True:
            with self._state.lock:
                left = self._evictor.empty_segment(owner, slot_bytes)
                is_more = self._evictor.is_emptying(owner, slot_bytes)
            evicted += left
            if not left or not is_more or self._stopping:
                return evicted
            self._state.breathe()

    def _take(self, payload_bytes: int, metadata_bytes: int, count: int) -> list[int]:
        self._state.free_unused_slots()
        return self._disk.reserve("", payload_bytes, count, metadata_bytes)

    def _write(self, slots: dict[int, int], payloads: dict[int, memoryview]) -> dict[int, int]:
        """Write pages into slots; those that are now durable, with their slots."""
        if not slots:
            return {}
        records: list[PageRecord] = []
        for part in self._state.pieces(len(slots)):
            with self._state.lock:
                records += [self._state.record(page) for page in list(slots)[part]]
        chosen = [payloads[page] for page in slots]
        records = [
            as_packed(record) if len(payload) < record.payload_bytes else record
            for record, payload in zip(records, chosen, strict=True)
        ]
        kept = self._disk.write_many(list(slots.values()), records, chosen)
        failed = [slot for slot, ok in zip(slots.values(), kept, strict=True) if not ok]
        if failed:
            self._disk.free_many(failed)
        return {page: slot for (page, slot), ok in zip(slots.items(), kept, strict=True) if ok}

    def _publish(self, group: list[int], written: dict[int, int]) -> None:
        """Tell the index; a page whose parent did not make it is given up again.

        Those behind it in the group are leased meanwhile, and their ancestors with them.
        """
        state, table = self._state, self._state.index.table
        done: list[int] = []
        arrived: set[int] = set()
        for page in group:
            if page not in written:
                continue
            parent = int(table.parent[page])
            if parent == NO_PAGE or parent in arrived or self._on_disk(parent):
                done.append(page)
                arrived.add(page)
            else:
                state.unused_slots.append(written[page])
        if done:
            pages = np.array(done, dtype=np.int32)
            slots = np.array([written[page] for page in done], dtype=np.int64)
            state.enter_disk(pages, slots)
            state.counters.disk_bytes_written += self._disk.slots_bytes(slots)
            state.meters.move("host", "disk", int(table.payload_bytes[pages].sum()))
        state.counters.disk_pages_written += len(done)
        state.counters.disk_write_failures += len(group) - len(done)
        state.unwritten.difference_update(arrived)
        state.unwritten.update(set(group) - arrived)
        self._writing.difference_update(group)
        self._finish(set(group), arrived)

    def _finish(self, pages: set[int], arrived: set[int]) -> None:
        state, table = self._state, self._state.index.table
        for page in pages:
            self._count(self._queued.pop(page), -int(table.payload_bytes[page]))
            state.index.unlease(page)
        for ticket in self._tickets:
            ticket.failed |= (ticket.remaining & pages) - arrived
            ticket.remaining -= pages
        state.retry_condemned()
        state.changed.notify_all()

    def _count(self, owner: str, more_bytes: int) -> None:
        self.dirty_bytes += more_bytes
        self._dirty[owner] = self._dirty.get(owner, 0) + more_bytes
        if not self._dirty[owner]:
            del self._dirty[owner]

    def _on_disk(self, page: int) -> bool:
        return bool((self._state.index.table.state[page] >> DISK) & 1)

    def demote(self, pages: NDArray[np.int32]) -> int:
        """Queue pages that would otherwise be lost on leaving the arena; how many it took."""
        table, index = self._state.index.table, self._state.index
        room = self.room(self._state.trees[index.root_of(int(pages[0]))].tenant)
        fits = np.cumsum(table.payload_bytes[pages].astype(np.int64)) <= room
        return self.enqueue(pages[fits].tolist())
