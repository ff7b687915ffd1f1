"""What a disk tier can do now, why, and what happened since it was opened."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from kvstore.tiers.tier import ReadStatus

if TYPE_CHECKING:
    from collections.abc import Sequence

log = logging.getLogger("kvstore.tiers.disk")


class TierState(Enum):
    """The one thing that decides which calls are served."""

    LOADING = "loading"  # neither reads nor writes yet
    READY = "ready"
    READ_ONLY = "read-only"  # something failed; reads go on until it is opened anew
    CLOSED = "closed"


@dataclass(slots=True)
class Counters:
    """Events since the tier was opened."""

    pages_written: int = 0
    pages_read: int = 0
    write_errors: int = 0
    read_errors: int = 0
    corrupt_pages: int = 0
    stale_pages: int = 0
    key_missing: int = 0  # pages whose key is gone: given up at load, or asked for later
    wiped_pages: int = 0  # left by an eviction that was cut off
    records_dropped: int = 0  # at load: unsound, orphaned, or their slot is gone
    commits: int = 0
    catalog_reopens: int = 0
    accounting_fixes: int = 0

    def count_reads(self, statuses: Sequence[ReadStatus]) -> None:
        """Pages that were asked for, by what became of them."""
        self.pages_read += statuses.count(ReadStatus.OK)
        self.corrupt_pages += statuses.count(ReadStatus.CORRUPT)
        self.stale_pages += statuses.count(ReadStatus.STALE)
        self.read_errors += statuses.count(ReadStatus.ERROR)
        self.key_missing += statuses.count(ReadStatus.LOCKED)
        self.wiped_pages += statuses.count(ReadStatus.WIPED)


class DiskState:
    """State, reason, counters, and the lock of the slot states."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.lock = threading.Lock()
        self.state = TierState.LOADING
        self.reason = "not loaded yet"
        self.counters = Counters()

    @property
    def ready(self) -> bool:
        """Whether pages can be written."""
        return self.state is TierState.READY

    def become(self, state: TierState, reason: str = "") -> None:
        """Change the state; a tier that is read-only or closed never becomes ready again."""
        with self.lock:
            if self.state is TierState.CLOSED or (
                self.state is TierState.READ_ONLY and state is not TierState.CLOSED
            ):
                return
            self.state, self.reason = state, reason
        if state is TierState.READ_ONLY:
            log.error("%s: the disk tier is read-only now: %s", self.name, reason)
