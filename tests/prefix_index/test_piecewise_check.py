"""The index's check in pieces finds each kind of fault that check() finds, but the two it names.

That it raises no false alarm while everything changes is test_index_model.py's affair.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from kvstore.prefix_index.index import PrefixIndex
from kvstore.prefix_index.page_table import DISK, HAS_EXTRAS, HELD, HOST, NO_PAGE
from kvstore.prefix_index.piecewise_check import PieceSizes

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = b"r" * 32
PAGE_TOKENS = 2
SMALL = PieceSizes(rows=4, nodes=2, edge_pages=3, children=2, items=2)


def add(index: PrefixIndex, parent: int, tokens: list[int], extras: bytes = b"") -> np.ndarray:
    """Pages in the host tier; slots are the ids."""
    count = len(tokens)
    run = np.repeat(np.array(tokens, "<i4"), PAGE_TOKENS).tobytes()
    sequences = np.arange(count, dtype=np.uint64)
    sums = np.zeros((count, 2), np.uint64)
    more = {0: extras} if extras else None
    ids = index.insert(
        ROOT, PAGE_TOKENS, parent, run, more, sums.tobytes(), sequences, 64, sums, 1.0
    )
    index.set_tier(ids, HOST, ids.astype(np.int64))
    return ids


def made() -> PrefixIndex:
    """A chain with a fork of many, one with extras, a lease and a pin; and rows that are free."""
    index = PrefixIndex()
    trunk = add(index, NO_PAGE, list(range(6)))
    for number in range(5):
        add(index, int(trunk[-1]), [100 + number, 7], b"x" if number == 2 else b"")
    gone = add(index, NO_PAGE, [55, 56])
    index.clear_tier(gone, HOST)
    index.remove(gone[::-1])
    index.set_tier(trunk[:2], DISK, trunk[:2].astype(np.int64))
    index.lease(int(trunk[-1]))
    index.pin(int(trunk[3]), 10.0)
    return index


def lost_flag(index: PrefixIndex) -> None:
    index.table.state[5] ^= HELD


def lost_slot(index: PrefixIndex) -> None:
    index.table.slot[HOST][9] = -1


def nowhere(index: PrefixIndex) -> None:
    index.table.state[9] &= 0xFF ^ 1 << HOST
    index.table.slot[HOST][9] = -1


def below_too_high(index: PrefixIndex) -> None:
    index.table.below[HOST][5] += 1


def below_where_no_child_is(index: PrefixIndex) -> None:
    index.table.below[DISK][9] = 1


def lost_extras(index: PrefixIndex) -> None:
    index.table.extras.clear()


def unflagged_extras(index: PrefixIndex) -> None:
    (page,) = index.table.extras
    index.table.state[page] ^= HAS_EXTRAS


def wrong_parent(index: PrefixIndex) -> None:
    index.table.parent[3] = 1


def wrong_depth(index: PrefixIndex) -> None:
    index.table.depth[3] = 9


def wrong_edge(index: PrefixIndex) -> None:
    index.table.node[3] = index.table.node[9]


def a_child_under_another_key(index: PrefixIndex) -> None:
    children = next(each for each in index._nodes.children if each and len(each) > 2)
    first, second = list(children)[:2]
    children[first], children[second] = children[second], children[first]


def a_child_that_is_not_found(index: PrefixIndex) -> None:
    children = next(each for each in index._nodes.children if each and len(each) > 2)
    del children[next(iter(children))]


def a_free_row_that_is_used(index: PrefixIndex) -> None:
    index.table._free.append(3)


def a_row_that_is_twice_free(index: PrefixIndex) -> None:
    index.table._free[-1] = index.table._free[-2]


def a_free_node_that_is_used(index: PrefixIndex) -> None:
    index._nodes._free.append(int(index.table.node[3]))


def a_wrong_count_of_a_tree(index: PrefixIndex) -> None:
    index.trees()[0].pages += 1


def a_wrong_count_of_extras(index: PrefixIndex) -> None:
    index.trees()[0].pages_with_extras -= 1


def a_wrong_count_of_a_tier(index: PrefixIndex) -> None:
    index._residency._counts[DISK] -= 1


FAULTS: list[Callable[[PrefixIndex], None]] = [
    *(lost_flag, lost_slot, nowhere, below_too_high, below_where_no_child_is),
    *(lost_extras, unflagged_extras, wrong_parent, wrong_depth, wrong_edge),
    *(a_child_under_another_key, a_child_that_is_not_found),
    *(a_free_row_that_is_used, a_row_that_is_twice_free, a_free_node_that_is_used),
    *(a_wrong_count_of_a_tree, a_wrong_count_of_extras, a_wrong_count_of_a_tier),
]


@pytest.mark.parametrize("sizes", [SMALL, PieceSizes()], ids=["small pieces", "usual pieces"])
def test_a_sound_index_passes_however_small_the_pieces(sizes: PieceSizes) -> None:
    index = made()
    index.check()
    assert sum(1 for _ in index.check_in_pieces(sizes)) > 5
    assert not index._residency.recounts, "nobody counts along when it has ended"


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_is_found(fault: Callable[[PrefixIndex], None]) -> None:
    index = made()
    fault(index)
    with pytest.raises(AssertionError):
        index.check()
    with pytest.raises(AssertionError):
        list(index.check_in_pieces(SMALL))
    assert not index._residency.recounts


def test_a_walk_that_is_given_up_counts_no_longer() -> None:
    index = made()
    walk = index.check_in_pieces(SMALL)
    next(walk)
    assert len(index._residency.recounts) == 1
    walk.close()
    assert not index._residency.recounts


def test_a_fault_that_arises_behind_the_walk_is_found() -> None:
    """All rows have been looked at when a count goes wrong; a page leaves after that."""
    index = made()
    walk = index.check_in_pieces(SMALL)
    for _ in range(2 + -(-index.table.rows // SMALL.rows)):
        next(walk)
    last = index.table.live()[-1:]
    index.clear_tier(last, HOST)
    index._residency._counts[HOST] += 1
    index.remove(last)
    with pytest.raises(AssertionError, match="tier 0"):
        list(walk)
