"""The planner, one story at a time; test_planner_machine.py tells them at random."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from kvstore.engine_adapter.load_choice import LoadChoice, LoadMode
from kvstore.engine_adapter.load_planner import LOST_SLOT, NEXT_IN_LINE, Answer, Sizes
from kvstore.engine_adapter.plan_records import Chain, Committed, Found, Policy, Room
from kvstore.engine_adapter.planner import Planner
from kvstore.engine_adapter.save_planner import LEAVERS_MAX
from kvstore.engine_adapter.transfer_plan import (
    SKIP_BLOCK,
    LoadDone,
    PageLoad,
    SaveDone,
    WorkerReport,
)
from kvstore.hints import Hints

BLOCK, PAGE = 4, 8


@dataclass
class Request:
    """Tokens 0, 1, 2, ..."""

    id: str
    length: int

    def chain(self, pages: int) -> Chain:
        assert pages * PAGE <= self.length
        return Chain(bytes(4 * pages * PAGE), {})


@dataclass
class Store:
    """Writes down what it is asked."""

    calls: list[tuple[object, ...]] = field(default_factory=list)
    lost: bool = False

    def look_up(self, ticket: int, chain: Chain) -> None:
        self.calls.append(("look_up", ticket, len(chain.tokens) // (4 * PAGE)))

    def places(self, ticket: int, start: int, stop: int) -> list[tuple[int, int]]:
        return [] if self.lost else [(100 + page, 2) for page in range(start, stop)]

    def release(self, ticket: int) -> None:
        self.calls.append(("release", ticket))

    def reserve(self, job: int, chain: Chain) -> None:
        self.calls.append(("reserve", job, len(chain.tokens) // (4 * PAGE)))

    def commit(self, job: int) -> None:
        self.calls.append(("commit", job))

    def abort(self, job: int) -> None:
        self.calls.append(("abort", job))

    def pin(self, chain: Chain, ttl_s: float) -> None:
        self.calls.append(("pin", len(chain.tokens) // (4 * PAGE), ttl_s))

    def hint(self, chain: Chain, hints: Hints) -> None:
        self.calls.append(("hint", len(chain.tokens) // (4 * PAGE), hints))

    def end_conversation(self, name: str) -> None:
        self.calls.append(("end", name))


@dataclass
class Pool:
    """Counts pins. `told`: of each block that is not in use by another since."""

    pinned: list[int] = field(default_factory=list)
    told: dict[int, object] = field(default_factory=dict)

    def holds(self, blocks: object) -> list[object]:
        return [
            self.told.setdefault(block, object())
            for block in list(blocks)  # type: ignore[call-overload]
        ]

    def pin(self, blocks: object) -> None:
        self.pinned += list(blocks)  # type: ignore[call-overload]

    def unpin(self, blocks: object) -> None:
        for block in list(blocks):  # type: ignore[call-overload]
            self.pinned.remove(block)


def planner(
    *, sync: bool = False, pins: int = 100, ranks: int = 1, mode: LoadMode = LoadMode.ALWAYS
) -> tuple[Planner, Store, Pool]:
    choice = LoadChoice(mode, 1 << 20, PAGE)
    choice.copy_bytes_a_second = 1e12 if sync else 1.0
    store, pool = Store(), Pool()
    made = Planner(Sizes(PAGE, BLOCK, ranks), store, pool, choice, pinned_blocks_max=pins)
    return made, store, pool


def test_a_request_is_looked_up_when_it_arrives_and_asked_again_until_the_answer() -> None:
    made, store, _ = planner()
    made.arrive(Request("a", 20), Policy())
    assert store.calls == [("look_up", 1, 2)]
    assert made.match("a", 0, 10.0).tokens is None
    made.event(Found(1, 2, 2), 10.0)
    assert made.match("a", 0, 10.001) == Answer(16, is_async=True)


def test_a_look_up_that_takes_too_long_is_a_miss_and_still_good_later() -> None:
    made, _, _ = planner(mode=LoadMode.AUTO)
    made.arrive(Request("a", 20), Policy())
    assert made.match("a", 0, 10.0).tokens is None
    assert made.match("a", 0, 10.09).tokens is None
    assert made.match("a", 0, 10.11).tokens == 0
    made.event(Found(1, 2, 2), 10.12)
    assert made.match("a", 0, 10.13).tokens == 16
    made.choice.prefilled(1000, 0.01)
    made.arrive(Request("b", 20), Policy())
    assert made.match("b", 0, 10.0).tokens is None
    assert made.match("b", 0, 10.03).tokens == 0


def test_the_time_of_a_look_up_runs_when_those_before_it_are_answered() -> None:
    made, _, _ = planner(mode=LoadMode.AUTO)
    made.choice.prefilled(1000, 0.01)
    for number in range(100):
        made.arrive(Request(f"r{number}", 20), Policy())
    assert made.match("r99", 0, 10.0).tokens is None
    assert made.match("r99", 0, 11.0).tokens is None
    for ticket in range(1, 100):
        made.event(Found(ticket), 11.0)
    assert made.match("r99", 0, 11.0).tokens is None
    assert made.match("r99", 0, 11.01).tokens is None
    assert made.match("r99", 0, 11.03).tokens == 0
    for number in range(100, 200):
        made.arrive(Request(f"r{number}", 20), Policy())
    assert made.match("r199", 0, 20.0).tokens is None
    assert made.match("r199", 0, 21.9).tokens is None
    made.match("r199", 0, 22.1)
    assert made.match("r199", 0, 22.2).tokens == 0, "not for ever"


def test_the_next_in_line_are_looked_up_again_when_their_answer_is_old_and_not_all() -> None:
    made, store, _ = planner()
    for number, pages in enumerate((0, 1, 2)):
        made.arrive(Request(f"r{number}", 20), Policy())
        made.event(Found(number + 1, pages, pages), 0.0)
    made.arrive(Request("no", 20), Policy(load=False))
    assert made.match("r0", 0, 0.0).tokens == 0, "and its engine has no room for it yet"
    store.calls.clear()
    made.take(1.9)
    assert not store.calls
    made.take(2.1)
    assert store.calls == [("release", 1), ("look_up", 4, 2), ("release", 2), ("look_up", 5, 2)]
    assert made.match("r0", 0, 2.1).tokens is None
    made.event(Found(4, 2, 2), 2.1)
    assert made.match("r0", 0, 2.1).tokens == 16
    for number in range(20):
        made.arrive(Request(f"more{number}", 20), Policy())
        made.event(Found(6 + number), 2.2)
    made.event(Found(5), 2.2)
    store.calls.clear()
    made.take(5.0)
    assert len(store.calls) == 2 * (NEXT_IN_LINE - 2), "those whose turn is far wait"
    made.check()


def test_who_always_loads_waits_longer_for_a_look_up_but_not_for_ever() -> None:
    made, _, _ = planner()
    made.arrive(Request("a", 20), Policy())
    assert made.match("a", 0, 10.0).tokens is None
    assert made.match("a", 0, 10.9).tokens is None
    assert made.match("a", 0, 11.1).tokens == 0


def test_a_sync_hit_leaves_a_token_to_compute_and_an_async_one_may_be_whole() -> None:
    for sync, tokens in ((True, 12), (False, 16)):
        made, _, _ = planner(sync=sync)
        made.arrive(Request("a", 16), Policy())
        made.event(Found(1, 2, 2), 0.0)
        assert made.match("a", 0, 0.0) == Answer(tokens, is_async=not sync)


def test_a_local_hit_in_the_middle_of_a_page_is_left_alone() -> None:
    made, _, _ = planner()
    made.arrive(Request("a", 20), Policy())
    made.event(Found(1, 2, 2), 0.0)
    assert made.match("a", 4, 0.0).tokens == 12
    made.allocated("a", [7, 8, 9, 10, 11], 12)
    (job,) = made.take(0.0).loads
    assert job.pages == (PageLoad(100, 2, (SKIP_BLOCK, 8)), PageLoad(101, 2, (9, 10)))


def test_a_plan_that_the_scheduler_discards_gives_its_lease_back() -> None:
    made, store, _ = planner()
    made.arrive(Request("a", 20), Policy())
    made.event(Found(1, 2, 2), 0.0)
    made.match("a", 0, 0.0)
    made.allocated("a", [1, 2, 3, 4, 5], 0)
    assert ("release", 1) in store.calls
    assert not made.take(0.0).loads


def test_a_lease_outlives_an_abort_until_the_worker_has_answered() -> None:
    made, store, _ = planner()
    made.arrive(Request("a", 20), Policy())
    made.event(Found(1, 2, 2), 0.0)
    made.match("a", 0, 0.0)
    made.allocated("a", [1, 2, 3, 4], 16)
    (job,) = made.take(0.0).loads
    made.finished("a", [1, 2, 3, 4], 0, well=False, now=0.0)
    assert made.take(0.0).cancelled == (job.job,)
    assert ("release", 1) not in store.calls
    made.report(WorkerReport(loads=(LoadDone(job.job, "a", False),)), 0.0)
    assert ("release", 1) in store.calls
    assert not any(made.held().values())


def test_after_a_failed_load_a_request_never_matches_again() -> None:
    """Else it would load, fail and load again for ever: the store goes on saying hit."""
    made, store, _ = planner()
    made.arrive(Request("a", 20), Policy())
    made.event(Found(1, 2, 2), 0.0)
    made.match("a", 0, 0.0)
    made.allocated("a", [1, 2, 3, 4], 16)
    (job,) = made.take(0.0).loads
    made.report(WorkerReport(loads=(LoadDone(job.job, "a", False, (1, 2, 3, 4)),)), 0.0)
    assert made.match("a", 0, 0.0) == Answer(0)
    assert [call for call in store.calls if call[0] == "look_up"] == [("look_up", 1, 2)]


def test_failed_loads_in_a_row_are_a_pause_for_everybody() -> None:
    made, _, _ = planner()
    for number in range(1, 4):
        name = f"r{number}"
        made.arrive(Request(name, 20), Policy())
        made.event(Found(number, 2, 2), 0.0)
        assert made.match(name, 0, 0.0).tokens == 16
        made.allocated(name, [1, 2, 3, 4], 16)
        (job,) = made.take(0.0).loads
        made.report(WorkerReport(loads=(LoadDone(job.job, name, False),)), 0.0)
    made.arrive(Request("late", 20), Policy())
    made.event(Found(4, 2, 2), 0.0)
    assert made.match("late", 0, 0.01).tokens == 0
    assert made.match("late", 0, 5.0).tokens == 16


def test_what_was_computed_on_a_failed_load_is_not_published() -> None:
    made, store, pool = planner(sync=True)
    request = Request("a", 33)
    made.arrive(request, Policy())
    made.event(Found(1, 2, 2), 0.0)
    assert made.match("a", 0, 0.0).tokens == 16
    made.allocated("a", list(range(1, 10)), 16)
    made.step("a", None, 16, 17, 0.0)
    (job,) = made.take(0.0).loads
    made.event(Room(1, 2, (0, 4096)), 0.0)
    (save,) = made.take(0.0).saves
    made.report(WorkerReport(saves=(SaveDone(save.job, True),)), 0.0)
    assert ("commit", 1) not in store.calls
    made.report(WorkerReport(loads=(LoadDone(job.job, "a", False, (3,)),)), 0.0)
    assert ("abort", 1) in store.calls
    assert ("commit", 1) not in store.calls
    assert not pool.pinned


def test_a_page_is_saved_once_its_tokens_are_known_and_not_before() -> None:
    made, store, _ = planner()
    request = Request("a", 7)
    made.arrive(request, Policy())
    made.step("a", [1, 2], 0, 7, 0.0)
    made.step("a", [1, 2, 3], 7, 4, 0.0)  # one known token and three drafts
    assert not store.calls
    request.length = 8
    made.step("a", [1, 2, 3], 7, 4, 0.0)
    assert store.calls == [("reserve", 1, 1)]


def test_pins_stay_under_their_cap_and_the_rest_is_saved_later() -> None:
    made, store, pool = planner(pins=2)
    made.arrive(Request("a", 40), Policy(load=False))
    made.step("a", list(range(1, 11)), 0, 40, 0.0)
    assert pool.pinned == [1, 2]
    made.event(Room(1, 0, (0,)), 0.0)
    (save,) = made.take(0.0).saves
    made.report(WorkerReport(saves=(SaveDone(save.job, True),)), 0.0)
    made.event(Committed(1, 1), 0.0)
    made.step("a", None, 40, 0, 0.0)
    assert pool.pinned == [3, 4]
    assert store.calls[-1] == ("reserve", 2, 2)


def test_pages_that_another_writer_has_are_asked_for_again_after_a_moment() -> None:
    made, store, _ = planner()
    made.arrive(Request("a", 8), Policy(load=False))
    made.step("a", [1, 2], 0, 8, 0.0)
    made.event(Room(1, 0, (), "in progress"), 0.0)
    made.take(0.01)
    assert len(store.calls) == 1
    made.take(0.06)
    assert store.calls[-1] == ("reserve", 1, 1)


def test_the_last_page_of_a_request_is_saved_when_it_ends() -> None:
    made, store, pool = planner()
    request = Request("a", 8)
    made.arrive(request, Policy(load=False))
    made.step("a", [1, 2], 0, 7, 0.0)
    request.length = 9
    made.finished("a", [1, 2, 3], 8, well=True, now=0.0)
    assert store.calls == [("reserve", 1, 1)]
    assert pool.pinned == [1, 2]
    assert made.needs_steps


def blocks_of_next_save(
    made: Planner, job: int, start: int, pages: int, reason: str = ""
) -> list[int]:
    """The blocks that it copies, once it is published."""
    made.event(Room(job, start, tuple(range(pages)), reason), 0.0)
    [save] = made.take(0.0).saves
    made.report(WorkerReport(saves=(SaveDone(job, True),)), 0.0)
    made.event(Committed(job, pages), 0.0)
    made.take(0.1)
    return [block for page in save.pages for block in page.blocks]


def ended_over_the_cap() -> tuple[Planner, Store, Pool]:
    """Five pages in one step and the end; two may be pinned at a time."""
    made, store, pool = planner(pins=4)
    made.arrive(Request("a", 5 * PAGE + 2), Policy(load=False))
    made.allocated("a", list(range(1, 12)), 0)
    made.step("a", None, 0, 5 * PAGE + 2, 0.0)
    made.finished("a", list(range(1, 12)), 5 * PAGE + 2, well=True, now=0.0)
    assert pool.pinned == [1, 2, 3, 4]
    return made, store, pool


def test_what_a_request_leaves_over_the_cap_is_saved_in_turns_after_its_end() -> None:
    made, _, pool = ended_over_the_cap()
    assert made.needs_steps
    assert made.saves_left == 2
    assert blocks_of_next_save(made, 1, 0, 2) == [1, 2, 3, 4]
    assert pool.pinned == [5, 6, 7, 8]
    assert blocks_of_next_save(made, 2, 2, 2) == [5, 6, 7, 8]
    assert blocks_of_next_save(made, 3, 4, 1) == [9, 10]
    assert not any(made.held().values())
    assert not made.needs_steps
    assert made.counters()["pages_left_behind"] == 0


def test_what_was_left_in_blocks_that_somebody_took_is_not_saved() -> None:
    made, _, pool = ended_over_the_cap()
    del pool.told[7]
    assert blocks_of_next_save(made, 1, 0, 2) == [1, 2, 3, 4]
    assert blocks_of_next_save(made, 2, 2, 1) == [5, 6]
    assert not any(made.held().values())
    assert made.counters()["pages_left_behind"] == 2


def test_what_was_left_waits_some_seconds_for_a_store_without_room_and_is_told_of() -> None:
    made, _, _ = ended_over_the_cap()
    made.event(Room(1, 0, (), "full"), 0.0)
    made.take(0.1)
    assert made.held()["leavers"] == 1
    made.take(0.3)
    assert blocks_of_next_save(made, 2, 0, 2) == [1, 2, 3, 4]
    made.event(Room(3, 2, (), "full"), 1.0)
    made.take(1.3)
    made.event(Room(4, 2, (), "full"), 7.0)
    made.take(7.1)
    assert not any(made.held().values())
    assert made.counters()["pages_left_behind"] == 3
    assert made.take_lost() == {"full": 3}
    assert not made.take_lost()


@pytest.mark.parametrize("reason", ["quota: 1 GiB", "refused: no", "unreachable"])
def test_a_refusal_that_lasts_ends_what_was_left_at_once(reason: str) -> None:
    made, _, _ = ended_over_the_cap()
    made.event(Room(1, 0, (), reason), 0.0)
    made.take(0.1)
    assert not any(made.held().values())
    assert made.take_lost() == {reason: 5}


def test_a_save_that_is_refused_after_its_request_ended_is_asked_for_again() -> None:
    made, _, pool = planner()
    made.arrive(Request("a", 2 * PAGE + 2), Policy(load=False))
    made.step("a", [1, 2, 3, 4, 5], 0, 2 * PAGE + 2, 0.0)
    made.finished("a", None, 2 * PAGE + 2, well=True, now=0.0)
    made.event(Room(1, 0, (), "disk behind"), 0.0)
    assert not pool.pinned, "blocks are not kept from the engine for a store that has no room"
    made.take(0.3)
    assert blocks_of_next_save(made, 2, 0, 2) == [1, 2, 3, 4]
    assert not any(made.held().values())


def test_a_save_waits_for_those_that_fill_the_staging_and_is_no_refusal() -> None:
    made, store, _ = planner()
    for number, name in enumerate("abc"):
        made.arrive(Request(name, PAGE + 2), Policy(load=False))
        made.step(name, [1 + 3 * number + at for at in range(3)], 0, PAGE + 2, 0.0)
        made.finished(name, None, PAGE + 2, well=True, now=0.0)
    made.event(Room(1, 0, (0,)), 0.0)
    for job in (2, 3):
        made.event(Room(job, 0, (), "limit"), 0.0)
    store.calls.clear()
    [save] = made.take(0.0).saves
    assert store.calls == [("reserve", 2, 1)], "there was room for one, so there may be for another"
    made.event(Room(2, 0, (), "limit"), 0.0)
    made.take(0.1)
    store.calls.clear()
    made.report(WorkerReport(saves=(SaveDone(save.job, True),)), 0.1)
    made.event(Committed(1, 1), 0.1)
    made.take(0.1)
    assert store.calls == [("commit", 1), ("reserve", 2, 1)], "one at a time, in order"
    made.event(Room(2, 0, (0,)), 0.1)
    made.take(0.1)
    assert store.calls[2:] == [("reserve", 3, 1)], "there may be room for another"
    made.event(Room(3, 0, (), "limit"), 0.1)
    made.take(1.0)
    made.take(1.2)
    assert store.calls[3:] == [("reserve", 3, 1)], "and after a while without any news"
    assert not made.counters()["saves_refused"]


def test_staging_that_others_fill_for_long_is_a_refusal_in_the_end() -> None:
    made, store, pool = planner()
    made.arrive(Request("a", PAGE + 2), Policy(load=False))
    made.step("a", [1, 2, 3], 0, PAGE + 2, 0.0)
    made.finished("a", None, PAGE + 2, well=True, now=0.0)
    now = 0.0
    while any(made.held().values()):
        made.event(Room(store.calls[-1][1], 0, (), "limit"), now)  # type: ignore[arg-type]
        now += 0.1
        made.take(now)
        assert now < 40
    assert not pool.pinned
    assert made.take_lost() == {"limit": 1}


def test_room_for_a_part_is_used_and_the_rest_is_asked_for_when_there_may_be_more() -> None:
    made, store, _ = planner()
    made.arrive(Request("a", 3 * PAGE + 2), Policy(load=False))
    made.step("a", list(range(1, 8)), 0, 3 * PAGE + 2, 0.0)
    made.event(Room(1, 0, (0,), "full"), 0.0)
    [save] = made.take(0.0).saves
    assert [page.blocks for page in save.pages] == [(1, 2)]
    made.report(WorkerReport(saves=(SaveDone(1, True),)), 0.0)
    made.event(Committed(1, 1), 0.0)
    made.finished("a", None, 3 * PAGE + 2, well=True, now=0.1)
    made.take(0.3)
    assert blocks_of_next_save(made, int(str(store.calls[-1][1])), 1, 2) == [3, 4, 5, 6]
    assert not any(made.held().values())


def test_pages_that_the_request_grew_meanwhile_follow_a_save_that_was_cut() -> None:
    made, store, _ = planner()
    made.arrive(Request("a", 3 * PAGE + 2), Policy(load=False))
    made.step("a", list(range(1, 8)), 0, 2 * PAGE, 0.0)
    made.finished("a", None, 3 * PAGE + 2, well=True, now=0.0)  # whose last page is a tail
    assert blocks_of_next_save(made, 1, 0, 1, "limit") == [1, 2]
    made.take(0.0)
    assert blocks_of_next_save(made, int(str(store.calls[-1][1])), 1, 1) == [3, 4]
    assert blocks_of_next_save(made, int(str(store.calls[-1][1])), 2, 1) == [5, 6]
    assert not any(made.held().values())


def test_an_evicted_parent_in_little_staging_is_saved_part_by_part() -> None:
    made, _, pool = planner()
    made.arrive(Request("a", 4 * PAGE + 2), Policy(load=False))
    made.step("a", list(range(1, 10)), 0, 2 * PAGE, 0.0)
    assert blocks_of_next_save(made, 1, 0, 2) == [1, 2, 3, 4]
    made.step("a", None, 2 * PAGE, PAGE, 0.0)
    assert blocks_of_next_save(made, 2, 0, 1, "limit") == [1, 2], "the first page has gone"
    assert blocks_of_next_save(made, 3, 1, 2) == [3, 4, 5, 6]
    made.finished("a", None, 3 * PAGE, well=False, now=0.0)
    assert not pool.pinned
    assert not any(made.held().values())


def test_a_load_that_fails_ends_what_was_left() -> None:
    made, store, _ = planner(pins=4, sync=True)
    made.arrive(Request("a", 20), Policy())
    made.event(Found(1, 2, 2), 0.0)
    made.match("a", 0, 0.0)
    made.allocated("a", [1, 2, 3, 4, 5], 16)
    [load] = made.take(0.0).loads
    made.arrive(Request("b", 5 * PAGE + 2), Policy(load=False))  # it has the same blocks
    made.allocated("b", list(range(1, 12)), 0)
    made.step("b", None, 16, 3 * PAGE + 2, 0.0)
    made.finished("b", list(range(1, 12)), 5 * PAGE + 2, well=True, now=0.0)
    assert made.saves_left == 2
    made.report(WorkerReport(loads=(LoadDone(load.job, "a", False, (3,)),)), 0.0)
    assert made.saves_left == 1, "what is under way is dropped at its end"
    made.take(0.1)
    assert ("commit", 1) not in store.calls


def test_no_more_requests_leave_something_behind_than_their_limit() -> None:
    made, _, _ = planner(pins=2)
    for number in range(LEAVERS_MAX + 44):
        made.arrive(Request(f"r{number}", PAGE + 2), Policy(load=False))
        made.step(f"r{number}", [1 + 3 * number + at for at in range(3)], 0, PAGE + 2, 0.0)
        made.finished(f"r{number}", None, PAGE + 2, well=True, now=0.0)
    assert made.held()["leavers"] == LEAVERS_MAX
    assert made.counters()["pages_left_behind"] == 44
    assert made.take_lost() == {"too many requests": 44}
    made.take(31.0)
    assert made.held()["leavers"] == 1, "nobody waits for ever, but for the one being saved"


def test_a_reset_and_another_request_of_the_name_end_what_was_left() -> None:
    made, _, pool = ended_over_the_cap()
    made.reset(0.0)
    assert not pool.pinned
    assert not made.held()["leavers"]
    made, _, _ = ended_over_the_cap()
    made.arrive(Request("a", 4), Policy())
    assert not made.held()["leavers"]
    made, _, _ = ended_over_the_cap()
    made.event(Room(1, 0, (), "in progress"), 0.0)
    made.take(31.0)
    assert made.held()["leavers"], "while its save is under way"


def test_an_aborted_request_saves_nothing_more() -> None:
    made, store, _ = planner()
    request = Request("a", 9)
    made.arrive(request, Policy(load=False))
    made.step("a", [1, 2], 0, 7, 0.0)
    made.finished("a", [1, 2, 3], 8, well=False, now=0.0)
    assert not store.calls


def test_a_reset_unpins_at_once_and_publishes_nothing_of_before() -> None:
    made, store, pool = planner()
    made.arrive(Request("a", 8), Policy(load=False))
    made.step("a", [1, 2], 0, 8, 0.0)
    made.event(Room(1, 0, (0,)), 0.0)
    (save,) = made.take(0.0).saves
    made.reset(0.0)
    assert not pool.pinned
    made.report(WorkerReport(saves=(SaveDone(save.job, True),)), 0.0)
    assert ("abort", 1) in store.calls
    assert ("commit", 1) not in store.calls


def test_a_load_of_a_lost_server_that_no_worker_has_seen_fails() -> None:
    made, _, _ = planner()
    made.arrive(Request("a", 20), Policy())
    made.event(Found(1, 2, 2), 0.0)
    made.match("a", 0, 0.0)
    made.allocated("a", [1, 2, 3, 4], 16)
    made.lost_store(0.0)
    (job,) = made.take(0.0).loads
    assert {page.slot for page in job.pages} == {LOST_SLOT}


def test_a_request_that_may_not_store_or_load_does_neither() -> None:
    made, store, _ = planner()
    made.arrive(Request("a", 20), Policy(load=False, store=False))
    assert made.match("a", 0, 0.0) == Answer(0)
    made.step("a", [1, 2, 3, 4, 5], 0, 20, 0.0)
    assert not store.calls


def test_a_pin_follows_what_was_published() -> None:
    made, store, _ = planner()
    made.arrive(Request("a", 8), Policy(load=False, pin_ttl_s=60.0))
    made.step("a", [1, 2], 0, 8, 0.0)
    made.event(Room(1, 0, (0,)), 0.0)
    (save,) = made.take(0.0).saves
    made.report(WorkerReport(saves=(SaveDone(save.job, True),)), 0.0)
    made.event(Committed(1, 1), 0.0)
    assert store.calls[-1] == ("pin", 1, 60.0)


def test_hints_follow_what_was_published_and_what_was_found() -> None:
    hints = Hints(priority=1, conversation="chat")
    made, store, _ = planner()
    made.arrive(Request("a", 8), Policy(load=False, hints=hints))
    made.step("a", [1, 2], 0, 8, 0.0)
    saved(made, 1, 0, 1)
    assert store.calls[-1] == ("hint", 1, hints)
    made.arrive(Request("b", 20), Policy(hints=hints))
    made.event(Found(1, 2, 2), 0.0)
    made.match("b", 0, 0.0)
    made.allocated("b", [1, 2, 3, 4, 5], 0)
    made.finished("b", None, 20, well=False, now=0.0)
    assert ("hint", 2, hints) in store.calls


def test_a_session_end_unpins_and_ends_the_conversation() -> None:
    made, store, _ = planner()
    policy = Policy(session="chat", ends_session=True, hints=Hints(done=True))
    made.arrive(Request("a", 20), policy)
    made.match("a", 0, 0.0)
    made.event(Found(1, 2, 2), 0.0)
    made.allocated("a", [1, 2, 3, 4, 5], 0)
    made.finished("a", None, 20, well=False, now=0.0)
    assert store.calls[-3:] == [("pin", 2, 0.0), ("end", "chat"), ("hint", 2, Hints(done=True))]


def saved(made: Planner, job: int, start: int, pages: int) -> None:
    """Room, copies and commit of a save."""
    made.event(Room(job, start, tuple(range(pages))), 0.0)
    (save,) = made.take(0.0).saves
    made.report(WorkerReport(saves=(SaveDone(save.job, True),)), 0.0)
    made.event(Committed(job, pages), 0.0)


def test_pages_that_were_taken_back_are_saved_anew() -> None:
    """A stream that was shortened goes on with other tokens; so does a failed load's request."""
    made, store, _ = planner()
    made.arrive(Request("a", 16), Policy(load=False))
    made.step("a", [1, 2, 3, 4], 0, 16, 0.0)
    saved(made, 1, 0, 2)
    made.step("a", [1, 2, 3, 4], 12, 4, 0.0)
    assert store.calls[-1] == ("reserve", 2, 2)


