"""A session with a server in another process: same calls as Session, and no failure but a miss.

A thread keeps it open: it opens, listens to the server's heartbeat, and when the server is gone
opens again, so that whoever comes first, engine or server, they find each other within a second.
What an earlier server process gave is never mixed with a later one's: its LiveSession is over.
"""

from __future__ import annotations

import itertools
import logging
import os
import random
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstore import kvstore_pb2 as pb
from kvstore._version import __version__
from kvstore.client_channel import CallFailed, Failure, with_tokens
from kvstore.client_link import REFUSALS
from kvstore.live_session import CLOSED, LiveSession
from kvstore.prefill import Prefill
from kvstore.prompt_lookups import PromptLookups, extras_message
from kvstore.remote_hints import RemoteHints
from kvstore.remote_match import RemoteMatch
from kvstore.remote_reservation import RemoteReservation
from kvstore.request import checked_deadline, checked_extras, token_view
from kvstore.reservation import LIMIT, PRESENT
from kvstore.shared_memory import AttachGrant, SharedMemoryError, attach
from kvstore.wire import DEADLINE_S_MAX, SILENCE_S

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from google.protobuf.message import Message

    from kvstore.client_link import ServerLink
    from kvstore.give_back import GiveBack
    from kvstore.request import Extras, Tokens
    from kvstore.shared_memory import Attachment
    from kvstore.spec import CacheSpec

OPEN_TIMEOUT_S = 2.0
OPEN_REASON_S = 0.5
ATTACH_TIMEOUT_S = 1.0
CLOSE_TIMEOUT_S = 1.0
ANSWER_MARGIN_S = 0.5  # beyond the deadline that the server keeps
BACKOFF_S_MIN, BACKOFF_S_MAX = 0.05, 0.25
REFUSED_BACKOFF_S_MAX = 5.0
BEAT_S_TROUBLED = 0.1  # while calls are not answered
FLUSH_DEADLINE_S_MAX = DEADLINE_S_MAX - 1
RESERVE_DEADLINE_S_MAX = DEADLINE_S_MAX - 1

_log = logging.getLogger("kvstore.client")
_numbers = itertools.count(1)


