"""`kvstore serve` and who may reach it: bind rule, bad credential files, secrets in no output."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvstore.identity import Role
from kvstore.tenants import Quota, TenantBook, edit_tenants

grpc = pytest.importorskip("grpc", reason="the service needs grpcio")
pytest.importorskip("cryptography", reason="certificates are made with cryptography")

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.slow

SMALL = ("--host-bytes", "8MiB", "--disk-bytes", "32MiB")
START_S = 30.0


def command(folder: Path, *arguments: object) -> list[str]:
    return [sys.executable, "-m", "kvstore.cli", "serve", str(folder), *SMALL, *map(str, arguments)]


def check(folder: Path, *arguments: object) -> tuple[int, str]:
    """Exit code and stderr of `--check-config`; it must leave no directory."""
    done = subprocess.run(
        command(folder, *arguments, "--check-config"), capture_output=True, text=True, timeout=60
    )
    assert not (folder / "store.json").exists()
    return done.returncode, done.stderr


def make_certificates(folder: Path) -> list[str]:
    """Flags with which a server may listen anywhere."""
    from kvstore.certificates import Authority

    authority = Authority.load_or_create(folder)
    pair = authority.issue_server(["localhost"], 30)
    authority.issue_client("acme", Role.ADMIN, 30)
    return ["--tls-cert", str(pair.certificate), "--tls-key", str(pair.key)]


def make_tenants(path: Path) -> str:
    tokens = []

    def edit(book: TenantBook) -> TenantBook:
        changed, token = book.with_tenant("acme", Quota()).with_token("acme", Role.ADMIN, 0.0, None)
        tokens.append(token)
        return changed

    edit_tenants(path, edit, create=True)
    return tokens[0]


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::]:0", "127.0.0.1:0", "localhost:0"])
def test_a_network_address_alone_is_refused(tmp_path: Path, listen: str) -> None:
    code, said = check(tmp_path / "kv", "--listen", listen)
    assert code == 1
    assert "no TLS and credentials" in said
    assert check(tmp_path / "kv", "--listen", listen, "--insecure-network")[0] == 0


def test_credentials_that_are_incomplete_or_bad_are_refused(tmp_path: Path) -> None:
    tls = make_certificates(tmp_path / "certs")
    make_tenants(tmp_path / "tenants.json")
    short = tmp_path / "short.json"
    short.write_text("")
    short.chmod(0o600)
    network = ["--listen", "localhost:0"]
    ca = ["--tls-client-ca", str(tmp_path / "certs" / "ca.pem")]
    tenants = ["--tenants-file", str(tmp_path / "tenants.json")]
    for flags in (
        [*network, *tls, *ca],
        [*network, *tls, *tenants],
        [*network, *tls, *ca, *tenants],
    ):
        assert check(tmp_path / "kv", *flags) == (0, ""), flags
    assert check(tmp_path / "kv", *tenants)[0] == 0, "also on a Unix socket"
    for flags, words in (
        ([*network, *tls], "no credentials"),
        ([*network, *tenants], "no TLS"),
        ([*network, *tls[:2], *tenants], "give both or neither"),
        ([*network, *ca], "need tls_cert"),
        ([*tls, *ca], "a Unix socket has no TLS"),
        ([*network, *tls, "--tenants-file", str(short)], "is not JSON"),
        ([*network, *tls, "--tenants-file", str(tmp_path / "none")], "cannot be opened"),
        ([*network, "--tls-cert", tls[1], "--tls-key", tls[1], *tenants], "TLS"),
    ):
        code, said = check(tmp_path / "kv", *flags)
        assert (code, words in said) == (1, True), (flags, said)


@contextmanager
def serving(folder: Path, *arguments: object) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """A server process, and the lines of its log so far; it is ended well at the end."""
    process = subprocess.Popen(
        command(folder, *arguments, "--log-json"), stderr=subprocess.PIPE, text=True
    )
    lines: list[str] = []
    try:
        assert process.stderr is not None
        while not lines or "serving" not in lines[-1]:
            line = process.stderr.readline()
            assert line, "".join(lines)
            lines.append(line)
        yield process, lines
        process.terminate()
        lines += process.stderr.readlines()
        assert process.wait(START_S) == 0, "".join(lines)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        if process.stderr is not None:
            process.stderr.close()


def listening_on_network(pid: int) -> list[str]:
    """TCP addresses that this process listens at, from the kernel's tables."""
    inodes = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            inodes.add(os.readlink(entry))
        except OSError:
            continue
    found = []
    for table in ("tcp", "tcp6"):
        for row in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = row.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                found.append(fields[1])
    return found


