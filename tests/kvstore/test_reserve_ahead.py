"""A session may go on behind its own run, here and over a server: in order or not at all."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest
from known_pages import PAGE_TOKENS, SPEC, content, load, prompt

from kvstore import Store
from kvstore.connect import connect
from kvstore.server import Server
from kvstore.server_config import ServerConfig

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvstore.interface import ReservationLike

WHOLE = prompt(0, 9)
SIZES = {"host_bytes": "16MiB", "disk_bytes": "64MiB"}


@pytest.fixture(params=["library", "shared memory", "stream"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    if request.param == "library":
        with Store.open(tmp_path / "store", **SIZES) as own:
            yield own
            own.check()
        return
    server = Server(ServerConfig(directory=tmp_path / "store", **SIZES))
    server.store.wait_warm(10.0)
    server.start()
    shared = request.param == "shared memory"
    address = f"kvstore://{server.config.address}"
    with connect(address, shared_memory=shared, lookup_deadline_s=5.0) as made:
        yield made
        server.store.check()
    assert server.stop()


def fill(run: ReservationLike) -> None:
    for offset, view in enumerate(run.views()):
        view[:] = content(WHOLE, run.start + offset)


def runs_of(session: Any) -> list[Any]:
    """Three runs of three pages, one behind the other."""
    made = [session.reserve(WHOLE[: stop * PAGE_TOKENS]) for stop in (3, 6, 9)]
    assert [(run.start, run.count, run.reason) for run in made] == [
        (0, 3, ""),
        (3, 3, ""),
        (6, 3, ""),
    ]
    for run in made:
        fill(run)
    return made


def test_runs_that_follow_each_other_are_published_in_order(store: Any) -> None:
    session = store.session(SPEC)
    first, second, third = runs_of(session)
    again = session.reserve(WHOLE)
    assert (again.count, again.reason) == (0, "in progress")
    assert first.commit().pages == 3
    assert load(session, WHOLE) == 3
    assert second.commit().pages == 3
    done = third.commit(durable=True)
    assert (done.pages, done.durable) == (3, True)
    assert load(session, WHOLE) == 9


def test_giving_up_the_first_drops_the_later_ones(store: Any) -> None:
    session = store.session(SPEC)
    first, second, third = runs_of(session)
    first.abort()
    for run in (second, third):
        assert run.commit().pages == 0
    assert load(session, WHOLE) == 0
    for run in runs_of(session):  # all pages are free again
        assert run.commit().pages == 3
    assert load(session, WHOLE) == 9


def test_a_run_that_comes_before_its_turn_is_dropped_with_those_behind_it(store: Any) -> None:
    session = store.session(SPEC)
    first, second, third = runs_of(session)
    assert second.commit().pages == 0
    assert first.commit().pages == 3
    assert third.commit().pages == 0
    assert load(session, WHOLE) == 3
    with session.reserve(WHOLE) as rest:
        assert (rest.start, rest.count) == (3, 6)


def test_another_session_and_another_prompt_do_not_follow(store: Any) -> None:
    session, other = store.session(SPEC), store.session(SPEC)
    with session.reserve(WHOLE[: 3 * PAGE_TOKENS]) as run:
        assert other.reserve(WHOLE).reason == "in progress"
        parted = WHOLE.copy()
        parted[2 * PAGE_TOKENS :] += 1
        assert session.reserve(parted).reason == "in progress", "it shares two pages of three"
        fill(run)
        run.commit()
    with other.reserve(WHOLE) as rest:
        assert rest.start == 3


def test_what_follows_a_published_run_keeps_it(store: Any) -> None:
    from kvstore.removal import Selection

    session = store.session(SPEC)
    first, second, third = runs_of(session)
    first.commit()
    assert store.evict(Selection(everything=True)).kept_leased == 3
    assert second.commit().pages == 3
    third.abort()
    assert load(session, WHOLE) == 6


def test_the_end_of_a_session_gives_all_its_runs_up(store: Any) -> None:
    session = store.session(SPEC)
    runs_of(session)
    session.close()
    with store.session(SPEC).reserve(WHOLE) as run:
        assert run.count == 9


def test_a_reservation_takes_no_more_staging_than_its_prompt_while_it_is_made(
    tmp_path: Path,
) -> None:
    server = Server(ServerConfig(directory=tmp_path / "store", **SIZES))
    server.store.wait_warm(10.0)
    server.start()
    with connect(f"kvstore://{server.config.address}", lookup_deadline_s=5.0) as made:
        session = made.session(SPEC)
        assert session.wait_open(10.0)
        [held] = server.registry.sessions()
        reserve, beside = held.session.reserve, []

        def reserve_beside(*args: Any, **more: Any) -> Any:
            held.session.reserve = reserve
            beside.append(session.reserve(prompt(5, 3), deadline_s=1.0))
            return reserve(*args, **more)

        held.session.reserve = reserve_beside
        first = session.reserve(WHOLE, deadline_s=1.0)
        assert [(run.count, run.reason) for run in (first, *beside)] == [(9, ""), (3, "")]
    assert server.stop()


@pytest.mark.parametrize(("shared", "kept_s", "ended_s"), [(True, 500.0, 601.0), (False, 29, 31)])
def test_who_writes_to_staging_may_take_minutes_between_two_steps(
    tmp_path: Path, shared: bool, kept_s: float, ended_s: float
) -> None:
    server = Server(ServerConfig(directory=tmp_path / "store", **SIZES))
    server.store.wait_warm(10.0)
    server.start()
    address = f"kvstore://{server.config.address}"
    with connect(address, shared_memory=shared, lookup_deadline_s=5.0) as made:
        session = made.session(SPEC)
        assert session.wait_open(10.0)
        [held] = server.registry.sessions()
        held._clock = lambda: 0.0
        assert session.reserve(WHOLE, deadline_s=1.0).count == 9
        held._clock = lambda: kept_s
        assert held.sweep() == 0
        held._clock = lambda: ended_s
        assert held.sweep() == 1
    assert server.stop()


def test_of_what_is_stored_already_the_server_keeps_nothing_for_long(tmp_path: Path) -> None:
    server = Server(ServerConfig(directory=tmp_path / "store", **SIZES))
    server.store.wait_warm(10.0)
    server.start()
    with connect(f"kvstore://{server.config.address}", lookup_deadline_s=5.0) as made:
        session = made.session(SPEC)
        assert session.wait_open(10.0)
        assert session.reserve(WHOLE, deadline_s=1.0).commit().pages == 9
        again = session.reserve(WHOLE, deadline_s=1.0)
        assert (again.count, again.reason) == (0, "present")
        [held] = server.registry.sessions()
        assert held.counts == (0, 1)
        held._clock = lambda: time.monotonic() + 31.0
        assert held.sweep() == 1
        assert held.counts == (0, 0)
    assert server.stop()
