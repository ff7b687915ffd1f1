"""Memory that several processes share, and the layout of one extent of the arena in it.

Memory is a memfd: it has no name that another process could open or squat, and it is gone with
its last user, so nothing is left over after a crash. The maker maps it writable first and seals it
then: later mappings are read-only for ever, and nobody can change its size, so no receiver can
scribble on pages and no receiver can make the maker die of SIGBUS.

An extent is one such memory, with one tenant and one slot size while it lives:

    0              header: magic, version, state, boot epoch, container id, slot bytes, slots,
                   offset of the first slot; little-endian
    64             one 64-bit generation a slot
    data_offset    slots, each slot_bytes long; a multiple of 4096, as slot_bytes is

A generation is odd while its slot holds nothing to be read and even while it holds a published
page; it moves at every reserve, publish and free and never returns to an old value. A reader notes
it before a copy and compares after it: equal means that the bytes are those of that page.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import struct
import threading
import weakref
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np

from kvstore.tiers.large_pages import map_shared
from kvstore.tiers.tier import SLOT_INDEX_BITS, TierError, aligned

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

EXTENT_MAGIC = b"KVEXTENT"
EXTENT_VERSION = 1
HEADER = struct.Struct("<8sIIQQQQQ")
STATE = struct.Struct("<I")
STATE_OFFSET = 12
GENERATIONS_OFFSET = 64
GENERATION_BYTES = 8

# Constants that Python's mmap, fcntl and os modules do not have in all versions from 3.11 on.
F_SEAL_FUTURE_WRITE = 0x10
MADV_POPULATE_READ = 22
MADV_POPULATE_WRITE = 23
SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
READ_ONLY_SEALS = SIZE_SEALS | F_SEAL_FUTURE_WRITE

# Memory is taken in steps of this size, so that a stop is noticed soon (about 20 ms a step).
POPULATE_STEP_BYTES = 32 << 20


class ExtentState(IntEnum):
    """What a reader finds in a header."""

    RETIRED = 0  # emptied: unmap it
    LIVE = 1


class SlotState(IntEnum):
    """What the owner knows of one slot."""

    FREE = 0
    RESERVED = 1
    PUBLISHED = 2


class OwnedFd:
    """A file descriptor that is closed with its last owner, so that its number is never reused
    for something else while somebody is about to pass it on."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def fileno(self) -> int:
        return self._fd

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class ExtentRecord:
    """All that another process needs to map one extent; it gets `fd` by fd passing."""

    fd: OwnedFd
    boot_epoch: int
    container_id: int
    total_bytes: int
    slot_bytes: int
    slots: int
    data_offset: int


class Memfd:
    """`size` bytes of shared memory, mapped here writable and sealed for everybody else.

    With `shared_writable` receivers may write, but not resize. Not populated yet. Raises TierError.
    """

    def __init__(
        self, size: int, *, huge_pages: bool = False, shared_writable: bool = False
    ) -> None:
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        if huge_pages:
            flags |= os.MFD_HUGETLB | os.MFD_HUGE_2MB
        self.size = size
        try:
            with _CREATING:
                self.fd = OwnedFd(os.memfd_create("kvstore", flags))
                os.ftruncate(self.fd.fileno(), size)
                self.mapping = map_shared(self.fd.fileno(), size)
                _LIVE_MEMORIES.add(self)
            seals = SIZE_SEALS if shared_writable else READ_ONLY_SEALS
            fcntl.fcntl(self.fd.fileno(), fcntl.F_ADD_SEALS, seals)
            # Not in core dumps: pages are prompts. Not in forked children: they would read memory
            # that the parent goes on changing.
            self.mapping.madvise(mmap.MADV_DONTDUMP)
            self.mapping.madvise(mmap.MADV_DONTFORK)
        except OSError as exc:
            raise TierError(f"shared memory of {size} bytes: {exc.strerror}") from exc

    def populate(self, stopped: Callable[[], bool] = lambda: False) -> None:
        """Take the memory from the machine now, so that no later access faults or fails.

        Allocation comes first: it fails with ENOSPC or ENOMEM where touching would be SIGBUS.
        """
        address = ctypes.addressof(ctypes.c_char.from_buffer(self.mapping))
        try:
            for start in range(0, self.size, POPULATE_STEP_BYTES):
                if stopped():
                    return
                length = min(POPULATE_STEP_BYTES, self.size - start)
                os.posix_fallocate(self.fd.fileno(), start, length)
                prefault(address + start, length, MADV_POPULATE_WRITE)
        except OSError as exc:
            raise TierError(f"shared memory of {self.size} bytes: {exc.strerror}") from exc

    def read_only_fd(self) -> OwnedFd:
        """A descriptor without write access; the seals hold even where this is not possible."""
        fd = self.fd.fileno()
        try:
            return OwnedFd(os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC))
        except OSError:  # no /proc here
            return self.fd

    def close(self) -> bool:
        """Unmap and close. False while somebody still holds a view: unmapped with the last one."""
        self.fd = OwnedFd(-1)
        try:
            self.mapping.close()
        except BufferError:
            return False
        return True


