"""GET /metrics over HTTP, at a loopback port or a Unix socket: read-only, for Prometheus.

A server with credentials wants one here too: a bearer token of the role admin, which is shown all,
or metrics, which is shown its own tenant's part. Nothing else is served, few callers at once, and
one that stops talking is cut off.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import TCPServer, ThreadingMixIn
from typing import TYPE_CHECKING, Any

from kvstore.auth import CredentialAuthorizer, HeaderCall
from kvstore.call_budget import TooManyCalls
from kvstore.errors import DirectoryError
from kvstore.identity import ROLES, NotAuthenticated, Role
from kvstore.metrics import CONTENT_TYPE
from kvstore.metrics_listen import check_metrics_listen

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.identity import Authorizer

PATH = "/metrics"
CALLERS_MAX = 8
SILENCE_S = 5.0
STOP_S = 2.0

_log = logging.getLogger("kvstore.server")


class MetricsServer:
    """Owns the socket and its threads; start() to stop()."""

    def __init__(
        self, listen: str, render: Callable[[str | None], bytes], authorizer: Authorizer | None
    ) -> None:
        """render: the exposition of one tenant, or of all. Raises ConfigError or DirectoryError
        when the address can't be had."""
        self.listen = check_metrics_listen(listen)
        self._path = Path(listen.removeprefix("unix:")) if listen.startswith("unix:") else None
        credentials = authorizer if isinstance(authorizer, CredentialAuthorizer) else None

        class Handler(_Handler):
            answer = staticmethod(render)
            authorizer = credentials

        try:
            self._server = _listening(self._path, listen, Handler)
        except OSError as exc:
            raise DirectoryError(f"metrics_listen: {listen}: {exc}") from exc
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="kvstore-metrics", daemon=True
        )

    @property
    def port(self) -> int:
        """Of a loopback address."""
        return 0 if self._path is not None else int(self._server.server_address[1])

    def start(self) -> None:
        """Answer from now on."""
        self._thread.start()
        _log.info("metrics at %s", self.listen)

    def stop(self) -> None:
        """Answer no more."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join(STOP_S)
        self._server.server_close()
        if self._path is not None:
            with contextlib.suppress(OSError):
                self._path.unlink()


class _Handler(BaseHTTPRequestHandler):
    """One connection, one answer."""

    timeout = SILENCE_S
    server_version = "kvstore"
    sys_version = ""
    answer: Callable[[str | None], bytes]
    authorizer: CredentialAuthorizer | None

    def do_GET(self) -> None:
        """The exposition, or why not."""
        if self.path.partition("?")[0] != PATH:
            self.send_error(HTTPStatus.NOT_FOUND, explain=f"there is only {PATH}")
            return
        tenant, refusal = self._caller()
        if refusal is not None:
            self.send_error(*refusal)
            return
        try:
            body = type(self).answer(tenant)
        except Exception:  # a store that closes; a collector must get an answer all the same
            _log.exception("metrics failed")
            self.send_error(HTTPStatus.INTERNAL_SERVER_ERROR)
            return
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", CONTENT_TYPE)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not news."""
        _log.debug(format, *args)

    def _caller(self) -> tuple[str | None, tuple[HTTPStatus, str] | None]:
        """Whose part the caller may see, None for all; or why nothing."""
        if self.authorizer is None:
            return None, None
        try:
            given = self.headers.get_all("authorization") or []
            identity = self.authorizer.identify(HeaderCall(given))
        except TooManyCalls as exc:
            return None, (HTTPStatus.TOO_MANY_REQUESTS, str(exc))
        except NotAuthenticated as exc:
            return None, (HTTPStatus.UNAUTHORIZED, str(exc))
        if identity.role not in ROLES["Stats"]:
            return None, (HTTPStatus.FORBIDDEN, f"metrics are not for the role {identity.role}")
        return None if identity.role is Role.ADMIN else identity.tenant, None


class _HttpServer(ThreadingMixIn, TCPServer):
    """So many callers at once; more are cut off, as they would be by a full backlog."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, *args: Any, **more: Any) -> None:
        self._room = threading.BoundedSemaphore(CALLERS_MAX)
        super().__init__(*args, **more)

    def process_request(self, request: Any, client_address: Any) -> None:
        """In a thread of its own, if there is one left."""
        if not self._room.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Then the thread is free again."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A caller that went away is not our trouble."""
        _log.debug("metrics: a caller broke off", exc_info=True)


class _Ipv6Server(_HttpServer):
    address_family = socket.AF_INET6


class _UnixServer(_HttpServer):
    address_family = socket.AF_UNIX

    def get_request(self) -> tuple[Any, Any]:
        """Callers there have no address; the handler wants one of two parts."""
        request, _ = super().get_request()
        return request, ("unix", 0)


def _listening(path: Path | None, listen: str, handler: type[_Handler]) -> _HttpServer:
    if path is None:
        host, _, port = listen.rpartition(":")
        kind = _Ipv6Server if ":" in host else _HttpServer
        return kind((host.strip("[]"), int(port)), handler)
    if path.is_socket():
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(1.0)
            if probe.connect_ex(str(path)) == 0:
                raise OSError("in use by another process")
        path.unlink()
    before = os.umask(0o177)
    try:
        return _UnixServer(str(path), handler)
    finally:
        os.umask(before)
