"""The radix trees, folded for looking at: runs of pages without a fork are one line.

Changes nothing. The lock is held for one run at a time.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvstore.state import DISK, HOST, NO_PAGE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore.state import StoreState, TreeInfo

HEAD_TOKENS = 32  # of a run, to be shown
BRANCHES_MAX = 10_000  # of one answer


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
    with state.lock:
        state.require_open()
        chosen = [
            info
            for info in state.trees.values()
            if tenant in (None, info.tenant)
            and (namespace is None or info.namespace.startswith(namespace))
            and state.index.find_tree(info.root) is not None
        ]
    views, left = [], branches_max
    for info in chosen:
        view = _view(state, info, models.get(info.namespace, "?"), depth_max, left)
        left -= len(view.branches)
        views.append(view)
    return sorted(views, key=lambda view: -view.pages)


def _view(state: StoreState, info: TreeInfo, model: str, depth_max: int, most: int) -> TreeView:
    branches: list[Branch] = []
    walk = _branches(state, info, depth_max)
    for branch in walk:
        if len(branches) >= most:
            break
        branches.append(branch)
    else:
        most += 1
    with state.lock:
        tree = state.index.find_tree(info.root)
        pages = tree.pages if tree is not None else 0
    return TreeView(
        namespace=info.namespace.hex(),
        tenant=info.tenant,
        model=model,
        page_tokens=info.page_tokens,
        pages=pages,
        branches=tuple(branches),
        is_cut=len(branches) >= most,
    )


def _branches(state: StoreState, info: TreeInfo, depth_max: int) -> Iterator[Branch]:
    with state.lock:
        tops = _by_size(state, state.root_pages(info.root))
    waiting = [(page, sequence, 0) for page, sequence in reversed(tops)]
    while waiting:
        page, sequence, depth = waiting.pop()
        with state.lock:
            table = state.index.table
            if not table.is_live(page) or int(table.sequence[page]) != sequence:
                continue  # it left meanwhile, and all below it
            run = _run(state, page)
            below = _by_size(state, state.index.children(run[-1]))
            is_folded = depth + 1 >= depth_max
            yield_me = _branch(state, info, run, depth, len(below), is_folded)
        yield yield_me
        if not is_folded:
            waiting += [(child, mark, depth + 1) for child, mark in reversed(below)]


def _run(state: StoreState, page: int) -> list[int]:
    """The page and all below it up to the next fork or end."""
    run = [page]
    while len(below := state.index.children(run[-1])) == 1:
        run.append(int(below[0]))
    return run


def _by_size(state: StoreState, pages: list[int]) -> list[tuple[int, int]]:
    """Pages with their sequence numbers, those with the most below them first."""
    sizes = {page: len(state.index.subtree(page)) for page in pages}
    table = state.index.table
    return [
        (page, int(table.sequence[page])) for page in sorted(pages, key=lambda page: -sizes[page])
    ]


def _branch(
    state: StoreState, info: TreeInfo, run: list[int], depth: int, forks: int, is_folded: bool
) -> Branch:
    table, pages = state.index.table, np.array(run, np.int32)
    last = run[-1]
    head = b"".join(
        state.index.tokens_of(page) for page in run[: -(-HEAD_TOKENS // info.page_tokens)]
    )
    assert last != NO_PAGE
    return Branch(
        depth=depth,
        first_page=int(table.depth[run[0]]),
        pages=len(run),
        chain_id=table.key_of(last).hex(),
        tokens_head=tuple(np.frombuffer(head, "<i4")[:HEAD_TOKENS].tolist()),
        payload_bytes=int(table.payload_bytes[pages].sum()),
        host_pages=int(np.count_nonzero(state.in_tier(pages, HOST))),
        disk_pages=int(np.count_nonzero(state.in_tier(pages, DISK))),
        hits=int(table.hits[last]),
        forks=forks,
        folded_pages=len(state.index.subtree(last)) - 1 if is_folded else 0,
        pinned=state.is_pinned(last),
    )
