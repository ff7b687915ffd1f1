"""The server: one store, its sessions, its shared memory, reached over gRPC.

    server = Server(ServerConfig(directory="/var/lib/kvstore"))
    server.start()
    sys.exit(server.run())      # until request_stop()

Calls that never wait have threads of their own, so that a slow disk does not delay a look-up. Here
are only the parts and their order; what a call does stands in servicer.py and operator_calls.py.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import stat
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from kvstore.auth import CredentialAuthorizer
from kvstore.call_pool import CallPool
from kvstore.dashboard_data import DashboardData
from kvstore.errors import CapacityError, ConfigError, DirectoryError, KVStoreError
from kvstore.extent_server import ExtentServer
from kvstore.heap import reuse_large_buffers
from kvstore.identity import PUBLIC_TENANT
from kvstore.metrics import StoreMetrics
from kvstore.metrics_http import MetricsServer
from kvstore.operator_calls import OperatorCalls
from kvstore.remembered import note_served
from kvstore.rpc_guard import Guard
from kvstore.server_security import ServerSecurity
from kvstore.servicer import Servicer
from kvstore.session_registry import SessionRegistry
from kvstore.staging_pool import StagingPool
from kvstore.store import Store
from kvstore.tracing import tracer
from kvstore.watchdog import Pulse, Tick, Watchdog, lock_is_free, thread_is_alive
from kvstore.watches import Watches
from kvstore.wire import (
    CONTROL_BYTES_MAX,
    DOCUMENT_BYTES_MAX,
    EXTENTS_NAME,
    METADATA_BYTES_MAX,
    PIECE_BYTES,
    SERVICE,
)

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from kvstore.dashboard import Dashboard
    from kvstore.identity import Authorizer
    from kvstore.kv_event_publisher import KvEventPublisher
    from kvstore.server_config import ServerConfig
    from kvstore.server_session import ServerSession
    from kvstore.tenants import Quota
    from kvstore.tiers.extent import ExtentRecord
    from kvstore.tiers.file_layer import FileLayer
    from kvstore.tiers.host_tier import Staging

SWITCH_INTERVAL_S = 2e-4  # how long a thread may keep the interpreter while another wants it
STOP_S = 10.0  # from the wish to stop to the end of the process
CLOSE_S = 5.0  # of that, for the store to flush
CANCEL_S = 1.0  # how soon calls end that were cut off
TICK_S = 0.25
LOCK_WAIT_S = 10.0  # for a command that looks into the directory to end
# Calls that may wait for the disk, for room, or for their client.
WAITING = (
    *("Open", "Stage", "Reserve", "ReadPages"),
    *(
        "Evict",
        "List",
        "Inspect",
        "Explain",
        "Stats",
        "Tree",
        "PinChain",
        "Record",
        "Verify",
        "Export",
        "Import",
    ),
)
# The same, and nobody waits for what they copy: where cores are short, look-ups and loads go first.
STORING = ("Commit", "Flush", "WritePages")
STORING_NICE = 5
STREAMS = ("Heartbeat", "Watch")
WATCHED_THREADS = ("disk-writer", "extents", "housekeeper", "stager")
CONNECTION_AGE_MS = 3_600_000
CONNECTION_GRACE_MS = 120_000

_log = logging.getLogger("kvstore.server")


class Server:
    """Opens the store at once; serves from start() on, until stop()."""

    def __init__(
        self,
        config: ServerConfig,
        security: ServerSecurity | None = None,
        *,
        authorizer: Authorizer | None = None,
        credentials: grpc.ServerCredentials | None = None,
        files: FileLayer | None = None,
    ) -> None:
        """security: what `config` says about it, if that was looked at already. authorizer,
        credentials: who may call, and TLS, instead of what the settings say. files: see Store.open.

        Raises ConfigError, DirectoryError or CapacityError when it can't serve.
        """
        if security is None and authorizer is not None and credentials is not None:
            security = ServerSecurity(authorizer, credentials, "")
        self._security = security or ServerSecurity.of(config)
        assert config.directory is not None
        self.config = config
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        reuse_large_buffers()
        self.store = _opened(config, files)
        try:
            config.directory.mkdir(mode=0o700, parents=True, exist_ok=True)  # for the sockets
        except OSError as exc:
            self.store.close()
            raise DirectoryError(
                f"{config.directory}: cannot be made ({exc.strerror}); a server needs a writable "
                "directory, for its sockets at least"
            ) from exc
        self._staging = StagingPool(config.staging_bytes)
        self._authorizer = authorizer or self._security.authorizer
        self._quotas: Mapping[str, Quota] = {}
        self.store.state.staging_use = self._staging.used_by
        self.registry = SessionRegistry(
            self.store, self._staging, sessions_max=config.sessions_max, quotas=self.quotas
        )
        try:
            self.quotas()
            self._extents = ExtentServer(
                config.directory / EXTENTS_NAME, self._granted, disconnected=self.registry.end
            )
        except BaseException:
            self.store.close()
            raise
        self.registry.on_end = self._extents.forget
        self._servicer = Servicer(
            self.store, self.registry, self._extents, secrets.randbits(63) | 1
        )
        self._watches = Watches(self.store)
        spare = ThreadPoolExecutor(config.max_rpcs, "kvstore-spare")
        waiting = config.waiting_workers
        self._quick = CallPool(config.workers, "kvstore-call", spare)
        self._waiting = CallPool(waiting, "kvstore-wait", spare)
        self._storing = CallPool(waiting, "kvstore-store", spare, _give_way)
        self._streams = CallPool(2 * config.sessions_max, "kvstore-stream")
        self._pools = (self._quick, self._waiting, self._storing, self._streams)
        self._spare = spare
        self._health = health.HealthServicer(experimental_non_blocking=True)
        self._grpc = self._make_grpc(Guard(self._authorizer, tracer()))
        self._metrics: MetricsServer | None = None
        self._dashboard: Dashboard | None = None
        self._events: KvEventPublisher | None = None
        self._tick = Tick()
        self._watchdog = Watchdog(self._probes(), self._set_ready)
        self._stop_wanted = threading.Event()
        self._warm_since_s: float | None = None  # by the monotonic clock
        self.port = 0  # of a network address

    def start(self) -> None:
        """Listen. Raises DirectoryError or ConfigError when the address can't be had."""
        config = self.config
        path = config.socket_path
        try:
            if path is not None:
                _claim(path)
            credentials = self._security.credentials
            if credentials is not None:
                self.port = self._grpc.add_secure_port(config.address, credentials)
            else:
                self.port = self._grpc.add_insecure_port(config.address)
            if path is not None:
                os.chmod(path, 0o600)
            if config.metrics_listen:
                render = StoreMetrics(self.store, self.service_stats).render
                self._metrics = MetricsServer(config.metrics_listen, render, self._authorizer)
            if config.dashboard_listen:
                self._dashboard = self._make_dashboard()
            if config.events_listen:
                self._events = _publisher(self.store, config)
        except (RuntimeError, OSError, KVStoreError) as exc:
            self._extents.close()
            self.store.close()
            if isinstance(exc, KVStoreError):
                raise
            raise DirectoryError(f"listen: {config.address}: {exc}") from exc
        self._grpc.start()
        if self._metrics is not None:
            self._metrics.start()
        if self._dashboard is not None:
            self._dashboard.start()
        if self._events is not None:
            self._events.start()
        self._set_ready(True)
        if config.idle_exit_s is None and config.directory is not None:
            note_served(config.directory)  # else a client would start another one after a kill
        _log.info("serving %s at %s", config.directory, config.address)
        for warning in (self._security.warning, config.warning):
            if warning:
                _log.warning("%s", warning)

    def run(self) -> int:
        """Serve until somebody wants a stop, then stop; the exit code of the process."""
        failed = ""
        self._watchdog.start()
        while not self._stop_wanted.wait(TICK_S):
            self._tick.beat()
            self.quotas()
            self.registry.sweep()
            for pool in self._pools:
                pool.sweep()
            failed = self._look_at_start()
            if failed:
                _log.error("%s", failed)
                break
            if self._is_idle():
                _log.info("no session for %g s", self.config.idle_exit_s)
                break
        done = self.stop()
        return 0 if done and not failed else 1

    def request_stop(self) -> None:
        """Make run() end. Safe to call from a signal handler."""
        self._stop_wanted.set()

    def stop(self) -> bool:
        """Finish calls that are under way, flush, close; False when the disk did not take all.

        Takes at most STOP_S, or longer only if `drain_s` is.
        """
        drain_s = self.config.drain_s
        deadline = time.monotonic() + max(STOP_S, drain_s + CLOSE_S)
        _log.info("stopping: %d sessions", len(self.registry))
        self._watchdog.stop()
        if self._metrics is not None:
            self._metrics.stop()
        if self._dashboard is not None:
            self._dashboard.stop()
        self._set_ready(False)
        stopped = self._grpc.stop(drain_s)
        self._servicer.drain()
        self._watches.drain()
        stopped.wait(drain_s + CANCEL_S)
        self.registry.end_all()
        self._staging.close()
        self._extents.close()
        done = self.store.close(deadline - time.monotonic() - CANCEL_S / 2)
        for pool in (*self._pools, self._spare):
            pool.shutdown(wait=False, cancel_futures=True)
        if self._events is not None:
            self._events.stop()
        if self.config.socket_path is not None:
            with contextlib.suppress(OSError):
                os.unlink(self.config.socket_path)
        _log.info("stopped")
        return done

    def quotas(self) -> Mapping[str, Quota]:
        """The quotas of all tenants, in force from here on; empty without a tenant file."""
        authorizer = self._authorizer
        if isinstance(authorizer, CredentialAuthorizer):
            found = authorizer.quotas()
            if found is not self._quotas:
                self.store.set_quotas(found)  # the authorizer has checked that they fit
                self._quotas = found
        return self._quotas

    def service_stats(self) -> dict[str, Any]:
        """Who is connected, for Stats."""
        counts = [session.counts for session in self.registry.sessions()]
        return {
            "warning": self._security.warning,
            "sessions": len(counts),
            "matches": sum(matches for matches, _ in counts),
            "reservations": sum(reservations for _, reservations in counts),
            "staging_bytes": self._staging.used_bytes,
            "staging_capacity_bytes": self._staging.capacity_bytes,
        }

    def _make_dashboard(self) -> Dashboard:
        try:
            from kvstore.dashboard import Dashboard
        except ImportError as exc:
            raise ConfigError(
                f"dashboard_listen: needs {exc.name}: pip install 'kvstore-llm[dashboard]'"
            ) from exc
        config = self.config
        assert config.directory is not None
        data = DashboardData(self.store, self.service_stats, config.dashboard_tokenizer)
        return Dashboard(config.dashboard_listen, data, self._authorizer, config.directory)

    def _make_grpc(self, guard: Guard) -> grpc.Server:
        operators = OperatorCalls(self.store, self.registry, self.service_stats)
        pools = dict.fromkeys(WAITING, self._waiting) | dict.fromkeys(STREAMS, self._streams)
        pools |= dict.fromkeys(STORING, self._storing)
        functions = self._servicer.functions() | operators.functions()
        handlers = guard.handlers(functions | {"Watch": self._watches.watch}, pools)
        server = grpc.server(
            self._quick,
            options=_options(self.config),
            maximum_concurrent_rpcs=self.config.max_rpcs + 2 * self.config.sessions_max,
        )
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        if self.config.reflection:
            _add_reflection(server)
        return server

    def _granted(self, session: ServerSession) -> list[ExtentRecord | Staging]:
        """What a session's client may map: its tenant's and public extents to read, its staging to
        write."""
        host = self.store.state.host
        assert host is not None
        granted: list[ExtentRecord | Staging] = [*host.extents(session.identity.tenant)]
        if session.session.public_root is not None:
            granted += host.extents(PUBLIC_TENANT)
        staging = session.staging  # gone once the session has ended
        return granted + ([staging] if staging is not None else [])

    def _probes(self) -> dict[str, Any]:
        probes: dict[str, Any] = {
            "main loop": self._tick,
            "calls": Pulse(self._quick.submit),
            "store": lock_is_free(self.store.state.lock),
        }
        for name in WATCHED_THREADS:
            probes[name] = thread_is_alive(f"kvstore-{name}")
        return probes

    def _set_ready(self, is_ready: bool) -> None:
        serving = health_pb2.HealthCheckResponse.SERVING
        status = serving if is_ready else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", SERVICE):
            self._health.set(name, status)

    def _look_at_start(self) -> str:
        """Say once when all that is on disk can be hit; what went wrong, if it did."""
        if self._warm_since_s is not None:
            return ""
        try:
            if self.store.wait_warm(0.0):
                self._warm_since_s = time.monotonic()
                _log.info("warm: %d pages", len(self.store.state.index))
        except KVStoreError as exc:
            return str(exc)
        return ""

    def _is_idle(self) -> bool:
        limit = self.config.idle_exit_s
        if limit is None or len(self.registry) or self._warm_since_s is None:
            return False
        since_s = max(self.registry.last_session_s, self._warm_since_s)
        return time.monotonic() - since_s > limit