def test_an_evicted_parent_is_saved_from_the_table_that_still_has_it() -> None:
    made, _, pool = planner()
    request = Request("a", 8)
    made.arrive(request, Policy(load=False))
    made.step("a", [1, 2], 0, 8, 0.0)
    saved(made, 1, 0, 1)
    request.length = 16
    made.step("a", [1, 2, 3, 4], 8, 8, 0.0)
    made.event(Room(2, 0, (0, 1)), 0.0)
    (save,) = made.take(0.0).saves
    assert [page.blocks for page in save.pages] == [(1, 2), (3, 4)]
    assert sorted(pool.pinned) == [1, 2, 3, 4]


def test_an_evicted_parent_of_a_request_that_lost_its_blocks_ends_the_save() -> None:
    made, store, pool = planner()
    request = Request("a", 8)
    made.arrive(request, Policy(load=False))
    made.step("a", [1, 2], 0, 8, 0.0)
    saved(made, 1, 0, 1)
    request.length = 16
    made.step("a", [1, 2, 3, 4], 8, 8, 0.0)
    made.preempted("a")
    made.allocated("a", [5, 6, 7, 8], 0)
    made.event(Room(2, 0, (0, 1)), 0.0)
    assert ("abort", 2) in store.calls
    assert not made.take(0.0).saves
    assert not pool.pinned


