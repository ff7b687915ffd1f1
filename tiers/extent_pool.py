"""The bytes of the host tier: memories taken from the machine, up to a fixed capacity.

Everything the tier takes is counted here, and nothing is taken past the capacity: extents, blank
memories that wait to become extents, staging, and memories that were given up but stay mapped
because somebody still looks at them. One background thread takes and populates memory, so that a
store serves with its first extent while the rest is still being zeroed by the kernel. A second one
has them in large pages.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstore.tiers.available_memory import HUGE_PAGE_BYTES
from kvstore.tiers.extent import Memfd
from kvstore.tiers.large_pages import LargePages
from kvstore.tiers.tier import ALIGNMENT_BYTES, TierError

if TYPE_CHECKING:
    import mmap
    from collections.abc import Callable

# The last memory takes what is left of the capacity; below this it isn't worth an extent.
REMAINDER_BYTES_MIN = 64 << 10

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Lingering:
    """A memory that was given up while somebody held a view of it."""

    mapping: weakref.ref[mmap.mmap]
    size: int


class ExtentPool:
    """Hands out populated memories of `extent_bytes`, or of any size that a caller needs.

    Thread-safe. `take` waits at most as long as it is told, and only while memory is on its way.
    """

    def __init__(self, capacity_bytes: int, extent_bytes: int, *, huge_pages: bool) -> None:
        self.capacity_bytes = capacity_bytes
        self.extent_bytes = extent_bytes
        self.huge_pages = huge_pages
        self._changed = threading.Condition()
        self._blanks: list[Memfd] = []
        self._lent: dict[int, Memfd] = {}  # by id(): extents and staging
        self._lingering: list[Lingering] = []
        self._making_bytes = 0  # by the thread, one memory at a time
        self._staging_bytes = 0  # being made by callers
        self._wanted: list[int] = []  # sizes that callers wait for; go before blanks
        self._failures = 0
        self._is_refused = False  # by the machine: no more blanks, until somebody asks
        self._closed = False
        self._large_pages = LargePages()
        self._thread = threading.Thread(target=self._run, name="kvstore-populate", daemon=True)
        self._thread.start()

    def take(self, bytes_min: int, wait_s: float) -> Memfd | None:
        """A memory of at least that many bytes, populated; None when there is no room for it."""
        bytes_min = self._whole_pages(bytes_min)
        deadline = time.monotonic() + wait_s
        with self._changed:
            failures = self._failures
            while not self._closed and self._failures == failures:
                memory = self._take_blank(bytes_min)
                if memory is not None:
                    return memory
                if not self._on_its_way(bytes_min):
                    if self._make_room(bytes_min):
                        self._wanted.append(max(bytes_min, min(self.extent_bytes, self._room())))
                        self._changed.notify_all()
                    elif not self._could_make_room(bytes_min):
                        return None
                if not self._changed.wait(deadline - time.monotonic()):
                    return None
        return None

    def take_staging(self, size: int, wait_s: float) -> Memfd | None:
        """Memory that its receiver may write, but not resize; None when there is no room.

        It is made here and now, in the caller's time (about 0.5 s a GiB).
        """
        deadline = time.monotonic() + wait_s
        with self._changed:
            while self._closed or not self._make_room(size):
                hopeless = self._closed or not self._could_make_room(size)
                if hopeless or not self._changed.wait(deadline - time.monotonic()):
                    return None
            self._staging_bytes += size
        memory = _populated(lambda: Memfd(size, shared_writable=True), lambda: False)
        with self._changed:
            self._staging_bytes -= size
            if memory is not None:
                self._lent[id(memory)] = memory
                self._large_pages.add(memory.mapping)
        return memory

    def give_back(self, memory: Memfd) -> None:
        """End a memory's life; its bytes may be taken anew once nobody looks at it any more."""
        with self._changed:
            del self._lent[id(memory)]
            self._end(memory)
            self._changed.notify_all()

    @property
    def allocated_bytes(self) -> int:
        """Bytes taken from the machine now, by counting."""
        with self._changed:
            return self._allocated()

    @property
    def ready_bytes(self) -> int:
        """Bytes of populated memories that nobody uses yet."""
        with self._changed:
            return sum(blank.size for blank in self._blanks)

    def wait_large_pages(self, wait_s: float) -> bool:
        """Wait until what there is lies in large pages, as far as the system has some."""
        return self._large_pages.wait(wait_s)

    def wait_populated(self, wait_s: float) -> bool:
        """Wait until the background thread has nothing left to take."""
        with self._changed:
            return self._changed.wait_for(self._is_idle, wait_s)

    def close(self) -> None:
        """Give all back to the machine. Views of it that are still held stay valid."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()
        self._large_pages.close()
        for memory in [*self._blanks, *self._lent.values()]:
            memory.close()
        self._blanks, self._lent = [], {}

    def check(self) -> None:
        """TierError when more is taken than the capacity allows."""
        with self._changed:
            allocated = self._allocated()
        if allocated > self.capacity_bytes:
            raise TierError(f"{allocated} bytes taken, the capacity is {self.capacity_bytes}")

    # All below runs under the lock, except making a memory.

    def _allocated(self) -> int:
        self._lingering = [entry for entry in self._lingering if entry.mapping() is not None]
        sizes = [memory.size for memory in (*self._blanks, *self._lent.values())]
        sizes += [entry.size for entry in self._lingering]
        return self._making_bytes + self._staging_bytes + sum(sizes)

    def _room(self) -> int:
        unit = self._whole_pages(1)
        return (self.capacity_bytes - self._allocated()) // unit * unit

    def _whole_pages(self, size: int) -> int:
        unit = HUGE_PAGE_BYTES if self.huge_pages else ALIGNMENT_BYTES
        return -(-size // unit) * unit

    def _take_blank(self, bytes_min: int) -> Memfd | None:
        fitting = [blank for blank in self._blanks if blank.size >= bytes_min]
        if not fitting:
            return None
        memory = max(fitting, key=lambda blank: blank.size)
        self._blanks.remove(memory)
        self._lent[id(memory)] = memory
        return memory

    def _on_its_way(self, bytes_min: int) -> bool:
        return self._making_bytes >= bytes_min or any(s >= bytes_min for s in self._wanted)

    def _could_make_room(self, size: int) -> bool:
        """Whether `size` bytes would fit once the thread has made what it is at."""
        blank_bytes = sum(blank.size for blank in self._blanks)
        return self._room() + blank_bytes + self._making_bytes >= size

    def _make_room(self, size: int) -> bool:
        """Give up blanks, smallest first, until `size` more bytes fit in the capacity."""
        if self._room() + sum(blank.size for blank in self._blanks) < size:
            return False
        self._blanks.sort(key=lambda blank: blank.size, reverse=True)
        while self._room() < size:
            self._end(self._blanks.pop())
        return True

    def _end(self, memory: Memfd) -> None:
        mapping = weakref.ref(memory.mapping)
        if not memory.close():
            self._lingering.append(Lingering(mapping, memory.size))

    def _blank_size(self) -> int:
        """Bytes of the next blank; 0 when the capacity is taken, or the machine gave no more."""
        room = self._room()
        if self._is_refused or room < min(REMAINDER_BYTES_MIN, self.extent_bytes):
            return 0
        return min(room, self.extent_bytes)

    def _is_idle(self) -> bool:
        return self._closed or not (self._making_bytes or self._wanted or self._blank_size())

    def _next_size(self) -> int:
        """Take the next memory to make off the list; 0 when there is none."""
        while self._wanted:
            size = self._wanted.pop(0)
            if size <= self._room():
                return size
            self._failures += 1  # somebody else took the room: the waiting caller goes on
            self._changed.notify_all()
        return self._blank_size()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._closed:
                    self._making_bytes = self._next_size()
                    if self._making_bytes:
                        break
                    self._changed.notify_all()
                    self._changed.wait()
                if self._closed:
                    return
            self._make(self._making_bytes)

    def _make(self, size: int) -> None:
        memory = _populated(lambda: Memfd(size, huge_pages=self.huge_pages), lambda: self._closed)
        with self._changed:
            self._making_bytes = 0
            self._is_refused = memory is None
            self._failures += memory is None
            if memory is not None:
                self._blanks.append(memory)
                if not self.huge_pages:
                    self._large_pages.add(memory.mapping)
            self._changed.notify_all()


def _populated(make: Callable[[], Memfd], stopped: Callable[[], bool]) -> Memfd | None:
    """A memory with all its pages, or None and a line in the log when the machine has none."""
    memory = None
    try:
        memory = make()
        memory.populate(stopped)
    except (TierError, MemoryError) as exc:
        _log.warning("host tier: stays smaller than its capacity: %s", str(exc) or "out of memory")
        if memory is not None:
            memory.close()
        return None
    return memory
