"""A scheduler, its workers and a store, all played at random against the planner.

KV is modelled as a digest of everything before it, so that a page computed on a wrong block, saved
too early, or loaded to the wrong place has wrong bytes for ever. The store keeps what was committed
and compares; the engine compares what it computes on.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore.engine_adapter.load_choice import LoadChoice, LoadMode
from kvstore.engine_adapter.load_planner import Sizes
from kvstore.engine_adapter.plan_records import Chain, Committed, Found, Policy, Room
from kvstore.engine_adapter.planner import Planner
from kvstore.engine_adapter.transfer_plan import (
    SKIP_BLOCK,
    LoadDone,
    LoadJob,
    SaveDone,
    SaveJob,
    WorkerReport,
)

BLOCK = 2
BLOCKS_A_PAGE = 2
PAGE = BLOCK * BLOCKS_A_PAGE
POOL = 64
RANKS = 2
PINS_MAX = 12
NO_KV = -1


def kv_of(before: int, token: int) -> int:
    """What attention makes of a token, given all before it."""
    return hash((before, token))


def right_kv(tokens: list[int]) -> list[int]:
    """The KV of a prompt computed without any cache."""
    values, last = [], 0
    for token in tokens:
        last = kv_of(last, token)
        values.append(last)
    return values


def tokens_of(chain: Chain) -> tuple[int, ...]:
    return tuple(np.frombuffer(chain.tokens, "<i4").tolist())


class FakeStore:
    """Pages under their whole prefix; answers only when told to. Checks what is published."""

    def __init__(self) -> None:
        self.pages: dict[tuple[int, ...], tuple[int, ...]] = {}
        self.on_disk: set[tuple[int, ...]] = set()
        self.generation = 0
        self.lookups: dict[int, tuple[int, ...]] = {}  # asked, not answered
        self.leases: dict[int, list[tuple[int, ...]]] = {}
        self.slots: dict[int, tuple[int, ...]] = {}
        self.reserving: dict[int, tuple[int, ...]] = {}
        self.rooms: dict[int, list[tuple[int, ...]]] = {}
        self.staged: dict[int, list[int]] = {}  # by staging offset
        self.offsets: dict[int, list[int]] = {}
        self.committing: set[int] = set()
        self.lost_rooms: set[int] = set()  # of a server that has gone; asked or given
        self.next_offset = 0
        self.max_room = 8

    def look_up(self, ticket: int, chain: Chain) -> None:
        assert ticket not in self.lookups
        assert ticket not in self.leases
        self.lookups[ticket] = tokens_of(chain)

    def answer(self, ticket: int, *, staged: bool) -> Found:
        tokens = self.lookups.get(ticket, ())
        if ticket not in self.leases:
            del self.lookups[ticket]
            chain = []
            while len(chain) < len(tokens) // PAGE:
                name = tokens[: (len(chain) + 1) * PAGE]
                if name not in self.pages:
                    break
                chain.append(name)
            self.leases[ticket] = chain
        chain = self.leases[ticket]
        if staged:
            self.on_disk -= set(chain)
        ready = next((i for i, name in enumerate(chain) if name in self.on_disk), len(chain))
        return Found(ticket, len(chain), ready, not staged and ready < len(chain), 0)

    def places(self, ticket: int, start: int, stop: int) -> list[tuple[int, int]]:
        chain = self.leases[ticket]
        assert not self.on_disk & set(chain[start:stop]), "a page that is not in memory"
        found = []
        for name in chain[start:stop]:
            slot = len(self.slots) + 1
            self.slots[slot] = name
            found.append((slot, self.generation))
        return found

    def release(self, ticket: int) -> None:
        known = self.leases.pop(ticket, None) is not None
        known |= self.lookups.pop(ticket, None) is not None
        assert known, f"ticket {ticket} released twice"

    def leased(self) -> set[tuple[int, ...]]:
        return {name for chain in self.leases.values() for name in chain}

    def reserve(self, job: int, chain: Chain) -> None:
        assert job not in self.reserving
        assert job not in self.rooms
        self.reserving[job] = tokens_of(chain)

    def pending(self) -> set[tuple[int, ...]]:
        rooms = {job: names for job, names in self.rooms.items() if job not in self.lost_rooms}
        return {name for names in rooms.values() for name in names}

    def lose(self) -> None:
        """Another server answers: it has what was published, on disk, and knows of nobody."""
        self.generation += 1
        self.leases = {ticket: [] for ticket in self.leases}
        self.lost_rooms |= {*self.rooms, *self.reserving}
        self.on_disk = set(self.pages)

    def make_room(self, job: int, reason: str) -> Room:
        tokens = self.reserving.pop(job)
        if job in self.lost_rooms:
            self.lost_rooms.discard(job)
            return Room(job, reason="unreachable")
        names = [tokens[: (i + 1) * PAGE] for i in range(len(tokens) // PAGE)]
        start = next((i for i, name in enumerate(names) if name not in self.pages), len(names))
        if start == len(names):
            return Room(job, start, (), "present")
        free = []
        for name in names[start:]:
            if name in self.pending():
                break
            free.append(name)
        if reason or not free:
            return Room(job, start, (), reason or "in progress")
        why = "limit" if len(free) > self.max_room else ""
        free = free[: self.max_room]
        offsets = list(range(self.next_offset, self.next_offset + len(free)))
        self.next_offset += len(free)
        self.rooms[job], self.offsets[job] = free, offsets
        for offset in offsets:
            self.staged[offset] = [NO_KV] * PAGE
        why = why or ("in progress" if start + len(free) < len(names) else "")
        return Room(job, start, tuple(offsets), why)

    def commit(self, job: int) -> None:
        assert job in self.rooms
        self.committing.add(job)

    def publish(self, job: int) -> Committed:
        self.committing.discard(job)
        names, offsets = self.rooms.pop(job), self.offsets.pop(job)
        if job in self.lost_rooms:
            self.lost_rooms.discard(job)
            for offset in offsets:
                del self.staged[offset]
            return Committed(job, 0, "unreachable")
        for name, offset in zip(names, offsets, strict=True):
            page = self.staged.pop(offset)
            assert page == right_kv(list(name))[-PAGE:], f"wrong bytes published for {name}"
            assert name not in self.pages, "a page that the store has"
            self.pages[name] = tuple(page)
        return Committed(job, len(names))

    def abort(self, job: int) -> None:
        if self.rooms.pop(job, None) is not None:
            self.lost_rooms.discard(job)
        for offset in self.offsets.pop(job, []):
            del self.staged[offset]  # a worker that still writes there would fail

    def pin(self, chain: Chain, ttl_s: float) -> None:
        pass

    def hint(self, chain: Chain, hints: object) -> None:
        pass

    def end_conversation(self, name: str) -> None:
        pass


class FakePool:
    """The engine's blocks: reference counts, contents, and which prefix a full one holds."""

    def __init__(self) -> None:
        self.refs = [1] + [0] * (POOL - 1)
        self.content = [[NO_KV] * BLOCK for _ in range(POOL)]
        self.cached: dict[tuple[int, ...], int] = {}
        self.told: dict[int, object] = {}  # of full blocks, until they are given away
        self.pinned = 0

    def holds(self, blocks: object) -> list[object]:
        return [self.told.get(block) for block in list(blocks)]  # type: ignore[call-overload]

    def pin(self, blocks: object) -> None:
        for block in list(blocks):  # type: ignore[call-overload]
            is_kept = self.refs[block] > 0 or block in self.told
            assert is_kept, "a block that holds nothing was pinned"
            self.refs[block] += 1
            self.pinned += 1

    def unpin(self, blocks: object) -> None:
        for block in list(blocks):  # type: ignore[call-overload]
            self.refs[block] -= 1
            self.pinned -= 1
            assert self.refs[block] >= 0

    def free(self) -> list[int]:
        """Those that are given away next come first: here, those that were given back last."""
        return [block for block in range(1, POOL) if not self.refs[block]]

    def take(self, count: int) -> list[int] | None:
        free = self.free()
        if len(free) < count:
            return None
        for block in free[:count]:
            self.refs[block] = 1
            self.content[block] = [NO_KV] * BLOCK
            self.told.pop(block, None)
            self.cached = {name: at for name, at in self.cached.items() if at != block}
        return free[:count]

    def give(self, blocks: list[int]) -> None:
        for block in blocks:
            self.refs[block] -= 1
            assert self.refs[block] >= 0


