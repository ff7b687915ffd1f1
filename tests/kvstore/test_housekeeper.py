"""Accounts that drifted are found and set right, and nothing else is touched."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from known_pages import PAGE_BYTES, SPEC, load, prompt, save

from kvstore import Store
from kvstore.housekeeper import ACCOUNTS_EVERY_TICKS
from kvstore.state import DISK, HOST

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "store", host_bytes="4MiB", disk_bytes="32MiB") as store:
        save(store.session(SPEC), prompt(0, 5), durable=True)
        yield store


def used(store: Store) -> list[int]:
    host, disk = store.state.host, store.state.disk
    assert host is not None
    assert disk is not None
    return [host.usage().used_slots, disk.usage().used_slots]


def lose_slots(store: Store) -> None:
    """Two slots of the arena and one on disk that hold a page, and no page of the index has."""
    state = store.state
    assert state.host is not None
    assert state.disk is not None
    state.host.publish_many(state.host.reserve("default", PAGE_BYTES, 2))
    page = int(state.index.table.live()[0])
    record = state.record(page)
    view = state.host.view(int(state.index.table.slot[HOST][page]), PAGE_BYTES)
    (slot,) = state.disk.reserve("", PAGE_BYTES, 1, len(record.tokens))
    assert state.disk.write_many([slot], [record], [view]) == [True]
    del view


def test_slots_of_no_page_are_given_back_when_they_are_seen_twice(store: Store) -> None:
    before = used(store)
    lose_slots(store)
    assert used(store) == [before[0] + 2, before[1] + 1]
    keeper = store._housekeeper
    keeper.tick(ACCOUNTS_EVERY_TICKS)
    assert used(store) == [before[0] + 2, before[1] + 1], "once may be an accident"
    keeper.tick(ACCOUNTS_EVERY_TICKS)
    state = store.state
    assert state.disk is not None
    state.disk.commit_frees()
    assert used(store) == before
    assert store.stats().counters["slots_recovered"] == 3
    for _ in range(3):
        keeper.tick(ACCOUNTS_EVERY_TICKS)
    assert store.stats().counters["slots_recovered"] == 3
    assert load(store.session(SPEC), prompt(0, 5)) == 5
    store.check()


def test_what_is_being_written_is_nobodys_loss(store: Store) -> None:
    session = store.session(SPEC)
    with session.reserve(prompt(1, 4)) as run, session.match(prompt(0, 5)) as hit:
        assert hit.stage(5.0) == 5
        for _ in range(3):
            assert store._housekeeper.recover_slots() == 0
        for view in run.views():
            view[:] = bytes(PAGE_BYTES)
        assert run.commit(durable=True).durable
    assert store.stats().counters["slots_recovered"] == 0


def test_a_slot_that_was_used_anew_meanwhile_is_not_the_one_that_was_seen(store: Store) -> None:
    state = store.state
    assert state.host is not None
    (slot,) = state.host.reserve("default", PAGE_BYTES, 1)
    state.host.publish_many([slot])
    assert store._housekeeper.recover_slots() == 0
    state.host.free_many([slot])
    assert state.host.reserve("default", PAGE_BYTES, 1) == [slot]
    state.host.publish_many([slot])
    assert store._housekeeper.recover_slots() == 0
    assert store._housekeeper.recover_slots() == 1


def test_what_left_the_disk_and_waits_to_be_freed_is_not_counted(store: Store) -> None:
    state = store.state
    with state.lock:
        pages = state.index.chain(
            int(state.index.match(store.root(SPEC.namespace), prompt(0, 5).tobytes())[-1])
        )
        state.leave_disk(pages[::-1])
        assert len(state.unused_slots) == 5
    for _ in range(2):
        assert store._housekeeper.recover_slots() == 0
    assert state.resident_pages(DISK) == 0
