"""The threads around a real server: answers, epochs, and that everything is given back."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import pytest
from server_process import ServerProcess
from vllm_engines import wait_store

from kvstore.client import RemoteStore
from kvstore.connect import connect
from kvstore.engine_adapter.load_choice import LoadChoice, LoadMode
from kvstore.engine_adapter.lookups import Lookups
from kvstore.engine_adapter.plan_records import Chain, Committed, Found, Room
from kvstore.spec import CacheSpec

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PAGE, PAGE_BYTES = 16, 65536
_Event = TypeVar("_Event", Found, Room, Committed)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path / "store") as started:
        yield started.start()


@pytest.fixture
def lookups(server: ServerProcess) -> Iterator[Lookups]:
    made = Lookups(LoadChoice(LoadMode.ALWAYS, PAGE_BYTES, PAGE))
    with connect(server.address, lookup_deadline_s=5.0) as store:
        made.use(store.session(CacheSpec.opaque("test-lookups", PAGE, PAGE_BYTES)))
        yield made
        made.close()


def chain(pages: int, first: int = 0) -> Chain:
    return Chain(np.arange(first, first + pages * PAGE, dtype="<i4").tobytes(), {})


def answer(lookups: Lookups, kind: type[_Event], epoch: int | None = None) -> _Event:
    """The next event of a kind."""
    deadline = time.monotonic() + 20.0
    while time.monotonic() < deadline:
        lookups.wait(0.5)
        for event in lookups.drain(lookups.epoch if epoch is None else epoch):
            if isinstance(event, kind):
                return event
    raise AssertionError(f"no {kind.__name__}")


def store_pages(lookups: Lookups, job: int, pages: int, first: int = 0) -> None:
    while True:
        lookups.reserve(job, chain(pages, first))
        room = answer(lookups, Room)
        if room.reason != "in progress":  # an abort before it is done by another thread
            break
    assert len(room.offsets) == pages
    lookups.commit(job)
    assert answer(lookups, Committed).pages == pages


@pytest.mark.slow
def test_what_was_committed_is_found_with_places_and_given_back(lookups: Lookups) -> None:
    lookups.look_up(1, chain(3))
    assert answer(lookups, Found) == Found(1)
    store_pages(lookups, 1, 3)
    lookups.look_up(2, chain(4))
    found = answer(lookups, Found)
    assert (found.pages, found.ready, found.staging) == (3, 3, False)
    assert len(lookups.places(2, 1, 3)) == 2
    lookups.release(1)
    lookups.release(2)
    assert lookups.held() == {"tickets": 0, "reservations": 0}
    assert lookups.places(2, 0, 1) == []


@pytest.mark.slow
def test_what_leases_cut_off_has_a_reason_and_comes_back_with_them(
    tmp_path: Path,
) -> None:
    with ServerProcess(tmp_path / "store", "--host-bytes=16MiB", "--disk-bytes=64MiB") as server:
        made = Lookups(LoadChoice(LoadMode.ALWAYS, PAGE_BYTES, PAGE))
        with connect(server.start().address, lookup_deadline_s=5.0) as store:
            assert isinstance(store, RemoteStore)
            made.use(store.session(CacheSpec.opaque("test-cut", PAGE, PAGE_BYTES)))
            found: list[Found] = []
            while not found or found[-1].pages:  # 56 pages: a quarter of what staging leaves
                number = len(found)
                store_pages(made, number, 8, 10_000 * number)
                made.look_up(number, chain(8, 10_000 * number))
                found.append(answer(made, Found))
            assert {(each.pages, each.reason) for each in found[:-2]} == {(8, "")}
            assert found[-1].reason == "lease limit", found
            assert sum(each.pages for each in found) <= 64
            store._link.give_back.gather_s = 600.0  # the release waits for company
            made.release(0)
            made.look_up(100, chain(8, 10_000 * number))
            again = answer(made, Found)
            assert (again.pages, again.reason) == (8, "")
            made.close()


@pytest.mark.slow
def test_pages_that_are_stored_need_no_room_and_an_abort_frees_it(
    lookups: Lookups, server: ServerProcess
) -> None:
    lookups.reserve(1, chain(2))
    assert answer(lookups, Room).start == 0
    lookups.abort(1)
    assert lookups.held()["reservations"] == 0
    deadline, room = time.monotonic() + 10, Room(0, 0, ())
    while not room.offsets and time.monotonic() < deadline:  # the abort is on its way
        lookups.reserve(2, chain(2))
        room = answer(lookups, Room)
    lookups.commit(2)
    assert answer(lookups, Committed).pages == 2
    for job in range(3, 6):
        lookups.reserve(job, chain(2))
        assert answer(lookups, Room).reason == "present"
    wait_store(server.address, lambda found: found["service"]["reservations"] == 0, 10.0)


@pytest.mark.slow
def test_what_a_lost_server_said_is_a_miss_once_another_answers(
    lookups: Lookups, server: ServerProcess
) -> None:
    store_pages(lookups, 1, 2)
    before = lookups.epoch
    lookups.look_up(1, chain(2))
    while not lookups.held()["tickets"]:
        lookups.wait(0.01)
    found = answer(lookups, Found)
    assert found.pages == 2
    lookups.reserve(2, chain(4))
    lookups.wait(5.0)
    server.kill()
    server.start()
    deadline = time.monotonic() + 20
    while lookups.epoch in (0, before):
        assert time.monotonic() < deadline
        lookups.wait(0.05)
    room = answer(lookups, Room)
    assert (room.offsets, room.reason) == ((), "unreachable")
    assert lookups.places(1, 0, 1) == []
    lookups.release(1)
    assert lookups.held() == {"tickets": 0, "reservations": 0}


@pytest.mark.slow
def test_workers_are_granted_the_memory_of_a_session_while_it_is_of_use(
    lookups: Lookups, monkeypatch: pytest.MonkeyPatch
) -> None:
    grants: list[Any] = []
    deadline = time.monotonic() + 10
    while not grants and time.monotonic() < deadline:
        lookups.ask_grant(3)
        lookups.wait(0.05)
        grants += [grant for grant in [lookups.take_grant()] if grant is not None]
    assert len(grants[0].tokens) == 3
    assert grants[0].epoch == lookups.epoch
    assert lookups.take_grant() is None, "each once"
    with monkeypatch.context() as patched:
        patched.setattr("kvstore.engine_adapter.lookups.GRANT_S_MAX", 0.0)
        lookups.ask_grant(3)
        while not lookups._grants and time.monotonic() < deadline:
            lookups.wait(0.05)
        assert lookups.take_grant() is None, "too old"
    assert not lookups._grants


def test_without_a_session_everything_is_a_miss() -> None:
    made = Lookups(LoadChoice(LoadMode.ALWAYS, PAGE_BYTES, PAGE))
    made.look_up(1, chain(1))
    assert answer(made, Found) == Found(1)
    made.reserve(1, chain(1))
    assert answer(made, Room).reason == "unreachable"
    made.commit(1)
    assert answer(made, Committed).pages == 0
    made.close()
