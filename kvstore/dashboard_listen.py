"""Where a dashboard may be served: only on this host, since it has no TLS and shows prompts."""

from __future__ import annotations

from kvstore.errors import ConfigError
from kvstore.metrics_listen import check_metrics_listen

ADDRESS_NAME = "kvstore.dashboard"  # in the store's directory: the page's address, with its key


def check_dashboard_listen(listen: str) -> str:
    """The value, if it is unix:/path or a loopback address with a port; else ConfigError."""
    try:
        return check_metrics_listen(listen)
    except ConfigError:
        raise ConfigError(
            f"dashboard_listen: {listen!r} given; unix:/path or a loopback address with a port is "
            "wanted, as 127.0.0.1:9465: it has no TLS. From elsewhere, let SSH carry it: "
            "ssh -L 9465:127.0.0.1:9465 HOST"
        ) from None
