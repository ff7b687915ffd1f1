"""Large pages (2 MiB) behind shared memory, where the system has some: copies walk fewer tables.

A memfd is made of small pages unless an administrator has set shmem_enabled. What is populated can
be collapsed into large ones, whatever that setting is (Linux 6.1; not with "deny"), and is mapped
so at addresses that are multiples of their size. All of it is a matter of speed: where it can't be
had, memory is as it would be without. Must not be here: the life of memory, who may write it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import queue
import threading
import weakref

import numpy as np

LARGE_PAGE_BYTES = 2 << 20
# Collapsed in one call, in 2 to 50 ms: where memory is in pieces, finding room takes most of it.
STEP_BYTES = 8 << 20
NICE = 10
MISSES_MAX = 16  # attempts to map at a multiple of that size

# Constants that Python's mmap module does not have in all versions from 3.11 on.
MADV_COLLAPSE = 25
MAP_NORESERVE = 0x4000

HOPELESS = (errno.ENOMEM, errno.EINVAL)

_FAILED = ctypes.c_void_p(-1).value


def map_shared(fd: int, size: int, protection: int = mmap.PROT_READ | mmap.PROT_WRITE) -> mmap.mmap:
    """All of a file, shared; at a multiple of LARGE_PAGE_BYTES if it is as large and that works.

    Python's mmap takes no address. So a range is reserved, and a hole of the right size is left in
    it, which is where the kernel puts the next mapping: it takes the highest one that fits. Where
    that was another one, that one is full at the next attempt.
    """
    missed: list[mmap.mmap] = []
    try:
        while True:
            try:
                mapping = _map_in_hole(fd, size, protection)
            except OSError:  # address space is limited: what there is will do
                if not missed:
                    raise
                return missed.pop()
            address: int = np.frombuffer(mapping, np.uint8).ctypes.data
            is_placed = size < LARGE_PAGE_BYTES or address % LARGE_PAGE_BYTES == 0
            if is_placed or len(missed) == MISSES_MAX:
                return mapping
            missed.append(mapping)
    finally:
        for other in missed:
            other.close()


def _map_in_hole(fd: int, size: int, protection: int) -> mmap.mmap:
    hole = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    reserved = hole + 2 * LARGE_PAGE_BYTES
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    base = None
    if size >= LARGE_PAGE_BYTES:
        base = _LIBC.mmap(None, reserved, 0, flags, -1, 0)
    if base is None or base == _FAILED:
        return mmap.mmap(fd, size, mmap.MAP_SHARED, protection)
    # At least one byte of the reserved range stays on each side of the hole.
    start = base // LARGE_PAGE_BYTES * LARGE_PAGE_BYTES + LARGE_PAGE_BYTES
    _LIBC.munmap(start, hole)
    try:
        return mmap.mmap(fd, size, mmap.MAP_SHARED, protection)
    finally:
        _LIBC.munmap(base, start - base)
        _LIBC.munmap(start + hole, base + reserved - start - hole)


class LargePages:
    """A thread, at low priority, that has memories in large pages, one after the other.

    Memories may be in use meanwhile, and may end. Thread-safe.
    """

    def __init__(self) -> None:
        self._memories: queue.SimpleQueue[weakref.ref[mmap.mmap] | None] = queue.SimpleQueue()
        self._idle = threading.Condition()
        self._left = 0
        self._closed = False
        self._thread: threading.Thread | None = None
        self._held: ctypes.c_char | None = None  # no close() unmaps it meanwhile
        _ALL.add(self)

    def add(self, mapping: mmap.mmap) -> None:
        """A populated memory; it may be writable for others, but has to be so here."""
        if len(mapping) >= LARGE_PAGE_BYTES:
            with self._idle:
                self._left += 1
                if self._thread is None and not self._closed:
                    name = "kvstore-large-pages"
                    self._thread = threading.Thread(target=self._run, name=name, daemon=True)
                    self._thread.start()
            self._memories.put(weakref.ref(mapping))

    def wait(self, wait_s: float) -> bool:
        """Until all that was added was looked at; whether it was."""
        with self._idle:
            return self._idle.wait_for(lambda: not self._left, wait_s)

    def close(self) -> None:
        """End the thread, within a moment."""
        with self._idle:
            self._closed = True
        self._memories.put(None)
        if self._thread is not None:
            self._thread.join()

    def let_go(self) -> None:
        """Of the memory that it is at."""
        self._held = None

    def _run(self) -> None:
        with contextlib.suppress(OSError):  # a system where threads have no priority of their own
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        while (memory := self._memories.get()) is not None:
            at = 0
            while not self._closed and self._collapse(memory, at):
                at += STEP_BYTES
            with self._idle:
                self._left -= 1
                self._idle.notify_all()

    def _collapse(self, memory: weakref.ref[mmap.mmap], at: int) -> bool:
        """Have one step of a memory in large pages; False when another one makes no sense.

        Bytes stay what they are, also those that others read or write meanwhile.
        """
        mapping = memory()
        if mapping is None:
            return False
        try:
            # Not in a local variable: a fork would leave that, and so the memory, to the child.
            self._held = ctypes.c_char.from_buffer(mapping)
        except ValueError:  # closed
            return False
        try:
            whole = (len(mapping) - at) // LARGE_PAGE_BYTES * LARGE_PAGE_BYTES
            length = min(whole, STEP_BYTES)
            address = ctypes.addressof(self._held) + at
            if not length or address % LARGE_PAGE_BYTES:
                return False
            # None left, or a system that can't; else it is a page that somebody uses this moment.
            if _LIBC.madvise(address, length, MADV_COLLAPSE) and ctypes.get_errno() in HOPELESS:
                return False
            return whole > STEP_BYTES
        finally:
            self.let_go()


def _let_go_in_child() -> None:
    """The thread is not there to do it, and extent.py is about to close what it held."""
    for each in list(_ALL):
        each.let_go()


_ALL: weakref.WeakSet[LargePages] = weakref.WeakSet()

os.register_at_fork(after_in_child=_let_go_in_child)

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int),
    *(ctypes.c_int, ctypes.c_int, ctypes.c_long),
]
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_LIBC.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
