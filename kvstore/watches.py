"""The Watch call: page events as they happen, for as long as its client listens and may.

A client sees the events of its own tenant, an admin those of all.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from kvstore.errors import CapacityError
from kvstore.event_log import POLL_S, PageEvent
from kvstore.identity import Role
from kvstore.kvstore_pb2 import Event

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore import kvstore_pb2 as messages
    from kvstore.rpc_guard import Call
    from kvstore.store import Store

WATCHES_MAX = 64


class Watches:
    """Answers Watch; each takes one thread of the streams' pool."""

    def __init__(self, store: Store) -> None:
        self._log = store.events
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
            tenant = None if call.identity.role is Role.ADMIN else call.identity.tenant
            position = self._log.begin(tenant)
            if request.after_sequence:
                position = request.after_sequence
            else:
                yield _message(PageEvent(position, "", "watching", "", b""))
            while call.context.is_active() and not self._draining:
                call.confirm()
                position, events = self._log.after(position, tenant, POLL_S)
                yield from map(_message, events)
        finally:
            with self._lock:
                self._count -= 1

    def drain(self) -> None:
        """End all streams soon."""
        self._draining = True


def _message(event: PageEvent) -> Event:
    return Event(
        sequence=event.sequence,
        kind=event.kind,
        medium=event.medium,
        keys=event.keys,
        tenant=event.tenant,
    )
