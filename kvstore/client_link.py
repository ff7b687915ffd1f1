"""What all sessions of a client share: the channel, the breaker, the queue of what goes back.

Asks the server and turns every failure into None, which callers take for a miss: counted, one log
line a change of state, never an exception. Why a call got no reply is told to the thread that made
it, and is never another session's reason. Must not be here: what a call means.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvstore import kvstore_pb2 as pb
from kvstore.breaker import Breaker
from kvstore.client_channel import HOLD_S_MAX, CallFailed, Failure, ServerChannel
from kvstore.give_back import GiveBack
from kvstore.live_session import CLOSED, Hold
from kvstore.socket_probe import why_unreachable
from kvstore.tls_trouble import tls_trouble

if TYPE_CHECKING:
    from collections.abc import Iterable

    from google.protobuf.message import Message

    from kvstore.client_config import ClientConfig
    from kvstore.live_session import LiveSession
    from kvstore.private_server import PrivateServer
    from kvstore.server_address import ServerAddress

GIVE_BACK_S = 1.0
HOLD_S_MIN = 0.05
UNREACHABLE = "unreachable"  # how the reason begins while no server answers

# The server is there, and will say so again.
REFUSALS = frozenset({Failure.DENIED, Failure.INVALID, Failure.REFUSED})
# Calls that name a match or reservation: the server may know the session and not that.
_ABOUT_HANDLES = frozenset({"Stage", "Commit", "Abort", "ReadPages", "WritePages"})

_log = logging.getLogger("kvstore.client")


class ServerLink:
    """One client's way to one server, whichever process is the server at the time. Thread-safe."""

    def __init__(
        self, address: ServerAddress, config: ClientConfig, private: PrivateServer | None = None
    ) -> None:
        """`private` starts a server for the address's directory when none holds it."""
        self.address = address
        self.config = config
        self.channel = ServerChannel(address, config)
        self.breaker = Breaker()
        self.give_back = GiveBack(self._deliver)
        self.private = private
        self._last = threading.local()  # of the calls of one thread: why the last one got no reply
        self._counters: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._state = ""

    def ask(
        self,
        live: LiveSession,
        name: str,
        request: Message | bytes,
        timeout_s: float,
        call: int = 0,
    ) -> Any:
        """The server's reply to a call of this session; None when there is none in time.

        `call`: the number that the request has, so that what it made can be taken back then.
        """
        if not self._may_call(live, name):
            return None
        try:
            reply = self.channel.call(name, request, timeout_s)
        except CallFailed as exc:
            self.failed(live, name, exc, call)
            return None
        self.breaker.succeeded()
        if live.holds:
            _accepted(live, name)
        return reply

    def read_pages(
        self, live: LiveSession, header: pb.ReadPagesHeader, into: memoryview, timeout_s: float
    ) -> int:
        """Fill `into` from a stream of pages; how many bytes came, in order, without a gap."""
        at = 0
        if not self._may_call(live, "ReadPages"):
            return at
        try:
            for piece in self.channel.read_pages(header, timeout_s):
                if at + len(piece) > len(into):
                    raise CallFailed(Failure.REFUSED, "more bytes came than were asked for")
                into[at : at + len(piece)] = piece
                at += len(piece)
        except CallFailed as exc:
            if exc.failure is not Failure.TIMEOUT or at == 0:  # bytes came: it lives
                self.failed(live, "ReadPages", exc)
        return at

    def write_pages(
        self,
        live: LiveSession,
        header: pb.WritePagesHeader,
        pieces: Iterable[bytes],
        timeout_s: float,
    ) -> pb.CommitReply | None:
        """Send pages and commit them; None when that failed."""
        if not self._may_call(live, "WritePages"):
            return None
        try:
            return self.channel.write_pages(header, pieces, timeout_s)
        except CallFailed as exc:
            self.failed(live, "WritePages", exc)
            return None

    def failed(self, live: LiveSession, name: str, exc: CallFailed, call: int = 0) -> None:
        """A call got no reply: draw the conclusions."""
        self.count(f"calls_{exc.failure.name.lower()}")
        reason = ""
        if exc.failure is Failure.UNREACHABLE:
            live.end(str(exc))
        elif exc.failure is Failure.TIMEOUT:
            if self.breaker.failed(time.monotonic()):
                self.note(f"does not answer in time: {exc}")
            if call and live.takes_back:
                self.give_back.take_back(live, call)
            else:
                live.abandoned(name)
            live.wake.set()
        elif exc.failure is Failure.UNKNOWN:
            if name in _ABOUT_HANDLES:
                reason = f"lost: {exc.details or exc}"
            else:
                live.end(str(exc))
        elif exc.failure is Failure.BUSY:
            reason = _why_busy(exc)
            _hold(live, name, exc.hold_s, reason)
        elif exc.failure is Failure.DENIED:
            reason = f"refused: {exc}"
            self.note(reason)
            _hold(live, name, HOLD_S_MAX, reason)
        else:
            reason = f"refused: {exc}"
            self.note(f"refused a call: {name}: {exc}")
        self._last.reason = reason or self._unreachable()

    def why_not(self) -> str:
        """Why the last call of this thread that got no reply got none."""
        reason: str = getattr(self._last, "reason", UNREACHABLE)
        return reason

    def not_made(self, reason: str = "") -> None:
        """A call is not tried at all; the reason is that nobody answers, unless one is given."""
        self.count("calls_not_made")
        self._last.reason = reason or self._unreachable()

    def _unreachable(self) -> str:
        trouble = self.private.trouble if self.private is not None else ""
        return f"{UNREACHABLE}: {trouble}" if trouble else UNREACHABLE

    def not_opened(self, exc: CallFailed) -> str:
        """No session could be opened: why the server, if it is there, does not want this one."""
        if exc.failure in REFUSALS:
            reason = f"refused: {exc}"
            self.note(reason)
            return reason
        if self.private is None or not self.private.is_coming_up:  # else nothing is wrong so far
            trouble = tls_trouble(exc.details, self.address, self.config)
            self.note(f"not reached: {trouble or exc}")
        return _why_busy(exc) if exc.failure is Failure.BUSY else ""

    def opened(self) -> None:
        """A session was opened."""
        self.breaker.succeeded()
        if self.private is not None:
            self.private.answers()

    def heard(self, live: LiveSession) -> None:
        """The server has given a sign of life."""
        now = time.monotonic()
        live.heard_s = now
        if self.breaker.alive(now):
            self.note("answers again")

    def why_unreachable(self) -> str:
        """Why not to try to open a session now; "" to try. Starts a private server if need be."""
        if self.address.socket is None:
            return ""
        reason = why_unreachable(self.address.socket, self.config.trusted_uid)
        if reason and self.private is not None:
            self.private.ensure()
            return self.private.trouble or reason
        return reason

    @property
    def is_starting(self) -> bool:
        """Whether a private server is on its way, for all we know."""
        return self.private is not None and not self.private.trouble

    def note(self, state: str, level: int = logging.WARNING) -> None:
        """Log how the server is, if that is news."""
        with self._lock:
            if state == self._state:
                return
            self._state = state
        _log.log(level, "server %s: %s", self.address, state)

    def count(self, name: str) -> None:
        """Add one to a counter."""
        with self._lock:
            self._counters[name] += 1

    def counters(self) -> dict[str, int]:
        """What happened since the client was made; each only grows."""
        with self._lock:
            return {"breaker_opened": self.breaker.times_opened, **self._counters}

    def close(self) -> None:
        """Deliver what is to be given back, end all calls."""
        self.give_back.stop(GIVE_BACK_S)
        self.channel.close()

    def _may_call(self, live: LiveSession, name: str) -> bool:
        if live.over.is_set() or self.breaker.is_open:
            self.not_made(CLOSED if live.reason == CLOSED else "")
            return False
        held = live.holds.get(name) if live.holds else None
        if held is not None and held.until_s > time.monotonic():
            self.count("calls_held_back")
            self._last.reason = held.reason
            return False
        return True

    def _deliver(self, live: LiveSession, name: str, numbers: list[int]) -> bool:
        if name == "Release":
            request: Message = pb.ReleaseRequest(session=live.id, match=numbers)
            return self.ask(live, name, request, GIVE_BACK_S) is not None
        if name == "TakeBack":
            request = pb.ReleaseRequest(session=live.id, call=numbers)
            return self.ask(live, "Release", request, GIVE_BACK_S) is not None
        for number in numbers:
            if (
                self.ask(
                    live, name, pb.AbortRequest(session=live.id, reservation=number), GIVE_BACK_S
                )
                is None
            ):
                return False
        return True


def _hold(live: LiveSession, name: str, for_s: float | None, reason: str) -> None:
    """Leave the server alone: for as long as it says, else for twice as long each time."""
    last, hold_s = live.holds.get(name), for_s
    doubled_s = last.doubled_s if last is not None else HOLD_S_MIN / 2
    if hold_s is None:
        doubled_s = min(2 * doubled_s, HOLD_S_MAX)
        hold_s = doubled_s * random.uniform(0.8, 1.2)  # not all clients at once
    live.holds[name] = Hold(time.monotonic() + hold_s, doubled_s, reason)


def _accepted(live: LiveSession, name: str) -> None:
    """A call was answered: the next time that the server is busy it is left alone for a moment."""
    held = live.holds.get(name)
    if held is not None:
        live.holds[name] = replace(held, doubled_s=HOLD_S_MIN / 2)


def _why_busy(exc: CallFailed) -> str:
    """The server's own words: "quota: ..." where it is the tenant's own limit."""
    return exc.details if exc.details.startswith("quota: ") else f"busy: {exc.details}"
