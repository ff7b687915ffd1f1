"""The parent: forks a child, lets it work, ends it, and holds the next one to what this one said.

Each cycle is one life of the store. It ends at a random moment, at a chosen step of a slot's life,
while it starts, or now and then in peace. What a life promised is checked by the next one; a last
life without a kill checks all.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from crash_child import Child, Plan
from crash_files import FAULTS, START_STEPS, WORK_STEPS, Event
from crash_world import all_chains
from ledger import Ledger

if TYPE_CHECKING:
    from pathlib import Path

    from media import Medium

HANG_S = 180.0
KILL_AFTER_S_MAX = 0.4  # of work, when the end is random
STEP_WAIT_S = 0.8  # of work, when a chosen step does not come
PEACE_SHARE = 0.04
BAD_KINDS = ("wrong", "lost", "unsound", "revived", "error")
LOG_TAIL_BYTES = 3000


@dataclass(frozen=True, slots=True)
class Odds:
    """How often what happens."""

    flip: float = 0.5
    fault: float = 0.5
    at_step: float = 0.45
    at_start: float = 0.1
    cut_catalog_each: int = 0  # cycles; 0 = never
    start_series_each: int = 0  # cycles; so often the store dies five times before any commit


@dataclass(slots=True)
class Tally:
    """What came of all cycles so far."""

    cycles: int = 0
    verified: int = 0  # pages read through the store and compared
    audited: int = 0  # records held against their slots while the store was closed
    bad: Counter[str] = field(default_factory=Counter)
    texts: list[str] = field(default_factory=list)
    ends: Counter[str] = field(default_factory=Counter)
    first_bad_cycle: int = 0

    @property
    def bad_total(self) -> int:
        return sum(self.bad.values())


class CrashLoop:
    """Cycles on one medium."""

    def __init__(
        self,
        medium: Medium,
        scratch: Path,
        seed: int,
        odds: Odds,
        mutant: str = "",
        *,
        encrypt: bool = False,
    ) -> None:
        self._medium = medium
        self._scratch = scratch
        self._seed = seed
        self._odds = odds
        self._mutant = mutant
        self._encrypt = encrypt
        self._chains = all_chains()
        self._ledger_path = scratch / f"{medium.name}.ledger"
        self._log_path = scratch / f"{medium.name}.log"
        self._start_series = 0
        self.ledger = Ledger()
        self.acknowledged = 0
        self.tally = Tally()

    def run(self, cycles: int, *, stop_when_bad: bool, progress: Progress) -> Tally:
        """All cycles and the last, peaceful one."""
        try:
            for cycle in range(1, cycles + 1):
                self._cycle(cycle, last=cycle == cycles)
                progress.show(self, cycle, cycles)
                if stop_when_bad and self.tally.bad_total:
                    break
        finally:
            self._medium.close()
        return self.tally

    # -- one cycle --------------------------------------------------------------------------------

    def _cycle(self, cycle: int, *, last: bool) -> None:
        rng = random.Random(f"{self._seed} {self._medium.name} {cycle}")
        if self._medium.start():
            self.acknowledged += self.ledger.acknowledged
            self.ledger = Ledger()
            self._ledger_path.unlink(missing_ok=True)
        ending = self._choose_ending(rng, cycle, last)
        fault = None
        if rng.random() < self._odds.fault:
            fault = Event(rng.choice(FAULTS), rng.randint(1, 12))
        each = self._odds.cut_catalog_each
        plan = Plan(
            seed=f"{self._seed} {self._medium.name} {cycle}",
            directory=self._medium.directory,
            disk_bytes=self._medium.disk_bytes,
            ledger_path=self._ledger_path,
            log_path=self._log_path,
            work_s=0.15 if ending.kind == "peace" else 30.0,
            flips=int(rng.random() < self._odds.flip and not last),
            encrypt=self._encrypt,
            cut_catalog=bool(each) and cycle % each == 0,
            mutant=self._mutant,
            freeze=self._medium.freeze,
        )
        life = Life(plan, ending, fault, rng)
        life.start(self._medium, self.ledger, self._chains)
        life.wait(self._medium)
        self._account(cycle, life)

    def _choose_ending(self, rng: random.Random, cycle: int, last: bool) -> Ending:
        each = self._odds.start_series_each
        if each and cycle % each == 0:
            self._start_series = 5
        if last:
            return Ending("peace")
        if self._start_series:
            self._start_series -= 1
            return Ending("start", step=Event("start-commit", 1))
        dice = rng.random()
        if dice < PEACE_SHARE:
            return Ending("peace")
        if dice < PEACE_SHARE + self._odds.at_start:
            step = Event(rng.choice(START_STEPS), rng.randint(1, 2))
            chosen = step if rng.random() < 0.5 else None
            return Ending("start", step=chosen, after_s=rng.uniform(0, 0.5))
        if dice < PEACE_SHARE + self._odds.at_start + self._odds.at_step:
            step = Event(rng.choice(WORK_STEPS), rng.randint(1, 8))
            return Ending("step", step=step, after_s=STEP_WAIT_S)
        return Ending("random", after_s=rng.uniform(0, KILL_AFTER_S_MAX))

    def _account(self, cycle: int, life: Life) -> None:
        tally = self.tally
        tally.cycles = cycle
        tally.verified += life.verified
        tally.audited += life.audited
        tally.ends[life.ended] += 1
        self.ledger.read(self._ledger_path)
        findings = [(item["kind"], item["text"]) for item in life.findings]
        findings += [("lost", f"{key}: dropped as damaged") for key in self.ledger.lost_in_run]
        self.ledger.lost_in_run.clear()
        if findings and not tally.first_bad_cycle:
            tally.first_bad_cycle = cycle
        for kind, text in findings:
            tally.bad[kind] += 1
            if text:
                tally.texts.append(f"cycle {cycle} ({life.ended}): {kind}: {text}")
        if findings and tally.first_bad_cycle == cycle and self._log_path.exists():
            log = self._log_path.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace")
            tally.texts += [f"    {line}" for line in log.splitlines()[1:]]

    @property
    def variant(self) -> str:
        """Name of the medium."""
        return self._medium.name

    @property
    def acked_pages(self) -> int:
        """Pages acknowledged as durable, over all file systems."""
        return self.acknowledged + self.ledger.acknowledged


@dataclass(frozen=True, slots=True)
class Ending:
    """How a life is to end: of itself at `step`, else `after_s` seconds from its start or from when
    it was ready."""

    kind: str  # "peace", "start", "step", "random"
    step: Event | None = None
    after_s: float = HANG_S


class Life:
    """One child process, from fork to wait."""

    def __init__(self, plan: Plan, ending: Ending, fault: Event | None, rng: random.Random) -> None:
        self._plan = plan
        self._ending = ending
        self._fault = fault
        self._rng = rng
        self._pid = 0
        self._pipe = -1
        self._received = b""
        self._due_s = 0.0
        self._cut = False
        self._over = False  # closed in peace
        self._ended = False  # of itself, whatever way
        self.findings: list[dict[str, Any]] = []
        self.verified = 0
        self.audited = 0
        self.ended = ending.kind

    def start(self, medium: Medium, ledger: Ledger, chains: list[Any]) -> None:
        """Fork. The child never returns."""
        self._pipe, write_end = os.pipe()
        self._pid = os.fork()
        if self._pid:
            os.close(write_end)
            self._due_s = time.monotonic() + HANG_S
            return
        status = 1
        try:
            os.close(self._pipe)
            os.setsid()  # so that what it starts can be ended with it
            files = medium.files(self._plan.seed, self._ending.step, self._fault)
            Child(self._plan, files, ledger, chains).run(write_end)
            status = 0
        finally:
            os._exit(status)

    def wait(self, medium: Medium) -> None:
        """Read reports until the child has ended, of itself or by our hand."""
        while True:
            left = self._due_s - time.monotonic()
            if left <= 0:
                break
            ready, _, _ = select.select([self._pipe], [], [], left)
            if ready and not self._read():
                self._ended = True
                break
        while select.select([self._pipe], [], [], 0)[0] and self._read():
            pass
        alive = not self._over and not self._ended
        if alive:
            medium.cut(self._rng)
            self._cut = True
        self._kill()
        while self._read():
            pass
        os.close(self._pipe)
        _, status = os.waitpid(self._pid, 0)
        self._judge(status)

    def _kill(self) -> None:
        try:
            os.killpg(self._pid, signal.SIGKILL)
        except ProcessLookupError:  # not yet a group of its own, or gone
            os.kill(self._pid, signal.SIGKILL)

    def _read(self) -> bool:
        chunk = os.read(self._pipe, 1 << 16)
        lines = (self._received + chunk).split(b"\n")
        self._received = lines.pop()
        for line in lines:
            self._take(json.loads(line))
        return bool(chunk)

    def _take(self, message: dict[str, Any]) -> None:
        event = message["event"]
        ending = self._ending
        if event == "opening" and ending.kind == "start":
            self._due_s = time.monotonic() + ending.after_s
        elif event == "ready":
            if ending.kind in ("random", "step"):
                self._due_s = time.monotonic() + ending.after_s
            self.verified = message["verified"]
        elif event == "audited":
            self.audited = message["records"]
        elif event == "frozen" and ending.step is not None:
            self._due_s = time.monotonic()
            self.ended = ending.step.name
        elif event == "end":
            self.verified = message["verified"]
            self._over = True
        elif event == "bad" and (not self._cut or message["kind"] == "wrong"):
            self.findings.append(message)  # without its disk a store may miss, and say so

    def _judge(self, status: int) -> None:
        """A child may end by our hand, at its step, or in peace; all else is a finding."""
        hung = self._cut and self._ending.after_s == HANG_S
        killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        if hung or not (self._cut or killed or self._over or self.findings):
            text = "it hung" if hung else f"the child ended with wait status {status}"
            self.findings.append({"kind": "error", "text": text})
        if self._ending.step is not None and killed and not self._cut:
            self.ended = self._ending.step.name


class Progress:
    """Lines for people on stderr, so that stdout has the summary alone."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._began_s = time.monotonic()
        self._shown_s = self._began_s

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began_s

    def show(self, loop: CrashLoop, cycle: int, cycles: int) -> None:
        """A line each 10 s, and each finding at once."""
        for text in loop.tally.texts:
            sys.stderr.write(f"{text}\n")
        loop.tally.texts.clear()
        if not self._quiet and time.monotonic() - self._shown_s >= 10:
            self._shown_s = time.monotonic()
            sys.stderr.write(
                f"  {loop.variant}: cycle {cycle} of {cycles}, "
                f"{loop.acked_pages} pages acknowledged, {loop.tally.verified} verified, "
                f"bad {dict(loop.tally.bad)}, {self.seconds:.0f} s\n"
            )
        sys.stderr.flush()
