"""The line to Redis: a bounded client, a breaker, and a watch that probes so that no caller pays.

Invariant: a call ends within TIMEOUT_S a silent step, and after the first that failed no call is
made until the watch's probe was answered; after FAILURES_MAX in a row the breaker is open and the
probe comes once a second. The only module of this room that imports the client library. Commands:
GET, SET, DEL, EXPIRE, and AUTH, SELECT to connect (a cluster's CLUSTER and COMMAND; Sentinels are
asked with SENTINEL). Never scripts, never KEYS.
"""

from __future__ import annotations

import logging
import secrets
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import redis
import redis.cluster
import redis.sentinel
from redis.backoff import NoBackoff
from redis.exceptions import AuthorizationError
from redis.maint_notifications import MaintNotificationsConfig
from redis.retry import Retry

from kvstore.tiers.tier import TierError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.tiers.redis_address import RedisAddress

TIMEOUT_S = 0.09  # to connect, and of each step of a call; three of them are within 300 ms
FAILURES_MAX = 3
PROBE_EVERY_S = 1.0  # while the breaker is open
WATCH_EVERY_S = 5.0  # while all is well
CONNECTIONS_MAX = 8
TURN_WAIT_S = 0.1
READ_BYTES = 1 << 18
MARK_TTL_S = 3600

# Its name is text: the cluster client looks names up.
Command = tuple[str | bytes | memoryview | int, ...]

_log = logging.getLogger("kvstore.redis")

# The library has no types for these two.
_CLUSTER_NODE: Any = redis.cluster.ClusterNode
_SENTINEL: Any = redis.sentinel.Sentinel


@dataclass(frozen=True, slots=True)
class Refusal:
    """A command that Redis answered with an error."""

    reason: str
    is_full: bool = False  # Redis has no memory left, and keeps its limit


