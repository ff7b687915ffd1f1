"""What one server process gave a client: a session id, an epoch, memory. It dies with that server.

RemoteSession then gets another one; what was made with the old one is a miss from there on. Must
not be here: calls to the server, deciding when it is over.
"""

from __future__ import annotations

import hashlib
import itertools
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstore.shared_memory import SharedMemoryError
from kvstore.wire import HEARTBEAT_S

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.kvstore_pb2 import OpenReply
    from kvstore.shared_memory import Attachment, MappedExtent

# Of a server that can't be told to take back what such a call made.
ABANDONED_COSTS = {"Match": 1, "Reserve": 32}
ABANDONED_MAX = 32
CLOSED = "closed"  # why it is over when its user closed it


@dataclass(frozen=True, slots=True)
class Hold:
    """How long a kind of call is not made, since the server refused the last one."""

    until_s: float
    doubled_s: float  # to hold for longer the next time
    reason: str


class LiveSession:
    """One opened session. Thread-safe."""

    def __init__(self, reply: OpenReply, attachment: Attachment | None) -> None:
        """`attachment`: the server's memory, None where pages come as a stream. Owned by this."""
        self.id = reply.session
        self.boot_epoch = reply.boot_epoch
        # Tells this session from all others, also of the same server; says nothing about its id.
        self.epoch = 1 | int.from_bytes(
            hashlib.blake2b(self.id + reply.boot_epoch.to_bytes(8), digest_size=8).digest()
        )
        self.beat_s = (reply.heartbeat_s or HEARTBEAT_S) / 3
        self.over = threading.Event()
        self.wake = threading.Event()  # beat now
        self.heard_s = time.monotonic()  # when the server last gave a sign of life
        self.reason = ""  # why it is over
        # A full tier refuses reservations and not look-ups: each kind of call is held for itself.
        self.holds: dict[str, Hold] = {}
        self.takes_back = reply.takes_back  # what calls made whose replies did not come
        self._calls = itertools.count(1)
        self._abandoned = 0
        self.is_shared = attachment is not None
        self._attachment = attachment
        self._lock = threading.Lock()
        self._cancel: Callable[[], object] | None = None

    def extent(self, container_id: int) -> MappedExtent | None:
        """A mapped extent, mapping what is new if need be; None when it can't be had."""
        attachment = self._attachment
        if attachment is None:
            return None
        extent = attachment.extents.get(container_id)
        if extent is not None or self.over.is_set():
            return extent
        with self._lock:
            if container_id not in attachment.extents and not self.over.is_set():
                try:
                    attachment.refresh()
                except (SharedMemoryError, OSError, ValueError) as exc:
                    # Half an answer may still be under way: this connection is of no more use.
                    self._end(f"shared memory: {exc}")
            return attachment.extents.get(container_id)

    def staging(self) -> memoryview | None:
        """All memory for writing, writable; None when there is none."""
        staging = self._attachment.staging if self._attachment is not None else None
        if staging is None or self.over.is_set():
            return None
        try:
            return staging.view(0, staging.size)
        except ValueError:  # unmapped just now
            return None

    def next_call(self) -> int:
        """A number for a call, by which it can be taken back."""
        return next(self._calls)

    def abandoned(self, name: str) -> None:
        """A call was not waited for to its end: the server may hold something that we know not of.

        For servers that do not take it back: after some of these only ending the session does; an
        unknown reservation keeps others from writing the same pages, so one is enough.
        """
        self._abandoned += ABANDONED_COSTS.get(name, 0)
        if self._abandoned >= ABANDONED_MAX:
            self.end("too many calls were not answered in time")

    def on_end(self, cancel: Callable[[], object]) -> None:
        """Call this when the session is over; at once if it is."""
        self._cancel = cancel
        if self.over.is_set():
            cancel()

    def end(self, reason: str) -> None:
        """Make it over; what is mapped and still in use stays readable."""
        with self._lock:
            self._end(reason)

    def _end(self, reason: str) -> None:
        if self.over.is_set():
            return
        self.reason = reason
        self.over.set()
        self.wake.set()
        if self._cancel is not None:
            self._cancel()
        if self._attachment is not None:
            self._attachment.close()
