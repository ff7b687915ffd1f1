"""TLS for a server: certificate, key and client CA from files, read again when they change.

With a client CA every client must show a certificate that it signed (mTLS). A renewed file counts
from the next handshake on; a bad one changes nothing and is said once.
"""

from __future__ import annotations

import logging
import os
import ssl
import threading
from typing import TYPE_CHECKING

import grpc

from kvstore.errors import ConfigError
from kvstore.private_file import read_private, read_public

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["TlsFiles"]

PEM_BYTES_MAX = 1 << 20

_log = logging.getLogger("kvstore.auth")
_Stamps = tuple[tuple[int, int, int] | None, ...]


class TlsFiles:
    """The TLS files of one server. ConfigError at the start when they cannot be used."""

    def __init__(self, certificate: Path, key: Path, client_ca: Path | None = None) -> None:
        self._certificate = certificate
        self._key = key
        self._client_ca = client_ca
        self._lock = threading.Lock()
        self._stamps = self._stamp()
        self._first = self._load()

    def credentials(self) -> grpc.ServerCredentials:
        """For grpc.Server.add_secure_port."""
        return grpc.dynamic_ssl_server_credentials(
            self._first,
            self._changed,  # type: ignore[arg-type] # the stubs miss that None is an answer
            require_client_authentication=self._client_ca is not None,
        )

    def _changed(self) -> grpc.ServerCertificateConfiguration | None:
        """grpc asks at each handshake; None means: as before."""
        with self._lock:
            stamps = self._stamp()
            if stamps == self._stamps:
                return None
            self._stamps = stamps
            try:
                loaded = self._load()
            except ConfigError as exc:
                _log.error("tls: the last good files stay in force: %s", exc)
                return None
            _log.info("tls: files read again")
            return loaded

    def _load(self) -> grpc.ServerCertificateConfiguration:
        key = read_private("TLS key", self._key, PEM_BYTES_MAX)
        certificate = read_public("TLS certificate", self._certificate, PEM_BYTES_MAX)
        authority = None
        if self._client_ca is not None:
            authority = read_public("client CA", self._client_ca, PEM_BYTES_MAX)
        # grpc takes what it cannot use without a word, and then fails every handshake.
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self._certificate, self._key, password=_no_password)
        except (OSError, ValueError) as exc:
            raise ConfigError(
                f"TLS certificate {self._certificate} and key {self._key}: {_reason(exc)}"
            ) from exc
        if authority is not None:
            try:
                context.load_verify_locations(cadata=authority.decode("ascii", errors="replace"))
            except (OSError, ValueError) as exc:
                raise ConfigError(f"client CA {self._client_ca}: {_reason(exc)}") from exc
        return grpc.ssl_server_certificate_configuration([(key, certificate)], authority)

    def _stamp(self) -> _Stamps:
        return tuple(map(_stamp_of, filter(None, (self._certificate, self._key, self._client_ca))))


def _stamp_of(path: Path) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def _no_password() -> str:
    """Without it OpenSSL would ask on the terminal."""
    raise ValueError("the key is encrypted; a server needs it in the clear, 0600")


def _reason(exc: Exception) -> str:
    return str(getattr(exc, "reason", "") or exc)
