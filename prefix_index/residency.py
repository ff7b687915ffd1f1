"""Which tiers hold each page, and who may leave: the leaf rule, leases and pins.

A page is *active* in a tier if it is resident there, leased or pinned, or has an active child;
below[tier][page] counts its active children. So "no descendant is resident in that tier" is one
comparison, and a lease on the deepest page of a chain keeps all its ancestors in every local tier
they are in. What Redis has is not ours to keep: there a lease counts for the page itself only, so
that leasing a chain of which Redis has nothing costs nothing. Counts change only where a page turns
active or inactive: a step up the chain in the usual case, a sweep over whole edges in the worst.
"""

from __future__ import annotations

import heapq
import math
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvstore.prefix_index.page_table import (
    HELD,
    LOCAL_TIERS,
    NO_PAGE,
    NO_SLOT,
    TIER_BITS,
    TIERS,
    Ids,
    PageTable,
    rows_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.prefix_index.node_table import NodeTable
    from kvstore.prefix_index.recount import Recount

# Up to so many pages are told upwards one by one, by sweeps over edges; more go level by level.
_SWEEPS_MAX = 16
PINS_NO_LIMIT = 1 << 31
WINDOW_ROWS = 1 << 12  # of the table, swept at once where some pages are enough
GOLDEN_PART = 0.618
WINDOWS_TELL = 16  # swept, they tell whether all pages together are enough
# Bits of the state byte that make a page active in a tier by itself.
_MARKS = tuple(1 << tier | (HELD if tier < LOCAL_TIERS else 0) for tier in range(TIERS))


class Residency:
    """Tier bits, slots, leases and pins of the pages of one page table."""

    def __init__(self, table: PageTable, nodes: NodeTable) -> None:
        self._table = table
        self._nodes = nodes
        self._leases: dict[int, int] = {}
        self._pins: dict[int, float] = {}
        self._pin_ends: list[tuple[float, int]] = []  # heap; stale entries are skipped
        self._counts = [0] * TIERS
        self.recounts: list[Recount] = []  # under way, in pieces: told of all that changes

    @property
    def leases(self) -> int:
        """Leases held, over all pages."""
        return sum(self._leases.values())

    @property
    def pins(self) -> dict[int, float]:
        """When the pin of each pinned page ends."""
        return dict(self._pins)

    def count(self, tier: int) -> int:
        """Pages in the tier."""
        return self._counts[tier]

    def set_tier(self, ids: Ids, tier: int, slots: npt.NDArray[np.int64]) -> None:
        """Pages are now in a tier too, each in its slot."""
        table, bit = self._table, 1 << tier
        if len(slots) != len(ids) or (len(slots) and slots.min() < 0):
            raise ValueError(f"tier {tier}: {len(slots)} slots for {len(ids)} pages, or negative")
        if (table.state[ids] & bit).any():
            raise ValueError(f"tier {tier} holds some of these pages already")
        column = table.slot[tier]
        _refuse_twins(column, ids, NO_SLOT)
        column[ids] = slots
        idle = ids[~self._active(ids, tier)]
        table.state[ids] |= bit
        self._count(ids, tier, 1)
        self._tell(idle, tier, rises=True)

    def load(
        self,
        ids: Ids,
        tier: int,
        slots: npt.NDArray[np.int64],
        children: npt.NDArray[np.int32],
        tops: Ids,
    ) -> None:
        """Whole new subtrees are in a tier: pages, their child counts, and the topmost pages."""
        table = self._table
        table.slot[tier][ids] = slots
        table.below[tier][ids] = children
        table.state[ids] |= 1 << tier
        self._count(ids, tier, 1)
        if self.recounts:
            self._note(np.setdiff1d(ids, tops), tier, 1)
        self._tell(tops, tier, rises=True)

    def clear_tier(self, ids: Ids, tier: int) -> npt.NDArray[np.int64]:
        """Pages have left a tier; returns the slots they had. Does not ask whether they may."""
        table, bit = self._table, 1 << tier
        if not (table.state[ids] & bit).all():
            raise ValueError(f"tier {tier} does not hold all of these pages")
        column = table.slot[tier]
        slots = column[ids]
        _refuse_twins(column, ids, slots)
        column[ids] = NO_SLOT
        table.state[ids] &= 0xFF ^ bit
        self._count(ids, tier, -1)
        self._tell(ids[~self._active(ids, tier)], tier, rises=False)
        return slots

    def lease(self, page: int) -> None:
        """Hold a page and its chain where they are, until as many unlease() calls."""
        self._leases[page] = self._leases.get(page, 0) + 1
        self._hold(page)

    def unlease(self, page: int) -> None:
        count = self._leases.get(page, 0)
        if not count:
            raise ValueError(f"page {page} is not leased")
        if count > 1:
            self._leases[page] = count - 1
            return
        del self._leases[page]
        self._let_go(page)

    def leases_of(self, page: int) -> int:
        return self._leases.get(page, 0)

    def pin(self, page: int, until: float) -> None:
        """Hold a page and its chain until that time; a later end replaces an earlier one."""
        if until > self._pins.get(page, float("-inf")):
            self._pins[page] = until
            heapq.heappush(self._pin_ends, (until, page))
        self._hold(page)

    def unpin(self, page: int) -> bool:
        """End a pin now. False if there was none."""
        if self._pins.pop(page, None) is None:
            return False
        self._let_go(page)
        return True

    def is_pinned(self, page: int) -> bool:
        return page in self._pins

    def expire_pins(self, now: float, most: int = PINS_NO_LIMIT) -> int:
        """End the pins whose time has come, or some of them; returns how many."""
        ended = 0
        while ended < most and self._pin_ends and self._pin_ends[0][0] <= now:
            until, page = heapq.heappop(self._pin_ends)
            if self._pins.get(page) == until:
                ended += self.unpin(page)
        return ended

    def may_leave(self, page: int, tier: int) -> bool:
        """Whether the page may leave the tier now, as its leaf and by all leases and pins.

        The last tier of a page is its life: it may go only when nothing is below it anywhere.
        """
        bit = 1 << tier
        state = int(self._table.state[page])
        if not state & bit or state & HELD or self._table.below[tier][page]:
            return False
        last = state & TIER_BITS == bit
        return not last or not any(below[page] for below in self._table.below)

    def resident(self, tier: int) -> Ids:
        """Pages in the tier that are neither leased nor pinned, ascending."""
        mask = self._table.state[: self._table.rows] & ((1 << tier) | HELD) == 1 << tier
        return np.flatnonzero(mask).astype(np.int32)

    def free_to_leave(self, tier: int, first: int = 0, stop: int | None = None) -> Ids:
        """Pages for which may_leave holds, ascending, of the rows [first, stop) if these are given:
        a sweep over the table in numpy."""
        table, bit = self._table, 1 << tier
        stop = table.rows if stop is None else min(stop, table.rows)
        ids = np.flatnonzero(
            (table.state[first:stop] & (bit | HELD) == bit) & (table.below[tier][first:stop] == 0)
        )
        ids += first
        last = table.state[ids] & TIER_BITS == bit
        blocked = np.zeros(len(ids), bool)
        for below in table.below:
            blocked |= below[ids] != 0
        leaving: Ids = ids[~(last & blocked)].astype(np.int32)
        return leaving

    def some_free_to_leave(
        self, tier: int, window: int, enough: int, keep: Callable[[Ids], Ids]
    ) -> tuple[Ids, int]:
        """free_to_leave() as far as `keep` keeps it, of windows of rows until there are enough; and
        the window to go on with.

        Rows are mostly in order of age, so the next window is far from the last: what is found is
        like the whole, and each window has its turn before the first comes again.
        """
        windows, found, count = -(-self._table.rows // WINDOW_ROWS) or 1, [], 0
        stride = _stride(windows)
        for looked_at in range(1, windows + 1):
            at = window * stride % windows * WINDOW_ROWS
            found.append(keep(self.free_to_leave(tier, at, at + WINDOW_ROWS)))
            count, window = count + len(found[-1]), (window + 1) % windows
            if count >= enough:
                break
            if looked_at == WINDOWS_TELL and count * windows < enough * looked_at:
                return keep(self.free_to_leave(tier)), window  # five times as fast, at one go
        return np.sort(np.concatenate(found)), window

    def check(self) -> None:
        """Recount from parents and states; raises AssertionError with the numbers."""
        table = self._table
        live = table.live()
        held = {int(page) for page in live[table.state[live] & HELD != 0]}
        assert held == self._leases.keys() | self._pins.keys(), "held flags and leases, pins differ"
        assert all(count > 0 for count in self._leases.values()), "a lease count is not positive"
        ends = set(self._pin_ends)
        assert all((until, page) in ends for page, until in self._pins.items()), "a pin has no end"
        nowhere = live[table.state[live] & TIER_BITS == 0]
        assert not len(nowhere), f"{len(nowhere)} pages are in no tier, as page {nowhere[:1]}"
        for tier in range(TIERS):
            there, counted = np.count_nonzero(table.state[live] >> tier & 1), self._counts[tier]
            assert there == counted, f"tier {tier}: {there} pages, {counted} counted"
            active = live[self._active(live, tier)]
            parents = table.parent[active]
            children = np.bincount(parents[parents != NO_PAGE], minlength=table.rows)
            wrong = np.flatnonzero(children[live] != table.below[tier][live])
            assert not len(wrong), f"tier {tier}: below is wrong for {len(wrong)} pages"

    def check_pages(self, live: Ids) -> None:
        """What these pages say of themselves; raises AssertionError. A part of check()."""
        state = self._table.state[live]
        held = set(live[state & HELD != 0].tolist())
        noted = {page for page in held if page in self._leases or page in self._pins}
        assert held == noted, "held flags and leases, pins differ"
        nowhere = live[state & TIER_BITS == 0]
        assert not len(nowhere), f"{len(nowhere)} pages are in no tier, as page {nowhere[:1]}"

    def check_holders(self, pages: list[int]) -> None:
        """Leases and pins of these pages, where there are any; raises AssertionError."""
        for page in pages:
            count = self._leases.get(page)
            assert count is None or count > 0, "a lease count is not positive"
            if count is not None or page in self._pins:
                held = self._table.is_live(page) and self._table.state[page] & HELD
                assert held, "held flags and leases, pins differ"

    def holders(self) -> list[int]:
        """Pages that are leased or pinned."""
        return [*self._leases, *self._pins]

    def check_counts(self, recount: Recount) -> None:
        """After its walk; raises AssertionError with the numbers."""
        for tier, (there, counted) in enumerate(zip(recount.counts, self._counts, strict=True)):
            assert there == counted, f"tier {tier}: {there} pages, {counted} counted"

    def active(self, ids: Ids, tier: int) -> npt.NDArray[np.bool_]:
        """Which of these pages are active in a tier; see above."""
        return self._active(ids, tier)

    def _count(self, ids: Ids, tier: int, step: int) -> None:
        self._counts[tier] += step * len(ids)
        for recount in self.recounts:
            recount.moved(ids, tier, step)

    def _note(self, ids: Ids, tier: int, step: int) -> None:
        for recount in self.recounts:
            recount.turned(ids, tier, step)

    def _hold(self, page: int) -> None:
        state = self._table.state
        if state[page] & HELD:
            return
        idle = [tier for tier in range(LOCAL_TIERS) if not self._is_active(page, tier)]
        state[page] |= HELD
        for tier in idle:
            self._sweep(page, tier, rises=True)

    def _let_go(self, page: int) -> None:
        if page in self._leases or page in self._pins:
            return
        self._table.state[page] &= 0xFF ^ HELD
        for tier in range(LOCAL_TIERS):
            if not self._is_active(page, tier):
                self._sweep(page, tier, rises=False)

    def _is_active(self, page: int, tier: int) -> bool:
        occupied = int(self._table.state[page]) & _MARKS[tier]
        return bool(occupied or self._table.below[tier][page])

    def _active(self, ids: Ids, tier: int) -> npt.NDArray[np.bool_]:
        occupied = self._table.state[ids] & _MARKS[tier] != 0
        active: npt.NDArray[np.bool_] = occupied | (self._table.below[tier][ids] != 0)
        return active

    def _tell(self, ids: Ids, tier: int, *, rises: bool) -> None:
        """Pages have turned active (rises) or inactive: count that in their ancestors."""
        below = self._table.below[tier]
        while len(ids) > _SWEEPS_MAX:
            self._note(ids, tier, 1 if rises else -1)
            parents = self._table.parent[ids]
            parents = parents[parents != NO_PAGE]
            if rises:
                idle = parents[~self._active(parents, tier)]
                np.add.at(below, parents, 1)
            else:
                np.subtract.at(below, parents, 1)
                idle = parents[~self._active(parents, tier)]
            ids = np.unique(idle)
        for page in ids.tolist():
            self._sweep(page, tier, rises=rises)

    def _sweep(self, page: int, tier: int, *, rises: bool) -> None:
        """Tell the ancestors of one page, up to the first that stays as it was."""
        table, below = self._table, self._table.below[tier]
        parent = int(table.parent[page])
        others = 0 if rises else 1  # a falling ancestor still counts the child that has fallen
        step = 1 if rises else -1
        if parent == NO_PAGE:
            return
        if self.recounts:
            self._note(np.array([page], np.int32), tier, step)
        if int(table.state[parent]) & _MARKS[tier] or below[parent] > others:
            below[parent] += step
            return
        for run in self._nodes.ancestors(parent):
            rows = rows_of(run)
            occupied = table.state[rows] & _MARKS[tier] != 0
            stays = np.flatnonzero(occupied | (below[rows] > others))
            below[rows_of(run[stays[-1] :]) if len(stays) else rows] += step
            if self.recounts:  # all of them have turned, but for the one that stays as it was
                self._note(run[stays[-1] + 1 :] if len(stays) else run, tier, step)
            if len(stays):
                return


def _stride(windows: int) -> int:
    """From one window to the next, so that each comes once a round and neighbours stand apart."""
    stride = max(1, round(windows * GOLDEN_PART))
    while math.gcd(stride, windows) > 1:
        stride += 1
    return stride


def _refuse_twins(
    column: npt.NDArray[np.int64], ids: Ids, before: npt.NDArray[np.int64] | int
) -> None:
    """Raise ValueError if an id is named twice, leaving `column` as it was."""
    order = np.arange(len(ids))
    column[ids] = order
    twins = (column[ids] != order).any()
    column[ids] = before
    if twins:
        raise ValueError("a page is named twice")