def test_a_page_is_published_when_all_ranks_have_written_it_and_never_if_one_failed() -> None:
    for ok in (True, False):
        made, store, pool = planner(ranks=2)
        made.arrive(Request("a", 8), Policy(load=False))
        made.step("a", [1, 2], 0, 8, 0.0)
        made.event(Room(1, 0, (0,)), 0.0)
        made.take(0.0)
        made.report(WorkerReport(saves=(SaveDone(1, ok),)), 0.0)
        assert pool.pinned == [1, 2]
        assert store.calls[-1][0] == "reserve"
        made.report(WorkerReport(saves=(SaveDone(1, True),)), 0.0)
        assert store.calls[-1] == ("commit" if ok else "abort", 1)
        assert not pool.pinned


def test_a_reset_while_room_is_made_gives_the_room_back() -> None:
    made, store, _ = planner()
    made.arrive(Request("a", 8), Policy(load=False))
    made.step("a", [1, 2], 0, 8, 0.0)
    made.reset(0.0)
    made.event(Room(1, 0, (0,)), 0.0)
    assert store.calls[-1] == ("abort", 1)
    assert not made.held()["saves"]


def test_a_preemption_in_the_step_of_a_sync_load_keeps_the_lease() -> None:
    made, store, _ = planner(sync=True)
    made.arrive(Request("a", 20), Policy())
    made.event(Found(1, 2, 2), 0.0)
    made.match("a", 0, 0.0)
    made.allocated("a", [1, 2, 3, 4, 5], 16)
    (job,) = made.take(0.0).loads
    made.preempted("a")
    assert ("release", 1) not in store.calls
    made.report(WorkerReport(loads=(LoadDone(job.job, "a", True),)), 0.0)
    assert ("release", 1) in store.calls
    made.check()


