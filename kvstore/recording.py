"""Recording of look-ups that an operator starts and stops while the store is used.

Files lie in DIR/records, 0600, named by whoever starts one; none is overwritten. A process that
holds a directory without being a server is told by a note in it, DIR/record.json, which its
housekeeper looks at once a second: there, a recording begins with the note and ends with it.
"""

from __future__ import annotations

import json
import os
import threading
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvstore.errors import ConfigError, DirectoryError, InvalidRequest
from kvstore.private_file import read_private, replace_private
from kvstore.quantity import format_bytes
from kvstore.recorder import FILE_BYTES_MAX, Recorder, Recording

if TYPE_CHECKING:
    from pathlib import Path

    from kvstore.state import StoreState

FOLDER = "records"
NOTE = "record.json"
STATUS = "status.json"
BYTES_DEFAULT = 256 << 20
BYTES_MIN = 4096
_NOTE_BYTES_MAX = 4096
_SUFFIXES = (".jsonl", ".jsonl.gz")


@dataclass(frozen=True, slots=True)
class Wish:
    """What is to be recorded: a new file in DIR/records, of so many bytes at most."""

    name: str
    bytes_max: int = BYTES_DEFAULT

    def __post_init__(self) -> None:
        stem = next((self.name[: -len(end)] for end in _SUFFIXES if self.name.endswith(end)), "")
        if not stem or stem.startswith(".") or set(self.name) & set("/\\\0") or len(stem) > 100:
            raise InvalidRequest(
                f"record: {self.name!r:.120} given; a name in .jsonl or .jsonl.gz, without a folder"
            )
        if not BYTES_MIN <= self.bytes_max <= FILE_BYTES_MAX:
            raise InvalidRequest(
                f"record: {self.bytes_max} bytes given; {format_bytes(BYTES_MIN)} to "
                f"{format_bytes(FILE_BYTES_MAX)}"
            )


def default_name() -> str:
    """Of a file that is made now."""
    return time.strftime("lookups-%Y%m%d-%H%M%S.jsonl.gz")


class Recordings:
    """Of one store."""

    def __init__(self, state: StoreState) -> None:
        self._state = state
        self._last = Recording()
        self._following = threading.Lock()
        self._noted = b""  # the note that a recording follows, or that could not be followed

    def start(self, wish: Wish) -> Recording:
        """Begin; raises InvalidRequest where one runs, DirectoryError where no file can be made."""
        directory = self._state.config.directory
        if directory is None:
            raise InvalidRequest("record: this store has no directory; set record_file instead")
        folder = directory / FOLDER
        with self._state.lock:
            running = self._state.recorder
            if running is not None:
                file = running.status().file
                raise InvalidRequest(f"record: {file} is being recorded; stop it first")
            try:
                folder.mkdir(mode=0o700, exist_ok=True)
            except OSError as exc:
                raise DirectoryError(f"{folder}: {exc.strerror}") from exc
            self._state.recorder = made = Recorder(folder / wish.name, wish.bytes_max)
        return made.status()

    def stop(self) -> Recording:
        """End; the file is complete when this returns. Without a recording, as status()."""
        with self._state.lock:
            running, self._state.recorder = self._state.recorder, None
        if running is not None:
            running.close()
            self._last = running.status()
        return self._last

    def status(self) -> Recording:
        """Of the recording that runs, or of the last one."""
        running = self._state.recorder
        return self._last if running is None else running.status()

    def follow_note(self) -> None:
        """Do what a note in the directory asks, if it has changed, and write how far it is."""
        directory = self._state.config.directory
        if directory is None or self._state.closed:
            return
        with self._following:
            self._follow(directory, _note(directory))

    def _follow(self, directory: Path, note: bytes) -> None:
        if note != self._noted:
            if self._noted:
                self._tell(directory, self.stop())
            self._noted = note
            if note:
                self._tell(directory, self._begin(note))
        elif note and self._state.recorder is not None:
            self._tell(directory, self.status())

    def close(self) -> None:
        """The store is being closed."""
        found, directory = self.stop(), self._state.config.directory
        if self._noted and directory is not None:
            self._tell(directory, found)

    def _begin(self, note: bytes) -> Recording:
        try:
            asked = json.loads(note)
            wish = Wish(str(asked["name"]), int(asked["bytes_max"]))
            assert self._state.config.directory is not None
            folder = self._state.config.directory / FOLDER
            return self.start(replace(wish, name=_free_name(folder, wish.name)))
        except (ValueError, KeyError, TypeError) as exc:
            return Recording(note=f"{NOTE} makes no sense: {exc}")
        except (InvalidRequest, DirectoryError) as exc:
            return Recording(note=str(exc))

    def _tell(self, directory: Path, found: Recording) -> None:
        try:
            (directory / FOLDER).mkdir(mode=0o700, exist_ok=True)
            replace_private(directory / FOLDER / STATUS, json.dumps(found.to_dict()).encode())
        except OSError:
            return  # a full disk costs a status, and no look-up


def _free_name(folder: Path, name: str) -> str:
    """A name, or one with a number where a process before this one recorded under it."""
    stem, dot, ending = name.partition(".jsonl")
    number, found = 1, name
    while (folder / found).exists():
        number += 1
        found = f"{stem}-{number}{dot}{ending}"
    return found


def leave_note(directory: Path, wish: Wish) -> None:
    """Ask whoever holds the directory, now or later, to record. One that runs goes on."""
    if _note(directory):
        raise InvalidRequest(f"record: {directory / NOTE} is there already; stop it first")
    if (directory / FOLDER / wish.name).exists():
        raise DirectoryError(f"{directory / FOLDER / wish.name}: File exists; choose another name")
    content = {"name": wish.name, "bytes_max": wish.bytes_max}
    try:
        replace_private(directory / NOTE, json.dumps(content).encode())
    except OSError as exc:
        raise DirectoryError(f"{directory / NOTE}: {exc.strerror}") from exc


def take_note_back(directory: Path) -> bool:
    """Ask no longer; whether there was a note."""
    try:
        os.unlink(directory / NOTE)
    except FileNotFoundError:
        return False
    except OSError as exc:
        raise DirectoryError(f"{directory / NOTE}: {exc.strerror}") from exc
    return True


def noted_status(directory: Path) -> Recording:
    """How far a recording is that a note asked for."""
    try:
        content = read_private("record", directory / FOLDER / STATUS, _NOTE_BYTES_MAX)
        return Recording(**json.loads(content))
    except (ConfigError, ValueError, TypeError):
        return Recording(note="nobody has looked at the note yet" if _note(directory) else "")


def _note(directory: Path) -> bytes:
    if not (directory / NOTE).exists():
        return b""
    try:
        return read_private("record", directory / NOTE, _NOTE_BYTES_MAX)
    except ConfigError as exc:
        return str(exc).encode()
