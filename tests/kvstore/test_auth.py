"""Credentials to identities, without a network: tokens, certificates, rates, listen addresses."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvstore.auth import (
    AnonymousAuthorizer,
    CredentialAuthorizer,
    authorizer_for,
    certificate_name,
    check_listen,
)
from kvstore.call_budget import CallBudgets, TooManyCalls
from kvstore.errors import ConfigError, InvalidRequest
from kvstore.identity import LocalAuthorizer, NotAuthenticated, Role
from kvstore.tenant_watch import TenantWatch
from kvstore.tenants import Quota, TenantBook, edit_tenants

if TYPE_CHECKING:
    from pathlib import Path

NOW = 1_000_000.0


class Call:
    """What an authorizer sees of a call."""

    def __init__(self, *authorization: str | bytes, names: tuple[str, ...] = ()) -> None:
        self._metadata = [("user-agent", "test")]
        self._metadata += [("authorization", value) for value in authorization]  # type: ignore[misc]
        self._names = [name.encode() for name in names]

    def invocation_metadata(self) -> list[tuple[str, str]]:
        return self._metadata

    def auth_context(self) -> dict[str, list[bytes]]:
        return {"transport_security_type": [b"ssl"], "peer_uri": self._names}


class Clock:
    """Time that a test moves."""

    def __init__(self, now: float) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


class Setup:
    """A tenant file with one writer, its watch, and an authorizer on a clock of its own."""

    def __init__(self, folder: Path, *, certificates: bool = False, quota: Quota | None = None):
        self.path = folder / "tenants.json"
        self.clock = Clock(NOW)
        self.look = Clock(0.0)
        self.token = ""
        self.edit(lambda book: book.with_tenant("acme", quota or Quota()))
        self.token = self.add_token(Role.WRITER, 3600)
        self.authorizer = CredentialAuthorizer(
            TenantWatch(self.path, self.look), certificates=certificates, wall_clock=self.clock
        )

    def edit(self, edit: object) -> None:
        edit_tenants(self.path, edit, create=True)  # type: ignore[arg-type]

    def add_token(self, role: Role, ttl_s: float | None) -> str:
        tokens = []

        def edit(book: TenantBook) -> TenantBook:
            changed, token = book.with_token("acme", role, self.clock.now, ttl_s)
            tokens.append(token)
            return changed

        self.edit(edit)
        return tokens[0]


def test_a_good_token_names_tenant_and_role(tmp_path: Path) -> None:
    setup = Setup(tmp_path)
    for scheme in ("Bearer ", "bearer   "):
        identity = setup.authorizer.identify(Call(scheme + setup.token))
        assert (identity.tenant, identity.role) == ("acme", Role.WRITER)


def test_everything_else_is_refused_and_says_no_secret(tmp_path: Path) -> None:
    setup = Setup(tmp_path)
    token = setup.token
    for call in (
        Call(),
        Call(""),
        Call("Bearer"),
        Call("Bearer "),
        Call(token),
        Call("Basic " + token),
        Call("Bearer " + token + " "),
        Call("Bearer " + token[:-1] + "?"),
        Call("Bearer " + token[:-5] + "AAAAA"),
        Call(b"Bearer " + token.encode()),
        Call("Bearer " + token, "Bearer " + token),
        Call("Bearer " + "x" * 8000),
        Call(names=("kvstore://acme/writer",)),
    ):
        with pytest.raises(NotAuthenticated) as refused:
            setup.authorizer.identify(call)
        assert token.rpartition(".")[2][:8] not in str(refused.value)


def test_an_expired_token_is_refused(tmp_path: Path) -> None:
    setup = Setup(tmp_path)
    setup.clock.now += 3600
    with pytest.raises(NotAuthenticated, match="has expired"):
        setup.authorizer.identify(Call("Bearer " + setup.token))


def test_a_new_token_is_good_at_once_and_a_revoked_one_bad_within_a_second(tmp_path: Path) -> None:
    setup = Setup(tmp_path)
    new = setup.add_token(Role.READER, None)
    assert setup.authorizer.identify(Call("Bearer " + new)).role is Role.READER
    setup.edit(lambda book: book.without_tenant("acme"))
    setup.look.now += 1.0
    for token in (new, setup.token):
        with pytest.raises(NotAuthenticated):
            setup.authorizer.identify(Call("Bearer " + token))


def test_a_certificate_names_tenant_and_role(tmp_path: Path) -> None:
    alone = CredentialAuthorizer(None, certificates=True)
    name = certificate_name("acme", Role.READER)
    identity = alone.identify(Call(names=("https://elsewhere", name)))
    assert (identity.tenant, identity.role) == ("acme", Role.READER)
    assert alone.quota("acme") == Quota()
    with pytest.raises(NotAuthenticated, match="knows no tokens"):
        alone.identify(Call("Bearer " + "x" * 60, names=(name,)))
    with_file = Setup(tmp_path, certificates=True)
    assert with_file.authorizer.identify(Call(names=(name,))).role is Role.READER
    with pytest.raises(NotAuthenticated, match="not in this server's tenant file"):
        with_file.authorizer.identify(Call(names=("kvstore://other/reader",)))


@pytest.mark.parametrize(
    "names",
    [
        (),
        ("https://acme/writer",),
        ("kvstore:acme/writer",),
        ("kvstore://",),
        ("kvstore://acme",),
        ("kvstore://acme/root",),
        ("kvstore://acme/writer/more",),
        ("kvstore://_acme/writer",),
        ("kvstore://../writer",),
        ("kvstore://acme/writer", "kvstore://acme/admin"),
    ],
)
def test_a_certificate_with_another_name_is_nobody(names: tuple[str, ...]) -> None:
    with pytest.raises(NotAuthenticated):
        CredentialAuthorizer(None, certificates=True).identify(Call(names=names))


def test_a_token_beside_a_certificate_must_be_good_and_of_the_same_tenant(tmp_path: Path) -> None:
    setup = Setup(tmp_path, certificates=True)
    bearer = "Bearer " + setup.token
    same = setup.authorizer.identify(Call(bearer, names=("kvstore://acme/admin",)))
    assert same.role is Role.WRITER
    for call in (
        Call(bearer, names=("kvstore://other/writer",)),
        Call("Bearer bad", names=("kvstore://acme/writer",)),
    ):
        with pytest.raises(NotAuthenticated):
            setup.authorizer.identify(call)


def test_nothing_to_check_against_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="neither"):
        CredentialAuthorizer(None, certificates=False)


def test_a_tenant_has_only_its_calls_a_second(tmp_path: Path) -> None:
    setup = Setup(tmp_path, quota=Quota(calls_per_s_max=5))
    call = Call("Bearer " + setup.token)

    def flood() -> None:
        for _ in range(500):
            setup.authorizer.identify(call)

    with pytest.raises(TooManyCalls, match="5 calls a second"):
        flood()


def test_a_budget_refills_steadily_and_holds_one_second() -> None:
    clock = Clock(0.0)
    budgets = CallBudgets(clock)

    def calls() -> int:
        for done in range(1000):
            try:
                budgets.charge("acme", 10)
            except TooManyCalls:
                return done
        return 1000

    assert calls() == 10
    clock.now += 0.5
    assert calls() == 5
    clock.now += 3600
    assert calls() == 10
    budgets.charge("other", 10)
    budgets.charge("acme", None)
    with pytest.raises(TooManyCalls) as refused:
        budgets.charge("acme", 10)
    assert 0 < refused.value.retry_after_s <= 0.1
    with pytest.raises(TooManyCalls):
        budgets.charge("none", 0)


def test_who_decides_follows_from_address_and_credentials(tmp_path: Path) -> None:
    setup = Setup(tmp_path)
    for listen in ("unix:/run/kv.sock", "10.0.0.1:7070"):
        for file, certificates in ((setup.path, False), (None, True), (setup.path, True)):
            found = authorizer_for(listen, file, certificates=certificates)
            assert isinstance(found, CredentialAuthorizer)
    assert isinstance(authorizer_for("unix:/x", None, certificates=False), LocalAuthorizer)
    anyone = authorizer_for("10.0.0.1:7070", None, certificates=False)
    assert isinstance(anyone, AnonymousAuthorizer)
    assert anyone.identify(Call()).role is Role.WRITER


@pytest.mark.parametrize("listen", ["127.0.0.1:7070", "[::1]:7070", "0.0.0.0:7070", "host:1"])
def test_an_address_that_others_reach_needs_tls_and_credentials(listen: str) -> None:
    for tls, credentials, missing in (
        (False, False, "TLS and credentials"),
        (True, False, "no credentials"),
        (False, True, "no TLS"),
    ):
        with pytest.raises(ConfigError, match=missing):
            check_listen(listen, tls=tls, credentials=credentials, insecure_network=False)
        said = check_listen(listen, tls=tls, credentials=credentials, insecure_network=True)
        assert listen in said
    assert not check_listen(listen, tls=True, credentials=True, insecure_network=False)


def test_a_unix_socket_with_a_path_needs_nothing_and_an_abstract_one_is_refused() -> None:
    given = {"tls": False, "credentials": False, "insecure_network": False}
    assert not check_listen("unix:/run/kvstore/kvstore.sock", **given)
    with pytest.raises(ConfigError, match="no owner"):
        check_listen("unix-abstract:kvstore", **given)


def test_a_certificate_is_made_for_a_good_name_only() -> None:
    with pytest.raises(InvalidRequest):
        certificate_name("a/b", Role.ADMIN)


@pytest.mark.parametrize("name", ["kvstore://public/writer", "kvstore://acme/publisher"])
def test_certificates_of_public_are_publishers_only(tmp_path: Path, name: str) -> None:
    authorizer = CredentialAuthorizer(None, certificates=True)
    with pytest.raises(NotAuthenticated, match="publisher"):
        authorizer.identify(Call(names=(name,)))
    setup = Setup(tmp_path, certificates=True)
    setup.edit(lambda book: book.with_tenant("public", Quota()))
    setup.look.now += 10.0
    published = setup.authorizer.identify(Call(names=("kvstore://public/publisher",)))
    assert (published.tenant, published.role) == ("public", Role.PUBLISHER)


def test_without_a_tenant_file_nobody_is_public() -> None:
    authorizer = CredentialAuthorizer(None, certificates=True)
    with pytest.raises(NotAuthenticated, match="has to be in a tenant file"):
        authorizer.identify(Call(names=("kvstore://public/publisher",)))
    assert not authorizer.quotas()