class RemoteSession(RemoteHints):
    """Made by RemoteStore.session(). Safe to use from several threads; close it."""

    def __init__(
        self, link: ServerLink, spec: CacheSpec, salt: bytes, writer: str, *, public: bool = True
    ) -> None:
        self.spec = spec
        self._public = public
        self.give_back: GiveBack = link.give_back
        self.lookups = PromptLookups(link, spec.page_tokens)
        self.stage_deadline_s = link.config.stage_deadline_s
        self._link = link
        self._salt = salt
        self._writer = writer
        self._pid = os.getpid()
        self._live: LiveSession | None = None
        self._closing = threading.Event()
        self._changed = threading.Condition()
        self._attempts = 0
        self._refusal = ""  # why the server does not open it, as far as it says so
        self._shared_memory = link.config.shared_memory and link.address.socket is not None
        self._fork_seen = False
        self._saved_s = 0.0  # for the next heartbeat; one that is lost costs a number in a metric
        self._prefill = Prefill()  # the same
        self._keeper = threading.Thread(
            target=self._keep, name=f"kvstore-keeper-{next(_numbers)}", daemon=True
        )
        self._keeper.start()

    @property
    def is_open(self) -> bool:
        """Whether a server answers this session now."""
        live = self._live
        return live is not None and not live.over.is_set()

    @property
    def epoch(self) -> int:
        """Names what this session has with the server process that answers now; 0: none does."""
        live = self._live
        return live.epoch if live is not None and not live.over.is_set() else 0

    def attach_tokens(self, count: int) -> AttachGrant | None:
        """Let `count` other processes of this user attach() to this session's memory, soon.

        They read pages by slot and write staging by offset, and ask the server for nothing. None:
        no server answers, or it shares no memory with this process.
        """
        live = self.usable()
        if live is None or not live.is_shared:
            return None
        request = pb.AttachRequest(session=live.id, count=count)
        reply = self.ask(live, "Attach", request, ATTACH_TIMEOUT_S)
        if reply is None or len(reply.attach_token) != count:
            return None
        return AttachGrant(live.epoch, self._attach_path(reply.path), tuple(reply.attach_token))

    def wait_open(self, wait_s: float, *, while_it_starts: bool = False) -> bool:
        """Wait for a server; whether one answers.

        while_it_starts: only as long as there is a reason to hope, that is until an attempt to
        reach it failed and no private server is starting.
        """
        deadline = time.monotonic() + wait_s
        with self._changed:
            while not self.is_open and not self._closing.is_set():
                left_s = deadline - time.monotonic()
                hopeless = self._attempts and not self._link.is_starting
                if left_s <= 0 or (while_it_starts and hopeless):
                    break
                self._changed.wait(left_s)
        return self.is_open

    def match(self, tokens: Tokens, extras: Extras | None = None) -> RemoteMatch:
        """Find the longest stored chain of a prompt and lease it, in one step. See Session.match.

        Raises InvalidRequest for malformed input. A server that does not answer within
        ClientConfig.lookup_deadline_s makes it a miss, with a reason as reserve() has them.
        """
        values, more = token_view(tokens), checked_extras(extras)
        live, reply = self.usable(), None
        if live is not None:
            reply = self.lookups.longest(live, values, more, self._link.config.lookup_deadline_s)
        reason = self._link.why_not() if reply is None else reply.reason
        if reply is None or not reply.match:
            live = reply = None
        return RemoteMatch(self, live, reply, reason)

    def reserve(
        self, tokens: Tokens, extras: Extras | None = None, *, deadline_s: float = 0.25
    ) -> RemoteReservation:
        """Room for the pages of this prompt that nobody has stored or is storing.

        See Session.reserve. With the reason "limit" it is shorter than asked: commit, then again.
        "unreachable": no server answers; "refused: ...": not to this credential, or not pages of
        this spec; "quota: ..." and "busy: ...": it has no more for this tenant, or for anybody,
        just now; "closed": this session is.
        """
        values, more = token_view(tokens), checked_extras(extras)
        wait_s = min(checked_deadline(deadline_s), RESERVE_DEADLINE_S_MAX)
        live = self.usable()
        if live is None:
            return RemoteReservation.nothing(self, self._link.why_not())
        self.give_back.hurry()
        with self.lookups.end_of(live, values, more) as part:
            head = pb.ReserveRequest(session=live.id, extras=extras_message(part.extras))
            head.deadline_s, head.after_match = wait_s, part.after
            head.call = live.next_call()
            request = with_tokens(head, part.tokens)
            reply = self.ask(live, "Reserve", request, wait_s + ANSWER_MARGIN_S, head.call)
        if reply is None:
            return RemoteReservation.nothing(self, self._link.why_not())
        if part.is_cut and reply.reason in ("", PRESENT):
            reply.reason = LIMIT
        staging = live.staging() if reply.staging_offsets else None
        if reply.staging_offsets and staging is None:  # the session ended just now
            self._not_made()
            return RemoteReservation.nothing(self, self._link.why_not())
        return RemoteReservation(self, live, reply, staging)

    def report_saved(self, prefill_s: float) -> None:
        """For the metrics: how much prefill the last match saved; goes with the next heartbeat."""
        self._saved_s += checked_deadline(prefill_s)

    def report_prefill(self, tokens: int, before: int, seconds: float) -> None:
        """Computing `tokens` of a prompt that follow `before` others took so long: see Session. It
        goes with the next heartbeat."""
        self._prefill += Prefill.of(tokens, before, seconds)

    def flush(self, deadline_s: float = 10.0) -> bool:
        """Wait until all that was committed is on disk; False when `deadline_s` passed first."""
        wait_s = min(checked_deadline(deadline_s), FLUSH_DEADLINE_S_MAX)
        live = self.usable()
        if live is None:
            return False
        request = pb.FlushRequest(session=live.id, deadline_s=wait_s)
        reply = self.ask(live, "Flush", request, wait_s + ANSWER_MARGIN_S)
        return reply is not None and reply.done

    def close(self) -> None:
        """Release all matches, abort all reservations; later calls are misses, and their reason is
        "closed"."""
        if self.is_forked() or self._closing.is_set():
            return
        self._closing.set()
        live = self._live
        if live is not None:
            self._say_goodbye(live)
            live.end(CLOSED)
        with self._changed:
            self._changed.notify_all()
        self._keeper.join(CLOSE_TIMEOUT_S)

    def ask(
        self,
        live: LiveSession,
        name: str,
        request: Message | bytes,
        timeout_s: float,
        call: int = 0,
    ) -> Any:
        """One call of this session; None when it got no reply. For its matches and reservations."""
        return self._link.ask(live, name, request, timeout_s, call)

    def why_not(self) -> str:
        """Why this thread's last call of this session got no reply. For its reservations."""
        return self._link.why_not()

    def read_pages(
        self, live: LiveSession, header: pb.ReadPagesHeader, into: memoryview, timeout_s: float
    ) -> int:
        """Page bytes of a match by stream; how many came. For its matches."""
        return self._link.read_pages(live, header, into, timeout_s)

    def write_pages(
        self,
        live: LiveSession,
        header: pb.WritePagesHeader,
        pieces: Iterable[bytes],
        timeout_s: float,
    ) -> pb.CommitReply | None:
        """Send a reservation's pages by stream. For its reservations."""
        return self._link.write_pages(live, header, pieces, timeout_s)

    def is_forked(self) -> bool:
        """Whether this is a child of the process that made the session: then all are misses."""
        if self._pid == os.getpid():
            return False
        if not self._fork_seen:
            self._fork_seen = True
            _log.error(
                "a session of process %d is used in its forked child %d: all misses; start "
                "processes with the spawn method, or connect after the fork",
                self._pid,
                os.getpid(),
            )
        return True

    def __enter__(self) -> RemoteSession:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def usable(self) -> LiveSession | None:
        live = self._live
        if live is None or self.is_forked() or live.over.is_set():
            self._not_made()
            return None
        return live

    def _not_made(self) -> None:
        self._link.not_made(CLOSED if self._closing.is_set() else self._refusal)

    def _keep(self) -> None:
        """The keeper's life: open, listen until it is over, again."""
        backoff_s = BACKOFF_S_MIN
        while not self._closing.is_set():
            try:
                live = self._open()
            except CallFailed as exc:
                refused = exc.failure in REFUSALS
                self._refusal = self._link.not_opened(exc)
                self._tell_attempt()
                self._closing.wait(backoff_s * random.uniform(0.8, 1.2))
                backoff_s = min(2 * backoff_s, REFUSED_BACKOFF_S_MAX if refused else BACKOFF_S_MAX)
                continue
            backoff_s = BACKOFF_S_MIN
            self._refusal = ""
            self._link.opened()
            self._link.note(f"connected, epoch {live.boot_epoch:x}", logging.INFO)
            self._link.count("sessions_opened")
            self._live = live
            self._tell_attempt()
            if self._closing.is_set():  # close() may have missed it
                self._say_goodbye(live)
                live.end(CLOSED)
                return
            self._listen(live)
            if not self._closing.is_set():
                self._link.note(f"lost: {live.reason}")

    def _tell_attempt(self) -> None:
        with self._changed:
            self._attempts += 1
            self._changed.notify_all()

    def _open(self) -> LiveSession:
        """A session with whichever server is there; CallFailed."""
        reason = self._link.why_unreachable()
        if reason:
            raise CallFailed(Failure.UNREACHABLE, reason)
        request = pb.OpenRequest(
            client_version=__version__,
            spec_json=self.spec.to_json(),
            salt=self._salt,
            writer=self._writer,
            shared_memory=self._shared_memory,
            without_public=not self._public,
        )
        reply = self._ask_to_open(request)
        if reply.page_bytes != self.spec.page_bytes:
            raise CallFailed(
                Failure.REFUSED,
                f"its pages have {reply.page_bytes} bytes, ours {self.spec.page_bytes}",
            )
        if not self._shared_memory or not reply.attach_token:
            return LiveSession(reply, None)
        attachment = self._attach(reply)
        live = LiveSession(reply, attachment)
        if attachment is None:  # it would expect pages in staging that is not mapped
            self._say_goodbye(live)
            raise CallFailed(Failure.UNREACHABLE, "without shared memory from here on")
        return live

    def _ask_to_open(self, request: pb.OpenRequest) -> pb.OpenReply:
        channel, address = self._link.channel, self._link.address
        try:
            reply: pb.OpenReply = channel.call("Open", request, OPEN_TIMEOUT_S, wait_for_ready=True)
            return reply
        except CallFailed as exc:
            if exc.failure is not Failure.TIMEOUT or address.socket is not None:
                raise
        # Why no connection comes about, gRPC tells a call that does not wait for one.
        reply = channel.call("Open", request, OPEN_REASON_S)
        return reply

    def _attach(self, reply: pb.OpenReply) -> Attachment | None:
        """The server's memory. Where it can't be had, no later attempt asks for it."""
        try:
            return attach(
                self._attach_path(reply.attach_path),
                reply.attach_token,
                server_uid=self._link.config.trusted_uid,
                timeout_s=ATTACH_TIMEOUT_S,
            )
        except (SharedMemoryError, OSError, ValueError) as exc:
            if not self._link.why_unreachable():  # the server is there, its memory is not
                self._shared_memory = False
                _log.warning("no shared memory, pages come as a stream: %s", exc)
            return None

    def _attach_path(self, named: str) -> Path:
        """Where the server's fd-passing socket is for this process."""
        assert self._link.address.socket is not None
        path = Path(named)
        # In a container the server's directory may be mounted under another name.
        return path if path.exists() else self._link.address.socket.parent / path.name

    def _listen(self, live: LiveSession) -> None:
        """Until the server, this session or the client is gone."""
        while not live.over.is_set():
            credential = self._link.channel.credential
            try:
                stream = self._link.channel.heartbeat(self._beats(live))
                live.on_end(stream.cancel)
                for beat in self._link.channel.replies(stream):
                    if beat.boot_epoch != live.boot_epoch:
                        live.end("another server answers")
                    self._link.heard(live)
            except CallFailed as exc:
                is_old = exc.failure is Failure.DENIED
                if not is_old or not self._link.channel.has_newer_credential(credential):
                    live.end(str(exc))
            # A stream that ends well was old: the session goes on with a new one.
            live.over.wait(BACKOFF_S_MIN)

    def _beats(self, live: LiveSession) -> Iterator[pb.Beat]:
        """Sent to the server, from a thread of gRPC's."""
        while not live.over.is_set():
            saved_s, self._saved_s = self._saved_s, 0.0
            took, self._prefill = self._prefill, Prefill()
            yield pb.Beat(
                session=live.id,
                boot_epoch=live.boot_epoch,
                prefill_saved_s=saved_s,
                prefill_tokens=took.tokens,
                prefill_positions=took.positions,
                prefill_s=took.seconds,
            )
            troubled = self._link.breaker.is_open
            live.wake.wait(BEAT_S_TROUBLED if troubled else live.beat_s)
            live.wake.clear()
            if time.monotonic() - live.heard_s > SILENCE_S:
                live.end(f"nothing heard for {SILENCE_S:.0f} s")

    def _say_goodbye(self, live: LiveSession) -> None:
        """Tell the server that a session is over, so that it need not find out."""
        if live.over.is_set() or self._link.breaker.is_open:
            return
        try:
            self._link.channel.call("Close", pb.CloseRequest(session=live.id), CLOSE_TIMEOUT_S)
        except CallFailed as exc:
            _log.debug("closing a session: %s", exc)
