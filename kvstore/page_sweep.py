"""Looking at all pages, or all ends of chains, in pieces: a short hold of the lock for each.

What is promised while the store is in use: a page that is there from the first piece to the last is
looked at exactly once, since a page's id never changes. One that comes or leaves meanwhile may be
seen or not, and by the next piece its id may be another's: who keeps ids, keeps the pages' sequence
numbers with them, which no two pages ever share.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from numpy.typing import NDArray

    from kvstore.state import StoreState

ROWS_A_HOLD = 8192  # of the page table, looked at in one hold of the lock
NODES_A_HOLD = 1024


def _nothing() -> None:
    """Nothing."""


def each_rows(
    state: StoreState,
    look: Callable[[int, int], None],
    then: Callable[[], None] = _nothing,
    rows: int = ROWS_A_HOLD,
) -> None:
    """Look at all rows of the page table, [first, stop) of them in a hold; the last piece stops at
    what the table has in that hold. `then` follows each piece, without the lock."""
    table, at, there = state.index.table, 0, 1
    while at < there:
        with state.lock:
            state.require_open()
            there = table.rows
            look(at, min(at + rows, there))
        then()
        at += rows
        if at < there:
            state.breathe()


def each_page(
    state: StoreState,
    look: Callable[[NDArray[np.int32]], None],
    then: Callable[[], None] = _nothing,
    rows: int = ROWS_A_HOLD,
) -> None:
    """Look at all live pages, by ascending id; `then` follows each piece, without the lock."""
    table = state.index.table
    each_rows(state, lambda at, stop: look(table.live(at, stop)), then, rows)


def each_end(
    state: StoreState,
    look: Callable[[NDArray[np.int32]], None],
    nodes: int = NODES_A_HOLD,
    then: Callable[[], None] = _nothing,
) -> None:
    """Look at the last pages of all chains, node by node of the trees.

    Nodes are renumbered where edges split and merge: then one may be missed.
    """
    index, at, there = state.index, 0, 1
    while at < there:
        with state.lock:
            state.require_open()
            there = index.node_rows
            look(index.ends(at, at + nodes))
        then()
        at += nodes
        if at < there:
            state.breathe()


def chain_ends(state: StoreState, roots: Collection[bytes]) -> dict[bytes, list[tuple[int, int]]]:
    """The last page of each chain of these trees, and its sequence number, the oldest first."""
    number_of = {root: number for number, root in enumerate(roots)}
    parts: list[tuple[NDArray[Any], ...]] = []

    def look(live: NDArray[np.int32]) -> None:
        table = state.index.table
        found, places = state.index.by_tree(live)
        numbers = np.array([number_of.get(root, -1) for root in found], np.int64)[places]
        live, numbers = live[numbers >= 0], numbers[numbers >= 0]
        parts.append((live, numbers, table.sequence[live], table.parent[live]))

    each_page(state, look)
    made: dict[bytes, list[tuple[int, int]]] = {root: [] for root in roots}
    if not parts:
        return made
    ids, numbers, sequences, parents = map(np.concatenate, zip(*parts, strict=True))
    ends = np.flatnonzero(~np.isin(ids, parents))
    ends = ends[np.argsort(sequences[ends], kind="stable")]
    names = list(number_of)
    for number, page, sequence in zip(
        numbers[ends].tolist(), ids[ends].tolist(), sequences[ends].tolist(), strict=True
    ):
        made[names[number]].append((page, sequence))
    return made
