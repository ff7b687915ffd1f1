"""A small ext4 file system on a loop device, whose power can be cut. Needs root.

EXT4_IOC_SHUTDOWN makes the file system forget all that is not on its device: every call fails with
EIO until it is mounted again, and then its journal is replayed as after a power cut.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import struct
import subprocess
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

EXT4_IOC_SHUTDOWN = 0x8004587D  # _IOR('X', 125, __u32)
LOG_FLUSH = 1  # the journal is written out first: as if the power went a moment later
NO_LOG_FLUSH = 2
DISK_BYTES = 48 << 20
UNMOUNT_TRIES = 100


class LoopDisk:
    """One image file, one mount point."""

    def __init__(self, image: Path, mount_point: Path) -> None:
        self._image = image
        self.mount_point = mount_point
        self._mounted = False

    @staticmethod
    def missing_rights(scratch: Path) -> str:
        """Why loop devices can't be used here; empty when they can. Tries it."""
        for tool in ("mkfs.ext4", "mount", "umount"):
            if shutil.which(tool) is None:
                return f"{tool} is not installed"
        if os.geteuid() != 0:
            return "only root may mount"
        disk = LoopDisk(scratch / "probe.img", scratch / "probe")
        try:
            disk.make()
            disk.cut(NO_LOG_FLUSH)
        except (OSError, subprocess.CalledProcessError) as error:
            detail = getattr(error, "stderr", None) or b""
            return f"{error} {detail.decode(errors='replace').strip()}".strip()
        finally:
            disk.close()
        return ""

    def make(self) -> None:
        """A new, empty file system, mounted."""
        self.unmount()
        self.mount_point.mkdir(parents=True, exist_ok=True)
        self._image.unlink(missing_ok=True)
        with self._image.open("wb") as file:
            file.truncate(DISK_BYTES)
        _call("mkfs.ext4", "-q", "-F", "-m", "0", str(self._image))
        self.mount()

    def mount(self) -> None:
        """Mount it; the journal is replayed."""
        _call("mount", "-t", "ext4", "-o", "loop", str(self._image), str(self.mount_point))
        self._mounted = True

    def cut(self, flag: int) -> None:
        """Cut its power."""
        descriptor = os.open(self.mount_point, os.O_RDONLY)
        try:
            fcntl.ioctl(descriptor, EXT4_IOC_SHUTDOWN, struct.pack("I", flag))
        finally:
            os.close(descriptor)

    def unmount(self) -> None:
        """Unmount it; waits for a killed process to let go."""
        for left in range(UNMOUNT_TRIES, 0, -1):
            if not self._mounted:
                return
            try:
                _call("umount", str(self.mount_point))
                self._mounted = False
            except subprocess.CalledProcessError:
                if left == 1:
                    raise
                time.sleep(0.05)

    def close(self) -> None:
        """Unmount it and remove the image."""
        self.unmount()
        self._image.unlink(missing_ok=True)


def _call(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=60)
