"""What saving costs: one engine, its connector taken out and put away by turns, in short pairs.

Two engines on two cores differ by more than the connector costs: by where their memory lies, and
by what ran beside them. So it is one engine whose connector is switched between turns (by
inside_engine/), in the order on, off, off, on. A turn is rounds of prompts that nobody has stored,
one right after another. The first round is not timed: saving it is paid for in the time of the
others, as saving those would be in that of the next.

A turn's CPU seconds are those of all the engine's processes from quiet to quiet, and the server's
if the connector was on: what it does in the background belongs to that turn. vLLM's workers spin
for a second after a last step; that second (the median of turns without) is taken off all turns.
Whether all pages are on disk is asked after a turn, when its seconds have been taken.
"""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paired import PairedRatio, paired_ratio

from kvstore.connect import connect
from kvstore.engine_adapter.demo_vllm import server_pid
from kvstore.engine_adapter.demo_vllm_engine import EngineError, VllmEngine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    Prompts = Callable[[int], list[int]]  # a new one of so many tokens

INSIDE = Path(__file__).resolve().parent / "inside_engine"
BLOCK = 128
TICK_S = 1 / os.sysconf("SC_CLK_TCK")
LOOK_S, QUIET_S, QUIET_CORES = 0.05, 0.4, 0.08
QUIET_S_MAX, OPEN_S = 120.0, 10.0
IDLE_S = 5.0
SWITCHED = {
    "kv_connector": "SwitchedConnector",
    "kv_connector_module_path": "switched_connector",
    "kv_role": "kv_both",
}


