"""A store that lives in a server: the same interface as Store, for engines and adapters.

    with connect("kvstore://unix:/run/kvstore/kvstore.sock") as store:
        session = store.session(spec)
        with session.match(tokens) as hit: ...

Nothing that happens to the server raises in an engine's calls: look-ups become misses, and
reservations are empty with a reason, until it is back. An operator's calls do raise; they are in
operator_client.py.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import TYPE_CHECKING

from kvstore.errors import InvalidRequest, ServerUnavailable
from kvstore.operator_client import DEFAULT_TENANT, OperatorClient
from kvstore.remote_session import RemoteSession
from kvstore.spec import CacheSpec
from kvstore.tenant import check_salt

__all__ = ["RemoteStore", "ServerUnavailable"]

if TYPE_CHECKING:
    from kvstore.client_config import ClientConfig
    from kvstore.private_server import PrivateServer
    from kvstore.server_address import ServerAddress

WRITER_BYTES_MAX = 64


class RemoteStore(OperatorClient):
    """A connection to a server; kvstore.connect() makes it. Thread-safe; close it."""

    def __init__(
        self, address: ServerAddress, config: ClientConfig, private: PrivateServer | None = None
    ) -> None:
        """Returns at once, whether there is a server or not. Raises ConfigError."""
        super().__init__(address, config, private)
        self._sessions: weakref.WeakSet[RemoteSession] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._pid = os.getpid()

    @property
    def private_pid(self) -> int | None:
        """Process id of the private server that this client started, if it did and it runs."""
        return self._link.private.pid if self._link.private is not None else None

    def session(
        self,
        spec: CacheSpec,
        *,
        tenant: str = DEFAULT_TENANT,
        salt: bytes = b"",
        writer: str = "",
        public: bool = True,
    ) -> RemoteSession:
        """Work with pages of `spec`. `salt` keeps prompts apart within a tenant.

        Waits up to ClientConfig.open_wait_s for a server that is about to come up; when none can be
        reached, the session finds it later. The tenant is the credential's: naming another one is
        refused. writer: a name to remember with each page. public: look-ups also find what the
        tenant "public" has stored, where the server has one; not with a salt.
        """
        self._require_open()
        if not isinstance(spec, CacheSpec):
            raise InvalidRequest(f"spec: a CacheSpec is needed, not {type(spec).__name__}")
        if tenant != DEFAULT_TENANT:
            raise InvalidRequest(
                f"tenant {tenant!r}: a server knows the tenant by the credential; leave it out"
            )
        if len(writer.encode()) > WRITER_BYTES_MAX:
            raise InvalidRequest(
                f"writer: {len(writer.encode())} bytes, {WRITER_BYTES_MAX} is the limit"
            )
        check_salt(salt)
        if not isinstance(public, bool):
            raise InvalidRequest(f"public: {public!r:.60} given; True or False is needed")
        made = RemoteSession(self._link, spec, salt, writer, public=public)
        with self._lock:
            self._sessions.add(made)
        made.wait_open(self.config.open_wait_s, while_it_starts=True)
        return made

    def client_counters(self) -> dict[str, int]:
        """What happened on this side: sessions opened, calls by how they failed."""
        return self._link.counters()

    def close(self) -> bool:
        """End all sessions and the connection; the server goes on."""
        if self._closing.is_set() or self._pid != os.getpid():
            return True
        self._closing.set()
        with self._lock:
            sessions = list(self._sessions)
        self._link.give_back.stop(1.0)
        for session in sessions:
            session.close()
        return super().close()

    def __enter__(self) -> RemoteStore:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
