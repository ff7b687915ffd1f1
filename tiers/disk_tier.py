"""The disk tier: pages in segment files, found through a catalog, kept through kill and power loss.

The life of a slot, each step durable before the next (rule R5):

    FREE --reserve--> RESERVED --pwrite, fdatasync, commit "used"--> USED
      ^                   |                                            |
      |                   +--free_many: nothing was published          +--free_many
      +---------------- commit "deleted", with the next group <------ FREED

Invariants: a slot is written only while no durable record names it; a page is visible only after
its bytes and its record are durable; segments + catalog + reserve + quarantine never exceed the
capacity. This module is the face: `disk_recovery.py` opens, `disk_publisher.py` writes and commits,
`page_io.py` moves bytes, `disk_space.py` keeps the capacity. Callers choose what to write and free.
"""

from __future__ import annotations

import contextlib
import logging
import os
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from kvstore.tiers.disk_publisher import Publisher
from kvstore.tiers.disk_recovery import Recovery
from kvstore.tiers.disk_space import DiskSpace, catalog_map_bytes, refuse_small_files
from kvstore.tiers.disk_state import Counters, DiskState, TierState
from kvstore.tiers.encrypted_page import HEADER_SEAL_BYTES
from kvstore.tiers.file_layer import FileLayer
from kvstore.tiers.io_pool import IoPool
from kvstore.tiers.packed_page import fits
from kvstore.tiers.page_io import PageIo, PageTask, read_task
from kvstore.tiers.segment import NAME_BYTES_MAX, header_bytes_for, payload_class
from kvstore.tiers.segment_set import RESERVED, USED, SegmentSet
from kvstore.tiers.store_directory import StoreHome
from kvstore.tiers.tier import (
    SLOT_INDEX_BITS,
    Container,
    PageRecord,
    ReadStatus,
    TierError,
    Usage,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from kvstore.tiers.cipher import Cipher
    from kvstore.tiers.page_rows import RootRows

log = logging.getLogger("kvstore.tiers.disk")

IO_THREADS = 8
SYNC_THREADS_MAX = 4
QUEUE_CALLS_MAX = 1024
QUEUE_WAIT_S = 10.0
CLOSE_WAIT_S = 5.0


class DiskTier:
    """The Tier contract over segment files. All calls are thread-safe."""

    catalog_problem = ""  # why `load` had to rebuild the catalog, if it had
    publisher_type: ClassVar[type[Publisher]] = Publisher
    page_io_type: ClassVar[type[PageIo]] = PageIo

    def __init__(
        self,
        home: StoreHome,
        capacity_bytes: int,
        files: FileLayer,
        *,
        io_threads: int,
        queue_calls_max: int,
        direct: bool,
    ) -> None:
        """Use DiskTier.open."""
        self._home = home
        self._files = files
        self._state = DiskState(str(home.first))
        self._segments = SegmentSet(
            files, self._state.lock, direct=direct, read_only=home.read_only
        )
        self._space = DiskSpace(home, files, self._segments, capacity_bytes)
        self._map_bytes = catalog_map_bytes(capacity_bytes)
        self._pool = IoPool(io_threads, queue_calls_max, QUEUE_WAIT_S)
        # Syncs must not stand in line behind the next group's writes.
        sync_threads = min(SYNC_THREADS_MAX, 2 * len(home.paths))
        self._syncer = IoPool(sync_threads, queue_calls_max, QUEUE_WAIT_S)
        self.cipher: Cipher | None = None  # see use_cipher
        self._page_io = self.page_io_type(files, self._pool, home.identity.store_uuid)
        self._publisher = self.publisher_type(
            home,
            files,
            self._segments,
            self._space,
            self._page_io,
            self._syncer,
            self._state,
            self._map_bytes,
        )
        self.plain_pages_found = 0  # by `load`, in a store that encrypts
        self._rows: list[RootRows] = []
        self._has_catalog = False
        self._pid = os.getpid()

    @classmethod
    def open(
        cls,
        directories: Sequence[Path],
        capacity_bytes: int,
        files: FileLayer | None = None,
        *,
        io_threads: int = IO_THREADS,
        queue_calls_max: int = QUEUE_CALLS_MAX,
        direct: bool = True,
        force_network: bool = False,
        for_a_look: bool = False,
        lock_wait_s: float = 0.0,
        load: bool = False,
        progress: Callable[[int, int], None] | None = None,
        cipher: Cipher | None = None,
    ) -> DiskTier:
        """Lock and open the store in `directories` (the first holds the catalog), or make one.

        Without `load` only the quick part is done, which can refuse: in use, foreign owner, newer
        format, no rights. The rest, `load`, is done by the first call that needs it, usually
        `rows`. `cipher` as in `use_cipher`, `for_a_look`, `lock_wait_s` as in StoreHome. TierError.
        """
        files = files or FileLayer()
        refuse_small_files(directories, files, capacity_bytes)
        home = StoreHome(
            directories, files, force=force_network, for_a_look=for_a_look, lock_wait_s=lock_wait_s
        )
        opened: DiskTier | StoreHome = home
        try:
            opened = tier = cls(
                home,
                capacity_bytes,
                files,
                io_threads=io_threads,
                queue_calls_max=queue_calls_max,
                direct=direct,
            )
            if cipher is not None:
                tier.use_cipher(cipher)
            if load:
                tier.load(progress)
        except BaseException:
            opened.close()
            raise
        return tier

    def use_cipher(self, cipher: Cipher) -> None:
        """Read encrypted pages and, if the cipher writes, encrypt new ones. Before `load`.

        The cipher belongs to this store from now on.
        """
        if self.state is not TierState.LOADING:
            raise ValueError("a cipher is given to a tier before it is loaded")
        cipher.store_uuid = self.store_uuid
        self.cipher = self._page_io.cipher = self._publisher.cipher = cipher

    def load(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Verify or rebuild the catalog and open the segments; `rows` has the pages after it.

        `progress` gets (slots done, slots in all) while a lost catalog is rebuilt. Does nothing
        when loaded already. Raises TierError.
        """
        with self._publisher.commit_lock:
            if self._state.state is not TierState.LOADING:
                return
            recovery = Recovery(
                self._home, self._files, self._segments, self._space, self._map_bytes, progress
            )
            recovery.cipher = self.cipher
            try:
                found = recovery.run()
            except TierError as error:
                self._state.become(TierState.READ_ONLY, str(error))
                raise
            self._rows, self.catalog_problem = found.rows, found.catalog_problem
            self._state.counters.records_dropped = found.records_dropped
            self._state.counters.key_missing = found.locked_pages
            self.plain_pages_found = found.plain_pages if self.encrypts else 0
            if found.catalog is None:
                reason = f"{self._home.first} is on a read-only file system"
                self._state.become(TierState.READ_ONLY, reason)
                return
            self._publisher.catalog = found.catalog
            self._has_catalog = True
            self._state.become(TierState.READY)

    # -- identity and state ---------------------------------------------------------------------

    @property
    def boot_number(self) -> int:
        """One more than at any earlier open of this store; durable since `open` returned."""
        return self._home.identity.boot_number

    @property
    def store_uuid(self) -> bytes:
        """16 bytes that name the store."""
        return self._home.identity.store_uuid

    @property
    def state(self) -> TierState:
        """What the tier can do now."""
        return self._state.state

    @property
    def counters(self) -> Counters:
        """Events since the tier was opened; a live object."""
        return self._state.counters

    @property
    def writable(self) -> bool:
        """Whether pages can be written, now or once it is loaded."""
        return self.state in (TierState.LOADING, TierState.READY)

    @property
    def problem(self) -> str:
        """Why the tier is not all it should be; empty when it is."""
        return "" if self.writable else self._state.reason

    @property
    def last_refusal(self) -> str:
        """Why `reserve` or `write_many` last fell short, with numbers."""
        return self.problem or self._space.last_refusal

    @property
    def direct_io(self) -> bool:
        """Whether all segments are read and written past the page cache."""
        return all(segment.direct for segment in self._segments)

    @property
    def encrypts(self) -> bool:
        """Whether new pages are encrypted."""
        return self.cipher is not None and self.cipher.writes

    def slot_bytes(self, payload_bytes: int, metadata_bytes: int = 0) -> int:
        """Bytes of the slot that such a page takes: a container of that size can hold it."""
        return payload_class(payload_bytes) + self._header_bytes(metadata_bytes)

    def slots_bytes(self, slots: NDArray[np.int64]) -> int:
        """Bytes of these slots together, headers included."""
        ids, counts = np.unique(slots >> SLOT_INDEX_BITS, return_counts=True)
        found = [self._segments.of(int(each) << SLOT_INDEX_BITS) for each in ids]
        return sum(
            segment.shape.slot_bytes * int(count)
            for segment, count in zip(found, counts, strict=True)
            if segment is not None
        )

    def stalled_s(self) -> float:
        """Seconds since the oldest disk call in progress began."""
        return self._pool.stalled_s()

    def rows(self) -> list[RootRows]:
        """The pages found by `load`, tree by tree; handed over once, so that memory is freed."""
        self._use()
        rows, self._rows = self._rows, []
        return rows

    def prove_read(self, *, failed: bool = False) -> None:
        """To be called when all rows were looked at, or that failed; see StoreHome."""
        with self._publisher.commit_lock:
            self._home.prove_read(failed=failed)

    # -- the contract ---------------------------------------------------------------------------

    def reserve(
        self, tenant: str, payload_bytes: int, count: int, metadata_bytes: int = 0
    ) -> list[int]:
        """Up to `count` slots for payloads of this size; fewer when full, see `last_refusal`.

        `metadata_bytes` is tokens + extras of the largest page, when they exceed about 3 KiB.
        Segments are shared by all tenants.
        """
        self._use()
        capacity = payload_class(payload_bytes)
        header = self._header_bytes(metadata_bytes)
        taken = self._take(capacity, header, count)
        if len(taken) == count or not self._state.ready:
            return taken
        publisher = self._publisher
        with publisher.commit_lock:
            taken += self._take(capacity, header, count - len(taken))
            if len(taken) < count and publisher.commit_freed():
                taken += self._take(capacity, header, count - len(taken))
            while len(taken) < count and publisher.grow(capacity, header, count - len(taken)):
                taken += self._take(capacity, header, count - len(taken))
        return taken

    def write_many(
        self, slots: Sequence[int], pages: Sequence[PageRecord], payloads: Sequence[memoryview]
    ) -> list[bool]:
        """Write reserved slots; True means durable: data synced and record committed.

        Payloads of >= payload_bytes each, 4 KiB-aligned for speed. Groups of 32 to 256 MiB are
        committed in order, each while the next one is written: calls of several are the fastest.
        A False page's slot stays reserved and unpublished.
        """
        self._use()
        if not len(slots) == len(pages) == len(payloads):
            raise ValueError(f"{len(slots)} slots, {len(pages)} pages, {len(payloads)} payloads")
        results = [False] * len(slots)
        if self.cipher is not None and self.cipher.writes:
            problem = self.cipher.prepare({page.tenant for page in pages})
            if problem:
                self._space.last_refusal = problem
                return results
        tasks = [
            self._write_task(position, slots[position], pages[position], payloads[position])
            for position in range(len(slots))
        ]
        for position in self._publisher.write([task for task in tasks if task is not None]):
            results[position] = True
        with self._state.lock:
            self.counters.pages_written += results.count(True)
            self.counters.write_errors += results.count(False)
        return results

    def read_many(
        self, slots: Sequence[int], pages: Sequence[PageRecord], buffers: Sequence[memoryview]
    ) -> list[ReadStatus]:
        """Fill buffers from slots, each verified against the page expected there.

        A buffer that is 4 KiB-aligned and at least aligned(payload_bytes) long is read into
        without a copy; its bytes past payload_bytes are then overwritten too. Its content is to be
        used only when the status is OK.
        """
        self._use()
        if not len(slots) == len(pages) == len(buffers):
            raise ValueError(f"{len(slots)} slots, {len(pages)} pages, {len(buffers)} buffers")
        if self.state is TierState.CLOSED:
            return [ReadStatus.ERROR] * len(slots)
        statuses, tasks = [ReadStatus.STALE] * len(slots), []
        with self._state.lock:
            for position, (slot, page) in enumerate(zip(slots, pages, strict=True)):
                buffer = buffers[position]
                if len(buffer) < page.payload_bytes:
                    raise ValueError(f"a buffer of {len(buffer)} for {page.payload_bytes} bytes")
                segment = self._segments.of(slot)
                if segment is not None and segment.state(slot) == USED:
                    tasks.append(read_task(position, slot, segment, page, buffer))
        for task, status in zip(tasks, self._page_io.read(tasks), strict=True):
            statuses[task.position] = status
        with self._state.lock:
            self.counters.count_reads(statuses)
        return statuses

    def pack_many(self, payloads: Sequence[memoryview]) -> list[memoryview | None]:
        """Payloads packed for smaller slots; None for what saves none. See PageIo.pack."""
        return self._page_io.pack(payloads)

    def free_many(self, slots: Sequence[int], *, erase: bool = False) -> None:
        """Give slots back. Published ones can be reserved again after the next commit.

        `erase` also wipes their headers on disk, and those of all slots freed before, and commits
        at once, so that no rebuild brings the pages back: for evictions by an operator. Raises
        TierError when that fails, ValueError for a slot that is not in use.
        """
        self._use()
        if not erase:
            self._publisher.free(slots)
            return
        # Under the lock: a commit in between would give the slots out, and others' pages be wiped.
        with self._publisher.commit_lock:
            self._publisher.free(slots)
            self._publisher.erase()

    def usage(self) -> Usage:
        """Bytes and slots, counted from the segments."""
        catalog = self._publisher.catalog if self._has_catalog else None
        allocated = self._space.allocated_bytes(catalog)
        with self._state.lock:
            used = [(segment.used, segment.shape) for segment in self._segments]
        return Usage(
            capacity_bytes=self._space.capacity_bytes,
            allocated_bytes=allocated,
            used_bytes=sum(count * shape.slot_bytes for count, shape in used),
            used_slots=sum(count for count, _ in used),
            free_slots=sum(shape.slots - count for count, shape in used),
        )

    def check(self) -> None:
        """Compare slot states, catalog and files; raises TierError with the numbers."""
        self._use()
        self._publisher.check()

    def published_slots(self) -> NDArray[np.int64]:
        """All slots that hold a durable page."""
        with self._state.lock:
            return self._segments.published()

    def is_published(self, slot: int) -> bool:
        """Whether a slot holds a durable page."""
        with self._state.lock:
            segment = self._segments.of(slot)
            return segment is not None and segment.state(slot) == USED

    def containers(self) -> list[Container]:
        """The segments, so that callers can choose what to empty."""
        with self._state.lock:
            return [segment.container() for segment in self._segments]

    def drain(self, container_id: int, *, on: bool) -> None:
        """Take no more slots in a segment, so that it can be emptied; or take them again."""
        with self._state.lock:
            segment = self._segments.of(container_id << SLOT_INDEX_BITS)
            if segment is not None:
                segment.drained = on

    def commit_frees(self) -> None:
        """Make slots that were freed available now."""
        self._use()
        self._publisher.commit_freed()

    def maintain(self) -> None:
        """To be called each minute: dead LMDB readers, the reserve file, a recount of slots."""
        with self._publisher.commit_lock:
            if self._state.ready:
                with self._state.lock:
                    wrong = self._segments.recount()
                    self.counters.accounting_fixes += wrong
                if wrong:
                    log.error("%s: counts of %d segments were wrong", self._home.first, wrong)
                self._publisher.catalog.reader_check()
                self._space.keep_reserve(self._publisher.catalog)

    def verify_payloads(self, on: bool) -> None:
        """Turn the payload check off, to price it in a bench; nothing else may."""
        self._page_io.verify_payloads = on

    def close(self) -> None:
        """Commit what was freed, close all files and give up the locks. Idempotent."""
        with self._publisher.commit_lock:
            if self.state is TierState.CLOSED or os.getpid() != self._pid:
                return
            if self._state.ready:
                with contextlib.suppress(TierError):  # said in the log; the disk is what it is
                    self._publisher.erase()
                self._publisher.prove()
            elif self.state is TierState.LOADING:
                self._home.excuse_start()
            self._state.become(TierState.CLOSED, "closed")
            if not (self._pool.close(CLOSE_WAIT_S) and self._syncer.close(CLOSE_WAIT_S)):
                log.error("%s: the disk does not answer; its files stay open", self._home.first)
                return
            if self._has_catalog:
                self._publisher.catalog.close()
            self._segments.close()
            self._home.close()

    def _header_bytes(self, metadata_bytes: int) -> int:
        return header_bytes_for(metadata_bytes + (HEADER_SEAL_BYTES if self.encrypts else 0))

    def _take(self, payload_capacity: int, header_bytes: int, count: int) -> list[int]:
        with self._state.lock:
            if not self._state.ready:
                return []
            return self._segments.take(payload_capacity, header_bytes, count)

    def _write_task(
        self, position: int, slot: int, page: PageRecord, payload: memoryview
    ) -> PageTask | None:
        segment = self._segments.of(slot)
        if segment is None or segment.state(slot) != RESERVED:
            raise ValueError(f"slot {slot} is not reserved")
        shape = segment.shape
        if not fits(page, len(payload), shape):
            raise ValueError(
                f"a page of {page.payload_bytes} bytes, with {len(payload)} given and "
                f"{shape.payload_capacity} in its slot"
            )
        names = max(len(page.tenant.encode()), len(page.writer.encode()))
        metadata = len(page.tokens) + len(page.extras)
        if names > NAME_BYTES_MAX or self._header_bytes(metadata) > shape.header_bytes:
            self._space.last_refusal = (
                f"disk tier: {metadata} bytes of tokens and extras, names of up to {names}, do not "
                f"fit a header of {shape.header_bytes}"
            )
            return None
        return PageTask(position, slot, segment, page, payload)

    def _use(self) -> None:
        """Refuse use after a fork; load when nobody did."""
        if os.getpid() != self._pid:
            raise RuntimeError(
                "a disk tier does not survive fork: start the process with 'spawn', or open the "
                "store after the fork"
            )
        if self.state is TierState.LOADING:
            self.load()