@dataclass(frozen=True, slots=True)
class TurnSize:
    """What is asked in a turn."""

    rounds: int = 3  # the first one is not timed
    batch: int = 2
    tokens: int = 1000
    answer: int = 8

    @property
    def pages(self) -> int:
        """Whole ones; the last token of an answer has no KV."""
        return self.rounds * self.batch * ((self.tokens + self.answer - 1) // BLOCK)


TINY = TurnSize(rounds=2, batch=1, tokens=BLOCK + 10, answer=2)


@dataclass(frozen=True, slots=True)
class Turn:
    """What one took, and what came of it."""

    seconds: float  # of all rounds but the first
    engine_cpu_s: float  # until the last answer
    tail_cpu_s: float  # the engine's, from then until it was quiet
    server_cpu_s: float
    pages: int  # stored in it
    asked: Sequence[list[int]]  # in the rounds that are timed
    answers: Sequence[dict[str, Any]]


@dataclass(slots=True)
class Turns:
    """The same place in both is a pair."""

    on: list[Turn] = field(default_factory=list)
    off: list[Turn] = field(default_factory=list)

    def cpu_s(self) -> tuple[list[float], list[float]]:
        """With and without, less the second that workers spin after either."""
        spin_s = statistics.median(turn.tail_cpu_s for turn in self.off)
        on, off = (
            [turn.engine_cpu_s + turn.tail_cpu_s + turn.server_cpu_s - spin_s for turn in turns]
            for turns in (self.on, self.off)
        )
        return on, off

    def server_share(self) -> float:
        """What the server uses, over the engine's seconds without."""
        server = statistics.median(turn.server_cpu_s for turn in self.on)
        return server / statistics.median(self.cpu_s()[1])

    def ratios(self) -> tuple[PairedRatio, PairedRatio]:
        """Tokens a second and CPU seconds, with over without."""
        seconds = ([turn.seconds for turn in turns] for turns in (self.off, self.on))
        return paired_ratio(*seconds), paired_ratio(*self.cpu_s())


class Side:
    """An engine, and the store that it has, if any."""

    def __init__(self, engine: VllmEngine, store: Path | None) -> None:
        self.engine = engine
        self.store = store
        self._pages = 0

    def turn(self, prompts: Prompts, size: TurnSize, *, saves: bool) -> Turn:
        """From a quiet engine to a quiet engine; EngineError if not all was stored."""
        asked = [[prompts(size.tokens) for _ in range(size.batch)] for _ in range(size.rounds)]
        engine, server = self.processes()
        wait_quiet(engine + server)
        before, server_before = cpu_seconds(engine), cpu_seconds(server)
        self._run(asked[0], size)
        begun_s = time.perf_counter()
        answers = [answer for each in asked[1:] for answer in self._run(each, size)]
        seconds, answered = time.perf_counter() - begun_s, cpu_seconds(engine)
        while True:
            wait_quiet(engine + server)
            ended, server_ended = cpu_seconds(engine), cpu_seconds(server)
            if self._has_kept(size.pages if saves else 0):
                break
        return Turn(
            seconds,
            answered - before,
            ended - answered,
            server_ended - server_before if saves else 0.0,
            size.pages if saves else 0,
            [prompt for each in asked[1:] for prompt in each],
            answers,
        )

    def idle_cores(self) -> float:
        """What all of it uses while nobody asks."""
        processes = [pid for each in self.processes() for pid in each]
        wait_quiet(processes)
        before, begun_s = cpu_seconds(processes), time.monotonic()
        time.sleep(IDLE_S)
        return (cpu_seconds(processes) - before) / (time.monotonic() - begun_s)

    def _run(self, prompts: Sequence[list[int]], size: TurnSize) -> list[dict[str, Any]]:
        return self.engine.run([{"tokens": each, "max_tokens": size.answer} for each in prompts])

    def _has_kept(self, pages: int) -> bool:
        """Whether so many more pages are there and none is still to be written to disk."""
        if self.store is None:
            return True
        with connect(self.store, open_wait_s=OPEN_S) as client:
            found = client.stats().to_dict()
        if found["dirty_bytes"]:
            return False
        grown, self._pages = int(found["pages"]) - self._pages, int(found["pages"])
        if grown != pages:
            raise EngineError(f"{grown} pages were stored in a turn that has {pages}")
        return True

    def processes(self) -> tuple[list[int], list[int]]:
        """Of the engine, and its server, which one of the engine's started."""
        server = [server_pid(self.store / "kvstore.sock")] if self.store is not None else []
        return [pid for pid in family(self.engine.pid) if pid not in server], server


class Switched:
    """An engine whose connector can be put away; use it in a `with` statement."""

    def __init__(
        self, store: Path, model: Path, log: Any, extra_config: Mapping[str, Any], **engine: Any
    ) -> None:
        """Starts it; `engine`: as for VllmEngine."""
        extra = {"store": str(store), **extra_config}
        transfer = {**SWITCHED, "kv_connector_extra_config": extra}
        worker = "switched_connector.WorkerSwitch"
        with _importable(INSIDE):
            made = VllmEngine(
                model, log, kv_transfer_config=transfer, worker_extension_cls=worker, **engine
            )
        self.engine = made
        self._side = Side(made, store)

    def wait_ready(self) -> None:
        """Until the model is loaded."""
        self.engine.wait_ready()

    def measure(self, prompts: Prompts, size: TurnSize, pairs: int) -> Turns:
        """So many pairs, after one that is not counted."""

        def turn(on: bool) -> Turn:
            self.engine.call("switch_connector", on=on)
            return self._side.turn(prompts, size, saves=on)

        return by_turns(turn, pairs)

    def __enter__(self) -> Switched:
        return self

    def __exit__(self, *exc: object) -> None:
        with contextlib.suppress(OSError, IndexError):
            [server] = self._side.processes()[1]
            os.kill(server, signal.SIGTERM)  # it would stay for a minute
        self.engine.end()


def two_engines(ours: Side, plain: Side, prompts: Prompts, size: TurnSize, pairs: int) -> Turns:
    """The same with an engine for each: what the switch is checked with."""

    def turn(on: bool) -> Turn:
        wait_quiet([pid for side in (ours, plain) for pid in family(side.engine.pid)])
        return (ours if on else plain).turn(prompts, size, saves=on)

    return by_turns(turn, pairs)


def by_turns(turn: Callable[[bool], Turn], pairs: int) -> Turns:
    """On, off, off, on; the first pair warms up."""
    found = Turns()
    for number in range(pairs + 1):
        for on in (True, False) if number % 2 else (False, True):
            made = turn(on)
            if number:
                (found.on if on else found.off).append(made)
    return found


def wait_quiet(processes: Sequence[int]) -> None:
    """Until they have used next to nothing for a moment."""
    begun_s = since = time.monotonic()
    before = cpu_seconds(processes)
    while (now := time.monotonic()) - begun_s < QUIET_S_MAX:
        used = cpu_seconds(processes) - before
        if used > max(QUIET_CORES * (now - since), 2 * TICK_S):
            since, before = now, before + used
        elif now - since > QUIET_S:
            return
        time.sleep(LOOK_S)
    raise EngineError(f"the engine was not quiet within {QUIET_S_MAX:.0f} s")


def cpu_seconds(processes: Sequence[int]) -> float:
    """User and system time."""
    return sum(sum(map(int, _stat(pid)[11:13])) for pid in processes) * TICK_S


def family(root: int) -> list[int]:
    """A process and all below it."""
    parents: dict[int, int] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                parents[int(entry)] = int(_stat(int(entry))[1])
    found, before = {root}, 0
    while len(found) != before:
        before = len(found)
        found |= {pid for pid, parent in parents.items() if parent in found}
    return sorted(found)


def _stat(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()


@contextlib.contextmanager
def _importable(folder: Path) -> Iterator[None]:
    """For processes that are started meanwhile."""
    before = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [before, str(folder)]))
    try:
        yield
    finally:
        os.environ["PYTHONPATH"] = before
