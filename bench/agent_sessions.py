"""Sessions of coding agents after published counts: their tails are what makes them hard to cache.

Long ones beside many that end after a few steps, pauses of seconds beside some of hours, contexts
that grow by what tools say until they are summarised, bursts of sub-agents that share a prompt, and
nobody who says that a session is over. Must not be here: shapes of other workloads (workloads.py).
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator

    from workloads import Ids, Request

# TraceLab (Zhu et al., arXiv 2606.30560: 4,265 sessions, 357,161 steps of Claude Code and Codex):
# steps of a session p50 16, p90 150, p99 1,100; tokens appended a step p50 800, p90 4,500, p99
# 20,000; some 9 steps from one word of a human to the next. kv-cache-tester (WEKA, 642 sessions of
# Claude Code with sub-agents): 11,000 to 15,000 tokens of tools and system prompt that sessions
# share; a first prompt of 20,160 tokens (p50), of more than 71,168 in a quarter of sessions; a step
# 7 s after the last (p50) and more than 4 minutes (mean); sub-agents with a prompt of their own,
# several at once. Not published, and chosen here: how often those are sent, how many sessions are
# open at once, that a summary of 2,000 to 15,000 tokens follows a full context.
BLOCK_TOKENS = 512
SESSIONS = 160
START_HOURS, END_HOURS = 6.0, 8.0  # who is still there at the end is not heard of any more
A_USER_STARTS = 3  # sessions within minutes, at most
SYSTEM_TOKENS = (11_000, 15_000)
VERSIONS = 3  # of the agent, each with tools and a system prompt of its own
CONTEXT_TOKENS = (155_000, 600_000)  # then the session goes on from a summary
LONG_CONTEXT_PART = 0.25
HUMAN_PART = 1 / 9  # of all steps
SIDE_PART = 0.01  # of all steps: sub-agents are sent
SIDE_MAX = 4


@dataclass(frozen=True, slots=True)
class Spread:
    """A lognormal distribution by its median."""

    median: float
    sigma: float
    most: float

    def draw(self, rng: random.Random) -> float:
        return min(self.most, rng.lognormvariate(math.log(self.median), self.sigma))


STEPS = Spread(16, 1.75, 2000)
FIRST_TOKENS = Spread(6000, 2.2, 400_000)
APPENDED_TOKENS = Spread(800, 1.35, 60_000)
TOOL_S = Spread(6, 1.1, 1800)
HUMAN_S = Spread(180, 2.2, 24 * 3600)
SIDE_STEPS = Spread(8, 1.0, 60)
SIDE_WAIT_S = Spread(90, 1.0, 1800)  # until the sub-agents are done


@dataclass(slots=True)
class Session:
    """One chain that grows by whole blocks, and what it began with."""

    system: list[int]
    steps_left: int
    context_tokens: int
    is_side: bool = False
    path: list[int] = field(default_factory=list)
    rest: float = 0.0  # tokens that fill no block yet

    def append(self, tokens: float, ids: Ids) -> None:
        whole, self.rest = divmod(self.rest + tokens, BLOCK_TOKENS)
        self.path = self.path + ids.take(int(whole))

    def begin(self, tokens: float, ids: Ids) -> None:
        """From the system prompt on, with a task or a summary."""
        self.path, self.rest = list(self.system), 0.0
        self.append(tokens, ids)

    def step(self, rng: random.Random, ids: Ids) -> list[int]:
        """What the next call asks for."""
        self.steps_left -= 1
        if len(self.path) * BLOCK_TOKENS > self.context_tokens:
            self.begin(rng.uniform(2000, 15_000), ids)
        asked = self.path
        self.append(APPENDED_TOKENS.draw(rng), ids)
        return asked


def sessions(rng: random.Random, ids: Ids) -> Iterator[Request]:
    """Users who start one or some sessions, over hours; requests in order of time, in ms."""
    systems = [ids.take(round(rng.uniform(*SYSTEM_TOKENS) / BLOCK_TOKENS)) for _ in range(VERSIONS)]
    side_system = ids.take(SYSTEM_TOKENS[0] // BLOCK_TOKENS)
    queue: list[tuple[float, int, Session]] = []
    number = 0

    def begin(at_s: float, session: Session) -> None:
        nonlocal number
        number += 1
        heapq.heappush(queue, (at_s, number, session))

    while number < SESSIONS:
        at_s = rng.uniform(0, START_HOURS * 3600)
        system = rng.choice(systems)
        for _ in range(rng.randint(1, A_USER_STARTS)):
            limit = CONTEXT_TOKENS[rng.random() < LONG_CONTEXT_PART]
            made = Session(system, math.ceil(STEPS.draw(rng)), limit)
            made.begin(FIRST_TOKENS.draw(rng), ids)
            begin(at_s + rng.expovariate(1 / 120), made)
    while queue and queue[0][0] < END_HOURS * 3600:
        at_s, _, session = heapq.heappop(queue)
        yield 1000 * at_s, session.step(rng, ids)
        wait_s = TOOL_S.draw(rng)
        if not session.is_side and rng.random() < SIDE_PART:
            wait_s += SIDE_WAIT_S.draw(rng)
            for _ in range(rng.randint(1, SIDE_MAX)):
                side = Session(
                    side_system, math.ceil(SIDE_STEPS.draw(rng)), CONTEXT_TOKENS[0], is_side=True
                )
                side.begin(rng.uniform(200, 3000), ids)
                begin(at_s + rng.expovariate(1.0), side)
        elif not session.is_side and rng.random() < HUMAN_PART:
            wait_s = HUMAN_S.draw(rng)
        if session.steps_left > 0:
            begin(at_s + wait_s, session)
