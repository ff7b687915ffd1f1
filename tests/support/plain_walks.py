"""What evict and tree are to answer of a store that nobody uses: page by page, as one would say it.

The reference for kvstore/page_choice.py and kvstore/tree_view.py, which do the same in short holds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvstore.removal import Eviction
from kvstore.state import DISK, HOST, NO_PAGE

if TYPE_CHECKING:
    from kvstore import Store
    from kvstore.removal import Selection
    from kvstore.state import StoreState


def plain_eviction(store: Store, chosen: Selection, *, include_pinned: bool = False) -> Eviction:
    """The answer of a dry run."""
    state = store.state
    table, tier = state.index.table, {None: None, "host": HOST, "disk": DISK}[chosen.tier]
    pages = with_all_below(state, named(state, chosen))
    held: dict[int, bool] = {}  # whether for a pin
    pinned = [page for page in pages if state.is_pinned(page) and not include_pinned]
    leased = [page for page in pages if state.is_leased(page)]
    for kept, is_pinned in ((pinned, True), (leased, False)):
        for page in kept:
            for above in state.index.chain(page)[::-1].tolist():
                held.setdefault(above, is_pinned)
    there = [page for page in pages if tier is None or table.state[page] >> tier & 1]
    free = [page for page in there if page not in held]
    going = free
    if tier is not None:
        order = np.array(free[::-1], np.int32)
        going = state.index.victims(tier, order, state.clock()).tolist()
    ends = [page for page in going if not set(state.index.children(page)) & set(going)]
    return Eviction(
        chains=len(ends),
        pages=len(going),
        payload_bytes=sum(int(table.payload_bytes[page]) for page in going),
        kept_leased=sum(held.get(page) is False for page in there),
        kept_pinned=sum(held.get(page) is True for page in there),
        dry_run=True,
        kept_above=len(free) - len(going),
    )


def named(state: StoreState, chosen: Selection) -> list[int]:
    """Pages for which every field holds."""
    table, found = state.index.table, []
    for page in table.live().tolist():
        info = state.trees[state.index.root_of(page)]
        line = state.index.chain(page).tolist()
        tokens = b"".join(state.index.tokens_of(each) for each in line)
        wanted = np.asarray(chosen.prefix if chosen.prefix is not None else [], "<i4").tobytes()
        fits = (
            chosen.root in (None, info.root),
            chosen.tenant in (None, info.tenant),
            chosen.namespace is None or info.namespace.startswith(chosen.namespace),
            tokens.startswith(wanted),
            chosen.writer in (None, state.writers[int(table.writer[page])]),
        )
        if all(fits):
            found.append(page)
    return found


def with_all_below(state: StoreState, pages: list[int]) -> list[int]:
    """Parents first."""
    found = {below for page in pages for below in state.index.subtree(page).tolist()}
    return sorted(found, key=lambda page: (int(state.index.table.depth[page]), page))


def plain_branches(
    state: StoreState, root: bytes, depth_max: int
) -> list[tuple[int, int, int, str, int, int]]:
    """Depth, first page, pages, id, forks and folded pages of each branch of a tree, in order."""
    index, found = state.index, []
    waiting = [(page, 0) for page in _largest_last(state, state.root_pages(root))]
    while waiting:
        page, depth = waiting.pop()
        run = [page]
        while len(below := index.children(run[-1])) == 1:
            run += below
        is_folded = depth + 1 >= depth_max
        folded = len(index.subtree(run[-1])) - 1 if is_folded else 0
        name = index.table.key_of(run[-1]).hex()
        first_page = int(index.table.depth[page])
        found.append((depth, first_page, len(run), name, len(below), folded))
        if not is_folded:
            waiting += [(child, depth + 1) for child in _largest_last(state, below)]
    return found


def _largest_last(state: StoreState, pages: list[int]) -> list[int]:
    assert NO_PAGE not in pages
    size = {page: len(state.index.subtree(page)) for page in pages}
    return sorted(pages, key=lambda page: -size[page])[::-1]
