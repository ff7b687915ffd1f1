"""Hands the arena's file descriptors to clients, over a Unix socket; their side is shared_memory.

Only processes of the server's own user get as far as showing a token, a token works once and soon,
and a session gets what the caller resolves for it: its own tenant's extents, its own staging.
No client can hold up another: one thread serves all, and it never waits for any of them.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import secrets
import selectors
import socket
import stat
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvstore.errors import CapacityError, DirectoryError
from kvstore.shared_memory import (
    RECORD,
    RECORDS_MAX,
    REPLY,
    REQUEST,
    TOKEN_BYTES,
    WIRE_MAGIC,
    WIRE_VERSION,
    Kind,
    Status,
    peer_uid,
)
from kvstore.tiers.extent import ExtentRecord
from kvstore.tiers.host_tier import Staging

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

TOKEN_TTL_S = 30.0
TOKENS_MAX = 4096
CONNECTIONS_MAX = 1024
HANDSHAKE_S = 5.0  # a connection that has not shown its token by then is closed
ACCEPT_PAUSE_S = 0.5  # after running out of descriptors
PATH_BYTES_MAX = 107  # of a Unix socket

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Connection:
    """One client as the server sees it; `session` is None until it has shown a token."""

    socket: socket.socket
    since_s: float
    session: Any = None
    is_guest: bool = False


class ExtentServer:
    """Hands descriptors to clients, from one thread of its own.

    `resolve(session)` names what a session may map, now: called in the server's thread at each
    request. `disconnected(session)` is called there when a session's connection has ended. Guests
    of a session map the same, and nothing happens when they go.
    """

    def __init__(
        self,
        path: Path,
        resolve: Callable[[Any], Sequence[ExtentRecord | Staging]],
        *,
        disconnected: Callable[[Any], None] = lambda session: None,
    ) -> None:
        self.path = path
        self._resolve = resolve
        self._disconnected = disconnected
        self._lock = threading.Lock()
        # Digest -> deadline, session, whether it is for a guest.
        self._tokens: dict[bytes, tuple[float, Any, bool]] = {}
        self._forgotten: list[Any] = []
        self._listener = _listen(path)
        self._connections: dict[socket.socket, _Connection] = {}
        self._waker, self._wakened = socket.socketpair()
        self._waker.setblocking(False)
        self._accept_again_s = 0.0
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wakened, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="kvstore-extents", daemon=True)
        self._thread.start()

    def issue_token(self, session: Any, *, guest: bool = False) -> bytes:
        """A secret for one attach within TOKEN_TTL_S; give it to the session's client only."""
        token, now = secrets.token_bytes(TOKEN_BYTES), time.monotonic()
        with self._lock:
            self._tokens = {k: v for k, v in self._tokens.items() if v[0] > now}
            if len(self._tokens) >= TOKENS_MAX:
                raise CapacityError(f"{TOKENS_MAX} sessions are about to attach already")
            self._tokens[_digest(token)] = (now + TOKEN_TTL_S, session, guest)
        return token

    def forget(self, session: Any) -> None:
        """End a session's connections, soon, and its guests'; its tokens are void at once."""
        with self._lock:
            self._tokens = {k: v for k, v in self._tokens.items() if v[1] is not session}
            self._forgotten.append(session)
        with contextlib.suppress(OSError):  # closed: all ends anyway
            self._waker.send(b"\0")

    def close(self) -> None:
        """End all connections; what clients have mapped stays theirs until they unmap it."""
        self._waker.close()
        self._thread.join()

    def _run(self) -> None:
        try:
            while self._serve_once():
                pass
        finally:
            for connection in list(self._connections.values()):
                self._drop(connection)
            self._selector.close()
            self._listener.close()
            self._wakened.close()
            with contextlib.suppress(OSError):
                os.unlink(self.path)

    def _serve_once(self) -> bool:
        for key, _ in self._selector.select(self._patience_s()):
            if key.fileobj is self._wakened:
                if not self._wakened.recv(4096):
                    return False
                self._drop_forgotten()
            elif key.fileobj is self._listener:
                self._accept()
            elif (connection := self._connections.get(key.fileobj)) is not None:  # type: ignore[call-overload]
                self._answer(connection)
        self._drop_silent()
        return True

    def _patience_s(self) -> float | None:
        """Seconds until something is due though no client speaks; None: nothing is."""
        waiting = any(c.session is None for c in self._connections.values())
        return ACCEPT_PAUSE_S if waiting or self._accept_again_s else None

    def _accept(self) -> None:
        try:
            client, _ = self._listener.accept()
        except OSError as exc:  # no descriptors left: the clients at hand are still served
            _log.warning("shared memory: cannot accept a client: %s", exc.strerror)
            self._selector.unregister(self._listener)
            self._accept_again_s = time.monotonic() + ACCEPT_PAUSE_S
            return
        if peer_uid(client) != os.geteuid() or len(self._connections) >= CONNECTIONS_MAX:
            client.close()
            return
        client.setblocking(False)
        self._connections[client] = _Connection(client, time.monotonic())
        self._selector.register(client, selectors.EVENT_READ)

    def _drop_silent(self) -> None:
        now = time.monotonic()
        for connection in list(self._connections.values()):
            if connection.session is None and connection.since_s + HANDSHAKE_S < now:
                self._drop(connection)
        if self._accept_again_s and self._accept_again_s < now:
            self._accept_again_s = 0.0
            self._selector.register(self._listener, selectors.EVENT_READ)

    def _drop_forgotten(self) -> None:
        with self._lock:
            forgotten, self._forgotten = self._forgotten, []
        for connection in list(self._connections.values()):
            if any(connection.session is session for session in forgotten):
                self._drop(connection)

    def _drop(self, connection: _Connection) -> None:
        self._selector.unregister(connection.socket)
        del self._connections[connection.socket]
        connection.socket.close()
        if connection.session is not None and not connection.is_guest:
            try:
                self._disconnected(connection.session)
            except Exception:
                _log.exception("shared memory: ending a session failed")

    def _answer(self, connection: _Connection) -> None:
        try:
            request = connection.socket.recv(REQUEST.size + 1)
        except OSError:
            request = b""
        if len(request) != REQUEST.size:
            self._drop(connection)
            return
        magic, version, known, token = REQUEST.unpack(request)
        if (magic, version) != (WIRE_MAGIC, WIRE_VERSION):
            self._drop(connection)
            return
        if connection.session is None:
            connection.session, connection.is_guest = self._redeem(token)
        status = Status.REFUSED
        if connection.session is not None:
            status = self._send_records(connection, known)
        if status is not Status.OK:
            with contextlib.suppress(OSError):
                connection.socket.send(REPLY.pack(WIRE_MAGIC, WIRE_VERSION, status, 0, 0))
            self._drop(connection)

    def _redeem(self, token: bytes) -> tuple[Any, bool]:
        """The session of a token and whether it was for a guest; None when it is no good."""
        with self._lock:
            deadline, session, guest = self._tokens.pop(_digest(token), (0.0, None, False))
        return (session, guest) if deadline > time.monotonic() else (None, False)

    def _send_records(self, connection: _Connection, known: int) -> Status:
        try:
            granted = list(self._resolve(connection.session))
            extents = [r for r in granted if isinstance(r, ExtentRecord)]
            extents = sorted(
                (r for r in extents if r.container_id > known), key=lambda r: r.container_id
            )
            batch: list[ExtentRecord | Staging] = [*extents[:RECORDS_MAX]]
            if known == 0:
                batch += [r for r in granted if isinstance(r, Staging)]
            more = len(extents) > RECORDS_MAX
            message = REPLY.pack(WIRE_MAGIC, WIRE_VERSION, Status.OK, len(batch), more)
            message += b"".join(map(_pack_record, batch))
            socket.send_fds(connection.socket, [message], [record.fd.fileno() for record in batch])
        except Exception:
            _log.exception("shared memory: answering a client failed")
            return Status.FAILED
        return Status.OK


