"""The loading half of the planner: look-ups, what to answer the scheduler, loads under way.

    arrive -> asked -> found -> plan (local, external) -> allocated -> LoadJob -> answered by ranks
                        |          |                         |
                        miss: 0    asked again: new plan     0 tokens: plan and lease dropped

Invariants: a ticket is released exactly once, and not before every rank has answered the load that
reads under its lease; a job that went to the workers is kept until then, whatever becomes of its
request. Pure: time comes with each call.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING

from kvstore.engine_adapter.load_choice import LOOKUP_S_MIN
from kvstore.engine_adapter.plan_records import Load, LoadPlan, Phase
from kvstore.engine_adapter.store_refusals import CUT
from kvstore.engine_adapter.transfer_plan import SKIP_BLOCK, LoadJob, PageLoad

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvstore.engine_adapter.load_choice import LoadChoice
    from kvstore.engine_adapter.plan_records import Found, RequestState, StorePort
    from kvstore.engine_adapter.transfer_plan import LoadDone

ASKS_MAX = 3  # look-ups of one attempt: a lost lease is looked up again
# While a request waits its turn others store and give leases back: the next in line look again.
# An answer that was cut by the leases of those before is soon another.
STALE_S, CUT_STALE_S, NEXT_IN_LINE = 2.0, 0.25, 8
# Of many look-ups at once only so many are on their way: the time of the others runs when it is
# their turn. A server that answers none of them ends that by a breaker, at the latest this does.
ON_THEIR_WAY, IN_LINE_S_MAX = 4, 2.0
TOO_SLOW_DISK, TOO_SLOW_LOOKUP = "the disk took too long", "the look-up took too long"
LOST_LEASE = "the lease was lost"
LOST_SLOT = -1  # a page whose place is not known any more: the load of it fails


@dataclass(frozen=True, slots=True)
class Sizes:
    """Tokens of a page and of an engine's block; ranks that answer each job."""

    page_tokens: int
    block_tokens: int
    ranks: int

    @property
    def blocks_a_page(self) -> int:
        """How many blocks of the engine one page covers."""
        return self.page_tokens // self.block_tokens


@dataclass(frozen=True, slots=True)
class Answer:
    """For the scheduler: tokens beyond its own hit, None to ask again."""

    tokens: int | None
    is_async: bool = False


ASK_AGAIN = Answer(None)
NOTHING = Answer(0)