def test_a_page_that_the_block_table_does_not_reach_is_saved_once_it_does() -> None:
    made, store, pool = planner()
    made.arrive(Request("a", 16), Policy(load=False))
    made.allocated("a", [5, 6, 7], 0)
    made.step("a", [5, 6, 7], 0, 16, 0.0)
    assert store.calls == [("reserve", 1, 1)], "the second page has one block of two"
    assert pool.pinned == [5, 6]
    saved(made, 1, 0, 1)
    made.step("a", [5, 6, 7, 8], 16, 1, 0.1)
    assert store.calls[-1] == ("reserve", 2, 2)


def test_a_second_allocation_while_it_loads_changes_nothing() -> None:
    made, store, _ = planner()
    made.arrive(Request("a", 20), Policy())
    made.event(Found(1, 2, 2), 0.0)
    assert made.match("a", 0, 0.0).is_async
    made.allocated("a", [5, 6, 7, 8, 9], 16)
    made.allocated("a", [5, 6, 7, 8, 9], 0)
    assert ("release", 1) not in store.calls, "the load reads under this lease"
    [job] = made.take(0.0).loads
    assert made.match("a", 0, 0.0).tokens == 0, "it still loads"
    made.report(WorkerReport(loads=(LoadDone(job.job, "a", ok=True),)), 0.1)
    assert store.calls[-1] == ("release", 1)


