"""The nodes of all radix trees, as parallel lists by node number.

A node is the edge above it: a run of whole pages (their tokens as one bytes object, their ids as
another) and its children by their first page's bytes. Bytes, because bytes.startswith compares an
edge with a prompt at the speed of memory, a slice splits it, and the garbage collector never looks
inside. A tree's root is a node without pages.

Invariant: the pages of node n are those whose table.node is n, in order of depth.
"""

from __future__ import annotations

import sys
from array import array
from typing import TYPE_CHECKING

import numpy as np

from kvstore.prefix_index.page_table import NO_PAGE, Ids, PageTable

if TYPE_CHECKING:
    from collections.abc import Iterator

NO_NODE = -1
PAGE_ID_BYTES = 4
CHILD_BYTES = 32  # a node's number as a dict's value


class NodeTable:
    """Edges and children by node number. The trees change it; residency walks it upwards."""

    def __init__(self, table: PageTable) -> None:
        self._table = table
        self._free: list[int] = []
        self.tokens: list[bytes] = []
        self.pages: list[bytes] = []  # ids, int32 in machine order
        self.children: list[dict[bytes, int] | None] = []
        self.parent = array("i")  # of a free node: itself
        self.tree = array("i")
        self.edge_bytes = 0  # of tokens and page ids in edges; the trees count it
        self._branch_bytes = 0  # of dicts of children and their keys

    def __len__(self) -> int:
        """Nodes in use, the roots included."""
        return len(self.tokens) - len(self._free)

    @property
    def nbytes(self) -> int:
        """Bytes of all nodes, their tokens included. Counted as they change, so that asking is
        cheap; check() recounts."""
        own = sum(sys.getsizeof(column) for column in vars(self).values())
        headers = 2 * len(self.tokens) * sys.getsizeof(b"")
        return own + headers + self.edge_bytes + self._branch_bytes

    def add(self, tree: int, tokens: bytes, pages: bytes) -> int:
        """A new node that hangs nowhere yet."""
        if not self._free:
            return self.add_many(tree, [tokens], [pages])[0]
        node = self._free.pop()
        self.tokens[node], self.pages[node] = tokens, pages
        self.parent[node], self.tree[node] = NO_NODE, tree
        return node

    def add_many(self, tree: int, tokens: list[bytes], pages: list[bytes]) -> range:
        """New nodes that hang nowhere yet, with consecutive numbers."""
        first = len(self.tokens)
        count = len(tokens)
        self.tokens += tokens
        self.pages += pages
        self.children += [None] * count
        self.parent.extend(array("i", [NO_NODE]) * count)
        self.tree.extend(array("i", [tree]) * count)
        return range(first, first + count)

    def hang(self, parent: int, key: bytes, child: int) -> None:
        """Make `child` the one that `parent` finds by `key`, in place of any other."""
        self.parent[child] = parent
        children = self.children[parent]
        if children is None:
            children = self.children[parent] = {key: child}
            self._branch_bytes += sys.getsizeof(children) + _key_bytes(key)
            return
        before = sys.getsizeof(children), len(children)
        children[key] = child
        self._branch_bytes += sys.getsizeof(children) - before[0]
        if len(children) > before[1]:
            self._branch_bytes += _key_bytes(key)

    def discard(self, node: int) -> None:
        """Free a node that nothing refers to any more."""
        self.tokens[node] = self.pages[node] = b""
        self._branch_bytes -= _branch_bytes(self.children[node])
        self.children[node] = None
        self.parent[node] = node
        self.tree[node] = NO_NODE
        self._free.append(node)

    def drop_child(self, node: int, key: bytes) -> None:
        children = self.children[node]
        assert children is not None, f"node {node} has no children"
        del children[key]
        self._branch_bytes -= _key_bytes(key)
        if not children and self.parent[node] != NO_NODE:
            self._branch_bytes -= sys.getsizeof(children)
            self.children[node] = None

    def child_count(self, node: int) -> int:
        children = self.children[node]
        return 0 if children is None else len(children)

    def ids(self, node: int) -> Ids:
        """Page ids of the node's edge, read-only, in order of depth."""
        return np.frombuffer(self.pages[node], np.int32)

    def place(self, page: int) -> tuple[int, int]:
        """Node of a live page, and its position in the edge."""
        node = int(self._table.node[page])
        first = int.from_bytes(self.pages[node][:PAGE_ID_BYTES], sys.byteorder)
        return node, int(self._table.depth[page]) - int(self._table.depth[first])

    def ancestors(self, page: int) -> Iterator[Ids]:
        """Runs of page ids, each in order of depth: the one that ends with `page` comes first, the
        one that begins its chain last."""
        node, position = self.place(page)
        run = self.ids(node)[: position + 1]
        while len(run):
            yield run
            node = self.parent[node]
            run = self.ids(node)

    def run(self, page: int) -> Ids:
        """The page and those below it up to the next fork or end, read-only."""
        node, position = self.place(page)
        runs = [self.pages[node][position * PAGE_ID_BYTES :]]
        while (children := self.children[node]) and len(children) == 1:
            (node,) = children.values()
            runs.append(self.pages[node])
        return np.frombuffer(b"".join(runs), np.int32)

    def chain(self, page: int) -> Ids:
        """Ids from the first page of the chain down to `page`."""
        node, position = self.place(page)
        runs = [self.pages[node][: (position + 1) * PAGE_ID_BYTES]]
        while (node := self.parent[node]) != NO_NODE:
            runs.append(self.pages[node])
        return np.frombuffer(b"".join(reversed(runs)), np.int32)

    def walk(self, node: int) -> Iterator[int]:
        """The node and all nodes below it, parents first."""
        stack = [node]
        while stack:
            node = stack.pop()
            yield node
            children = self.children[node]
            if children:
                stack.extend(reversed(children.values()))

    def ends(self, first: int, stop: int) -> Ids:
        """The last page of each chain that ends in one of the nodes [first, stop)."""
        pages, children = self.pages, self.children
        nodes = range(first, min(stop, len(pages)))
        found = [pages[n][-PAGE_ID_BYTES:] for n in nodes if not children[n] and pages[n]]
        return np.frombuffer(b"".join(found), np.int32)

    def tail_page(self, node: int) -> int:
        """Last page of a node's edge; NO_PAGE for a root."""
        last = self.pages[node][-PAGE_ID_BYTES:]
        return int.from_bytes(last, sys.byteorder) if last else NO_PAGE

    def trees_of(self, pages: Ids) -> Ids:
        """The numbers of these live pages' trees."""
        return np.frombuffer(self.tree, np.int32)[self._table.node[pages]]

    def free_nodes(self, first: int, stop: int) -> list[int]:
        """Part of the free list."""
        return self._free[first:stop]

    def check(self) -> None:
        """Recount bytes; raises AssertionError with the numbers when something is off."""
        edges = sum(map(len, self.tokens)) + sum(map(len, self.pages))
        assert edges == self.edge_bytes, f"edges of {edges} bytes, {self.edge_bytes} counted"
        branches = sum(map(_branch_bytes, self.children))
        counted = self._branch_bytes
        assert branches == counted, f"branches of {branches} bytes, {counted} counted"


def _key_bytes(key: bytes) -> int:
    return sys.getsizeof(key) + CHILD_BYTES


def _branch_bytes(children: dict[bytes, int] | None) -> int:
    return 0 if children is None else sys.getsizeof(children) + sum(map(_key_bytes, children))
