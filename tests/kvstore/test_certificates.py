"""`kvstore cert` and TLS: what a server with its files accepts, refuses and reads again."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvstore.auth import CredentialAuthorizer
from kvstore.certificates import Authority
from kvstore.errors import ConfigError, InvalidRequest
from kvstore.identity import NotAuthenticated, Role

grpc = pytest.importorskip("grpc", reason="the service needs grpcio")
pytest.importorskip("cryptography", reason="certificates are made with cryptography")

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore.certificates import CertificateFiles
    from kvstore.server_credentials import TlsFiles

pytestmark = pytest.mark.slow


class WhoHandler(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Answers every call with the identity behind it."""

    def service(self, handler_call_details: object) -> Any:
        def answer(request: bytes, context: Any) -> bytes:
            try:
                identity = CredentialAuthorizer(None, certificates=True).identify(context)
            except NotAuthenticated as exc:
                context.abort(grpc.StatusCode.UNAUTHENTICATED, str(exc))
            return f"{identity.tenant} {identity.role.value}".encode()

        return grpc.unary_unary_rpc_method_handler(answer)


@contextmanager
def serving(tls: TlsFiles) -> Iterator[int]:
    server = grpc.server(ThreadPoolExecutor(2), handlers=[WhoHandler()])
    port = server.add_secure_port("127.0.0.1:0", tls.credentials())
    server.start()
    try:
        yield port
    finally:
        server.stop(0).wait()


def ask(port: int, ca: Path, client: CertificateFiles | None, name: str = "localhost") -> str:
    pair = (client.key.read_bytes(), client.certificate.read_bytes()) if client else ()
    credentials = grpc.ssl_channel_credentials(ca.read_bytes(), *pair)
    # Nothing of an earlier call's connection may answer for this one.
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.ssl_target_name_override", name)]
    with grpc.secure_channel(f"127.0.0.1:{port}", credentials, options=options) as channel:
        try:
            return str(channel.unary_unary("/x/Who")(b"", timeout=5).decode())
        except grpc.RpcError as exc:
            return str(exc.code().name)


def server_files(folder: Path, days: int = 30) -> tuple[Authority, TlsFiles]:
    from kvstore.server_credentials import TlsFiles

    authority = Authority.load_or_create(folder)
    pair = authority.issue_server(["localhost", "127.0.0.1", "::1"], days)
    return authority, TlsFiles(pair.certificate, pair.key, folder / "ca.pem")


def test_only_a_client_of_the_same_authority_is_let_in(tmp_path: Path) -> None:
    ours, tls = server_files(tmp_path / "ours")
    theirs = Authority.load_or_create(tmp_path / "theirs")
    ca = tmp_path / "ours" / "ca.pem"
    writer = ours.issue_client("acme", Role.WRITER, 30)
    stranger = theirs.issue_client("acme", Role.WRITER, 30)
    with serving(tls) as port:
        assert ask(port, ca, writer) == "acme writer"
        assert ask(port, ca, None) == "UNAVAILABLE"
        assert ask(port, ca, stranger) == "UNAVAILABLE"
        assert ask(port, tmp_path / "theirs" / "ca.pem", writer) == "UNAVAILABLE"
        assert ask(port, ca, writer, name="other-host") == "UNAVAILABLE"
        with grpc.insecure_channel(f"127.0.0.1:{port}") as plain, pytest.raises(grpc.RpcError):
            plain.unary_unary("/x/Who")(b"", timeout=5)


def test_a_server_certificate_is_no_client_and_an_expired_one_is_nobody(tmp_path: Path) -> None:
    from kvstore.certificates import CertificateFiles

    ours, tls = server_files(tmp_path)
    expired, early = outside_its_time(tmp_path, ours)
    server = CertificateFiles(tmp_path / "server.pem", tmp_path / "server.key")
    with serving(tls) as port:
        for files in (expired, early, server):
            assert ask(port, tmp_path / "ca.pem", files) == "UNAVAILABLE", files.certificate


def outside_its_time(folder: Path, ours: Authority) -> list[CertificateFiles]:
    """Client certificates that are no longer, and not yet, valid."""
    from datetime import UTC, datetime, timedelta

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key

    from kvstore.certificates import CertificateFiles

    good = ours.issue_client("acme", Role.WRITER, 30)
    issued = x509.load_pem_x509_certificate(good.certificate.read_bytes())
    signer: Any = load_pem_private_key((folder / "ca.key").read_bytes(), None)
    made = []
    for begin_days in (-20, 10):
        begin = datetime.now(UTC) + timedelta(days=begin_days)
        builder = x509.CertificateBuilder(
            issuer_name=issued.issuer,
            subject_name=issued.subject,
            public_key=issued.public_key(),
            serial_number=x509.random_serial_number(),
            not_valid_before=begin,
            not_valid_after=begin + timedelta(days=10),
            extensions=list(issued.extensions),
        )
        path = folder / f"begins-{begin_days}.pem"
        path.write_bytes(builder.sign(signer, hashes.SHA256()).public_bytes(Encoding.PEM))
        made.append(CertificateFiles(path, good.key))
    return made


