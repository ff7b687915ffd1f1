"""How a client of a server behaves: how long it waits, how it proves who it is.

Must not be here: settings of the store itself, which config.py has.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from pathlib import Path

from kvstore.errors import ConfigError

DEADLINE_S_MAX = 60.0
LOOKUP_DEADLINE_S = 0.05
STAGE_DEADLINE_S = 2.0
OPEN_WAIT_S = 2.0


@dataclass(frozen=True, slots=True)
class ClientConfig:
    """All settings of a client. A bad one raises ConfigError.

    `reserve`, `commit` and `flush` wait as long as each call says; see RemoteReservation.commit.
    """

    # The longest that a look-up may hold up an engine; then it is a miss.
    lookup_deadline_s: float = LOOKUP_DEADLINE_S
    # How long `stage` waits unless the call says otherwise.
    stage_deadline_s: float = STAGE_DEADLINE_S
    # How long a new session waits for its server before it goes on with misses.
    open_wait_s: float = OPEN_WAIT_S
    # Map the server's memory where it is on this host; else pages come as a stream.
    shared_memory: bool = True
    # Which user's server to trust behind a Unix socket; None = this process's own.
    server_uid: int | None = None
    # Over a network: who this client is, and whom it believes.
    token_file: Path | None = None
    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None
    # Talk to a server on a network without TLS.
    insecure_network: bool = False
    # Start a server for a directory that nobody serves; None = unless `kvstore serve` has served it
    # before: then that one is waited for.
    private_server: bool | None = None

    def __post_init__(self) -> None:
        for name in ("lookup_deadline_s", "stage_deadline_s", "open_wait_s"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not 0 <= value <= DEADLINE_S_MAX:
                raise ConfigError(f"{name}: {value!r} is not in [0, {DEADLINE_S_MAX:.0f}] seconds")
        for name in ("token_file", "ca_file", "cert_file", "key_file"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, Path(os.fspath(value)).expanduser())
        if (self.cert_file is None) != (self.key_file is None):
            raise ConfigError("cert_file and key_file are given together or not at all")

    @property
    def trusted_uid(self) -> int:
        """The user that a local server must run as."""
        return os.geteuid() if self.server_uid is None else self.server_uid


CLIENT_SETTINGS = frozenset(each.name for each in fields(ClientConfig))
