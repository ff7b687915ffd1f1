"""Which pages a selection names, and which of them may go: found in short holds of the lock.

The page table is swept once, and what matters of it copied; all that follows works on the copies,
level by level of the trees, without the lock. Pages are told apart by their sequence numbers, and a
page is below another only if both copies say so, so that pages which come and go meanwhile cost at
most that some are missing: never one that was not named. Whoever acts on it looks again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from kvstore.errors import InvalidRequest
from kvstore.page_sweep import each_page
from kvstore.prefix_index.page_table import HELD, NO_PAGE, TIER_BITS, TIERS
from kvstore.request import checked_extras, checked_tokens

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from kvstore.removal import Selection
    from kvstore.state import StoreState, TreeInfo

    Test: TypeAlias = Callable[[NDArray[np.int32]], NDArray[np.bool_]]

ROWS_COPIED = 4096  # in one hold of the lock: all columns of them
_FREE, _LEASED, _PINNED = range(3)


@dataclass(frozen=True, slots=True)
class Pages:
    """Copies of what the page table said of some pages when they were looked at. By row."""

    ids: NDArray[np.int32]
    sequences: NDArray[np.uint64]
    parents: NDArray[np.int64]  # rows of these; -1: not among them
    depths: NDArray[np.int32]
    sizes: NDArray[np.uint32]
    states: NDArray[np.uint8]
    below: NDArray[np.int32]  # a column a tier
    begins: NDArray[np.bool_]  # with the prefix, and no page above it does
    named: NDArray[np.bool_]  # by writer and age itself, not for being below such a page

    def __len__(self) -> int:
        return len(self.ids)

    def levels(self) -> list[NDArray[np.int64]]:
        """Rows by depth, those without parents first."""
        order = np.argsort(self.depths, kind="stable")
        return np.split(order, np.flatnonzero(np.diff(self.depths[order])) + 1)

    def only(self, wanted: NDArray[np.bool_]) -> Pages:
        """Some of them."""
        if wanted.all():
            return self
        row = np.full(len(self) + 1, -1, np.int64)  # the last is that of parent -1
        row[:-1][wanted] = np.arange(np.count_nonzero(wanted))
        return Pages(
            self.ids[wanted],
            self.sequences[wanted],
            row[self.parents[wanted]],
            self.depths[wanted],
            self.sizes[wanted],
            self.states[wanted],
            self.below[wanted],
            self.begins[wanted],
            self.named[wanted],
        )


@dataclass(frozen=True, slots=True)
class Choice:
    """Pages that may go now, deepest first, and what is to be said of them and of the others."""

    ids: NDArray[np.int32]
    sequences: NDArray[np.uint64]
    chains: int  # ends of chains among them
    payload_bytes: int
    kept_leased: int
    kept_pinned: int
    kept_above: int


def named(state: StoreState, selection: Selection) -> Pages:
    """The pages that a selection names, each with all below it."""
    tops = _tops(state, selection) if selection.prefix is not None else None
    fits = _condition(state, selection)
    copies = _Copies()
    if fits is None or (tops is not None and not len(tops[0])):
        return copies.pages()
    if not (selection.names_whole_trees() or tops is not None or _any(state, fits)):
        return copies.pages()

    def look(live: NDArray[np.int32]) -> None:
        mine = live[_of_trees(state, selection, live)]
        begins = np.ones(len(mine), np.bool_) if tops is None else _are(state, mine, *tops)
        copies.add(state, mine, begins, fits(mine))

    each_page(state, look, rows=ROWS_COPIED)
    pages = copies.pages()
    if tops is not None:
        pages = pages.only(_with_all_below(pages, pages.begins))
    return pages.only(_with_all_below(pages, pages.named))


def choose(
    state: StoreState,
    pages: Pages,
    *,
    include_pinned: bool,
    tier: int | None,
    include_leased: bool = False,
) -> Choice:
    """What of the named pages may go now: of one tier only, if that is given."""
    state.require_open()
    state.end_pins()
    held = _held(state, pages, include_pinned, include_leased)
    there = np.ones(len(pages), np.bool_) if tier is None else pages.states >> tier & 1 == 1
    free = going = there & (held == _FREE)
    if tier is not None:
        going = _may_leave(pages, free, tier)
    order = np.argsort(pages.depths, kind="stable")[::-1]
    order = order[going[order]]
    above = pages.parents[order]
    is_inner = np.zeros(len(pages), np.bool_)
    is_inner[above[above >= 0]] = True
    return Choice(
        ids=pages.ids[order],
        sequences=pages.sequences[order],
        chains=int(np.count_nonzero(going & ~is_inner)),
        payload_bytes=int(pages.sizes[order].sum(dtype=np.int64)),
        kept_leased=int(np.count_nonzero(there & (held == _LEASED))),
        kept_pinned=int(np.count_nonzero(there & (held == _PINNED))),
        kept_above=int(np.count_nonzero(free & ~going)),
    )


def _with_all_below(pages: Pages, some: NDArray[np.bool_]) -> NDArray[np.bool_]:
    if some.all():
        return some
    chosen = some.copy()
    for level in pages.levels()[1:]:
        above = pages.parents[level]
        chosen[level] |= (above >= 0) & chosen[above]
    return chosen


@dataclass(slots=True)
class _Copies:
    """Pieces of columns, as they are found."""

    parts: list[tuple[NDArray[Any], ...]] = field(default_factory=list)

    def add(
        self,
        state: StoreState,
        live: NDArray[np.int32],
        begins: NDArray[np.bool_],
        named: NDArray[np.bool_],
    ) -> None:
        """Copy what the page table says of these. The lock is held."""
        table = state.index.table
        parents = table.parent[live]
        parent_sequences = np.where(parents == NO_PAGE, np.uint64(0), table.sequence[parents])
        self.parts.append(
            (
                *(live, table.sequence[live], parents, parent_sequences, table.depth[live]),
                *(table.payload_bytes[live], table.state[live]),
                np.stack([column[live] for column in table.below], axis=1),
                *(begins, named),
            )
        )

    def pages(self) -> Pages:
        """All of them, with parents found."""
        if not self.parts:
            empty: list[Any] = [np.zeros(0, kind) for kind in ("i4", "u8", "i8", "i4", "u4", "u1")]
            empty += [np.zeros((0, TIERS), np.int32), np.zeros(0, np.bool_), np.zeros(0, np.bool_)]
            return Pages(*empty)
        columns: list[Any] = [np.concatenate(column) for column in zip(*self.parts, strict=True)]
        ids, sequences, parents, parent_sequences, *rest = columns
        row_of = np.full(int(max(ids.max(initial=0), parents.max(initial=0))) + 2, -1, np.int64)
        row_of[ids] = np.arange(len(ids))
        rows = row_of[parents]  # of NO_PAGE: the last, which no page has
        same = (rows >= 0) & (sequences[rows] == parent_sequences)
        return Pages(ids, sequences, np.where(same, rows, -1), *rest)


def _any(state: StoreState, fits: Test) -> bool:
    """Whether any page fits at all: mostly none is too old, and there is nothing to copy."""
    found = [False]

    def look(live: NDArray[np.int32]) -> None:
        found[0] = found[0] or bool(fits(live).any())

    each_page(state, look)
    return found[0]


def _of_trees(
    state: StoreState, selection: Selection, live: NDArray[np.int32]
) -> NDArray[np.bool_]:
    """Which of these are in the trees of the selection."""
    if selection.names_no_tree():
        return np.ones(len(live), np.bool_)
    roots, places = state.index.by_tree(live)
    wanted = np.array([_is_of(selection, state.trees[root]) for root in roots], np.bool_)
    mine: NDArray[np.bool_] = wanted[places]
    return mine


def _is_of(selection: Selection, info: TreeInfo) -> bool:
    return (
        selection.root in (None, info.root)
        and selection.tenant in (None, info.tenant)
        and (selection.namespace is None or info.namespace.startswith(selection.namespace))
    )


def _condition(state: StoreState, selection: Selection) -> Test | None:
    """What of writer and ages to ask live pages under the lock; None where none can fit."""
    table = state.index.table
    tests: list[Test] = []
    if selection.writer is not None:
        number = state.writer_ids.get(selection.writer)
        if number is None:
            return None
        tests.append(lambda live: table.writer[live] == number)
    if selection.unused_for_s is not None:
        used_s = state.clock() - selection.unused_for_s
        tests.append(lambda live: table.last_use[live] < used_s)
    if selection.older_than_s is not None:
        made_s = state.wall_clock() - selection.older_than_s
        tests.append(lambda live: table.created[live] < made_s)

    def fits(live: NDArray[np.int32]) -> NDArray[np.bool_]:
        found = np.ones(len(live), np.bool_)
        for test in tests:
            found &= test(live)
        return found

    return fits


def _tops(state: StoreState, selection: Selection) -> tuple[NDArray[np.int32], NDArray[np.uint64]]:
    """The topmost pages of prompts that begin with the prefix, and their sequence numbers."""
    assert selection.prefix is not None
    root, table = selection.root, state.index.table
    if root is None or root not in state.trees:
        raise InvalidRequest("a prefix needs the namespace and tenant that it belongs to")
    tokens = checked_tokens(selection.prefix)
    page_bytes = 4 * state.trees[root].page_tokens
    whole = len(tokens) // page_bytes
    with state.lock:
        state.require_open()
        found = state.index.match(root, tokens, checked_extras(selection.extras))
        last = int(found[-1]) if len(found) else NO_PAGE
        sequence = table.sequence[last] if len(found) else np.uint64(0)
    if len(found) < whole:
        return np.zeros(0, np.int32), np.zeros(0, np.uint64)
    rest = tokens[whole * page_bytes :]
    if not rest:
        return np.array([last], np.int32), np.array([sequence])
    return _beginning(state, root, last, sequence, rest)


def _beginning(
    state: StoreState, root: bytes, above: int, above_sequence: np.uint64, tokens: bytes
) -> tuple[NDArray[np.int32], NDArray[np.uint64]]:
    """The pages right below one (NO_PAGE: the root) that begin so, by ascending id."""
    index, table = state.index, state.index.table
    below: list[tuple[int, int]] = []

    def look(live: NDArray[np.int32]) -> None:
        if above == NO_PAGE or table.sequence[above] == above_sequence:
            near = live[table.parent[live] == above]
            roots, places = index.by_tree(near)
            near = near[np.array([each == root for each in roots], np.bool_)[places]]
            below.extend(zip(near.tolist(), table.sequence[near].tolist(), strict=True))

    each_page(state, look)
    found = []
    for part in state.pieces(len(below)):
        with state.lock:
            state.require_open()
            for page, sequence in below[part]:
                same = table.is_live(page) and int(table.sequence[page]) == sequence
                if same and index.tokens_of(page).startswith(tokens):
                    found.append((page, sequence))
    ids, sequences = zip(*found, strict=True) if found else ((), ())
    return np.array(ids, np.int32), np.array(sequences, np.uint64)


def _are(
    state: StoreState,
    live: NDArray[np.int32],
    ids: NDArray[np.int32],
    sequences: NDArray[np.uint64],
) -> NDArray[np.bool_]:
    """Which of the live pages are among some, by ascending id. The lock is held."""
    places = np.searchsorted(ids, live).clip(max=len(ids) - 1)
    same: NDArray[np.bool_] = ids[places] == live
    same &= sequences[places] == state.index.table.sequence[live]
    return same


def _held(
    state: StoreState, pages: Pages, include_pinned: bool, include_leased: bool
) -> NDArray[np.uint8]:
    """By row, what keeps a page: a pin on it or below it, else a lease there."""
    rows = np.flatnonzero(pages.states & HELD)
    rows = rows[np.argsort(pages.depths[rows], kind="stable")]
    found = []
    for part in state.pieces(len(rows)):
        with state.lock:
            state.require_open()
            for row in rows[part].tolist():
                page, table = int(pages.ids[row]), state.index.table
                if not table.is_live(page) or table.sequence[page] != pages.sequences[row]:
                    continue
                if not include_pinned and state.is_pinned(page):
                    found.append((row, _PINNED))
                elif not include_leased and state.is_leased(page):
                    found.append((row, _LEASED))
    held = np.zeros(len(pages), np.uint8)
    for row, reason in sorted(found, key=lambda each: each[1] == _LEASED):
        while row >= 0 and held[row] == _FREE:
            held[row] = reason
            row = int(pages.parents[row])
    return held


def _may_leave(pages: Pages, free: NDArray[np.bool_], tier: int) -> NDArray[np.bool_]:
    """Which of the free pages may leave a tier, if all that may below them leave before.

    What departure.py rehearses page by page, on copies and level by level: a page goes if nothing
    below it stays active in the tier, and nothing below it is anywhere else if it has no other.
    """
    bit, active = 1 << tier, pages.below[:, tier].copy()
    elsewhere = np.delete(pages.below, tier, axis=1).any(axis=1)
    is_last = pages.states & TIER_BITS == bit
    may_go = free & (pages.states & HELD == 0) & ~(is_last & elsewhere)
    was_active = (pages.states & (bit | HELD) != 0) | (active != 0)
    going = np.zeros(len(pages), np.bool_)
    for level in reversed(pages.levels()):
        going[level] = may_go[level] & (active[level] == 0)
        stays = (pages.states[level] & HELD != 0) | (
            (pages.states[level] & bit != 0) & ~going[level]
        )
        fell = level[was_active[level] & ~stays & (active[level] == 0)]
        above = pages.parents[fell]
        np.subtract.at(active, above[above >= 0], 1)
    return going
