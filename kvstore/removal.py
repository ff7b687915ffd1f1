"""Eviction on somebody's word: by prefix, tenant, namespace, writer, age or tier.

What is chosen goes with all below it, from every tier, its slots on disk are wiped, and Redis is
told to delete those pages too, for all stores that share it. Pages that somebody reads or writes
right now stay, and so do pinned ones unless asked otherwise; their ancestors stay with them. All is
counted in the answer. With a tier, pages leave that one only, and Redis is told nothing.

Pages are chosen, and then go, in short holds of the lock: what comes meanwhile may stay.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from kvstore.errors import DirectoryError, InvalidRequest
from kvstore.ghost_list import Left
from kvstore.page_choice import choose, named
from kvstore.page_sweep import ROWS_A_HOLD
from kvstore.state import DISK, HOST
from kvstore.tenant import check_name
from kvstore.tiers.tier import TierError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from kvstore.disk_writer import DiskWriter
    from kvstore.page_choice import Choice
    from kvstore.redis_share import RedisShare
    from kvstore.redis_writer import RedisWriter
    from kvstore.request import Extras, Tokens
    from kvstore.state import StoreState

# Pages removed while the lock is held once: look-ups go on in between. 20 us a page, measured.
STEP_PAGES = 128
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

    def names_no_tree(self) -> bool:
        """Whether pages of all trees are meant."""
        return self.tenant is None and self.namespace is None and self.root is None

    def names_whole_trees(self) -> bool:
        """Whether all pages of some trees are meant, whatever they are."""
        others = (self.prefix, self.writer, self.unused_for_s, self.older_than_s)
        return all(each is None for each in others)

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
    tier = TIERS[selection.tier] if selection.tier is not None else None
    pages = named(state, selection)
    queues = _Queues(state, [writer, share.writer if share is not None else None])
    if not dry_run and tier is None:  # what waits to be written is leased until then
        queues.leave(
            choose(state, pages, include_pinned=include_pinned, tier=None, include_leased=True)
        )
    choice = choose(state, pages, include_pinned=include_pinned, tier=tier)
    report = Eviction(
        choice.chains,
        len(choice.ids),
        choice.payload_bytes,
        choice.kept_leased,
        choice.kept_pinned,
        dry_run,
        kept_above=choice.kept_above,
    )
    if dry_run:
        return report
    gone: list[tuple[str, bytes, bytes]] | None = [] if share is not None else None
    if tier is not None:
        left = sum(_leave_step(state, *step, tier, why) for step in _steps(state, choice))
        trouble = "evicted"
    else:
        left = 0
        for step in _steps(state, choice):
            left += _remove_step(state, *step, include_pinned, queues, gone, why)
        trouble = "evicted from memory"
    try:
        state.free_wiped_slots()
    except TierError as exc:
        raise DirectoryError(f"{trouble}, but not wiped from disk: {exc}") from exc
    return replace(
        report,
        pages=report.pages - left,
        kept_leased=report.kept_leased + left,
        redis_pages=_erase(state, share, gone),
    )


def _steps(
    state: StoreState, choice: Choice
) -> Iterator[tuple[NDArray[np.int32], NDArray[np.uint64]]]:
    """What goes in one hold of the lock, deepest first: ids and sequence numbers."""
    for start in range(0, len(choice.ids), STEP_PAGES):
        if start:
            state.breathe()
        step = slice(start, start + STEP_PAGES)
        yield choice.ids[step], choice.sequences[step]


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


def _erase(
    state: StoreState, share: RedisShare | None, gone: list[tuple[str, bytes, bytes]] | None
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


class _Queues:
    """Those who write pages elsewhere, and must not write what is about to go."""

    def __init__(self, state: StoreState, writers: list[DiskWriter | RedisWriter | None]) -> None:
        self._state = state
        self._writers = [each for each in writers if each is not None]
        self._deadline = state.clock() + WRITE_WAIT_S  # to wait until then, for all pages together

    def leave(self, choice: Choice) -> None:
        """Take all of them out of the queues, in pieces, and wait for what is on its way."""
        for at in range(0, len(choice.ids), ROWS_A_HOLD):
            part = slice(at, at + ROWS_A_HOLD)
            with self._state.lock:
                self.wait_for(choice.ids[part], choice.sequences[part])
            self._state.breathe()

    def wait_for(self, pages: NDArray[np.int32], sequences: NDArray[np.uint64]) -> None:
        """Take them out, and wait for what is on its way this moment. The lock is held, but not
        while waiting: pages may have changed after it."""
        state, going = self._state, self._cancel(pages, sequences)
        while (
            any(each.is_writing(going) for each in self._writers) and state.clock() < self._deadline
        ):
            state.changed.wait(0.05)
        state.require_open()

    def _cancel(self, pages: NDArray[np.int32], sequences: NDArray[np.uint64]) -> set[int]:
        """Those that still are the same pages: an id may have become another's."""
        table = self._state.index.table
        same = (table.node[pages] >= 0) & (table.sequence[pages] == sequences)
        going = set(pages[same].tolist())
        for each in self._writers:
            each.cancel(going)
        return going


def _remove_step(
    state: StoreState,
    pages: NDArray[np.int32],
    sequences: NDArray[np.uint64],
    include_pinned: bool,
    queues: _Queues,
    gone: list[tuple[str, bytes, bytes]] | None,
    why: Left,
) -> int:
    """Remove pages (deepest first) that are still what they were; how many stayed after all.

    Adds (tenant, root, key) of the others to `gone`, if it is there.
    """
    with state.lock:
        state.require_open()
        queues.wait_for(pages, sequences)
        table = state.index.table
        going = []
        removed: set[int] = set()
        for page, sequence in zip(pages.tolist(), sequences.tolist(), strict=True):
            if not table.is_live(page) or int(table.sequence[page]) != sequence:
                continue
            held = state.is_leased(page)
            held |= not include_pinned and state.is_pinned(page)
            if held or any(int(child) not in removed for child in state.index.children(page)):
                continue
            going.append(page)
            removed.add(page)
            if gone is not None:
                root = state.index.root_of(page)
                gone.append((state.trees[root].tenant, root, table.key_of(page)))
        state.remove_pages(np.array(going, dtype=np.int32), why, wipe=True)
    return len(pages) - len(going)
