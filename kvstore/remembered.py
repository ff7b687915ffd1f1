"""What a directory remembers of how it was opened: its size, its segments' places, its encryption,
whether an operator serves it.

So a store keeps its size until somebody says otherwise, and a tool that only looks inside opens it
as it is. Without the file the defaults of the machine apply; a damaged one is refused at opening,
since it may have said that pages are encrypted.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvstore.config import StoreConfig

FILE_NAME = "settings.json"
FORMAT_VERSION = 1

_KINDS: dict[str, Any] = {
    "disk_bytes": int,
    "disk_directories": list,
    "secret_mark": str,
    "encrypt": bool,
    "keys_dir": str | None,
    "served": bool,
}
_WAY_OUT = (
    "restore it, or remove it: then give again what it remembered (disk_bytes, disk_directories, "
    "encrypt and keys_dir), and see that the secret is the store's own"
)


@dataclass(frozen=True, slots=True)
class Encryption:
    """What is remembered of a store that has, or had, encrypted pages."""

    on: bool
    keys_dir: Path | None  # None: the folder in the store's own directory


def remembered(directory: Path) -> dict[str, Any]:
    """`disk_bytes` and `disk_directories` of the last opening; empty when there was none."""
    found = _note(directory)
    size, places = found.get("disk_bytes"), found.get("disk_directories")
    if not isinstance(size, int) or isinstance(size, bool) or size <= 0:
        return {}
    if not isinstance(places, list) or not all(isinstance(place, str) for place in places):
        return {}
    return {"disk_bytes": size, "disk_directories": places}


def remembered_encryption(directory: Path) -> Encryption | None:
    """How the store was encrypted; None when it never was."""
    found = _note(directory)
    is_on, place = found.get("encrypt"), found.get("keys_dir")
    if not isinstance(is_on, bool) or not (place is None or isinstance(place, str)):
        return None
    return Encryption(is_on, None if place is None else Path(place))


def secret_mark(directory: Path) -> str:
    """The mark of the secret that the directory's pages belong to; "" when none was noted."""
    found = _note(directory).get("secret_mark", "")
    return found if isinstance(found, str) else ""


def is_served(directory: Path) -> bool:
    """Whether `kvstore serve` has served the directory: then nobody else starts a server for it."""
    return _note(directory).get("served") is True


def note_served(directory: Path) -> bool:
    """Note that an operator serves the directory; False when the disk refused."""
    note = {"format": FORMAT_VERSION} | _note(directory)
    if note.get("served") is True:
        return True
    return _write(directory, note | {"served": True})


def what_is_damaged(directory: Path) -> str:
    """Why the note cannot be relied on, as a sentence with the way out; "" when it can, or when
    there is none."""
    path = directory / FILE_NAME
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return ""
    except OSError as exc:
        return f"{path} cannot be read ({exc.strerror}); {_WAY_OUT}"
    except (ValueError, RecursionError):
        return f"{path} is damaged: it is not JSON; {_WAY_OUT}"
    if not isinstance(found, dict) or found.get("format") != FORMAT_VERSION:
        return f"{path} is damaged, or of another version; {_WAY_OUT}"
    for name, kind in _KINDS.items():
        if name in found and not isinstance(found[name], kind):
            return f"{path} is damaged: its {name} makes no sense; {_WAY_OUT}"
    return ""


def mark_of(secret: bytes) -> str:
    """16 hex digits that tell secrets apart and give nothing away of them."""
    return hashlib.blake2b(b"kvstore secret mark", key=secret[:64], digest_size=8).hexdigest()


def remember(config: StoreConfig, secret: bytes, encryption: Encryption | None = None) -> bool:
    """Note how the store was opened; False when the disk refused, which only costs the note."""
    assert config.directory is not None
    note: dict[str, Any] = {
        "format": FORMAT_VERSION,
        "disk_bytes": config.disk_bytes,
        "disk_directories": [str(place) for place in config.disk_directories],
        "secret_mark": mark_of(secret),
    }
    if encryption is not None:
        place = encryption.keys_dir
        note |= {"encrypt": encryption.on, "keys_dir": None if place is None else str(place)}
    if is_served(config.directory):
        note["served"] = True
    if _note(config.directory) == note:
        return True
    return _write(config.directory, note)


def _write(directory: Path, note: dict[str, Any]) -> bool:
    return replace_file(directory / FILE_NAME, json.dumps(note).encode())


def _note(directory: Path) -> dict[str, Any]:
    try:
        found = json.loads((directory / FILE_NAME).read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) and found.get("format") == FORMAT_VERSION else {}


def replace_file(path: Path, content: bytes) -> bool:
    """Write a small file, 0600, whole or not at all; False when the disk refused."""
    aside = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        fd = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        aside.rename(path)
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError:
        with contextlib.suppress(OSError):  # a read-only file system refuses this too
            aside.unlink(missing_ok=True)
        return False
    return True
