"""Tenants of one server, over its wire: quotas, the public tenant, and what nobody may learn."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from known_pages import PAGE_BYTES, SPEC, content, load, prompt, save
from raw_client import wait_until

pytest.importorskip("grpc", reason="the service needs grpcio")

from tenant_server import TenantServer, evict_request

from kvstore import kvstore_pb2 as messages
from kvstore._version import __version__
from kvstore.client_channel import CallFailed, Failure
from kvstore.errors import ConfigError, InvalidRequest
from kvstore.identity import Role
from kvstore.tenants import Quota, load_tenants

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvstore.interface import SessionLike

pytestmark = pytest.mark.slow

MIB = 1 << 20


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TenantServer]:
    folder = tmp_path_factory.mktemp("tenants")
    with TenantServer(folder, {"a": Quota(), "b": Quota(), "public": Quota()}) as made:
        for tenant in ("a", "b"):
            made.token(tenant)
        made.token("public", Role.PUBLISHER)
        yield made


_seeds = iter(range(1000))


def open_request() -> messages.OpenRequest:
    return messages.OpenRequest(client_version=__version__, spec_json=SPEC.to_json())


def refusal(service: TenantServer, tenant: str, method: str, request: object) -> CallFailed:
    with pytest.raises(CallFailed) as refused:
        service.ask(tenant, Role.WRITER, method, request)
    return refused.value


def stored_by(session: SessionLike, pages: int = 4) -> int:
    """The seed of a prompt that this session has stored."""
    seed = next(_seeds)
    assert save(session, prompt(seed, pages)) == pages  # type: ignore[arg-type]
    return seed


@pytest.mark.parametrize("shared_memory", [True, False])
def test_what_a_publisher_stores_every_tenant_reads(
    service: TenantServer, shared_memory: bool
) -> None:
    publisher = service.connect("public", Role.PUBLISHER).session(SPEC)
    client = service.connect("a", shared_memory=shared_memory)
    reader = client.session(SPEC)  # it has mapped what there was before
    seed = stored_by(publisher)
    assert load(reader, prompt(seed, 4)) == 4  # type: ignore[arg-type] # compares the bytes
    with client.session(SPEC, salt=b"apart") as salted, salted.match(prompt(seed, 4)) as miss:
        assert miss.pages == 0, "a salt asks for prompts to be kept apart"


def test_a_session_can_do_without_public_pages(service: TenantServer) -> None:
    seed = stored_by(service.connect("public", Role.PUBLISHER).session(SPEC))
    client = service.connect("a")
    for public, pages in ((True, 4), (False, 0)):
        with client.session(SPEC, public=public) as session:
            assert load(session, prompt(seed, 4)) == pages  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="public: 'no' given"):
        client.session(SPEC, public="no")  # type: ignore[arg-type]


def test_public_pages_are_staged_from_disk_for_a_reader(service: TenantServer) -> None:
    publisher = service.connect("public", Role.PUBLISHER).session(SPEC)
    seed = stored_by(publisher)
    assert publisher.flush(10.0)
    state = service.store.state
    with state.lock:
        root = service.store.root(SPEC.namespace, "public")
        found = state.index.match(root, prompt(seed, 4).tobytes(), None)
        state.leave_host(found)
    with service.connect("b").session(SPEC) as reader, reader.match(prompt(seed, 4)) as hit:
        assert hit.tiers == ["disk"] * 4
        assert hit.stage(5.0) == 4
        assert [bytes(each) for each in hit.views()] == [
            content(prompt(seed, 4), page) for page in range(4)
        ]
        assert hit.valid()


def test_a_tenant_may_store_its_own_copy_and_gets_the_longer_chain(service: TenantServer) -> None:
    publisher = service.connect("public", Role.PUBLISHER).session(SPEC)
    mine = service.connect("a").session(SPEC)
    seed = stored_by(publisher, 2)
    with mine.match(prompt(seed, 4)) as hit:
        assert hit.pages == 2
    assert save(mine, prompt(seed, 4)) == 4, "the whole prompt: nothing hangs below public pages"  # type: ignore[arg-type]
    with mine.match(prompt(seed, 4)) as hit:
        assert hit.pages == 4
    with service.connect("b").session(SPEC) as other, other.match(prompt(seed, 4)) as hit:
        assert hit.pages == 2, "what a tenant adds is its own"


def test_public_is_a_tenant_to_list_and_evict(service: TenantServer) -> None:
    publisher = service.connect("public", Role.PUBLISHER).session(SPEC)
    mine = service.connect("a").session(SPEC)
    public_seed, own_seed = stored_by(publisher), stored_by(mine)
    listed = service.ask("a", Role.ADMIN, "List", messages.ListRequest(limit=1000))
    assert "public" in {each["tenant"] for each in json.loads(listed.json)["namespaces"]}
    done = service.ask("a", Role.ADMIN, "Evict", evict_request(tenant="public"))
    assert done.pages > 0
    assert load(mine, prompt(public_seed, 4)) == 0  # type: ignore[arg-type]
    assert load(mine, prompt(own_seed, 4)) == 4  # type: ignore[arg-type]


def test_without_public_in_the_tenant_file_there_is_none(tmp_path: Path) -> None:
    with TenantServer(tmp_path, {"a": Quota()}) as small:
        session = small.connect("a").session(SPEC)
        assert session.wait_open(10.0)
        (opened,) = small.registry.sessions()
        assert opened.session.public_root is None


def test_evict_by_writer_takes_that_writers_pages_with_all_below_and_nobody_elses(
    service: TenantServer,
) -> None:
    seed = next(_seeds)
    whole, head = prompt(seed, 6), prompt(seed, 3)
    good = service.connect("a").session(SPEC, writer="good")
    bad = service.connect("a").session(SPEC, writer="bad")
    other = service.connect("b").session(SPEC, writer="bad-too")
    assert save(other, whole) == 6  # type: ignore[arg-type]
    assert save(good, prompt(seed, 2)) == 2  # type: ignore[arg-type]
    with bad.reserve(prompt(seed, 2)) as run:
        assert (run.count, run.reason) == (0, "present"), "the first stays"
    assert save(bad, head) == 1  # type: ignore[arg-type]
    assert save(good, whole) == 3, "below the bad one"  # type: ignore[arg-type]
    done = service.ask("b", Role.ADMIN, "Evict", evict_request(tenant="a", writer="bad"))
    assert done.pages == 4
    assert load(good, whole) == 2  # type: ignore[arg-type]
    assert load(other, whole) == 6  # type: ignore[arg-type]
    nothing = service.ask("b", Role.ADMIN, "Evict", evict_request(tenant="b", writer="bad"))
    assert nothing.pages == 0


def test_names_of_another_tenant_mean_nothing_in_any_field(service: TenantServer) -> None:
    """A token of b, and a's names wherever a request has room for one."""
    mine = service.connect("a").session(SPEC, writer="a")
    seed = stored_by(mine)
    client = service.connect("b")
    for given in ({"salt": b"a"}, {"writer": "a"}, {"salt": b"kvstore://a/writer"}):
        with client.session(SPEC, **given) as session:  # type: ignore[arg-type]
            assert load(session, prompt(seed, 4)) == 0  # type: ignore[arg-type]
            with session.match(prompt(seed, 4), extras={0: b"a"}) as hit:
                assert hit.pages == 0
    (held,) = [each for each in service.registry.sessions() if each.session.tenant == "a"][-1:]
    for method, request in {
        "Match": messages.MatchRequest(session=held.name, tokens=prompt(seed, 4).tobytes()),
        "Pin": messages.PinRequest(session=held.name, tokens=prompt(seed, 4).tobytes(), ttl_s=9),
        "Close": messages.CloseRequest(session=held.name),
        "Release": messages.ReleaseRequest(session=held.name, match=[1]),
    }.items():
        assert refusal(service, "b", method, request).failure is Failure.UNKNOWN
    for method, request in {
        "Evict": evict_request(tenant="a"),
        "Explain": messages.ExplainRequest(tenant="a", tokens=prompt(seed, 4).tobytes()),
        "List": messages.ListRequest(),
    }.items():
        assert refusal(service, "b", method, request).failure is Failure.DENIED
    assert load(mine, prompt(seed, 4)) == 4  # type: ignore[arg-type]


