"""From what lies in the directories to a sound catalog and open segments, whatever happened before.

    older format             migrate by copy, the old kept until the new is complete
    catalog sound            keep it; drop records whose slots are not there any more
    catalog lost or unsound  quarantine it, rebuild it from the headers of all slots
    segment without record   an unfinished or already dropped file: remove it

Killed at any point, it starts again from the same state: a rebuilt catalog is made under another
name and renamed when complete. Runs before the tier serves; takes no lock.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvstore.tiers.catalog import Catalog, CatalogDenied, CatalogError, catalog_name
from kvstore.tiers.catalog_scan import Scan, scan_catalog
from kvstore.tiers.disk_adoption import adopt
from kvstore.tiers.disk_migration import migrate
from kvstore.tiers.disk_space import QUARANTINE_PREFIX
from kvstore.tiers.encrypted_page import is_encrypted, read_encrypted_header
from kvstore.tiers.file_layer import aligned_buffer, read_fully, write_fully
from kvstore.tiers.segment import (
    FORMAT_VERSION,
    SEGMENT_HEAD_BYTES,
    SegmentShape,
    decode_page_header,
    encode_segment_head,
    segment_id_of,
)
from kvstore.tiers.segment_set import read_segment_head
from kvstore.tiers.tier import SLOT_INDEX_BITS, PageRecord, TierError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from kvstore.tiers.cipher import Cipher
    from kvstore.tiers.disk_space import DiskSpace
    from kvstore.tiers.file_layer import FileLayer
    from kvstore.tiers.page_rows import RootRows
    from kvstore.tiers.segment_set import SegmentSet
    from kvstore.tiers.store_directory import StoreHome

    Progress = Callable[[int, int], None]  # slots done, slots in all

log = logging.getLogger("kvstore.tiers.disk")

REBUILD_NAME = "catalog.rebuild"
REBUILD_BATCH_PAGES = 4096
HEADER_CHUNK_BYTES = 1 << 20  # slots smaller than half of it are read many at a time


@dataclass(slots=True)
class Recovered:
    """What recovery found and did."""

    catalog: Catalog | None  # None on a read-only file system
    rows: list[RootRows] = field(default_factory=list)
    records_dropped: int = 0
    locked_pages: int = 0  # encrypted, and given up for want of their key
    plain_pages: int = 0
    catalog_problem: str = ""  # why the catalog had to be rebuilt, if it had


@dataclass(frozen=True, slots=True)
class FoundPage:
    """A page that a slot's header names."""

    slot: int
    page: PageRecord
    encrypted: bool


