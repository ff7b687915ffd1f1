"""The list of pages that left: bounded, true to the last ones, and cheap in what it says."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from known_pages import PAGE_BYTES, SPEC, prompt, save

from kvstore import Store
from kvstore.ghost_list import WAYS, GhostList, Left
from kvstore.prefix_index.page_key import page_keys
from kvstore.removal import Selection

if TYPE_CHECKING:
    from pathlib import Path


def keys_of(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.integers(0, 1 << 63, (count, 2)).astype(np.uint64)


def test_what_left_is_found_with_time_and_reason() -> None:
    ghosts, rng = GhostList(64), np.random.default_rng(1)
    first, second = keys_of(rng, 3), keys_of(rng, 2)
    ghosts.note(first, np.array([1, 2, 3], np.uint8), Left.ROOM, 10.0)
    ghosts.note(second, np.array([2, 2], np.uint8), Left.OPERATOR, 20.0)
    found = ghosts.find(first.tobytes() + second.tobytes() + bytes(range(16)))
    assert [None if each is None else (each.why, each.when_s, each.tiers) for each in found] == [
        (Left.ROOM, 10.0, 1),
        (Left.ROOM, 10.0, 2),
        (Left.ROOM, 10.0, 3),
        (Left.OPERATOR, 20.0, 2),
        (Left.OPERATOR, 20.0, 2),
        None,
    ]
    assert ghosts.left[Left.ROOM] == 3
    ghosts.check()


def test_a_row_is_a_ring_of_its_last_pages() -> None:
    """Against a model in plain lists: the newest of a key counts, a page that is back is gone."""
    ghosts, rng = GhostList(4 * WAYS), np.random.default_rng(2)
    pool = keys_of(rng, 90)
    rows: list[list[tuple[bytes, float] | None]] = [[None] * WAYS for _ in range(4)]
    cursors = [0] * 4

    def known(key: np.ndarray) -> float | None:
        row, cursor = rows[int(key[0]) % 4], cursors[int(key[0]) % 4]
        for age in range(WAYS):
            held = row[(cursor - 1 - age) % WAYS]
            if held is not None and held[0] == key.tobytes():
                return held[1]
        return None

    for now in range(300):
        picked = pool[rng.choice(90, rng.integers(1, 40), replace=False)]
        if rng.random() < 0.3:
            expected = [key for key in picked if known(key) is not None]
            assert ghosts.back(picked.tobytes()) == len(expected)
            for key in expected:
                row = rows[int(key[0]) % 4]
                row[row.index((key.tobytes(), known(key)))] = None
        else:
            ghosts.note(picked, np.ones(len(picked), np.uint8), Left.ROOM, float(now))
            for key in picked:  # of two in one row and step the later one stays
                number = int(key[0]) % 4
                rows[number][cursors[number] % WAYS] = (key.tobytes(), float(now))
            for number in {int(key[0]) % 4 for key in picked}:
                cursors[number] += 1
        ghosts.check()
        found = ghosts.find(pool.tobytes())
        assert [each and each.when_s for each in found] == [known(key) for key in pool]


def test_a_table_of_random_keys_remembers_most_of_its_size() -> None:
    ghosts, rng = GhostList(1 << 12), np.random.default_rng(3)
    keys = keys_of(rng, 1 << 13)
    for start in range(0, len(keys), 100):
        part = keys[start : start + 100]
        ghosts.note(part, np.ones(len(part), np.uint8), Left.ROOM, float(start))
    last = ghosts.find(keys[-(1 << 11) :].tobytes())
    assert sum(each is not None for each in last) > 0.9 * len(last)
    assert len(ghosts) <= 1 << 12


def test_sizes_that_make_no_rows_are_refused() -> None:
    for size in (0, 4, 24, 100):
        with pytest.raises(ValueError, match="power of two"):
            GhostList(size)


def test_a_store_knows_what_made_room_and_counts_what_would_have_hit() -> None:
    with Store.open(None, host_bytes=64 * PAGE_BYTES) as store:
        session = store.session(SPEC)
        for seed in range(40):
            save(session, prompt(seed, 4))
        counters = store.stats().counters
        assert counters["left_room"] == counters["pages_dropped"] > 0
        keys = page_keys(session.root, prompt(0, 4), SPEC.page_tokens)
        assert {each.why for each in store.state.ghosts.find(keys) if each} == {Left.ROOM}
        save(session, prompt(0, 4))
        assert store.stats().counters["missed_room"] == 4
        assert store.state.ghosts.find(keys) == [None] * 4
        store.check()


def test_an_operator_and_age_are_reasons_of_their_own(tmp_path: Path) -> None:
    with Store.open(tmp_path / "s", host_bytes="8MiB", disk_bytes="64MiB", max_age_s=3600) as store:
        session = store.session(SPEC)
        save(session, prompt(0, 3), durable=True)
        store.evict(Selection(everything=True))
        save(session, prompt(1, 2), durable=True)
        store.state.wall_clock = lambda: 4e9
        store._housekeeper.tick(1)
        counters = store.stats().counters
        assert (counters["left_operator"], counters["left_age"]) == (3, 2)