def test_who_is_no_operator_learns_only_of_its_own_tenant(service: TenantServer) -> None:
    mine = service.connect("a").session(SPEC)
    stored_by(mine)
    before = service.stats("b", Role.METRICS)
    stored_by(mine)
    mine.pin(prompt(0, 1), 5.0)
    extra = service.connect("a").session(SPEC)
    assert extra.wait_open(10.0)
    found = service.stats("b", Role.METRICS)
    assert found == before, "what another tenant does changes no number"
    assert [each["tenant"] for each in found["tenants"]] == ["b"]
    assert not any(found[name] for name in ("tiers", "counters", "service", "directory"))
    all_of_it = service.stats("b", Role.ADMIN)
    assert {"a", "b", "public"} <= {each["tenant"] for each in all_of_it["tenants"]}
    (of_a,) = [each for each in all_of_it["tenants"] if each["tenant"] == "a"]
    assert of_a["host_bytes"] >= 8 * PAGE_BYTES
    assert of_a["sessions"] >= 2
    assert of_a["host_share_bytes"] > 0


def test_sessions_reservations_and_pins_are_refused_with_numbers(tmp_path: Path) -> None:
    bounds = Quota(sessions_max=2, reservations_max=3, pinned_pages_max=5)
    with TenantServer(tmp_path, {"a": bounds, "b": Quota()}) as small:
        sessions = [small.connect("a").session(SPEC) for _ in range(2)]
        assert all(each.wait_open(10.0) for each in sessions)
        said = refusal(small, "a", "Open", open_request())
        assert said.failure is Failure.BUSY
        assert "quota: 2 sessions of this tenant are open; sessions_max is 2" in str(said)

        held = [small.registry.sessions()[0], small.registry.sessions()[1]]
        runs = [sessions[n % 2].reserve(prompt(900 + n, 1)) for n in range(3)]
        assert [run.count for run in runs] == [1, 1, 1]
        for each in held:
            request = messages.ReserveRequest(
                session=each.name, tokens=prompt(950, 1).tobytes(), deadline_s=1
            )
            said = refusal(small, "a", "Reserve", request)
            assert "quota: 3 reservations of this tenant are open; reservations_max is 3" in str(
                said
            )
        with sessions[0].reserve(prompt(950, 1)) as run:
            assert run.reason.startswith("quota: 3 reservations of this tenant are open")
        third = small.connect("a").session(SPEC)
        assert not third.wait_open(1.0)
        with third.reserve(prompt(950, 1)) as run:
            assert run.reason.startswith("quota: 2 sessions of this tenant are open")
        third.close()
        runs[0].abort()
        runs[1].commit()
        assert small.ask("a", Role.WRITER, "Reserve", request).count == 1

        assert save(sessions[0], prompt(800, 8)) == 8  # type: ignore[arg-type]
        name = held[0].name if held[0].session.state is small.store.state else b""
        pin = messages.PinRequest(session=name, tokens=prompt(800, 5).tobytes(), ttl_s=60)
        assert small.ask("a", Role.WRITER, "Pin", pin).pages == 5
        pin.tokens = prompt(800, 8).tobytes()
        assert "quota: 5 pages are pinned, 8 would be" in str(refusal(small, "a", "Pin", pin))

        other = small.connect("b").session(SPEC)
        assert other.wait_open(10.0)
        assert save(other, prompt(800, 8)) == 8  # type: ignore[arg-type]
        assert other.pin(prompt(800, 8), 60.0) == 8
        runs[2].abort()
        sessions[0].close()
        small.ask("a", Role.WRITER, "Open", open_request())


