"""Opens a store directory for one command: only if there is one, with as little memory as works."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvstore.errors import DirectoryError
from kvstore.store import Store

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

HOST_BYTES = 1 << 20


@contextmanager
def opened(directory: Path) -> Iterator[Store]:
    """The store in `directory`, warm. Raises DirectoryError when there is none or it is in use."""
    if directory.exists() and not directory.is_dir():
        raise DirectoryError(f"{directory}: this is a file; a store is a directory")
    if not directory.is_dir():
        raise DirectoryError(f"{directory}: there is no such directory")
    if not (directory / "store.json").is_file():
        raise DirectoryError(
            f"{directory}: this is no store directory (it has no store.json); a store makes one "
            "when it is opened there"
        )
    with Store.open(directory, host_bytes=HOST_BYTES) as store:
        yield store
