"""An engine that waits for the store: one short wait a step, or no step at all."""

from __future__ import annotations

import itertools
import queue
from typing import TYPE_CHECKING, Any

from kvstore.engine_adapter.vllm_idle import EMPTY_STEPS, IdleWait, find_input_queue

if TYPE_CHECKING:
    from collections.abc import Callable

AGAIN, FOUND = (None, False), (64, False)


class Core:
    """An engine core, as far as it can be seen: it asks, and steps when there is no answer."""

    def __init__(self, *, steps_alone: bool = True, visible: bool = True) -> None:
        if visible:
            self.input_queue: queue.Queue[str] = queue.Queue()
        self.idle = IdleWait(steps_alone=steps_alone)
        self.waits_s: list[float] = []
        self.steps = 0

    def ask_until_found(
        self, after: int, *, news_at: int = -1, on_wait: Callable[[int], None] = lambda _: None
    ) -> None:
        """The answer is there after so many waits."""

        def news(wait_s: float) -> bool:
            self.waits_s.append(wait_s)
            on_wait(len(self.waits_s))
            return len(self.waits_s) == news_at

        def ask() -> Any:
            return FOUND if len(self.waits_s) >= after else AGAIN

        for self.steps in itertools.count():
            assert self.idle.begin()
            assert not self.idle.begin(), "another request of this step does not wait"
            if self.idle.wait(news, ask, lambda: True, 100.0) == FOUND:
                return
            self.idle.stepped(0)


def test_an_engine_that_nobody_wants_takes_no_step_until_the_answer() -> None:
    core = Core()
    core.ask_until_found(50)
    assert core.steps == EMPTY_STEPS - 1
    assert max(core.waits_s) < 0.01, "somebody who comes is seen soon"


def test_a_request_that_comes_gets_its_step() -> None:
    core = Core()

    def on_wait(number: int) -> None:
        if number == 20:
            core.input_queue.put("request")
        assert core.input_queue.empty() or number == 20, "it was left waiting"

    step = core.idle.stepped

    def stepped(scheduled: int) -> None:
        if not core.input_queue.empty():
            core.input_queue.get()
            core.idle.arrived()
        step(scheduled)

    core.idle.stepped = stepped  # type: ignore[method-assign]
    core.ask_until_found(40, on_wait=on_wait)
    assert core.steps > EMPTY_STEPS, "and the next steps are not left out"


def test_news_of_the_store_are_followed_by_a_step() -> None:
    core = Core()
    core.ask_until_found(50, news_at=30)
    assert core.steps == EMPTY_STEPS


def test_where_nobody_sees_who_waits_steps_go_on() -> None:
    for core in (Core(visible=False), Core(steps_alone=False)):
        core.ask_until_found(50)
        assert core.steps == 49
        assert core.waits_s == [0.05] * 50, "less often after a long while"


def test_a_step_that_computes_is_not_waited_in() -> None:
    idle = IdleWait(steps_alone=True)
    assert idle.begin()
    idle.stepped(128)
    assert not idle.begin()
    idle.stepped(0)
    assert idle.begin()


def test_the_input_is_found_among_the_callers_or_is_not() -> None:
    class Caller:
        def __init__(self) -> None:
            self.input_queue: queue.Queue[str] = queue.Queue()

        def call(self) -> Any:
            return (lambda: find_input_queue())()

    caller = Caller()
    assert caller.call() is caller.input_queue
    assert find_input_queue() is False
