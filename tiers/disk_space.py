"""How a disk tier spends its bytes: segments made and recycled, the catalog, the reserve file.

Invariant: segments + catalog + reserve file + quarantine + FIXED_BYTES <= capacity at every moment;
a file is made only when it fits, and a commit begins only when the catalog it can leave fits.
Callers hold the tier's commit lock.
"""

from __future__ import annotations

import errno
import logging
from typing import TYPE_CHECKING

from kvstore.tiers.catalog import catalog_name
from kvstore.tiers.process_limits import file_bytes_allowed, file_limit_said
from kvstore.tiers.segment import (
    FORMAT_VERSION,
    SEGMENT_HEAD_BYTES,
    SegmentShape,
    segment_id_of,
)
from kvstore.tiers.tier import SLOT_INDEX_MASK, TierError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kvstore.tiers.catalog import Catalog
    from kvstore.tiers.file_layer import FileLayer
    from kvstore.tiers.segment_set import Segment, SegmentSet
    from kvstore.tiers.store_directory import StoreHome
    from kvstore.tiers.tier import PageRecord

log = logging.getLogger("kvstore.tiers.disk")

RESERVE_NAME = "reserve"
QUARANTINE_PREFIX = "quarantine-"  # a catalog that was put aside; it counts in the capacity
CAPACITY_BYTES_MIN = 2 << 20
FIXED_BYTES = 128 << 10  # identity, locks and directory blocks
RESERVE_BYTES_MAX = 64 << 20  # given up when LMDB finds the disk full
RESERVE_SHARE = 64
SEGMENT_BYTES_MIN = 32 << 20  # few files for small stores: each costs a sync a group
SEGMENT_BYTES_MAX = 1 << 30
SEGMENTS_AIMED = 64
FIRST_SEGMENT_BYTES = 1 << 20
FIRST_SEGMENT_SHARE = 256
CATALOG_HEADROOM_BYTES = 512 << 10
DISK_MARGIN_BYTES = 1 << 20  # left free on the file system, for the catalog to grow
RECORD_BYTES_GUESS = 320  # catalog bytes a page, until the catalog tells
MAP_SHARE = 4  # the catalog's map is this part of the capacity, at least MAP_BYTES_MIN
MAP_BYTES_MIN = 64 << 20
CATALOG_GROWTH_BYTES = 16 << 20  # a limit on files has to leave it so much at a start
CATALOG_FILL = 1.6  # catalog bytes over record bytes: B-tree pages are not full


