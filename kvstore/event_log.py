"""What pages were stored and removed lately, in order, for whoever watches: one log a store.

Each tenant has a journal of its own, with its own numbers, so that neither gaps nor "lost" tell
one about another; it begins with its first watcher. A journal holds its last EVENTS_MAX events: a
watcher that falls behind them is told so by an event "lost", and has to ask anew. Numbers begin
anew with each store, far from earlier ones, which therefore are "lost". Recording is on the way of
a request, so what is cheap there is kept, and events are made of it when somebody reads.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

from kvstore.state import TIER_NAMES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy as np
    from numpy.typing import NDArray

    from kvstore.state import StoreState

EVENTS_MAX = 16_384
PAGES_MAX = 4096  # named in one event
KEY_BYTES = 16
POLL_S = 0.5
MS_BITS = 16  # of a number below its milliseconds: more events a millisecond than any store has


@dataclass(frozen=True, slots=True)
class PageEvent:
    """Pages of one tenant that came into a tier, or left it."""

    sequence: int
    tenant: str
    # "stored", "removed"; "lost": what came after the number asked for is not known any more
    kind: str
    medium: str  # "host", "disk", "redis"
    keys: bytes  # 16 a page


@dataclass(slots=True)
class _Journal:
    """The last events of one tenant, or of all of them, the last one with the number `last`."""

    last: int
    # Tenant, kind, medium and keys of each.
    events: deque[tuple[str, str, str, bytes]] = field(
        default_factory=lambda: deque(maxlen=EVENTS_MAX)
    )

    def add(self, event: tuple[str, str, str, bytes]) -> None:
        self.last += 1
        self.events.append(event)

    def after(self, sequence: int) -> list[tuple[str, str, str, bytes]] | None:
        """What came after that number; None where that is not known."""
        before = self.last - len(self.events)
        if not before <= sequence <= self.last:
            return None
        return list(islice(self.events, sequence - before, None))


class EventLog:
    """Records what the index is told; safe to read from several threads."""

    def __init__(self, state: StoreState) -> None:
        self._state = state
        self._changed = threading.Condition()
        self._first = int(state.wall_clock() * 1000) << MS_BITS
        self._all: _Journal | None = None
        self._by_tenant: dict[str, _Journal] = {}
        self._listeners: list[Callable[[NDArray[np.int32], int, bool], None]] = []

    def begin(self, tenant: str | None) -> int:
        """Record from now on; the number of the last event so far. None: of all tenants."""
        with self._state.lock:
            if self._record not in self._listeners:
                self._listeners.append(self._record)
            self._state.index.observer = self._tell
        with self._changed:
            return self._journal(tenant).last

    def listen(self, listener: Callable[[NDArray[np.int32], int, bool], None]) -> None:
        """Tell this one too, from now on, under the store's lock: pages, tier, whether stored."""
        with self._state.lock:
            self._listeners.append(listener)
            if self._state.index.observer is None:
                self._state.index.observer = self._tell

    def after(
        self, sequence: int, tenant: str | None, wait_s: float
    ) -> tuple[int, list[PageEvent]]:
        """A tenant's events after that number, and the number to go on from. None: of all tenants.

        Waits up to `wait_s` seconds for the first. A number that is not in the journal any more, or
        never was, gives one event "lost".
        """
        with self._changed:
            journal = self._journal(tenant)
            if sequence == journal.last:
                self._changed.wait(wait_s)
            last, late = journal.last, journal.after(sequence)
        # Only now: whoever records waits for this condition, and holds the store's lock meanwhile.
        if late is None:
            return last, [PageEvent(last, "", "lost", "", b"")]
        return last, [PageEvent(number, *each) for number, each in enumerate(late, sequence + 1)]

    def follow(self, sequence: int, tenant: str | None) -> Iterator[PageEvent]:
        """Events after that number, 0 for from now on, until the store is closed."""
        last = self.begin(tenant)
        return self._follow(sequence or last, tenant)

    def _follow(self, position: int, tenant: str | None) -> Iterator[PageEvent]:
        while not self._state.closed:
            position, events = self.after(position, tenant, POLL_S)
            yield from events

    def _journal(self, tenant: str | None) -> _Journal:
        if tenant is None:
            if self._all is None:
                self._all = _Journal(self._first)
            return self._all
        return self._by_tenant.setdefault(tenant, _Journal(self._first))

    def _tell(self, pages: NDArray[np.int32], tier: int, is_stored: bool) -> None:
        for listener in self._listeners:
            listener(pages, tier, is_stored)

    def _record(self, pages: NDArray[np.int32], tier: int, is_stored: bool) -> None:
        """Called by the index, under the store's lock, with pages that are still in its table."""
        state, medium = self._state, TIER_NAMES[tier]
        kind = "stored" if is_stored else "removed"
        with self._changed:
            for root, ids in state.index.by_root(pages):
                tenant = state.trees[root].tenant
                journals = [self._all, self._by_tenant.get(tenant)]
                for start in range(0, len(ids), PAGES_MAX):
                    keys = state.index.table.key[ids[start : start + PAGES_MAX]].tobytes()
                    for journal in journals:
                        if journal is not None:
                            journal.add((tenant, kind, medium, keys))
            self._changed.notify_all()
