"""Where a server is: a Unix socket, a host and port, or the store directory that it holds.

    kvstore://unix:/run/kvstore/kvstore.sock      kvstore://cache-host:7070      /var/cache/kv

Must not be here: anything that connects.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from kvstore.errors import ConfigError
from kvstore.wire import SOCKET_NAME

SCHEME = "kvstore://"
UNIX = "unix:"
SOCKET_PATH_BYTES_MAX = 107
PORT_MAX = 65535
_HOST_PORT = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})")


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """One server. Of a Unix socket the path is known; of a private server also its directory."""

    target: str  # as gRPC names it
    socket: Path | None = None
    directory: Path | None = None

    def __str__(self) -> str:
        return self.target


def parse_address(where: str | Path) -> ServerAddress:
    """A `kvstore://` address or the path of a store directory; ConfigError for anything else."""
    text = os.fspath(where)
    if not text or "\0" in text:
        raise ConfigError(f"{text!r} names no server: give a directory or a kvstore:// address")
    if text.startswith(SCHEME):
        return _from_url(text)
    if "://" in text:
        raise ConfigError(f"{text!r}: addresses begin with {SCHEME}")
    directory = Path(text).expanduser().absolute()
    return _at_socket(directory / SOCKET_NAME, directory)


def _from_url(text: str) -> ServerAddress:
    rest = text.removeprefix(SCHEME)
    if rest.startswith(UNIX):
        path = Path(rest.removeprefix(UNIX))
        if not path.is_absolute():
            raise ConfigError(f"{text!r}: the socket's path begins with /, as in {SCHEME}unix:/run")
        return _at_socket(path, None)
    found = _HOST_PORT.fullmatch(rest)
    if not found or not 0 < int(found[2]) <= PORT_MAX:
        raise ConfigError(f"{text!r}: {SCHEME}HOST:PORT or {SCHEME}unix:/PATH is needed")
    return ServerAddress(rest)


def _at_socket(path: Path, directory: Path | None) -> ServerAddress:
    if len(os.fsencode(path)) > SOCKET_PATH_BYTES_MAX:
        raise ConfigError(
            f"{path}: the path of a socket has at most {SOCKET_PATH_BYTES_MAX} bytes; use a "
            "shorter directory"
        )
    return ServerAddress(f"{UNIX}{path}", path, directory)
