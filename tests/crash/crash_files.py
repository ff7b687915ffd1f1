"""A file layer over real files that can die, fail, or write less, at a step of a slot's life.

step           the process is killed ...
write-torn     when a write of slots is half done
write-done     after a write of slots, before its sync
sync-before    before the sync of a segment
sync-done      after it, before the commit that publishes
commit-used    after the commit that publishes, before anybody hears of it
commit-freed   after a commit that only frees slots
segment-made   when a segment file has its blocks, but no head and no record
left-disk      when the index has given up a page's slot, before its free is committed
ack-before     before an acknowledgement is written down
ack-done       after it
identity-torn, identity-done, start-commit     the same while the store starts
"""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstore.tiers.file_layer import FileLayer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

BLOCK_BYTES = 4096
SECTOR_BYTES = 512
START_STEPS = ("identity-torn", "identity-done", "start-commit")
WORK_STEPS = (
    "write-torn",
    "write-done",
    "sync-before",
    "sync-done",
    "commit-used",
    "commit-freed",
    "segment-made",
    "left-disk",
    "ack-before",
    "ack-done",
)
FAULTS = ("eio", "enospc", "short", "sync-eio")


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happens at the `count`-th time a step is reached."""

    name: str
    count: int


class CrashFiles(FileLayer):
    """Real files. Faults and the steps of WORK_STEPS count from arm() on."""

    def __init__(self, kill: Event | None = None, fault: Event | None = None) -> None:
        self.buffered = False  # refuse O_DIRECT
        self.lose_syncs = False  # a mutant: data is not synced at all
        self.end: Callable[[], None] = die  # what a step that was chosen does
        self._kill, self._fault = kill, fault
        self._armed = False
        self._seen: Counter[str] = Counter()
        self._segments: set[int] = set()
        self._unpublished = False  # a segment was synced since the last commit
        self._count_lock = threading.Lock()

    def arm(self) -> None:
        """The store is open and verified: steps and faults of its work count from here."""
        self._armed = True

    def step(self, name: str) -> None:
        """The process has reached a step: it may end here."""
        if self._armed == (name in START_STEPS):
            return
        with self._count_lock:
            self._seen[name] += 1
            seen = self._seen[name]
        if self._kill is not None and self._kill == Event(name, seen):
            self.end()

    def open(
        self, path: Path, *, create: bool = False, direct: bool = False, read_only: bool = False
    ) -> int:
        if direct and self.buffered:
            raise OSError(errno.EINVAL, "no direct I/O here", str(path))
        descriptor = super().open(path, create=create, direct=direct, read_only=read_only)
        if path.name.startswith("segment-"):
            self._segments.add(descriptor)
        return descriptor

    def close(self, descriptor: int) -> None:
        self._segments.discard(descriptor)
        super().close(descriptor)

    def allocate(self, descriptor: int, size: int) -> None:
        super().allocate(descriptor, size)
        if descriptor in self._segments:
            self.step("segment-made")

    def pwritev(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        if descriptor not in self._segments:
            written = self.write(descriptor, buffers, offset)
            self.step("identity-torn")
            return written
        total = sum(map(len, buffers))
        part = head(buffers, total // 2 // BLOCK_BYTES * BLOCK_BYTES)
        if self._is_torn_here():
            self.write(descriptor, part, offset)
            self.end()
        fault = self._due("eio", "enospc", "short")
        if fault is not None:
            done = self.write(descriptor, part, offset) if part else 0
            if fault == "short" and done:
                return done
            raise OSError(errno.ENOSPC if fault == "enospc" else errno.EIO, "made to fail")
        written = self.write(descriptor, buffers, offset)
        self.step("write-done")
        return written

    def write(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        """The write itself."""
        return super().pwritev(descriptor, buffers, offset)

    def fdatasync(self, descriptor: int) -> None:
        if descriptor not in self._segments:
            super().fdatasync(descriptor)
            return
        self.step("sync-before")
        if self._due("sync-eio") is not None:
            raise OSError(errno.EIO, "made to fail")
        if not self.lose_syncs:
            self.sync(descriptor)
        self._unpublished = True
        self.step("sync-done")

    def sync(self, descriptor: int) -> None:
        """The sync itself, of a segment."""
        super().fdatasync(descriptor)

    def rename(self, old: Path, new: Path) -> None:
        super().rename(old, new)
        self.step("identity-done")

    def catalog_committed(self, directory: Path) -> None:
        self.step("start-commit")
        published, self._unpublished = self._unpublished, False
        self.step("commit-used" if published else "commit-freed")

    def _is_torn_here(self) -> bool:
        if self._kill is None or self._kill.name != "write-torn" or not self._armed:
            return False
        with self._count_lock:
            self._seen["write-torn"] += 1
            return self._seen["write-torn"] == self._kill.count

    def _due(self, *kinds: str) -> str | None:
        """The fault that strikes this call, if any."""
        if not self._armed or self._fault is None or self._fault.name not in kinds:
            return None
        with self._count_lock:
            self._seen[self._fault.name] += 1
            return self._fault.name if self._seen[self._fault.name] == self._fault.count else None


def die() -> None:
    """End this process as kill -9 does."""
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def head(buffers: Sequence[memoryview], size: int) -> list[memoryview]:
    """The first `size` bytes of a list of buffers."""
    taken: list[memoryview] = []
    for buffer in buffers:
        if size <= 0:
            break
        taken.append(buffer[:size])
        size -= len(taken[-1])
    return taken
