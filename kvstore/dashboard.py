"""The dashboard over HTTP: one page, its parts, and the JSON documents that it polls. Read-only.

Runs in a thread of its own with a loop of its own; what it asks of the store runs in two more, so
that neither many nor slow callers take anything from the service. Nothing here decides what is
shown (dashboard_data.py) or to whom (dashboard_access.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvicorn
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvstore.dashboard_access import Access, Refusal, check_origin
from kvstore.dashboard_history import EVERY_S
from kvstore.dashboard_listen import ADDRESS_NAME, check_dashboard_listen
from kvstore.errors import ClosedError, InvalidRequest, KVStoreError
from kvstore.loopback_socket import listening_socket
from kvstore.private_file import replace_private

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.requests import Request
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from kvstore.dashboard_data import DashboardData
    from kvstore.identity import Authorizer, Identity

CALLERS_MAX = 32  # connections at once
SILENCE_S = 10.0  # for a request to come in whole
ANSWER_S = 30.0
STOP_S = 2.0
BODY_BYTES_MAX = 4 << 20
ANSWER_BYTES_MAX = 1 << 20
HEADERS = {
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; object-src 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
PAGE = Path(__file__).parent / "dashboard_page"
FILES = {
    "/": ("index.html", "text/html"),
    "/style.css": ("style.css", "text/css"),
    "/app.js": ("app.js", "text/javascript"),
    "/charts.js": ("charts.js", "text/javascript"),
    "/words.js": ("words.js", "text/javascript"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}

_log = logging.getLogger("kvstore.server")


class Dashboard:
    """Owns the socket and its threads; start() to stop()."""

    def __init__(
        self, listen: str, data: DashboardData, authorizer: Authorizer, directory: Path
    ) -> None:
        """directory: where the page's address is left for `kvstore dashboard`.

        Raises ConfigError or DirectoryError when the listening address can't be had.
        """
        self.listen = check_dashboard_listen(listen)
        self._data = data
        self._access = Access.of(authorizer, listen)
        self._note = directory / ADDRESS_NAME
        self._socket = listening_socket("dashboard_listen", listen)
        self._pool = ThreadPoolExecutor(2, "kvstore-dashboard-view")
        self._server = uvicorn.Server(
            uvicorn.Config(
                _Shield(Starlette(routes=self._routes())),
                http=_Connection,
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="critical",
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=int(SILENCE_S),
                timeout_graceful_shutdown=1,
            )
        )
        self._stopped = threading.Event()
        self._threads = [
            threading.Thread(target=self._serve, name="kvstore-dashboard", daemon=True),
            threading.Thread(target=self._sample, name="kvstore-dashboard-sample", daemon=True),
        ]

    @property
    def address(self) -> str:
        """What to open, its key included where there is one."""
        if self.listen.startswith("unix:"):
            return self.listen
        host, port = self._socket.getsockname()[:2]
        key = f"#key={self._access.key}" if self._access.key else ""
        return f"http://{f'[{host}]' if ':' in host else host}:{port}/{key}"

    def start(self) -> None:
        """Answer from now on."""
        address = self.address
        try:
            replace_private(self._note, f"{address}\n".encode())
        except OSError as exc:
            _log.warning("dashboard: %s cannot be written: %s", self._note, exc)
        for thread in self._threads:
            thread.start()
        _log.info("dashboard at %s; its key: kvstore dashboard DIR", address.partition("#")[0])

    def stop(self) -> None:
        """Answer no more."""
        self._stopped.set()
        self._server.should_exit = True
        for thread in self._threads:
            if thread.is_alive():
                thread.join(STOP_S)
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._socket.close()
        with contextlib.suppress(OSError):
            self._note.unlink()
        if self.listen.startswith("unix:"):
            with contextlib.suppress(OSError):
                Path(self.listen.removeprefix("unix:")).unlink()

    def _serve(self) -> None:
        try:
            asyncio.run(self._server.serve(sockets=[self._socket]))
        except Exception:  # the service goes on without it
            _log.exception("the dashboard ended")

    def _sample(self) -> None:
        while True:
            try:
                self._data.sample()
            except ClosedError:
                return
            except Exception:  # the next reading may do
                _log.exception("dashboard: a reading failed")
            if self._stopped.wait(EVERY_S):
                return

    def _routes(self) -> list[Route]:
        data = self._data
        views: dict[str, Callable[[Identity, Request, Any], dict[str, Any]]] = {
            "state": lambda who, request, body: data.state(who),
            "history": lambda who, request, body: data.rows(_after(request)),
            "chains": lambda who, request, body: data.chains(),
            "tree": lambda who, request, body: data.tree(),
            "explain": lambda who, request, body: data.explain(body, who),
        }
        routes = [Route(path, _file(*file), methods=["GET"]) for path, file in FILES.items()]
        for name, view in views.items():
            method = "POST" if name == "explain" else "GET"
            routes.append(Route(f"/api/{name}", self._answer(name, view), methods=[method]))
        return routes

    def _answer(
        self, name: str, view: Callable[[Identity, Request, Any], dict[str, Any]]
    ) -> Callable[[Request], Any]:
        def make(given: list[str], request: Request, body: bytes) -> bytes:
            identity = self._access.identify(name, given)
            return _json(view(identity, request, _object(body) if body else {}))

        async def answer(request: Request) -> Response:
            given = request.headers.getlist("authorization")
            in_pool = partial(asyncio.get_running_loop().run_in_executor, self._pool)
            body = b""
            try:
                if request.method == "POST":
                    await in_pool(self._access.identify, name, given)
                    body = await _body(request)
                content = await in_pool(make, given, request, body)
            except Exception as exc:  # a store that closes; callers must get an answer all the same
                return _refusal(exc)
            return Response(content, media_type="application/json")

        return answer


class _Shield:
    """Stands before all routes: the caller's host, headers of every answer, deadlines."""

    def __init__(self, inner: ASGIApp) -> None:
        self._inner = inner

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def send_shielded(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                more = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                message["headers"] = [*message["headers"], *more]
            await send(message)

        try:
            async with asyncio.timeout(ANSWER_S):
                check_origin(_values(scope, b"host"), "".join(_values(scope, b"sec-fetch-site")))
                await self._inner(scope, receive, send_shielded)
        except (Refusal, TimeoutError) as exc:
            if begun:
                raise
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SILENCE_S):
                    await _refusal(exc)(scope, receive, send_shielded)


