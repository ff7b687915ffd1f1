"""Request traces made from a seed: agent sessions of several shapes, scans, loops, and changes.

No public trace of agent sessions can be had here, so these stand in for one. An agent's session
asks again within seconds with all it asked before and some more, does so some dozens of times, and
then never comes back; hundreds run at once. So what was used often is what is about to be useless,
which policies that protect what was used often get wrong. `sessions` follows published counts, with
their tails (agent_sessions.py); shapes vary one thing each. Sizes are blocks of 512 tokens.

    python bench/workloads.py agents --seed 1 >trace.jsonl      a trace for kvstore simulate
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from agent_sessions import sessions

from kvstore.trace import Trace, TraceBuilder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BLOCK_TOKENS = 512
HOUR_MS = 3_600_000
Request = tuple[float, list[int]]  # when, in milliseconds, and the ids of its blocks


@dataclass(slots=True)
class Ids:
    """Numbers for blocks that nobody had yet."""

    next: int = 0

    def take(self, count: int) -> list[int]:
        self.next += count
        return list(range(self.next - count, self.next))


@dataclass(frozen=True, slots=True)
class Shape:
    """How the sessions of one kind of agent go."""

    sessions: int = 150
    hours: float = 2.0
    tools: int = 4  # kinds of agents; each has a system prompt of its own
    prompt_blocks: tuple[int, int] = (8, 24)
    calls: tuple[int, int] = (15, 90)  # of a session
    grow_blocks: float = 2.0  # a call, on average
    gap_s: float = 6.0  # a tool call, on average
    think_s: float = 150.0  # a human in between, on average
    think_part: float = 0.06  # of all calls
    context_blocks: int = 350  # then the session is summarised: it goes on from its system prompt
    side_part: float = 0.0  # of all calls: a sub-agent goes its own way from here
    side_calls: tuple[int, int] = (4, 20)
    fan_out: int = 1  # answers to a prompt that are tried at once


AGENTS = Shape()
SHAPES = {
    "agents": AGENTS,
    "private": Shape(tools=150),  # no two sessions have anything in common
    "subagents": Shape(sessions=60, side_part=0.06, calls=(15, 60)),
    "summaries": Shape(context_blocks=90, grow_blocks=4.0, sessions=90),
    "fan-out": Shape(sessions=70, fan_out=4, calls=(10, 50)),
    "patient": Shape(think_part=0.3, think_s=400.0, sessions=110, hours=3.0),
    # As published of coding agents: contexts grow to 200,000 tokens, nothing is shared.
    "coding": Shape(
        sessions=250,
        hours=1.5,
        tools=250,
        prompt_blocks=(24, 60),
        calls=(20, 80),
        grow_blocks=7.0,
        gap_s=12.0,
        think_s=240.0,
        think_part=0.08,
        context_blocks=390,
    ),
    "rush": Shape(sessions=220, hours=0.5, gap_s=3.0, think_part=0.02),
}


@dataclass(slots=True)
class Session:
    """One chain that grows, and what it began with."""

    shape: Shape
    system: list[int]
    calls_left: int
    path: list[int] = field(default_factory=list)

    def step(self, rng: random.Random, ids: Ids) -> list[list[int]]:
        """The next call: one request, or a few of which one is gone on with."""
        shape = self.shape
        self.calls_left -= 1
        if len(self.path) > shape.context_blocks:
            self.path = self.system + ids.take(rng.randint(4, 12))
        tried = []
        for _ in range(shape.fan_out):
            grown = 1 + int(rng.expovariate(1 / shape.grow_blocks))
            tried.append(self.path + ids.take(grown))
        self.path = tried[rng.randrange(len(tried))]
        return tried

    def gap_ms(self, rng: random.Random) -> float:
        thinks = rng.random() < self.shape.think_part
        mean_s = self.shape.think_s if thinks else self.shape.gap_s
        return 1000 * (0.5 + rng.expovariate(1 / mean_s))


def agents(shape: Shape, rng: random.Random, ids: Ids, start_ms: float = 0.0) -> Iterator[Request]:
    """Sessions of one shape, their starts spread over its hours."""
    systems = [ids.take(rng.randint(*shape.prompt_blocks)) for _ in range(shape.tools)]
    queue: list[tuple[float, int, Session]] = []
    number = 0

    def begin(at_ms: float, session: Session) -> None:
        nonlocal number
        number += 1
        heapq.heappush(queue, (at_ms, number, session))

    for _ in range(shape.sessions):
        system = rng.choice(systems)
        session = Session(shape, system, rng.randint(*shape.calls), list(system))
        begin(start_ms + rng.random() * shape.hours * HOUR_MS, session)
    while queue:
        at_ms, _, session = heapq.heappop(queue)
        for tried in session.step(rng, ids):
            yield at_ms, tried
        if rng.random() < shape.side_part:
            side = Session(shape, session.system, rng.randint(*shape.side_calls), session.path)
            begin(at_ms + side.gap_ms(rng), side)
        if session.calls_left > 0:
            begin(at_ms + session.gap_ms(rng), session)


def chats(
    rng: random.Random, ids: Ids, start_ms: float = 0.0, requests: int = 4000
) -> Iterator[Request]:
    """People: a shared system prompt, some come back after minutes, most say one thing."""
    system, now_ms = ids.take(3), start_ms
    open_chats: list[list[int]] = []
    for _ in range(requests):
        now_ms += rng.expovariate(1 / 400)
        if open_chats and rng.random() < 0.45:
            path = open_chats.pop(min(int(rng.expovariate(1 / 60)), len(open_chats) - 1))
        else:
            path = list(system)
        path = path + ids.take(1 + int(rng.expovariate(1 / 4)))
        yield now_ms, path
        if rng.random() < 0.7:
            open_chats.insert(0, path)
            del open_chats[400:]


def scan(rng: random.Random, ids: Ids) -> Iterator[Request]:
    """Chats, and through them documents that are read once each, many times their volume."""
    for at_ms, path in chats(rng, ids, requests=3000):
        yield at_ms, path
        if rng.random() < 0.3:
            yield at_ms, ids.take(rng.randint(20, 60))


def loop(rng: random.Random, ids: Ids) -> Iterator[Request]:
    """The same documents again and again in the same order: the worst case of LRU."""
    documents = [ids.take(rng.randint(5, 30)) for _ in range(150)]
    now_ms = 0.0
    for _ in range(20):
        for document in documents:
            now_ms += rng.expovariate(1 / 900)
            yield now_ms, document + ids.take(1)


def documents(rng: random.Random, ids: Ids) -> Iterator[Request]:
    """Questions about documents of which some are asked about far more often than others."""
    texts = [ids.take(rng.randint(5, 80)) for _ in range(400)]
    weights = [1 / (1 + rank) ** 0.9 for rank in range(len(texts))]
    now_ms = 0.0
    for _ in range(5000):
        now_ms += rng.expovariate(1 / 700)
        yield now_ms, rng.choices(texts, weights)[0] + ids.take(1)


def shift(rng: random.Random, ids: Ids) -> Iterator[Request]:
    """A loop over documents, and then agents: what is right for one is wrong for the other."""
    end_ms = 0.0
    for at_ms, path in loop(rng, ids):
        end_ms = at_ms
        yield at_ms, path
    yield from agents(Shape(sessions=100, hours=1.5), rng, ids, end_ms)


OTHERS: dict[str, Callable[[random.Random, Ids], Iterator[Request]]] = {
    "chats": chats,
    "scan": scan,
    "loop": loop,
    "documents": documents,
    "shift": shift,
    "sessions": sessions,
}
NAMES = (*SHAPES, *OTHERS)


def requests_of(name: str, seed: int) -> Iterator[Request]:
    """The requests of a workload, in order of time."""
    rng, ids = random.Random(f"{name} {seed}"), Ids()
    if name in SHAPES:
        return agents(SHAPES[name], rng, ids)
    return OTHERS[name](rng, ids)


def records(name: str, seed: int, requests: int = 0) -> Iterator[dict[str, object]]:
    """Lines of a trace file, all or the first few."""
    for number, (at_ms, path) in enumerate(requests_of(name, seed), 1):
        yield {
            "timestamp": round(at_ms, 3),
            "input_length": len(path) * BLOCK_TOKENS,
            "output_length": 0,
            "hash_ids": path,
        }
        if number == requests:
            return


def make_trace(name: str, seed: int = 1, requests: int = 0) -> Trace:
    """The same as a trace to replay."""
    builder = TraceBuilder(f"{name}, seed {seed}")
    for line in records(name, seed, requests):
        builder.add(line)
    return builder.done()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=NAMES)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--requests", type=int, default=0, help="0: all")
    options = parser.parse_args()
    for line in records(options.name, options.seed, options.requests):
        sys.stdout.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
