"""Whether a server of the right user listens on a Unix socket, asked without speaking to it."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

PROBE_TIMEOUT_S = 0.5


def why_unreachable(path: Path, trusted_uid: int) -> str:
    """Why not to talk to this socket now; "" when all is well.

    The user is the one that the kernel names, so that nobody can put a socket in a server's place.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(PROBE_TIMEOUT_S)
        try:
            probe.connect(str(path))
            from kvstore.shared_memory import peer_uid  # numpy, where nobody listens for nothing

            uid = peer_uid(probe)
        except OSError as exc:
            return f"{path}: {exc.strerror or exc}"
    if uid != trusted_uid:
        return f"{path} belongs to user {uid}, not to {trusted_uid}: not trusted"
    return ""
