"""Makes written pages visible and freed slots available: groups, syncs, commits, their failures.

Invariants: a record is committed only after the bytes it names were accepted whole and synced; a
slot is given out again only after the deletion of its record is committed; after a failed sync
nothing is committed any more, because the kernel may have dropped what it could not write, and says
so only once; a failed commit leaves no record of the pages it was for.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from kvstore.tiers.catalog import Catalog, CatalogError
from kvstore.tiers.catalog_scan import scan_catalog
from kvstore.tiers.disk_state import TierState
from kvstore.tiers.segment_set import FREE, FREED, RESERVED, USED, slots_by_segment, slots_in
from kvstore.tiers.tier import SLOT_INDEX_MASK, TierError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from contextlib import AbstractContextManager

    from kvstore.tiers.cipher import Cipher
    from kvstore.tiers.disk_space import DiskSpace
    from kvstore.tiers.disk_state import DiskState
    from kvstore.tiers.file_layer import FileLayer
    from kvstore.tiers.io_pool import IoPool
    from kvstore.tiers.page_io import PageIo, PageTask, PendingWrite
    from kvstore.tiers.segment_set import Segment, SegmentSet
    from kvstore.tiers.store_directory import StoreHome

log = logging.getLogger("kvstore.tiers.disk")

# A group has at least GROUP_BYTES_MIN, and grows while syncs and commits take more than
# SYNC_SHARE_MAX of the time: a drive with a protected cache syncs in 50 us, a virtual one in 5 ms,
# in which it could have written 12 MiB.
GROUP_BYTES_MIN = 32 << 20
GROUP_BYTES_MAX = 256 << 20
GROUP_PAGES_MAX = 4096
SYNC_SHARE_MAX = 0.05
GROUPS_AHEAD = 1  # groups on their way to the disk while another is synced and committed
FREE_BATCH = 4096  # records deleted in one commit
FREE_BATCH_TIGHT = 64  # the same when the catalog may hardly grow


class Publisher:
    """The only writer of a tier's catalog once it is loaded."""

    catalog: Catalog  # set when the tier is loaded, replaced after a failed commit

    def __init__(
        self,
        home: StoreHome,
        files: FileLayer,
        segments: SegmentSet,
        space: DiskSpace,
        page_io: PageIo,
        syncer: IoPool,
        state: DiskState,
        map_bytes: int,
    ) -> None:
        self.commit_lock = threading.RLock()  # catalog and files; taken before state.lock
        self.freed: dict[int, None] = {}  # slots in state FREED, oldest first
        self._wiped: set[int] = set()  # of the freed ones
        self._home = home
        self._files = files
        self._segments = segments
        self._space = space
        self._page_io = page_io
        self._syncer = syncer
        self._state = state
        self._map_bytes = map_bytes
        self.cipher: Cipher | None = None  # for the catalog when it is opened again
        self._group_bytes = GROUP_BYTES_MIN
        self._proven = False

    # -- pages ----------------------------------------------------------------------------------

    def write(self, tasks: Sequence[PageTask]) -> list[int]:
        """Write pages and publish them group by group; positions of those that are durable now.

        The next group is on its way to the disk while one is synced and committed.
        """
        pending: deque[PendingWrite] = deque()
        try:
            return self._write(tasks, pending)
        finally:
            for group in pending:
                group.batch.wait()  # the caller's memory is in use until then

    def free(self, slots: Sequence[int]) -> list[int]:
        """Give slots back; returns those that wait for a commit because a record names them."""
        published = []
        with self._state.lock:
            for slot in slots:
                segment = self._segments.of(slot)
                state = FREE if segment is None else segment.state(slot)
                if segment is None or state not in (RESERVED, USED):
                    raise ValueError(f"slot {slot} is not in use")
                if state == USED:
                    published.append(slot)
                    self._retire(segment, slot)
                else:
                    segment.set_state(slot, FREE)
        return published

    def commit_freed(self) -> bool:
        """Delete the records of all freed slots; True when some can be reserved again."""
        released = False
        with self.commit_lock:
            while self.freed and self._state.ready:
                batch = list(self.freed)[:FREE_BATCH]
                if not self._space.fits_commit(self.catalog, [], len(batch)):
                    batch = batch[:FREE_BATCH_TIGHT]
                try:
                    with self._guarded():
                        self.catalog.commit(batch)
                except CatalogError as error:
                    self.recover(error, batch)
                    return released
                self._release(batch)
                released = True
        return released

    def erase(self) -> None:
        """Wipe the headers of all freed slots on disk and commit at once. Raises TierError.

        Also of those that were freed for room and not written since: an older copy of a page that
        is meant may lie there, and a rebuild from headers would bring it back.

        Headers go before records. Cut off in between, records are left over wiped headers: those
        who read there find WIPED, and drop them. The other way round whole pages would be left
        that no record names and no eviction finds any more, for a later rebuild to bring back.
        """
        if not self._state.ready:
            raise TierError(f"disk tier: cannot erase pages: {self._state.reason}")
        with self.commit_lock:
            self._take_stale()
            try:
                for mine in slots_by_segment(list(self.freed)).values():
                    segment = self._segments.of(mine[0])
                    assert segment is not None, "freed slots have a segment"
                    self._page_io.erase(segment, mine)
                    segment.sync(self._files)
                    self._wiped.update(mine)
            except OSError as error:
                self._state.become(TierState.READ_ONLY, f"erasing failed: {error}")
            self.commit_freed()
            self._wiped.clear()
        if not self._state.ready:
            raise TierError(f"disk tier: {self._state.reason}")

    def _take_stale(self) -> None:
        """Nobody else gets these slots until they are wiped and released once more."""
        with self._state.lock:
            for segment in self._segments:
                for slot in segment.stale_slots():
                    self._retire(segment, slot)

    def grow(self, payload_capacity: int, header_bytes: int, wanted: int) -> bool:
        """Make one more segment of this shape; False when the tier is full."""
        if not self._state.ready:
            return False
        uuid = self._home.identity.store_uuid
        try:
            with self._guarded():
                return self._space.grow(self.catalog, uuid, payload_capacity, header_bytes, wanted)
        except CatalogError as error:
            self.recover(error, [])
            return False

    def prove(self) -> None:
        """The catalog survived a commit: the guard against crash loops starts from zero."""
        if not self._proven:
            self._proven = True
            self._home.prove_commit()

    def recover(self, error: CatalogError, slots: Sequence[int]) -> None:
        """After a failed commit: close, walk, reopen, delete what it may have left (R7, R8)."""
        log.error("%s; reopening it", error)
        self._space.last_refusal = str(error)
        self._state.counters.catalog_reopens += 1
        directory = self.catalog.directory
        try:
            self.catalog.close()
            if error.full:
                self._space.drop_reserve()
            scan_catalog(directory)
            self.catalog = Catalog(directory, self._map_bytes, self._files, self.cipher)
            self.catalog.commit(slots)
        except (CatalogError, OSError) as second:
            self._state.become(TierState.READ_ONLY, f"catalog failed: {second}")
            return
        self._release(slots)

    def check(self) -> None:
        """Compare slot states, catalog and files; raises TierError with the numbers.

        Nobody commits meanwhile; slots can be reserved, read and freed.
        """
        with self.commit_lock:
            with self._state.lock:
                self._segments.check()
                if not self._state.ready:
                    return  # its catalog may be closed
                states, waiting = self._segments.copy_states(), set(self.freed)
            used, freed = slots_in(states, USED), slots_in(states, FREED)
            if freed != waiting:
                raise TierError(f"{len(freed)} slots freed, {len(waiting)} waiting for a commit")
            recorded = set(self.catalog.slots())
            if recorded - freed != used:
                raise TierError(
                    f"{len(used - recorded)} used slots without record, "
                    f"{len(recorded - used - freed)} records of unused slots"
                )
            self._space.check(self.catalog)

    # -- private --------------------------------------------------------------------------------

    def _write(self, tasks: Sequence[PageTask], pending: deque[PendingWrite]) -> list[int]:
        published: list[int] = []
        start = 0
        while start < len(tasks) or pending:
            begin = time.monotonic()
            while start < len(tasks) and len(pending) <= GROUPS_AHEAD:
                end = start + _group_length(tasks, start, self._group_bytes)
                if self._state.ready:
                    pending.append(self._page_io.start_write(tasks[start:end]))
                start = end
            if pending:
                group = pending.popleft()
                written = self._sound(group.tasks, group.wait())
                written_at = time.monotonic()
                published += self._publish(written)
                now = time.monotonic()
                self._fit_group(now - written_at, now - begin)
        return published

    def _sound(self, group: Sequence[PageTask], errors: Sequence[OSError | None]) -> list[PageTask]:
        """The pages whose bytes the kernel took whole. Only these may be published."""
        failed = [error for error in errors if error is not None]
        if failed:
            self._space.last_refusal = f"disk tier: {len(failed)} writes failed: {failed[0]}"
            log.warning("%s: %d writes failed: %s", self._home.first, len(failed), failed[0])
        return [task for task, error in zip(group, errors, strict=True) if error is None]

    def _publish(self, written: Sequence[PageTask]) -> list[int]:
        """Sync, then commit; positions of the pages that are durable now."""
        if written and self._sync({id(task.segment): task.segment for task in written}.values()):
            with self.commit_lock:
                return self._commit(written)
        return []

    def _sync(self, segments: Iterable[Segment]) -> bool:
        """One fdatasync a file. A failure makes the tier read-only: it is never tried again."""
        calls = [_sync_call(segment, self._files) for segment in segments]
        for answer in self._syncer.run(calls):
            if isinstance(answer, Exception):
                reason = f"sync failed: {answer}; bytes may be lost; open it anew"
                self._state.become(TierState.READ_ONLY, reason)
                return False
        return True

    def _commit(self, tasks: Sequence[PageTask]) -> list[int]:
        """Add the records of written pages and delete those of freed slots in one transaction.

        Near the capacity the catalog may hardly grow, and a small commit can make it grow less:
        then the pages are committed in parts. Returns the positions of those that were.
        """
        if not self._state.ready:
            return []
        pages = [task.page for task in tasks]
        freed = list(self.freed)[:FREE_BATCH]
        if not self._space.fits_commit(self.catalog, pages, len(freed)):
            self.commit_freed()
            freed = []
            if not self._space.fits_commit(self.catalog, pages, 0):
                half = len(tasks) // 2
                return self._commit(tasks[:half]) + self._commit(tasks[half:]) if half else []
        try:
            with self._guarded():
                self.catalog.commit(freed, [(task.slot, task.page) for task in tasks])
                self.prove()
        except CatalogError as error:
            self.recover(error, [task.slot for task in tasks] + freed)
            return []
        with self._state.lock:
            for task in tasks:
                task.segment.set_state(task.slot, USED)
        self._release(freed)
        return [task.position for task in tasks]

    def _guarded(self) -> AbstractContextManager[None]:
        """Around what writes to the catalog: it counts who dies in there before a page is in."""
        return contextlib.nullcontext() if self._proven else self._home.risky_commit()

    def _retire(self, segment: Segment, slot: int) -> None:
        """The slot has a durable record: it may not be written before that is deleted."""
        segment.set_state(slot, FREED)
        self.freed[slot] = None

    def _release(self, slots: Iterable[int]) -> None:
        """The records of these slots are gone for good: the freed ones may be handed out."""
        with self._state.lock:
            self._state.counters.commits += 1
            for slot in slots:
                segment = self._segments.of(slot)
                if segment is not None and slot in self.freed:
                    del self.freed[slot]
                    segment.set_state(slot, FREE)
                    segment.stale[slot & SLOT_INDEX_MASK] = slot not in self._wiped

    def _fit_group(self, sync_s: float, cycle_s: float) -> None:
        """Larger groups when syncs and commits cost too much of the time, smaller when little."""
        share = sync_s / max(cycle_s, 1e-9)
        if share > SYNC_SHARE_MAX:
            self._group_bytes = min(self._group_bytes * 2, GROUP_BYTES_MAX)
        elif share < SYNC_SHARE_MAX / 4:
            self._group_bytes = max(self._group_bytes // 2, GROUP_BYTES_MIN)


def _group_length(tasks: Sequence[PageTask], start: int, group_bytes: int) -> int:
    """How many tasks from `start` on make up a group; at least one."""
    size = 0
    for count, task in enumerate(tasks[start : start + GROUP_PAGES_MAX]):
        size += task.page.payload_bytes
        if count and size > group_bytes:
            return count
    return min(GROUP_PAGES_MAX, len(tasks) - start)


def _sync_call(segment: Segment, files: FileLayer) -> Callable[[], None]:
    return lambda: segment.sync(files)
