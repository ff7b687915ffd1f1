"""Where page events may be published: only on this host, since they carry prompts in plain."""

from __future__ import annotations

from kvstore.errors import ConfigError
from kvstore.metrics_listen import check_metrics_listen


def check_events_listen(name: str, listen: str) -> str:
    """The value, if it is ipc:///path or tcp:// with a loopback address; else ConfigError."""
    if not listen or (listen.startswith("ipc:///") and len(listen) > len("ipc:///")):
        return listen
    try:
        if not listen.startswith("tcp://"):
            raise ConfigError("")
        check_metrics_listen(listen.removeprefix("tcp://"))
    except ConfigError:
        raise ConfigError(
            f"{name}: {listen!r} given; ipc:///path or tcp://127.0.0.1:PORT is wanted: events "
            "carry prompts in plain, so let a router or a relay run on this host"
        ) from None
    return listen
