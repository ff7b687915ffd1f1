"""Fill a tree from catalog rows: what insert() would build page by page, at the speed of numpy.

The tree may hold pages already: rows can come in pieces, so that hits return while the rest loads.
Invariant: afterwards check() holds, and every row is either a page in the given tier or reported.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvstore.prefix_index.edge_plan import NO_ROW, EdgePlan, PageRows, hanging, plan_edges
from kvstore.prefix_index.node_table import PAGE_ID_BYTES, NodeTable
from kvstore.prefix_index.page_table import HAS_EXTRAS, NO_PAGE, Ids, PageTable

if TYPE_CHECKING:
    from kvstore.prefix_index.radix_tree import RadixTree
    from kvstore.prefix_index.residency import Residency


@dataclass(frozen=True, slots=True)
class Loaded:
    """What became of the rows: `ids` by row, NO_PAGE where dropped; `dropped` row numbers."""

    ids: Ids
    dropped: npt.NDArray[np.int64]


def bulk_load(
    rows: PageRows,
    tier: int,
    tree: RadixTree,
    table: PageTable,
    nodes: NodeTable,
    residency: Residency,
) -> Loaded:
    """Add the rows to `tree` as pages of `tier`.

    Dropped, with all below: rows that reach neither the root nor a page of the tree, whose parent
    page is not what it was (other sequence), or that the tree or an earlier row holds already.
    """
    rows.expect_sound(tree.page_tokens)
    lost = _lost(rows, tree, table, nodes)
    first_depth = _first_depth(rows, lost, table)
    plan = plan_edges(rows, lost, first_depth, tree.edge_bytes_max // tree.page_bytes)
    ids = table.allocate(len(plan.order))
    _fill_columns(rows, plan, ids, table)
    tree.count_in(ids)
    edges = _make_edges(rows, plan, ids, tree, nodes)
    table.node[ids] = np.repeat(edges, np.diff(plan.starts))
    inner = plan.parent[plan.parent != NO_ROW]
    children = np.bincount(inner, minlength=len(ids)).astype(np.int32)
    residency.load(ids, tier, rows.slots[plan.order], children, ids[plan.parent == NO_ROW])
    _hang(rows, plan, edges, tree, nodes)
    by_row = np.full(len(rows), NO_PAGE, np.int32)
    by_row[plan.order] = ids
    return Loaded(by_row, plan.dropped)


def _lost(
    rows: PageRows, tree: RadixTree, table: PageTable, nodes: NodeTable
) -> npt.NDArray[np.bool_]:
    """Rows that hang under a page that is gone, or that the tree holds already."""
    lost = np.zeros(len(rows), bool)
    tops = rows.parent_rows == NO_ROW
    if rows.parent_pages is not None and rows.parent_sequences is not None:
        pages = rows.parent_pages
        lost = np.where(pages == NO_PAGE, rows.parent_sequences != 0, (pages < 0))
        lost = tops & (lost | (pages >= table.rows))
        asked = np.flatnonzero(tops & (pages >= 0) & ~lost)
        node = table.node[pages[asked]]
        alive = (node >= 0) & (table.sequence[pages[asked]] == rows.parent_sequences[asked])
        alive &= np.frombuffer(nodes.tree, np.int32)[node] == tree.number
        lost[asked] = ~alive
    if tree.pages:
        for row in np.flatnonzero(tops & ~lost).tolist():
            page = NO_PAGE if rows.parent_pages is None else int(rows.parent_pages[row])
            tokens, extras = rows.tokens[row].tobytes(), rows.extras.get(row, b"")
            lost[row] = tree.child(page, tokens, extras) != NO_PAGE
    return lost


def _first_depth(
    rows: PageRows, lost: npt.NDArray[np.bool_], table: PageTable
) -> npt.NDArray[np.int64]:
    depth = np.zeros(len(rows), np.int64)
    if rows.parent_pages is not None:
        hung = ~lost & (rows.parent_rows == NO_ROW) & (rows.parent_pages != NO_PAGE)
        depth[hung] = table.depth[rows.parent_pages[hung]] + 1
    return depth


def _fill_columns(rows: PageRows, plan: EdgePlan, ids: Ids, table: PageTable) -> None:
    order = plan.order
    inner = plan.parent != NO_ROW
    parent = np.full(len(ids), NO_PAGE, np.int32)
    parent[inner] = ids[plan.parent[inner]]
    if rows.parent_pages is not None:
        parent[~inner] = rows.parent_pages[order[~inner]]
    table.parent[ids] = parent
    table.depth[ids] = plan.depth
    table.key[ids] = rows.keys[order]
    table.sequence[ids] = rows.sequences[order]
    table.checksum[ids] = rows.checksums[order]
    table.payload_bytes[ids] = rows.payload_bytes[order]
    table.created[ids] = table.last_use[ids] = rows.created[order]
    table.writer[ids] = rows.writers[order]
    if rows.extras:
        place = np.full(len(rows), NO_PAGE, np.int32)
        place[order] = ids
        for row, value in rows.extras.items():
            page = int(place[row])
            if page != NO_PAGE and value:
                table.extras[page] = bytes(value)
                table.state[page] |= HAS_EXTRAS


def _make_edges(
    rows: PageRows, plan: EdgePlan, ids: Ids, tree: RadixTree, nodes: NodeTable
) -> range:
    """A node for each edge, hung under those of its parent edge if that is among the rows."""
    page_bytes = tree.page_bytes
    tokens = rows.tokens[plan.order].tobytes()
    pages = ids.tobytes()
    bounds = plan.starts.tolist()
    edges = nodes.add_many(
        tree.number,
        [tokens[a * page_bytes : b * page_bytes] for a, b in pairwise(bounds)],
        [pages[a * PAGE_ID_BYTES : b * PAGE_ID_BYTES] for a, b in pairwise(bounds)],
    )
    for edge, above in enumerate(plan.edge_parent.tolist()):
        if above != NO_ROW:
            nodes.hang(edges[above], tree.first_key(edges[edge]), edges[edge])
    return edges


def _hang(rows: PageRows, plan: EdgePlan, edges: range, tree: RadixTree, nodes: NodeTable) -> None:
    """Hang the topmost edges under the root or under pages that were there before."""
    for page, tops in hanging(rows, plan).items():
        above = tree.branch_point(page)
        for edge in tops:
            nodes.hang(above, tree.first_key(edges[edge]), edges[edge])
        tree.merge(above)
