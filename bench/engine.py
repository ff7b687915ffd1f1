"""vLLM under the field's workloads: no cache, its own, LMCache's, ours, ours after a restart.

Workloads are in engine_workloads.py, arms in engine_arms.py. All engines live beside each other;
rounds go by turns, in an order drawn anew for each, and the engines rest in between. What is stored
first is not measured. Ratios are of the same prompt in two arms, medians with their 90 % interval:

engine_WORKLOAD_ARM_over_vllm    TTFT over that of vLLM's own prefix cache with room for all; budget
                                 <= 1.3 for long documents (tile, random) and chats
engine_unique_ARM_over_none      tokens a second of prompts that nobody has stored, all saved, over
                                 an engine without connector; budget >= 0.97
engine_WORKLOAD_restart_hits     tokens reused after kill -9 of engine and server, over those that
                                 vLLM's own prefix cache reuses without any restart; budget >= 0.9

Ends with 1 if an answer of ours differs from that without a cache where the choice was clear.
Engines run in .venv-vllm, LMCache's in .venv-lmcache, or in the Pythons named; `make bench-engine`
makes both. Where there is no LMCache it says so and goes on.

    python bench/engine.py [--json] [--tiny] [--seed 0] [--arms none,vllm,...] [--workloads ...]
                           [--svg FILE] [--python PATH] [--lmcache-python PATH] [--model DIR]
                           [--load auto] [--dir DIR]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from engine_arms import ARMS, IDLE_S, Arm, Place, Restarted, why_no_lmcache
from engine_report import (
    Cell,
    Results,
    as_dicts,
    drawing,
    is_ours,
    ratios_of,
    rows_of,
    table,
    verdicts,
)
from engine_workloads import TINY, Size, Workload, make_workloads
from engines import MODEL, ROOT, find_python
from paired import json_line, machine

from kvstore.engine_adapter.demo_vllm import long_prompt
from kvstore.engine_adapter.demo_vllm_engine import EngineError

if TYPE_CHECKING:
    from collections.abc import Iterator

TEXT_TOKENS = 100_000
REFERENCE = "none"


class Bench:
    """Arms, what they are asked, and what came back."""

    def __init__(self, place: Place, workloads: list[Workload], size: Size, seed: int) -> None:
        self.place = place
        self.workloads = workloads
        self.size = size
        self.rng = random.Random(seed)
        self.skipped: dict[str, str] = {}
        self.found: Results = {}

    def measure(self, names: list[str]) -> Results:
        """All workloads in all arms of these names that can be had."""
        with contextlib.ExitStack() as ends:
            # What is killed is filled first, so that its first engine never stands beside others.
            order = sorted(names, key=lambda name: not issubclass(ARMS[name], Restarted))
            made = {name: arm for name in order if (arm := self._ready(name, ends)) is not None}
            arms = [made[name] for name in names if name in made]
            for arm in arms:
                if isinstance(arm, Restarted):
                    arm.start()
            self._say("all engines are ready")
            for workload in self.workloads:
                self._ask(workload, arms)
        return self.found

    def _ready(self, name: str, ends: contextlib.ExitStack) -> Arm | None:
        """An arm with all that it is to know, or None and why."""
        if name == "lmcache" and (why := why_no_lmcache(self.place.lmcache_python)):
            return self._skip(name, why)
        arm = ends.enter_context(ARMS[name](self.place, name))
        try:
            arm.start()
            self._fill(arm)
        except EngineError as exc:
            if name != "lmcache":
                raise
            return self._skip(name, f"its engine did not run: {exc}")
        if isinstance(arm, Restarted):
            arm.kill()
        return arm

    def _skip(self, name: str, why: str) -> None:
        self.skipped[name] = why
        self._say(f"SKIPPED: {name.upper()}: {why}")

    def _fill(self, arm: Arm) -> None:
        if arm.fills:
            for workload in self.workloads:
                for each in workload.fill:
                    arm.ask(each, self.size.answer)
            arm.settle()
        self._say(f"{arm.name}: filled" if arm.fills else f"{arm.name}: started")

    def _ask(self, workload: Workload, arms: list[Arm]) -> None:
        # A prompt that is new to the store is new to it after a restart, too.
        asked = [arm for arm in arms if not (workload.together and isinstance(arm, Restarted))]
        cells = {arm.name: Cell() for arm in asked}
        for number, prompts in enumerate(workload.ask):
            for arm in self.rng.sample(asked, len(asked)):
                begun_s = time.perf_counter()
                answers = arm.ask(prompts, self.size.answer, together=workload.together)
                seconds = time.perf_counter() - begun_s
                if workload.together:
                    arm.settle()
                time.sleep(IDLE_S)
                if number or not workload.together:  # that one warms up
                    cells[arm.name].add(answers, seconds)
        self.found[workload.name] = cells
        self._say(f"{workload.title}: asked")

    def _say(self, text: str) -> None:
        print(f"[{time.perf_counter() - BEGUN_S:4.0f} s] {text}", file=sys.stderr, flush=True)


BEGUN_S = time.perf_counter()


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
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--workloads", default="", help="by default all")
    parser.add_argument("--svg", type=Path, help="also draw it")
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
        found = bench.measure(options.arms.split(","))
    report(options, bench, found)


def report(options: argparse.Namespace, bench: Bench, found: Results) -> None:
    """What was measured, in the form that is wanted."""
    rows = rows_of(found, REFERENCE)
    if options.svg:
        options.svg.write_text(drawing(rows, bench.workloads, machine()), encoding="ascii")
    if options.json:
        more = {"cells": as_dicts(rows), "skipped": bench.skipped}
        print(json_line(ratios_of(found), options.seed, **more))
    else:
        print(f"{machine()}; seed {options.seed}; {time.perf_counter() - BEGUN_S:.0f} s")
        print(table(rows, bench.workloads))
        for line in verdicts(ratios_of(found)):
            print(line)
        for name, why in bench.skipped.items():
            print(f"SKIPPED: {name}: {why}")
    wrong = [row for row in rows if row.wrong and is_ours(row.arm)]
    if wrong:
        raise SystemExit(f"answers differ where the choice was clear: {wrong}")


if __name__ == "__main__":
    main()