@pytest.mark.parametrize("each", [1, 6])
def test_leases_of_one_tenant_are_bounded_together_and_others_find_room(
    tmp_path: Path, each: int
) -> None:
    """T21: one tenant stores all it can and leases all it may, in several sessions. With a lease
    on every sixth chain no extent is without one, though few bytes are leased."""
    with TenantServer(tmp_path, {"a": Quota(), "b": Quota()}) as small:
        sessions = [small.connect("a").session(SPEC) for _ in range(6)]
        matches = []
        for number in range(240):
            session = sessions[number % 6]
            save(session, prompt(number, 4))  # type: ignore[arg-type]
            if number % each == 0:
                matches.append(session.match(prompt(number, 4)))
        held = small.registry.held_by("a")["leased_bytes"]
        share = small.store.state.tenancy.host.share("a")
        assert held <= share
        if each == 1:
            assert held > share // 2
            assert matches[-1].pages == 0, "later ones are refused: a miss"
            assert matches[-1].reason == "lease limit of the tenant"
            assert matches[0].reason == ""
        other = small.connect("b").session(SPEC)
        seeds = range(1000, 1080)
        for seed in seeds:
            wait_until(lambda seed=seed: _saved(small, other, seed), 20.0)
        assert sum(load(other, prompt(seed, 4)) for seed in seeds) == 320  # type: ignore[arg-type]
        if each != 1:
            assert small.registry.held_by("a")["leased_bytes"] < held
        for match in matches:
            match.release()


