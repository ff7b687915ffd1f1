"""The segment files of a disk tier: open descriptors, and which slot is in which state.

Invariant: a slot is handed out only from state FREE, and becomes FREE again only when no catalog
record of it exists on disk. Callers hold the tier's lock where they look at states; files are made
and removed without it, and only the entry in the set is changed under it.
No page format and no catalog in here.
"""

from __future__ import annotations

import errno
import threading
from typing import TYPE_CHECKING

import numpy as np

from kvstore.tiers.file_layer import aligned_buffer, read_fully, write_fully
from kvstore.tiers.segment import (
    SEGMENT_HEAD_BYTES,
    SegmentShape,
    decode_segment_head,
    encode_segment_head,
    segment_name,
)
from kvstore.tiers.tier import SLOT_INDEX_BITS, SLOT_INDEX_MASK, Container, TierError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from kvstore.tiers.file_layer import FileLayer

FREE, RESERVED, USED, FREED = range(4)  # FREED: given back, its record's deletion not committed yet


class Segment:
    """One open segment file."""

    def __init__(self, shape: SegmentShape, path: Path, descriptor: int, *, direct: bool) -> None:
        self.shape = shape
        self.path = path
        self.descriptor = descriptor
        self.direct = direct
        self.states = bytearray(shape.slots)
        # 1 where the slot was given back and its header not wiped, as far as this process knows.
        self.stale = bytearray(shape.slots)
        self.free = shape.slots
        self.drained = False  # no slot is taken here
        self.directory = path.parent
        self._sync_lock = threading.Lock()
        self._sync_error: OSError | None = None

    @property
    def base(self) -> int:
        """Number of the first slot."""
        return self.shape.segment_id << SLOT_INDEX_BITS

    def take(self, count: int) -> list[int]:
        """Reserve up to `count` free slots, lowest first, so that runs are contiguous."""
        taken: list[int] = []
        at = -1
        while self.free and len(taken) < count:
            at = self.states.find(FREE, at + 1)
            self.states[at] = RESERVED
            self.free -= 1
            taken.append(self.base + at)
        return taken

    def set_state(self, slot: int, state: int) -> None:
        """Move one slot to `state`."""
        at = slot & SLOT_INDEX_MASK
        self.free += (state == FREE) - (self.states[at] == FREE)
        self.states[at] = state

    def state(self, slot: int) -> int:
        """State of one slot."""
        return self.states[slot & SLOT_INDEX_MASK]

    def stale_slots(self) -> list[int]:
        """Free slots that still have the header of a page that left."""
        free = np.frombuffer(self.states, np.uint8) == FREE
        stale = np.flatnonzero(free & (np.frombuffer(self.stale, np.uint8) == 1))
        slots: list[int] = (stale + self.base).tolist()
        return slots

    @property
    def used(self) -> int:
        """Slots that are not FREE."""
        return self.shape.slots - self.free

    def sync(self, files: FileLayer) -> None:
        """fdatasync. Once it failed it fails for ever: the kernel reports lost writes only once."""
        with self._sync_lock:
            if self._sync_error is not None:
                raise OSError(errno.EIO, f"an earlier sync failed: {self._sync_error}")
            try:
                files.fdatasync(self.descriptor)
            except OSError as error:
                self._sync_error = error
                raise

    def container(self) -> Container:
        """This segment as the tier contract shows it. Segments are shared by all tenants."""
        return Container(
            self.shape.segment_id, "", self.shape.slot_bytes, self.shape.slots, self.used
        )