class _Connection(H11Protocol):
    """One of so many, and cut off when no whole request comes for a while."""

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See asyncio.Protocol."""
        super().connection_made(transport)
        if len(self.connections) > CALLERS_MAX:
            transport.abort()
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        """See H11Protocol: something came in."""
        before = self.cycle
        super().handle_events()
        if self.cycle is not before:
            self._wait()

    def _wait(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.loop.call_later(SILENCE_S, self._look)

    def _look(self) -> None:
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            self.transport.close()
        else:
            self._wait()  # the shield's deadline counts


def _file(name: str, kind: str) -> Callable[[Request], Any]:
    content = (PAGE / name).read_bytes()

    async def answer(request: Request) -> Response:
        return Response(content, media_type=kind)

    return answer


async def _body(request: Request) -> bytes:
    if request.headers.get("content-type", "").partition(";")[0] != "application/json":
        raise Refusal(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "application/json is wanted")
    body = b""
    async with asyncio.timeout(SILENCE_S):
        async for piece in request.stream():
            body += piece
            if len(body) > BODY_BYTES_MAX:
                raise Refusal(
                    HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                    f"more than {BODY_BYTES_MAX} bytes; use `kvstore explain`",
                )
    return body


def _object(body: bytes) -> dict[str, Any]:
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as exc:
        raise InvalidRequest("not a JSON document") from exc
    if not isinstance(found, dict):
        raise InvalidRequest("a JSON object is wanted")
    return found


def _json(document: dict[str, Any]) -> bytes:
    content = json.dumps(document, separators=(",", ":")).encode()
    if len(content) > ANSWER_BYTES_MAX:
        raise KVStoreError(f"an answer of {len(content)} bytes; {ANSWER_BYTES_MAX} at most")
    return content


def _after(request: Request) -> float:
    try:
        return float(request.query_params.get("after", "0"))
    except ValueError as exc:
        raise InvalidRequest("after: Unix seconds are wanted") from exc


def _values(scope: Scope, wanted: bytes) -> list[str]:
    return [value.decode("latin-1") for name, value in scope["headers"] if name == wanted]


def _refusal(exc: Exception) -> Response:
    status, sentence = _said(exc)
    return Response(_json({"error": sentence}), status, media_type="application/json")


def _said(exc: Exception) -> tuple[int, str]:
    """Status and sentence of an error; what is not ours is logged, and told to nobody."""
    if isinstance(exc, Refusal):
        return exc.status, str(exc)
    if isinstance(exc, InvalidRequest):
        return HTTPStatus.BAD_REQUEST, str(exc)
    if isinstance(exc, ClosedError | TimeoutError):
        return HTTPStatus.SERVICE_UNAVAILABLE, str(exc) or "it took too long"
    if isinstance(exc, KVStoreError):
        return HTTPStatus.CONFLICT, str(exc)
    _log.error("the dashboard failed", exc_info=exc)
    return HTTPStatus.INTERNAL_SERVER_ERROR, "the server's log says more"
