"""A reservation on a server: pages being written, invisible until committed.

They are written to this session's staging memory, which the server copies from, or to private
memory, which commit() sends as a stream. A server that is lost meanwhile means that nothing was
stored; it never means an exception.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvstore.client_link import UNREACHABLE
from kvstore.errors import InvalidRequest
from kvstore.kvstore_pb2 import AbortRequest, CommitRequest, ReserveReply, WritePagesHeader
from kvstore.reservation import PRESENT, Commit, commit_deadline
from kvstore.wire import PIECE_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from kvstore.kvstore_pb2 import CommitReply
    from kvstore.live_session import LiveSession
    from kvstore.remote_session import RemoteSession

ABORT_DEADLINE_S = 0.05
COMMIT_DEADLINE_S_MAX = 55.0
COMMIT_MARGIN_S = 2.0  # of a durable one, for the answer that the deadline passed to get here
# What the server needs for the pages themselves, beyond the deadline.
COPY_BYTES_A_SECOND_MIN = 200e6
STREAM_BYTES_A_SECOND_MIN = 50e6
CALL_S_MAX = 60.0

_NOWHERE = np.zeros(0, np.uint64)


class RemoteReservation:
    """What RemoteSession.reserve() gave. Fill its views, then commit; else it is given up."""

    def __init__(
        self,
        session: RemoteSession,
        live: LiveSession | None,
        reply: ReserveReply,
        staging: memoryview | None,
    ) -> None:
        """`staging`: all staging memory of the session, where the pages lie at the offsets."""
        self._session = session
        self._live = live
        self._id = reply.reservation
        self._offsets: NDArray[np.uint64] = np.frombuffer(reply.staging_offsets, "<u8")
        self._staging = staging
        self._private: NDArray[np.uint8] | None = None
        self._is_open = reply.count > 0
        self._is_held = self._id != 0  # the server keeps something of it
        self._done: Commit | None = None  # where all was "present"
        self.start = reply.start
        self.count = reply.count
        self.reason = reply.reason

    @classmethod
    def nothing(cls, session: RemoteSession, reason: str) -> RemoteReservation:
        """What there is to write while the server can't be asked."""
        return cls(session, None, ReserveReply(reason=reason), None)

    def views(self) -> list[memoryview]:
        """Writable bytes, `spec.page_bytes` a page. Don't touch them after commit or abort."""
        if not self._is_open or self._session.is_forked():
            return []
        size = self._session.spec.page_bytes
        if self._staging is not None:
            return [self._staging[at : at + size] for at in self._offsets.tolist()]
        if self._private is None:
            self._private = np.empty(self.count * size, np.uint8)
        whole = self._private.data
        return [whole[page * size : (page + 1) * size] for page in range(self.count)]

    @property
    def offsets(self) -> NDArray[np.uint64]:
        """Where each page lies in the session's staging memory; empty without shared memory."""
        return self._offsets if self._is_open and self._staging is not None else _NOWHERE

    def commit(self, *, durable: bool = False, deadline_s: float | None = None) -> Commit:
        """Publish the pages. With `durable`, wait until they and their ancestors are on disk.

        Where all was "present" already, there is nothing to publish, but `durable` still waits.
        Raises InvalidRequest when the reservation was given up, or never had anything to commit.
        A server that is lost meanwhile makes it 0 pages, and says so in `reason`.
        deadline_s: how long to wait for the server, 2 s unless given, and for the time that it
        needs to copy many pages; with `durable`, how long for the disk, 10 s unless given, and up
        to 2 s more for the answer.
        """
        wait_s = min(commit_deadline(deadline_s, durable=durable), COMMIT_DEADLINE_S_MAX)
        is_new, self._is_open = self._is_open, False
        if not is_new and (self.reason != PRESENT or self._live is None):
            raise InvalidRequest("this reservation is empty, committed or aborted already")
        if self._done is not None and (self._done.durable or not durable):
            return Commit(0, durable=self._done.durable and durable)  # present, and committed once
        if not is_new and not self._id:
            return Commit(0, durable=False, reason="unknown" if durable else "")
        live = self._live
        if live is None or self._session.is_forked():
            return Commit(0, durable=False, reason=UNREACHABLE)
        margin_s = COMMIT_MARGIN_S if durable else 0.0
        if is_new and self._staging is None:
            reply = self._send(live, durable, wait_s, margin_s)
        else:
            margin_s += self.count * self._session.spec.page_bytes / COPY_BYTES_A_SECOND_MIN
            request = CommitRequest(
                session=live.id, reservation=self._id, durable=durable, deadline_s=wait_s
            )
            timeout_s = min(wait_s + margin_s, CALL_S_MAX)
            reply = self._session.ask(live, "Commit", request, timeout_s)
        if reply is None:
            reason = self._session.why_not()
            self.abort()  # if the call got lost on its way, the pages must not stay reserved
            return Commit(0, durable=False, reason=reason)
        self._is_held = False
        self._forget()
        done = Commit(reply.pages, durable=reply.durable, reason=reply.reason)
        self._done = None if is_new else done
        return done

    def abort(self) -> None:
        """Give the pages up; nothing was ever visible. Doing it again does nothing."""
        self._is_open = False
        self._forget()
        live, held, self._is_held = self._live, self._is_held, False
        if live is None or not held or self._session.is_forked():
            return
        # Whoever reserves next shall find them free; but an engine waits only a moment for it, and
        # not at all where there was nothing to write.
        request = AbortRequest(session=live.id, reservation=self._id)
        if not self.count or self._session.ask(live, "Abort", request, ABORT_DEADLINE_S) is None:
            self._session.give_back.abort(live, self._id)

    def __enter__(self) -> RemoteReservation:
        return self

    def __exit__(self, *exc: object) -> None:
        self.abort()

    def _forget(self) -> None:
        self._staging = self._private = None

    def _send(
        self, live: LiveSession, durable: bool, wait_s: float, margin_s: float
    ) -> CommitReply | None:
        header = WritePagesHeader(
            session=live.id, reservation=self._id, durable=durable, deadline_s=wait_s
        )
        if self._private is None:  # nobody asked for the views: send as much, as it is
            self._private = np.zeros(self.count * self._session.spec.page_bytes, np.uint8)
        timeout_s = wait_s + margin_s + self._private.nbytes / STREAM_BYTES_A_SECOND_MIN
        pieces = _pieces(self._private.data)
        return self._session.write_pages(live, header, pieces, min(timeout_s, CALL_S_MAX))


def _pieces(content: memoryview) -> Iterator[bytes]:
    for at in range(0, len(content), PIECE_BYTES):
        yield bytes(content[at : at + PIECE_BYTES])