def test_by_default_nothing_listens_on_a_network(tmp_path: Path) -> None:
    with serving(tmp_path / "kv") as (process, _):
        assert listening_on_network(process.pid) == []
        assert (tmp_path / "kv").stat().st_mode & 0o777 == 0o700
        assert (tmp_path / "kv" / "kvstore.sock").stat().st_mode & 0o777 == 0o600


def ask(address: str, token: str, credentials: Any = None) -> str:
    """The status of Stats with this token."""
    open_channel = grpc.secure_channel if credentials is not None else grpc.insecure_channel
    more = (credentials,) if credentials is not None else ()
    with open_channel(address, *more) as channel:
        stats = channel.unary_unary("/kvstore.v1.KVStore/Stats")
        metadata = (("authorization", f"Bearer {token}"),) if token else ()
        try:
            stats(b"", timeout=20, metadata=metadata)
        except grpc.RpcError as exc:
            return str(exc.code().name)
        return "OK"


def test_a_tenant_file_counts_on_a_unix_socket_and_no_output_holds_a_token(tmp_path: Path) -> None:
    token = make_tenants(tmp_path / "tenants.json")
    secret = token.rpartition(".")[2]
    flags = ("--tenants-file", tmp_path / "tenants.json")
    with serving(tmp_path / "kv", *flags) as (process, lines):
        address = f"unix:{tmp_path / 'kv' / 'kvstore.sock'}"
        assert ask(address, token) == "OK"
        assert ask(address, "") == "UNAUTHENTICATED"
        assert ask(address, token[:-1]) == "UNAUTHENTICATED"
        for name in ("cmdline", "environ"):
            assert secret not in Path(f"/proc/{process.pid}/{name}").read_text()
    assert secret not in "".join(lines)
    assert all(json.loads(line) for line in lines)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_insecure_network_is_said_at_start_and_makes_nobody_an_operator(tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    with serving(tmp_path / "kv", "--listen", address, "--insecure-network") as (_, lines):
        assert ask(address, "") == "PERMISSION_DENIED"
    assert any("insecure_network" in line for line in lines)


def test_over_tls_a_client_needs_a_certificate_and_a_token_beside_it_must_be_good(
    tmp_path: Path,
) -> None:
    tls = make_certificates(tmp_path / "certs")
    token = make_tenants(tmp_path / "tenants.json")
    ca, client = tmp_path / "certs" / "ca.pem", tmp_path / "certs" / "client-acme-admin"
    port = free_port()
    flags = ("--listen", f"localhost:{port}", *tls, "--tls-client-ca", ca)
    flags += ("--tenants-file", tmp_path / "tenants.json")
    with serving(tmp_path / "kv", *flags) as (process, _):
        assert listening_on_network(process.pid), "the table is read rightly: this one is there"
        key, certificate = (client.with_suffix(end).read_bytes() for end in (".key", ".pem"))
        certified = grpc.ssl_channel_credentials(ca.read_bytes(), key, certificate)
        assert ask(f"localhost:{port}", token, certified) == "OK"
        assert ask(f"localhost:{port}", "", certified) == "OK"
        assert ask(f"localhost:{port}", "wrong", certified) == "UNAUTHENTICATED"
        bare = grpc.ssl_channel_credentials(ca.read_bytes())
        assert ask(f"localhost:{port}", token, bare) == "UNAVAILABLE"
        assert ask(f"localhost:{port}", token) == "UNAVAILABLE"