def _opened(config: ServerConfig, files: FileLayer | None) -> Store:
    try:
        settings = config.store_config().model_dump()
        return Store.open(wait_warm=False, lock_wait_s=LOCK_WAIT_S, files=files, **settings)
    except CapacityError as exc:  # which knows only what staging leaves
        raise CapacityError(f"{config.host_bytes_words}: {exc}") from exc


def _publisher(store: Store, config: ServerConfig) -> KvEventPublisher:
    """Publishes what the store's event log sees."""
    try:
        from kvstore.kv_event_publisher import KvEventPublisher
    except ImportError as exc:
        raise ConfigError(
            f"events_listen: needs {exc.name}: pip install 'kvstore-llm[events]'"
        ) from exc
    made = KvEventPublisher(
        store.state,
        store.spec_json,
        listen=config.events_listen,
        replay_listen=config.events_replay_listen,
    )
    store.events.listen(made.record)
    return made


def _give_way() -> None:
    """Lower this thread's priority."""
    with contextlib.suppress(OSError):  # a system where threads have none of their own
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), STORING_NICE)


def _options(config: ServerConfig) -> list[tuple[str, int]]:
    options = [
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", CONTROL_BYTES_MAX),
        ("grpc.max_send_message_length", DOCUMENT_BYTES_MAX),
        ("grpc.max_metadata_size", METADATA_BYTES_MAX // 2),
        ("grpc.absolute_max_metadata_size", METADATA_BYTES_MAX),
        ("grpc.max_concurrent_streams", config.max_rpcs),
        ("grpc.http2.max_frame_size", PIECE_BYTES),  # whole prompts in one frame
        ("grpc.http2.lookahead_bytes", CONTROL_BYTES_MAX),
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
    ]
    if config.socket_path is None:
        options += [
            ("grpc.max_connection_age_ms", CONNECTION_AGE_MS),
            ("grpc.max_connection_age_grace_ms", CONNECTION_GRACE_MS),
        ]
    return options


def _claim(path: Path) -> None:
    """Make room for a socket; gRPC itself would take a living server's place without a word."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode) or found.st_uid != os.geteuid():
        raise DirectoryError(f"{path}: not a socket of user {os.geteuid()}; remove it")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except OSError as exc:
            raise DirectoryError(f"{path}: {exc.strerror}") from exc
    raise DirectoryError(f"{path}: in use by another server")


def _add_reflection(server: grpc.Server) -> None:
    try:
        from grpc_reflection.v1alpha import reflection
    except ImportError as exc:
        raise ConfigError("reflection: needs the package grpcio-reflection") from exc
    reflection.enable_server_reflection((SERVICE, reflection.SERVICE_NAME), server)
