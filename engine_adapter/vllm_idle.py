"""How an engine waits for the store while it has nothing to compute: briefly, or without a step.

vLLM asks a connector again in each step, and every step has each worker spin for a second, though
it computes nothing. So an engine that can be seen to have nothing else to do takes none until there
is news. Must not be here: what is waited for, or anything of vLLM but a look at its callers.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

WAIT_S = 0.005
# Where nobody sees who waits for the engine, what is slow is looked at less often, up to so long.
WAIT_S_MAX, WAIT_SHARE = 0.05, 0.1
NO_STEP_S_MAX = 10.0
EMPTY_STEPS = 3  # in a row, before one is left out: results of earlier ones may be under way


class IdleWait:
    """Used by one scheduler, in its thread."""

    def __init__(self, *, steps_alone: bool) -> None:
        """`steps_alone`: no other engine waits for the steps of this one."""
        self._steps_alone = steps_alone
        self._empty_steps = 1  # in a row
        self._has_waited = False
        self._input: Any = None  # of the engine core; False where it can't be seen

    def stepped(self, scheduled: int) -> None:
        """A step ended with so many tokens."""
        self._empty_steps = 0 if scheduled else self._empty_steps + 1
        self._has_waited = False

    def arrived(self) -> None:
        """A request was added, which the engine has to ask about."""
        self._empty_steps = min(self._empty_steps, 1)

    def begin(self) -> bool:
        """Whether to wait now: once a step, however many requests wait, and only in idle ones."""
        may_wait = bool(self._empty_steps) and not self._has_waited
        self._has_waited = self._has_waited or may_wait
        return may_wait

    def wait(
        self,
        news: Callable[[float], bool],
        ask: Callable[[], tuple[int | None, bool]],
        is_all: Callable[[], bool],
        waited_s: float,
    ) -> tuple[int | None, bool]:
        """What `ask` answers in the end; None if the engine had better take a step.

        `news(s)`: wait for the store so long; `is_all`: nothing else needs steps; `waited_s`: how
        long this request has waited already.
        """
        if self._input is None:
            self._input = find_input_queue() if self._steps_alone else False
        sees = self._input is not False
        wait_s = WAIT_S if sees else max(WAIT_S, min(WAIT_SHARE * waited_s, WAIT_S_MAX))
        until = time.monotonic() + NO_STEP_S_MAX
        while True:
            has_news = news(wait_s)
            answer = ask()
            if answer[0] is not None or has_news or not sees or self._empty_steps < EMPTY_STEPS:
                return answer
            if not self._input.empty() or not is_all() or time.monotonic() > until:
                return answer


def find_input_queue() -> Any:
    """Where the engine core that calls us takes its requests from, only to be looked at.

    Nothing that vLLM gives a connector says whether somebody waits for the engine. False if no
    caller has such a queue, as where the engine runs in the process of its user.
    """
    frame = sys._getframe(1)
    while frame is not None:
        found = getattr(frame.f_locals.get("self"), "input_queue", None)
        if callable(getattr(found, "empty", None)):
            return found
        frame = frame.f_back  # type: ignore[assignment]
    return False
