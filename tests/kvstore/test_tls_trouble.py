"""TLS that does not come about: the command and the client's log say what it may be."""

from __future__ import annotations

import json
import logging
import socket
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
from known_pages import SPEC
from server_process import ServerProcess

from kvstore.connect import connect

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.slow


def run(*arguments: object, code: int = 0) -> str:
    command = [sys.executable, "-m", "kvstore.cli", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout if code == 0 else done.stderr


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    assert isinstance(port, int)
    return port


@dataclass(frozen=True, slots=True)
class Service:
    """A server that wants client certificates, and one without TLS."""

    folder: Path
    port: int
    plain_port: int
    log: Path


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("tls")
    certs, tenants = folder / "certs", folder / "tenants.json"
    run("cert", certs, "--host", "localhost", "--client", "acme:admin")
    run("cert", folder / "other", "--host", "localhost")
    run("tenant", "add", tenants, "acme", "--role", "admin", "--token-file", folder / "token")
    port, plain = free_port(), free_port()
    sizes = ("--host-bytes=16MiB", "--disk-bytes=64MiB")
    secure = (
        *(f"--tls-cert={certs}/server.pem", f"--tls-key={certs}/server.key"),
        *(f"--tls-client-ca={certs}/ca.pem", f"--tenants-file={tenants}"),
    )
    made = ServerProcess(folder / "a", f"--listen=localhost:{port}", *secure, *sizes)
    other = ServerProcess(folder / "b", f"--listen=localhost:{plain}", "--insecure-network", *sizes)
    with made, other:
        made.start()
        other.start()
        yield Service(folder, port, plain, made.log)


@pytest.mark.parametrize(
    ("where", "access", "said"),
    [
        ("localhost:{port}", ("--ca={f}/other/ca.pem",), "not from the CA"),
        ("127.0.0.1:{port}", ("--ca={f}/certs/ca.pem",), "does not name 127.0.0.1"),
        ("localhost:{port}", ("--ca={f}/certs/ca.pem",), "may want a client certificate"),
        ("localhost:{port}", ("--insecure-network",), "may want TLS"),
        ("localhost:{plain}", ("--ca={f}/certs/ca.pem",), "does not speak TLS"),
    ],
)
def test_the_command_says_what_is_wrong_with_tls(
    service: Service, where: str, access: tuple[str, ...], said: str
) -> None:
    address = "kvstore://" + where.format(port=service.port, plain=service.plain_port)
    error = run("stats", address, *(each.format(f=service.folder) for each in access), code=1)
    assert said in error
    assert "is it running" not in error
    assert error.count("\n") == 1, "gRPC's own lines stay out"


def test_an_engine_says_it_in_its_log(service: Service, caplog: pytest.LogCaptureFixture) -> None:
    ca = service.folder / "other" / "ca.pem"
    with connect(f"kvstore://localhost:{service.port}", ca_file=ca, open_wait_s=5.0) as store:
        session = store.session(SPEC)
        with session.match(range(8)) as miss:
            assert miss.pages == 0
    said = [each.message for each in caplog.records if each.levelno >= logging.WARNING]
    assert any("not from the CA that this client believes" in each for each in said), said


def test_tenant_list_asks_a_server_behind_client_certificates(service: Service) -> None:
    certs = service.folder / "certs"
    access = ("--ca", certs / "ca.pem", "--cert", certs / "client-acme-admin.pem")
    access += ("--key", certs / "client-acme-admin.key")
    server = ("--server", f"kvstore://localhost:{service.port}")
    found = run("tenant", "list", service.folder / "tenants.json", *server, *access, "--json")
    (tenant,) = json.loads(found)["tenants"]
    assert tenant["usage"]["disk_bytes"] == 0


def test_the_servers_log_has_no_lines_of_grpc(service: Service) -> None:
    address = f"kvstore://localhost:{service.port}"
    run("stats", address, "--insecure-network", code=1)  # a handshake that fails
    lines = service.log.read_text().splitlines()
    assert lines
    assert not [line for line in lines if "ssl_transport" in line]
