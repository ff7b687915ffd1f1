"""A look-up that leases cut short, while those that its client ended are on their way back.

A small arena and a real server: leases that it did not know to be over counted against the session.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from known_pages import SPEC, load, prompt, save
from raw_client import wait_until

from kvstore.client import RemoteStore
from kvstore.connect import connect
from kvstore.server import Server
from kvstore.server_config import ServerConfig

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

HELD_BACK_S = 600.0  # longer than the test
CHAIN = 64  # pages


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    made = Server(ServerConfig(directory=tmp_path / "store", host_bytes="4MiB", disk_bytes="64MiB"))
    made.store.wait_warm(10.0)
    made.start()
    yield made
    made.stop()


@pytest.fixture
def store(server: Server) -> Iterator[RemoteStore]:
    with connect(f"kvstore://{server.config.address}", lookup_deadline_s=10.0) as made:
        assert isinstance(made, RemoteStore)
        yield made


def filled(session: Any) -> list[Any]:
    """Matches that hold what the session may lease; the last one was cut short."""
    held: list[Any] = []
    while not held or not held[-1].reason:
        tokens = prompt(len(held), CHAIN)
        save(session, tokens)
        held.append(session.match(tokens))
    return held


def test_leases_that_are_over_cut_no_hit_short(server: Server, store: RemoteStore) -> None:
    """They counted until a thread of the client had sent their release, 10 ms later or more."""
    counters, session = server.store.state.counters, store.session(SPEC)
    held = filled(session)
    assert held[-1].reason == "lease limit"
    assert held[-1].pages < CHAIN
    assert counters.lookups_cut == 1, "nothing was to be given back: asked once"
    store._link.give_back.gather_s = HELD_BACK_S
    for match in held:
        match.release()
    with session.match(prompt(len(held) - 1, CHAIN)) as hit:
        assert (hit.pages, hit.reason) == (CHAIN, "")
    assert counters.lookups_cut == 2, "the answer that it was asked again for"


def test_a_lookup_gives_back_no_more_than_it_has_to(server: Server, store: RemoteStore) -> None:
    session = store.session(SPEC)
    save(session, prompt(0, CHAIN))
    back = store._link.give_back
    back.settle(10.0)  # what storing it has left
    back.gather_s = HELD_BACK_S
    before = back.released
    for _ in range(3):
        assert load(session, prompt(0, CHAIN)) == CHAIN
    assert back.released == before, "none was short: the releases wait for company"
    back.settle(10.0)
    assert back.released == before + 3
    wait_until(lambda: server.store.stats().leases == 0, 20.0)  # nor while the disk is written


def test_the_longer_answer_is_kept_and_the_other_is_given_back(
    server: Server, store: RemoteStore
) -> None:
    """Both answers are short of a chain that is longer than all that may be leased."""
    session = store.session(SPEC)
    long = prompt(50, 300)
    save(session, long)
    save(session, prompt(51, CHAIN))
    other = session.match(prompt(51, CHAIN))
    short = session.match(long)
    assert short.reason == "lease limit"
    assert short.pages > CHAIN
    store._link.give_back.gather_s = HELD_BACK_S
    other.release()
    longer = session.match(long)
    assert (longer.pages, longer.reason) == (short.pages + CHAIN, "lease limit")
    short.release()
    longer.release()
    store._link.give_back.settle(10.0)
    wait_until(lambda: server.store.stats().leases == 0, 20.0)  # nor while the disk is written
