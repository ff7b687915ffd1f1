"""Eviction on somebody's word: by prefix, tenant, namespace, writer, age or tier.

What is chosen goes with all below it, from every tier, its slots on disk are wiped, and Redis is
told to delete those pages too, for all stores that share it. Pages that somebody reads or writes
right now stay, and so do pinned ones unless asked otherwise; their ancestors stay with them. All is
counted in the answer. With a tier, pages leave that one only, and Redis is told nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from kvstore.errors import DirectoryError, InvalidRequest
from kvstore.ghost_list import Left
from kvstore.prefix_index.page_table import HELD
from kvstore.request import checked_extras, checked_tokens
from kvstore.state import DISK, HOST, NO_PAGE
from kvstore.tenant import check_name
from kvstore.tiers.tier import TierError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import NDArray

    from kvstore.disk_writer import DiskWriter
    from kvstore.redis_share import RedisShare
    from kvstore.redis_writer import RedisWriter
    from kvstore.request import Extras, Tokens
    from kvstore.state import StoreState

# Pages removed while the lock is held once: look-ups go on in between.
STEP_PAGES = 2000
WRITE_WAIT_S = 2.0
TIERS = {"host": HOST, "disk": DISK}


@dataclass(frozen=True, slots=True)
class Selection:
    """Which pages are meant: those for which every field that is set holds."""

    tenant: str | None = None
    namespace: bytes | None = None  # 16 bytes, or a prefix of them
    prefix: Tokens | None = None  # pages of prompts that begin with these tokens
    extras: Extras | None = None  # of the pages in `prefix`
    root: bytes | None = None
    writer: str | None = None
    unused_for_s: float | None = None  # not asked for in so many seconds
    older_than_s: float | None = None  # stored more than so many seconds ago
    everything: bool = False  # say so where no other field is set
    tier: str | None = None  # "host" or "disk": pages there, and from there only

    def __post_init__(self) -> None:
        """Refuse what selects nothing or all by accident: InvalidRequest."""
        for name, kind in (("tenant", str), ("namespace", bytes), ("root", bytes), ("writer", str)):
            value = getattr(self, name)
            if value is not None and not isinstance(value, kind):
                raise InvalidRequest(f"evict: {name} is {value!r}; {kind.__name__} is needed")
        for name in ("tenant", "namespace", "root"):
            if getattr(self, name) is not None and not getattr(self, name):
                raise InvalidRequest(f"evict: {name} is empty; leave it out to mean any")
        if self.prefix is not None and not len(self.prefix):  # it would begin every prompt
            raise InvalidRequest("evict: prefix is empty; leave it out to mean any")
        for name in ("unused_for_s", "older_than_s"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, int | float) and value >= 0):
                raise InvalidRequest(f"evict: {name} is {value!r}; seconds >= 0 are needed")
        if self.tier is not None and self.tier not in TIERS:
            raise InvalidRequest(f"evict: tier is {self.tier!r}; {' or '.join(TIERS)} is needed")
        if self.extras and self.prefix is None:
            raise InvalidRequest("evict: extras are those of a prefix, and there is none")
        fields = set(self.__dataclass_fields__) - {"everything", "extras"}
        if not self.everything and all(getattr(self, name) is None for name in fields):
            raise InvalidRequest(
                "evict: name a prefix, tenant, namespace, writer, age or tier, or say everything "
                "(--all)"
            )

    def names_a_tenant_only(self) -> bool:
        """Whether all pages of one tenant are meant, and nothing else."""
        others = set(self.__dataclass_fields__) - {"tenant", "everything", "extras"}
        return self.tenant is not None and all(getattr(self, name) is None for name in others)


@dataclass(frozen=True, slots=True)
class Eviction:
    """What went, or would go in a dry run."""

    chains: int  # ends of chains among the pages
    pages: int
    payload_bytes: int
    kept_leased: int  # chosen, but being read or written now, or above such a page
    kept_pinned: int
    dry_run: bool
    redis_pages: int = 0  # that Redis had too, and has deleted
    kept_above: int = 0  # nowhere but in the chosen tier, and pages elsewhere are below them


def select(state: StoreState, selection: Selection) -> NDArray[np.int32]:
    """Pages that a selection names, each with all below it; parents before children."""
    state.require_open()
    if selection.prefix is not None:
        tops = _by_prefix(state, selection)
    else:
        tops = [top for root in _roots(state, selection) for top in state.root_pages(root)]
    chosen = _by_columns(state, selection, tops)
    seen: dict[int, None] = {}
    for page in chosen:
        if page not in seen:
            seen.update(dict.fromkeys(state.index.subtree(page).tolist()))
    pages = np.fromiter(seen, dtype=np.int32, count=len(seen))
    return pages[np.argsort(state.index.table.depth[pages], kind="stable")]


def evict(
    state: StoreState,
    writer: DiskWriter | None,
    selection: Selection,
    *,
    dry_run: bool,
    include_pinned: bool = False,
    share: RedisShare | None = None,
    why: Left = Left.OPERATOR,
) -> Eviction:
    """Remove what `selection` names; see the module's docstring for what stays.

    Without `share` the pages stay in Redis, for the other stores.
    """
    if selection.tier is not None:
        return _evict_tier(state, selection, TIERS[selection.tier], dry_run=dry_run, why=why)
    with state.lock:
        pages = select(state, selection)
        if not dry_run:
            writers = [writer, share.writer if share is not None else None]
            pages = _leave_queues(state, [each for each in writers if each is not None], pages)
        going, kept_leased, kept_pinned = _removable(state, pages, include_pinned)
        chains = _ends_among(state, going)
        size = int(state.index.table.payload_bytes[going].sum())
        sequences = state.index.table.sequence[going].copy()
    report = Eviction(chains, len(going), size, kept_leased, kept_pinned, dry_run)
    if dry_run:
        return report
    order = going[::-1]  # deepest first
    left = 0
    gone: list[tuple[str, bytes, bytes]] = []
    for start in range(0, len(order), STEP_PAGES):
        step = slice(start, start + STEP_PAGES)
        left += _remove_step(state, order[step], sequences[::-1][step], include_pinned, gone, why)
    try:
        state.free_wiped_slots()
    except TierError as exc:
        raise DirectoryError(f"evicted from memory, but not wiped from disk: {exc}") from exc
    erased = _erase(state, share, gone)
    return replace(
        report, pages=len(going) - left, kept_leased=kept_leased + left, redis_pages=erased
    )


def _evict_tier(
    state: StoreState, selection: Selection, tier: int, *, dry_run: bool, why: Left
) -> Eviction:
    """Take pages out of one tier: those that are nowhere else are gone. The leaf rule holds."""
    with state.lock:
        pages = select(state, selection)
        free, kept_leased, kept_pinned = _removable(state, pages, False, tier)
        order = state.index.victims(tier, free[::-1], state.clock())
        chains = _ends_among(state, order)
        size = int(state.index.table.payload_bytes[order].sum())
        sequences = state.index.table.sequence[order].copy()
    kept_above = len(free) - len(order)
    report = Eviction(
        chains, len(order), size, kept_leased, kept_pinned, dry_run, kept_above=kept_above
    )
    if dry_run:
        return report
    left = 0
    for start in range(0, len(order), STEP_PAGES):
        step = slice(start, start + STEP_PAGES)
        left += _leave_step(state, order[step], sequences[step], tier, why)
    try:
        state.free_wiped_slots()
    except TierError as exc:
        raise DirectoryError(f"evicted, but not wiped from disk: {exc}") from exc
    return replace(report, pages=len(order) - left, kept_leased=kept_leased + left)


def _leave_step(
    state: StoreState,
    pages: NDArray[np.int32],
    sequences: NDArray[np.uint64],
    tier: int,
    why: Left,
) -> int:
    """Take pages (deepest first) that are still what they were out of a tier; how many stayed."""
    with state.lock:
        state.require_open()
        table = state.index.table
        same = (table.node[pages] >= 0) & (table.sequence[pages] == sequences)
        leaving = state.index.victims(tier, pages[same], state.clock())
        elsewhere = state.in_tier(leaving, HOST if tier == DISK else DISK)
        if tier == HOST:
            state.leave_host(leaving[elsewhere])
        else:
            state.leave_disk(leaving[elsewhere], wipe=True)
        state.remove_pages(leaving[~elsewhere], why, wipe=True)
        state.changed.notify_all()
    return len(pages) - len(leaving)


def _ends_among(state: StoreState, pages: NDArray[np.int32]) -> int:
    """How many of these pages have none of them below."""
    here = set(pages.tolist())
    return sum(
        not any(int(child) in here for child in state.index.children(page))
        for page in pages.tolist()
    )


def _erase(
    state: StoreState, share: RedisShare | None, gone: list[tuple[str, bytes, bytes]]
) -> int:
    """Delete pages in Redis, parents first so that what is left is never found; how many."""
    if share is None or not gone:
        return 0
    try:
        return share.tier.erase(gone[::-1])
    except TierError as exc:
        raise DirectoryError(
            f"evicted here, but not erased from Redis, where the pages end within "
            f"{state.config.redis_ttl_s:g} s: {exc}"
        ) from exc


def erase_key(state: StoreState, selection: Selection, *, dry_run: bool) -> None:
    """Delete the key of the selected tenant; its pages are to be evicted after it.

    Raises InvalidRequest where that makes no sense, DirectoryError when the key can't be deleted.
    """
    if not selection.names_a_tenant_only() or selection.tenant is None:
        raise InvalidRequest("evict: a key is erased with all of its tenant; name a tenant only")
    check_name("tenant", selection.tenant)
    cipher = state.disk.cipher if state.disk is not None else None
    if cipher is None:
        raise InvalidRequest("evict: nothing is encrypted here, so there is no key to erase")
    if dry_run:
        return
    try:
        cipher.erase(selection.tenant)
    except TierError as exc:
        raise DirectoryError(f"nothing is evicted: {exc}") from exc


def _by_prefix(state: StoreState, selection: Selection) -> Iterable[int]:
    assert selection.prefix is not None
    if selection.root is None or selection.root not in state.trees:
        raise InvalidRequest("a prefix needs the namespace and tenant that it belongs to")
    tokens = checked_tokens(selection.prefix)
    page_bytes = 4 * state.trees[selection.root].page_tokens
    whole = len(tokens) // page_bytes
    found = state.index.match(selection.root, tokens, checked_extras(selection.extras))
    if len(found) < whole:
        return []
    rest = tokens[whole * page_bytes :]
    last = int(found[-1]) if whole else NO_PAGE
    if not rest:
        return [last] if whole else state.root_pages(selection.root)
    below = state.index.children(last) if whole else state.root_pages(selection.root)
    return [page for page in below if state.index.tokens_of(page).startswith(rest)]


def _roots(state: StoreState, selection: Selection) -> Iterator[bytes]:
    for root, info in state.trees.items():
        if selection.root is not None and root != selection.root:
            continue
        if selection.tenant is not None and info.tenant != selection.tenant:
            continue
        namespace = selection.namespace
        if namespace is not None and not info.namespace.startswith(namespace):
            continue
        yield root


def _by_columns(state: StoreState, selection: Selection, tops: Iterable[int]) -> list[int]:
    """Those of the pages `tops` and all below them that writer and age fit."""
    table = state.index.table
    pages = [page for top in tops for page in state.index.subtree(top).tolist()]
    chosen = np.array(pages, dtype=np.int32)
    if selection.writer is not None:
        names = np.array([name == selection.writer for name in state.writers])
        chosen = chosen[names[table.writer[chosen]]]
    if selection.unused_for_s is not None:
        chosen = chosen[table.last_use[chosen] < state.clock() - selection.unused_for_s]
    if selection.older_than_s is not None:
        chosen = chosen[table.created[chosen] < state.wall_clock() - selection.older_than_s]
    out: list[int] = chosen.tolist()
    return out


def _leave_queues(
    state: StoreState, writers: list[DiskWriter | RedisWriter], pages: NDArray[np.int32]
) -> NDArray[np.int32]:
    """Stop writing what is about to go; wait for what is on its way this moment.

    Returns the pages that are still the same ones: others may have been evicted meanwhile.
    """
    going, table = set(pages.tolist()), state.index.table
    sequences = table.sequence[pages].copy()
    for writer in writers:
        writer.cancel(going)
    deadline = state.clock() + WRITE_WAIT_S
    while any(each.is_writing(going) for each in writers) and state.clock() < deadline:
        state.changed.wait(0.05)
    state.require_open()
    table = state.index.table
    same = [
        table.is_live(page) and int(table.sequence[page]) == sequence
        for page, sequence in zip(pages.tolist(), sequences.tolist(), strict=True)
    ]
    return pages[np.array(same, dtype=np.bool_)]


def _removable(
    state: StoreState, pages: NDArray[np.int32], include_pinned: bool, tier: int | None = None
) -> tuple[NDArray[np.int32], int, int]:
    """Pages that may go now, parents first, and how many stay for a lease or for a pin.

    tier: of the pages there only.
    """
    table = state.index.table
    held: dict[int, bool] = {}  # page -> True if for a pin
    for page in pages[table.state[pages] & HELD != 0].tolist():
        if state.is_leased(page):
            _mark_line(table.parent, page, False, held)
        elif not include_pinned and state.is_pinned(page):
            _mark_line(table.parent, page, True, held)
    if tier is not None:
        pages = pages[state.in_tier(pages, tier)]
    mask = np.array([page not in held for page in pages.tolist()], dtype=np.bool_)
    kept = [held[page] for page in pages[~mask].tolist()] if len(pages) else []
    return pages[mask] if len(pages) else pages, kept.count(False), kept.count(True)


def _mark_line(parent: NDArray[np.int32], page: int, pinned: bool, held: dict[int, bool]) -> None:
    while page != NO_PAGE and page not in held:
        held[page] = pinned
        page = int(parent[page])


def _remove_step(
    state: StoreState,
    pages: NDArray[np.int32],
    sequences: NDArray[np.uint64],
    include_pinned: bool,
    gone: list[tuple[str, bytes, bytes]],
    why: Left,
) -> int:
    """Remove pages (deepest first) that are still what they were; how many stayed after all.

    Adds (tenant, root, key) of the others to `gone`.
    """
    with state.lock:
        state.require_open()
        table = state.index.table
        going = []
        removed: set[int] = set()
        for page, sequence in zip(pages.tolist(), sequences.tolist(), strict=True):
            if not state.index.table.is_live(page) or int(table.sequence[page]) != sequence:
                continue
            held = state.is_leased(page)
            held |= not include_pinned and state.is_pinned(page)
            if held or any(int(child) not in removed for child in state.index.children(page)):
                continue
            going.append(page)
            removed.add(page)
            root = state.index.root_of(page)
            gone.append((state.trees[root].tenant, root, table.key_of(page)))
        state.remove_pages(np.array(going, dtype=np.int32), why, wipe=True)
    return len(pages) - len(going)
