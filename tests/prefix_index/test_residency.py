"""Who may leave, on trees wide and deep enough that counts travel level by level and by sweeps."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore.prefix_index.edge_plan import PageRows
from kvstore.prefix_index.index import PrefixIndex
from kvstore.prefix_index.page_table import DISK, HOST, NO_PAGE, TIER_BITS
from kvstore.prefix_index.piecewise_check import PieceSizes
from kvstore.prefix_index.residency import WINDOW_ROWS, WINDOWS_TELL

ROOT = b"r" * 32
PAGE_TOKENS = 2


def loaded(parents, rng, tier=DISK):
    """An index with one page a row, all in one tier; row numbers and page ids are the same."""
    count = len(parents)
    numbers = np.arange(1, count + 1, dtype=np.uint64)
    tokens = np.stack([np.arange(count), rng.integers(0, 9, count)], axis=1).astype(np.int32)
    index = PrefixIndex(edge_bytes_max=40 * PAGE_TOKENS * 4)
    pairs = np.stack([numbers, numbers], axis=1)
    rows = PageRows(
        tokens=tokens,
        parent_rows=np.asarray(parents),
        keys=pairs,
        sequences=numbers,
        payload_bytes=np.full(count, 10),
        checksums=pairs,
        created=np.arange(count),
        writers=np.zeros(count, int),
        slots=np.arange(count),
    )
    return index, index.bulk_load(ROOT, PAGE_TOKENS, rows, tier).ids


def random_forest(rng, count):
    """Half chains, half branches."""
    parents = np.arange(count) - 1
    branches = rng.random(count) < 0.2
    parents[branches] = (rng.random(count) * np.arange(count)).astype(int)[branches] - 1
    return parents


def tail_first(index, ids):
    return ids[np.argsort(-index.table.depth[ids], kind="stable")]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_counts_stay_right_when_many_pages_come_and_go_at_once(seed):
    """check() recounts below[] from scratch; batches are above and below the sweep limit."""
    rng = np.random.default_rng(seed)
    index, ids = loaded(random_forest(rng, 600), rng)
    walk = index.check_in_pieces(PieceSizes(rows=40))
    for _ in range(30):
        next(walk)
        some = rng.permutation(ids)[: int(rng.choice([3, 15, 17, 100, 400]))]
        in_host = index.table.state[some] & 1 << HOST != 0
        on_disk = index.table.state[some] & 1 << DISK != 0
        index.set_tier(some[~in_host], HOST, np.arange(np.count_nonzero(~in_host)))
        index.check()
        if rng.random() < 0.5:
            index.clear_tier(some[on_disk], DISK)
        else:
            index.set_tier(some[~on_disk], DISK, np.arange(np.count_nonzero(~on_disk)))
        index.check()
        stays = index.table.state[ids] & TIER_BITS == TIER_BITS
        index.clear_tier(ids[stays][:: int(rng.integers(1, 4))], HOST)
        index.check()
        page = int(rng.choice(ids))
        index.lease(page)
        index.check()
        if rng.random() < 0.7:
            index.unlease(page)
        index.check()
    list(walk)


@pytest.mark.parametrize("seed", range(4))
def test_coldest_takes_everything_in_an_order_that_is_allowed(seed):
    rng = np.random.default_rng(seed)
    index, ids = loaded(random_forest(rng, 400), rng)
    index.touch(rng.permutation(ids)[:200], 1000.0)
    chosen = index.coldest(DISK, 0.0)
    assert sorted(chosen.tolist()) == sorted(ids.tolist())
    for page in chosen.tolist():
        assert index.may_leave(page, DISK, 0.0)
        index.clear_tier([page], DISK)
        index.remove([page])
    assert index.nodes == 0


def test_coldest_sorts_part_by_part_as_it_would_at_once():
    rng = np.random.default_rng(0)
    index, ids = loaded(np.full(20_000, NO_PAGE), rng)
    scores = rng.permutation(20_000).astype(float)
    chosen = index.coldest(DISK, 0.0, pages=15_000, scores=scores)
    assert chosen.tolist() == ids[np.argsort(scores[ids])][:15_000].tolist()


def test_victims_of_many_bytes_stop_once_there_are_enough():
    index, ids = loaded(np.arange(100) - 1, np.random.default_rng(0))
    assert len(index.coldest(DISK, 0.0, payload_bytes=95)) == 10
    assert index.victims(DISK, ids, 0.0, payload_bytes=95).tolist() == ids[::-1][:1].tolist() + [
        int(page) for page in ids[::-1][1:10]
    ]
    assert len(index.coldest(DISK, 0.0, pages=3)) == 3


def test_a_long_chain_leaves_host_in_any_order_of_one_call():
    index, ids = loaded(np.arange(500) - 1, np.random.default_rng(0))
    index.set_tier(ids, HOST, np.arange(500))
    index.check()
    index.clear_tier(np.random.default_rng(1).permutation(ids), HOST)
    index.check()
    assert not index.table.below[HOST].any()


def test_a_lease_on_a_page_of_disk_keeps_its_ancestors_in_host():
    """A reader of the chain reads them there; the leaf rule alone would let them go."""
    index, ids = loaded(np.arange(200) - 1, np.random.default_rng(0))
    index.set_tier(ids[:100], HOST, np.arange(100))
    leaf, last_in_host = int(ids[-1]), int(ids[99])
    assert index.may_leave(last_in_host, HOST, 0.0)
    index.lease(leaf)
    index.check()
    assert not index.may_leave(last_in_host, HOST, 0.0)
    assert not index.may_leave(leaf, DISK, 0.0)
    assert not len(index.coldest(HOST, 0.0))
    assert not len(index.coldest(DISK, 0.0))
    index.unlease(leaf)
    assert index.may_leave(last_in_host, HOST, 0.0)
    index.check()


def test_a_pin_ends_at_its_time_and_not_before():
    index, ids = loaded([-1], np.random.default_rng(0))
    page = int(ids[0])
    index.pin(page, 10.0)
    index.pin(page, 5.0)
    assert index.pins == {page: 10.0}
    assert index.expire_pins(5.0) == 0
    assert not index.may_leave(page, DISK, 9.9)
    assert index.may_leave(page, DISK, 10.0)
    assert index.pins == {}
    assert not index.unpin(page)


def test_a_pin_made_longer_ends_at_the_later_time():
    index, ids = loaded([-1], np.random.default_rng(0))
    page = int(ids[0])
    index.pin(page, 10.0)
    index.pin(page, 20.0)
    assert index.expire_pins(10.0) == 0
    assert not index.may_leave(page, DISK, 19.9)
    assert index.expire_pins(20.0) == 1
    assert index.may_leave(page, DISK, 20.0)


def test_a_pin_and_a_lease_hold_a_page_each_on_its_own():
    index, ids = loaded([-1], np.random.default_rng(0))
    page = int(ids[0])
    index.lease(page)
    index.pin(page, 10.0)
    index.unlease(page)
    assert not index.may_leave(page, DISK, 0.0)
    index.lease(page)
    assert index.unpin(page)
    assert not index.may_leave(page, DISK, 0.0)
    index.unlease(page)
    assert index.may_leave(page, DISK, 0.0)
    index.check()


def test_a_hole_in_one_tier_is_no_barrier():
    """Root in host, child only on disk, grandchild in host: the root stays until both are gone."""
    index, ids = loaded([-1, 0, 1], np.random.default_rng(0))
    index.set_tier(ids[[0, 2]], HOST, np.arange(2))
    assert not index.may_leave(int(ids[0]), HOST, 0.0)
    assert index.victims(HOST, ids, 0.0).tolist() == [ids[2], ids[0]]
    index.clear_tier(ids[2:], HOST)
    index.check()
    assert index.may_leave(int(ids[0]), HOST, 0.0)


def test_the_last_tier_is_left_only_by_a_page_with_nothing_below():
    """The child is on disk only, so the leaf rule of the host tier alone would let the root go."""
    index, ids = loaded([-1, 0], np.random.default_rng(0), HOST)
    index.set_tier(ids[1:], DISK, [7])
    index.clear_tier(ids[1:], HOST)
    root = int(ids[0])
    assert not index.may_leave(root, HOST, 0.0)
    assert not len(index.evictable(HOST, 0.0))
    assert not len(index.coldest(HOST, 0.0))
    assert not len(index.victims(HOST, ids, 0.0))
    index.set_tier(ids[:1], DISK, [8])
    assert index.may_leave(root, HOST, 0.0)
    assert index.evictable(HOST, 0.0).tolist() == [root]


def test_a_leased_hole_holds_what_is_above_it():
    """Root and grandchild in host; between them a leased page that is only on disk."""
    index, ids = loaded([-1, 0, 1], np.random.default_rng(0))
    index.set_tier(ids[[0, 2]], HOST, np.arange(2))
    index.lease(int(ids[1]))
    assert index.victims(HOST, ids, 0.0).tolist() == [ids[2]]
    assert index.coldest(HOST, 0.0).tolist() == [ids[2]]


@pytest.mark.parametrize("seed", range(6))
def test_coldest_by_any_scores_is_what_a_greedy_search_finds(seed):
    """Scores that do not rise towards the root, as policies other than LRU may have."""
    rng = np.random.default_rng(seed)
    index, ids = loaded(random_forest(rng, 60), rng)
    scores = np.zeros(len(index.table.state))
    scores[ids] = rng.permutation(60) / 100
    chosen = index.coldest(DISK, 0.0, scores=scores).tolist()
    for page in chosen:
        free = index.evictable(DISK, 0.0)
        assert page == free[np.argmin(scores[free])]
        index.clear_tier([page], DISK)
        index.remove([page])
    assert len(chosen) == 60


def test_calls_that_make_no_sense_are_refused_and_change_nothing():
    index, ids = loaded([-1, 0, 0], np.random.default_rng(0))
    index.set_tier(ids[:1], HOST, [5])
    refusals = [
        (lambda: index.set_tier(ids, HOST, [1, 2, 3]), "already"),
        (lambda: index.set_tier(ids[[1, 1]], HOST, [1, 2]), "twice"),
        (lambda: index.set_tier(ids[1:], HOST, [1]), "slots"),
        (lambda: index.set_tier(ids[1:], HOST, [1, -1]), "slots"),
        (lambda: index.set_tier([99], HOST, [1]), "live"),
        (lambda: index.set_tier([-1], HOST, [1]), "live"),
        (lambda: index.clear_tier(ids, HOST), "hold"),
        (lambda: index.clear_tier(ids[[0, 0]], HOST), "twice"),
        (lambda: index.unlease(int(ids[0])), "not leased"),
        (lambda: index.lease(77), "live"),
        (lambda: index.pin(-1, 1.0), "live"),
        (lambda: index.remove(ids[1:]), "tier"),
        (lambda: index.remove([3]), "live"),
        (lambda: index.chain(3), "live"),
        (lambda: index.tree(ROOT, 5), "tokens"),
        (lambda: index.tree(b"new", 0), "page_tokens"),
    ]
    for call, reason in refusals:
        with pytest.raises(ValueError, match=reason):
            call()
        index.check()
    assert index.table.slot[HOST][ids].tolist() == [5, -1, -1]
    assert index.table.slot[DISK][ids].tolist() == [0, 1, 2]
    assert len(index.trees()) == 1


@pytest.mark.slow
def test_where_very_many_may_leave_each_is_offered_in_its_turn():
    """One page a chain, more of them than a sweep has to look at; few are found at once."""
    rng = np.random.default_rng(0)
    count = 2 * WINDOW_ROWS + 100
    index, ids = loaded(np.full(count, NO_PAGE), rng)
    index.lease(int(ids[0]))
    all_of_them = index.evictable(DISK, 0.0).tolist()
    assert len(all_of_them) == count - 1
    window, seen = 0, []
    for _ in range(3):
        some, window = index.some_evictable(DISK, 0.0, None, window, 1)
        seen.append(some.tolist())
    assert window == 0
    assert sorted(page for part in seen for page in part) == all_of_them
    assert index.some_evictable(DISK, 0.0, None, 2, count)[0].tolist() == all_of_them
    few = index.some_evictable(DISK, 0.0, None, 1, WINDOW_ROWS)[0]
    assert few.tolist() == sorted([*seen[1], *seen[2]])
    assert not len(index.some_evictable(DISK, 0.0, [b"nobody"], 1, 1)[0])


@pytest.mark.slow
def test_some_that_may_leave_are_from_all_over_the_table():
    """Rows are in order of age in a store that has filled up: the newest pages must not be all that
    there is to choose from."""
    count = 32 * WINDOW_ROWS
    index, _ = loaded(np.full(count, NO_PAGE), np.random.default_rng(0))
    window, seen = 0, set()
    for _ in range(8):
        some, window = index.some_evictable(DISK, 0.0, None, window, count // 8)
        assert len(some) == count // 8
        assert some[0] < count // 2 < some[-1]
        seen.update(some.tolist())
    assert len(seen) == count


def test_few_that_may_leave_are_found_wherever_they_are():
    """All of them, in a table of more windows than are looked at one by one."""
    count = (WINDOWS_TELL + 3) * WINDOW_ROWS
    parents = np.arange(count) - 1
    parents[::500] = NO_PAGE
    index, _ = loaded(parents, np.random.default_rng(0))
    some, _ = index.some_evictable(DISK, 0.0, None, 5, WINDOW_ROWS)
    assert some.tolist() == index.evictable(DISK, 0.0).tolist()
    assert len(some) == -(-count // 500)
