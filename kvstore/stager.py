"""Brings pages from a slower tier to the arena: in the background, once for all who ask, verified.

Every page being staged is leased by its entry. A page whose bytes fail their check is dropped with
all below it: those can't be reached without it. Each source has a stager of its own, so that a slow
one never delays another; this one's is the disk, redis_stager.py's is Redis.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvstore.ghost_list import why_left
from kvstore.state import BREATH_S, DISK, HOST, TIER_NAMES
from kvstore.tiers.tier import ReadStatus, TierError, aligned

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from kvstore.evictor import Evictor
    from kvstore.state import StoreState, TreeInfo
    from kvstore.tiers.host_tier import HostTier
    from kvstore.tiers.tier import PageRecord, Tier

GROUP_BYTES_MAX = 32 * 1024 * 1024
GROUP_PAGES_MAX = 1024
AHEAD_PAGES_MAX = 8
# After so many failed reads in a row the disk is left alone for a while: its pages are misses.
BREAKER_ERRORS = 3
BREAKER_PAUSE_S = 1.0
POPULATE_POLL_S = 0.02  # memory of the arena may still be on its way

_log = logging.getLogger("kvstore.disk")


@dataclass(slots=True, eq=False)
class Entry:
    """A page on its way."""

    page: int
    waiters: int = 0
    started: bool = False
    done: bool = False
    ahead: bool = False  # nobody waits for it yet


class Stager:
    """Queue and thread. All but the reads happens under the store's lock."""

    _tier = DISK

    def __init__(self, state: StoreState, source: Tier, host: HostTier, evictor: Evictor) -> None:
        self._state = state
        self._source = source
        self._host = host
        self._evictor = evictor
        self._work = threading.Condition(state.lock)
        self._queue: deque[Entry] = deque()
        self._ahead: deque[Entry] = deque()
        self._entries: dict[int, Entry] = {}
        self._stopping = False
        self._errors_in_row = 0
        self._paused_until_s = 0.0
        name = f"kvstore-stager-{TIER_NAMES[self._tier]}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def open_breaker(self) -> bool:
        return self._state.clock() < self._paused_until_s

    def begin(self, pages: Sequence[int]) -> list[Entry]:
        """Ask for pages of this source, all leased by the caller, in chain order; then wait()."""
        state = self._state
        with state.lock:
            if self.open_breaker:
                return []
            table = state.index.table
            # Look again: another request may have staged some since the caller looked.
            missing = [page for page in pages if not (table.state[page] >> HOST) & 1]
            return [self._join(page) for page in missing]

    def prefetch(self, pages: Sequence[int]) -> list[int]:
        """Read these too, in chain order, when there is nothing that somebody waits for; those that
        are on their way now. The lock is held."""
        if self.open_breaker or self._stopping:
            return []
        taken = [page for page in pages if page not in self._entries]
        for page in taken:
            entry = self._entries[page] = Entry(page, ahead=True)
            self._ahead.append(entry)
            self._state.index.lease(page)
        if taken:
            self._work.notify_all()
        return taken

    def is_coming(self, page: int) -> bool:
        """Whether a page is queued or being read. The lock is held."""
        return page in self._entries

    def wait(self, entries: Sequence[Entry], deadline: float) -> None:
        """Wait until what begin() gave is in the arena, or failed, or `deadline` (store's clock)
        has passed. Look at the index for what became of the pages."""
        state = self._state
        with state.lock:
            while not state.closed and any(not entry.done for entry in entries):
                left = deadline - state.clock()
                if left <= 0:
                    state.counters.stage_timeouts += 1
                    break
                state.changed.wait(left)
            for entry in entries:
                entry.waiters -= 1

    def stop(self, deadline: float) -> bool:
        """End the thread; False when a read still hangs."""
        with self._state.lock:
            self._stopping = True
            self._work.notify_all()
        self._thread.join(max(0.1, deadline - self._state.clock()))
        return not self._thread.is_alive()

    def _join(self, page: int) -> Entry:
        entry = self._entries.get(page)
        if entry is None:
            entry = Entry(page)
            self._entries[page] = entry
            self._queue.append(entry)
            self._state.index.lease(page)
            self._work.notify_all()
        else:
            self._state.counters.stage_joined += 1
            if entry.ahead and not entry.started:
                entry.ahead = False
                self._queue.append(entry)
        entry.waiters += 1
        return entry

    # The thread

    def _run(self) -> None:
        state = self._state
        while True:
            with state.lock:
                while not self._queue and not self._ahead and not self._stopping:
                    self._work.wait(1.0)
                if self._stopping:
                    self._finish([*self._queue, *(each for each in self._ahead if each.ahead)])
                    self._queue.clear()
                    return
                group = self._pop_group() if self._queue else self._pop_ahead()
            entries: list[Entry] = []
            slots: list[int] = []
            records: list[PageRecord] = []
            places: list[int] = []
            for part in state.pieces(len(group)):
                piece = group[part]
                with state.lock:
                    slots += self._reserve(piece)
                    records += [state.record(entry.page) for entry in piece]
                    column = state.index.table.slot[self._tier]
                    places += [int(column[entry.page]) for entry in piece]
                entries += piece
            self._read_group(entries, slots, records, places)

    def _pop_group(self) -> list[Entry]:
        """The next entries somebody still waits for; the others are given up."""
        table = self._state.index.table
        group: list[Entry] = []
        size = 0
        while self._queue and len(group) < GROUP_PAGES_MAX and size < GROUP_BYTES_MAX:
            entry = self._queue.popleft()
            if entry.waiters <= 0 or self.open_breaker:
                self._finish([entry])
                continue
            size += int(table.payload_bytes[entry.page])
            entry.started = True
            group.append(entry)
        return group

    def _pop_ahead(self) -> list[Entry]:
        """The next few that nobody waits for: whoever comes now waits for these at most."""
        group: list[Entry] = []
        while self._ahead and len(group) < AHEAD_PAGES_MAX:
            entry = self._ahead.popleft()
            if not entry.ahead:  # somebody does wait: it is in the other queue, or was read
                continue
            if self.open_breaker:
                self._finish([entry])
                continue
            entry.started = True
            group.append(entry)
        return group

    def _reserve(self, entries: list[Entry]) -> list[int]:
        """An arena slot for each entry, in order; entries without one are given up."""
        state = self._state
        slots: list[int] = []
        placed: list[Entry] = []
        full: set[bytes] = set()  # trees for whose pages there is no room now
        for entry in entries:
            info = state.trees[state.index.root_of(entry.page)]
            got = [] if info.root in full else self._one_slot(info)
            while not got and info.root not in full:
                wanted = len(entries) - len(slots)
                if not self._evictor.make_room_host(info.tenant, info.page_bytes, wanted):
                    if self._host.wait_populated(0.0) or self._stopping:
                        full.add(info.root)
                        break
                    state.changed.wait(POPULATE_POLL_S)
                got = self._one_slot(info)
                if not got:  # more has to leave: others get the lock in between
                    state.changed.wait(BREATH_S)
            if got:
                slots += got
                placed.append(entry)
        self._finish([entry for entry in entries if entry not in placed])
        entries[:] = placed
        return slots

    def _one_slot(self, info: TreeInfo) -> list[int]:
        """One slot of the arena; none for pages that never fit, which are misses in this store."""
        try:
            return self._evictor.take_host(info.tenant, info.page_bytes, 1)
        except TierError:
            return []

    def _read_group(
        self,
        entries: list[Entry],
        slots: list[int],
        records: list[PageRecord],
        places: list[int],
    ) -> None:
        if not entries:
            return
        buffers = [
            self._host.view(slot, aligned(record.payload_bytes))
            for slot, record in zip(slots, records, strict=True)
        ]
        try:
            statuses = self._source.read_many(places, records, buffers)
        except TierError as exc:
            _log.warning("%s tier: read failed: %s", TIER_NAMES[self._tier], exc)
            statuses = [ReadStatus.ERROR] * len(entries)
        except Exception:  # our bug; the thread must live on, or every later stage would wait
            _log.exception("%s tier: read failed", TIER_NAMES[self._tier])
            statuses = [ReadStatus.ERROR] * len(entries)
        del buffers
        self._say_cut_off(statuses)
        for part in self._state.pieces(len(entries)):
            with self._state.lock:
                self._publish(entries[part], slots[part], statuses[part])
        with self._state.lock:
            self._state.retry_condemned()

    def _publish(self, entries: list[Entry], slots: list[int], statuses: list[ReadStatus]) -> None:
        state = self._state
        good = self._usable([entry.page for entry in entries], statuses)
        if good:
            self._host.publish_many([slots[i] for i in good])
            pages = np.array([entries[i].page for i in good], dtype=np.int32)
            state.index.set_tier(pages, HOST, np.array([slots[i] for i in good], dtype=np.int64))
            state.counters.pages_staged += len(good)
            size = int(state.index.table.payload_bytes[pages].sum())
            state.meters.move(TIER_NAMES[self._tier], "host", size)
            self._arrived(pages)
        used = set(good)
        bad = [slot for i, slot in enumerate(slots) if i not in used]
        if bad:
            self._host.free_many(bad)
        self._finish(entries)
        for entry, status in zip(entries, statuses, strict=True):
            self._account(entry.page, status)
        state.changed.notify_all()

    def _say_cut_off(self, statuses: list[ReadStatus]) -> None:
        wiped = statuses.count(ReadStatus.WIPED)
        if wiped:
            _log.info("disk tier: %d pages of an eviction that was cut off are gone", wiped)

    def _usable(self, pages: list[int], statuses: list[ReadStatus]) -> list[int]:
        """Which of the pages that were read may be published, by position."""
        self._state.counters.disk_reads += len(pages)
        return [i for i, status in enumerate(statuses) if status is ReadStatus.OK]

    def _arrived(self, pages: NDArray[np.int32]) -> None:
        """Pages are in the arena now, and still in their source."""

    def _account(self, page: int, status: ReadStatus) -> None:
        counters = self._state.counters
        if status is ReadStatus.ERROR:
            counters.disk_read_errors += 1
            self._errors_in_row += 1
            if self._errors_in_row >= BREAKER_ERRORS and not self.open_breaker:
                self._paused_until_s = self._state.clock() + BREAKER_PAUSE_S
                _log.warning(
                    "disk tier: %d reads failed in a row; its pages are misses for %g s",
                    self._errors_in_row,
                    BREAKER_PAUSE_S,
                )
            return
        self._errors_in_row = 0
        if status is ReadStatus.OK:
            return
        if status is ReadStatus.CORRUPT:
            counters.corrupt_pages += 1
        elif status is ReadStatus.LOCKED:
            counters.key_missing += 1
        elif status is ReadStatus.STALE:
            counters.stale_pages += 1
        # An earlier page of the group may have taken this one along.
        if self._state.index.table.is_live(page) and page not in self._state.condemned:
            if status is not ReadStatus.WIPED:
                _log.warning(
                    "disk tier: page %d is %s; dropped with all below it", page, status.name.lower()
                )
            self._state.drop_subtree(page, why_left(status))

    def _finish(self, entries: list[Entry]) -> None:
        for entry in entries:
            entry.done = True
            del self._entries[entry.page]
            self._state.index.unlease(entry.page)
        if entries:
            self._state.changed.notify_all()
