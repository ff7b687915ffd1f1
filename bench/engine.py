"""vLLM under the field's workloads: no cache, its own, LMCache's, ours, ours after a restart.

Workloads are in engine_workloads.py, arms in engine_arms.py. The engines of a group live beside
each other (24 GiB hold four of them); rounds go by turns, in an order drawn anew for each, and the
engines rest in between. What is stored first is not measured. Ratios are of the same prompt in two
arms of a group, medians with their 90 % interval:

engine_WORKLOAD_ARM_over_vllm    TTFT over that of vLLM's own prefix cache with room for all; budget
                                 <= 1.3 for long documents (tile, random) and chats
engine_unique_ARM_over_vllm      tokens a second of prompts that nobody has stored, all saved, over
                                 vLLM as it is without a connector; budget >= 0.97
engine_WORKLOAD_restart_hits     tokens reused after kill -9 of engine and server, over those that
                                 vLLM's own prefix cache reuses without any restart; budget >= 0.9

Ends with 1 if an answer of ours differs from that without a cache where the choice was clear.
Engines run in .venv-vllm, LMCache's in .venv-lmcache, or in the Pythons named; `make bench-engine`
makes both. Where there is no LMCache it says so and goes on.

    python bench/engine.py [--json] [--tiny] [--seed 0] [--workloads tile,random,...]
                           [--arms "none,vllm,embedded,lmcache;vllm,service,restart"]
                           [--write FOLDER] [--python PATH] [--lmcache-python PATH] [--model DIR]
                           [--load auto] [--dir DIR]
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from engine_arms import ARMS, Arm, Place, Restarted, why_no_lmcache
from engine_report import (
    Cell,
    Results,
    as_dicts,
    drawing,
    is_ours,
    page,
    ratios_of,
    rows_of,
    table,
    verdicts,
)
from engine_workloads import TINY, Size, Workload, make_workloads
from engines import MODEL, ROOT, SPIN_S, find_python
from paired import json_line, machine

from kvstore.engine_adapter.demo_vllm import long_prompt
from kvstore.engine_adapter.demo_vllm_engine import EngineError

if TYPE_CHECKING:
    from collections.abc import Iterator

TEXT_TOKENS = 100_000
REFERENCE = "none"
GROUPS = "none,vllm,embedded,lmcache;vllm,service,restart"


class Bench:
    """Arms, what they are asked, and what came back."""

    def __init__(self, place: Place, workloads: list[Workload], size: Size, seed: int) -> None:
        self.idle_s = 0.0 if size is TINY else SPIN_S
        self.place = place
        self.workloads = workloads
        self.size = size
        self.rng = random.Random(seed)
        self.skipped: dict[str, str] = {}
        self.found: Results = {}

    def measure(self, groups: list[list[str]]) -> None:
        """All workloads in all arms of these names that can be had, one group after the other."""
        for names in groups:
            self._measure(names)

    def _measure(self, names: list[str]) -> None:
        with contextlib.ExitStack() as ends:
            started = [arm for name in names if (arm := self._started(name, ends)) is not None]
            arms = [arm for arm in started if self._is_filled(arm)]
            for arm in arms:
                if isinstance(arm, Restarted):
                    arm.kill()
                    arm.start()
                    arm.wait_ready()
            self._say("all engines are ready")
            for workload in self.workloads:
                self._ask(workload, arms)

    def _started(self, name: str, ends: contextlib.ExitStack) -> Arm | None:
        """All begin at once: a start waits for the disk, too."""
        if name == "lmcache" and (why := why_no_lmcache(self.place.lmcache_python)):
            self._skip(name, why)
            return None
        if issubclass(ARMS[name], Restarted) and not any(each.fill for each in self.workloads):
            self._skip(name, "nothing is stored before the restart")
            return None
        arm = ends.enter_context(ARMS[name](self.place, name))
        try:
            arm.start()
        except (EngineError, OSError) as exc:
            self._failed(arm, exc)
            return None
        return arm

    def _is_filled(self, arm: Arm) -> bool:
        """Whether it is ready, and has all that it is to know; a peer may fail."""
        try:
            arm.wait_ready()
            self._fill(arm)
        except EngineError as exc:
            self._failed(arm, exc)
            return False
        return True

    def _failed(self, arm: Arm, exc: Exception) -> None:
        if arm.name != "lmcache":
            raise exc
        self._skip(arm.name, f"it did not run: {exc}")

    def _skip(self, name: str, why: str) -> None:
        self.skipped[name] = why
        self._say(f"SKIPPED: {name.upper()}: {why}")

    def _fill(self, arm: Arm) -> None:
        rounds = [each for workload in self.workloads for each in workload.fill if arm.fills]
        for each in rounds:
            arm.ask(each, self.size.answer)
        if rounds:
            arm.settle()
        self._say(f"{arm.name}: ready, {len(rounds)} rounds stored")

    def _ask(self, workload: Workload, arms: list[Arm]) -> None:
        # A prompt that is new to the store is new to it after a restart, too.
        asked = [arm for arm in arms if not (workload.together and isinstance(arm, Restarted))]
        cells = {arm.name: Cell(arm.name) for arm in asked}
        for number, prompts in enumerate(workload.ask):
            for arm in self.rng.sample(asked, len(asked)):
                begun_s = time.perf_counter()
                answers = arm.ask(prompts, self.size.answer, together=workload.together)
                seconds = time.perf_counter() - begun_s
                if workload.together:
                    arm.settle()
                time.sleep(self.idle_s)
                if number or not workload.together:  # that one warms up
                    cells[arm.name].add(answers, seconds)
        self.found.setdefault(workload.name, []).append(cells)
        self._say(f"{workload.title}: asked")

    def _say(self, text: str) -> None:
        print(f"[{time.perf_counter() - BEGUN_S:4.0f} s] {text}", file=sys.stderr, flush=True)


BEGUN_S = time.perf_counter()
LOAD = os.getloadavg()[0]


@contextlib.contextmanager
def places(options: argparse.Namespace) -> Iterator[Place]:
    """A folder for all that engines leave; their last words if they failed."""
    with (
        tempfile.TemporaryDirectory(prefix="engine-", dir=options.dir) as folder,
        open(Path(folder) / "engines.log", "w+", encoding="utf-8") as log,
    ):
        more = options.lmcache_python, options.load
        try:
            yield Place(Path(folder).resolve(), log, options.model, options.python, *more)
        except Exception:
            log.seek(0)
            sys.stderr.writelines(log.readlines()[-30:])
            raise


def parsed() -> argparse.Namespace:
    """The command's options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    parser.add_argument("--tiny", action="store_true", help="small and short: a test of the bench")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--arms", default=GROUPS, help="engines that live beside each other; groups"
    )
    parser.add_argument("--workloads", default="", help="by default all")
    parser.add_argument("--write", type=Path, help="a folder for engine.md and engine.svg")
    parser.add_argument("--python", default="", help="a Python that has vLLM")
    parser.add_argument("--lmcache-python", default="", help="one that has vLLM and LMCache")
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--load", default="auto", help="our connector's setting")
    parser.add_argument("--dir", type=Path, default=Path.cwd(), help="where the stores are made")
    options = parser.parse_args()
    options.python = find_python(options)
    own = ROOT / ".venv-lmcache" / "bin" / "python"
    named = options.lmcache_python or os.environ.get("BENCH_LMCACHE_PYTHON", "")
    options.lmcache_python = named or (str(own) if own.exists() else "")
    return options


