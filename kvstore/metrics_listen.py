"""Where metrics may be served: only where nobody but this host can ask, since there is no TLS."""

from __future__ import annotations

import ipaddress

from kvstore.errors import ConfigError


def check_metrics_listen(listen: str) -> str:
    """The value, if it is unix:/path or a loopback address with a port; else ConfigError."""
    if not listen or listen.startswith("unix:/"):
        return listen
    host, _, port = listen.rpartition(":")
    address = "127.0.0.1" if host == "localhost" else host.strip("[]")
    try:
        is_loopback = ipaddress.ip_address(address).is_loopback
    except ValueError:
        is_loopback = False
    if not is_loopback or not port.isdecimal() or int(port) > 65_535:
        raise ConfigError(
            f"metrics_listen: {listen!r} given; unix:/path or a loopback address with a port is "
            "wanted, as 127.0.0.1:9464: it has no TLS, so let a collector run on this host"
        )
    return listen