def _saved(small: TenantServer, session: SessionLike, seed: int) -> bool:
    """Try to store a prompt; the server's own loop would sweep meanwhile."""
    save(session, prompt(seed, 4), wait_s=0.2)  # type: ignore[arg-type]
    small.registry.sweep()
    with session.match(prompt(seed, 4)) as hit:
        return hit.pages == 4


def test_a_quota_changes_while_the_server_runs_and_a_bad_one_does_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with TenantServer(tmp_path, {"a": Quota(), "b": Quota()}) as small:
        small.connect("a").session(SPEC)
        small.set_quota("a", Quota(sessions_max=7))
        wait_until(lambda: small.server.quotas()["a"].sessions_max == 7)
        assert small.store.state.tenancy.quotas["a"].sessions_max == 7
        with caplog.at_level(logging.ERROR, "kvstore.auth"):
            small.set_quota("a", Quota(host_bytes_share=1 << 40))
            small.token("b", Role.READER)  # another change of the file, as bad as before
            wait_until(lambda: small.server.quotas() and "stays in force" in caplog.text)
        assert small.server.quotas()["a"].sessions_max == 7
        assert "host_bytes_share: 1 TiB are promised" in caplog.text
        count = caplog.text.count("stays in force")
        for _ in range(3):
            small.server.quotas()
        assert caplog.text.count("stays in force") == count, "once a change"


def test_shares_that_do_not_fit_are_refused_before_serving(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"disk_bytes_share: 65.* the tier has 64"):
        TenantServer(tmp_path, {"a": Quota(disk_bytes_share=65 * MIB)})
    command = [sys.executable, "-m", "kvstore.cli", "serve", str(tmp_path / "kv"), "--check-config"]
    command += [f"--tenants-file={tmp_path / 'tenants.json'}", "--disk-bytes=64MiB"]
    done = subprocess.run(
        [*command, "--host-bytes=4MiB"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert "disk_bytes_share: 65 MiB are promised to 1 tenants" in done.stderr


def test_the_command_shows_what_tenants_have_and_changes_a_quota(service: TenantServer) -> None:
    stored_by(service.connect("a").session(SPEC))
    token = service.token("a", Role.ADMIN)
    command = [sys.executable, "-m", "kvstore.cli", "tenant"]
    listing = ["list", str(service.file), "--server", f"kvstore://{service.server.config.address}"]
    listing += ["--server-token-file", str(token)]
    shown = subprocess.run([*command, *listing], capture_output=True, text=True, timeout=60)
    assert shown.returncode == 0, shown.stderr
    assert "leased" in shown.stdout
    found = subprocess.run(
        [*command, *listing, "--json"], capture_output=True, text=True, timeout=60
    )
    usage = {each["name"]: each["usage"] for each in json.loads(found.stdout)["tenants"]}
    assert usage["a"]["host_bytes"] > 0
    change = ["quota", str(service.file), "b", "--sessions-max", "50"]
    assert subprocess.run([*command, *change], timeout=60).returncode == 0
    assert load_tenants(service.file).tenants["b"].quota == Quota(sessions_max=50)
