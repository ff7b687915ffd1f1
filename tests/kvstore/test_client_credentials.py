"""A client over the network: TLS, certificates, tokens, and what it does when they change."""

from __future__ import annotations

import os
import socket
import time
from typing import TYPE_CHECKING, Any

import pytest
from known_pages import SPEC, load, prompt, save
from server_process import ServerProcess

from kvstore.client import RemoteStore
from kvstore.connect import connect
from kvstore.errors import ConfigError
from kvstore.identity import Role
from kvstore.tenants import Quota, TenantBook, edit_tenants

pytest.importorskip("cryptography", reason="certificates are made with it")

from kvstore.certificates import Authority  # needs cryptography

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.slow


class Service:
    """A server with TLS and a tenant file, and what clients need for it."""

    def __init__(self, folder: Path) -> None:
        self.tenants = folder / "tenants.json"
        self.token = folder / "token"
        authority = Authority.load_or_create(folder / "ca")
        files = authority.issue_server(["localhost"], 2)
        self.ca = files.certificate.parent / "ca.pem"
        self.address = ""
        self.give_token("acme", Role.WRITER)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.address = f"kvstore://localhost:{port}"
        flags = [f"--listen=127.0.0.1:{port}", "--host-bytes=32MiB", "--disk-bytes=256MiB"]
        flags += [f"--tls-cert={files.certificate}", f"--tls-key={files.key}"]
        self.server = ServerProcess(folder / "store", *flags, f"--tenants-file={self.tenants}")

    def give_token(self, tenant: str, role: Role) -> None:
        """A new token in the client's file; the tenant's earlier ones end."""
        given = []

        def edit(book: TenantBook) -> TenantBook:
            if any(name == tenant for name in book.tenants):
                book = book.without_tenant(tenant)
            book, token = book.with_tenant(tenant, Quota()).with_token(tenant, role, 0.0, None)
            given.append(token)
            return book

        edit_tenants(self.tenants, edit, create=not self.tenants.exists())
        aside = self.token.with_suffix(".new")
        descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(given[0] + "\n")
        os.rename(aside, self.token)

    def connect(self, **settings: Any) -> RemoteStore:
        given = {"ca_file": self.ca, "token_file": self.token, "lookup_deadline_s": 5.0}
        store = connect(self.address, **(given | settings))
        assert isinstance(store, RemoteStore)
        return store


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    service = Service(tmp_path)
    with service.server:
        service.server.start()
        yield service


def test_a_client_with_a_token_works_over_tls(service: Service) -> None:
    with service.connect() as store:
        session = store.session(SPEC)
        assert session.wait_open(5.0)
        assert save(session, prompt(1, 5)) == 5
        assert load(session, prompt(1, 5)) == 5


def test_who_is_not_known_gets_misses(service: Service, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong"
    wrong.write_text("x" * 43)
    wrong.chmod(0o600)
    for settings in ({"token_file": None}, {"token_file": wrong}, {"ca_file": None}):
        with service.connect(**settings) as store:
            session = store.session(SPEC)
            assert not session.wait_open(0.5)
            assert load(session, prompt(1, 5)) == 0
            assert save(session, prompt(1, 5)) == 0


def test_a_reader_reads_and_stores_nothing(service: Service) -> None:
    with service.connect() as store:
        save(store.session(SPEC), prompt(1, 5))
        service.give_token("acme", Role.READER)
        time.sleep(0.1)
        with service.connect() as reader:
            session = reader.session(SPEC)
            assert session.wait_open(10.0)
            assert load(session, prompt(1, 5)) == 5
            assert save(session, prompt(2, 5)) == 0


def test_a_token_may_change_under_a_client_that_runs(service: Service) -> None:
    with service.connect() as store:
        session = store.session(SPEC)
        assert save(session, prompt(1, 5)) == 5
        service.give_token("acme", Role.WRITER)
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline - 4:  # until the old one is refused, and beyond
            assert load(session, prompt(1, 5)) in (0, 5)
            time.sleep(0.1)
        assert load(session, prompt(1, 5)) == 5


def test_bad_files_are_refused_at_once(service: Service, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="ca_file"):
        service.connect(ca_file=tmp_path / "none")
    service.token.chmod(0o644)
    with pytest.raises(ConfigError):
        service.connect()
