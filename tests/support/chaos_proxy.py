"""A proxy between a client and a server that does what networks do: delay, cut, reset, fall silent.

    with ChaosProxy(server_address) as proxy:
        proxy.cut_after(4096)           # the next connections break after so many bytes
        connect(f"kvstore://{proxy.address}", ...)

Addresses are those of Unix sockets, or host and port. Rules hold for connections made from then on.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import struct
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

PIECE_BYTES = 16 << 10
WAIT_S = 0.01


@dataclass
class Rules:
    """What is done to a connection. A count of bytes is of one direction."""

    up_bytes_max: float = float("inf")  # from the client; then it breaks
    down_bytes_max: float = float("inf")
    reset: bool = False  # break by RST instead of a close, where the socket knows that
    half_open: bool = False  # don't break: pass on nothing more, and say nothing
    latency_s: float = 0.0


@dataclass
class _Link:
    client: socket.socket
    server: socket.socket
    rules: Rules
    passed: dict[socket.socket, int] = field(default_factory=dict)

    def other(self, side: socket.socket) -> socket.socket:
        return self.server if side is self.client else self.client

    def room(self, side: socket.socket) -> float:
        rules = self.rules
        limit = rules.up_bytes_max if side is self.client else rules.down_bytes_max
        return limit - self.passed.get(side, 0)


class ChaosProxy:
    """Listens at `path`, or at a port of this host; one thread does everything."""

    def __init__(self, server: Path | tuple[str, int], path: Path | None = None) -> None:
        self._server = server
        self.rules = Rules()
        self.broken = 0  # connections that a rule ended or silenced
        if path is not None:
            self._listener = socket.socket(socket.AF_UNIX)
            self._listener.bind(str(path))
            self.address = f"unix:{path}"
        else:
            self._listener = socket.create_server(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._listener.listen(64)
        self._links: dict[socket.socket, _Link] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._stop = threading.Event()
        self._todo: list[Callable[[], None]] = []
        self._thread = threading.Thread(target=self._run, name="chaos-proxy", daemon=True)
        self._thread.start()

    def cut_after(self, up: float = float("inf"), down: float = float("inf")) -> None:
        """Break each new connection after so many bytes one way."""
        self.rules = Rules(up, down, self.rules.reset, self.rules.half_open)

    def break_all(self) -> None:
        """Break what is connected now."""
        self._todo.append(lambda: [self._break(link) for link in set_of(self._links)] and None)

    def close(self) -> None:
        """End everything."""
        self._stop.set()
        self._thread.join()

    def __enter__(self) -> ChaosProxy:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _run(self) -> None:
        while not self._stop.is_set():
            for key, _ in self._selector.select(WAIT_S):
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj in self._links:
                    assert isinstance(key.fileobj, socket.socket)
                    self._pass_on(key.fileobj)
            while self._todo:
                self._todo.pop()()
        for link in set_of(self._links):
            self._break(link)
        self._selector.close()
        self._listener.close()

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        try:
            if isinstance(self._server, tuple):
                server = socket.create_connection(self._server, 2.0)
            else:
                server = socket.socket(socket.AF_UNIX)
                server.connect(str(self._server))
        except OSError:
            client.close()
            return
        link = _Link(client, server, self.rules)
        for side in (client, server):
            side.settimeout(2.0)
            self._links[side] = link
            self._selector.register(side, selectors.EVENT_READ)

    def _pass_on(self, side: socket.socket) -> None:
        link = self._links[side]
        try:
            piece = side.recv(PIECE_BYTES)
            if link.rules.latency_s:
                time.sleep(link.rules.latency_s)
            keep = int(min(len(piece), link.room(side)))
            if piece:
                link.other(side).sendall(piece[:keep])
        except OSError:
            piece, keep = b"", 0
        link.passed[side] = link.passed.get(side, 0) + keep
        if piece and keep == len(piece):
            return
        if piece:
            self.broken += 1
        if piece and link.rules.half_open:
            self._silence(link)
        else:
            self._break(link)

    def _silence(self, link: _Link) -> None:
        for side in (link.client, link.server):
            self._selector.unregister(side)

    def _break(self, link: _Link) -> None:
        for side in (link.client, link.server):
            if self._links.pop(side, None) is None:
                continue
            with contextlib.suppress(KeyError):  # it was silenced
                self._selector.unregister(side)
            if link.rules.reset and side.family != socket.AF_UNIX:
                side.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            side.close()


def set_of(links: dict[socket.socket, _Link]) -> list[_Link]:
    """Each link once."""
    return list({id(link): link for link in links.values()}.values())
