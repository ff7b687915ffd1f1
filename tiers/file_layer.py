"""The one door through which the disk tier touches files.

Everything but LMDB's own I/O goes through a FileLayer, so that tests can put a layer in between
that fails the N-th call, shortens a write, flips a byte, or forgets what was never synced. The real
layer adds nothing to the system calls but loops and modes. No policy and no format in here.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

FILE_MODE = 0o600
DIRECTORY_MODE = 0o700
IOV_MAX = 1024  # buffers one preadv/pwritev may take (Linux UIO_MAXIOV)
HUGE_PAGE_BYTES = 2 << 20
STATFS_BYTES = 256  # larger than struct statfs of any Linux

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class Space:
    """Bytes of a file system, as an unprivileged process sees them."""

    total_bytes: int
    free_bytes: int


class FileLayer:
    """System calls on files. Methods raise OSError; nothing else is hidden or retried."""

    def make_directory(self, path: Path) -> None:
        """Create `path` and missing parents; the last one gets mode 0700 under any umask."""
        if not path.is_dir():
            path.mkdir(parents=True, exist_ok=True)
            path.chmod(DIRECTORY_MODE)

    def open(
        self, path: Path, *, create: bool = False, direct: bool = False, read_only: bool = False
    ) -> int:
        """A read-write descriptor, close-on-exec; `create` fails when the file exists."""
        flags = (os.O_RDONLY if read_only else os.O_RDWR) | os.O_CLOEXEC | os.O_NOFOLLOW
        if create:
            flags |= os.O_CREAT | os.O_EXCL
        if direct:
            flags |= os.O_DIRECT
        descriptor = os.open(path, flags, FILE_MODE)
        if create:
            os.fchmod(descriptor, FILE_MODE)
        return descriptor

    def close(self, descriptor: int) -> None:
        """Close `descriptor`."""
        os.close(descriptor)

    def preadv(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        """One preadv call; returns bytes read, which may be fewer than asked."""
        return os.preadv(descriptor, buffers, offset)

    def pwritev(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        """One pwritev call; returns bytes written, which may be fewer than asked."""
        return os.pwritev(descriptor, buffers, offset)

    def fdatasync(self, descriptor: int) -> None:
        """Make data of the file durable. An error means that any of it may be lost."""
        os.fdatasync(descriptor)

    def allocate(self, descriptor: int, size: int) -> None:
        """Take blocks for bytes [0, size) from the file system now (posix_fallocate)."""
        os.posix_fallocate(descriptor, 0, size)

    def file_bytes(self, descriptor: int) -> int:
        """Size of the open file."""
        return os.fstat(descriptor).st_size

    def listdir(self, path: Path) -> list[str]:
        """Names in a directory, sorted."""
        return sorted(os.listdir(path))

    def tree_bytes(self, path: Path) -> int:
        """Bytes of a file, or of all files below a directory; 0 when it is not there."""
        try:
            entry = path.lstat()
        except FileNotFoundError:
            return 0
        if not stat.S_ISDIR(entry.st_mode):
            return entry.st_size
        return sum(self.tree_bytes(child) for child in path.iterdir())

    def unlink(self, path: Path) -> None:
        """Remove a file; missing is fine."""
        path.unlink(missing_ok=True)

    def remove_tree(self, path: Path) -> None:
        """Remove a file or a directory with all below; missing is fine. Follows no link."""
        if path.is_dir() and not path.is_symlink():
            for child in path.iterdir():
                self.remove_tree(child)
            path.rmdir()
        else:
            path.unlink(missing_ok=True)

    def rename(self, old: Path, new: Path) -> None:
        """Rename within a directory, durably."""
        os.rename(old, new)
        self.sync_directory(new.parent)

    def sync_directory(self, path: Path) -> None:
        """Make the names in a directory durable."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def read_file(self, path: Path, limit: int = 1 << 20) -> bytes:
        """Content of a small file, at most `limit` bytes."""
        with open(path, "rb") as stream:
            return stream.read(limit)

    def replace_file(self, path: Path, content: bytes) -> None:
        """Put `content` at `path` atomically and durably: the old file or the new, never a part."""
        staging = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        self.unlink(staging)
        descriptor = self.open(staging, create=True)
        try:
            write_fully(self, descriptor, [memoryview(content)], 0)
            self.fdatasync(descriptor)
        finally:
            self.close(descriptor)
        self.rename(staging, path)

    def lock(self, descriptor: int) -> bool:
        """Take an exclusive flock without waiting; False when another holds it."""
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                return False
            raise
        return True

    def space(self, path: Path) -> Space:
        """Total and free bytes of the file system that holds `path`."""
        found = os.statvfs(path)
        return Space(found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize)

    def file_system_magic(self, path: Path) -> int:
        """statfs' f_type: which kind of file system holds `path`."""
        answer = ctypes.create_string_buffer(STATFS_BYTES)
        if _libc.statfs(os.fsencode(path), answer) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), str(path))
        return int.from_bytes(answer.raw[:8], "little") & 0xFFFFFFFF  # long f_type comes first

    def catalog_committed(self, directory: Path) -> None:
        """Called after each durable LMDB commit; a layer with a durable image copies it here."""


def write_fully(
    files: FileLayer, descriptor: int, buffers: Sequence[memoryview], offset: int
) -> None:
    """Write all of `buffers` at `offset`, going on after short writes. Raises OSError."""
    left = [buffer.cast("B") for buffer in buffers if len(buffer)]
    while left:
        done = files.pwritev(descriptor, left[:IOV_MAX], offset)
        if done <= 0:
            raise OSError(errno.EIO, "write made no progress")
        offset += done
        left = _after(left, done)


def read_fully(
    files: FileLayer, descriptor: int, buffers: Sequence[memoryview], offset: int
) -> int:
    """Fill `buffers` from `offset`; returns bytes read, fewer only at the end of the file."""
    left = [buffer.cast("B") for buffer in buffers if len(buffer)]
    total = 0
    while left:
        done = files.preadv(descriptor, left[:IOV_MAX], offset + total)
        if done <= 0:
            return total
        total += done
        left = _after(left, done)
    return total


def _after(buffers: list[memoryview], done: int) -> list[memoryview]:
    for position, buffer in enumerate(buffers):
        if done < len(buffer):
            return [buffer[done:], *buffers[position + 1 :]]
        done -= len(buffer)
    return []


def aligned_buffer(size: int) -> memoryview:
    """A zeroed, page-aligned, writable buffer for O_DIRECT, freed with its last view."""
    return memoryview(mmap.mmap(-1, max(size, mmap.PAGESIZE)))[:size]


def contiguous_buffer(size: int) -> memoryview:
    """A page-aligned buffer of huge pages, where the machine gives any: few addresses for a disk.

    Private memory, so that huge pages need no more than the usual `madvise` setting.
    """
    room = -(-size // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    area = mmap.mmap(-1, room + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        area.madvise(mmap.MADV_HUGEPAGE)
    view = memoryview(area)
    start = -address_of(view) % HUGE_PAGE_BYTES
    return view[start : start + size]


def copy_bytes(target: memoryview, source: memoryview) -> None:
    """Copy without the interpreter lock, which a slice assignment holds. Equal lengths."""
    if len(source):
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def address_of(buffer: memoryview) -> int:
    """Where a contiguous buffer starts in memory."""
    address: int = np.frombuffer(buffer, np.uint8).__array_interface__["data"][0]
    return address