def _digest(token: bytes) -> bytes:
    # Looked up by digest, so that the look-up's time says nothing about stored tokens.
    return hashlib.blake2b(token, digest_size=16).digest()


def _pack_record(record: ExtentRecord | Staging) -> bytes:
    if isinstance(record, Staging):
        return RECORD.pack(Kind.STAGING, 0, 0, record.size, 0, 0, 0)
    return RECORD.pack(
        Kind.EXTENT,
        record.boot_epoch,
        record.container_id,
        record.total_bytes,
        record.slot_bytes,
        record.slots,
        record.data_offset,
    )


def _listen(path: Path) -> socket.socket:
    if len(os.fsencode(path)) > PATH_BYTES_MAX:
        raise DirectoryError(
            f"{path}: the path of a socket has at most {PATH_BYTES_MAX} bytes; use a shorter one"
        )
    _remove_stale(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.bind(str(path))
        os.chmod(path, 0o600)  # before listen: nobody gets in earlier
        listener.listen()
        listener.setblocking(False)
    except OSError as exc:
        listener.close()
        raise DirectoryError(f"{path}: {exc.strerror}") from exc
    return listener


def _remove_stale(path: Path) -> None:
    """Remove the socket of a server that died; refuse whatever else is in the way."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode) or found.st_uid != os.geteuid():
        raise DirectoryError(f"{path}: not a socket of user {os.geteuid()}; remove it")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            os.unlink(path)
            return
        except OSError as exc:
            raise DirectoryError(f"{path}: {exc.strerror}") from exc
    raise DirectoryError(f"{path}: in use by another server")