def main() -> None:
    """Measure and print."""
    options = parsed()
    if not options.python:
        print("SKIPPED: NO VLLM here; set TEST_VLLM_PYTHON", file=sys.stderr)
        print(json_line({}, options.seed, skipped={"all": "no vLLM"}))
        return
    os.environ["PYTHONPATH"] = str(ROOT)
    size = TINY if options.tiny else Size()
    workloads = make_workloads(long_prompt(options.model, TEXT_TOKENS), size, options.seed)
    wanted = options.workloads.split(",") if options.workloads else [w.name for w in workloads]
    workloads = [each for each in workloads if each.name in wanted]
    with places(options) as place:
        bench = Bench(place, workloads, size, options.seed)
        try:
            bench.measure([each.split(",") for each in options.arms.split(";")])
        except (EngineError, KeyboardInterrupt) as exc:
            bench.skipped["the rest"] = f"broken off: {exc!r}"
            report(options, bench, bench.found)
            raise
    report(options, bench, bench.found)


def report(options: argparse.Namespace, bench: Bench, found: Results) -> None:
    """What was measured, in the form that is wanted."""
    rows = rows_of(found, REFERENCE)
    ratios = ratios_of(found)
    if options.write:
        where = {
            "machine": machine(),
            "date": datetime.date.today().isoformat(),
            "seed": options.seed,
            "load": f"{LOAD:.1f} before, {os.getloadavg()[1]:.1f} in the last five minutes",
        }
        options.write.mkdir(parents=True, exist_ok=True)
        text = page(rows, bench.workloads, ratios, bench.skipped, **where)
        (options.write / "engine.md").write_text(text, encoding="ascii")
        text = drawing(rows, bench.workloads, machine())
        (options.write / "engine.svg").write_text(text, encoding="ascii")
    if options.json:
        more = {"cells": as_dicts(rows), "skipped": bench.skipped}
        print(json_line(ratios, options.seed, **more))
    else:
        print(f"{machine()}; seed {options.seed}; {time.perf_counter() - BEGUN_S:.0f} s")
        print(table(rows, bench.workloads))
        for line in verdicts(ratios):
            print(line)
        for name, why in bench.skipped.items():
            print(f"SKIPPED: {name}: {why}")
    wrong = [row for row in rows if row.wrong and is_ours(row.arm)]
    if wrong:
        raise SystemExit(f"answers differ where the choice was clear: {wrong}")


if __name__ == "__main__":
    main()
