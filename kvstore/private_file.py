"""Files that only their owner may read: read after a check, replaced whole, 0600 under any umask.

A reader sees the old content or the new, never a part. Must not be here: what the content means.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import stat
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvstore.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["locked_folder", "read_private", "read_public", "replace_private", "write_aside"]


def read_private(what: str, path: Path, bytes_max: int) -> bytes:
    """The content of a file of this user that nobody else can read; else ConfigError.

    A link is followed, as secrets are mounted behind links: what counts is the file it leads to.
    """
    return _read(what, path, bytes_max, private=True)


def read_public(what: str, path: Path, bytes_max: int) -> bytes:
    """The content of a file that others may read, as a certificate; ConfigError if it cannot."""
    return _read(what, path, bytes_max, private=False)


def replace_private(path: Path, content: bytes) -> None:
    """Put `content` in place of the file, 0600, durable when this returns; OSError if it fails."""
    aside = write_aside(path, content, 0o600)
    try:
        os.rename(aside, path)
    except OSError:
        os.unlink(aside)
        raise
    _sync_folder(path.parent)


def write_aside(path: Path, content: bytes, mode: int) -> str:
    """The name of a new, synced file beside `path` that holds `content`."""
    aside = f"{path}.{os.getpid()}-{secrets.token_hex(8)}.tmp"
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(file.fileno(), mode)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        os.unlink(aside)
        raise
    return aside


@contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Nobody else who asks for it edits files of this folder; leaves nothing behind."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as exc:
        raise ConfigError(f"{folder}: cannot be opened ({exc.strerror})") from exc
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _read(what: str, path: Path, bytes_max: int, *, private: bool) -> bytes:
    try:
        # Without O_NONBLOCK, a FIFO in the file's place would hold the server up.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as exc:
        raise ConfigError(f"{what} {path}: cannot be opened ({exc.strerror})") from exc
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise ConfigError(f"{what} {path}: is not a regular file")
        if private:
            _check_private(what, path, found)
        with open(descriptor, "rb", closefd=False) as file:
            content = file.read(bytes_max + 1)
    except OSError as exc:
        raise ConfigError(f"{what} {path}: cannot be read ({exc.strerror})") from exc
    finally:
        os.close(descriptor)
    if len(content) > bytes_max:
        raise ConfigError(f"{what} {path}: is longer than {bytes_max} bytes")
    return content


def _check_private(what: str, path: Path, found: os.stat_result) -> None:
    if found.st_uid != os.geteuid():
        raise ConfigError(
            f"{what} {path}: belongs to uid {found.st_uid}, this process is uid {os.geteuid()}; "
            "use a file of your own"
        )
    if found.st_mode & 0o077:
        raise ConfigError(
            f"{what} {path}: mode {stat.S_IMODE(found.st_mode):04o} lets others read it; "
            f"run: chmod 600 {path}"
        )


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
