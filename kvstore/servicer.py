"""The calls of the service that engines make: sessions, matches, reservations, page streams.

Each is the method of the same name of a ServerSession, plus the translation of messages.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
from google.protobuf.message import DecodeError

from kvstore._version import __version__
from kvstore.errors import InvalidRequest
from kvstore.identity import NotAuthenticated
from kvstore.kvstore_pb2 import (
    AbortReply,
    AttachReply,
    Beat,
    CloseReply,
    CommitReply,
    FlushReply,
    HintReply,
    MatchReply,
    OpenReply,
    PinReply,
    Places,
    ReleaseReply,
    ReserveReply,
    StageReply,
    UnpinReply,
    WritePagesHeader,
)
from kvstore.prefill import Prefill
from kvstore.prefix_index.page_key import TOKEN_BYTES
from kvstore.quantity import format_bytes
from kvstore.rpc_guard import Refused
from kvstore.server_session import UnknownHandle
from kvstore.spec import CacheSpec
from kvstore.tenant import check_salt
from kvstore.wire import HEARTBEAT_S, PIECE_BYTES, check_version

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import grpc

    from kvstore import kvstore_pb2 as messages
    from kvstore.extent_server import ExtentServer
    from kvstore.lease import Match
    from kvstore.reservation import Commit
    from kvstore.rpc_guard import Call
    from kvstore.server_session import HeldReservation, ServerSession
    from kvstore.session_registry import SessionRegistry
    from kvstore.store import Store

ATTACH_TOKENS_MAX = 256  # a call
# A heartbeat stream ends after so long, well and without ending its sessions, so that clients move
# off connections that have grown old.
STREAM_S_MAX = 1800.0
SAVED_S_MAX = 1e6  # of prefill, in one beat: more is nonsense


class Servicer:
    """Functions by method name, for Guard.handlers()."""

    def __init__(
        self, store: Store, registry: SessionRegistry, extents: ExtentServer, boot_epoch: int
    ) -> None:
        self._store = store
        self._registry = registry
        self._extents = extents
        self._boot_epoch = boot_epoch
        self._lock = threading.Lock()
        self._streams: set[grpc.ServicerContext] = set()
        self._draining = False

    def functions(self) -> dict[str, Callable[..., Any]]:
        """What answers each method."""
        return {
            "Open": self.open,
            "Heartbeat": self.heartbeat,
            "Close": self.close,
            "Attach": self.attach,
            "Match": self.match,
            "Stage": self.stage,
            "Release": self.release,
            "Reserve": self.reserve,
            "Commit": self.commit,
            "Abort": self.abort,
            "Flush": self.flush,
            "Pin": self.pin,
            "Unpin": self.unpin,
            "Hint": self.hint,
            "ReadPages": self.read_pages,
            "WritePages": self.write_pages,
        }

    def drain(self) -> None:
        """End all heartbeat streams; their sessions stay for the calls that are under way."""
        with self._lock:
            self._draining = True
            streams = list(self._streams)
        for context in streams:
            context.cancel()

    def open(self, request: messages.OpenRequest, call: Call) -> OpenReply:
        """A session for one spec."""
        problem = check_version(request.client_version, __version__)
        if problem:
            raise Refused(problem)
        check_salt(request.salt)
        spec = CacheSpec.from_json(request.spec_json)
        host, there = self._store.state.host, self._store.config.host_bytes
        if host is not None and not host.fits(spec.page_bytes):
            raise Refused(  # and not that it has no room just now
                f"a page of {format_bytes(spec.page_bytes)} does not fit in the "
                f"{format_bytes(there)} that the server has for pages; raise its host_bytes"
            )
        session = self._registry.open(
            call.identity,
            spec,
            salt=request.salt,
            writer=request.writer,
            shared_memory=request.shared_memory,
            public=not request.without_public,
        )
        staging = session.staging
        return OpenReply(
            session=session.name,
            boot_epoch=self._boot_epoch,
            server_version=__version__,
            attach_token=self._extents.issue_token(session) if request.shared_memory else b"",
            attach_path=str(self._extents.path) if request.shared_memory else "",
            staging_bytes=staging.size if staging is not None else 0,
            page_bytes=spec.page_bytes,
            heartbeat_s=HEARTBEAT_S,
            takes_back=True,
        )

    def heartbeat(self, beats: Iterator[messages.Beat], call: Call) -> Iterator[Beat]:
        """Beats of any number of sessions; all of them end when the client's side breaks."""
        sessions: set[ServerSession] = set()
        until = time.monotonic() + STREAM_S_MAX
        with self._lock:
            self._streams.add(call.context)
        over = False  # by our will
        try:
            for beat in beats:
                call.confirm()
                found = self._registry.find(beat.session, call.identity)
                sessions.add(found)
                if 0 < beat.prefill_saved_s < SAVED_S_MAX:
                    found.session.report_saved(beat.prefill_saved_s)
                if beat.prefill_s:
                    took = Prefill(beat.prefill_tokens, beat.prefill_positions, beat.prefill_s)
                    found.session.add_prefill(took)
                yield Beat(session=beat.session, boot_epoch=self._boot_epoch)
                over = self._draining or time.monotonic() > until
                if over:
                    return
        except NotAuthenticated:
            over = True  # they go on if their client soon shows another credential
            for session in sessions:
                self._registry.doubt(session)
            raise
        finally:
            with self._lock:
                self._streams.discard(call.context)
            if not over and not self._draining:
                for session in sessions:
                    self._registry.end(session)

    def close(self, request: messages.CloseRequest, call: Call) -> CloseReply:
        """End a session."""
        self._registry.end(self._registry.find(request.session, call.identity))
        return CloseReply()

    def attach(self, request: messages.AttachRequest, call: Call) -> AttachReply:
        """Tokens for other processes of the session's client."""
        session = self._registry.find(request.session, call.identity)
        if not 1 <= request.count <= ATTACH_TOKENS_MAX:
            raise InvalidRequest(f"count: {request.count} is not in [1, {ATTACH_TOKENS_MAX}]")
        if not session.is_shared:
            raise InvalidRequest("this session was opened without shared memory")
        tokens = [self._extents.issue_token(session, guest=True) for _ in range(request.count)]
        try:
            self._registry.find(request.session, call.identity)
        except UnknownHandle:  # it ended meanwhile, and these tokens came too late to be void
            self._extents.forget(session)
            raise
        return AttachReply(attach_token=tokens, path=str(self._extents.path))

    def match(self, request: messages.MatchRequest, call: Call) -> MatchReply:
        """Look up and lease."""
        session = self._registry.find(request.session, call.identity)
        extras = extras_of(request.extras) if request.HasField("extras") else {}
        tokens = _tokens(request.tokens)
        held = session.match(tokens, extras, request.after_match, request.call)
        if not held.number:
            return MatchReply(reason=held.match.reason)
        if not call.context.is_active():  # nobody is there to release it
            session.release([held.number])
            return MatchReply()
        match = held.match
        places = self._places(match)
        return MatchReply(match=held.number, pages=match.pages, places=places, reason=match.reason)

    def stage(self, request: messages.StageRequest, call: Call) -> StageReply:
        """Bring a match's pages into the arena."""
        session = self._registry.find(request.session, call.identity)
        wait_s = call.wait_s(request.deadline_s)
        match = session.stage(request.match, wait_s)
        return StageReply(host_pages=match.host_pages, places=self._places(match))

    def release(self, request: messages.ReleaseRequest, call: Call) -> ReleaseReply:
        """End leases, and what came of calls that nobody waited for."""
        session = self._registry.find(request.session, call.identity)
        session.release(request.match)
        if request.call:
            session.take_back(request.call)
        return ReleaseReply()

    def reserve(self, request: messages.ReserveRequest, call: Call) -> ReserveReply:
        """Room for pages that nobody has stored or is storing."""
        session = self._registry.find(request.session, call.identity)
        wait_s = call.wait_s(request.deadline_s)
        extras = extras_of(request.extras)
        tokens = _tokens(request.tokens)
        held = session.reserve(tokens, extras, wait_s, request.after_match, request.call)
        made = held.reservation
        if not call.context.is_active():  # nobody is there to fill it
            session.abort(held.number)
            return ReserveReply()
        return ReserveReply(
            reservation=held.number,
            start=made.start,
            count=made.count,
            reason=made.reason,
            staging_offsets=_offsets(session, held),
        )

    def commit(self, request: messages.CommitRequest, call: Call) -> CommitReply:
        """Publish what is in staging."""
        session = self._registry.find(request.session, call.identity)
        wait_s = call.wait_s(request.deadline_s)
        done = session.commit(request.reservation, durable=request.durable, deadline_s=wait_s)
        return _commit_reply(done)

    def abort(self, request: messages.AbortRequest, call: Call) -> AbortReply:
        """Give a reservation up."""
        self._registry.find(request.session, call.identity).abort(request.reservation)
        return AbortReply()

    def flush(self, request: messages.FlushRequest, call: Call) -> FlushReply:
        """Wait until all that was committed is on disk."""
        wait_s = call.wait_s(request.deadline_s)
        if not request.session:
            return FlushReply(done=self._store.flush(wait_s))
        session = self._registry.find(request.session, call.identity)
        return FlushReply(done=session.session.flush(wait_s))

    def pin(self, request: messages.PinRequest, call: Call) -> PinReply:
        """Keep a chain."""
        session = self._registry.find(request.session, call.identity)
        tokens, extras = session.longer(
            request.after_match, _tokens(request.tokens), extras_of(request.extras)
        )
        return PinReply(pages=session.session.pin(tokens, request.ttl_s, extras))

    def unpin(self, request: messages.UnpinRequest, call: Call) -> UnpinReply:
        """Keep it no longer."""
        session = self._registry.find(request.session, call.identity)
        tokens, extras = session.longer(
            request.after_match, _tokens(request.tokens), extras_of(request.extras)
        )
        return UnpinReply(pages=session.session.unpin(tokens, extras))

    def hint(self, request: messages.HintRequest, call: Call) -> HintReply:
        """What is known of a chain, or that a conversation is over."""
        session = self._registry.find(request.session, call.identity)
        if request.ends_conversation:
            return HintReply(pages=session.session.end_conversation(request.conversation))
        tokens, extras = session.longer(
            request.after_match, _tokens(request.tokens), extras_of(request.extras)
        )
        pages = session.session.hint(
            tokens,
            extras,
            next_use_s=request.next_use_s if request.HasField("next_use_s") else None,
            priority=request.priority if request.HasField("priority") else None,
            done=request.done,
            conversation=request.conversation,
        )
        return HintReply(pages=pages)

    def read_pages(self, request: messages.ReadPagesHeader, call: Call) -> Iterator[bytes]:
        """Pages [start, stop) of a match, as raw bytes in pieces; they are leased meanwhile."""
        session = self._registry.find(request.session, call.identity)
        with session.using(request.match) as held:
            for view in held.match.views(request.start, request.stop):
                for start in range(0, len(view), PIECE_BYTES):
                    yield bytes(view[start : start + PIECE_BYTES])
                    session.sign_of_life()

    def write_pages(self, pieces: Iterator[bytes], call: Call) -> CommitReply:
        """Fill a reservation with raw bytes, in pieces of any size, and publish it."""
        header = next(pieces, None)
        if header is None:
            raise InvalidRequest("WritePages: a header is missing")
        request = _header(header)
        session = self._registry.find(request.session, call.identity)
        with session.writing(request.reservation) as held:
            _fill(held.reservation.views(), pieces, session)
            wait_s = call.wait_s(request.deadline_s)
            return _commit_reply(
                held.reservation.commit(durable=request.durable, deadline_s=wait_s)
            )

    def _places(self, match: Match) -> Places:
        host = self._store.state.host
        assert host is not None
        slots = match.host_slots()
        return Places(
            host_slots=slots.astype("<i8", copy=False).tobytes(),
            host_generations=host.generations(slots).astype("<u8", copy=False).tobytes(),
        )


