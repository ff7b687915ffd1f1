"""One radix tree: token ids to page ids, for one root (namespace, tenant and salt).

An edge holds a run of whole pages. A child is found by its first page's bytes (tokens, then
extras), the rest of its edge is compared as memory: bytes.startswith does 64 edges of a 128 Ki
prompt in under 0.1 ms, where a loop over pages or over Python ints takes tens of milliseconds.
Page keys play no part: a hash is a hint, the tokens are the truth, and here they are at hand.

Edges split on page boundaries and merge again when one child is left. Ids are rows of the page
table and never change: splits and merges renumber nodes, not pages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvstore.prefix_index.node_table import PAGE_ID_BYTES, NodeTable
from kvstore.prefix_index.page_key import TOKEN_BYTES
from kvstore.prefix_index.page_table import HAS_EXTRAS, NO_PAGE, Ids, PageTable

if TYPE_CHECKING:
    from collections.abc import Mapping

# An edge is copied when a page is appended to it: past this a chain goes on in a new node.
EDGE_BYTES_MAX = 512 * 1024

_NOTHING = np.empty(0, np.int32)
_NOTHING.flags.writeable = False


class RadixTree:
    """The chains of one root. Knows tokens and structure; where pages are is residency's affair."""

    def __init__(
        self,
        number: int,
        root: bytes,
        page_tokens: int,
        table: PageTable,
        nodes: NodeTable,
        edge_bytes_max: int = EDGE_BYTES_MAX,
    ) -> None:
        self.number = number
        self.root = root
        self.page_tokens = page_tokens
        self.page_bytes = page_tokens * TOKEN_BYTES
        self.pages = 0
        self.pages_with_extras = 0
        self.edge_bytes_max = max(edge_bytes_max // self.page_bytes, 1) * self.page_bytes
        self._table = table
        self._nodes = nodes
        self.root_node = nodes.add(number, b"", b"")

    def match(self, tokens: bytes, extras: Mapping[int, bytes]) -> Ids:
        """Ids of the longest stored chain that is a prefix of `tokens`, read-only. No side effect.

        `extras` is by page index and holds no empty values; a trailing piece of a page is ignored.
        """
        page_bytes = self.page_bytes
        edges, pages, branches = self._nodes.tokens, self._nodes.pages, self._nodes.children
        runs = []
        at = 0
        last = len(tokens) - page_bytes  # where a whole page can still begin
        children = branches[self.root_node]
        while children and at <= last:
            key = tokens[at : at + page_bytes]
            if extras:
                key += extras.get(at // page_bytes, b"")
            node = children.get(key)
            if node is None:
                break
            edge = edges[node]
            if not tokens.startswith(edge, at):
                common = _common_pages(tokens, at, edge, page_bytes)
                runs.append(pages[node][: common * PAGE_ID_BYTES])
                break
            runs.append(pages[node])
            at += len(edge)
            children = branches[node]
        if not runs:
            return _NOTHING
        found = np.frombuffer(b"".join(runs), np.int32)
        if extras or self.pages_with_extras:
            found = found[: self._agreed(found, extras)]
        return found

    def child(self, parent: int, tokens: bytes, extras: bytes = b"") -> int:
        """The page under `parent` (NO_PAGE: the root) with these tokens and extras, or NO_PAGE."""
        node, position = self._below(parent)
        edge = self._nodes.tokens[node]
        at = position * self.page_bytes
        if at < len(edge):
            page = int(self._nodes.ids(node)[position])
            same = edge.startswith(tokens, at) and self._extras_of(page) == extras
            return page if same else NO_PAGE
        child = (self._nodes.children[node] or {}).get(tokens + extras)
        return NO_PAGE if child is None else int(self._nodes.ids(child)[0])

    def children(self, page: int) -> list[int]:
        """Ids of the pages right below `page` (NO_PAGE: the root)."""
        node, position = self._below(page)
        run = self._nodes.ids(node)
        if position < len(run):
            return [int(run[position])]
        below = self._nodes.children[node] or {}
        return [int(self._nodes.ids(child)[0]) for child in below.values()]

    def tokens_of(self, page: int) -> bytes:
        """The page's own tokens, int32 little-endian."""
        node, position = self._nodes.place(page)
        at = position * self.page_bytes
        return self._nodes.tokens[node][at : at + self.page_bytes]

    def subtree(self, page: int) -> Ids:
        """The page and all below it, parents first."""
        node, position = self._nodes.place(page)
        walk = self._nodes.walk(node)
        runs = [self._nodes.pages[next(walk)][position * PAGE_ID_BYTES :]]
        runs += [self._nodes.pages[below] for below in walk]
        return np.frombuffer(b"".join(runs), np.int32)

    def insert(self, parent: int, tokens: bytes, ids: Ids, first_extras: bytes = b"") -> None:
        """Hang a run of new pages under `parent`. Their rows are filled in, but for `node`.

        Raises ValueError, and changes nothing, if `parent` has the first page as a child already.
        """
        if self.child(parent, tokens[: self.page_bytes], first_extras) != NO_PAGE:
            raise ValueError(f"page {parent} has this child already")
        node = self.branch_point(parent)
        pages = ids.tobytes()
        edge = self._nodes.tokens[node]
        leaf = bool(edge) and not self._nodes.children[node]
        if leaf and len(edge) + len(tokens) <= self.edge_bytes_max:
            self._nodes.tokens[node] += tokens
            self._nodes.pages[node] += pages
            self._table.node[ids] = node
        else:
            self._hang(node, tokens, pages, first_extras)
        self.count_in(ids)

    def branch_point(self, parent: int) -> int:
        """The node that ends with `parent`; splits an edge if it must. NO_PAGE: the root node."""
        node, position = self._below(parent)
        if position * self.page_bytes < len(self._nodes.tokens[node]):
            node = self._split(node, position)
        return node

    def first_key(self, node: int) -> bytes:
        """By what the parent finds this node."""
        extras = self._extras_of(int(self._nodes.ids(node)[0])) if self.pages_with_extras else b""
        return self._nodes.tokens[node][: self.page_bytes] + extras

    def count_in(self, ids: Ids) -> None:
        """Account for pages that were hung into the tree."""
        self.pages += len(ids)
        self._nodes.edge_bytes += len(ids) * (self.page_bytes + PAGE_ID_BYTES)
        self.pages_with_extras += int(np.count_nonzero(self._table.state[ids] & HAS_EXTRAS))

    def remove(self, ids: Ids) -> None:
        """Take pages out, children first. Their rows stay; the caller releases them.

        Raises ValueError, and changes nothing, if a page has children that are not gone before it.
        """
        left = self.expect_removable(ids)
        shrunk = set()
        for node, pages_left in left.items():
            shrunk.add(self._nodes.parent[node])
            if pages_left:
                self._nodes.tokens[node] = self._nodes.tokens[node][: pages_left * self.page_bytes]
                self._nodes.pages[node] = self._nodes.pages[node][: pages_left * PAGE_ID_BYTES]
            else:
                self._nodes.drop_child(self._nodes.parent[node], self.first_key(node))
                self._nodes.discard(node)
        for node in shrunk:
            self.merge(node)
        self.pages -= len(ids)
        self._nodes.edge_bytes -= len(ids) * (self.page_bytes + PAGE_ID_BYTES)
        self.pages_with_extras -= int(np.count_nonzero(self._table.state[ids] & HAS_EXTRAS))

    def merge(self, node: int) -> None:
        """Join a node with its only child if both fit one edge. The child's number stays."""
        nodes = self._nodes
        children = nodes.children[node]
        if not nodes.tokens[node] or children is None or len(children) != 1:
            return
        (child,) = children.values()
        if len(nodes.tokens[node]) + len(nodes.tokens[child]) > self.edge_bytes_max:
            return
        above = nodes.parent[node]
        nodes.hang(above, self.first_key(node), child)
        self._table.node[nodes.ids(node)] = child
        nodes.tokens[child] = nodes.tokens[node] + nodes.tokens[child]
        nodes.pages[child] = nodes.pages[node] + nodes.pages[child]
        nodes.discard(node)

    def drop(self) -> None:
        """Free the root node of a tree without pages."""
        assert not self.pages, f"{self.pages} pages left"
        self._nodes.discard(self.root_node)

    def check(self) -> int:
        """Walk the tree; returns its nodes, raises AssertionError when something is off."""
        nodes = self._nodes
        count = pages = 0
        for node in nodes.walk(self.root_node):
            count += 1
            ids = nodes.ids(node)
            pages += len(ids)
            self._check_edge(node, ids)
            for key in nodes.children[node] or {}:
                self.check_child(node, key)
        assert pages == self.pages, f"{pages} pages found, {self.pages} counted"
        assert count <= pages + 1, f"{count} nodes for {pages} pages"
        return count

    def check_node(self, node: int) -> None:
        """One node in use, its place under the one above it included; raises AssertionError."""
        nodes, ids = self._nodes, self._nodes.ids(node)
        self._check_edge(node, ids)
        if node != self.root_node:
            above = nodes.parent[node]
            self.check_child(above, self.first_key(node))
            found = (nodes.children[above] or {}).get(self.first_key(node))
            assert found == node, f"node {node} does not stand under node {above}"

    def check_child(self, node: int, key: bytes) -> None:
        """What hangs below a node by this key, if there is anything; raises AssertionError."""
        nodes = self._nodes
        child = (nodes.children[node] or {}).get(key)
        if child is None:
            return
        assert nodes.parent[child] == node, f"node {child} has another parent"
        assert self.first_key(child) == key, f"node {child} stands under a wrong key"
        first = nodes.ids(child)[0]
        assert self._table.parent[first] == nodes.tail_page(node), "parent page"

    def _check_edge(self, node: int, ids: Ids) -> None:
        nodes, table = self._nodes, self._table
        edge = nodes.tokens[node]
        assert nodes.tree[node] == self.number, f"node {node} is of tree {nodes.tree[node]}"
        assert len(edge) == len(ids) * self.page_bytes <= self.edge_bytes_max, f"edge of {node}"
        assert (table.node[ids] == node).all(), f"node {node}: pages point elsewhere"
        assert (table.parent[ids[1:]] == ids[:-1]).all(), f"node {node}: parents in an edge"
        assert (table.depth[ids] == table.depth[ids[:1]] + np.arange(len(ids))).all(), "depth"
        children = nodes.children[node]
        if node == self.root_node:
            assert not len(ids), "the root node has pages"
            return
        assert len(ids), f"node {node} has no pages"
        above = nodes.tail_page(nodes.parent[node])
        depth = 0 if above == NO_PAGE else int(table.depth[above]) + 1
        assert table.depth[ids[0]] == depth, f"node {node} begins at a wrong depth"
        assert children is None or children, f"node {node} has an empty dict"
        if children and len(children) == 1:
            (child,) = children.values()
            joined = len(edge) + len(nodes.tokens[child])
            assert joined > self.edge_bytes_max, f"node {node} should be merged with {child}"

    def _below(self, parent: int) -> tuple[int, int]:
        if parent == NO_PAGE:
            return self.root_node, 0
        node, position = self._nodes.place(parent)
        return node, position + 1

    def _extras_of(self, page: int) -> bytes:
        return self._table.extras.get(page, b"")

    def _agreed(self, found: Ids, extras: Mapping[int, bytes]) -> int:
        """Pages of `found` before the first whose extras differ from those asked for."""
        stored = np.flatnonzero(self._table.state[found] & HAS_EXTRAS).tolist()
        for index in sorted({*stored, *(index for index in extras if index < len(found))}):
            if self._extras_of(int(found[index])) != extras.get(index, b""):
                return int(index)
        return len(found)

    def _split(self, node: int, position: int) -> int:
        """Cut an edge before `position`; returns the new node above the cut."""
        nodes = self._nodes
        above, key = nodes.parent[node], self.first_key(node)
        at, cut = position * self.page_bytes, position * PAGE_ID_BYTES
        head = nodes.add(self.number, nodes.tokens[node][:at], nodes.pages[node][:cut])
        nodes.tokens[node] = nodes.tokens[node][at:]
        nodes.pages[node] = nodes.pages[node][cut:]
        self._table.node[nodes.ids(head)] = head
        nodes.hang(above, key, head)
        nodes.hang(head, self.first_key(node), node)
        for shrunk in (above, node):
            self.merge(shrunk)  # into its child: `head` stays
        return head

    def _hang(self, node: int, tokens: bytes, pages: bytes, extras: bytes) -> None:
        step = self.edge_bytes_max
        id_step = step // self.page_bytes * PAGE_ID_BYTES
        for number, at in enumerate(range(0, len(tokens), step)):
            run = pages[number * id_step : (number + 1) * id_step]
            child = self._nodes.add(self.number, tokens[at : at + step], run)
            ids = self._nodes.ids(child)
            first_extras = extras if number == 0 else self._extras_of(int(ids[0]))
            self._nodes.hang(node, tokens[at : at + self.page_bytes] + first_extras, child)
            self._table.node[ids] = child
            node = child

    def expect_removable(self, ids: Ids) -> dict[int, int]:
        """Pages left in each node that loses some, in the order in which nodes run empty.

        Raises ValueError for a page that has children that are not gone before it.
        """
        left: dict[int, int] = {}
        emptied: dict[int, int] = {}  # node -> children gone
        at = 0
        while at < len(ids):
            node = int(self._table.node[ids[at]])
            run = self._nodes.ids(node)[: left.get(node)]
            wanted = ids[at : at + len(run)]
            differs = np.flatnonzero(wanted != run[::-1][: len(wanted)])
            taken = int(differs[0]) if len(differs) else len(wanted)
            if not taken or self._nodes.child_count(node) > emptied.get(node, 0):
                raise ValueError(f"page {ids[at]} has children, or is named twice")
            left[node] = len(run) - taken
            if taken == len(run):
                above = self._nodes.parent[node]
                emptied[above] = emptied.get(above, 0) + 1
            at += taken
        return left


def _common_pages(tokens: bytes, at: int, edge: bytes, page_bytes: int) -> int:
    """Whole pages that `edge` and tokens[at:] have in common, by bisection with memory compares."""
    view = memoryview(edge)
    low, high = 0, min(len(edge), len(tokens) - at) // page_bytes
    while low < high:  # pages [0, low) agree; if page `high` exists, it or one before differs
        middle = (low + high + 1) // 2
        if tokens.startswith(view[low * page_bytes : middle * page_bytes], at + low * page_bytes):
            low = middle
        else:
            high = middle - 1
    return low
