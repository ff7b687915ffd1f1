"""All sessions of a server, by their secret names; ends those whose client is gone.

A session belongs to the credential that opened it: to others its name means nothing. It ends when
its client says so, when its heartbeat stream or its shared-memory connection breaks, or after
silence.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from typing import TYPE_CHECKING

from kvstore.errors import CapacityError
from kvstore.identity import PUBLIC_TENANT
from kvstore.quantity import format_bytes
from kvstore.server_config import SHARE_OF_ARENA, useful_host_bytes
from kvstore.server_session import ServerSession, UnknownHandle
from kvstore.shares import room_beside
from kvstore.staging_pool import SESSION_BYTES_MAX, StagingPool
from kvstore.tenant_holds import TenantHolds
from kvstore.tenants import Quota
from kvstore.wire import SESSION_BYTES, SILENCE_S

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvstore.identity import Identity
    from kvstore.spec import CacheSpec
    from kvstore.store import Store

DOUBT_S = 2.0  # for a client whose credential was changed to come with the new one
STAGING_PART_MAX = 4  # of a tenant's host_bytes_max
NO_QUOTA = Quota()
STAGING_SHARE = 8  # a session without staging may have so small a part of the arena in writing

_log = logging.getLogger("kvstore.server")


class SessionRegistry:
    """Opens, finds and ends sessions. Thread-safe."""

    def __init__(
        self,
        store: Store,
        staging: StagingPool,
        *,
        sessions_max: int,
        quotas: Callable[[], Mapping[str, Quota]] = dict,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """quotas: of all tenants, as they are now; empty where there are none."""
        self._store = store
        self._quotas = quotas
        self._holds: dict[str, TenantHolds] = {}
        self._staging = staging
        self._sessions_max = sessions_max
        self._clock = clock
        self._lock = threading.Lock()
        self._sessions: dict[bytes, ServerSession] = {}
        self.last_session_s = clock()  # when there was one last
        self.on_end: Callable[[ServerSession], object] = lambda session: None

    def __len__(self) -> int:
        return len(self._sessions)

    def sessions(self) -> list[ServerSession]:
        """All that are open."""
        return list(self._sessions.values())

    def open(
        self,
        identity: Identity,
        spec: CacheSpec,
        *,
        salt: bytes,
        writer: str,
        shared_memory: bool,
        public: bool = True,
    ) -> ServerSession:
        """A new session; CapacityError when there are too many, QuotaError for the tenant's.

        public: look-ups also find public pages, where the server has a tenant for them.
        """
        holds = self._begin(identity.tenant)
        try:
            made = self._make(identity, spec, holds, salt, writer, shared_memory, public)
        except BaseException:
            holds.end_session()
            raise
        with self._lock:
            self._sessions[made.name] = made
        return made

    def _begin(self, tenant: str) -> TenantHolds:
        """Count a session that is about to open."""
        with self._lock:
            holds = self._holds.setdefault(tenant, self._holds_of(tenant))
            used = {name: each.sessions for name, each in self._holds.items()}
            if not room_beside(tenant, used, self._sessions_max, self._quotas()):
                raise CapacityError(
                    f"{self._sessions_max} sessions can be open, and some are kept for other "
                    "tenants; raise sessions_max"
                )
            holds.begin_session()
            return holds

    def _make(
        self,
        identity: Identity,
        spec: CacheSpec,
        holds: TenantHolds,
        salt: bytes,
        writer: str,
        shared_memory: bool,
        public: bool,
    ) -> ServerSession:
        quotas, tenant = self._quotas(), identity.tenant
        host_bytes = self._store.config.host_bytes
        public = public and PUBLIC_TENANT in quotas
        inner = self._store.session(spec, tenant=tenant, salt=salt, writer=writer, public=public)
        memory = None
        if shared_memory:
            most = quotas[tenant].host_bytes_max if tenant in quotas else None
            bytes_max = most // STAGING_PART_MAX if most is not None else None
            memory = self._staging.take(spec.page_bytes, tenant, quotas, bytes_max)
        quota = max(min(SESSION_BYTES_MAX, host_bytes // STAGING_SHARE), spec.page_bytes + 4096)
        limit_bytes = int(host_bytes * SHARE_OF_ARENA)
        if spec.page_bytes > limit_bytes:
            _log.warning(
                "a session with pages of %s will find nothing: it may lease %s; at least "
                "--host-bytes %s is needed",
                format_bytes(spec.page_bytes),
                format_bytes(limit_bytes),
                format_bytes(useful_host_bytes(spec.page_bytes)).replace(" ", ""),
            )
        return ServerSession(
            secrets.token_bytes(SESSION_BYTES),
            identity,
            inner,
            is_shared=shared_memory,
            staging=memory,
            staging_bytes=memory.size if memory is not None else quota,
            limit_bytes=limit_bytes,
            clock=self._clock,
            gone=self._gone,
            holds=holds,
        )

    def _holds_of(self, tenant: str) -> TenantHolds:
        return TenantHolds(
            tenant,
            lambda: self._quotas().get(tenant, NO_QUOTA),
            lambda: self._store.state.lease_bytes_max(tenant),
        )

    def held_by(self, tenant: str) -> dict[str, int]:
        """What a tenant's sessions hold now, for Stats."""
        holds = self._holds.get(tenant)
        return {
            "sessions": holds.sessions if holds is not None else 0,
            "reservations": holds.reservations if holds is not None else 0,
            "leased_bytes": holds.leased_bytes if holds is not None else 0,
            "staging_bytes": self._staging.used_by(tenant),
        }

    def find(self, name: bytes, identity: Identity) -> ServerSession:
        """A session by name; UnknownHandle when there is none of that name for this credential."""
        found = self._sessions.get(name)
        if found is None or found.identity != identity:
            raise UnknownHandle("no such session; open a new one")
        found.sign_of_life()
        return found

    def doubt(self, session: ServerSession) -> None:
        """End a session soon, unless its client shows a good credential before."""
        session.last_sign_s = min(session.last_sign_s, self._clock() - SILENCE_S + DOUBT_S)

    def end(self, session: ServerSession) -> None:
        """End a session; ending it again does nothing."""
        with self._lock:
            known = self._sessions.pop(session.name, None)
            self.last_session_s = self._clock()
        if known is not None:
            session.end()
            self.on_end(session)

    def sweep(self) -> None:
        """End silent sessions, and uploads that nobody goes on with."""
        now = self._clock()
        wanted = self._store.state.take_wanted_back()
        for session in list(self._sessions.values()):
            if session.last_sign_s + SILENCE_S < now:
                _log.warning("a session ended: nothing heard of its client for %g s", SILENCE_S)
                self.end(session)
                continue
            session.sweep()
            ended = session.give_back_leases(wanted) if wanted else 0
            if ended:
                _log.info("%d leases ended: another tenant needs its share of memory", ended)

    def end_all(self) -> None:
        """End every session."""
        for session in list(self._sessions.values()):
            self.end(session)

    def _gone(self, session: ServerSession) -> None:
        session.session.close()
        self._holds[session.identity.tenant].end_session()
        if session.staging is not None:
            self._staging.give_back(session.staging, session.identity.tenant)
