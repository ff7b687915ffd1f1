"""The radix trees, folded for looking at: runs of pages without a fork are one line.

Changes nothing. What hangs where is taken from a sweep over all pages, then the runs that are
shown are looked at a few at a time, each hold of the lock short: of a store in use, sums may be
older than what is said of a run, and what left in between is missing with all below it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvstore.page_sweep import ROWS_A_HOLD
from kvstore.prefix_index.page_table import rows_of
from kvstore.state import DISK, HOST, NO_PAGE, PIECE_PAGES
from kvstore.tree_map import PAGE_MASK, PAGES, measured

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore.state import StoreState, TreeInfo
    from kvstore.tree_map import Runs

HEAD_TOKENS = 32  # of a run, to be shown


@dataclass(frozen=True, slots=True)
class Branch:
    """A run of pages, and what hangs below it."""

    depth: int  # of branches above it
    first_page: int  # its page index
    pages: int
    chain_id: str  # hex of its last page's key
    tokens_head: tuple[int, ...]
    payload_bytes: int
    host_pages: int
    disk_pages: int
    hits: int  # of its last page
    forks: int  # branches right below
    folded_pages: int  # below it, where they are not shown
    pinned: bool


@dataclass(frozen=True, slots=True)
class TreeView:
    """One tree; branches parents first, the largest of several first."""

    namespace: str
    tenant: str
    model: str
    page_tokens: int
    pages: int
    branches: tuple[Branch, ...]
    is_cut: bool  # there are more branches than were asked for

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def tree_views(
    state: StoreState,
    models: dict[bytes, str],
    *,
    tenant: str | None,
    namespace: bytes | None,
    depth_max: int,
    branches_max: int,
) -> list[TreeView]:
    """The trees of a tenant and namespace, if they are given; `branches_max` of all together."""
    runs, tops = measured(state)
    chosen = [
        (top, info)
        for top, info in tops.items()
        if tenant in (None, info.tenant)
        and (namespace is None or info.namespace.startswith(namespace))
    ]
    views, left = [], branches_max
    for top, info in chosen:
        drawn = _drawn(runs, top, depth_max, left)
        branches = _labelled(state, info, drawn[:left])
        views.append(
            TreeView(
                namespace=info.namespace.hex(),
                tenant=info.tenant,
                model=models.get(info.namespace, "?"),
                page_tokens=info.page_tokens,
                pages=int(runs.total[PAGES, top]),
                branches=tuple(branches),
                is_cut=len(drawn) > left,
            )
        )
        left -= len(branches)
    return sorted(views, key=lambda view: -view.pages)


@dataclass(frozen=True, slots=True)
class _Drawn:
    """A branch as the sweep saw it."""

    depth: int
    first: int  # page id
    first_page: int
    above: int  # page id of the page right above it, NO_PAGE: none
    pages: int
    forks: int
    folded_pages: int


def _drawn(runs: Runs, top: int, depth_max: int, most: int) -> list[_Drawn]:
    """The branches of a tree, parents first; one more than `most` if there are more."""
    waiting = [(node, 0, NO_PAGE) for node in reversed(runs.by_pages(runs.below(top)))]
    made: list[_Drawn] = []
    while waiting and len(made) <= most:
        node, depth, above = waiting.pop()
        first = int(runs.first[node])
        pages, below = int(runs.own[PAGES, node]), runs.by_pages(runs.below(node))
        while len(below) == 1:  # an edge holds so many tokens: a long run is several
            (node,) = below
            pages, below = pages + int(runs.own[PAGES, node]), runs.by_pages(runs.below(node))
        is_folded = depth + 1 >= depth_max
        folded = int(runs.total[PAGES, node] - runs.own[PAGES, node]) if is_folded else 0
        made.append(_Drawn(depth, first & PAGE_MASK, first >> 32, above, pages, len(below), folded))
        if not is_folded:
            last = int(runs.last[node]) & PAGE_MASK
            waiting += [(child, depth + 1, last) for child in reversed(below)]
    return made


def _labelled(state: StoreState, info: TreeInfo, drawn: list[_Drawn]) -> list[Branch]:
    """What there is to say of them, but for those that left meanwhile, and all below these."""
    made: list[Branch] = []
    for part in _parts(drawn):
        with state.lock:
            state.require_open()
            made += [_branch(state, info, each) for each in part if _is_there(state, info, each)]
        state.breathe()
    return made


def _parts(drawn: list[_Drawn]) -> Iterator[list[_Drawn]]:
    """Such as one hold of the lock is enough for."""
    part: list[_Drawn] = []
    pages = 0
    for each in drawn:
        part.append(each)
        pages += each.pages
        if pages >= ROWS_A_HOLD or len(part) == PIECE_PAGES:
            yield part
            part, pages = [], 0
    if part:
        yield part


def _is_there(state: StoreState, info: TreeInfo, drawn: _Drawn) -> bool:
    """Whether the first page still stands where it stood: its id may be another's now."""
    index, page = state.index, drawn.first
    here = index.table.is_live(page) and index.root_of(page) == info.root
    place = int(index.table.parent[page]), int(index.table.depth[page])
    return here and place == (drawn.above, drawn.first_page)


def _branch(state: StoreState, info: TreeInfo, drawn: _Drawn) -> Branch:
    table, run = state.index.table, state.index.run(drawn.first)
    last, rows = int(run[-1]), rows_of(run)
    head = b"".join(
        state.index.tokens_of(page) for page in run[: -(-HEAD_TOKENS // info.page_tokens)].tolist()
    )
    return Branch(
        depth=drawn.depth,
        first_page=drawn.first_page,
        pages=len(run),
        chain_id=table.key_of(last).hex(),
        tokens_head=tuple(np.frombuffer(head, "<i4")[:HEAD_TOKENS].tolist()),
        payload_bytes=int(table.payload_bytes[rows].sum()),
        host_pages=int(np.count_nonzero(state.in_tier(run, HOST))),
        disk_pages=int(np.count_nonzero(state.in_tier(run, DISK))),
        hits=int(table.hits[last]),
        forks=drawn.forks,
        folded_pages=drawn.folded_pages,
        pinned=state.is_pinned(last),
    )
