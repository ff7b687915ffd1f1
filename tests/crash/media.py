"""What a store of the crash loops lies on, and how its life ends there.

kill      files of this machine; kill -9
direct    ext4 on a loop device, O_DIRECT; power cut
buffered  the same through the page cache
layer     an in-process layer with a durable image; needs no rights
"""

from __future__ import annotations

import shutil
import time
from typing import TYPE_CHECKING, Protocol

from crash_files import CrashFiles, Event
from ext4_loop import LOG_FLUSH, NO_LOG_FLUSH, LoopDisk
from image_files import ImageFiles

if TYPE_CHECKING:
    import random
    from pathlib import Path

# A small disk has its slots written again and again. A large one has slots that were never written:
# there ext4 must also remember that they have been, which a missing sync leaves undone. Both in
# turns, each on a new file system.
SMALL_DISK = (2 << 20, 8)  # bytes of the tier, cycles
LARGE_DISK = (24 << 20, 4)
LIE_S = 0.03  # after a cut the child runs on for so long: what it acknowledges then is a lie


class Medium(Protocol):
    """Where the store is and how to end a life of it."""

    name: str
    directory: Path
    disk_bytes: int
    freeze: bool  # a life that has reached its step waits for cut(), instead of killing itself

    def start(self) -> bool:
        """Before each life; True when the store starts from nothing."""

    def files(self, seed: str, kill: Event | None, fault: Event | None) -> CrashFiles:
        """The layer for the child; called in the child."""

    def cut(self, rng: random.Random) -> None:
        """Just before the child is killed."""

    def close(self) -> None:
        """Clean up."""


class KilledOnly:
    """Files of this machine: all that was written is there after a kill."""

    name = "kill"
    disk_bytes = SMALL_DISK[0]
    freeze = False

    def __init__(self, scratch: Path) -> None:
        self.directory = scratch / "store"

    def start(self) -> bool:
        return False

    def files(self, seed: str, kill: Event | None, fault: Event | None) -> CrashFiles:
        return CrashFiles(kill, fault)

    def cut(self, rng: random.Random) -> None:
        """Nothing: the kill is the end."""

    def close(self) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)


class PowerCut:
    """A loop device whose power is cut; a new file system after some cycles."""

    freeze = True

    def __init__(self, scratch: Path, *, buffered: bool) -> None:
        self.name = "buffered" if buffered else "direct"
        self._buffered = buffered
        self._disk = LoopDisk(scratch / f"{self.name}.img", scratch / self.name)
        self.directory = self._disk.mount_point / "store"
        self._disks = 0
        self._cycles_left = 0
        self.disk_bytes = 0

    def start(self) -> bool:
        self._cycles_left -= 1
        if self._cycles_left < 0:
            self.disk_bytes, cycles = (SMALL_DISK, LARGE_DISK)[self._disks % 2]
            self._disks += 1
            self._cycles_left = cycles - 1
            self._disk.make()
            return True
        self._disk.unmount()
        self._disk.mount()
        return False

    def files(self, seed: str, kill: Event | None, fault: Event | None) -> CrashFiles:
        files = CrashFiles(kill, fault)
        files.buffered = self._buffered
        return files

    def cut(self, rng: random.Random) -> None:
        self._disk.cut(LOG_FLUSH if rng.random() < 0.2 else NO_LOG_FLUSH)
        time.sleep(LIE_S)

    def close(self) -> None:
        self._disk.close()


class DurableImage:
    """The in-process layer: the image is all that is left."""

    name = "layer"
    disk_bytes = SMALL_DISK[0]
    freeze = False

    def __init__(self, scratch: Path) -> None:
        self.directory = scratch / "live"
        self._image = scratch / "image"

    def start(self) -> bool:
        ImageFiles.start_over(self.directory, self._image)
        return False

    def files(self, seed: str, kill: Event | None, fault: Event | None) -> CrashFiles:
        return ImageFiles(self.directory, self._image, seed, kill, fault)

    def cut(self, rng: random.Random) -> None:
        """Nothing: the image holds only what was durable."""

    def close(self) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)
        shutil.rmtree(self._image, ignore_errors=True)