class SegmentSet:
    """All segments of a tier, by id."""

    def __init__(
        self, files: FileLayer, lock: threading.Lock, *, direct: bool, read_only: bool = False
    ) -> None:
        """`lock` is the tier's. `direct` asks for O_DIRECT, else and without it I/O is buffered."""
        self._files = files
        self._lock = lock
        self._direct = direct
        self._read_only = read_only
        self._segments: dict[int, Segment] = {}  # replaced, never changed: iterators stay good
        self._next_directory = 0

    def __len__(self) -> int:
        return len(self._segments)

    def __iter__(self) -> Iterator[Segment]:
        return iter(self._segments.values())

    def of(self, slot: int) -> Segment | None:
        """The segment of a slot; None when there is no such slot."""
        segment = self._segments.get(slot >> SLOT_INDEX_BITS)
        if segment is None or slot < 0 or (slot & SLOT_INDEX_MASK) >= segment.shape.slots:
            return None
        return segment

    def bytes_in(self, directory: Path) -> int:
        """Bytes of segment files in one directory."""
        return sum(s.shape.file_bytes for s in self if s.directory == directory)

    @property
    def file_bytes(self) -> int:
        """Bytes of all segment files."""
        return sum(segment.shape.file_bytes for segment in self)

    def next_id(self) -> int:
        """A segment id that no open segment has had."""
        return 1 + max(self._segments, default=0)

    def take(self, payload_capacity: int, header_bytes: int, count: int) -> list[int]:
        """Reserve up to `count` slots of one shape, spread over directories, contiguous in each."""
        fitting: dict[Path, list[Segment]] = {}
        for segment in self:
            shape = segment.shape
            if (
                segment.free
                and not segment.drained
                and shape.payload_capacity == payload_capacity
                and shape.header_bytes == header_bytes
            ):
                fitting.setdefault(segment.directory, []).append(segment)
        if not fitting:
            return []
        self._next_directory += 1
        order = sorted(fitting)
        order = (
            order[self._next_directory % len(order) :] + order[: self._next_directory % len(order)]
        )
        share = -(-count // len(order))
        taken: list[int] = []
        for limit in (share, count):  # an even share of each directory, then whatever has room
            for directory in order:
                wanted = min(limit, count - len(taken))
                for segment in fitting[directory]:
                    got = segment.take(wanted)
                    taken.extend(got)
                    wanted -= len(got)
        return taken

    def create(self, shape: SegmentShape, directory: Path, store_uuid: bytes) -> Segment:
        """Make a segment file, allocated and durable. Raises OSError and leaves nothing behind."""
        path = directory / segment_name(shape.segment_id)
        descriptor = self._files.open(path, create=True)
        try:
            self._files.allocate(descriptor, shape.file_bytes)
            head = aligned_buffer(SEGMENT_HEAD_BYTES)
            head[:] = encode_segment_head(shape, store_uuid)
            write_fully(self._files, descriptor, [head], 0)
            self._files.fdatasync(descriptor)
            self._files.sync_directory(directory)
            segment = self.open(shape, path)
        except OSError:
            self._files.unlink(path)
            raise
        finally:
            self._files.close(descriptor)
        return segment

    def open(self, shape: SegmentShape, path: Path) -> Segment:
        """Open an existing segment file with all slots FREE."""
        direct = self._direct
        try:
            descriptor = self._files.open(path, direct=direct, read_only=self._read_only)
        except OSError as error:
            if not direct or error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            direct = False
            descriptor = self._files.open(path, read_only=self._read_only)
        if direct and not self._reads_direct(descriptor):
            self._files.close(descriptor)
            direct = False
            descriptor = self._files.open(path, read_only=self._read_only)
        segment = Segment(shape, path, descriptor, direct=direct)
        with self._lock:
            self._segments = self._segments | {shape.segment_id: segment}
        return segment

    def claim_empty(self, slot_bytes: int, header_bytes: int) -> Segment | None:
        """Take an empty segment of another shape out of the set, so that no slot of it is reserved.

        `remove` or `restore` it then.
        """
        with self._lock:
            for segment in self:
                shape = (segment.shape.slot_bytes, segment.shape.header_bytes)
                if segment.used == 0 and shape != (slot_bytes, header_bytes):
                    self._without(segment)
                    return segment
        return None

    def restore(self, segment: Segment) -> None:
        """Put a claimed segment back."""
        with self._lock:
            self._segments = self._segments | {segment.shape.segment_id: segment}

    def remove(self, segment: Segment) -> None:
        """Close and unlink a segment whose slots are all FREE and whose record is gone."""
        with self._lock:
            self._without(segment)
        self._files.close(segment.descriptor)
        self._files.unlink(segment.path)
        self._files.sync_directory(segment.directory)

    def close(self) -> None:
        """Close all files."""
        for segment in self._segments.values():
            self._files.close(segment.descriptor)
        self._segments = {}

    def copy_states(self) -> list[tuple[int, bytes]]:
        """Of each segment its first slot and a copy of all its slots' states."""
        return [(segment.base, bytes(segment.states)) for segment in self]

    def published(self) -> NDArray[np.int64]:
        """All slots that hold a page."""
        found = [
            np.flatnonzero(np.frombuffer(segment.states, np.uint8) == USED) + segment.base
            for segment in self
        ]
        return np.concatenate(found) if found else np.empty(0, np.int64)

    def recount(self) -> int:
        """Set the counts of free slots to what the states say; how many were wrong."""
        wrong = 0
        for segment in self:
            free = segment.states.count(FREE)
            wrong += free != segment.free
            segment.free = free
        return wrong

    def check(self) -> None:
        """Recount free slots. Raises TierError."""
        for segment in self:
            free = segment.states.count(FREE)
            if free != segment.free:
                raise TierError(f"{segment.path}: {segment.free} slots free, {free} counted")

    def _without(self, segment: Segment) -> None:
        number = segment.shape.segment_id
        self._segments = {key: value for key, value in self._segments.items() if key != number}

    def _reads_direct(self, descriptor: int) -> bool:
        """Whether O_DIRECT reads work: some file systems take the flag and refuse the I/O."""
        try:
            block = aligned_buffer(SEGMENT_HEAD_BYTES)
            return read_fully(self._files, descriptor, [block], 0) == SEGMENT_HEAD_BYTES
        except OSError as error:
            if error.errno == errno.EINVAL:
                return False
            raise


def read_segment_head(files: FileLayer, path: Path) -> tuple[SegmentShape, bytes, int] | None:
    """Shape, store uuid and format of a segment file on disk; None when its head is not sound."""
    descriptor = files.open(path, read_only=True)
    try:
        block = aligned_buffer(SEGMENT_HEAD_BYTES)
        read_fully(files, descriptor, [block], 0)
        return decode_segment_head(bytes(block))
    finally:
        files.close(descriptor)


def slots_in(states: Iterable[tuple[int, bytes]], state: int) -> set[int]:
    """All slots in one state, from `copy_states`."""
    found: set[int] = set()
    for base, copy in states:
        found.update((np.flatnonzero(np.frombuffer(copy, np.uint8) == state) + base).tolist())
    return found


def slots_by_segment(slots: Iterable[int]) -> dict[int, list[int]]:
    """Slots grouped by segment id."""
    grouped: dict[int, list[int]] = {}
    for slot in slots:
        grouped.setdefault(slot >> SLOT_INDEX_BITS, []).append(slot)
    return grouped
