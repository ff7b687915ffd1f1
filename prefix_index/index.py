"""The prefix index: all radix trees, one page table, and who may leave a tier.

The face that the store uses. Pure: no I/O and no clock, `now` is Unix seconds from the caller. Not
thread-safe: the store holds its lock around each call. Roots come from tenant secrets, so a tree is
one tenant's, and no call looks from one tree into another.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from kvstore.prefix_index.bulk_load import Loaded, bulk_load
from kvstore.prefix_index.departure import BYTES_NO_LIMIT, PAGES_NO_LIMIT, Departure
from kvstore.prefix_index.node_table import NodeTable
from kvstore.prefix_index.page_key import Tokens, page_extras, run_length, token_bytes
from kvstore.prefix_index.page_table import (
    HAS_EXTRAS,
    HELD,
    NO_PAGE,
    PAGES_FIRST,
    TIER_BITS,
    Ids,
    PageTable,
    as_ids,
    rows_of,
)
from kvstore.prefix_index.piecewise_check import PieceSizes, check_in_pieces
from kvstore.prefix_index.radix_tree import EDGE_BYTES_MAX, RadixTree
from kvstore.prefix_index.residency import PINS_NO_LIMIT, Residency

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Generator, Mapping, Sequence

    from kvstore.prefix_index.edge_plan import PageRows

PINS_A_TIME = 128  # that end, at most, where somebody asks who may leave: 14 us each
_NOTHING = np.empty(0, np.int32)
_NOTHING.flags.writeable = False


class PageUses(Protocol):
    """Who wants to know which pages are used, new and forgotten. It must not call the index."""

    def inserted(
        self,
        ids: Ids,
        keys: npt.NDArray[np.uint64],
        parent: int,
        depth: int,
        page_tokens: int,
        payload_bytes: int,
        now: float,
        token_s: float,
    ) -> None:
        """A run of one chain, first page first; `keys` are the first halves of page keys."""

    def touched(self, ids: Ids, now: float) -> None:
        """Pages of one chain were used again."""

    def moved(self, ids: Ids, keys: npt.NDArray[np.uint64], tier: int, *, there: bool) -> None:
        """Pages are in a tier from now on, or are about to leave it."""

    def removed(self, ids: Ids, keys: npt.NDArray[np.uint64]) -> None:
        """Pages are about to be forgotten."""


class PrefixIndex:
    """Tokens to pages, and the state of each page. `table` columns are for reading."""

    def __init__(self, *, pages_expected: int = 0, edge_bytes_max: int = EDGE_BYTES_MAX) -> None:
        """Room for `pages_expected` pages is address space only; past it the table is copied."""
        self._edge_bytes_max = edge_bytes_max
        self.table = PageTable(max(pages_expected, PAGES_FIRST))
        self._nodes = NodeTable(self.table)
        self._residency = Residency(self.table, self._nodes)
        self._by_root: dict[bytes, RadixTree] = {}
        self._by_number: list[RadixTree | None] = []
        # Told the pages that came into a tier (True), or are about to leave it (False).
        self.observer: Callable[[Ids, int, bool], None] | None = None
        # Told of pages that are used, new or forgotten: the policy, to which ids are all.
        self.policy: PageUses | None = None

    def __len__(self) -> int:
        """Live pages."""
        return len(self.table)

    @property
    def nodes(self) -> int:
        """Nodes of all trees, their roots included."""
        return len(self._nodes)

    @property
    def leases(self) -> int:
        """Leases held now."""
        return self._residency.leases

    @property
    def pins(self) -> dict[int, float]:
        """When the pin of each pinned page ends."""
        return self._residency.pins

    def count_in(self, tier: int) -> int:
        """Pages in a tier."""
        return self._residency.count(tier)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole index, tokens included."""
        return self.table.nbytes + self._nodes.nbytes

    # Trees

    def tree(self, root: bytes, page_tokens: int) -> RadixTree:
        """The tree of a root, made if need be; it is dropped with its last page."""
        tree = self._by_root.get(root)
        if tree is None:
            if page_tokens < 1:
                raise ValueError(f"page_tokens {page_tokens} must be at least 1")
            if None in self._by_number:
                number = self._by_number.index(None)
            else:
                number = len(self._by_number)
                self._by_number.append(None)
            tree = RadixTree(
                number, root, page_tokens, self.table, self._nodes, self._edge_bytes_max
            )
            self._by_number[number] = self._by_root[root] = tree
        elif tree.page_tokens != page_tokens:
            raise ValueError(f"this root has pages of {tree.page_tokens} tokens, not {page_tokens}")
        return tree

    def trees(self) -> list[RadixTree]:
        return list(self._by_root.values())

    def find_tree(self, root: bytes) -> RadixTree | None:
        return self._by_root.get(root)

    def tree_of(self, page: int) -> RadixTree:
        """The tree of a live page. Raises ValueError for other ids."""
        self._expect_page(page)
        tree = self._by_number[self._nodes.tree[int(self.table.node[page])]]
        assert tree is not None, f"page {page} is in a dropped tree"
        return tree

    def root_of(self, page: int) -> bytes:
        return self.tree_of(page).root

    # Look-up

    def by_root(self, ids: Sequence[int] | Ids) -> list[tuple[bytes, Ids]]:
        """These pages tree by tree, in their order."""
        ids = as_ids(ids)
        if not len(ids):
            return []
        numbers = np.frombuffer(self._nodes.tree, np.int32)[self.table.node[ids]]
        if not np.count_nonzero(numbers != numbers[0]):  # a third of what .all() takes
            return [(self.root_of(int(ids[0])), ids)]
        order = np.argsort(numbers, kind="stable")
        cuts = np.flatnonzero(np.diff(numbers[order])) + 1
        return [(self.root_of(int(part[0])), part) for part in np.split(ids[order], cuts)]

    def by_tree(self, ids: Ids) -> tuple[list[bytes], npt.NDArray[np.intp]]:
        """The roots of these pages' trees, each once, and which of them each page's is."""
        numbers = np.frombuffer(self._nodes.tree, np.int32)[self.table.node[ids]]
        if not len(ids) or not np.count_nonzero(numbers != numbers[0]):
            places = np.zeros(len(ids), np.intp)
            return [self.root_of(int(ids[0]))] if len(ids) else [], places
        _, firsts, places = np.unique(numbers, return_index=True, return_inverse=True)
        return [self.root_of(page) for page in ids[firsts].tolist()], places

    def match(self, root: bytes, tokens: Tokens, extras: Mapping[int, bytes] | None = None) -> Ids:
        """Ids of the longest stored chain that begins `tokens`. Changes nothing; read-only result.

        `extras` is by page index. Raises ValueError for tokens outside [0, 2^31).
        """
        tree = self._by_root.get(root)
        if tree is None:
            return _NOTHING
        return tree.match(token_bytes(tokens), page_extras(extras))

    def touch(self, ids: Sequence[int] | Ids, now: float) -> None:
        """Pages were used: last use and hits. Each id once."""
        rows = rows_of(as_ids(ids))
        self.table.last_use[rows] = now
        self.table.hits[rows] += np.uint32(1)
        if self.policy is not None:
            self.policy.touched(as_ids(ids), now)

    def tokens_of(self, page: int) -> bytes:
        """The page's own tokens, int32 little-endian."""
        return self.tree_of(page).tokens_of(page)

    def extras_of(self, page: int) -> bytes:
        self._expect_page(page)
        return self.table.extras.get(page, b"")

    def chain(self, page: int) -> Ids:
        """Ids from the first page of the chain down to `page`."""
        self._expect_page(page)
        return self._nodes.chain(page)

    def children(self, page: int) -> list[int]:
        return self.tree_of(page).children(page)

    def run(self, page: int) -> Ids:
        """The page and those below it up to the next fork or end, read-only."""
        self._expect_page(page)
        return self._nodes.run(page)

    def subtree(self, page: int) -> Ids:
        """The page and all below it, parents before children."""
        return self.tree_of(page).subtree(page)

    def ends(self, first_node: int, stop_node: int) -> Ids:
        """The last page of each chain that ends in one of these nodes, of all trees."""
        return self._nodes.ends(first_node, stop_node)

    @property
    def node_rows(self) -> int:
        """Past the largest number of a node."""
        return len(self._nodes.tokens)

    def node_parents(self) -> Ids:
        """By number of a node the one above it: below 0 for the top of a tree, itself where there
        is none now. A copy, to add up what hangs below what."""
        return np.array(self._nodes.parent, np.int32)

    # Pages come and go

    def insert(
        self,
        root: bytes,
        page_tokens: int,
        parent: int,
        tokens: bytes,
        extras: Mapping[int, bytes] | None,
        keys: bytes,
        sequences: npt.NDArray[np.uint64],
        payload_bytes: int,
        checksums: npt.NDArray[np.uint64],
        now: float,
        writer_id: int = 0,
        token_s: float = 0.0,
    ) -> Ids:
        """Add a run of new pages under `parent` (NO_PAGE: the root); returns their ids.

        `extras` is by offset from the first new page. `keys` are 16 bytes a page, `checksums` of
        shape (n, 2). The pages are in no tier until set_tier, which must follow in the same step.
        `token_s` is for who wants to know of pages: seconds that computing a token took, or 0.
        Raises ValueError, and changes nothing, if the first page is there already or the parent
        is not a live page of this root.
        """
        count = run_length(tokens, page_tokens, keys, sequences, checksums)
        offsets = page_extras(extras)
        if any(offset >= count for offset in offsets):
            raise ValueError(f"extras for page {max(offsets)} of a run of {count}")
        if parent != NO_PAGE and self.root_of(parent) != root:
            raise ValueError(f"page {parent} is not under this root")
        tree = self.tree(root, page_tokens)
        first, first_extras = tokens[: tree.page_bytes], offsets.get(0, b"")
        if tree.child(parent, first, first_extras) != NO_PAGE:
            raise ValueError(f"page {parent} has this child already")
        table = self.table
        ids = table.allocate(count)
        for offset, value in offsets.items():
            page = int(ids[offset])
            table.extras[page] = value
            table.state[page] |= HAS_EXTRAS
        table.parent[ids[:1]] = parent
        table.parent[ids[1:]] = ids[:-1]
        depth = 0 if parent == NO_PAGE else int(table.depth[parent]) + 1
        table.depth[ids] = np.arange(depth, depth + count)
        table.key[ids] = np.frombuffer(keys, np.uint64).reshape(-1, 2)
        table.sequence[ids] = sequences
        table.checksum[ids] = checksums
        table.payload_bytes[ids] = payload_bytes
        table.last_use[ids] = now
        table.created[ids] = int(now)
        table.writer[ids] = writer_id
        tree.insert(parent, tokens, ids, first_extras)
        self._recount(tree, ids, 1)
        if self.policy is not None:
            self.policy.inserted(
                ids, table.key[ids, 0], parent, depth, page_tokens, payload_bytes, now, token_s
            )
        return ids

    def bulk_load(self, root: bytes, page_tokens: int, rows: PageRows, tier: int) -> Loaded:
        """Add rows of a catalog as pages of `tier`; the tree may hold pages already.

        What is unreachable, there already, or a twin is dropped with all below it and reported.
        To load a big tree in steps, give rows in order of sequence, and name parents that came
        with an earlier step by page id and sequence. Raises ValueError for shapes that disagree.
        """
        tree = self.tree(root, page_tokens)
        try:
            loaded = bulk_load(rows, tier, tree, self.table, self._nodes, self._residency)
            self._recount(tree, loaded.ids[loaded.ids != NO_PAGE], 1)
            return loaded
        finally:
            if not tree.pages:
                self._drop(tree)

    def remove(self, ids: Sequence[int] | Ids) -> None:
        """Forget pages, children before parents; an empty tree goes with its last page.

        Raises ValueError, and changes nothing, if a page still is in a tier, leased or pinned, or
        has a child that is not gone before it.
        """
        ids = as_ids(ids)
        self._expect_live(ids)
        if (self.table.state[ids] & (TIER_BITS | HELD)).any():
            raise ValueError("a page still is in a tier, leased or pinned")
        if len(np.unique(ids)) != len(ids):
            raise ValueError("a page is named twice")
        numbers = np.frombuffer(self._nodes.tree, np.int32)[self.table.node[ids]]
        parts = [(number, ids[numbers == number]) for number in np.unique(numbers).tolist()]
        trees = [(self._by_number[number], part) for number, part in parts]
        if len(trees) > 1:
            for tree, part in trees:
                assert tree is not None
                tree.expect_removable(part)
        if self.policy is not None and len(ids):
            self.policy.removed(ids, self.table.key[ids, 0])
        for tree, part in trees:
            assert tree is not None
            tree.remove(part)
            self._recount(tree, part, -1)
            self.table.release(part)
            if not tree.pages:
                self._drop(tree)

    # Tiers, leases, pins

    def set_tier(
        self, ids: Sequence[int] | Ids, tier: int, slots: Sequence[int] | npt.NDArray[np.int64]
    ) -> None:
        """Pages are now in a tier too. Raises ValueError if one already is, or is not live."""
        ids = as_ids(ids)
        self._expect_live(ids)
        self._residency.set_tier(ids, tier, np.asarray(slots, np.int64))
        if self.observer is not None:
            self.observer(ids, tier, True)
        if self.policy is not None:
            self.policy.moved(ids, self.table.key[ids, 0], tier, there=True)

    def clear_tier(self, ids: Sequence[int] | Ids, tier: int) -> npt.NDArray[np.int64]:
        """Pages have left a tier; returns their slots there. Ask may_leave or victims before.

        A page that has left its last tier must be removed in the same step.
        """
        ids = as_ids(ids)
        self._expect_live(ids)
        if self.observer is not None:
            self.observer(ids, tier, False)
        if self.policy is not None:
            self.policy.moved(ids, self.table.key[ids, 0], tier, there=False)
        return self._residency.clear_tier(ids, tier)

    def lease(self, page: int) -> None:
        """Hold a page and its whole chain in the tiers where they are. Counted."""
        self._expect_page(page)
        self._residency.lease(page)

    def unlease(self, page: int) -> None:
        self._residency.unlease(page)

    def leases_of(self, page: int) -> int:
        return self._residency.leases_of(page)

    def pin(self, page: int, until: float) -> None:
        """Hold a page and its whole chain until a time; the later end of two counts."""
        self._expect_page(page)
        self._residency.pin(page, until)

    def unpin(self, page: int) -> bool:
        """End a pin now. False if there was none."""
        return self._residency.unpin(page)

    def is_pinned(self, page: int) -> bool:
        return self._residency.is_pinned(page)

    def expire_pins(self, now: float, most: int = PINS_NO_LIMIT) -> int:
        return self._residency.expire_pins(now, most)

    # Who may leave

    def may_leave(self, page: int, tier: int, now: float) -> bool:
        """Leaf rule, last-tier rule, leases and pins, for one page at this moment."""
        self._residency.expire_pins(now, PINS_A_TIME)
        return self.table.is_live(page) and self._residency.may_leave(page, tier)

    def candidates(self, tier: int, now: float, roots: Collection[bytes] | None = None) -> Ids:
        """Pages of a tier that may leave, now or after their descendants. Ascending ids."""
        self._residency.expire_pins(now, PINS_A_TIME)
        return self._of_roots(self._residency.resident(tier), roots)

    def evictable(self, tier: int, now: float, roots: Collection[bytes] | None = None) -> Ids:
        """Pages for which may_leave holds now. Ascending ids."""
        self._residency.expire_pins(now, PINS_A_TIME)
        return self._of_roots(self._residency.free_to_leave(tier), roots)

    def some_evictable(
        self, tier: int, now: float, roots: Collection[bytes] | None, window: int, enough: int
    ) -> tuple[Ids, int]:
        """evictable() from a window of rows on until there are enough; where to go on."""
        self._residency.expire_pins(now, PINS_A_TIME)
        return self._residency.some_free_to_leave(
            tier, window, enough, lambda ids: self._of_roots(ids, roots)
        )

    def victims(
        self,
        tier: int,
        order: Sequence[int] | Ids,
        now: float,
        *,
        pages: int = PAGES_NO_LIMIT,
        payload_bytes: int = BYTES_NO_LIMIT,
    ) -> Ids:
        """Walk a ranking, best victim first, until so many pages or payload bytes are found.

        A page ranked before its children goes right after the last of them. Changes nothing:
        the pages may leave in the order returned, as long as nothing else happens before.
        """
        self._residency.expire_pins(now, PINS_A_TIME)
        departure = Departure(self.table, tier, pages, payload_bytes)
        departure.take_in_order(as_ids(order))
        return departure.taken

    def coldest(
        self,
        tier: int,
        now: float,
        *,
        pages: int = PAGES_NO_LIMIT,
        payload_bytes: int = BYTES_NO_LIMIT,
        scores: npt.NDArray[np.float64] | None = None,
        score: Callable[[Ids], npt.NDArray[np.float64]] | None = None,
        roots: Collection[bytes] | None = None,
        leaves: Ids | None = None,
    ) -> Ids:
        """Victims by ascending score, as `victims`: a column by page id, or a function of page ids;
        last use if neither is given.

        One numpy sweep over the table, or none where `leaves` are those that may leave now; then
        work in proportion to the pages found.
        """
        departure = Departure(self.table, tier, pages, payload_bytes)
        leaves = self.evictable(tier, now, roots) if leaves is None else leaves
        column = self.table.last_use if scores is None else scores
        departure.take_coldest(leaves, score or (lambda pages: column[pages]))
        return departure.taken

    def check(self) -> None:
        """Walk and recount everything; raises AssertionError with the numbers."""
        self.table.check()
        self._residency.check()
        self._nodes.check()
        found = sum(tree.check() for tree in self.trees())
        assert found == self.nodes, f"{found} nodes reached, {self.nodes} in use"
        pages = sum(tree.pages for tree in self.trees())
        assert pages == len(self), f"{pages} pages in trees, {len(self)} live"
        assert self.nodes <= len(self) + len(self._by_root), f"{self.nodes} nodes"
        extras = sum(tree.pages_with_extras for tree in self.trees())
        assert extras == len(self.table.extras), f"{extras} pages with extras counted"

    def check_in_pieces(self, sizes: PieceSizes | None = None) -> Generator[int]:
        """check(), but for what piecewise_check.py names, a piece at each step; see there."""
        return check_in_pieces(
            self.table, self._nodes, self._residency, self._by_number, sizes or PieceSizes()
        )

    def _recount(self, tree: RadixTree, ids: Ids, step: int) -> None:
        for recount in self._residency.recounts:
            recount.came(tree.number, ids, step)

    def _expect_page(self, page: int) -> None:
        if not self.table.is_live(page):
            raise ValueError(f"{page} is not a live page")

    def _expect_live(self, ids: Ids) -> None:
        table = self.table
        if len(ids) and (ids.min() < 0 or ids.max() >= table.rows or table.node[ids].min() < 0):
            raise ValueError(f"not all of {len(ids)} ids are live pages, as {ids[:3].tolist()}")

    def _of_roots(self, ids: Ids, roots: Collection[bytes] | None) -> Ids:
        if roots is None:
            return ids
        numbers = [tree.number for root in roots if (tree := self._by_root.get(root))]
        of_page = np.frombuffer(self._nodes.tree, np.int32)[self.table.node[ids]]
        return ids[np.isin(of_page, numbers)]

    def _drop(self, tree: RadixTree) -> None:
        tree.drop()
        del self._by_root[tree.root]
        self._by_number[tree.number] = None
