"""A map of what is cached: the bytes and hits of runs of pages, and of all that hangs below them.

Measured in pieces while pages come and go: exact where nothing changes meanwhile. Costs a walk over
the page table with numpy, however the trees look, and its answer is bounded: small runs are joined.
"""

from __future__ import annotations

import heapq
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from kvstore.inspection import chain_to
from kvstore.page_sweep import ROWS_A_HOLD, each_page
from kvstore.state import HOST

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvstore.inspection import Chain
    from kvstore.state import StoreState, TreeInfo

BOXES_MAX = 600
BELOW_MAX = 100  # boxes right below one; the rest are joined into one more
SHARE_MIN = 1 / 2500  # of all bytes; what is smaller is joined
HEAD_TOKENS = 8  # of a run, to be shown
HOTTEST_MAX = 10
LEVELS_A_BREATH = 64
BYTES, PAGES, HITS, HOST_PAGES = range(4)
PAGE_MASK = 0xFFFFFFFF


@dataclass(slots=True)
class Box:
    """A tree, a run of pages, or several small runs that are joined; and all below it."""

    above: int  # the box that it hangs below; -1: none
    total_bytes: int
    total_pages: int
    host_pages: int  # of total_pages, those in memory
    own_pages: int  # of the run itself; of joined ones, all
    own_hits: int  # of these pages together
    runs: int  # how many stand together here; 0 for a tree
    first_page: int = 0  # its page index
    chain_id: str = ""  # hex of its last page's key; "" when the page left, and where runs > 1
    tokens_head: tuple[int, ...] = ()
    tenant: str = ""  # of a tree
    model: str = ""
    namespace: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain types only, for JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class TreeMap:
    """Boxes, each after the one that it hangs below."""

    boxes: tuple[Box, ...]
    total_bytes: int
    total_pages: int
    runs: int  # of all trees, shown or not
    hottest: tuple[Chain, ...]  # to the ends of runs, by hits of their last page


def tree_map(state: StoreState, models: dict[bytes, str]) -> TreeMap:
    """The map of all trees. `models`: names by namespace."""
    runs, tops = measured(state)
    drawing = _Drawing(runs, tops, models)
    boxes = drawing.boxes()
    _label(state, drawing)
    whole = runs.total[:, list(tops)].sum(axis=1) if tops else np.zeros(4, np.int64)
    return TreeMap(
        boxes=tuple(boxes),
        total_bytes=int(whole[BYTES]),
        total_pages=int(whole[PAGES]),
        runs=int(np.count_nonzero(runs.own[PAGES])),
        hottest=_hottest(state, runs, models),
    )


class Runs:
    """By number of a node: what its own pages sum up to, and with all below. Columns as above."""

    def __init__(self, above: NDArray[np.int32]) -> None:
        count = len(above)
        self.above = above
        self.own = np.zeros((4, count), np.int64)
        self.total = self.own
        # The pages at its ends, as page index << 32 | page id.
        self.first = np.full(count, np.iinfo(np.int64).max)
        self.last = np.full(count, -1, np.int64)
        self.oldest = np.full(count, np.iinfo(np.uint64).max)  # sequence number
        order = np.argsort(above, kind="stable")
        self._below = order[above[order] != order]  # not the numbers that are free
        self._above_of_below = above[self._below]

    def add(
        self,
        nodes: NDArray[np.int32],
        values: NDArray[np.int64],
        places: NDArray[Any],
        sequences: NDArray[np.uint64],
    ) -> None:
        """Pages of these nodes: what they add to the columns, and where they stand."""
        starts = np.concatenate(([0], np.flatnonzero(np.diff(nodes)) + 1))
        nodes = nodes[starts]
        for column, value in zip(self.own, values, strict=True):
            np.add.at(column, nodes, np.add.reduceat(value, starts))
        np.minimum.at(self.first, nodes, np.minimum.reduceat(places, starts))
        np.maximum.at(self.last, nodes, np.maximum.reduceat(places, starts))
        np.minimum.at(self.oldest, nodes, np.minimum.reduceat(sequences, starts))

    def add_up(self, state: StoreState) -> None:
        """Give each node what all below it have, the deepest first."""
        self.total = self.own.copy()
        there = np.flatnonzero(self.last >= 0)
        depth = self.first[there] >> 32
        order = np.argsort(-depth, kind="stable")
        there, cuts = there[order], np.flatnonzero(np.diff(depth[order])) + 1
        for number, level in enumerate(np.split(there, cuts)):
            hung = level[self.above[level] >= 0]
            for column in self.total:
                np.add.at(column, self.above[hung], column[hung])
            if number % LEVELS_A_BREATH == 0:
                state.breathe()

    def below(self, node: int) -> NDArray[np.int64]:
        """The nodes right below."""
        low, high = np.searchsorted(self._above_of_below, [node, node + 1])
        found: NDArray[np.int64] = self._below[low:high]
        return found

    def by_pages(self, nodes: NDArray[np.int64]) -> list[int]:
        """Those with the most pages first, of equal ones the oldest; not those without pages."""
        pages = self.total[PAGES, nodes]
        order = np.lexsort((self.oldest[nodes], -pages))
        found: list[int] = nodes[order[: int(np.count_nonzero(pages))]].tolist()
        return found

    def by_size(self, nodes: NDArray[np.int64]) -> NDArray[np.int64]:
        """The largest first; not those without pages."""
        sizes = self.total[BYTES, nodes]
        order = np.argsort(-sizes, kind="stable")
        return nodes[order[: int(np.count_nonzero(sizes))]]