def test_a_load_is_over_when_all_ranks_have_answered_and_good_only_if_all_are() -> None:
    for second, reused in ((True, 16), (False, 0)):
        made, store, _ = planner(ranks=2)
        made.arrive(Request("a", 20), Policy())
        made.event(Found(1, 2, 2), 0.0)
        made.match("a", 0, 0.0)
        made.allocated("a", [5, 6, 7, 8, 9], 16)
        [job] = made.take(0.0).loads
        made.report(WorkerReport(loads=(LoadDone(job.job, "a", ok=True),)), 0.1)
        assert ("release", 1) not in store.calls, "the other rank still reads"
        assert made.is_loading
        made.report(WorkerReport(loads=(LoadDone(job.job, "a", ok=second),)), 0.2)
        assert ("release", 1) in store.calls
        assert not made.is_loading
        assert made.finished("a", None, 0, well=False, now=0.3).tokens == reused


def test_a_pin_frees_a_block_soon_only_when_its_request_has_left_it() -> None:
    for leave in ("preempted", "finished"):
        made, _, pool = planner()
        made.arrive(Request("a", 16), Policy(load=False))
        made.allocated("a", [5, 6, 7, 8], 0)
        made.step("a", [5, 6, 7, 8], 0, 16, 0.0)
        assert pool.pinned
        assert not made.frees_soon, "the request has them too"
        if leave == "preempted":
            made.preempted("a")
        else:
            made.finished("a", None, 16, well=True, now=0.1)
        assert made.frees_soon


def test_pages_that_a_disk_did_not_bring_in_time_are_told_from_a_miss() -> None:
    for found, reason in (
        (Found(1, 2, 0, late=True), "the disk took too long"),
        (Found(1, 0, 0), "miss"),
    ):
        made, _, _ = planner()
        made.arrive(Request("a", 20), Policy())
        made.event(found, 0.0)
        assert made.match("a", 0, 0.0).tokens == 0
        assert made.finished("a", None, 0, well=False, now=0.1).reason == reason
