"""Gives back slots that hold a page and belong to none: what a bug of ours may have lost.

A walk in short holds of the lock only finds suspects. A slot is given back when two walks in a row
suspected it, and when, in the very hold that gives it back, it is found in no row of the page
table, in no list of slots that wait to be freed, and nothing is on its way to the disk. So a walk
that missed a page, or saw one twice, costs nothing.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

import numpy as np

from kvstore.accounts import used_slots
from kvstore.page_sweep import ROWS_A_HOLD, each_rows
from kvstore.state import DISK, HOST

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvstore.disk_writer import DiskWriter
    from kvstore.state import StoreState

GIVEN_BACK_MAX = 1024  # a run and tier: each is looked for in the whole table

_log = logging.getLogger("kvstore.store")


class SlotRecovery:
    """For one store; a run a minute."""

    def __init__(self, state: StoreState, writer: DiskWriter | None) -> None:
        self._state = state
        self._writer = writer
        # By tier: slots and what changes when they are used again, as the last run saw them.
        self._suspects: dict[int, set[tuple[int, int]]] = {HOST: set(), DISK: set()}
        self._running = threading.Lock()

    def run(self, rows: int = ROWS_A_HOLD) -> int:
        """Give back published slots that no page has, and had none the last time either; how many.

        Slots that are reserved have owners of their own. Looks at the disk only while nothing is
        on its way there, and all that it has is in the index.
        """
        with self._running:
            recovered = sum(self._run(tier, rows) for tier in (HOST, DISK))
        if recovered:
            _log.error("%d slots were in use and of no page: given back", recovered)
            self._state.free_unused_slots()
        return recovered

    def _run(self, tier: int, rows: int) -> int:
        with self._state.lock:
            if not self._may_look(tier):
                return 0
            none_is_loose = used_slots(self._state, tier) == self._known(tier)
        loose = np.empty(0, np.int64) if none_is_loose else self._loose(tier, rows)
        marks = set(zip(loose.tolist(), self._marks(tier, loose), strict=True))
        lost = sorted(marks & self._suspects[tier])
        given_back = [each for each in lost[:GIVEN_BACK_MAX] if self._give_back(tier, *each)]
        self._suspects[tier] = marks - set(given_back)
        return len(given_back)

    def _may_look(self, tier: int) -> bool:
        """The lock is held."""
        state = self._state
        if state.closed or (state.host if tier == HOST else state.disk) is None:
            return False
        is_busy = self._writer is not None and self._writer.is_busy
        return tier == HOST or (state.warm and not is_busy)

    def _leaving(self, tier: int) -> list[int]:
        state = self._state
        return [*state.unused_slots, *state.wiped_slots] if tier == DISK else []

    def _known(self, tier: int) -> int:
        """Slots that pages have, or had and that wait to be freed. The lock is held."""
        return self._state.index.count_in(tier) + len(self._leaving(tier))

    def _loose(self, tier: int, rows: int) -> NDArray[np.int64]:
        """Published slots that a walk finds no page for, ascending."""
        state = self._state
        medium = state.host if tier == HOST else state.disk
        assert medium is not None
        published = medium.published_slots()
        parts: list[NDArray[np.int64]] = []

        def look(first: int, stop: int) -> None:
            parts.append(state.index.table.slot[tier][first:stop].copy())
            if stop == state.index.table.rows:
                parts.append(np.array(self._leaving(tier), np.int64))

        each_rows(state, look, rows=rows)
        owned = np.sort(np.concatenate(parts))
        published.sort()
        places = np.minimum(np.searchsorted(owned, published), max(len(owned) - 1, 0))
        loose: NDArray[np.int64] = published
        if len(owned):
            loose = published[owned[places] != published]
        return loose

    def _marks(self, tier: int, slots: NDArray[np.int64]) -> list[int]:
        """What changes when a slot of the arena is used again; -1 where its extent has gone."""
        host = self._state.host
        if tier == DISK or host is None:
            return [0] * len(slots)
        marks: list[int] = []
        for slot in slots.tolist():
            try:
                marks.append(host.generation(slot))
            except ValueError:
                marks.append(-1)
        return marks

    def _give_back(self, tier: int, slot: int, mark: int) -> bool:
        """Whether the slot still is what it was, and no page has it: then it is free after this."""
        state = self._state
        with state.freeing, state.lock:
            if not self._may_look(tier) or self._marks(tier, np.array([slot])) != [mark]:
                return False
            table = state.index.table
            has_page = bool((table.slot[tier][: table.rows] == slot).any())
            if has_page or slot in self._leaving(tier) or not self._is_published(tier, slot, mark):
                return False
            if tier == DISK:
                state.unused_slots.append(slot)
            elif state.host is not None:
                state.host.free_many([slot])
            state.counters.slots_recovered += 1
        state.breathe()
        return True

    def _is_published(self, tier: int, slot: int, mark: int) -> bool:
        if tier == HOST:
            return mark >= 0 and mark % 2 == 0
        disk = self._state.disk
        return disk is not None and disk.is_published(slot)
