"""Who holds a store's directory: what it wrote into LOCK, and which command its process runs.

A command is told only where that process is seen to have the file open: a pid of another container
means somebody else here. Takes no lock for longer than a look, and waits for nobody.
"""

from __future__ import annotations

import fcntl
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

LOCK_NAME = "LOCK"
TEXT_BYTES_MAX = 200
COMMAND_CHARACTERS_MAX = 120
_A_LOOK = ", for a look"
_PID = re.compile(r"pid ([0-9]+) ")


@dataclass(frozen=True, slots=True)
class LockHolder:
    """The process that has a directory, as far as it can be told."""

    said: str  # by itself, in LOCK
    pid: int  # 0 when it has not said so
    command: str  # "kvstore verify DIR"; "" when it can't be told
    held_s: float

    @property
    def looks(self) -> bool:
        """Whether it only looks inside, and will end soon."""
        return self.said.endswith(_A_LOOK)

    @property
    def serves(self) -> bool:
        """Whether it is a `kvstore serve`, maybe one that does not listen yet."""
        return self.command.startswith("kvstore serve")

    @property
    def words(self) -> str:
        """For people."""
        said = self.said.removesuffix(_A_LOOK) or "another process"
        return f"{said} ({self.command})" if self.command else said


def note_holder(descriptor: int, *, for_a_look: bool) -> None:
    """Say in a LOCK that is locked now who has it."""
    since = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    os.ftruncate(descriptor, 0)
    text = f"pid {os.getpid()} since {since}{_A_LOOK if for_a_look else ''}\n"
    os.pwrite(descriptor, text.encode(), 0)


def holder_of(descriptor: int) -> LockHolder:
    """Who has locked this open LOCK, if anybody has."""
    said = os.pread(descriptor, TEXT_BYTES_MAX, 0).decode(errors="replace").strip()
    found = _PID.match(said)
    pid = int(found[1]) if found else 0
    held_s = max(0.0, time.time() - os.fstat(descriptor).st_mtime)
    command = _command_of(pid) if pid and _has_open(pid, descriptor) else ""
    return LockHolder(said, pid, command, held_s)


def find_holder(directory: Path) -> LockHolder | None:
    """Who has the directory open now; None when nobody has, or it can't be told."""
    try:
        descriptor = os.open(directory / LOCK_NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return holder_of(descriptor)
    finally:
        os.close(descriptor)
    return None


def _has_open(pid: int, descriptor: int) -> bool:
    wanted = os.fstat(descriptor)
    try:
        names = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return False
    for name in names:
        try:
            if os.path.samestat(os.stat(f"/proc/{pid}/fd/{name}"), wanted):
                return True
        except OSError:
            continue
    return False


def _command_of(pid: int) -> str:
    """Its first words only: what follows may be nobody else's business."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return ""
    for at, word in enumerate(words[:4]):
        if word == "kvstore.cli" or word.rpartition("/")[2] == "kvstore":
            words = ["kvstore", *words[at + 1 :]]
            break
    shown = " ".join(words[:3] if words[0] == "kvstore" else words[:2]).strip()
    shown = "".join(each if each.isprintable() else "?" for each in shown)
    return shown[:COMMAND_CHARACTERS_MAX]