class RedisLink:
    """Thread-safe. Opening it waits for nothing: the watch makes the first connection."""

    def __init__(
        self, address: RedisAddress, password: str = "", *, timeout_s: float = TIMEOUT_S
    ) -> None:
        """Begin to connect. `password` is never shown or logged. timeout_s: of a silent step."""
        self._address = address
        self._password = password
        self._timeout_s = timeout_s
        self._client: Any = None
        self._turns = threading.BoundedSemaphore(CONNECTIONS_MAX)
        self._lock = threading.Lock()
        self._failures = 0
        self._problem = "connecting"  # why calls are not made; empty when they are
        self._is_open = False
        self._mark = b"kv:{watch-" + secrets.token_hex(8).encode() + b"}"
        self._is_marked = False
        self._wake = threading.Event()
        self._first = threading.Event()
        self._stopping = False
        self.errors = 0
        self.times_opened = 0
        self.losses = 0  # times that Redis may have lost what it was told
        self._thread = threading.Thread(target=self._watch, name="kvstore-redis", daemon=True)
        self._thread.start()

    @property
    def ready(self) -> bool:
        """Whether a call is worth making now."""
        return not self._problem

    @property
    def state(self) -> str:
        """ "ok", or what is wrong."""
        problem = self._problem
        if not problem:
            return "ok"
        return f"breaker open: {problem}" if self._is_open else problem

    def wait_first(self, wait_s: float) -> bool:
        """Wait until the first probe was answered or failed; whether calls can be made."""
        self._first.wait(wait_s)
        return self.ready

    def run(self, commands: Sequence[Command]) -> list[Any]:
        """One round trip: replies in order, a Refusal for each command that was refused.

        Raises TierError when Redis can't be asked now, or did not answer in time.
        """
        if self._problem:
            raise TierError(f"redis at {self._address}: {self.state}")
        return self._run(commands)

    def close(self, wait_s: float = 1.0) -> None:
        """End the watch and the connections."""
        self._stopping = True
        self._wake.set()
        self._thread.join(wait_s)
        if self._client is not None:
            self._client.close()

    def _run(self, commands: Sequence[Command]) -> list[Any]:
        if not commands:
            return []
        if not self._turns.acquire(timeout=TURN_WAIT_S):
            raise TierError(f"redis at {self._address}: {CONNECTIONS_MAX} calls are under way")
        try:
            if self._client is None:
                self._client = _connect(self._address, self._password, self._timeout_s)
            with self._client.pipeline(transaction=False) as pipeline:
                for command in commands:
                    pipeline.execute_command(*command)
                replies = pipeline.execute(raise_on_error=False)
        except Exception as exc:  # the client's own, over replies that are no Redis's, come too
            self._failed(exc)
            raise TierError(f"redis at {self._address}: {_said(exc)}") from exc
        finally:
            self._turns.release()
        broken = next((each for each in replies if isinstance(each, _LINE_ERRORS)), None)
        if broken is not None:  # a cluster's pipeline returns what others raise
            self._failed(broken)
            raise TierError(f"redis at {self._address}: {_said(broken)}") from broken
        return [_refusal(each) if isinstance(each, Exception) else each for each in replies]

    def _failed(self, exc: Exception) -> None:
        with self._lock:
            self.errors += 1
            self._failures += 1
            self._problem = _said(exc)
            hopeless = isinstance(exc, redis.AuthenticationError | AuthorizationError)
            if not self._is_open and (hopeless or self._failures >= FAILURES_MAX):
                self._is_open = True
                self.times_opened += 1
                _log.warning(
                    "redis at %s: %s; its pages are misses until it answers",
                    self._address,
                    self._problem,
                )
        self._wake.set()

    def _succeeded(self) -> None:
        with self._lock:
            if not self._problem:
                return
            was_open, self._is_open = self._is_open, False
            self._failures, self._problem = 0, ""
            if was_open:
                self.losses += 1  # what was committed meanwhile was not written
        _log.info("redis at %s: ok", self._address)

    # The watch

    def _watch(self) -> None:
        while not self._stopping:
            try:
                self._probe()
            except TierError:
                pass  # counted, and said in `state`
            except Exception:  # our bug; without the watch the breaker would stay open for good
                _log.exception("redis at %s: the probe failed", self._address)
            if self._failures == 0 or self._is_open:
                self._first.set()
            if not self.ready and not self._is_open:
                continue  # suspect: ask again at once, at most FAILURES_MAX times
            if self._is_open:
                self._wake.clear()
                self._wake.wait(PROBE_EVERY_S)
            else:
                self._wake.wait(WATCH_EVERY_S)
                self._wake.clear()

    def _probe(self) -> None:
        """Ask for our mark; without it Redis has lost what it held, or never was asked before."""
        [found] = self._run([("GET", self._mark)])
        if isinstance(found, Refusal):
            self._failed(AuthorizationError(found.reason))
            return
        self._succeeded()
        if found is None:
            if self._is_marked:
                self.losses += 1
                _log.warning("redis at %s: lost its content", self._address)
            [said] = self._run([("SET", self._mark, b"1", b"EX", MARK_TTL_S)])
            self._is_marked = not isinstance(said, Refusal)
        else:
            self._run([("EXPIRE", self._mark, MARK_TTL_S)])


_LINE_ERRORS = (redis.ConnectionError, redis.TimeoutError, redis.RedisClusterException, OSError)


def _connect(address: RedisAddress, password: str, timeout_s: float) -> Any:
    settings: dict[str, Any] = {
        "username": address.user or None,
        "password": password or None,
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        "socket_read_size": READ_BYTES,
        "retry": Retry(NoBackoff(), 0),
        "protocol": 2,
        "driver_info": None,
        "max_connections": CONNECTIONS_MAX,
        "maint_notifications_config": MaintNotificationsConfig(enabled=False),
    }
    if address.tls:
        settings |= {"ssl": True, "ssl_ca_certs": address.ca_file or None}
    if address.kind == "cluster":
        nodes = [_CLUSTER_NODE(host, port) for host, port in address.nodes]
        return redis.cluster.RedisCluster(startup_nodes=nodes, **settings)
    settings["db"] = address.db
    if address.kind == "unix":
        return redis.Redis(unix_socket_path=address.path, **settings)
    if address.kind == "sentinel":
        limits = {name: settings[name] for name in ("socket_timeout", "socket_connect_timeout")}
        watchers = _SENTINEL(list(address.nodes), sentinel_kwargs=limits, **settings)
        return watchers.master_for(address.service)
    [(host, port)] = address.nodes
    return redis.Redis(host=host, port=port, **settings)


def _refusal(exc: Exception) -> Refusal:
    return Refusal(_said(exc), isinstance(exc, redis.OutOfMemoryError))


def _said(exc: Exception) -> str:
    """One short line, whatever a server put into its error."""
    text = str(exc) or type(exc).__name__
    return "".join(c if c.isprintable() else "?" for c in text)[:200]