def measured(state: StoreState) -> tuple[Runs, dict[int, TreeInfo]]:
    """Sums of all pages, looked at in pieces, and which nodes are tops of trees."""
    with state.lock:
        state.require_open()
        above, trees, infos = state.index.node_parents(), state.index.trees(), dict(state.trees)
    nodes_of = {tree.root: tree.root_node for tree in trees}
    tops = {nodes_of[root]: info for root, info in infos.items() if root in nodes_of}
    runs, table = Runs(above), state.index.table
    columns: list[NDArray[Any]] = []

    def copy(live: NDArray[np.int32]) -> None:
        nodes = table.node[live]
        live = live[nodes < len(above)]  # not those since made
        columns[:] = live, table.node[live], table.payload_bytes[live], table.hits[live]
        columns.extend((table.state[live], table.depth[live], table.sequence[live]))

    def add() -> None:
        ids, nodes, size, hits, tiers, depth, sequence = columns
        if len(ids):
            values = np.array([size, np.ones_like(size), hits, tiers >> HOST & 1], np.int64)
            runs.add(nodes, values, depth.astype(np.int64) << 32 | ids, sequence)

    each_page(state, copy, add)
    runs.add_up(state)
    return runs, tops


@dataclass(slots=True)
class _Drawing:
    """Opens the largest box again and again, until there are enough."""

    runs: Runs
    tops: dict[int, TreeInfo]
    models: dict[bytes, str]
    made: list[Box] = field(default_factory=list)
    nodes: list[int] = field(default_factory=list)  # by box; -1 where several are joined

    def boxes(self) -> list[Box]:
        """All boxes, from the trees down."""
        waiting: list[tuple[int, int]] = []
        tops = self.runs.by_size(np.array(list(self.tops), np.int64))
        smallest = int(self.runs.total[BYTES, tops].sum() * SHARE_MIN)
        self._add(-1, tops, smallest, waiting)
        while waiting and len(self.made) < BOXES_MAX:
            _, box = heapq.heappop(waiting)
            below = self.runs.by_size(self.runs.below(self.nodes[box]))
            self._add(box, below, smallest, waiting)
        return self.made

    def _add(
        self, box: int, nodes: NDArray[Any], smallest: int, waiting: list[tuple[int, int]]
    ) -> None:
        room = min(BELOW_MAX, BOXES_MAX - len(self.made) - 1)
        large = int(np.count_nonzero(self.runs.total[BYTES, nodes] >= smallest))
        shown = len(nodes) if len(nodes) <= min(large + 1, room) else min(large, room)
        for node in nodes[:shown].tolist():
            heapq.heappush(waiting, (-int(self.runs.total[BYTES, node]), len(self.made)))
            self.made.append(self._box(box, node))
            self.nodes.append(node)
        if shown < len(nodes):
            self.made.append(self._joined(box, nodes[shown:]))
            self.nodes.append(-1)

    def _box(self, above: int, node: int) -> Box:
        total, own = self.runs.total[:, node].tolist(), self.runs.own[:, node].tolist()
        info = self.tops.get(node)
        return Box(
            above=above,
            total_bytes=total[BYTES],
            total_pages=total[PAGES],
            host_pages=total[HOST_PAGES],
            own_pages=own[PAGES],
            own_hits=own[HITS],
            runs=0 if info else 1,
            first_page=int(self.runs.first[node] >> 32) if own[PAGES] else 0,
            tenant=info.tenant if info else "",
            model=self.models.get(info.namespace, "?") if info else "",
            namespace=info.namespace.hex() if info else "",
        )

    def _joined(self, above: int, nodes: NDArray[Any]) -> Box:
        total = self.runs.total[:, nodes].sum(axis=1).tolist()
        return Box(
            above=above,
            total_bytes=total[BYTES],
            total_pages=total[PAGES],
            host_pages=total[HOST_PAGES],
            own_pages=total[PAGES],
            own_hits=total[HITS],
            runs=len(nodes),
        )


def _label(state: StoreState, drawing: _Drawing) -> None:
    """Give runs that are still there their names and first tokens."""
    index, named = state.index, [box for box, node in enumerate(drawing.nodes) if node >= 0]
    for part in state.pieces(len(named)):
        with state.lock:
            state.require_open()
            for number in named[part]:
                node, box = drawing.nodes[number], drawing.made[number]
                last = int(drawing.runs.last[node]) & PAGE_MASK
                first = int(drawing.runs.first[node]) & PAGE_MASK
                if box.runs and _is_run(state, node, first, last):
                    box.chain_id = index.table.key_of(last).hex()
                    head = np.frombuffer(index.tokens_of(first), "<i4")[:HEAD_TOKENS]
                    box.tokens_head = tuple(head.tolist())


def _hottest(state: StoreState, runs: Runs, models: dict[bytes, str]) -> tuple[Chain, ...]:
    """The chains to the ends of runs, those whose last page hit most."""
    nodes = np.flatnonzero(runs.own[HITS])
    ends = runs.last[nodes] & PAGE_MASK
    hits = np.zeros(len(ends), np.int64)
    for at in range(0, len(ends), ROWS_A_HOLD):
        with state.lock:
            state.require_open()
            hits[at : at + ROWS_A_HOLD] = state.index.table.hits[ends[at : at + ROWS_A_HOLD]]
        state.breathe()
    found = []
    for number in np.argsort(-hits, kind="stable")[:HOTTEST_MAX].tolist():
        node, end = int(nodes[number]), int(ends[number])
        with state.lock:
            state.require_open()
            if hits[number] and _is_run(state, node, end, end):
                found.append(chain_to(state, models, end))
    return tuple(found)


def _is_run(state: StoreState, node: int, first: int, last: int) -> bool:
    """Whether these pages still are of one run, the node's."""
    table = state.index.table
    here = table.is_live(first) and table.is_live(last)
    return here and int(table.node[first]) == int(table.node[last]) == node
