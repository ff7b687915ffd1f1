"""A tree rebuilt from catalog rows is the tree that was; hostile rows lose only themselves."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.prefix_index.edge_plan import PageRows
from kvstore.prefix_index.index import PrefixIndex
from kvstore.prefix_index.page_table import DISK, HOST, NO_PAGE

ROOT = b"r" * 32
PAGE_TOKENS = 2
SMALL_EDGES = 3 * PAGE_TOKENS * 4


def page_rows(parents, numbers, extras=None, sequences=None, **more):
    """Rows whose pages differ by one number; negative numbers are corrupt tokens."""
    count = len(parents)
    tokens = np.empty((count, PAGE_TOKENS), np.int32)
    tokens[:, 0] = 1
    tokens[:, 1] = numbers
    if sequences is None:
        sequences = np.arange(1, count + 1)
    sequences = np.asarray(sequences, np.uint64)
    return PageRows(
        tokens=tokens,
        parent_rows=np.asarray(parents, np.int32).reshape(count),
        keys=np.stack([sequences, sequences + np.uint64(1)], axis=1),
        sequences=sequences,
        payload_bytes=np.full(count, 4096),
        checksums=np.stack([sequences, sequences], axis=1),
        created=np.arange(count) + 100,
        writers=np.arange(count) % 3,
        slots=np.arange(count) + 1000,
        extras=extras or {},
        **more,
    )


def surviving_chains(parents, numbers, extras):
    """Row -> its chain of (number, extras), by walking down from the root one row at a time."""
    chains = {}
    level = {-1: ()}
    while level:
        below = {}
        seen = set()
        for row, parent in enumerate(parents):
            page = (numbers[row], extras.get(row, b""))
            if parent in level and row not in chains and numbers[row] >= 0:
                name = (parent, page)
                if name not in seen:
                    seen.add(name)
                    below[row] = (*level[parent], page)
        chains |= below
        level = below
    return chains


def expect_chains(index, ids, chains):
    for row, page in enumerate(ids.tolist()):
        assert (page != NO_PAGE) == (row in chains)
    for row, chain in chains.items():
        page = int(ids[row])
        walked = index.chain(page).tolist()
        found = [
            (int(np.frombuffer(index.tokens_of(step), np.int32)[1]), index.extras_of(step))
            for step in walked
        ]
        assert found == list(chain)
        assert index.table.sequence[page] == row + 1
        assert index.table.key_of(page)[:8] == (row + 1).to_bytes(8, "little")
        assert index.table.slot[DISK][page] == row + 1000
        assert index.table.created[page] == index.table.last_use[page] == row + 100
        tokens = b"".join(index.tokens_of(step) for step in walked)
        wanted = {step: extras for step, (_, extras) in enumerate(chain)}
        assert index.match(ROOT, tokens, wanted).tolist() == walked


wild = st.integers(0, 24).flatmap(
    lambda count: st.tuples(
        st.lists(st.integers(-1, max(count - 1, -1)), min_size=count, max_size=count),
        st.lists(st.sampled_from([0, 0, 1, 2, -5]), min_size=count, max_size=count),
        st.dictionaries(st.integers(0, max(count - 1, 0)), st.sampled_from([b"x", b"y"])),
    )
)


@pytest.mark.slow
@given(rows=wild)
@settings(deadline=None, max_examples=300)
def test_wild_rows_give_what_a_walk_from_the_root_finds(rows):
    parents, numbers, extras = rows
    extras = {row: value for row, value in extras.items() if row < len(parents)}
    index = PrefixIndex(edge_bytes_max=SMALL_EDGES)
    loaded = index.bulk_load(ROOT, PAGE_TOKENS, page_rows(parents, numbers, extras), DISK)
    index.check()
    chains = surviving_chains(parents, numbers, extras)
    expect_chains(index, loaded.ids, chains)
    assert loaded.dropped.tolist() == [row for row in range(len(parents)) if row not in chains]


orderly = st.lists(
    st.tuples(st.integers(0, 30), st.sampled_from([0, 1, 2]), st.sampled_from([b"", b"", b"x"])),
    max_size=30,
)


@pytest.mark.slow
@given(rows=orderly, cuts=st.lists(st.integers(0, 30), max_size=3), deep=st.booleans())
@settings(deadline=None, max_examples=300)
def test_rows_in_pieces_give_the_same_tree(rows, cuts, deep):
    """Pieces in order of sequence: parents come first, with an earlier piece or in the same."""
    parents = [
        (row - 1 if deep and seed % 4 else seed % (row + 1) - 1)
        for row, (seed, _, _) in enumerate(rows)
    ]
    numbers = [number for _, number, _ in rows]
    extras = {row: value for row, (_, _, value) in enumerate(rows) if value}
    index = PrefixIndex(edge_bytes_max=SMALL_EDGES)
    whole = page_rows(parents, numbers, extras)
    ids = np.empty(0, np.int32)
    walk = index.check_in_pieces()
    for _ in range(3):  # past all pages: what comes is told of
        next(walk)
    bounds = sorted({0, len(rows), *(cut for cut in cuts if cut < len(rows))})
    for start, end in pairwise(bounds):
        above = np.array(parents[start:end], np.int32)
        outside = (above >= 0) & (above < start)
        piece = page_rows(
            np.where(above >= start, above - start, -1),
            numbers[start:end],
            {row - start: value for row, value in extras.items() if start <= row < end},
            whole.sequences[start:end],
            parent_pages=np.append(ids, np.int32(NO_PAGE))[np.where(outside, above, -1)],
            parent_sequences=(above + 1).astype(np.uint64),
        )
        piece = dataclasses.replace(
            piece, slots=whole.slots[start:end], created=whole.created[start:end]
        )
        loaded = index.bulk_load(ROOT, PAGE_TOKENS, piece, DISK)
        index.check()
        ids = np.append(ids, loaded.ids)
    list(walk)
    expect_chains(index, ids, surviving_chains(parents, numbers, extras))


def test_a_parent_that_went_between_two_pieces_drops_its_rows():
    """Its id may be another page's by then; the sequence tells."""
    index = PrefixIndex()
    first = index.bulk_load(ROOT, PAGE_TOKENS, page_rows([-1, 0], [0, 1]), DISK)
    index.clear_tier(first.ids[1:], DISK)
    index.remove(first.ids[1:])
    other = page_rows([-1], [7], sequences=[50], parent_pages=first.ids[:1], parent_sequences=[1])
    other = dataclasses.replace(other, parent_sequences=np.array([1], np.uint64))
    (reused,) = index.bulk_load(ROOT, PAGE_TOKENS, other, DISK).ids.tolist()
    assert reused == first.ids[1]
    late = page_rows(
        [-1, 0],
        [3, 4],
        sequences=[60, 61],
        parent_pages=np.array([reused, NO_PAGE], np.int32),
        parent_sequences=np.array([2, 0], np.uint64),
    )
    loaded = index.bulk_load(ROOT, PAGE_TOKENS, late, DISK)
    assert loaded.dropped.tolist() == [0, 1]
    assert len(index) == 2
    index.check()


