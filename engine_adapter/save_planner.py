"""The saving half of the planner: which full pages go to the store, and when their blocks are free.

    full pages -> pinned -> reserve -> SaveJob -> copied by all ranks -> commit
                    |          |                     |                     |
                    cap        others have it:       unpinned; waits for   the next save of this
                    reached:   unpinned; others      loads it builds on    request may begin
                    later      write it, or staging
                               is full: held

Invariants: a page is saved only when every token in it is confirmed; what was computed on a load
that failed is dropped, never committed; a reservation is given back only after all ranks have left
its memory; a request has one save under way, because the store publishes a chain from its top.
What a request leaves behind when it ends is saved in turns, as far as its blocks still hold it:
they are pinned when their turn comes, never more than the cap. What is not saved in the end is
counted in `lost`, with the reason. Pure: time comes with each call.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from kvstore.engine_adapter.block_pins import BlockPins
from kvstore.engine_adapter.plan_records import NOT_YET, NULL_BLOCK, Leaver, Save, SavePhase
from kvstore.engine_adapter.save_waits import needs_pins, waits_for_others, waits_for_staging
from kvstore.engine_adapter.store_refusals import IN_PROGRESS, LIMIT, PRESENT, Refusals
from kvstore.engine_adapter.transfer_plan import PageSave, SaveJob

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvstore.engine_adapter.load_planner import Sizes
    from kvstore.engine_adapter.plan_records import (
        BlockPort,
        Committed,
        Load,
        RequestState,
        Room,
        StorePort,
    )
    from kvstore.engine_adapter.transfer_plan import SaveDone

PINNED_SHARE_MAX = 0.10  # of the engine's block pool
# Reasons of this side why pages are lost.
REUSED, TOO_LATE, TOO_MANY = "blocks reused", "too late", "too many requests"
NOT_COPIED, NOT_PUBLISHED = "not copied", "not published"
# An idle engine steps no longer for what a request left behind, and this many requests may have.
LEAVE_S_MAX, LEAVERS_MAX = 30.0, 1024


class SavePlanner:
    """Used by Planner, which owns the requests."""

    def __init__(
        self, sizes: Sizes, store: StorePort, pool: BlockPort, pinned_blocks_max: int
    ) -> None:
        self._sizes = sizes
        self._store = store
        self.pins = BlockPins(pool, pinned_blocks_max)
        self.refusals = Refusals()
        self._jobs = 0
        self.saves: dict[int, Save] = {}  # by job; tails are not in it yet
        self.leavers: dict[str, Leaver] = {}  # by request
        self.outbox: list[SaveJob] = []
        self._is_staging_free = False  # some of it may be, since the last look
        self.lost: Counter[str] = Counter()  # pages by reason; for whoever tells, cleared by them
        self.counters: Counter[str] = Counter()

    def step(
        self,
        state: RequestState,
        computed: int,
        scheduled: int,
        loads: Mapping[int, Load],
        now: float,
    ) -> None:
        """A step is about to compute tokens [computed, computed + scheduled) of a request.

        Tokens that are not known yet (drafts, tokens being sampled) are not confirmed by it. What
        lies behind `computed` and was confirmed before was taken back: rejected, failed, shortened.
        """
        page = self._sizes.page_tokens
        if computed < state.confirmed:
            kept = computed // page
            state.planned_pages = min(state.planned_pages, kept)
            state.stored_pages = min(state.stored_pages, kept)
            state.version += 1
        state.confirmed = max(min(computed + scheduled, state.view.length), 0)
        self._plan(state, state.confirmed // page, loads, now)

    def finish(
        self, state: RequestState, computed: int, loads: Mapping[int, Load], now: float
    ) -> None:
        """The request ended well, with `computed` tokens behind it: all that is left to save."""
        length = state.view.length
        known = min(max(state.confirmed, min(computed, length - 1)), length)
        full = known // self._sizes.page_tokens
        active = self.saves.get(state.save)
        if active is None:
            self._plan(state, full, loads, now)
        elif active.version == state.version and full > active.stop:
            tail = self._make(state, active.stop, full, loads)
            last = active
            while last.tail is not None:
                last = last.tail
            last.tail = tail
        self._keep(state, full, loads, now)

    def reserved(self, room: Room, state: RequestState | None, now: float) -> None:
        """The store answered a reservation; `state` if its request is still there."""
        save = self.saves.get(room.job)
        if save is None or save.dropped or save.phase is not SavePhase.RESERVING:
            self._store.abort(room.job)
            if save is not None and save.dropped:
                self._end(save, state, now)
            return
        count = min(len(room.offsets), save.stop - room.start)
        if count <= 0:
            self._refused(save, room, state, now)
            return
        stop = room.start + count
        self.refusals.given()
        if not self._cover(save, room.start, stop, state):
            self._store.abort(save.job)
            self.counters["saves_without_parent"] += 1
            self._end(save, state, now)
            return
        if stop < save.stop:
            self._cut(save, stop, room.reason, state, now)
        self._is_staging_free = room.reason != LIMIT
        self.pins.unpin(
            save.pinned, [page for page in save.pinned if not room.start <= page < stop]
        )
        save.start, save.count, save.phase = room.start, count, SavePhase.COPYING
        save.ranks = self._sizes.ranks
        pages = zip(room.offsets, range(room.start, stop), strict=False)
        self.outbox.append(
            SaveJob(save.job, tuple(PageSave(at, save.pinned[page]) for at, page in pages))
        )

    def copied(
        self,
        done: SaveDone,
        state_of: Mapping[str, RequestState],
        loads: Mapping[int, Load],
        now: float,
    ) -> None:
        """A rank's answer; after the last one the blocks are free and the pages are committed."""
        save = self.saves.get(done.job)
        if save is None or save.phase is not SavePhase.COPYING:
            self.counters["save_answers_unknown"] += 1
            return
        save.ranks -= 1
        save.ok = save.ok and done.ok
        if save.ranks > 0:
            return
        self.pins.unpin(save.pinned, save.pinned)
        save.phase = SavePhase.GATED
        if not save.ok:
            self.counters["saves_failed"] += 1
            self.lost[NOT_COPIED] += save.count
            save.dropped = True
        save.loads &= set(loads)
        self._pass_gate(save, self.state_of(save, state_of), now)

    def load_over(self, load: Load, state_of: Mapping[str, RequestState], now: float) -> None:
        """A load is over: what was computed on it may be published, or must not be."""
        for save in [*self.saves.values()]:
            for each in save.with_tails():
                if load.job in each.loads:
                    each.loads.discard(load.job)
                    each.dropped = each.dropped or not load.ok
            if save.phase is SavePhase.GATED:
                self._pass_gate(save, self.state_of(save, state_of), now)
        for leaver in [*self.leavers.values()]:
            if load.job in leaver.loads and not load.ok:
                self._forget(leaver)
            leaver.loads.discard(load.job)

    def committed(self, done: Committed, state: RequestState | None, now: float) -> Save | None:
        """The store published a save; the save, if it was waited for."""
        save = self.saves.get(done.job)
        if save is None or save.phase is not SavePhase.COMMITTING:
            return None
        self.counters["pages_saved"] += done.pages
        if done.pages < save.count:
            self.counters["pages_not_saved"] += save.count - done.pages
            self.lost[done.reason or NOT_PUBLISHED] += save.count - done.pages
        if state is not None and state.version == save.version:
            state.stored_pages = max(state.stored_pages, save.start + done.pages)
        self._end(save, state, now)
        return save

    def state_of(self, save: Save, states: Mapping[str, RequestState]) -> RequestState | None:
        """Of the request of a save, if it is there or has left something behind."""
        leaver = self.leavers.get(save.request)
        return leaver.state if leaver is not None else states.get(save.request)

    def tick(self, loads: Mapping[int, Load], now: float) -> None:
        """Ask again for pages that had to wait; go on with what was left behind."""
        for save in [*self.saves.values()]:
            if save.phase is not SavePhase.HELD:
                continue
            has_news = save.for_staging and self._is_staging_free
            if has_news or now >= save.retry_s:
                if has_news:
                    self._is_staging_free = False  # the next one when this one was served
                save.phase = SavePhase.RESERVING
                self._store.reserve(save.job, save.chain)
        for leaver in [*self.leavers.values()]:
            if not self._has_room and now <= leaver.until_s:
                break
            self._follow(leaver, loads, now)

    def drop_all(self, now: float) -> None:
        """Unpin everything; what is under way will not be published."""
        for leaver in [*self.leavers.values()]:
            self._forget(leaver)
        for save in [*self.saves.values()]:
            for each in save.with_tails():
                self.pins.unpin(each.pinned, each.pinned)
                each.dropped = True
            if save.phase is SavePhase.HELD:
                self._end(save, None, now)

    def drop_unsent(self, now: float) -> None:
        """As drop_all(); saves that no worker has seen yet are over at once."""
        unsent = {job.job for job in self.take()}
        self.drop_all(now)
        for job in unsent:
            self._store.abort(job)
            self._end(self.saves[job], None, now)

    def take(self) -> tuple[SaveJob, ...]:
        """Jobs for the next step."""
        jobs = tuple(self.outbox)
        self.outbox.clear()
        return jobs

    @property
    def needs_steps(self) -> bool:
        """Whether a worker, a pinned block or a hint for the store waits for the next step."""
        waiting = any(
            save.phase is SavePhase.COPYING or save.policy.tells for save in self.saves.values()
        )
        return bool(self.pins.count or self.outbox or self.leavers or waiting)

    def frees_soon(self, state_of: Mapping[str, RequestState]) -> bool:
        """Whether blocks are held by nothing but a pin: their requests have left them."""
        for save in self.saves.values() if self.pins.count else ():
            state = state_of.get(save.request)
            is_left = state is None or state.version != save.version
            if is_left and any(each.pinned for each in save.with_tails()):
                return True
        return False

    def check(self) -> None:
        """Recount the pins; AssertionError with the numbers."""
        counted = 0
        for save in self.saves.values():
            for each in save.with_tails():
                counted += sum(len(blocks) for blocks in each.pinned.values())
        known = self.pins.count
        assert counted == known, f"{counted} blocks pinned, {known} known"
        assert known <= self.pins.blocks_max, known
        for request, leaver in self.leavers.items():
            job = leaver.state.save
            assert not job or job in self.saves, f"{request} waits for save {job}, which is over"

    def _plan(self, state: RequestState, full: int, loads: Mapping[int, Load], now: float) -> None:
        first = max(state.planned_pages, state.stored_pages)
        if not state.policy.store or full <= first or state.save or self.refusals.holds(now):
            return
        save = self._make(state, first, full, loads)
        if save is None:
            return
        state.save = save.job
        self._reserve(save)

    def _keep(self, state: RequestState, full: int, loads: Mapping[int, Load], now: float) -> None:
        """Remember what is not saved yet, to pin it later if its blocks are as they are now: what
        lies over the cap, and what is under way and may be refused.
        """
        first = max(state.planned_pages, state.stored_pages)
        if not state.policy.store or full <= (state.stored_pages if state.save else first):
            return
        blocks = state.blocks[: full * self._sizes.blocks_a_page]
        on = {job for job, load in loads.items() if not load.blocks.isdisjoint(blocks)}
        holds = self.pins.pool.holds(blocks)
        leaver = Leaver(state, full, holds, on, now + LEAVE_S_MAX)
        self.leavers[state.view.id] = leaver
        if len(self.leavers) > LEAVERS_MAX:
            self._forget(leaver, TOO_MANY)
        elif not state.save:
            self._leave_or_forget(leaver, first, now)

    def _follow(self, leaver: Leaver, loads: Mapping[int, Load], now: float) -> None:
        """Save the next part of what a request left behind, if there is room; or give it up."""
        state = leaver.state
        if state.save:
            return
        first = max(state.planned_pages, state.stored_pages)
        if first >= leaver.full:
            self._forget(leaver)
        elif self._leave_or_forget(leaver, first, now):
            self._plan(state, leaver.full, loads, now)

    def _leave_or_forget(self, leaver: Leaver, first: int, now: float) -> bool:
        """Whether what is left may still be saved; it is forgotten if not."""
        if self.refusals.lasts(now):
            self._forget(leaver, self.refusals.reason)
        elif not self._blocks(leaver.state, first):
            self._forget(leaver, REUSED)
        elif now > leaver.until_s:
            self._forget(leaver, self.refusals.reason if self.refusals.holds(now) else TOO_LATE)
        else:
            return True
        return False

    @property
    def _has_room(self) -> bool:
        return self._sizes.blocks_a_page <= self.pins.room

    def _forget(self, leaver: Leaver, why: str = "") -> None:
        state = leaver.state
        left = leaver.full - max(state.planned_pages, state.stored_pages)
        self.counters["pages_left_behind"] += max(left, 0)
        if why and left > 0:
            self.lost[why] += left
        self.leavers.pop(state.view.id, None)

    def _make(
        self, state: RequestState, first: int, full: int, loads: Mapping[int, Load]
    ) -> Save | None:
        """A save of as many of pages [first, full) as may be pinned, from the first on."""
        pinned: dict[int, tuple[int, ...]] = {}
        room = self.pins.room
        for page in range(first, full):
            blocks = self._blocks(state, page)
            if not blocks or NULL_BLOCK in blocks:
                break
            if room < len(blocks):
                self.counters["saves_over_pin_cap"] += 1
                break
            room -= len(blocks)
            pinned[page] = blocks
        if not pinned:
            return None
        stop = first + len(pinned)
        used = set(state.blocks[: stop * self._sizes.blocks_a_page])
        on = {job for job, load in loads.items() if not used.isdisjoint(load.blocks)}
        if (leaver := self._leaver(state)) is not None:
            on = set(leaver.loads)  # loads that began later are not into these blocks
        self.pins.pin(pinned.values())
        state.planned_pages = stop
        self._jobs += 1
        return Save(
            self._jobs,
            state.view.id,
            state.version,
            state.policy,
            state.view.chain(stop),
            first,
            stop,
            pinned,
            loads=on,
        )

    def _reserve(self, save: Save) -> None:
        self.saves[save.job] = save
        save.phase = SavePhase.RESERVING
        self._store.reserve(save.job, save.chain)

    def _cut(
        self, save: Save, stop: int, reason: str, state: RequestState | None, now: float
    ) -> None:
        """There is room up to page `stop`: the rest follows this save, or waits for the store."""
        first = max(stop, save.first)
        rest = {page: save.pinned.pop(page) for page in [*save.pinned] if page >= first}
        self._jobs += 1
        loads = set(save.loads)
        save.tail = replace(save, job=self._jobs, first=first, pinned=rest, loads=loads, attempts=0)
        save.tail.others_since_s = NOT_YET
        if reason not in (LIMIT, IN_PROGRESS):
            self.refusals.refused(reason, now)
            self._drop_tail(save, state)

    def _refused(self, save: Save, room: Room, state: RequestState | None, now: float) -> None:
        if self._asks_again(save, room.reason, now):
            return
        if room.reason == PRESENT:
            self.counters["pages_present"] += save.stop - save.first
            if state is not None and state.version == save.version:
                state.stored_pages = max(state.stored_pages, save.stop)
        elif room.reason == IN_PROGRESS:
            self.counters["saves_left_to_others"] += 1
            if state is None or state.version == save.version:
                self.lost[IN_PROGRESS] += save.stop - max(save.first, room.start)
        else:
            self.refusals.refused(room.reason, now)
            if state is not None and state.version == save.version:
                state.planned_pages = min(state.planned_pages, save.first)
            else:
                self.lost[room.reason] += save.stop - save.first
        self._end(save, state, now)

    def _asks_again(self, save: Save, reason: str, now: float) -> bool:
        """Whether a save waits: others write its pages, or saves under way fill the staging."""
        if reason == LIMIT:
            is_filled = any(each.count for each in self.saves.values())
            return waits_for_staging(save, now, is_filled=is_filled)
        if reason != IN_PROGRESS or not waits_for_others(save, now):
            return False
        for each in save.with_tails() if not needs_pins(save, now) else ():
            self.pins.unpin(each.pinned, [*each.pinned])
        return True

    def _cover(self, save: Save, start: int, stop: int, state: RequestState | None) -> bool:
        """Pin pages of [start, stop) that the save has not pinned; False if they are gone.

        The store had them once and has evicted them, or another writer gave them up.
        """
        missing = [page for page in range(start, stop) if page not in save.pinned]
        if not missing:
            return True
        if state is None:
            self.lost[REUSED] += save.stop - start
        if state is None or state.version != save.version:  # else it is planned anew
            return False
        found = {page: self._blocks(state, page) for page in missing}
        count = sum(len(blocks) for blocks in found.values())
        bad = any(not blocks or NULL_BLOCK in blocks for blocks in found.values())
        if bad or count > self.pins.room:
            state.stored_pages = min(state.stored_pages, start)
            state.planned_pages = min(state.planned_pages, start)
            return False
        self.pins.pin(found.values())
        save.pinned.update(found)
        return True

    def _pass_gate(self, save: Save, state: RequestState | None, now: float) -> None:
        if save.dropped:
            self._store.abort(save.job)
            self._end(save, state, now)
        elif not save.loads:
            save.phase = SavePhase.COMMITTING
            self._store.commit(save.job)

    def _end(self, save: Save, state: RequestState | None, now: float) -> None:
        """The save is over; its tail, if it has one and is still wanted, begins."""
        self.saves.pop(save.job, None)
        self.pins.unpin(save.pinned, save.pinned)
        if state is not None and state.save == save.job:
            state.save = 0
        self._is_staging_free = self._is_staging_free or bool(save.count)
        tail = save.tail
        if tail is None:
            return
        if tail.dropped or save.dropped or self.refusals.holds(now):
            self._drop_tail(save, state)
            return
        save.tail = None
        if state is not None and not state.save:
            state.save = tail.job
        self._reserve(tail)

    def _drop_tail(self, save: Save, state: RequestState | None) -> None:
        """Unpin what follows a save; planned anew if its request, or what that left, is there."""
        tail, save.tail = save.tail, None
        for each in tail.with_tails() if tail is not None else ():
            self.pins.unpin(each.pinned, each.pinned)
            if each.dropped or save.dropped:
                continue
            if state is not None and state.version == each.version:
                state.planned_pages = min(state.planned_pages, each.first)
            else:
                self.lost[self.refusals.reason] += each.stop - each.first

    def _blocks(self, state: RequestState, page: int) -> tuple[int, ...]:
        """The blocks of a page; empty if the table does not reach it, or they were reused."""
        count = self._sizes.blocks_a_page
        part = slice(page * count, (page + 1) * count)
        blocks = tuple(state.blocks[part])
        leaver = self._leaver(state)
        if leaver is not None:
            pairs = zip(leaver.holds[part], self.pins.pool.holds(blocks), strict=True)
            if any(held is None or held is not now for held, now in pairs):
                return ()
        return blocks if len(blocks) == count else ()

    def _leaver(self, state: RequestState) -> Leaver | None:
        leaver = self.leavers.get(state.view.id)
        return leaver if leaver is not None and leaver.state is state else None
