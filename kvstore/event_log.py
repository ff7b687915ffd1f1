"""What pages were stored and removed lately, in order, for whoever watches: one log a server.

It begins with the first watcher; until then nothing is recorded. It holds the last EVENTS_MAX
events: a watcher that falls behind them is told so by an event "lost", and has to ask anew.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstore.state import TIER_NAMES

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from kvstore.state import StoreState

EVENTS_MAX = 16_384
PAGES_MAX = 4096  # named in one event
KEY_BYTES = 16


@dataclass(frozen=True, slots=True)
class PageEvent:
    """Pages of one tenant that came into a tier, or left it."""

    sequence: int
    tenant: str
    kind: str  # "stored", "removed", "lost"
    medium: str  # "host", "disk"
    keys: bytes  # 16 a page


class EventLog:
    """Records what the index is told; safe to read from several threads."""

    def __init__(self, state: StoreState) -> None:
        self._state = state
        self._changed = threading.Condition()
        self._events: deque[PageEvent] = deque(maxlen=EVENTS_MAX)
        self._last = 0

    def begin(self) -> int:
        """Record from now on; the number of the last event so far."""
        with self._state.lock:
            self._state.index.observer = self._record
        with self._changed:
            return self._last

    def after(self, sequence: int, tenant: str, wait_s: float) -> tuple[int, list[PageEvent]]:
        """A tenant's events after that number, and the number to go on from.

        Waits up to `wait_s` seconds for the first. A number that is not in the log any more, or
        never was, gives one event "lost".
        """
        with self._changed:
            if sequence == self._last:
                self._changed.wait(wait_s)
            oldest = self._events[0].sequence if self._events else self._last + 1
            if not oldest - 1 <= sequence <= self._last:
                return self._last, [PageEvent(self._last, tenant, "lost", "", b"")]
            skip = sequence - (oldest - 1)
            fresh = [self._events[at] for at in range(skip, len(self._events))]
            return self._last, [event for event in fresh if event.tenant == tenant]

    def _record(self, pages: NDArray[np.int32], tier: int, is_stored: bool) -> None:
        """Called by the index, under the store's lock, with pages that are still in its table."""
        state = self._state
        by_tenant: dict[str, list[int]] = {}
        for page in pages.tolist():
            tenant = state.trees[state.index.root_of(page)].tenant
            by_tenant.setdefault(tenant, []).append(page)
        kind, medium = "stored" if is_stored else "removed", TIER_NAMES[tier]
        with self._changed:
            for tenant, mine in by_tenant.items():
                for start in range(0, len(mine), PAGES_MAX):
                    keys = state.index.table.key[mine[start : start + PAGES_MAX]].tobytes()
                    self._last += 1
                    self._events.append(PageEvent(self._last, tenant, kind, medium, keys))
            self._changed.notify_all()