def catalog_map_bytes(capacity_bytes: int) -> int:
    """How large a catalog can become, for LMDB."""
    return max(capacity_bytes // MAP_SHARE, MAP_BYTES_MIN) // 4096 * 4096


def refuse_small_files(directories: Sequence[Path], files: FileLayer, capacity_bytes: int) -> None:
    """TierError when this process may not write files as large as this store's; changes nothing.

    Such as it has, with room for the catalog to grow, and such as it will make.
    """
    allowed = file_bytes_allowed()
    if allowed == float("inf"):
        return
    catalog = directories[0] / catalog_name(FORMAT_VERSION)
    needed = max(
        2 * files.tree_bytes(catalog) + CATALOG_GROWTH_BYTES,
        segment_bytes_most(capacity_bytes),
        *(
            files.tree_bytes(each / name)
            for each in directories
            if each.is_dir()
            for name in files.listdir(each)
            if segment_id_of(name) is not None
        ),
    )
    if allowed < needed:
        raise TierError(file_limit_said(needed))


def segment_bytes_most(capacity_bytes: int) -> int:
    """Bytes of the largest segment of a tier so large."""
    share = max(capacity_bytes // SEGMENTS_AIMED, SEGMENT_BYTES_MIN)
    return min(share, SEGMENT_BYTES_MAX, capacity_bytes // 4)


class DiskSpace:
    """The capacity of one disk tier, over all its directories."""

    def __init__(
        self, home: StoreHome, files: FileLayer, segments: SegmentSet, capacity_bytes: int
    ) -> None:
        if capacity_bytes < CAPACITY_BYTES_MIN:
            raise TierError(
                f"disk tier: capacity {capacity_bytes} bytes is less than {CAPACITY_BYTES_MIN}"
            )
        self.capacity_bytes = capacity_bytes
        self.last_refusal = ""
        self._home = home
        self._files = files
        self._segments = segments
        self._reserve = home.first / RESERVE_NAME
        self._reserve_bytes = 0
        self._quarantine_bytes = 0

    def measure(self) -> None:
        """Look at what lies in the directories besides segments and catalog."""
        first = self._home.first
        self._reserve_bytes = self._files.tree_bytes(self._reserve)
        self._quarantine_bytes = sum(
            self._files.tree_bytes(first / name)
            for name in self._files.listdir(first)
            if name.startswith(QUARANTINE_PREFIX)
        )

    def allocated_bytes(self, catalog: Catalog | None) -> int:
        """Bytes taken from the machine now, as far as they are known without a catalog."""
        return (catalog.file_bytes if catalog else 0) + self._besides_catalog()

    def excess_bytes(self, catalog: Catalog) -> int:
        """Bytes over the capacity, after a start with a smaller one; <= 0 when all is well."""
        return self.allocated_bytes(catalog) - self.capacity_bytes

    def check(self, catalog: Catalog) -> None:
        """Raise TierError when more is allocated than the capacity."""
        over = self.excess_bytes(catalog)
        if over > 0:
            raise TierError(f"{over} bytes over the capacity of {self.capacity_bytes}")

    def fits_commit(self, catalog: Catalog, added: Sequence[PageRecord], removed: int) -> bool:
        """Whether the catalog may grow as much as this commit could make it."""
        bound = catalog.growth_bound(added, removed)
        fits = catalog.file_bytes + bound + self._besides_catalog() <= self.capacity_bytes
        if not fits:
            self.last_refusal = (
                f"disk tier full: the catalog has {catalog.file_bytes} bytes and may not grow by "
                f"{bound}; capacity {self.capacity_bytes}"
            )
        return fits

    def grow(
        self,
        catalog: Catalog,
        store_uuid: bytes,
        payload_capacity: int,
        header_bytes: int,
        wanted: int,
    ) -> bool:
        """Make one more segment of this shape, recycling empty ones of others. False when full."""
        slot_bytes = payload_capacity + header_bytes
        target = self._slots_aimed(slot_bytes, header_bytes, wanted)
        enough = min(target, max(wanted, target // 8))
        while True:
            slots = min(target, self._slots_that_fit(catalog, slot_bytes))
            if slots < enough and self._recycle(catalog, slot_bytes, header_bytes):
                continue
            if slots < 1:
                self.last_refusal = (
                    f"disk tier full: {self.allocated_bytes(catalog)} of {self.capacity_bytes} "
                    f"bytes allocated, {len(self._segments)} segments"
                )
                return False
            return self._create(catalog, store_uuid, slots, slot_bytes, header_bytes)

    def drop(self, segment: Segment, catalog: Catalog) -> None:
        """Remove a segment whose page records are all gone: its record first, then the file."""
        catalog.remove_segment(segment.shape.segment_id)
        self._segments.remove(segment)

    def keep_reserve(self, catalog: Catalog) -> None:
        """Make the reserve file if it is missing and fits."""
        size = min(RESERVE_BYTES_MAX, self.capacity_bytes // RESERVE_SHARE) // 4096 * 4096
        if self._reserve_bytes >= size or size > -self.excess_bytes(catalog):
            return
        try:
            self._files.unlink(self._reserve)
            descriptor = self._files.open(self._reserve, create=True)
            try:
                self._files.allocate(descriptor, size)
            finally:
                self._files.close(descriptor)
            self._reserve_bytes = size
        except OSError as error:
            log.warning("%s: no reserve file: %s", self._reserve, error)
            self._files.unlink(self._reserve)
            self._reserve_bytes = 0

    def drop_reserve(self) -> None:
        """Give the reserve file's bytes to LMDB."""
        self._files.unlink(self._reserve)
        self._reserve_bytes = 0

    # -- private --------------------------------------------------------------------------------

    def _besides_catalog(self) -> int:
        return (
            self._segments.file_bytes + self._reserve_bytes + self._quarantine_bytes + FIXED_BYTES
        )

    def _slots_aimed(self, slot_bytes: int, header_bytes: int, wanted: int) -> int:
        """Slots of the next segment of a shape: as many as wanted, and twice as many each time.

        So a shape with few pages takes little from the others, one with many has few files.
        """
        capacity = self.capacity_bytes
        alike = sum(
            (segment.shape.slot_bytes, segment.shape.header_bytes) == (slot_bytes, header_bytes)
            for segment in self._segments
        )
        first = min(max(capacity // FIRST_SEGMENT_SHARE, FIRST_SEGMENT_BYTES), capacity // 16)
        most = min(segment_bytes_most(capacity), (SLOT_INDEX_MASK + 1) * slot_bytes)
        size = min(most, max(first << min(alike, 20), wanted * slot_bytes))
        return max(1, size // slot_bytes)

    def _slots_that_fit(self, catalog: Catalog, slot_bytes: int) -> int:
        """Slots for which there is room, with the catalog records that they will need."""
        a_record = int(catalog.record_bytes_mean(RECORD_BYTES_GUESS) * CATALOG_FILL)
        existing = sum(segment.shape.slots for segment in self._segments)
        catalog_bytes = max(catalog.file_bytes, existing * a_record) + CATALOG_HEADROOM_BYTES
        room = self.capacity_bytes - self._besides_catalog() - catalog_bytes - SEGMENT_HEAD_BYTES
        return max(0, room) // (slot_bytes + a_record)

    def _recycle(self, catalog: Catalog, slot_bytes: int, header_bytes: int) -> bool:
        """Give up a quarantined index, or a segment of another shape that holds nothing."""
        if self._quarantine_bytes:
            for name in self._files.listdir(self._home.first):
                if name.startswith(QUARANTINE_PREFIX):
                    self._files.remove_tree(self._home.first / name)
            self._quarantine_bytes = 0
            return True
        segment = self._segments.claim_empty(slot_bytes, header_bytes)
        if segment is None:
            return False
        try:
            self.drop(segment, catalog)
        except TierError:
            self._segments.restore(segment)
            raise
        return True

    def _create(
        self, catalog: Catalog, store_uuid: bytes, slots: int, slot_bytes: int, header_bytes: int
    ) -> bool:
        for directory in sorted(self._home.paths, key=self._fullness):
            space = self._files.space(directory)
            room = space.free_bytes - DISK_MARGIN_BYTES - SEGMENT_HEAD_BYTES
            shape = SegmentShape(
                self._segments.next_id(),
                self._home.paths.index(directory),
                max(1, min(slots, room // slot_bytes)),
                slot_bytes,
                header_bytes,
            )
            try:
                if room < slot_bytes:
                    raise OSError(errno.ENOSPC, "no space left")
                segment = self._segments.create(shape, directory, store_uuid)
            except OSError as error:
                self.last_refusal = (
                    f"disk tier full: {space.free_bytes} of {space.total_bytes} bytes free on "
                    f"{directory}, a segment needs {shape.file_bytes}: {error.strerror}"
                )
                continue
            try:
                catalog.put_segment(shape)
            except TierError:
                self._segments.remove(segment)
                raise
            return True
        return False

    def _fullness(self, directory: Path) -> float:
        held = self._segments.bytes_in(directory)
        return held / max(1, held + self._files.space(directory).free_bytes)
