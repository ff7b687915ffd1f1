"""All settings of a server: those of its store, and how it is reached and bounded.

`kvstore serve` reads them from flags, `KVSTORE_*` and a TOML file, as config.py says.
"""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvstore.config import (
    HOST_BYTES_MIN,
    Bytes,
    Count,
    Field,
    OptionalPath,
    OptionalSeconds,
    Seconds,
    StoreConfig,
    model_validator,
)
from kvstore.dashboard_listen import check_dashboard_listen
from kvstore.errors import ConfigError
from kvstore.events_listen import check_events_listen
from kvstore.metrics_listen import check_metrics_listen
from kvstore.quantity import format_bytes, parse_bytes
from kvstore.spec import PAGE_BYTES_AIM
from kvstore.wire import SOCKET_NAME

STAGING_SHARE = 8  # of host_bytes, unless said otherwise
PATH_BYTES_MAX = 107  # of a Unix socket
SHARE_OF_ARENA = 0.25  # that one session may keep from moving

_ADDRESS = re.compile(r"(?P<host>\[[0-9A-Fa-f:]+\]|[A-Za-z0-9._-]+):(?P<port>\d{1,5})")


def useful_host_bytes(page_bytes: int) -> int:
    """With less a session may not lease one page of that size, and finds nothing; whole MiB."""
    arena = page_bytes / SHARE_OF_ARENA
    return -(-int(arena * STAGING_SHARE / (STAGING_SHARE - 1)) >> 20) << 20


class ServerConfig(StoreConfig):
    """A store's settings and its server's. A bad one raises ConfigError, a line for each."""

    # unix:/path or host:port; empty: unix:DIR/kvstore.sock.
    listen: str = ""
    # Serve a network address without TLS and credentials: whoever reaches it is the operator.
    insecure_network: bool = False
    # PEM files for TLS at a network address, and the CA that client certificates must come from.
    tls_cert: OptionalPath = None
    tls_key: OptionalPath = None
    tls_client_ca: OptionalPath = None
    # Tenants and digests of their tokens, as `kvstore tenant` writes them; every call needs one.
    tenants_file: OptionalPath = None
    # Of host_bytes, for writers to fill; empty: an eighth.
    staging_bytes: Bytes = Field(default=0, ge=0)
    # Calls at once, waiting ones included; more are refused. Streams of sessions come on top.
    max_rpcs: Count = Field(default=256, ge=4, le=65_536)
    # Sessions at once.
    sessions_max: Count = Field(default=1024, ge=1, le=65_536)
    # Threads for calls that do not wait; for calls that may wait for the disk, and for storing.
    workers: Count = Field(default=8, ge=1, le=256)
    waiting_workers: Count = Field(default=32, ge=1, le=1024)
    # After SIGTERM, for calls that are under way.
    drain_s: Seconds = Field(default=5.0, ge=0, le=60)
    # End after so long without a session; empty: never.
    idle_exit_s: OptionalSeconds = Field(default=None, gt=0)
    # One JSON object a line instead of text.
    log_json: bool = False
    # Serve Prometheus metrics there: unix:/path, or a loopback address with a port. Empty: nowhere.
    metrics_listen: str = ""
    # Serve the dashboard there: unix:/path, or a loopback address with a port. Empty: nowhere.
    dashboard_listen: str = ""
    # A tokenizer.json, or its folder: the dashboard then shows and takes prompts as text.
    dashboard_tokenizer: OptionalPath = None
    # Publish page events there, as vLLM does: ipc:///path or tcp://127.0.0.1:PORT. Empty: nowhere.
    events_listen: str = ""
    # And answer there to who missed some.
    events_replay_listen: str = ""
    # gRPC server reflection; tells anybody who connects what the service looks like.
    reflection: bool = False

    @classmethod
    def with_defaults(cls, values: dict[str, Any]) -> dict[str, Any]:
        """See StoreConfig."""
        filled = super().with_defaults(values)
        if not filled.get("staging_bytes"):
            with suppress(ConfigError):  # host_bytes makes no sense, and is refused by its name
                share = parse_bytes(filled["host_bytes"]) // STAGING_SHARE
                filled["staging_bytes"] = share // 4096 * 4096
        return filled

    @model_validator(mode="after")
    def _check_server(self) -> ServerConfig:
        if self.directory is None:
            raise ConfigError("dir: a server needs a directory, for its sockets at least")
        if self.staging_bytes > self.host_bytes // 2:
            raise ConfigError(
                f"staging_bytes: {format_bytes(self.staging_bytes)} of host_bytes = "
                f"{format_bytes(self.host_bytes)}; at most half of it"
            )
        if self.arena_bytes < HOST_BYTES_MIN:
            raise ConfigError(
                f"{self.host_bytes_words}; at least "
                f"{format_bytes(HOST_BYTES_MIN + self.staging_bytes)} are needed, and "
                f"{format_bytes(useful_host_bytes(PAGE_BYTES_AIM))} for pages as adapters make them"
            )
        check_metrics_listen(self.metrics_listen)
        check_dashboard_listen(self.dashboard_listen)
        for name in ("events_listen", "events_replay_listen"):
            check_events_listen(name, getattr(self, name))
        if self.events_replay_listen and not self.events_listen:
            raise ConfigError("events_replay_listen: needs events_listen too")
        path = self.socket_path
        if path is not None and len(bytes(path)) > PATH_BYTES_MAX:
            raise ConfigError(
                f"listen: {path} has more than the {PATH_BYTES_MAX} bytes of a socket's path; "
                "use a shorter one"
            )
        if path is None and _ADDRESS.fullmatch(self.listen) is None:
            raise ConfigError(f"listen: {self.listen!r} given; unix:/path or host:port is wanted")
        return self

    @property
    def socket_path(self) -> Path | None:
        """The Unix socket that the server listens at; None for a network address."""
        assert self.directory is not None
        if not self.listen:
            return self.directory / SOCKET_NAME
        if not self.listen.startswith("unix:"):
            return None
        return Path(self.listen.removeprefix("unix:").removeprefix("//")).absolute()

    @property
    def address(self) -> str:
        """What to listen at, as gRPC names it."""
        path = self.socket_path
        return self.listen if path is None else f"unix:{path}"

    @property
    def arena_bytes(self) -> int:
        """Memory for pages: what staging leaves of host_bytes."""
        return self.host_bytes - self.staging_bytes

    @property
    def session_bytes(self) -> int:
        """What one session may lease of it."""
        return int(self.arena_bytes * SHARE_OF_ARENA)

    @property
    def host_bytes_words(self) -> str:
        """As it was asked for, and what of it the store does not see."""
        return (
            f"host_bytes: {format_bytes(self.host_bytes)} given, of which "
            f"{format_bytes(self.staging_bytes)} are staging_bytes"
        )

    @property
    def warning(self) -> str:
        """What is allowed and hardly meant; else empty."""
        if self.session_bytes >= PAGE_BYTES_AIM:
            return ""
        return (
            f"host_bytes: {format_bytes(self.host_bytes)} given, of which a session may lease "
            f"{format_bytes(self.session_bytes)}: look-ups of pages as adapters make them, "
            f"{format_bytes(PAGE_BYTES_AIM)} and more, find nothing; at least "
            f"{format_bytes(useful_host_bytes(PAGE_BYTES_AIM))} are needed for them"
        )

    def store_config(self) -> StoreConfig:
        """The store's part. Staging is taken out of the arena's bytes: the host's total holds."""
        values = {name: getattr(self, name) for name in StoreConfig.model_fields}
        return StoreConfig(**(values | {"host_bytes": self.arena_bytes}))
