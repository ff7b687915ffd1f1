"""Makes a small certificate authority, and server and client certificates below it, for mTLS.

Meant for tests and for one team's servers; where there is a PKI, use it: a client certificate needs
the URI name kvstore://TENANT/ROLE and nothing else of ours. All files are 0600; the CA is
made once, the others are replaced.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from typing import TYPE_CHECKING

from kvstore.auth import certificate_name
from kvstore.errors import ConfigError, InvalidRequest
from kvstore.private_file import read_private, read_public, replace_private

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

    from kvstore.identity import Role

__all__ = ["Authority", "CertificateFiles"]

CA_DAYS = 3650
DAYS_MAX = 825  # what common TLS stacks accept of a leaf
PEM_BYTES_MAX = 64 << 10
HOSTS_MAX = 100
# Clocks of two hosts differ a little.
BACKDATED = timedelta(minutes=5)


@dataclass(frozen=True, slots=True)
class CertificateFiles:
    """Where a certificate and its key went."""

    certificate: Path
    key: Path


class Authority:
    """A CA in a folder: ca.pem to hand out, ca.key to keep. Made by `load_or_create`."""

    def __init__(
        self, folder: Path, certificate: x509.Certificate, key: EllipticCurvePrivateKey
    ) -> None:
        self._folder = folder
        self._certificate = certificate
        self._key = key

    @staticmethod
    def load_or_create(folder: Path) -> Authority:
        """The CA of `folder`, made there (0700) if there is none; ConfigError if it is damaged."""
        _require_library()
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not os.path.lexists(folder / "ca.key"):
                _create_authority(folder)
        except FileExistsError as exc:
            raise ConfigError(f"{folder}: this is a file; a folder for several is needed") from exc
        except OSError as exc:
            raise ConfigError(f"{folder}: cannot be written ({exc.strerror})") from exc
        return _load_authority(folder)

    def issue_server(self, hosts: Iterable[str], days: int) -> CertificateFiles:
        """server.pem and server.key for these DNS names and IP addresses; replaces older ones."""
        from cryptography.x509.oid import ExtendedKeyUsageOID

        names = [_host_name(host) for host in hosts]
        if not 1 <= len(names) <= HOSTS_MAX:
            raise InvalidRequest(f"--host: {len(names)} given; 1 to {HOSTS_MAX} are needed")
        return self._issue("server", names, ExtendedKeyUsageOID.SERVER_AUTH, days)

    def issue_client(self, tenant: str, role: Role, days: int) -> CertificateFiles:
        """client-TENANT-ROLE.pem and .key; replaces older ones."""
        from cryptography import x509
        from cryptography.x509.oid import ExtendedKeyUsageOID

        name = x509.UniformResourceIdentifier(certificate_name(tenant, role))
        return self._issue(
            f"client-{tenant}-{role.value}", [name], ExtendedKeyUsageOID.CLIENT_AUTH, days
        )

    def _issue(
        self,
        file_name: str,
        names: list[x509.GeneralName],
        usage: x509.ObjectIdentifier,
        days: int,
    ) -> CertificateFiles:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.asymmetric import ec

        if not 1 <= days <= DAYS_MAX:
            raise InvalidRequest(f"--days: {days} given; must be 1 to {DAYS_MAX}")
        key = ec.generate_private_key(ec.SECP256R1())
        now = datetime.now(UTC)
        end = min(now + timedelta(days=days), self._certificate.not_valid_after_utc)
        public_key = key.public_key()
        builder = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([]))
            .issuer_name(self._certificate.subject)
            .public_key(public_key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - BACKDATED)
            .not_valid_after(end)
            # With an empty subject the alternative names must be critical (RFC 5280, 4.2.1.6).
            .add_extension(x509.SubjectAlternativeName(names), critical=True)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()),
                critical=False,
            )
        )
        certificate = builder.sign(self._key, hashes.SHA256())
        return _write_pair(self._folder, file_name, certificate, key)


def check_request(hosts: Sequence[str], clients: Iterable[tuple[str, Role]], days: int) -> None:
    """InvalidRequest for certificates that `Authority` would not issue."""
    _require_library()
    if not 1 <= len(hosts) <= HOSTS_MAX:
        raise InvalidRequest(f"--host: {len(hosts)} given; 1 to {HOSTS_MAX} are needed")
    for host in hosts:
        _host_name(host)
    for tenant, role in clients:
        certificate_name(tenant, role)
    if not 1 <= days <= DAYS_MAX:
        raise InvalidRequest(f"--days: {days} given; must be 1 to {DAYS_MAX}")


def _require_library() -> None:
    try:
        import cryptography  # noqa: F401 # only whether it is there
    except ImportError:
        raise ConfigError(
            "certificates need the package cryptography: pip install 'kvstore-llm[secure]'"
        ) from None


def _create_authority(folder: Path) -> None:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "kvstore CA")])
    now = datetime.now(UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - BACKDATED)
        .not_valid_after(now + timedelta(days=CA_DAYS))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(signs_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
    _write_pair(folder, "ca", builder.sign(key, hashes.SHA256()), key)


def _load_authority(folder: Path) -> Authority:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        key = load_pem_private_key(read_private("CA key", folder / "ca.key", PEM_BYTES_MAX), None)
        certificate = x509.load_pem_x509_certificate(
            read_public("CA certificate", folder / "ca.pem", PEM_BYTES_MAX)
        )
    except ConfigError:
        raise
    except (ValueError, TypeError) as exc:
        raise ConfigError(f"{folder}: ca.key or ca.pem is damaged: {exc}") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ConfigError(f"{folder}/ca.key: is not an elliptic-curve key, so not made by kvstore")
    if key.public_key() != certificate.public_key():
        raise ConfigError(f"{folder}: ca.key does not belong to ca.pem; take both away or neither")
    return Authority(folder, certificate, key)


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _host_name(host: str) -> x509.GeneralName:
    from cryptography import x509

    try:
        return x509.IPAddress(ip_address(host))
    except ValueError:
        pass  # then it is a DNS name
    labels = host.split(".")
    usable = all(
        label.replace("-", "").isalnum() and label.isascii() and len(label) < 64 for label in labels
    )
    if not usable or len(host) > 253:
        raise InvalidRequest(f"--host: {host[:80]!r} is neither a DNS name nor an IP address")
    return x509.DNSName(host)


def _write_pair(
    folder: Path, name: str, certificate: x509.Certificate, key: EllipticCurvePrivateKey
) -> CertificateFiles:
    """The certificate first: who finds a key finds what belongs to it."""
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    files = CertificateFiles(folder / f"{name}.pem", folder / f"{name}.key")
    secret = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    try:
        replace_private(files.certificate, certificate.public_bytes(Encoding.PEM))
        replace_private(files.key, secret)
    except OSError as exc:
        raise ConfigError(f"{folder}: cannot be written ({exc.strerror})") from exc
    return files