class LoadPlanner:
    """Used by Planner, which owns the requests."""

    def __init__(self, sizes: Sizes, store: StorePort, choice: LoadChoice) -> None:
        self._sizes = sizes
        self._store = store
        self._choice = choice
        self._tickets = 0
        self._jobs = 0
        self.askers: dict[int, RequestState] = {}  # by ticket
        self._unanswered: dict[int, None] = {}  # tickets, in order
        self.loads: dict[int, Load] = {}  # by job
        self.outbox: list[LoadJob] = []
        self.cancelled: list[int] = []
        self.counters: Counter[str] = Counter()

    def ask(self, state: RequestState) -> None:
        """Start a look-up of all that is known of a request."""
        self._tickets += 1
        state.ticket, state.found = self._tickets, None
        state.asks += 1
        self.askers[state.ticket] = state
        self._unanswered[state.ticket] = None
        pages = state.view.length // self._sizes.page_tokens
        self._store.look_up(state.ticket, state.view.chain(pages))

    def found(self, found: Found, now: float) -> None:
        """A look-up was answered."""
        if found.ticket in self._unanswered and found.reason in CUT:
            self.counters["lookups_cut"] += 1
        self._unanswered.pop(found.ticket, None)
        state = self.askers.get(found.ticket)
        if state is not None and state.ticket == found.ticket:
            state.found, state.found_s = found, now

    def look_again(self, states: Iterable[RequestState], now: float) -> None:
        """Of requests in the order of their turns: ask anew for those whose answer is old."""
        waiting = (
            state
            for state in states
            if state.phase is Phase.WAITING and state.policy.load and not state.bypass
        )
        for state in islice(waiting, NEXT_IN_LINE):
            found, whole = state.found, state.view.length // self._sizes.page_tokens
            if found is None or found.staging:
                continue
            if now - state.found_s < (CUT_STALE_S if found.reason in CUT else STALE_S):
                continue
            if found.pages < whole:
                self.release(state)
                state.asks, state.asked_s = 0, -1.0
                self.ask(state)

    def match(self, state: RequestState, local_tokens: int, now: float) -> Answer:
        """What to tell a scheduler that has `local_tokens` of this request itself.

        Changes nothing that assumes that the request will be scheduled.
        """
        state.plan = None
        if state.bypass or not state.policy.load:
            state.reason = state.bypass or state.policy.note or "not asked for"
            return NOTHING
        if state.view.length < self._sizes.page_tokens:
            state.reason = "shorter than a page"
            return NOTHING
        if state.asked_s < 0:
            state.asked_s = now
        if not state.ticket:
            if state.asks >= ASKS_MAX:
                return NOTHING
            self.ask(state)
        found = state.found
        if found is None:
            oldest = next(iter(self._unanswered), state.ticket)
            if state.ticket - oldest >= ON_THEIR_WAY and now - state.asked_s < IN_LINE_S_MAX:
                return ASK_AGAIN
            if state.begun_s < state.asked_s:
                state.begun_s = now
            if now - state.begun_s < self._choice.lookup_deadline_s(state.view.length):
                return ASK_AGAIN
            state.reason = TOO_SLOW_LOOKUP
            return NOTHING
        if found.staging:
            missing = found.pages - found.ready
            wait_s = LOOKUP_S_MIN + self._choice.stage_deadline_s(missing)
            if now - state.asked_s < wait_s:
                return ASK_AGAIN
        return self._plan(state, found, local_tokens)

    def _plan(self, state: RequestState, found: Found, local: int) -> Answer:
        choice = self._choice.decide(found.ready, local)
        state.reason = choice.reason
        if (found.staging or found.late) and not choice.pages:
            state.reason = TOO_SLOW_DISK
        elif found.reason and local <= state.view.length - self._sizes.page_tokens:
            state.reason = found.reason
        block = self._sizes.block_tokens
        end = choice.pages * self._sizes.page_tokens
        sync = choice.sync
        below = (state.view.length - 1) // block * block  # a step must have a token to compute
        if sync and end > below:
            end = below
        if end <= local or local % block:
            return NOTHING
        if not self._store.places(found.ticket, local // self._sizes.page_tokens, choice.pages):
            self.release(state)  # its server is gone, or another one came
            state.reason = LOST_LEASE
            return NOTHING
        state.plan = LoadPlan(local, end - local, sync)
        return Answer(end - local, not sync)

    def allocated(self, state: RequestState, external: int) -> None:
        """The scheduler took the request, with so many tokens from the store; blocks are set."""
        if state.job and not external:
            return  # the second call for a load that runs by itself
        if not external:
            self._take_known(state)
            self.release(state)
            state.phase = Phase.RUNNING
            return
        plan, found = state.plan, state.found
        if plan is None or found is None:
            self._fail_at_once(state, external)
            return
        end = plan.local + plan.external
        pages = self._pages(state, end - external, end)
        self._take_known(state)
        self._start(state, pages, plan.sync)
        page = self._sizes.page_tokens
        state.reused_tokens = external
        on_disk = max(0, found.disk_pages - (found.pages - -(-end // page))) * page
        state.reused_disk_tokens = min(external, on_disk)

    def answered(self, done: LoadDone) -> Load | None:
        """A rank's answer; the load when it was the last one."""
        load = self.loads.get(done.job)
        if load is None:
            self.counters["load_answers_unknown"] += 1
            return None
        load.ranks -= 1
        load.ok = load.ok and done.ok
        load.reason = load.reason or done.reason
        if done.ok:
            self._choice.copied(done.bytes, done.seconds)
        if load.ranks > 0:
            return None
        del self.loads[done.job]
        self._release_ticket(load.ticket)
        self.counters["loads_ok" if load.ok else "loads_failed"] += 1
        return load

    def settled(self, state: RequestState, load: Load) -> None:
        """The load of a request that is still there is over."""
        state.job = 0
        state.phase = Phase.RUNNING
        state.ticket = 0
        if not load.ok:
            state.stored_pages = 0
            state.bypass = f"a load failed: {load.reason or 'unknown'}"
            state.reused_tokens = state.reused_disk_tokens = 0
        state.found = None

    def leave(self, state: RequestState) -> None:
        """The request ends; a load under way is cancelled and still waited for."""
        if state.job:
            self.cancelled.append(state.job)
        else:
            self.release(state)

    def restart(self, state: RequestState) -> None:
        """The request was preempted: a new attempt, from the beginning."""
        if state.job:  # its lease is the load's until the workers have answered
            state.job, state.ticket, state.found = 0, 0, None
        else:
            self.release(state)
        state.phase = Phase.WAITING
        state.plan, state.asks, state.asked_s = None, 0, -1.0

    def release(self, state: RequestState) -> None:
        """Give back a ticket that no load reads under."""
        ticket, state.ticket, state.found = state.ticket, 0, None
        state.plan = None
        if ticket:
            self._release_ticket(ticket)

    def lose_unsent(self) -> None:
        """Loads that no worker has seen yet can't succeed any more."""
        self.outbox = [
            replace(job, pages=tuple(replace(page, slot=LOST_SLOT) for page in job.pages))
            for job in self.outbox
        ]

    def take(self) -> tuple[tuple[LoadJob, ...], tuple[int, ...]]:
        """Jobs and cancellations for the next step."""
        jobs, cancelled = tuple(self.outbox), tuple(self.cancelled)
        self.outbox.clear()
        self.cancelled.clear()
        return jobs, cancelled

    def _release_ticket(self, ticket: int) -> None:
        self._unanswered.pop(ticket, None)
        if self.askers.pop(ticket, None) is not None:
            self._store.release(ticket)

    def _take_known(self, state: RequestState) -> None:
        """What was found need not be saved."""
        if state.found is not None:
            state.stored_pages = max(state.stored_pages, state.found.pages)

    def _pages(self, state: RequestState, begin: int, end: int) -> list[PageLoad]:
        """Tokens [begin, end) page by page: blocks outside of them are left alone.

        page      |   0   |   1   |   2   |      a page of two blocks, begin in page 0,
        block     | 0 | 1 | 2 | 3 | 4 | 5 |      end in page 2: blocks 1..4 are loaded
        loaded    |   |///|///|///|///|   |
        """
        size = self._sizes
        first, stop = begin // size.page_tokens, -(-end // size.page_tokens)
        assert state.found is not None
        places = self._store.places(state.found.ticket, first, stop)
        pages = []
        for index, page in enumerate(range(first, stop)):
            at = page * size.blocks_a_page
            wanted = range(begin // size.block_tokens, -(-end // size.block_tokens))
            blocks = tuple(
                state.blocks[block] if block in wanted else SKIP_BLOCK
                for block in range(at, at + size.blocks_a_page)
            )
            slot, generation = places[index] if index < len(places) else (LOST_SLOT, 0)
            pages.append(PageLoad(slot, generation, blocks))
        return pages

    def _fail_at_once(self, state: RequestState, external: int) -> None:
        """The engine expects tokens of which nothing is known: a load that fails, honestly."""
        self.counters["loads_without_plan"] += 1
        count, step = -(-external // self._sizes.block_tokens), self._sizes.blocks_a_page
        blocks = state.blocks[-count:]
        blocks = blocks + [SKIP_BLOCK] * (-len(blocks) % step)
        lost = [
            PageLoad(LOST_SLOT, 0, tuple(blocks[at : at + step]))
            for at in range(0, len(blocks), step)
        ]
        self._start(state, lost, sync=True)  # a sync load is answered within its step

    def _start(self, state: RequestState, pages: Sequence[PageLoad], sync: bool) -> None:
        self._jobs += 1
        state.job, state.phase, state.plan = self._jobs, Phase.LOADING, None
        deadline_s = self._choice.load_deadline_s(len(pages))
        blocks = frozenset(block for page in pages for block in page.blocks) - {SKIP_BLOCK}
        request = state.view.id
        self.outbox.append(LoadJob(state.job, request, tuple(pages), sync, deadline_s))
        self.loads[state.job] = Load(state.job, request, state.ticket, self._sizes.ranks, blocks)