class Extent:
    """One formatted memory: its header, its generations and its free list.

    Not thread-safe: the tier's lock guards it. `memory` goes on to the next extent when empty.
    """

    def __init__(
        self, memory: Memfd, container_id: int, tenant: str, slot_bytes: int, boot_epoch: int
    ) -> None:
        self.memory = memory
        self.container_id = container_id
        self.tenant = tenant
        self.slot_bytes = slot_bytes
        self.slots = slots_that_fit(memory.size, slot_bytes)
        self.data_offset = header_bytes(self.slots)
        self.boot_epoch = boot_epoch
        self.states = np.zeros(self.slots, np.uint8)
        self.sequences = np.zeros(self.slots, np.uint64)  # 0: unknown, written in place
        self._free = np.arange(self.slots, dtype=np.int64)[::-1].copy()
        self.free_count = self.slots
        self.generations: NDArray[np.uint64] = np.frombuffer(
            memory.mapping, np.dtype("<u8"), self.slots, GENERATIONS_OFFSET
        )
        self._format()
        _LIVE_EXTENTS.add(self)

    @property
    def used_slots(self) -> int:
        return self.slots - self.free_count

    def take(self, count: int) -> NDArray[np.int64]:
        """Reserve up to `count` free slots; their indices, the most recently freed first."""
        count = min(count, self.free_count)
        indices = self._free[self.free_count - count : self.free_count][::-1].copy()
        self.free_count -= count
        self.states[indices] = SlotState.RESERVED
        self.generations[indices] += np.uint64(2)
        return indices

    def publish(self, indices: NDArray[np.int64]) -> None:
        """Make reserved slots readable, after their bytes are complete."""
        self.generations[indices] += np.uint64(1)
        self.states[indices] = SlotState.PUBLISHED

    def give_back(self, indices: NDArray[np.int64]) -> None:
        """Free reserved or published slots; their generations say so to readers at once."""
        published = self.states[indices] == SlotState.PUBLISHED
        self.generations[indices] += np.where(published, 1, 2).astype(np.uint64)
        self.states[indices] = SlotState.FREE
        self.sequences[indices] = 0
        self._free[self.free_count : self.free_count + len(indices)] = indices[::-1]
        self.free_count += len(indices)

    def view(self, index: int, size: int) -> memoryview:
        """The first `size` bytes of a slot, writable, in this process's own mapping."""
        start = self.data_offset + index * self.slot_bytes
        return memoryview(self.memory.mapping)[start : start + size]

    def record(self) -> ExtentRecord:
        return ExtentRecord(
            self.memory.read_only_fd(),
            self.boot_epoch,
            self.container_id,
            self.memory.size,
            self.slot_bytes,
            self.slots,
            self.data_offset,
        )

    def retire(self) -> Memfd:
        """Tell readers to unmap, and hand the memory on. No slot may be in use."""
        STATE.pack_into(self.memory.mapping, STATE_OFFSET, ExtentState.RETIRED)
        self.generations = np.zeros(0, np.uint64)
        return self.memory

    def check(self) -> None:
        """Recount the free list, the states and what readers see; TierError with the numbers."""
        if HEADER.unpack_from(self.memory.mapping, 0) != self._header(ExtentState.LIVE):
            raise TierError(f"extent {self.container_id}: its header was overwritten")
        free = self._free[: self.free_count]
        found = int(np.count_nonzero(self.states == SlotState.FREE))
        if found != self.free_count or len(np.unique(free)) != found or self.states[free].any():
            raise TierError(
                f"extent {self.container_id}: {found} slots are free, "
                f"the free list has {self.free_count}"
            )
        even = self.generations % np.uint64(2) == 0
        wrong = np.flatnonzero(even != (self.states == SlotState.PUBLISHED))
        if len(wrong):
            state = SlotState(int(self.states[wrong[0]])).name.lower()
            raise TierError(
                f"extent {self.container_id}: slot {wrong[0]} is {state} at generation "
                f"{self.generations[wrong[0]]} ({len(wrong)} such slots)"
            )

    def _format(self) -> None:
        # Retired first, live last: a reader with an older layout never takes data for generations.
        HEADER.pack_into(self.memory.mapping, 0, *self._header(ExtentState.RETIRED))
        self.generations[:] = 1
        STATE.pack_into(self.memory.mapping, STATE_OFFSET, ExtentState.LIVE)

    def _header(self, state: ExtentState) -> tuple[bytes, int, int, int, int, int, int, int]:
        return (
            EXTENT_MAGIC,
            EXTENT_VERSION,
            int(state),
            self.boot_epoch,
            self.container_id,
            self.slot_bytes,
            self.slots,
            self.data_offset,
        )


