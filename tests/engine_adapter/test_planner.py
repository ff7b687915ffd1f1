"""The planner, one story at a time; test_planner_machine.py tells them at random."""

from __future__ import annotations

from planner_stories import (
    Request,
    planner,
    saved,
)

from kvstore.engine_adapter.load_choice import LoadMode
from kvstore.engine_adapter.load_planner import LOST_SLOT, NEXT_IN_LINE, Answer
from kvstore.engine_adapter.plan_records import Committed, Found, Policy, Room
from kvstore.engine_adapter.transfer_plan import (
    SKIP_BLOCK,
    LoadDone,
    PageLoad,
    SaveDone,
    WorkerReport,
)
from kvstore.hints import Hints


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


def test_an_answer_that_leases_cut_short_says_so_is_counted_and_soon_asked_for_again() -> None:
    """It was a miss like any other: nothing told that the store had the prompt."""
    made, store, _ = planner()
    for number, pages in enumerate((0, 1)):
        made.arrive(Request(f"r{number}", 20), Policy())
        made.event(Found(number + 1, pages, pages, reason="lease limit"), 0.0)
    assert made.match("r0", 0, 0.0).tokens == 0
    assert made.match("r1", 0, 0.0).tokens == 8, "what it may have"
    assert made.counters()["lookups_cut"] == 2
    store.calls.clear()
    made.take(0.2)
    assert not store.calls
    made.take(0.3)
    assert store.calls == [("release", 1), ("look_up", 3, 2), ("release", 2), ("look_up", 4, 2)]
    made.event(Found(3, 2, 2), 0.3)
    made.event(Found(4, 1, 1, reason="lease limit"), 0.3)
    assert made.match("r0", 0, 0.3).tokens == 16
    assert made.match("r1", 8, 0.3).tokens == 0
    assert made.counters()["lookups_cut"] == 3
    reasons = [made.finished(f"r{number}", None, 0, well=False, now=0.3) for number in (0, 1)]
    assert [each.reason for each in reasons] == ["always: settings", "lease limit"]


def test_a_cut_answer_is_no_reason_where_the_engine_has_all_itself() -> None:
    made, _, _ = planner()
    made.arrive(Request("a", 20), Policy())
    made.event(Found(1, 1, 1, reason="lease limit"), 0.0)
    assert made.match("a", 16, 0.0).tokens == 0
    assert made.finished("a", None, 0, well=False, now=0.0).reason == "the engine has it"


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


def test_pages_that_were_taken_back_are_saved_anew() -> None:
    """A stream that was shortened goes on with other tokens; so does a failed load's request."""
    made, store, _ = planner()
    made.arrive(Request("a", 16), Policy(load=False))
    made.step("a", [1, 2, 3, 4], 0, 16, 0.0)
    saved(made, 1, 0, 2)
    made.step("a", [1, 2, 3, 4], 12, 4, 0.0)
    assert store.calls[-1] == ("reserve", 2, 2)


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
