"""The planner among a scheduler, workers and a store that do anything at any time, or are calm."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from scheduler_machine import BLOCKS_A_PAGE, PAGE, FakePool, Request, SchedulerMachine

EXAMPLES = int(os.environ.get("PLANNER_EXAMPLES", "60"))


class LruPool(FakePool):
    """Gives away what was given back longest ago, as vLLM's does."""

    def __init__(self) -> None:
        super().__init__()
        self.given_back: dict[int, int] = {}
        self.clock = 0

    def free(self) -> list[int]:
        return sorted(super().free(), key=lambda block: self.given_back.get(block, 0))

    def give(self, blocks: list[int]) -> None:
        super().give(blocks)
        self.note(blocks)

    def unpin(self, blocks: object) -> None:
        super().unpin(blocks)
        self.note(list(blocks))  # type: ignore[call-overload]

    def note(self, blocks: list[int]) -> None:
        self.clock += 1
        self.given_back |= dict.fromkeys(blocks, self.clock)


class CalmMachine(SchedulerMachine):
    """Nothing fails, is refused, evicted, reset or aborted; only two pages may be pinned."""

    pins_max = 2 * BLOCKS_A_PAGE
    abort = preempt = stream_more_input = server_lost = reset = page_leaves = None
    reservation_answered = None

    def __init__(self) -> None:
        super().__init__()
        self.pool = LruPool()
        self.planner._saving.pins.pool = self.pool
        # Pages of requests that ended, and what their blocks held.
        self.owed: dict[tuple[int, ...], list[tuple[int, object]]] = {}

    # No rules here, so that nobody chooses failures.

    def step(self, **choices: object) -> None:
        SchedulerMachine.step(self, **choices)  # type: ignore[arg-type]

    def everyone_answers(self, **choices: object) -> None:
        SchedulerMachine.everyone_answers(self, **choices)  # type: ignore[arg-type]

    def async_load_ends(self, pick: int, fail: bool) -> None:
        SchedulerMachine.async_load_ends(self, pick, fail=fail)

    def copy_ends(self, pick: int, fail: bool) -> None:
        SchedulerMachine.copy_ends(self, pick, fail=fail)

    @rule(
        chunk=st.integers(1, 24),
        drafts=st.integers(0, 3),
        accepted=st.integers(0, 2),
        sync=st.booleans(),
        lag=st.booleans(),
        wait_s=st.sampled_from([0.0, 0.001, 0.03]),
    )
    def calm_step(self, **choices: object) -> None:
        self.step(no_blocks=False, **choices)

    @rule(times=st.integers(1, 3), staged=st.booleans())
    def all_is_well(self, times: int, staged: bool) -> None:
        self.everyone_answers(times=times, fail=False, staged=staged)

    @precondition(lambda self: self.copying)
    @rule(pick=st.integers(0, 9))
    def a_copy_ends(self, pick: int) -> None:
        self.copy_ends(pick, fail=False)

    def leave(self, request: Request, *, well: bool) -> None:
        if well and request.store:
            for page in range(min(request.computed, request.length - 1) // PAGE):
                part = slice(page * BLOCKS_A_PAGE, (page + 1) * BLOCKS_A_PAGE)
                held = [(block, self.pool.told[block]) for block in request.blocks[part]]
                self.owed.setdefault(tuple(request.tokens[: (page + 1) * PAGE]), held)
        super().leave(request, well=well)

    def teardown(self) -> None:
        """Every full page of a request that ended well is stored, or its blocks were given away."""
        super().teardown()
        for name, held in self.owed.items():
            is_there = all(self.pool.told.get(block) is what for block, what in held)
            assert name in self.store.pages or not is_there, name


class TestScheduler(SchedulerMachine.TestCase):  # type: ignore[name-defined,misc]
    """Runs the machine."""

    settings = settings(
        max_examples=EXAMPLES,
        stateful_step_count=40,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )


class TestCalm(CalmMachine.TestCase):  # type: ignore[name-defined,misc]
    """Runs the calm one."""

    settings = settings(
        max_examples=EXAMPLES,
        stateful_step_count=30,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