def header_bytes(slots: int) -> int:
    """Bytes before the first slot of an extent with that many slots."""
    return aligned(GENERATIONS_OFFSET + GENERATION_BYTES * slots)


def slots_that_fit(size: int, slot_bytes: int) -> int:
    """The number of slots in an extent of `size` bytes; may be 0."""
    count = max(0, (size - GENERATIONS_OFFSET) // (slot_bytes + GENERATION_BYTES))
    while count and header_bytes(count) + count * slot_bytes > size:
        count -= 1
    return min(count, 1 << SLOT_INDEX_BITS)


def prefault(address: int, length: int, advice: int) -> None:
    """MADV_POPULATE_*, without holding the interpreter lock as mmap.madvise does.

    Linux before 5.14 does not know it: then the first accesses fault, which is only slower.
    """
    if _LIBC.madvise(ctypes.c_void_p(address), ctypes.c_size_t(length), advice):
        code = ctypes.get_errno()
        if code != errno.EINVAL:
            raise OSError(code, os.strerror(code))


_LIBC = ctypes.CDLL(None, use_errno=True)


def _abandon_in_child() -> None:
    """Let go of the parent's memory in a forked child, which would keep it alive unaccounted."""
    for extent in list(_LIVE_EXTENTS):
        extent.generations = np.zeros(0, np.uint64)
    for memory in list(_LIVE_MEMORIES):
        memory.close()
    _CREATING.release()


_LIVE_EXTENTS: weakref.WeakSet[Extent] = weakref.WeakSet()
_LIVE_MEMORIES: weakref.WeakSet[Memfd] = weakref.WeakSet()

# Held while a memory comes into being, and over a fork: so that the child knows all there are.
_CREATING = threading.Lock()

os.register_at_fork(
    before=_CREATING.acquire,
    after_in_parent=_CREATING.release,
    after_in_child=_abandon_in_child,
)
