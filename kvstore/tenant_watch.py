"""The tenant file as it is now: read again within a second of a change, without a restart.

A file that went bad or away changes nothing: the last good book stays, and one log line says so.
To take rights away, take them out of the file; `kvstore tenant rm` does.
"""

from __future__ import annotations

import logging
import os
import threading
from time import monotonic
from typing import TYPE_CHECKING

from kvstore.errors import ConfigError
from kvstore.tenants import load_tenants

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kvstore.tenants import TenantBook

__all__ = ["TenantWatch"]

LOOK_EVERY_S = 1.0
_Stamp = tuple[int, int, int, int, int]

_log = logging.getLogger("kvstore.auth")


class TenantWatch:
    """Holds the book of one file. Raises ConfigError when the file is bad at the start."""

    def __init__(
        self,
        path: Path,
        clock: Callable[[], float] = monotonic,
        check: Callable[[TenantBook], object] = lambda book: None,
    ) -> None:
        """check: raises ConfigError for a book that can't be used here."""
        self._path = path
        self._check = check
        self._clock = clock
        self._looking = threading.Lock()
        self._looked = clock()
        # Taken before the read: a change in between is seen as one, and read again.
        self._stamp = _stamp(path)
        self._book = self._load()

    def book(self) -> TenantBook:
        """The tenants now. One caller a second looks at the file; the others do not wait."""
        if self._clock() - self._looked >= LOOK_EVERY_S and self._looking.acquire(blocking=False):
            try:
                self._look()
            finally:
                self._looking.release()
        return self._book

    def fresh_book(self) -> TenantBook:
        """The tenants of this moment: for a token that is not known, as it may just be made."""
        with self._looking:
            self._look()
            return self._book

    def _look(self) -> None:
        self._looked = self._clock()
        stamp = _stamp(self._path)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._book = self._load()
        except ConfigError as exc:
            _log.error("tenant file: the last good one stays in force: %s", exc)
        else:
            _log.info("tenant file: read again, %d tenants", len(self._book.tenants))

    def _load(self) -> TenantBook:
        book = load_tenants(self._path)
        try:
            self._check(book)
        except ConfigError as exc:
            raise ConfigError(f"tenant file {self._path}: {exc}") from exc
        return book


def _stamp(path: Path) -> _Stamp | None:
    """What changes with a file's content; None while there is no file."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