def test_rows_that_the_tree_holds_already_are_dropped_with_all_below():
    index = PrefixIndex()
    index.bulk_load(ROOT, PAGE_TOKENS, page_rows([-1, 0], [0, 1]), DISK)
    loaded = index.bulk_load(ROOT, PAGE_TOKENS, page_rows([-1, 0, -1], [0, 5, 9]), DISK)
    assert loaded.dropped.tolist() == [0, 1]
    assert len(index) == 3
    index.check()


def test_an_edge_of_all_rows_is_cut_to_edges_of_bounded_size():
    index = PrefixIndex(edge_bytes_max=SMALL_EDGES)
    loaded = index.bulk_load(ROOT, PAGE_TOKENS, page_rows(np.arange(100) - 1, [0] * 100), DISK)
    assert index.nodes == 1 + 34
    assert index.chain(int(loaded.ids[-1])).tolist() == loaded.ids.tolist()
    index.check()


def test_nothing_leaves_no_tree_behind():
    index = PrefixIndex()
    assert not len(index.bulk_load(ROOT, PAGE_TOKENS, page_rows([], []), DISK).ids)
    assert index.bulk_load(ROOT, PAGE_TOKENS, page_rows([0], [0]), DISK).dropped.tolist() == [0]
    assert index.nodes == 0
    assert not index.trees()


def test_a_loaded_tree_obeys_the_leaf_rule():
    index = PrefixIndex()
    ids = index.bulk_load(ROOT, PAGE_TOKENS, page_rows([-1, 0, 0], [0, 1, 2]), DISK).ids.tolist()
    assert index.evictable(DISK, 0.0).tolist() == ids[1:]
    assert not index.may_leave(ids[0], DISK, 0.0)
    assert not len(index.evictable(HOST, 0.0))


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": np.zeros((2, 3), np.int32)},
        {"tokens": np.zeros((2, 2), np.int64)},
        {"keys": np.zeros((2, 1), np.uint64)},
        {"checksums": np.zeros(2, np.uint64)},
        {"slots": np.zeros(3, np.int64)},
        {"slots": np.array([-1, 0])},
        {"parent_rows": np.array([-2, 0])},
        {"parent_rows": np.array([-1, 2])},
        {"parent_pages": np.array([-1, -1], np.int32)},
    ],
)
def test_columns_that_disagree_are_refused(change):
    index = PrefixIndex()
    with pytest.raises(ValueError, match=r"rows|shape|slots|sequences"):
        index.bulk_load(
            ROOT, PAGE_TOKENS, dataclasses.replace(page_rows([-1, 0], [0, 1]), **change), DISK
        )
    assert not index.trees()
