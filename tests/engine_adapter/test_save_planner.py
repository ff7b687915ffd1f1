"""What the planner saves when there is little room: pins, staging, a store that refuses."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from planner_stories import (
    PAGE,
    Pool,
    Request,
    Store,
    blocks_of_next_save,
    ended_over_the_cap,
    planner,
    saved,
)

from kvstore.engine_adapter.plan_records import Committed, Found, Policy, Room
from kvstore.engine_adapter.save_losses import why_lost
from kvstore.engine_adapter.save_planner import LEAVERS_MAX
from kvstore.engine_adapter.transfer_plan import (
    LoadDone,
    SaveDone,
    WorkerReport,
)

if TYPE_CHECKING:
    from kvstore.engine_adapter.planner import Planner


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


def others_write(made: Planner, store: Store, now: float, until_s: float) -> float:
    """Every reservation is answered with "in progress" for so long."""
    while now < until_s and any(made.held().values()):
        if store.calls[-1][0] == "reserve":
            made.event(Room(store.calls[-1][1], 0, (), "in progress"), now)  # type: ignore[arg-type]
            store.calls.append(("answered",))
        now += 0.05
        made.take(now)
    return now


def one_page_ended() -> tuple[Planner, Store, Pool]:
    made, store, pool = planner()
    made.arrive(Request("a", PAGE + 2), Policy(load=False))
    made.step("a", [1, 2, 3], 0, PAGE + 2, 0.0)
    made.finished("a", [1, 2, 3], PAGE + 2, well=True, now=0.0)
    assert pool.pinned == [1, 2]
    return made, store, pool


def test_pages_that_another_writes_slowly_and_gives_up_are_saved_in_the_end() -> None:
    """They were given up after 20 tries, about a second, and counted nowhere: less than one step
    of an engine on a CPU."""
    made, store, pool = one_page_ended()
    now = others_write(made, store, 0.0, 1.9)
    assert pool.pinned == [1, 2], "for a while"
    now = others_write(made, store, now, 20.0)
    assert not pool.pinned, "others have a better use for the pins"
    assert made.needs_steps
    asked = [call for call in store.calls if call[0] == "reserve"]
    assert 10 < len(asked) < 30, "more rarely the longer it takes"
    while store.calls[-1][0] != "reserve":
        now += 0.05
        made.take(now)
    assert blocks_of_next_save(made, 1, 0, 1) == [1, 2]
    assert not any(made.held().values())
    assert not made.take_lost()


def test_pages_that_another_writes_for_ever_are_a_loss_with_its_reason() -> None:
    made, store, pool = one_page_ended()
    now = others_write(made, store, 0.0, 60.0)
    assert 30 < now < 33
    assert not pool.pinned
    assert made.take_lost() == {"in progress": 1}
    assert "another engine" in why_lost("in progress")


def test_blocks_that_were_reused_while_another_wrote_their_page_are_a_loss() -> None:
    made, store, pool = one_page_ended()
    now = others_write(made, store, 0.0, 5.0)
    del pool.told[2]
    while store.calls[-1][0] != "reserve":
        now += 0.05
        made.take(now)
    made.event(Room(1, 0, (0,)), now)
    made.take(now + 0.05)
    assert not pool.pinned
    assert store.calls[-1] == ("abort", 1)
    assert not any(made.held().values())
    assert made.take_lost() == {"blocks reused": 1}


def test_a_request_that_goes_on_saves_what_another_gave_up_from_its_own_table() -> None:
    made, store, pool = planner()
    request = Request("a", 2 * PAGE)
    made.arrive(request, Policy(load=False))
    made.step("a", [1, 2, 3, 4], 0, 2 * PAGE, 0.0)
    now = others_write(made, store, 0.0, 10.0)
    assert not pool.pinned
    request.length = 3 * PAGE
    made.step("a", [1, 2, 3, 4, 5, 6], 2 * PAGE, PAGE, now)
    while store.calls[-1][0] != "reserve":
        now += 0.05
        made.take(now)
    made.event(Room(1, 0, (0,), "limit"), now)  # for a part of it: the rest follows
    assert sorted(pool.pinned) == [1, 2]
    made.take(now)
    made.report(WorkerReport(saves=(SaveDone(1, True),)), now)
    made.event(Committed(1, 1), now)
    assert blocks_of_next_save(made, int(str(store.calls[-1][1])), 1, 1) == [3, 4]
    made.check()


def test_a_request_that_is_aborted_while_another_writes_its_pages_leaves_nothing() -> None:
    made, store, pool = planner()
    made.arrive(Request("a", PAGE + 2), Policy(load=False))
    made.step("a", [1, 2, 3], 0, PAGE + 2, 0.0)
    now = others_write(made, store, 0.0, 5.0)
    made.finished("a", [1, 2, 3], PAGE + 2, well=False, now=now)
    while store.calls[-1][0] != "reserve":
        now += 0.05
        made.take(now)
    made.event(Room(1, 0, (0,)), now)
    assert not pool.pinned
    assert not any(made.held().values())
    assert made.take_lost() == {"blocks reused": 1}


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
