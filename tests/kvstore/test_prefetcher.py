"""Reading on behind a prompt that hit: what comes, within what budget, behind whom."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
import pytest
from known_pages import PAGE_BYTES, PAGE_TOKENS, SPEC, load, prompt, save

from kvstore.prefetcher import STEP_PAGES
from kvstore.store import Store

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvstore.session import Session

pytestmark = pytest.mark.slow

BUDGET = 64 * PAGE_BYTES


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    settings = {"host_bytes": "1MiB", "disk_bytes": "64MiB", "prefetch_bytes": BUDGET}
    with Store.open(tmp_path / "s", **settings) as made:
        yield made


def push_out(store: Store, session: Session) -> None:
    """Everything before leaves memory, and is on disk."""
    for number in range(500, 530):
        save(session, prompt(number, 10))
    assert store.flush(20.0)


def settled(store: Store) -> dict[str, int]:
    """Counters when nothing is being read."""
    stager = store._stager
    assert stager is not None
    with store.state.lock:
        assert store.state.changed.wait_for(lambda: not stager._entries, 20.0)
    return store.stats().counters


def in_memory(session: Session, tokens: np.ndarray) -> int:
    with session.match(tokens) as hit:
        return hit.host_pages


def test_what_follows_a_prompt_that_hit_is_in_memory_before_it_is_asked_for(store: Store) -> None:
    session = store.session(SPEC)
    whole = prompt(1, 12)
    save(session, whole)
    push_out(store, session)
    with store.session(SPEC).match(whole[: 4 * PAGE_TOKENS]) as hit:
        assert hit.host_pages == 0
        assert hit.stage(10.0) == 4
    counters = settled(store)
    assert counters["pages_prefetched"] == 8
    assert in_memory(session, whole) == 12
    assert load(session, whole) == 12
    in_memory(session, whole)
    assert settled(store)["prefetched_used"] == 8
    store.check()


def test_of_two_ways_on_the_one_used_more_is_read(store: Store) -> None:
    session = store.session(SPEC)
    head = prompt(1, 4)
    hot, cold = (np.concatenate([head, prompt(seed, 3)]) for seed in (2, 3))
    save(session, hot)
    save(session, cold)
    for _ in range(3):
        load(session, hot)
    push_out(store, session)
    assert load(session, head) == 4
    assert settled(store)["pages_prefetched"] == 3
    assert in_memory(session, cold) == 4
    assert in_memory(session, hot) == 7


def test_a_prompt_that_goes_another_way_is_no_reason_to_read_on(store: Store) -> None:
    session = store.session(SPEC)
    save(session, prompt(1, 8))
    push_out(store, session)
    other = np.concatenate([prompt(1, 4), prompt(9, 2)])
    with session.match(other) as hit:
        assert hit.stage(10.0) == 4
    assert settled(store)["pages_prefetched"] == 0


def test_what_is_read_ahead_and_not_used_stays_within_its_budget_and_wears_off(
    store: Store,
) -> None:
    session = store.session(SPEC)
    for seed in range(30):
        save(session, prompt(seed, 2 + STEP_PAGES))
    push_out(store, session)
    most = BUDGET // PAGE_BYTES
    seen = []
    for seed in range(30):
        assert load(session, prompt(seed, 2 + STEP_PAGES)[: 2 * PAGE_TOKENS]) == 2
        prefetcher = store._prefetcher
        assert prefetcher is not None
        with store.state.lock:
            assert len(prefetcher._unused) <= most
        seen.append(settled(store)["pages_prefetched"])
        save(session, prompt(1000 + seed, 100))
    assert seen[0] == STEP_PAGES
    assert seen[-1] - seen[-8] <= STEP_PAGES, "nothing of it was used: hardly any is read"
    store.check()


def test_a_page_that_somebody_asks_for_is_read_before_those_read_ahead(store: Store) -> None:
    session = store.session(SPEC)
    asked, ahead = prompt(1, 6), prompt(2, 6 + STEP_PAGES)
    save(session, asked)
    save(session, ahead)
    push_out(store, session)
    stager = store._stager
    assert stager is not None
    with store.state.lock:  # the stager's thread waits, and finds both
        pages = session.stored(ahead.tobytes(), {})
        wanted = session.stored(asked.tobytes(), {})
        assert len(stager.prefetch(pages.tolist())) == len(pages)
        entries = stager.begin([*wanted.tolist(), *pages[:2].tolist()])
        assert not stager.prefetch(pages.tolist()), "on their way already"
        first = stager._pop_group()
        assert [each.page for each in first] == [*wanted.tolist(), *pages[:2].tolist()]
        behind = stager._pop_ahead()
        assert [each.page for each in behind] == pages[2:10].tolist(), "a few at a time"
        for each in (*first, *behind):
            each.started = False
        stager._queue.extend(first)
        for each in reversed(behind):
            stager._ahead.appendleft(each)
    stager.wait(entries, time.monotonic() + 10.0)
    assert all(each.done for each in entries)
    settled(store)
    store.check()
