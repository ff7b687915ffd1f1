"""From catalog rows to the edges of a radix tree, in numpy: a million pages in about half a second.

Rows name their parent by row number and come in any order. What is found here: which rows are
twins of a sibling, which reach the root at all, which follow their parent on the same edge, and an
order in which each edge is one slice. Nothing here trusts the rows: cycles, dangling parents and
twins are dropped with all below them. It changes nothing.

Pointer doubling does the walking: jump[row] starts at the parent and jump = jump[jump] squares the
step, so the longest edge of n pages takes log2(n) sweeps (Wyllie's list ranking).
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from kvstore.prefix_index.page_table import NO_PAGE, Ids

if TYPE_CHECKING:
    from collections.abc import Mapping

Rows: TypeAlias = npt.NDArray[np.int64]

NO_ROW = -1
TOP = -2  # in place of an edge: the root, or a page that is not among the rows
_HASH_FACTOR = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True)
class PageRows:
    """Pages of one root as columns, one row a page; all arrays have the same length.

    A row's parent is another row. Where parent_rows is NO_ROW it is the root, or, if the rows come
    in pieces, a page that the tree holds already: `parent_pages` has its id and `parent_sequences`
    its sequence, so that a page that has gone since is noticed (root: NO_PAGE and 0).
    """

    tokens: npt.NDArray[np.int32]  # (n, page_tokens)
    parent_rows: npt.NDArray[np.integer]
    keys: npt.NDArray[np.uint64]  # (n, 2), as np.frombuffer sees 16 bytes
    sequences: npt.NDArray[np.uint64]
    payload_bytes: npt.NDArray[np.integer]
    checksums: npt.NDArray[np.uint64]  # (n, 2)
    created: npt.NDArray[np.integer]  # Unix seconds; also the last use
    writers: npt.NDArray[np.integer]
    slots: npt.NDArray[np.int64]
    extras: Mapping[int, bytes] = field(default_factory=dict)  # by row
    parent_pages: Ids | None = None
    parent_sequences: npt.NDArray[np.uint64] | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def expect_sound(self, page_tokens: int) -> None:
        """Raise ValueError unless shapes agree and parent rows exist."""
        n = len(self.tokens)
        if self.tokens.shape != (n, page_tokens) or self.tokens.dtype != np.int32:
            raise ValueError(f"tokens of shape {self.tokens.shape}, {self.tokens.dtype}")
        if self.keys.shape != (n, 2) or self.checksums.shape != (n, 2):
            raise ValueError(f"keys {self.keys.shape} and checksums must be of shape {(n, 2)}")
        columns = [self.parent_rows, self.sequences, self.payload_bytes, self.created]
        columns += [self.writers, self.slots]
        if (self.parent_pages is None) != (self.parent_sequences is None):
            raise ValueError("parent pages need their sequences, and the other way round")
        if self.parent_pages is not None and self.parent_sequences is not None:
            columns += [self.parent_pages, self.parent_sequences]
        if {column.shape for column in columns} != {(n,)}:
            raise ValueError(f"not all columns have {n} rows")
        if n and not NO_ROW <= self.parent_rows.min() <= self.parent_rows.max() < n:
            raise ValueError(f"parent rows must be in [-1, {n})")
        if n and self.slots.min() < 0:
            raise ValueError("slots must not be negative")


@dataclass(frozen=True, slots=True)
class EdgePlan:
    """Edges as slices of `order`: edge e is order[starts[e]:starts[e + 1]], parents first."""

    order: Rows  # row numbers, dropped rows left out
    starts: Rows  # of each edge, and the end of the last
    parent: Rows  # position in `order` of each page's parent; NO_ROW: not among these rows
    depth: Rows  # page index in the chain, of each page in order
    edge_parent: Rows  # edge above each edge; NO_ROW: not among these rows
    dropped: Rows  # row numbers, ascending


def plan_edges(
    rows: PageRows, lost: npt.NDArray[np.bool_], first_depth: Rows, edge_pages_max: int
) -> EdgePlan:
    """Lay out `rows`, without those that are `lost` for other reasons and all below them.

    `first_depth` is the page index of each row whose parent is no row; others are not looked at.
    """
    count = len(rows)
    parent = rows.parent_rows.astype(np.int64)
    lost = lost | (rows.tokens.min(axis=1, initial=0) < 0)
    lost |= _twins(rows, parent, lost)
    children = np.bincount(parent[~lost & (parent != NO_ROW)], minlength=count)
    follows = ~lost & (parent != NO_ROW)
    follows[follows] = children[parent[follows]] == 1
    head, position = _rank(np.where(follows, parent, np.arange(count)), follows.astype(np.int64))
    heads = np.flatnonzero(~follows)
    edge_of_row = np.full(count, NO_ROW)
    edge_of_row[heads] = np.arange(len(heads))
    edge = edge_of_row[head]  # NO_ROW: the row hangs on a cycle
    lengths = np.bincount(edge[edge != NO_ROW], minlength=len(heads))
    above = np.where(parent[heads] == NO_ROW, TOP, edge[parent[heads]])
    above[lost[heads]] = NO_ROW
    depth_of_edge = _edge_depths(above, first_depth[heads], lengths)
    kept = (edge != NO_ROW) & (depth_of_edge[edge] >= 0)
    # Edges in the order of their heads; a page's place is its edge's start plus its position.
    lengths[depth_of_edge[:-1] < 0] = 0
    offsets = np.cumsum(lengths) - lengths
    kept_rows = np.flatnonzero(kept)
    place = np.full(count + 1, NO_ROW)  # the last stands for NO_ROW
    place[kept_rows] = offsets[edge[kept_rows]] + position[kept_rows]
    order = np.empty(len(kept_rows), np.int64)
    order[place[kept_rows]] = kept_rows
    starts = np.flatnonzero(position[order] % edge_pages_max == 0)
    parent_place = place[parent[order]]
    edge_of_place = np.zeros(len(order) + 1, np.int64)
    edge_of_place[starts] = 1
    edge_of_place = np.cumsum(edge_of_place) - 1
    edge_of_place[-1] = NO_ROW  # stands for NO_ROW
    return EdgePlan(
        order=order,
        starts=np.append(starts, len(order)),
        parent=parent_place,
        depth=depth_of_edge[edge[order]] + position[order],
        edge_parent=edge_of_place[parent_place[starts]],
        dropped=np.flatnonzero(~kept),
    )


def _rank(jump: Rows, distance: Rows) -> tuple[Rows, Rows]:
    """Where each row ends up by following `jump` to a fixed point, and the summed distance.

    Rows on a cycle end up at a row that is no fixed point.
    """
    for _ in range(len(jump).bit_length() + 1):
        further = jump[jump]
        if np.array_equal(further, jump):
            break
        distance = distance + distance[jump]
        jump = further
    return jump, distance


def _edge_depths(above: Rows, first_depth: Rows, lengths: Rows) -> Rows:
    """Page index of each edge's first page; NO_ROW for edges that do not reach the top.

    `above` is the edge over each edge, TOP, or NO_ROW. One entry more stands for "no edge".
    """
    count = len(above)
    jump = np.append(above, (TOP, NO_ROW))  # fixed points, where indices TOP and NO_ROW find them
    jump[jump < 0] += count + 2
    distance = np.append(lengths, (0, 0))[jump]
    distance[:count][above == TOP] = first_depth[above == TOP]
    end, depth = _rank(jump, distance)
    return np.append(np.where(end[:count] == count + 2 + TOP, depth[:count], NO_ROW), NO_ROW)


def _twins(rows: PageRows, parent: Rows, lost: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Rows with the same parent, tokens and extras as an earlier row that is not lost."""
    count = len(rows)
    above = parent.copy()  # rows as they are, pages as -2 - id, the root as -1
    if rows.parent_pages is not None:
        outside = parent == NO_ROW
        above[outside] = -2 - rows.parent_pages[outside].astype(np.int64)
    children = np.bincount(parent[parent != NO_ROW], minlength=count)
    siblings = np.flatnonzero(~lost & ((parent == NO_ROW) | (children[parent] > 1)))
    mixed = above[siblings].astype(np.uint64)
    for column in range(rows.tokens.shape[1]):
        mixed *= _HASH_FACTOR
        mixed += rows.tokens[siblings, column].astype(np.uint64)
    if rows.extras:
        seeds = np.zeros(count, np.uint64)
        for row, value in rows.extras.items():
            seeds[row] = zlib.crc32(value)
        mixed ^= seeds[siblings] << np.uint64(32)
    by_hash = np.argsort(mixed, kind="stable")
    same = mixed[by_hash[1:]] == mixed[by_hash[:-1]]
    suspects = np.zeros(len(siblings), bool)
    suspects[by_hash[1:][same]] = suspects[by_hash[:-1][same]] = True
    twins = np.zeros(count, bool)
    seen = set()
    for row in siblings[suspects].tolist():
        name = (int(above[row]), rows.tokens[row].tobytes(), rows.extras.get(row, b""))
        twins[row] = name in seen
        seen.add(name)
    return twins


def hanging(rows: PageRows, plan: EdgePlan) -> dict[int, list[int]]:
    """Edges that hang under pages outside these rows (NO_PAGE: the root): edges by page id."""
    tops = np.flatnonzero(plan.edge_parent == NO_ROW)
    if rows.parent_pages is None:
        return {NO_PAGE: tops.tolist()} if len(tops) else {}
    pages = rows.parent_pages[plan.order[plan.starts[tops]]]
    groups: dict[int, list[int]] = {}
    for edge, page in zip(tops.tolist(), pages.tolist(), strict=True):
        groups.setdefault(page, []).append(edge)
    return groups
