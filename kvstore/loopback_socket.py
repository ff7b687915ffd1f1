"""A listening socket that only this host reaches: a loopback port, or a Unix socket, mode 0600."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from kvstore.errors import DirectoryError

BACKLOG = 16


def listening_socket(what: str, listen: str) -> socket.socket:
    """For unix:/path or HOST:PORT; DirectoryError names `what` when it can't be had."""
    made: socket.socket | None = None
    try:
        if listen.startswith("unix:"):
            path = Path(listen.removeprefix("unix:"))
            _remove_dead(path)
            made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            before = os.umask(0o177)
            try:
                made.bind(str(path))
            finally:
                os.umask(before)
        else:
            host, _, port = listen.rpartition(":")
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            made = socket.socket(family, socket.SOCK_STREAM)
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind((host.strip("[]"), int(port)))
        made.listen(BACKLOG)
        made.setblocking(False)
        return made
    except OSError as exc:
        if made is not None:
            made.close()
        raise DirectoryError(f"{what}: {listen}: {exc}") from exc


def _remove_dead(path: Path) -> None:
    """What a process that was killed left behind; OSError when somebody answers there."""
    if not path.is_socket():
        return
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        if probe.connect_ex(str(path)) == 0:
            raise OSError("in use by another process")
    path.unlink()
