"""Brings from disk what is likely to be asked for next: how the chain of a prompt that hit goes on.

A prompt that was found whole may be the first part of one that comes soon: a client that asks step
by step, a chat whose next turn repeats the answer. Its hottest continuation is read behind all that
somebody waits for. What was read and not used stays within a budget, keeps its old age, so that it
is the first to leave again, and where it is hardly ever used, hardly any is read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.state import DISK, HOST

if TYPE_CHECKING:
    from kvstore.stager import Stager
    from kvstore.state import StoreState

PAGES_MAX = 256  # read and not used yet
STEP_PAGES = 16  # of one continuation
# Of what was read, so much must be used lately, or only one chance in RARELY is taken.
USE_SHARE_MIN = 0.25
RARELY = 16
_KEEP = 0.95


class Prefetcher:
    """Of one store; the store's lock is held around each call."""

    def __init__(self, state: StoreState, stager: Stager, bytes_max: int) -> None:
        self._state = state
        self._stager = stager
        self._bytes_max = bytes_max
        self._unused: dict[int, tuple[int, int, int]] = {}  # page: sequence, hits, bytes
        self._use_share = 1.0
        self._chances = 0

    def after(self, last: int, page_bytes: int) -> int:
        """A prompt was found whole, up to this page; how many pages are on their way for it."""
        self._settle()
        self._chances += 1
        if self._use_share < USE_SHARE_MIN and self._chances % RARELY:
            return 0
        room = self._bytes_max - sum(size for _, _, size in self._unused.values())
        count = min(STEP_PAGES, PAGES_MAX - len(self._unused), room // max(1, page_bytes))
        wanted = self._continuation(last, count)
        taken = self._stager.prefetch(wanted)
        table = self._state.index.table
        for page in taken:
            self._unused[page] = int(table.sequence[page]), int(table.hits[page]), page_bytes
        self._state.counters.pages_prefetched += len(taken)
        return len(taken)

    def _continuation(self, page: int, count: int) -> list[int]:
        """Pages on disk only, along the way that was used most; it ends where the disk does."""
        index, table = self._state.index, self._state.index.table
        found: list[int] = []
        for _ in range(count):
            below = index.children(page)
            if not below:
                break
            page = max(below, key=lambda each: (int(table.hits[each]), float(table.last_use[each])))
            held = int(table.state[page])
            if (held >> HOST) & 1:
                continue
            if not (held >> DISK) & 1 or page in self._state.condemned:
                break
            found.append(page)
        return found

    def _settle(self) -> None:
        """Look what became of pages that were read: used, or gone without that."""
        table = self._state.index.table
        for page, (sequence, hits, _) in list(self._unused.items()):
            there = table.is_live(page) and int(table.sequence[page]) == sequence
            used = there and int(table.hits[page]) > hits
            waits = there and ((int(table.state[page]) >> HOST) & 1 or self._stager.is_coming(page))
            if not used and waits:
                continue
            del self._unused[page]
            self._state.counters.prefetched_used += used
            self._use_share = _KEEP * self._use_share + (1 - _KEEP) * used
