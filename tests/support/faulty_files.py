"""File layers for tests: one that fails where it is told to, one that forgets what was not synced.

Both do real I/O on real files underneath, so that everything above runs unchanged. LMDB does its
own I/O: the image layer takes a copy of the catalog at each commit, which is what a power cut would
leave.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvstore.tiers.file_layer import FileLayer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

SECTOR_BYTES = 512
KINDS = ("preadv", "pwritev", "fdatasync", "allocate", "open", "rename", "sync_directory")


@dataclass
class Fault:
    """At the `number`-th call of `kind` (1 = the next): an errno, or one of

    "short" (a part is done and said so), "torn" (a part is done, then EIO), "flip" (one bit of what
    is read changes), "kill" (the process dies by SIGKILL before the call).
    """

    kind: str
    number: int
    action: str | int = errno.EIO
    times: int = 1  # how many calls in a row


class FaultyFiles(FileLayer):
    """The real layer, with faults at chosen calls; counts all calls."""

    def __init__(self, faults: Sequence[Fault] = (), seed: int = 0) -> None:
        self.calls = dict.fromkeys(KINDS, 0)
        self.fired: list[str] = []
        self._faults = list(faults)
        self._lock = threading.Lock()
        self._rng = random.Random(seed)

    def arm(self, fault: Fault) -> None:
        """Add a fault, counted from now on."""
        with self._lock:
            base = self.calls[fault.kind]
            self._faults.append(Fault(fault.kind, base + fault.number, fault.action, fault.times))

    def disarm(self) -> None:
        """Forget all faults that have not fired."""
        with self._lock:
            self._faults.clear()

    def _due(self, kind: str) -> str | int | None:
        with self._lock:
            self.calls[kind] += 1
            number = self.calls[kind]
            for fault in self._faults:
                if fault.kind == kind and fault.number <= number < fault.number + fault.times:
                    self.fired.append(f"{kind} {number}: {fault.action}")
                    return fault.action
        return None

    def _raise(self, kind: str) -> str | None:
        action = self._due(kind)
        if action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if isinstance(action, int):
            raise OSError(action, os.strerror(action))
        return action

    def open(
        self, path: Path, *, create: bool = False, direct: bool = False, read_only: bool = False
    ) -> int:
        self._raise("open")
        return super().open(path, create=create, direct=direct, read_only=read_only)

    def preadv(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        action = self._raise("preadv")
        if action == "short" and (sum(map(len, buffers)) > 8192):
            return super().preadv(descriptor, _head(buffers, 4096), offset)
        done = super().preadv(descriptor, buffers, offset)
        if action == "flip":
            _flip(buffers, self._rng.randrange(max(done, 1)))
        return done

    def pwritev(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        action = self._raise("pwritev")
        if action == "short":
            return super().pwritev(descriptor, _head(buffers, 4096), offset)
        if action == "torn":  # a part reaches the disk, then the call fails
            super().pwritev(descriptor, _head(buffers, 4096), offset)
            raise OSError(errno.EIO, "torn write")
        return super().pwritev(descriptor, buffers, offset)

    def fdatasync(self, descriptor: int) -> None:
        self._raise("fdatasync")
        super().fdatasync(descriptor)

    def allocate(self, descriptor: int, size: int) -> None:
        self._raise("allocate")
        super().allocate(descriptor, size)

    def rename(self, old: Path, new: Path) -> None:
        self._raise("rename")
        super().rename(old, new)

    def sync_directory(self, path: Path) -> None:
        self._raise("sync_directory")
        super().sync_directory(path)


class UnsyncedFiles(FileLayer):
    """The mutant that never syncs data: fdatasync does nothing."""

    def fdatasync(self, descriptor: int) -> None:
        pass


@dataclass
class _Inode:
    """Durable content, and what was written since."""

    durable: bytearray = field(default_factory=bytearray)
    pending: list[tuple[int, bytes]] = field(default_factory=list)

    def sync(self) -> None:
        for offset, content in self.pending:
            _put(self.durable, offset, content)
        self.pending.clear()


class ImageFiles(FileLayer):
    """Keeps a durable image beside the live files; `power_cut` writes what a cut would leave.

    A write is durable after fdatasync of its file; before that each of its 512-byte sectors is or
    is not. A name is durable after sync_directory; before that it is or is not. `sync_lies` makes
    fdatasync do nothing, for the mutant without it.
    """

    def __init__(self, seed: int = 0, *, sync_lies: bool = False) -> None:
        self._rng = random.Random(seed)
        self._lock = threading.RLock()
        self._inodes: dict[int, _Inode] = {}
        self._live: dict[Path, int] = {}
        self._durable: dict[Path, int] = {}
        self._directories: dict[Path, None] = {}
        self._catalogs: dict[Path, bytes] = {}
        self._sync_lies = sync_lies
        self.steps = 0  # durable steps so far
        self.on_step: Callable[[int], None] | None = None  # called after each with its number

    def _step(self) -> None:
        self.steps += 1
        if self.on_step is not None:
            self.on_step(self.steps)

    def _inode(self, descriptor: int) -> _Inode:
        return self._inodes.setdefault(os.fstat(descriptor).st_ino, _Inode())

    def make_directory(self, path: Path) -> None:
        super().make_directory(path)
        with self._lock:
            self._directories[path] = None

    def open(
        self, path: Path, *, create: bool = False, direct: bool = False, read_only: bool = False
    ) -> int:
        descriptor = super().open(path, create=create, direct=direct, read_only=read_only)
        with self._lock:
            number = os.fstat(descriptor).st_ino
            if create:
                self._inodes[number] = _Inode()  # the number of a removed file comes again
            elif number not in self._inodes:  # there before this layer: durable
                self._inodes[number] = _Inode(bytearray(path.read_bytes()))
                self._durable[path] = number
            self._live[path] = number
        return descriptor

    def pwritev(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        done = super().pwritev(descriptor, buffers, offset)
        with self._lock:
            content = b"".join(bytes(buffer) for buffer in buffers)[:done]
            self._inode(descriptor).pending.append((offset, content))
        return done

    def allocate(self, descriptor: int, size: int) -> None:
        super().allocate(descriptor, size)
        with self._lock:
            durable = self._inode(descriptor).durable
            durable.extend(bytes(max(0, size - len(durable))))

    def fdatasync(self, descriptor: int) -> None:
        with self._lock:
            if not self._sync_lies:
                self._inode(descriptor).sync()
            self._step()

    def unlink(self, path: Path) -> None:
        super().unlink(path)
        with self._lock:
            self._live.pop(path, None)

    def remove_tree(self, path: Path) -> None:
        super().remove_tree(path)
        with self._lock:
            for known in [known for known in self._live if known.is_relative_to(path)]:
                del self._live[known]
            for known in [known for known in self._catalogs if known.is_relative_to(path)]:
                del self._catalogs[known]
            self._directories.pop(path, None)

    def rename(self, old: Path, new: Path) -> None:
        with self._lock:
            if old in self._live:
                self._live[new] = self._live.pop(old)
            for table in (self._catalogs, self._directories):
                if old in table:
                    table[new] = table.pop(old)  # type: ignore[index, assignment]
        super().rename(old, new)

    def sync_directory(self, path: Path) -> None:
        with self._lock:
            for known in [known for known in self._durable if known.parent == path]:
                del self._durable[known]
            for known, number in self._live.items():
                if known.parent == path:
                    self._durable[known] = number
            self._step()

    def catalog_committed(self, directory: Path) -> None:
        with self._lock:
            self._catalogs[directory] = (directory / "data.mdb").read_bytes()
            self._step()

    def power_cut(self, live: Path, target: Path) -> None:
        """Write what lies on disk after a cut now: `live` and below, as `target`."""
        with self._lock:
            shutil.rmtree(target, ignore_errors=True)
            target.mkdir(mode=0o700)
            names = dict(self._durable)
            for path in set(self._live) ^ set(self._durable):
                if self._rng.random() < 0.5:
                    continue
                if path in self._live:
                    names[path] = self._live[path]
                else:
                    del names[path]
            for path in self._directories:
                if path.is_relative_to(live):
                    (target / path.relative_to(live)).mkdir(mode=0o700, exist_ok=True)
            for path, number in names.items():
                if path.is_relative_to(live):
                    place = target / path.relative_to(live)
                    place.write_bytes(self._after_cut(self._inodes[number]))
            for path, content in self._catalogs.items():
                place = target / path.relative_to(live)
                place.mkdir(mode=0o700, exist_ok=True)
                (place / "data.mdb").write_bytes(content)

    def _after_cut(self, inode: _Inode) -> bytes:
        content = bytearray(inode.durable)
        for offset, written in inode.pending:
            for start in range(0, len(written), SECTOR_BYTES):
                if self._rng.random() < 0.5:
                    _put(content, offset + start, written[start : start + SECTOR_BYTES])
        return bytes(content)


def _put(target: bytearray, offset: int, content: bytes) -> None:
    if len(target) < offset + len(content):
        target.extend(bytes(offset + len(content) - len(target)))
    target[offset : offset + len(content)] = content


def _head(buffers: Sequence[memoryview], size: int) -> list[memoryview]:
    head = []
    for buffer in buffers:
        if size <= 0:
            break
        head.append(buffer[:size])
        size -= len(head[-1])
    return head


def _flip(buffers: Sequence[memoryview], at: int) -> None:
    for buffer in buffers:
        if at < len(buffer):
            buffer[at] ^= 0x10
            return
        at -= len(buffer)