def test_renewed_files_count_from_the_next_handshake_and_bad_ones_do_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ours, tls = server_files(tmp_path / "ours")
    writer = ours.issue_client("acme", Role.WRITER, 30)
    theirs = Authority.load_or_create(tmp_path / "theirs")
    theirs_pair = theirs.issue_server(["localhost"], 30)
    ca, key = tmp_path / "ours" / "ca.pem", tmp_path / "ours" / "server.key"
    good_key = key.read_bytes()
    with serving(tls) as port:
        assert ask(port, ca, writer) == "acme writer"
        key.write_bytes(theirs_pair.key.read_bytes())  # does not belong to the certificate
        assert ask(port, ca, writer) == "acme writer"
        assert "the last good files stay in force" in caplog.text
        key.write_bytes(good_key)
        ours.issue_server(["renewed-name"], 30)
        assert ask(port, ca, writer, name="renewed-name") == "acme writer"
        assert ask(port, ca, writer, name="localhost") == "UNAVAILABLE"


def test_bad_tls_files_are_refused_at_the_start(tmp_path: Path) -> None:
    from kvstore.server_credentials import TlsFiles

    server_files(tmp_path / "ours")
    certificate, key = tmp_path / "ours" / "server.pem", tmp_path / "ours" / "server.key"
    ca, other_key = tmp_path / "ours" / "ca.pem", tmp_path / "ours" / "ca.key"
    junk = tmp_path / "junk.pem"
    junk.write_text("no PEM")
    junk.chmod(0o600)
    for files, said in (
        ((certificate, tmp_path / "none"), "cannot be opened"),
        ((certificate, other_key), "(?i)mismatch"),
        ((junk, key), "TLS certificate"),
        ((certificate, junk), "TLS certificate"),
        ((certificate, key, junk), "client CA"),
        ((certificate, key, tmp_path / "none"), "cannot be opened"),
    ):
        with pytest.raises(ConfigError, match=said):
            TlsFiles(*files)
    assert TlsFiles(certificate, key, ca).credentials()
    key.chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        TlsFiles(certificate, key)


def test_an_authority_is_made_once_and_refused_when_it_is_damaged(tmp_path: Path) -> None:
    Authority.load_or_create(tmp_path / "a")
    before = (tmp_path / "a" / "ca.key").read_bytes()
    Authority.load_or_create(tmp_path / "a")
    assert (tmp_path / "a" / "ca.key").read_bytes() == before
    Authority.load_or_create(tmp_path / "b")
    (tmp_path / "b" / "ca.key").write_bytes(before)
    with pytest.raises(ConfigError, match="does not belong"):
        Authority.load_or_create(tmp_path / "b")
    (tmp_path / "b" / "ca.key").write_bytes(b"junk")
    with pytest.raises(ConfigError, match="damaged"):
        Authority.load_or_create(tmp_path / "b")


@pytest.mark.parametrize("host", ["", "a b", "a/b", "*", "a..b", "\u00e9", "x" * 64])
def test_what_is_no_host_is_refused(tmp_path: Path, host: str) -> None:
    with pytest.raises(InvalidRequest, match="--host"):
        Authority.load_or_create(tmp_path).issue_server([host], 30)


def cert(*arguments: object, code: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "kvstore.cli", "cert", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout if code == 0 else done.stderr


def test_the_command_makes_private_files_and_refuses_nonsense(tmp_path: Path) -> None:
    folder = tmp_path / "certs"
    printed = cert(folder, "--host", "cache.example", "--client", "acme:writer").split()
    assert [Path(name).name for name in printed] == [
        "ca.pem",
        "server.pem",
        "server.key",
        "client-acme-writer.pem",
        "client-acme-writer.key",
    ]
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
    assert folder.stat().st_mode & 0o777 == 0o700
    server = (folder / "server.pem").read_bytes()
    cert(folder, "--client", "other:reader")
    assert (folder / "server.pem").read_bytes() == server
    assert "TENANT:ROLE" in cert(folder, "--client", "acme", code=1)
    assert "one of reader" in cert(folder, "--client", "acme:root", code=1)
    assert "tenant" in cert(folder, "--client", "../x:writer", code=1)
    assert "--days" in cert(folder, "--days", "0", code=1)
