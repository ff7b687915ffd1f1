"""What client and server of the service agree on besides kvstore.proto: limits, names, versions.

No grpc here. All limits have their unit in their name.
"""

from __future__ import annotations

import re

from kvstore.errors import InvalidRequest

SERVICE = "kvstore.v1.KVStore"
SOCKET_NAME = "kvstore.sock"  # in the store's directory
EXTENTS_NAME = "extents.sock"

CONTROL_BYTES_MAX = 4 << 20  # of one message; larger ones are refused by grpc itself
DOCUMENT_BYTES_MAX = 64 << 20  # of a reply: listings, and where the pages of long prompts are
CHAINS_MAX = 100_000  # of one listing
BRANCHES_MAX = 10_000  # of one answer about trees
PIECE_BYTES = 1 << 20  # of a message of ReadPages and WritePages
METADATA_BYTES_MAX = 16 << 10
DEADLINE_S_MAX = 60.0  # of a call; every call but the streams below has a deadline
HEARTBEAT_S = 3  # how often a client beats
SILENCE_S = 10.0  # after so long without a beat or a call a session ends
SESSION_BYTES = 16

# Calls that last as long as their client wants; all others need a deadline.
ENDLESS = frozenset({"Heartbeat", "Watch", "Verify", "Export", "Import"})
# Raw bytes instead of messages, one way or the other: see the proto.
RAW_REPLIES = frozenset({"ReadPages", "Export"})
RAW_REQUESTS = frozenset({"WritePages", "Import"})

# Trailing metadata of a refusal that is worth another try: milliseconds to wait.
RETRY_KEY = "grpc-retry-pushback-ms"

_VERSION = re.compile(r"([0-9]{1,6})\.([0-9]{1,6})([.+-][0-9A-Za-z.+-]{0,40})?", re.ASCII)


def check_version(client: str, server: str) -> str:
    """Why a client of that version can't be served; empty when it can.

    A server serves clients of its own minor version and of the one before.
    """
    ours, theirs = _major_minor(server), _major_minor(client)
    if ours[0] == theirs[0] and ours[1] - theirs[1] in (0, 1):
        return ""
    return (
        f"the client is kvstore {client[:40]}, this server is {server}: it serves its own and the "
        "previous minor version; upgrade the older of the two"
    )


def _major_minor(version: str) -> tuple[int, int]:
    found = _VERSION.fullmatch(version)
    if found is None:
        raise InvalidRequest(f"client_version {version[:40]!r}: like 1.2.3, please")
    return int(found[1]), int(found[2])
