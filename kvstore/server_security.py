"""What a server asks of its callers, by its settings: TLS, credentials, or nothing, with a warning.

The rule of secure binding is applied here, before anything listens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstore.auth import authorizer_for, check_listen
from kvstore.errors import ConfigError
from kvstore.shares import Tenancy

if TYPE_CHECKING:
    import grpc

    from kvstore.identity import Authorizer
    from kvstore.server_config import ServerConfig

__all__ = ["ServerSecurity"]


@dataclass(frozen=True, slots=True)
class ServerSecurity:
    """Made by `of`; reads and checks all files that the settings name."""

    authorizer: Authorizer
    credentials: grpc.ServerCredentials | None
    warning: str  # to say at start and in the statistics; "" when there is nothing to say

    @staticmethod
    def of(config: ServerConfig) -> ServerSecurity:
        """ConfigError for files that can't be used, or an address that is open to others."""
        _check_together(config)
        has_certificates = config.tls_client_ca is not None
        warning = check_listen(
            config.address,
            tls=config.tls_cert is not None,
            credentials=has_certificates or config.tenants_file is not None,
            insecure_network=config.insecure_network,
        )
        return ServerSecurity(
            authorizer_for(
                config.address,
                config.tenants_file,
                certificates=has_certificates,
                check=lambda book: Tenancy.of(book.quotas, config.arena_bytes, config.disk_bytes),
            ),
            _credentials(config),
            warning,
        )


def _check_together(config: ServerConfig) -> None:
    if (config.tls_cert is None) != (config.tls_key is None):
        raise ConfigError("tls_cert, tls_key: give both or neither")
    if config.tls_client_ca is not None and config.tls_cert is None:
        raise ConfigError("tls_client_ca: client certificates need tls_cert and tls_key")
    if config.tls_cert is not None and config.socket_path is not None:
        raise ConfigError(
            "tls_cert: a Unix socket has no TLS; listen at host:port, or give tenants_file alone"
        )


def _credentials(config: ServerConfig) -> grpc.ServerCredentials | None:
    if config.tls_cert is None or config.tls_key is None:
        return None
    from kvstore.server_credentials import TlsFiles  # grpc, which checking a config does not need

    return TlsFiles(config.tls_cert, config.tls_key, config.tls_client_ca).credentials()