@dataclass
class Request:
    """An engine's request; also the planner's view of it."""

    id: str
    tokens: list[int]
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    status: str = "waiting"  # waiting, loading, running
    store: bool = True

    @property
    def length(self) -> int:
        return len(self.tokens)

    def chain(self, pages: int) -> Chain:
        assert pages * PAGE <= self.length, "a page with tokens that nobody knows"
        return Chain(np.array(self.tokens[: pages * PAGE], "<i4").tobytes(), {})


@dataclass
class Copying:
    """A save job that ranks have not finished."""

    job: SaveJob
    left: int = RANKS


class SchedulerMachine(RuleBasedStateMachine):
    """Each rule is something that an engine, its workers or the store may do at any time."""

    pins_max = PINS_MAX

    def __init__(self) -> None:
        super().__init__()
        self.store, self.pool = FakeStore(), FakePool()
        choice = LoadChoice(LoadMode.ALWAYS, 1 << 20, PAGE)
        self.planner = Planner(
            *(Sizes(PAGE, BLOCK, RANKS), self.store, self.pool, choice),
            pinned_blocks_max=self.pins_max,
        )
        self.choice = choice
        self.requests: dict[str, Request] = {}
        self.gone: dict[str, Request] = {}  # aborted while loading: their blocks come back later
        self.loading: list[LoadJob] = []
        self.copying: list[Copying] = []
        # Answers to sync loads that come after the next step was planned, as async scheduling does.
        self.late: list[tuple[WorkerReport, set[int]]] = []
        self.doubtful: set[int] = set()
        self.numbers = 0
        self.now = 0.0

    # What users do

    @rule(
        prefix=st.sampled_from([(), (1,) * 4, (1,) * 8, (1,) * 13, (3,) * 14]),
        rest=st.lists(st.just(1) | st.integers(1, 2), min_size=1, max_size=9),
        load=st.booleans() | st.just(True),
        store=st.booleans() | st.just(True),
    )
    def arrive(self, prefix: tuple[int, ...], rest: list[int], load: bool, store: bool) -> None:
        if len(self.requests) >= 5:
            return
        self.numbers += 1
        request = Request(f"r{self.numbers}", [*prefix, *rest], store=store)
        self.requests[request.id] = request
        self.planner.arrive(request, Policy(load=load, store=store))

    @precondition(lambda self: self.requests)
    @rule(pick=st.integers(0, 9))
    def abort(self, pick: int) -> None:
        self.leave(self.pick(pick), well=False)

    @precondition(lambda self: any(r.status == "running" for r in self.requests.values()))
    @rule(pick=st.integers(0, 9))
    def finish(self, pick: int) -> None:
        request = self.pick(pick, "running")
        if request.computed >= 1 and not self.is_doubtful(request):
            self.leave(request, well=True)

    @precondition(lambda self: any(r.status == "running" for r in self.requests.values()))
    @rule(pick=st.integers(0, 9), more=st.lists(st.integers(1, 3), min_size=1, max_size=4))
    def stream_more_input(self, pick: int, more: list[int]) -> None:
        """What was not computed is thrown away, and other tokens follow."""
        request = self.pick(pick, "running")
        if not self.is_doubtful(request):
            request.tokens = request.tokens[: request.computed] + more

    # What the scheduler does

    @rule(
        chunk=st.integers(1, 9),
        drafts=st.integers(0, 3),
        accepted=st.integers(0, 3),
        no_blocks=st.booleans(),
        sync=st.booleans(),
        lag=st.booleans(),
        wait_s=st.sampled_from([0.0, 0.001, 0.03, 3.0]),
    )
    def step(
        self,
        chunk: int,
        drafts: int,
        accepted: int,
        no_blocks: bool,
        sync: bool,
        lag: bool,
        wait_s: float,
    ) -> None:
        late, self.late = self.late, []
        self.doubtful = {block for _, failed in late for block in failed}
        self.now += wait_s
        self.choice.copy_bytes_a_second = 1e12 if sync else 1e6
        scheduled: dict[str, int] = {}
        for request in [*self.requests.values()]:
            if request.status == "running":
                left = request.length - request.computed
                count = min(chunk, left) + (drafts if left == 1 else 0)
                if count and self.grow(request, request.computed + count):
                    scheduled[request.id] = count
        for request in [*self.requests.values()]:
            if request.status == "waiting" and request.id not in scheduled:
                self.admit(request, chunk, no_blocks, scheduled)
        for name, count in scheduled.items():
            request = self.requests[name]
            self.planner.step(name, request.blocks, request.computed, count, self.now)
        jobs = self.planner.take(self.now)
        answered = {done.job for report, _ in late for done in report.loads}
        known = answered | {job.job for job in (*self.loading, *jobs.loads)}
        assert not set(jobs.cancelled) - known
        self.run_workers(jobs, scheduled, accepted, lag=lag)
        self.doubtful = set()
        for report, failed in late:
            self.settle(report, failed)

    def admit(
        self, request: Request, chunk: int, no_blocks: bool, scheduled: dict[str, int]
    ) -> None:
        local_blocks: list[int] = []
        external, is_async = 0, False
        if request.computed == 0:
            local_blocks = self.local_hit(request)
            answer = self.planner.match(request.id, len(local_blocks) * BLOCK, self.now)
            if answer.tokens is None:
                return
            external, is_async = answer.tokens, answer.is_async
            assert not is_async or external
            assert len(local_blocks) * BLOCK + external <= request.length
            request.blocks = []
        have = len(local_blocks) * BLOCK + external if request.computed == 0 else request.computed
        new = 0 if is_async else min(chunk, request.length - have)
        assert is_async or new > 0, "a step without a token to compute"
        for block in local_blocks:
            self.pool.refs[block] += 1
        known = len(local_blocks) or len(request.blocks)
        fresh = self.pool.take(max(0, -(-(have + new) // BLOCK) - known))
        if fresh is None or no_blocks:
            self.pool.give([*local_blocks, *(fresh or [])])
            return
        request.blocks = [*(local_blocks or request.blocks), *fresh]
        self.planner.allocated(request.id, request.blocks, external)
        request.computed = have
        request.status = "loading" if is_async else "running"
        if not is_async:
            scheduled[request.id] = new

    def local_hit(self, request: Request) -> list[int]:
        found: list[int] = []
        while (len(found) + 1) * BLOCK < request.length:
            block = self.pool.cached.get(tuple(request.tokens[: (len(found) + 1) * BLOCK]))
            if block is None:
                break
            found.append(block)
        return found

    def grow(self, request: Request, tokens: int) -> bool:
        need = -(-tokens // BLOCK) - len(request.blocks)
        fresh = self.pool.take(max(0, need))
        if fresh is None:
            self.preempt_one(request)
            return False
        request.blocks += fresh
        return True

    @precondition(lambda self: any(r.status == "running" for r in self.requests.values()))
    @rule(pick=st.integers(0, 9))
    def preempt(self, pick: int) -> None:
        self.preempt_one(self.pick(pick, "running"))

    def preempt_one(self, request: Request) -> None:
        self.pool.give(request.blocks)
        request.blocks, request.computed, request.status = [], 0, "waiting"
        self.planner.preempted(request.id)

    # What workers do

    def run_workers(
        self, jobs: object, scheduled: dict[str, int], accepted: int, *, lag: bool = False
    ) -> None:
        loads, saves = jobs.loads, jobs.saves  # type: ignore[attr-defined]
        report = WorkerReport()
        failed: set[int] = set()
        for job in loads:
            if job.sync:
                done, bad = self.load(job, fail=accepted == 3)
                report = report.merged(done)
                failed |= bad
            else:
                self.loading.append(job)
        for name, count in scheduled.items():
            self.forward(self.requests[name], count)
        self.copying += [Copying(job) for job in saves]
        for name, count in scheduled.items():
            self.sample(self.requests[name], count, accepted, failed | self.doubtful)
        if lag:
            self.late.append((report, failed))
        else:
            self.settle(report, failed)

    def settle(self, report: WorkerReport, failed: set[int]) -> None:
        self.invalid(failed)
        self.planner.report(report, self.now)

    def is_doubtful(self, request: Request) -> bool:
        """Whether the engine has yet to hear that some of its blocks were not loaded."""
        failed = {block for _, blocks in self.late for block in blocks}
        return not failed.isdisjoint(request.blocks)

    def forward(self, request: Request, count: int) -> None:
        for at in range(request.computed, request.computed + count):
            block, position = request.blocks[at // BLOCK], at % BLOCK
            before = 0 if at == 0 else self.kv_at(request, at - 1)
            token = request.tokens[at] if at < request.length else 99  # a draft
            self.pool.content[block][position] = kv_of(before, token)

    def kv_at(self, request: Request, at: int) -> int:
        return self.pool.content[request.blocks[at // BLOCK]][at % BLOCK]

    def sample(self, request: Request, count: int, accepted: int, failed: set[int]) -> None:
        known = request.length
        request.computed += count
        if request.computed >= known:
            drafts = request.computed - known
            took = min(accepted, drafts)
            request.computed -= drafts - took
            # Accepted drafts are what was computed; a draft is always token 99 here.
            request.tokens += [99] * took + [5]
        if failed & set(request.blocks):
            return  # the engine finds out before it caches any of this
        for end in range(BLOCK, min(request.computed, request.length) + 1, BLOCK):
            name = tuple(request.tokens[:end])
            block = request.blocks[end // BLOCK - 1]
            self.pool.cached.setdefault(name, block)
            self.pool.told.setdefault(block, object())

    def load(self, job: LoadJob, *, fail: bool) -> tuple[WorkerReport, set[int]]:
        bad: set[int] = set()
        for number, page in enumerate(job.pages):
            lost = page.slot not in self.store.slots or page.generation != self.store.generation
            if lost or (fail and number >= len(job.pages) // 2):
                bad |= set(page.blocks) - {SKIP_BLOCK}
                continue
            name = self.store.slots[page.slot]
            assert name in self.store.leased(), "read without a lease"
            content = self.store.pages[name]
            for index, block in enumerate(page.blocks):
                if block != SKIP_BLOCK:
                    part = content[index * BLOCK : (index + 1) * BLOCK]
                    self.pool.content[block] = list(part)
        done = LoadDone(job.job, job.request, not bad, tuple(bad), 1 << 20, 0.01, "test")
        return WorkerReport(loads=(done,) * RANKS), bad

    def invalid(self, bad: set[int]) -> None:
        """What a scheduler does about blocks that were not loaded, with everybody who has them."""
        self.pool.cached = {n: b for n, b in self.pool.cached.items() if b not in bad}
        for request in self.requests.values():
            first = next((i for i, b in enumerate(request.blocks) if b in bad), None)
            if first is not None and request.status == "running":
                # Tokens sampled meanwhile came from garbage and are thrown away.
                request.tokens = request.tokens[: max(request.length - 1, first * BLOCK + 1)]
                request.computed = min(request.computed, first * BLOCK)

    @precondition(lambda self: self.loading)
    @rule(pick=st.integers(0, 9), fail=st.booleans())
    def async_load_ends(self, pick: int, fail: bool) -> None:
        job = self.loading.pop(pick % len(self.loading))
        done, bad = self.load(job, fail=fail)
        self.planner.report(done, self.now)
        if job.request in self.gone:
            self.pool.give(self.gone.pop(job.request).blocks)
            return
        request = self.requests[job.request]
        assert request.status == "loading"
        first = next((i for i, b in enumerate(request.blocks) if b in bad), None)
        request.status = "running"
        if first is not None:
            request.computed = first * BLOCK
        if request.computed == 0:
            self.pool.give(request.blocks)
            request.blocks, request.status = [], "waiting"
        elif request.computed == request.length:
            request.computed -= 1
        if request.computed:
            request.status = "waiting"  # admitted again, with its blocks
            request.status = "running"
            self.planner.allocated(request.id, request.blocks, 0)

    @precondition(lambda self: self.copying)
    @rule(pick=st.integers(0, 9), fail=st.booleans())
    def copy_ends(self, pick: int, fail: bool) -> None:
        copying = self.copying[pick % len(self.copying)]
        copying.left -= 1
        if copying.left == 0:
            self.copying.remove(copying)
            for page in copying.job.pages:
                assert page.offset in self.store.staged, "memory that was given back"
                flat = [kv for block in page.blocks for kv in self.pool.content[block]]
                self.store.staged[page.offset] = [NO_KV] * PAGE if fail else flat
        done = SaveDone(copying.job.job, ok=not (fail and copying.left == 0))
        self.planner.report(WorkerReport(saves=(done,)), self.now)

    # What the store does

    @precondition(lambda self: self.store.lookups or self.store.leases)
    @rule(pick=st.integers(0, 9), staged=st.booleans())
    def lookup_answered(self, pick: int, staged: bool) -> None:
        tickets = [*self.store.lookups, *self.store.leases]
        self.planner.event(self.store.answer(tickets[pick % len(tickets)], staged=staged), self.now)

    @precondition(lambda self: self.store.reserving)
    @rule(pick=st.integers(0, 9), reason=st.sampled_from(["", "", "", "full"]))
    def reservation_answered(self, pick: int, reason: str) -> None:
        jobs = list(self.store.reserving)
        self.store.max_room = 1 + pick % 3
        room = self.store.make_room(jobs[pick % len(jobs)], reason)
        self.planner.event(room, self.now)

    @precondition(lambda self: self.store.committing)
    @rule()
    def commit_answered(self) -> None:
        self.planner.event(self.store.publish(min(self.store.committing)), self.now)

    @rule(times=st.integers(1, 3), fail=st.booleans() | st.just(False), staged=st.booleans())
    def everyone_answers(self, times: int, fail: bool, staged: bool) -> None:
        """What mostly happens between two steps of an engine."""
        for _ in range(times):
            for ticket in [*self.store.lookups]:
                self.planner.event(self.store.answer(ticket, staged=staged), self.now)
            for job in [*self.store.reserving]:
                self.store.max_room = 4
                self.planner.event(self.store.make_room(job, ""), self.now)
            while self.loading:
                self.async_load_ends(0, fail=fail)
            self.run_workers(self.planner.take(self.now), {}, 0)
            while self.copying:
                self.copy_ends(0, fail=fail)
            while self.store.committing:
                self.commit_answered()

    @precondition(lambda self: self.store.pages)
    @rule(pick=st.integers(0, 99), disk=st.booleans())
    def page_leaves(self, pick: int, disk: bool) -> None:
        """A tail that nobody leases is evicted, or is on disk only from now on."""
        names = sorted(self.store.pages)
        name = names[pick % len(names)]
        tail = not any(each[: len(name)] == name and each != name for each in names)
        building = {each[:-PAGE] for each in self.store.pending()}
        if name in self.store.leased() or not tail or name in building:
            return
        if disk:
            self.store.on_disk.add(name)
        else:
            del self.store.pages[name]
            self.store.on_disk.discard(name)

    @rule()
    def server_lost(self) -> None:
        self.store.lose()
        self.planner.lost_store(self.now)

    @rule()
    def reset(self) -> None:
        self.planner.reset(self.now)
        assert self.pool.pinned == 0

    # What must hold

    @invariant()
    def counts_agree(self) -> None:
        self.planner.check()
        assert self.pool.pinned == self.planner.held()["pinned_blocks"] <= self.pins_max
        assert len(self.store.leases) + len(self.store.lookups) == self.planner.held()["tickets"]

    @invariant()
    def what_is_computed_is_right(self) -> None:
        for request in self.requests.values():
            if request.status == "running" and request.computed and not self.is_doubtful(request):
                right = right_kv(request.tokens[: request.computed])
                have = [self.kv_at(request, at) for at in range(request.computed)]
                assert have == right, request

    def teardown(self) -> None:
        """Everything ends: nothing may be left anywhere."""
        for report, failed in self.late:
            self.settle(report, failed)
        for request in [*self.requests.values()]:
            self.leave(request, well=False)
        for _ in range(400):
            self.now += 0.06
            jobs = self.planner.take(self.now)
            self.run_workers(jobs, {}, 0)
            while self.loading:
                self.async_load_ends(0, fail=False)
            while self.copying:
                self.copy_ends(0, fail=False)
            while self.store.reserving:
                self.store.max_room = 8
                self.planner.event(self.store.make_room(min(self.store.reserving), ""), self.now)
            while self.store.committing:
                self.commit_answered()
            if not any(self.planner.held().values()) and not self.planner.needs_steps:
                break
        assert not any(self.planner.held().values()), self.planner.held()
        assert not self.store.leases
        assert not self.store.rooms
        assert self.pool.pinned == 0
        assert sum(self.pool.refs) == 1, "a block that nobody gives back"

    def leave(self, request: Request, *, well: bool) -> None:
        del self.requests[request.id]
        self.planner.finished(request.id, request.blocks, request.computed, well=well, now=self.now)
        if request.status == "loading":
            self.gone[request.id] = request
        else:
            self.pool.give(request.blocks)

    def pick(self, number: int, status: str = "") -> Request:
        some = [r for r in self.requests.values() if not status or r.status == status]
        return some[number % len(some)]
