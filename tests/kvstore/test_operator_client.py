"""An operator's calls on the library and on a server: the same answers, and errors that say why."""

from __future__ import annotations

import itertools
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from known_pages import PAGE_TOKENS, SPEC, prompt, save
from server_process import ServerProcess

from kvstore import Store
from kvstore.client import RemoteStore
from kvstore.connect import connect
from kvstore.errors import (
    AccessDenied,
    ClosedError,
    InvalidRequest,
    ServerUnavailable,
)
from kvstore.event_log import EVENTS_MAX
from kvstore.identity import Identity, NotAuthenticated, Role
from kvstore.removal import Selection
from kvstore.server import Server
from kvstore.server_config import ServerConfig

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvstore.interface import OperatorLike

pytestmark = pytest.mark.slow

PATIENT = {"lookup_deadline_s": 5.0}


class Says:
    """Whoever calls is this one; a test changes it as a tenant file would."""

    def __init__(self, tenant: str = "default", role: Role = Role.ADMIN) -> None:
        self.identity: Identity | None = Identity(tenant, role)

    def identify(self, context: Any) -> Identity:
        if self.identity is None:
            raise NotAuthenticated("the token is not valid here")
        return self.identity


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Server, Says]]:
    """A server in this process, and who its callers are."""
    says = Says()
    config = ServerConfig(directory=tmp_path / "served", host_bytes="16MiB", disk_bytes="64MiB")
    server = Server(config, authorizer=says)
    server.store.wait_warm(10.0)
    server.start()
    yield server, says
    server.store.check()
    assert server.stop()


def client_of(server: Server, **settings: Any) -> RemoteStore:
    made = connect(f"kvstore://{server.config.address}", **(PATIENT | settings))
    assert isinstance(made, RemoteStore)
    return made


@pytest.fixture(params=["library", "server"])
def store(
    request: pytest.FixtureRequest, served: tuple[Server, Says], tmp_path: Path
) -> Iterator[OperatorLike]:
    if request.param == "server":
        with client_of(served[0]) as made:
            yield made
        return
    with Store.open(tmp_path / "own", host_bytes="16MiB", disk_bytes="64MiB") as own:
        yield own


def fill(store: Any) -> None:
    save(store.session(SPEC, writer="engine-1"), prompt(0, 5), durable=True)
    with store.session(SPEC, writer="engine-2").reserve(prompt(1, 3), {1: b"image"}) as run:
        assert run.commit(durable=True).durable


def test_what_is_inside_is_told_in_the_same_records(store: OperatorLike) -> None:
    fill(store)
    (space,) = store.namespaces()
    assert (space.namespace, space.pages, space.disk_pages) == (SPEC.namespace.hex(), 8, 8)
    chains, total = store.chains(limit=1)
    assert (total, [(each.pages, each.writer) for each in chains]) == (2, [(5, "engine-1")])
    assert store.chains(limit=0) == ([], 2)
    (found,) = store.find_chain(chains[0].chain_id[:9].upper())
    assert replace(found.chain, idle_s=0, age_s=0) == replace(chains[0], idle_s=0, age_s=0)
    assert [page.page_index for page in found.pages] == [0, 1, 2, 3, 4]
    assert found.pages[0].tiers == ("host", "disk")
    assert found.spec is not None
    assert found.spec["page_tokens"] == PAGE_TOKENS
    assert store.find_chain("0" * 32) == []
    stats = store.stats()
    assert (stats.pages, [tier.name for tier in stats.tiers]) == (8, ["host", "disk"])
    assert stats.counters["pages_committed"] == 8
    assert store.flush(5.0)


def test_a_prompt_is_explained_with_its_extras(store: OperatorLike) -> None:
    fill(store)
    tokens = prompt(1, 3)
    plain = store.explain(tokens, namespace=SPEC.namespace)
    assert (plain.matched_pages, plain.other_namespaces) == (1, ())
    full = store.explain(tokens, namespace=SPEC.namespace, extras={1: b"image"})
    assert full.matched_pages == 3
    with pytest.raises(InvalidRequest, match="namespace"):
        store.explain(tokens, namespace=bytes(16))


def test_pages_are_evicted_by_everything_that_names_them(store: OperatorLike) -> None:
    fill(store)
    space, tokens = SPEC.namespace, prompt(1, 3)
    two = Selection(namespace=space, prefix=tokens[: 2 * PAGE_TOKENS], extras={1: b"image"})
    assert store.evict(replace(two, extras=None), dry_run=True).pages == 0
    assert store.evict(replace(two, writer="engine-1"), dry_run=True).pages == 0
    assert store.evict(two, dry_run=True).pages == 2
    done = store.evict(two)
    assert (done.pages, done.chains, done.dry_run) == (2, 1, False)
    assert store.evict(Selection(older_than_s=3600.0)).pages == 0
    assert store.evict(Selection(writer="engine-1")).pages == 5
    assert store.evict(Selection(everything=True)).pages == 1
    for bad in (lambda: Selection(), lambda: Selection(tenant="a", extras={0: b"x"})):
        with pytest.raises(InvalidRequest):
            bad()


def test_pinned_pages_stay_unless_they_are_meant(store: Any) -> None:
    fill(store)
    store.session(SPEC).pin(prompt(0, 5), 60.0)
    assert store.evict(Selection(everything=True)).kept_pinned == 5
    assert store.evict(Selection(everything=True), include_pinned=True).pages == 5


def test_malformed_questions_are_refused(store: OperatorLike) -> None:
    for digits in ("", "xyz", "0" * 33):
        with pytest.raises(InvalidRequest, match="hex digits"):
            store.find_chain(digits)
    with pytest.raises(InvalidRequest, match="sort"):
        store.chains(sort="colour")
    with pytest.raises(InvalidRequest):
        store.chains(limit=-1)
    with pytest.raises(InvalidRequest):
        store.watch(-1)


