"""The Watch call: a tenant's page events as they happen, for as long as its client listens."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from kvstore.errors import CapacityError
from kvstore.event_log import EventLog
from kvstore.kvstore_pb2 import Event

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore import kvstore_pb2 as messages
    from kvstore.rpc_guard import Call
    from kvstore.store import Store

WATCHES_MAX = 64
POLL_S = 0.5


class Watches:
    """Answers Watch; each takes one thread of the streams' pool."""

    def __init__(self, store: Store) -> None:
        self._log = EventLog(store.state)
        self._lock = threading.Lock()
        self._count = 0
        self._draining = False

    def watch(self, request: messages.WatchRequest, call: Call) -> Iterator[Event]:
        """Events after a number; 0 means from now on. CapacityError when too many watch."""
        with self._lock:
            if self._count >= WATCHES_MAX:
                raise CapacityError(f"{WATCHES_MAX} clients watch already")
            self._count += 1
        try:
            last = self._log.begin()
            position = request.after_sequence or last
            while call.context.is_active() and not self._draining:
                position, events = self._log.after(position, call.identity.tenant, POLL_S)
                for event in events:
                    yield Event(
                        sequence=event.sequence,
                        kind=event.kind,
                        medium=event.medium,
                        keys=event.keys,
                    )
        finally:
            with self._lock:
                self._count -= 1

    def drain(self) -> None:
        """End all streams soon."""
        self._draining = True