def _header(message: bytes) -> WritePagesHeader:
    try:
        return WritePagesHeader.FromString(message)
    except DecodeError as exc:
        raise InvalidRequest("WritePages: the first message is no WritePagesHeader") from exc


def _tokens(tokens: bytes) -> bytes:
    """Checks what checked_tokens() takes for granted in bytes of its own process."""
    if len(tokens) % TOKEN_BYTES or (tokens and np.frombuffer(tokens, "<i4").min() < 0):
        raise InvalidRequest("tokens: int32 ids of at least 0, little-endian, are needed")
    return tokens


def extras_of(extras: messages.Extras) -> dict[int, bytes]:
    """Extras by page index."""
    if len(extras.page_index) != len(extras.content):
        raise InvalidRequest("extras: as many contents as page indices are needed")
    return dict(zip(extras.page_index, extras.content, strict=True))


def _offsets(session: ServerSession, held: HeldReservation) -> bytes:
    if session.staging is None:
        return b""
    return b"".join(offset.to_bytes(8, "little") for offset in held.offsets)


def _commit_reply(done: Commit) -> CommitReply:
    return CommitReply(pages=done.pages, durable=done.durable, reason=done.reason)


def _fill(views: list[memoryview], pieces: Iterator[bytes], session: ServerSession) -> None:
    """Copy a stream of pieces into pages; InvalidRequest unless they have exactly those bytes."""
    wanted = sum(map(len, views))
    got = page = at = 0
    for piece in pieces:
        session.sign_of_life()
        got += len(piece)
        if got > wanted:
            break
        rest = memoryview(piece)
        while rest:
            part = rest[: len(views[page]) - at]
            views[page][at : at + len(part)] = part
            rest, at = rest[len(part) :], at + len(part)
            if at == len(views[page]):
                page, at = page + 1, 0
    if got != wanted:
        raise InvalidRequest(f"WritePages: {got} bytes of pages, {wanted} are reserved")
