"""Plans what an engine loads from the store and saves to it: requests in, step plans out.

Pure and without engine types: a scheduler reports what it does, the store's answers come as events,
time comes with each call. Everything is keyed by request and may come in any order: what is not
known any more is ignored. The halves are load_planner.py and save_planner.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvstore.breaker import Breaker
from kvstore.engine_adapter.load_planner import NOTHING, LoadPlanner
from kvstore.engine_adapter.plan_records import Committed, Found, Phase, RequestState, Room
from kvstore.engine_adapter.save_planner import SavePlanner

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Mapping, Sequence

    from kvstore.engine_adapter.load_choice import LoadChoice
    from kvstore.engine_adapter.load_planner import Answer, Sizes
    from kvstore.engine_adapter.plan_records import (
        BlockPort,
        Chain,
        Policy,
        RequestView,
        Save,
        StoreEvent,
        StorePort,
    )
    from kvstore.engine_adapter.transfer_plan import LoadJob, SaveJob, WorkerReport


PAUSE = "loads have failed in a row: a pause"


@dataclass(frozen=True, slots=True)
class Reuse:
    """What a finished request got from the store."""

    tokens: int = 0
    disk_tokens: int = 0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Jobs:
    """For the workers, in the next step."""

    loads: tuple[LoadJob, ...] = ()
    saves: tuple[SaveJob, ...] = ()
    cancelled: tuple[int, ...] = ()


class Planner:
    """For one engine; used by one thread."""

    def __init__(
        self,
        sizes: Sizes,
        store: StorePort,
        pool: BlockPort,
        choice: LoadChoice,
        *,
        pinned_blocks_max: int,
    ) -> None:
        self.sizes = sizes
        self.choice = choice
        self._store = store
        self._loading = LoadPlanner(sizes, store, choice)
        self._saving = SavePlanner(sizes, store, pool, pinned_blocks_max)
        self._requests: dict[str, RequestState] = {}
        # Loads that fail in a row: none for a while, whatever look-ups say.
        self._breaker = Breaker()
        self.published: list[tuple[Save, int]] = []  # for whoever tells others; cleared by them

    def arrive(self, view: RequestView, policy: Policy) -> None:
        """A request was added: its look-up begins, and staging, while it waits its turn."""
        state = RequestState(view, policy)
        self._requests[view.id] = state
        self._saving.leavers.pop(view.id, None)
        if policy.ends_session or not policy.load:
            return
        if view.length >= self.sizes.page_tokens:
            self._loading.ask(state)

    def knows(self, request: str) -> bool:
        """Whether this request has arrived and not left."""
        return request in self._requests

    def match(self, request: str, local_tokens: int, now: float) -> Answer:
        """Tokens from the store beyond the engine's own `local_tokens`; None: ask again."""
        state = self._requests.get(request)
        if state is None or state.phase is Phase.LOADING:
            return NOTHING
        if state.phase is Phase.RUNNING:  # it lost its blocks, and nobody has said so yet
            self.preempted(request)
        self._breaker.alive(now)
        if self._breaker.is_open:
            state.reason = PAUSE
            return NOTHING
        return self._loading.match(state, local_tokens, now)

    def allocated(self, request: str, blocks: Sequence[int], external: int) -> None:
        """A request got its blocks (the whole table), `external` tokens of them from the store."""
        state = self._requests.get(request)
        if state is None:
            return
        state.blocks = list(blocks)
        self._loading.allocated(state, external)

    def sources(self, request: str) -> tuple[int, int]:
        """Of the tokens loaded last: how many were in memory, how many on disk."""
        state = self._requests.get(request)
        if state is None:
            return 0, 0
        return state.reused_tokens - state.reused_disk_tokens, state.reused_disk_tokens

    def preempted(self, request: str) -> None:
        """A request lost its blocks and starts again later."""
        state = self._requests.get(request)
        if state is None:
            return
        state.blocks = []
        state.version += 1
        state.confirmed = state.planned_pages = 0
        state.save = 0  # what is under way goes on: its blocks are pinned
        self._loading.restart(state)

    def step(
        self,
        request: str,
        blocks: Sequence[int] | None,
        computed: int,
        scheduled: int,
        now: float,
    ) -> None:
        """A step computes tokens [computed, computed + scheduled) of a request.

        blocks: its whole table; None if it is as before.
        """
        state = self._requests.get(request)
        if state is None:
            return
        if blocks is not None:
            state.blocks = list(blocks)
        if state.phase is Phase.WAITING:
            state.phase = Phase.RUNNING
        self._saving.step(state, computed, scheduled, self._loading.loads, now)

    def finished(
        self, request: str, blocks: Sequence[int] | None, computed: int, *, well: bool, now: float
    ) -> Reuse:
        """A request leaves; `well`: its tokens stand. Its blocks may be reused after this call.

        What of it can't be pinned now is saved later, from blocks that were not reused until then.
        """
        state = self._requests.pop(request, None)
        if state is None:
            return Reuse(reason="unknown")
        if well and not state.job and state.phase is Phase.RUNNING:
            if blocks is not None:
                state.blocks = list(blocks)
            self._saving.finish(state, computed, self._loading.loads, now)
        self._loading.leave(state)
        self._tell_of_chain(state)
        return Reuse(state.reused_tokens, state.reused_disk_tokens, state.reason)

    def take(self, now: float) -> Jobs:
        """What the workers shall do in the next step."""
        self._saving.tick(self._loading.loads, now)
        self._loading.look_again(self._requests.values(), now)
        loads, cancelled = self._loading.take()
        return Jobs(loads, self._saving.take(), cancelled)

    def event(self, event: StoreEvent, now: float) -> None:
        """An answer of the store."""
        if isinstance(event, Found):
            self._loading.found(event, now)
        elif isinstance(event, Room):
            self._saving.reserved(event, self._state_of_save(event.job), now)
        elif isinstance(event, Committed):
            save = self._saving.committed(event, self._state_of_save(event.job), now)
            if save is not None and event.pages:
                self.published.append((save, event.pages))
                if save.policy.tells and event.pages == save.count:
                    self._tell(save.chain, save.policy)

    def report(self, report: WorkerReport, now: float) -> None:
        """Answers of workers."""
        for loaded in report.loads:
            load = self._loading.answered(loaded)
            if load is None:
                continue
            self._judge(load.ok, now)
            state = self._requests.get(load.request)
            if state is not None and state.job == load.job:
                self._loading.settled(state, load)
            self._saving.load_over(load, self._requests, now)
        for saved in report.saves:
            self._saving.copied(saved, self._requests, self._loading.loads, now)

    def table(self, request: str, blocks: Sequence[int], *, whole: bool) -> list[int] | None:
        """A block table told in parts, for engines that don't give the whole one each step."""
        state = self._requests.get(request)
        if state is None or whole:
            return list(blocks)
        return [*state.blocks, *blocks]

    def lost_store(self, now: float) -> None:
        """The server is another one, or none: what the old one said means nothing any more.

        Jobs that did not go to the workers yet fail: their places are in memory that has gone.
        """
        self._saving.drop_unsent(now)
        self._loading.lose_unsent()
        for state in self._requests.values():
            state.version += 1
            state.save = state.stored_pages = 0
            state.planned_pages = 0
            if not state.job and state.ticket:
                self._loading.release(state)
                state.asks = 0

    def reset(self, now: float) -> None:
        """What was stored until now is not this engine's any more: forget finds, unpin all."""
        self._saving.drop_all(now)
        for state in self._requests.values():
            state.version += 1
            state.save = state.stored_pages = 0
            if not state.job:
                self._loading.release(state)
                state.bypass = "the cache was reset"
            state.policy = replace(state.policy, store=False)

    @property
    def needs_steps(self) -> bool:
        """Whether the engine has to go on stepping for this planner's sake."""
        return bool(
            self._saving.needs_steps
            or self._loading.loads
            or self._loading.outbox
            or self._loading.cancelled
        )

    @property
    def is_loading(self) -> bool:
        """Whether a worker is loading."""
        return bool(self._loading.loads)

    @property
    def saves_left(self) -> int:
        """How many saves are under way or to come."""
        return len(self._saving.saves) + len(self._saving.leavers)

    @property
    def waits(self) -> bool:
        """Whether steps are needed, and this one has nothing for the workers."""
        ready = self._saving.outbox or self._loading.outbox or self._loading.cancelled
        return self.needs_steps and not ready

    @property
    def frees_soon(self) -> bool:
        """Whether pinned blocks will be free within a moment; not those that a request holds."""
        return self._saving.frees_soon(self._requests)

    def counters(self) -> Counter[str]:
        """What happened; each only grows."""
        counted = self._loading.counters + self._saving.counters
        counted["saves_refused"] = self._saving.refusals.count
        counted["pinned_blocks_peak"] = self._saving.pins.peak
        return counted

    def take_lost(self) -> Mapping[str, int]:
        """Full pages that will not be saved, by reason, since the last call."""
        lost = dict(self._saving.lost)
        self._saving.lost.clear()
        return lost

    def held(self) -> Mapping[str, int]:
        """What is not given back yet; all 0 when nothing is under way."""
        return {
            "requests": len(self._requests),
            "tickets": len(self._loading.askers),
            "loads": len(self._loading.loads),
            "saves": len(self._saving.saves),
            "leavers": len(self._saving.leavers),
            "pinned_blocks": self._saving.pins.count,
        }

    def check(self) -> None:
        """Walk everything and recount; AssertionError with the numbers."""
        self._saving.check()
        for request, state in self._requests.items():
            assert not state.ticket or state.ticket in self._loading.askers, request
            assert not state.job or state.job in self._loading.loads, request
            assert state.phase is not Phase.LOADING or state.job, request
        held = {load.ticket for load in self._loading.loads.values()}
        held |= {state.ticket for state in self._requests.values()}
        assert set(self._loading.askers) <= held, "a ticket that nobody will give back"

    def _judge(self, ok: bool, now: float) -> None:
        if ok:
            self._breaker.succeeded()
        else:
            self._breaker.failed(now)

    def _state_of_save(self, job: int) -> RequestState | None:
        save = self._saving.saves.get(job)
        return self._saving.state_of(save, self._requests) if save is not None else None

    def _tell_of_chain(self, state: RequestState) -> None:
        """At the end, what is known of a chain; a save that is under way tells of its own pages."""
        policy, pages = state.policy, state.stored_pages
        pages = min(pages, state.view.length // self.sizes.page_tokens)
        if policy.ends_session:
            if pages:
                self._store.pin(state.view.chain(pages), 0.0)
            if policy.session:
                self._store.end_conversation(policy.session)
        if pages and policy.tells:
            self._tell(state.view.chain(pages), policy)

    def _tell(self, chain: Chain, policy: Policy) -> None:
        if policy.pin_ttl_s:
            self._store.pin(chain, policy.pin_ttl_s)
        if policy.hints.for_policy:
            self._store.hint(chain, policy.hints)