def test_a_watcher_sees_events_and_can_go_on_after_a_number(store: Any) -> None:
    session = store.session(SPEC)
    events = store.watch()
    save(session, prompt(0, 2), durable=True)
    seen = list(itertools.islice(events, 2))
    assert [(each.kind, each.medium, len(each.keys)) for each in seen] == [
        ("stored", "host", 32),
        ("stored", "disk", 32),
    ]
    assert {each.tenant for each in seen} == {"default"}
    again = store.watch(seen[0].sequence)
    assert next(again) == seen[1]
    late = store.watch(7)
    assert next(late).kind == "lost", "a number of some earlier store"


def test_a_tenant_watches_its_own_pages_and_learns_nothing_of_others(
    served: tuple[Server, Says],
) -> None:
    server, says = served
    says.identity = Identity("a", Role.READER)
    with client_of(server) as mine:
        events = mine.watch()
        says.identity = Identity("default", Role.ADMIN)
        with client_of(server) as admin:
            every = admin.watch()
            save(server.store.session(SPEC, tenant="b"), prompt(0, 2))
            save(server.store.session(SPEC, tenant="a"), prompt(0, 3))
            says.identity = Identity("a", Role.READER)
            save(server.store.session(SPEC, tenant="b"), prompt(1, 2))
            save(server.store.session(SPEC, tenant="a"), prompt(1, 3))
            seen = list(itertools.islice((e for e in events if e.medium == "host"), 2))
            whole = list(itertools.islice((e for e in every if e.medium == "host"), 2))
    assert {each.tenant for each in seen} == {"a"}
    assert [each.tenant for each in whole] == ["b", "a"]
    own = server.store.watch(seen[0].sequence - 1, tenant="a")
    numbers = [next(own).sequence for _ in range(3)]
    assert numbers == list(range(numbers[0], numbers[0] + 3)), "a gap would tell of others"


def test_events_of_others_push_none_of_mine_out() -> None:
    with Store.open(None, host_bytes="4MiB") as store:
        mine = store.watch(tenant="a")
        save(store.session(SPEC, tenant="a"), prompt(0, 1))
        first = next(mine)
        noisy = store.session(SPEC, tenant="b")
        page = noisy.match(prompt(0, 1))
        page.release()
        pages = save(noisy, prompt(0, 1))
        assert pages == 1
        ids = store.state.index.match(noisy.root, prompt(0, 1).tobytes())
        for _ in range(EVENTS_MAX + 1):
            store.events._record(ids, 0, True)
        save(store.session(SPEC, tenant="a"), prompt(1, 1))
        second = next(mine)
        assert (second.kind, second.sequence) == ("stored", first.sequence + 1)


def test_a_watch_goes_on_when_its_server_comes_back(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "store") as server:
        server.start()
        with connect(server.address, **PATIENT) as store:
            assert isinstance(store, RemoteStore)
            session = store.session(SPEC)
            events = store.watch()
            save(session, prompt(0, 2))
            first = next(events)
            assert first.kind == "stored"
            server.kill()
            server.start()
            found = next(each for each in events if each.kind == "lost")
            assert found.sequence > first.sequence
            assert session.wait_open(5.0)
            save(session, prompt(1, 2))
            assert any(each.kind == "stored" for each in itertools.islice(events, 4))


def test_closing_ends_a_watch(served: tuple[Server, Says]) -> None:
    store = client_of(served[0])
    events = store.watch()
    ended = threading.Event()
    reader = threading.Thread(target=lambda: (list(events), ended.set()))
    reader.start()
    store.close()
    assert ended.wait(5.0)
    reader.join()
    with pytest.raises(ClosedError):
        store.stats()


def test_a_role_that_may_not_is_told_so_and_not_that_nobody_is_there(
    served: tuple[Server, Says],
) -> None:
    server, says = served
    says.identity = Identity("a", Role.READER)
    with client_of(server) as store:
        questions = [
            store.stats,
            store.namespaces,
            store.flush,
            lambda: store.evict(Selection(everything=True)),
            lambda: store.find_chain("00"),
        ]
        for ask in questions:
            with pytest.raises(AccessDenied, match="role reader"):
                ask()
        with pytest.raises(PermissionError):
            store.stats()
        says.identity = None
        with pytest.raises(AccessDenied, match="not valid"):
            store.stats()
        with pytest.raises(AccessDenied, match="not valid"):
            store.watch()


def test_an_engine_whose_role_is_refused_is_told_so_once(
    served: tuple[Server, Says], caplog: pytest.LogCaptureFixture
) -> None:
    server, says = served
    says.identity = Identity("a", Role.READER)
    with client_of(server) as store:
        session = store.session(SPEC)
        for _ in range(3):
            with session.reserve(prompt(0, 2)) as run:
                assert (run.count, run.reason[:9]) == (0, "refused: ")
                assert "role reader" in run.reason
        assert session.match(prompt(0, 2)).pages == 0
    said = [each for each in caplog.messages if "refused" in each]
    assert len(said) == 1, caplog.messages
    says.identity = None
    with client_of(server, open_wait_s=1.0) as store:
        assert "not valid" in store.session(SPEC).reserve(prompt(0, 2)).reason


def test_without_a_server_an_operator_hears_what_to_do(tmp_path: Path) -> None:
    with (
        connect(f"kvstore://unix:{tmp_path}/none.sock") as store,
        pytest.raises(ServerUnavailable, match="kvstore serve"),
    ):
        store.stats()
    with (
        connect("kvstore://127.0.0.1:9", insecure_network=True) as store,
        pytest.raises(ServerUnavailable, match=r"127\.0\.0\.1:9"),
    ):
        store.stats()
