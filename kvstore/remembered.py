"""What a directory remembers of how it was opened: its size and where its segments are.

So a store keeps its size until somebody says otherwise, and a tool that only looks inside opens it
as it is. The file is a convenience: without it the defaults of the machine apply.
"""

from __future__ import annotations

import json
import os
import secrets
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from kvstore.config import StoreConfig

FILE_NAME = "settings.json"
FORMAT_VERSION = 1


def remembered(directory: Path) -> dict[str, Any]:
    """`disk_bytes` and `disk_directories` of the last opening; empty when there was none."""
    try:
        found = json.loads((directory / FILE_NAME).read_bytes())
    except (OSError, ValueError):
        return {}
    if not isinstance(found, dict) or found.get("format") != FORMAT_VERSION:
        return {}
    size, places = found.get("disk_bytes"), found.get("disk_directories")
    if not isinstance(size, int) or isinstance(size, bool) or size <= 0:
        return {}
    if not isinstance(places, list) or not all(isinstance(place, str) for place in places):
        return {}
    return {"disk_bytes": size, "disk_directories": places}


def remember(config: StoreConfig) -> None:
    """Note how the store was opened; a full or read-only disk only costs the note."""
    assert config.directory is not None
    note = {
        "format": FORMAT_VERSION,
        "disk_bytes": config.disk_bytes,
        "disk_directories": [str(place) for place in config.disk_directories],
    }
    if remembered(config.directory) | {"format": FORMAT_VERSION} == note:
        return
    replace_file(config.directory / FILE_NAME, json.dumps(note).encode())


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
    except OSError:
        aside.unlink(missing_ok=True)
        return False
    return True