@dataclass(slots=True)
class Recovery:
    """One recovery of one store."""

    home: StoreHome
    files: FileLayer
    segments: SegmentSet
    space: DiskSpace
    map_bytes: int
    progress: Progress | None = None
    cipher: Cipher | None = None
    _locked_headers: int = 0  # seen by a rebuild
    _catalog_problem: str = ""

    def run(self) -> Recovered:
        """Open everything. Raises TierError when the disk does not even allow that."""
        try:
            return self._run()
        except CatalogDenied:
            self.home.excuse_start()
            raise
        except OSError as error:
            raise TierError(f"{self.home.first}: {error}") from error

    def _run(self) -> Recovered:
        directory = self.home.first / catalog_name(FORMAT_VERSION)
        if self.home.read_only:
            return self._run_read_only(directory)
        self.files.remove_tree(self.home.first / REBUILD_NAME)
        present = self._segment_files()
        if self.home.is_new:  # it has no pages, or it would have been refused
            self.files.remove_tree(directory)
        scan = self._scan_or_rebuild(directory, present)
        self._require_keys(scan.locked_pages)
        try:
            return self._adopted(directory, present, scan)
        except CatalogError as error:
            if error.full or isinstance(error, CatalogDenied) or not present:
                raise
            self.segments.close()
            self._catalog_problem = str(error)
            self._quarantine(directory, str(error))
        present = self._segment_files()
        self._rebuild(directory, present)
        return self._adopted(directory, present, scan_catalog(directory, self.cipher))

    def _adopted(self, directory: Path, present: dict[int, Path], scan: Scan) -> Recovered:
        """Open what the scan found sound. A catalog that breaks only now raises CatalogError."""
        catalog = self._opened_catalog(directory, scan)
        try:
            recovered = self._recovered(catalog, scan)
            self._open_segments(scan.segments, present, catalog)
            self.space.measure()
            recovered.rows, recovered.records_dropped = adopt(
                scan, catalog, self.segments, self.space
            )
            self.space.keep_reserve(catalog)
        except BaseException:
            catalog.close()
            raise
        return recovered

    def _opened_catalog(self, directory: Path, scan: Scan) -> Catalog:
        """The catalog without the records that the scan found bad.

        A damaged tree can be read to its end and yet break when it is written: CatalogError.
        """
        catalog = Catalog(directory, self.map_bytes, self.files, self.cipher)
        try:
            catalog.put_meta(self.home.identity.store_uuid)
            catalog.remove_keys(scan.bad_keys)
        except BaseException:
            catalog.close()
            raise
        return catalog

    def _run_read_only(self, directory: Path) -> Recovered:
        """Take what is sound and change nothing."""
        try:
            scan = self._sound_scan(directory)
        except CatalogError as error:
            raise TierError(
                f"{self.home.first} is on a read-only file system and its catalog is unusable: "
                f"{error}"
            ) from error
        present = self._segment_files()
        for segment_id, shape in sorted(scan.segments.items()):
            if segment_id in present:
                self.segments.open(shape, present[segment_id])
        self._require_keys(scan.locked_pages)
        recovered = self._recovered(None, scan)
        recovered.rows, recovered.records_dropped = adopt(scan, None, self.segments, self.space)
        return recovered

    def _recovered(self, catalog: Catalog | None, scan: Scan) -> Recovered:
        plain = len(scan.fixed) + scan.locked_pages - scan.encrypted_pages
        if plain > 0 and self.cipher is not None and self.cipher.writes:
            log.warning(
                "%s: %d pages from before encryption are plain on disk, until they are evicted",
                self.home.first,
                plain,
            )
        locked = scan.locked_pages + self._locked_headers
        return Recovered(
            catalog,
            locked_pages=locked,
            plain_pages=max(0, plain),
            catalog_problem=self._catalog_problem,
        )

    def _require_keys(self, locked_pages: int) -> None:
        """A missing key gives its pages up; no keys at all are a mistake that costs nothing."""
        if locked_pages and self.cipher is None:
            self.home.excuse_start()
            raise TierError(
                f"{self.home.first}: {locked_pages} pages here are encrypted and no keys were "
                "given: open it with encrypt, and with keys_dir if the keys are elsewhere"
            )

    # -- catalog --------------------------------------------------------------------------------

    def _scan_or_rebuild(self, directory: Path, present: dict[int, Path]) -> Scan:
        if self.home.is_new:
            return Scan()
        try:
            migrate(self.home, self.files, self.map_bytes)
            scan = self._sound_scan(directory)
            # A page's record is one page. These stand for many, and headers know what they said.
            shared = [key for key in scan.bad_keys if key[:1] != b"P"]
            if shared:
                raise CatalogError(f"{len(shared)} records that many pages share are unsound")
            return scan
        except CatalogDenied:
            raise
        except CatalogError as error:
            if not present:  # nothing stored: a first start that was cut off
                self.files.remove_tree(directory)
                return Scan()
            self._catalog_problem = str(error)
            self._quarantine(directory, str(error))
        self._rebuild(directory, present)
        return scan_catalog(directory, self.cipher)

    def _sound_scan(self, directory: Path) -> Scan:
        identity = self.home.identity
        if self.home.suspicion:
            raise CatalogError(self.home.suspicion)
        scan = scan_catalog(directory, self.cipher)
        if scan.store_uuid != identity.store_uuid:
            found = scan.store_uuid.hex() if scan.store_uuid else "none"
            raise CatalogError(
                f"it names store {found}, the directory is store {identity.store_uuid.hex()}"
            )
        return scan

    def _quarantine(self, directory: Path, reason: str) -> None:
        """Put the bad index aside, keeping only the last one: it counts in the capacity."""
        for name in self.files.listdir(self.home.first):
            if name.startswith(QUARANTINE_PREFIX):
                self.files.remove_tree(self.home.first / name)
        kept = "nothing to keep"
        if directory.exists():
            aside = self.home.first / f"{QUARANTINE_PREFIX}{time.time_ns() // 1_000_000}"
            self.files.rename(directory, aside)
            kept = f"kept as {aside.name}"
        log.error(
            "%s: catalog unusable: %s; %s; rebuilding it from page headers",
            self.home.first,
            reason,
            kept,
        )

    def _rebuild(self, directory: Path, present: dict[int, Path]) -> None:
        staging = self.home.first / REBUILD_NAME
        catalog = Catalog(staging, self.map_bytes, self.files, self.cipher)
        try:
            shapes = self._shapes_from_heads(present)
            total = sum(shape.slots for shape, _ in shapes)
            done = 0
            for shape, path in shapes:
                batch: list[FoundPage] = []
                for index, page in enumerate(self._pages_in(shape, path), start=1):
                    if page is not None:
                        batch.append(page)
                    if len(batch) >= REBUILD_BATCH_PAGES or index == shape.slots:
                        self._commit(catalog, batch)
                        batch = []
                    if self.progress and (index % 1024 == 0 or index == shape.slots):
                        self.progress(done + index, total)
                done += shape.slots
                catalog.put_segment(shape)
            self._require_keys(self._locked_headers)
            catalog.put_meta(self.home.identity.store_uuid)
            log.warning("%s: catalog rebuilt: %d records", self.home.first, catalog.entries)
        finally:
            catalog.close()
        self.files.rename(staging, directory)
        self.home.new_catalog()

    def _commit(self, catalog: Catalog, batch: list[FoundPage]) -> None:
        """A page's record is encrypted if the page is, however the store is opened now."""
        for encrypted in (False, True):
            pages = [(each.slot, each.page) for each in batch if each.encrypted == encrypted]
            if pages or not encrypted:
                catalog.commit([], pages, encrypted=encrypted)

    def _pages_in(self, shape: SegmentShape, path: Path) -> Iterator[FoundPage | None]:
        """For each slot of a segment the page that its header names, or None."""
        many = max(1, HEADER_CHUNK_BYTES // 2 // shape.slot_bytes)
        reach = (many - 1) * shape.slot_bytes + shape.header_bytes
        block = aligned_buffer(reach)
        base = shape.segment_id << SLOT_INDEX_BITS
        descriptor = self.files.open(path)
        try:
            for start in range(0, shape.slots, many):
                got = self._read_headers(descriptor, block, shape.offset(start))
                for index in range(start, min(start + many, shape.slots)):
                    at = (index - start) * shape.slot_bytes
                    page = None
                    if at + shape.header_bytes <= got:
                        page = self._page_of(block[at : at + shape.header_bytes], base + index)
                    yield page
        finally:
            self.files.close(descriptor)

    def _page_of(self, header: memoryview, slot: int) -> FoundPage | None:
        uuid = self.home.identity.store_uuid
        encrypted = is_encrypted(header)
        content: bytes | memoryview | None = header
        if encrypted:
            raw = read_encrypted_header(header, slot, uuid)
            if raw is None:
                return None
            key = self.cipher.known(raw.key_id) if self.cipher is not None else None
            if key is None:
                self._locked_headers += 1
                return None
            content = raw.decrypt(key)
        page = None if content is None else decode_page_header(content, slot, uuid)
        return None if page is None else FoundPage(slot, page, encrypted)

    def _read_headers(self, descriptor: int, block: memoryview, offset: int) -> int:
        try:
            return read_fully(self.files, descriptor, [block], offset)
        except OSError as error:
            log.warning("headers at offset %d cannot be read: %s", offset, error)
            return 0

    # -- segments -------------------------------------------------------------------------------

    def _segment_files(self) -> dict[int, Path]:
        """Segment files by id, over all directories."""
        present: dict[int, Path] = {}
        for directory in self.home.paths:
            for name in self.files.listdir(directory):
                segment_id = segment_id_of(name)
                if segment_id is not None:
                    present[segment_id] = directory / name
                elif name.endswith(".tmp") and not self.home.read_only:
                    self.files.unlink(directory / name)
        return present

    def _shapes_from_heads(self, present: dict[int, Path]) -> list[tuple[SegmentShape, Path]]:
        shapes = []
        for segment_id, path in sorted(present.items()):
            head = read_segment_head(self.files, path)
            if (
                head is None
                or head[0].segment_id != segment_id
                or head[1] != self.home.identity.store_uuid
            ):
                log.error("%s: not a segment of this store; dropped", path)
                continue
            shapes.append((head[0], path))
        return shapes

    def _open_segments(
        self, shapes: dict[int, SegmentShape], present: dict[int, Path], catalog: Catalog
    ) -> None:
        """Open each recorded segment; remove files without record and records without file."""
        unclaimed = dict(present)
        for segment_id, shape in sorted(shapes.items()):
            path = unclaimed.pop(segment_id, None)
            if path is None:
                log.error("segment %d is missing; its pages are lost", segment_id)
                catalog.remove_segment(segment_id)
            else:
                self._open_segment(shape, path, catalog)
        for path in unclaimed.values():
            self.files.unlink(path)

    def _open_segment(self, shape: SegmentShape, path: Path, catalog: Catalog) -> None:
        uuid = self.home.identity.store_uuid
        head = read_segment_head(self.files, path)
        if head is not None and head[1] != uuid:
            log.error("%s belongs to another store; dropped", path)
            catalog.remove_segment(shape.segment_id)
            self.files.unlink(path)
            return
        descriptor = self.files.open(path)
        try:
            size = self.files.file_bytes(descriptor)
            if size < shape.file_bytes:
                log.error("%s has %d of %d bytes; the rest is lost", path, size, shape.file_bytes)
                self.files.allocate(descriptor, shape.file_bytes)
            if head is None or head[0] != shape:
                log.warning("%s: its head is damaged; written anew from the catalog", path)
                block = aligned_buffer(SEGMENT_HEAD_BYTES)
                block[:] = encode_segment_head(shape, uuid)
                write_fully(self.files, descriptor, [block], 0)
                self.files.fdatasync(descriptor)
        finally:
            self.files.close(descriptor)
        self.segments.open(shape, path)
