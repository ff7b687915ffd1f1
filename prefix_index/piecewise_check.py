"""The index's check in short pieces, between which everything may change.

What is compared in a piece is true in that piece. What spans pieces is counted by a Recount, which
is told of all changes. Left to check(): the bytes of nodes, and that every pin has an end. Pure:
whoever runs it holds the lock at each step.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from kvstore.prefix_index.page_table import HAS_EXTRAS, TIERS
from kvstore.prefix_index.recount import Recount

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Sequence

    from kvstore.prefix_index.node_table import NodeTable
    from kvstore.prefix_index.page_table import PageTable
    from kvstore.prefix_index.radix_tree import RadixTree
    from kvstore.prefix_index.residency import Residency

CHILD_PAGES = 8  # a child takes about as long to look at as so many pages of an edge


@dataclass(frozen=True, slots=True)
class PieceSizes:
    """What one piece looks at, at most: some milliseconds each."""

    rows: int = 8192
    nodes: int = 96
    edge_pages: int = 16_384
    children: int = 2048  # a node with more is looked at in pieces of its own
    items: int = 4096


def check_in_pieces(
    table: PageTable,
    nodes: NodeTable,
    residency: Residency,
    trees: Sequence[RadixTree | None],
    sizes: PieceSizes,
) -> Generator[int]:
    """See above: raises AssertionError with the numbers; what it yields only counts its pieces."""
    recount = Recount(table)
    residency.recounts.append(recount)
    pieces = 0
    try:
        for walk in (
            _free_rows(table),
            _pages(table, nodes, residency, recount, sizes.rows),
            _counts(table, residency, recount, trees, sizes),
            _holders(table, residency, sizes.items),
            _nodes(nodes, trees, sizes),
            _free_nodes(nodes, sizes.items),
        ):
            for _ in walk:
                pieces += 1
                yield pieces
    finally:
        residency.recounts.remove(recount)


def _free_rows(table: PageTable) -> Iterator[None]:
    """At one moment: as many rows are free as the free list has; what it has is looked at after."""
    free, live = table.free_rows(), np.count_nonzero(table.node[: table.rows] >= 0)
    assert live == len(table), f"{live} rows live, {len(table)} counted"
    rows = table.rows
    assert not len(free) or (free.min() >= 0 and free.max() < rows), "free row unknown"
    assert not (table.node[free] >= 0).any(), "a live page is in the free list"
    yield
    once = np.zeros(rows, bool)
    once[free] = True
    assert np.count_nonzero(once) == len(free), "a row is twice in the free list"
    yield


def _pages(
    table: PageTable, nodes: NodeTable, residency: Residency, recount: Recount, rows: int
) -> Iterator[None]:
    at, there = 0, 1
    while at < there:
        there = table.rows
        stop = min(at + rows, there)
        live = table.live(at, stop)
        table.check_rows(at, stop)
        residency.check_pages(live)
        recount.look(live, nodes.trees_of(live), stop, residency)
        at += rows
        if at >= there:
            recount.end()
        yield


def _counts(
    table: PageTable,
    residency: Residency,
    recount: Recount,
    trees: Sequence[RadixTree | None],
    sizes: PieceSizes,
) -> Iterator[None]:
    """All pages are counted: what the index says of them must be that."""
    residency.check_counts(recount)
    yield
    for at in range(0, table.rows, sizes.rows):
        live = table.live(at, at + sizes.rows)
        for tier in range(TIERS):
            wrong = np.count_nonzero(recount.below(live, tier) != table.below[tier][live])
            assert not wrong, f"tier {tier}: below is wrong for {wrong} pages"
        yield
    at = 0
    while at < len(trees):
        for tree in trees[at : at + sizes.items]:
            if tree is not None:
                pages = recount.pages.get(tree.number, 0)
                assert pages == tree.pages, f"{pages} pages found, {tree.pages} counted"
                flagged = recount.with_extras.get(tree.number, 0)
                counted = tree.pages_with_extras
                assert flagged == counted, f"{flagged} pages with extras, {counted} counted"
        at += sizes.items
        yield


def _holders(table: PageTable, residency: Residency, items: int) -> Iterator[None]:
    """Whoever is leased, pinned or has extras says so itself."""
    holders = residency.holders()
    yield
    for at in range(0, len(holders), items):
        residency.check_holders(holders[at : at + items])
        yield
    known = list(table.extras)
    yield
    for at in range(0, len(known), items):
        for page in known[at : at + items]:
            if page in table.extras:
                flagged = table.is_live(page) and table.state[page] & HAS_EXTRAS
                assert flagged, f"page {page} has extras and no flag"
        yield


def _nodes(
    nodes: NodeTable, trees: Sequence[RadixTree | None], sizes: PieceSizes
) -> Iterator[None]:
    at, wide = 0, []
    while at < len(nodes.tokens):
        pages = 0
        for node in range(at, min(at + sizes.nodes, len(nodes.tokens))):
            at = node + 1
            if nodes.parent[node] == node:  # free
                assert not nodes.pages[node], f"node {node} is free and has pages"
                continue
            tree = trees[nodes.tree[node]]
            assert tree is not None, f"node {node} is of a dropped tree"
            tree.check_node(node)
            if nodes.child_count(node) > sizes.children:
                wide.append(node)
            else:
                for key in nodes.children[node] or {}:
                    tree.check_child(node, key)
            # A child takes about as long to look at as so many pages of an edge.
            pages += len(nodes.ids(node)) + CHILD_PAGES * nodes.child_count(node)
            if pages > sizes.edge_pages:
                break
        yield
    for node in wide:
        yield from _children(nodes, trees, node, sizes.children)


def _children(
    nodes: NodeTable, trees: Sequence[RadixTree | None], node: int, children: int
) -> Iterator[None]:
    """Of a node with many children: those that were there at first, as far as they still are."""
    keys = iter(list(nodes.children[node] or ()))
    yield
    while some := list(islice(keys, children)):
        if nodes.parent[node] == node:
            return
        tree = trees[nodes.tree[node]]
        assert tree is not None, f"node {node} is of a dropped tree"
        for key in some:
            tree.check_child(node, key)
        yield


def _free_nodes(nodes: NodeTable, items: int) -> Iterator[None]:
    at = 0
    while some := nodes.free_nodes(at, at + items):
        wrong = [node for node in some if nodes.parent[node] != node or nodes.pages[node]]
        assert not wrong, f"{len(wrong)} nodes in use are in the free list, as node {wrong[:1]}"
        at += items
        yield
