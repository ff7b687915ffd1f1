"""vLLM under the field's workloads: no cache, its own, LMCache's, ours, ours after a restart.

Workloads are in engine_workloads.py, arms in engine_arms.py. The engines of a group live beside
each other (24 GiB hold four of them); rounds go by turns, in an order drawn anew for each, and the
engines rest in between. What is stored first is not measured. Ratios are of the same prompt in two
arms of a group, medians with their 90 % interval:

engine_WORKLOAD_ARM_over_vllm    TTFT over that of vLLM's own prefix cache with room for all; budget
                                 <= 1.3 for long documents (tile, random) and chats
engine_unique_ARM_over_vllm      tokens a second of prompts that nobody has stored, all saved, over
                                 vLLM as it is without a connector; budget >= 0.97. Ours is an
                                 engine of its own, its connector switched on and off by turns: see
                                 miss_pairs.py; a directory only, as a service does the same
engine_unique_embedded_saved     whole pages of those prompts that are in the store afterwards, over
                                 all there were; budget >= 0.99
engine_WORKLOAD_restart_hits     tokens reused after kill -9 of engine and server, over those that
                                 vLLM's own prefix cache reuses without any restart; budget >= 0.9

Ends with 1 if an answer of ours differs from that without a cache where the choice was clear.
Engines run in .venv-vllm, LMCache's in .venv-lmcache, or in the Pythons named; `make bench-engine`
makes both. Where there is no LMCache it says so and goes on.

What was measured is in the file of --results after each workload, also when the run is killed.
--join keeps what is there of other workloads and arms; --no-run only writes the page of it:

    make bench-engine BENCH_ARGS='--join --workloads chat,unique'
    make bench-engine BENCH_ARGS=--no-run

    python bench/engine.py [--json] [--tiny] [--seed 0] [--workloads tile,random,...]
                           [--arms "none,vllm,embedded,lmcache;vllm,service,restart"]
                           [--results FILE] [--join] [--no-run] [--write FOLDER] [--readme FILE]
                           [--model DIR] [--python PATH] [--lmcache-python PATH] [--load auto]
                           [--dir DIR]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from engine_arms import (
    ARMS,
    BLOCK_TOKENS,
    Arm,
    Embedded,
    Place,
    Restarted,
    answer_of,
    versions_of,
    why_no_lmcache,
)
from engine_report import (
    as_dicts,
    drawing,
    is_ours,
    not_unlimited,
    page,
    ratios_of,
    rows_of,
    short,
    table,
    verdicts,
)
from engine_results import OWN, REFERENCE, Cell, OtherRunError, Results, joined, read, write
from engine_workloads import TINY, Size, Texts, Workload, fills, make_workloads, reusable
from engines import MODEL, ROOT, SPIN_S, find_python
from miss_pairs import Switched, TurnSize
from paired import json_line, machine
from readme_block import put_into

from kvstore.engine_adapter.demo_vllm import long_prompt
from kvstore.engine_adapter.demo_vllm_engine import EngineError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from engine_workloads import Round

TEXT_TOKENS = 100_000
PICTURE = "![Median time to first token, by workload and cache](docs/engine.svg)"
REST = "the rest"
OURS = "embedded"
TINY_TURN = {"rounds": 2, "batch": 1}
GROUPS = "none,vllm,embedded,lmcache;vllm,service,restart"


class Bench:
    """Arms, what they are asked, and what came back."""

    def __init__(
        self,
        place: Place,
        workloads: list[Workload],
        size: Size,
        seed: int,
        text: Sequence[int],
    ) -> None:
        self.idle_s = 0.0 if size is TINY else SPIN_S
        self.place = place
        self.workloads = workloads
        self.size = size
        self.seed = seed
        self.text = text
        self.rng = random.Random(seed)
        self.skipped: dict[str, str] = {}
        self.found: Results = {}

    def measure(self, groups: list[list[str]]) -> Iterator[None]:
        """All workloads in all arms of these names that can be had; stops after each of them."""
        for names in groups:
            yield from self._measure(names)
        for workload in self.workloads:
            if workload.together and any(OURS in names for names in groups):
                self._save(workload)
                yield

    def _measure(self, names: list[str]) -> Iterator[None]:
        with contextlib.ExitStack() as ends:
            started = [arm for name in names if (arm := self._started(name, ends)) is not None]
            arms = [arm for arm in started if self._is_filled(arm)]
            for arm in arms:
                if isinstance(arm, Restarted):
                    arm.kill()
                    arm.start()
                    arm.wait_ready()
            self._say("all engines are ready")
            time.sleep(self.idle_s)
            for workload in self.workloads:
                self._ask(workload, arms)
                yield

    def _started(self, name: str, ends: contextlib.ExitStack) -> Arm | None:
        """All begin at once: a start waits for the disk, too."""
        if name == "lmcache" and (why := why_no_lmcache(self.place.lmcache_python)):
            self._skip(name, why)
            return None
        if is_ours(name) and all(each.together for each in self.workloads):
            return None  # that is asked of an engine of its own
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
        rounds = fills(self.workloads) if arm.fills else []
        for each in rounds:
            arm.ask(each, self.size.answer)
        if rounds:
            arm.settle()
        self._say(f"{arm.name}: ready, {len(rounds)} rounds stored")

    def _ask(self, workload: Workload, arms: list[Arm]) -> None:
        # What saving costs is less than what engines differ by: see _save().
        asked = [arm for arm in arms if not (workload.together and is_ours(arm.name))]
        if {arm.name for arm in asked} <= {OWN}:
            return  # nothing to compare
        cells = {arm.name: Cell(arm.name, load=round(LOAD, 1)) for arm in asked}
        for number, prompts in enumerate(workload.ask):
            for arm in self.rng.sample(asked, len(asked)):
                if arm.name == REFERENCE and number >= (workload.compared or len(workload.ask)):
                    continue
                try:
                    self._turn(arm, workload, prompts, cells[arm.name], warm=number > 0)
                except EngineError as exc:
                    self._failed(arm, exc)
                    arms.remove(arm)
                    asked.remove(arm)
                    del cells[arm.name]
                time.sleep(self.idle_s)
        self.found.setdefault(workload.name, []).append(cells)
        self._say(f"{workload.title}: asked")

    def _turn(
        self, arm: Arm, workload: Workload, prompts: Round, cell: Cell, *, warm: bool
    ) -> None:
        """One round of one arm; of prompts that come together, a first round only warms up."""
        if not workload.together:
            begun_s = time.perf_counter()
            answers = arm.ask(prompts, self.size.answer)
            cell.add(answers, time.perf_counter() - begun_s)
            return
        lead, counted = prompts[: workload.lead], prompts[workload.lead :]
        answers, seconds = arm.ask_together(lead, counted, self.size.answer)
        arm.settle()
        if warm:
            cell.add(answers, seconds)

    def _save(self, workload: Workload) -> None:
        """Prompts like this workload's in an engine whose connector is switched."""
        size, place = self.size, self.place
        asked = TurnSize(
            tokens=size.unique, answer=size.answer, **TINY_TURN if size is TINY else {}
        )
        prompts = Texts(self.text, f"switched {self.seed}").take
        settings = Embedded(place, OURS).settings()
        extra = {**settings.pop("extra_config"), "store": str(place.folder / "switched")}
        with Switched(
            place.folder / "switched",
            place.model,
            place.log,
            extra,
            python=place.python,
            **settings,
        ) as engine:
            engine.wait_ready()
            turns = engine.measure(prompts, asked, size.unique_pairs)
        cells = {OWN: Cell(OWN, alone=True), OURS: Cell(OURS, alone=True)}
        for cell, made in ((cells[OWN], turns.off), (cells[OURS], turns.on)):
            cell.load = round(LOAD, 1)
            for turn in made:
                answers = [answer_of(*each) for each in zip(turn.asked, turn.answers, strict=True)]
                cell.add(answers, turn.seconds)
                cell.kept_pages += turn.pages
        # A turn that stores less than it should ends the run.
        cells[OURS].whole_pages = asked.pages * len(turns.on)
        self.found.setdefault(workload.name, []).append(cells)
        self._say(f"{workload.title}: asked with the connector on and off")

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
    parser.add_argument("--results", type=Path, help="a file that has what was measured so far")
    parser.add_argument("--join", action="store_true", help="with what is in that file already")
    parser.add_argument("--no-run", action="store_true", help="measure nothing, only write")
    parser.add_argument("--write", type=Path, help="a folder for engine.md and engine.svg")
    parser.add_argument("--readme", type=Path, help="a page that has the short form, between marks")
    parser.add_argument("--python", default="", help="a Python that has vLLM")
    parser.add_argument("--lmcache-python", default="", help="one that has vLLM and LMCache")
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--load", default="auto", help="our connector's setting")
    parser.add_argument("--dir", type=Path, default=Path.cwd(), help="where the stores are made")
    options = parser.parse_args()
    if (options.join or options.no_run) and not options.results:
        parser.error("--join and --no-run need --results FILE")
    own = ROOT / ".venv-lmcache" / "bin" / "python"
    named = options.lmcache_python or os.environ.get("BENCH_LMCACHE_PYTHON", "")
    options.lmcache_python = named or (str(own) if own.exists() else "")
    return options


class Outcome:
    """What this run found together with what it goes on from: kept in a file, and shown."""

    def __init__(self, options: argparse.Namespace, every: list[Workload]) -> None:
        self.options = options
        self.every = every
        self.about = {
            "seed": options.seed,
            "tiny": options.tiny,
            "machine": machine(),
            "model": options.model.name,
            "load_setting": options.load,
        }
        self.old: Results = {}
        self.versions: list[str] = []
        self.skipped: dict[str, str] = {}
        if options.join or options.no_run:
            try:
                self.old, notes = read(options.results, self.about)
            except OtherRunError as exc:
                raise SystemExit(str(exc)) from None
            self.versions, self.skipped = notes["versions"], notes["skipped"]
            if options.join:
                self.skipped.pop(REST, None)  # which comes now, or is asked for otherwise
        self.found = self.old

    def take(self, found: Results, skipped: dict[str, str]) -> None:
        """What there is by now; into the file at once."""
        self.found = joined(self.old, found)
        measured = {arm for groups in self.found.values() for group in groups for arm in group}
        kept = {name: why for name, why in self.skipped.items() if name not in measured}
        self.skipped = kept | skipped
        if self.options.results:
            notes = {"versions": self.versions, "skipped": self.skipped}
            write(self.options.results, self.about, self.found, notes)

    def report(self) -> None:
        """In the form that is wanted."""
        rows, ratios = rows_of(self.found, REFERENCE), ratios_of(self.found)
        shown = [workload for workload in self.every if workload.name in self.found]
        notes = not_unlimited(rows, reusable(shown, BLOCK_TOKENS))
        notes += [f"Skipped: {name}: {why}" for name, why in self.skipped.items()]
        cells = [c for groups in self.found.values() for group in groups for c in group.values()]
        dates = _from_to([cell.date for cell in cells])
        if self.options.write and rows:
            versions = ", ".join(self.versions) or "versions unknown"
            said = f"`make bench-engine`, SmolLM2-135M, {versions}, {machine()}, no GPU, {dates}"
            said = short(ratios, shown, said)
            where = {
                "short": said,
                "versions": versions,
                "machine": machine(),
                "date": dates,
                "seed": self.options.seed,
                "load": _from_to([f"{cell.load:.1f}" for cell in cells]),
            }
            self.options.write.mkdir(parents=True, exist_ok=True)
            text = page(rows, shown, ratios, notes, **where)
            (self.options.write / "engine.md").write_text(text, encoding="ascii")
            text = drawing(rows, shown, f"{machine()}, no GPU, {dates}; make bench-engine")
            (self.options.write / "engine.svg").write_text(text, encoding="ascii")
            if self.options.readme:
                put_into(self.options.readme, "engine.md", f"{PICTURE}\n\n{said}")
        if self.options.json:
            more = {"cells": as_dicts(rows), "skipped": self.skipped, "notes": notes}
            print(json_line(ratios, self.options.seed, **more))
        else:
            print(f"{machine()}; seed {self.options.seed}; {time.perf_counter() - BEGUN_S:.0f} s")
            print("\n".join([table(rows, shown), *verdicts(ratios), *notes]))
        wrong = [row for row in rows if row.wrong and is_ours(row.arm)]
        if wrong:
            raise SystemExit(f"answers differ where the choice was clear: {wrong}")


def _from_to(texts: Sequence[str]) -> str:
    first, last = min(texts, default="?"), max(texts, default="?")
    return first if first == last else f"{first} to {last}"


def main() -> None:
    """Measure and print."""
    options = parsed()
    size = TINY if options.tiny else Size()
    options.python = "" if options.no_run else find_python(options)
    if not options.python and not options.no_run:
        print("SKIPPED: NO VLLM here; set TEST_VLLM_PYTHON", file=sys.stderr)
        print(json_line({}, options.seed, skipped={"all": "no vLLM"}))
        return
    text = long_prompt(options.model, TEXT_TOKENS)
    every = make_workloads(text, size, options.seed)
    wanted = options.workloads.split(",") if options.workloads else [w.name for w in every]
    if unknown := {*wanted} - {workload.name for workload in every}:
        raise SystemExit(f"no such workloads: {sorted(unknown)}")
    outcome = Outcome(options, every)
    if not options.no_run:
        run(options, [each for each in every if each.name in wanted], size, outcome, text)
    outcome.report()


def run(
    options: argparse.Namespace,
    workloads: list[Workload],
    size: Size,
    outcome: Outcome,
    text: Sequence[int],
) -> None:
    """Measure; what there is is shown as well when the run is broken off, by SIGTERM too."""
    os.environ["PYTHONPATH"] = str(ROOT)
    signal.signal(signal.SIGTERM, _break_off)
    outcome.versions = versions_of(options.python, options.lmcache_python)
    with places(options) as place:
        bench = Bench(place, workloads, size, options.seed, text)
        try:
            for _ in bench.measure([each.split(",") for each in options.arms.split(";")]):
                outcome.take(bench.found, bench.skipped)
        except (EngineError, KeyboardInterrupt) as exc:
            outcome.take(bench.found, bench.skipped | {REST: f"broken off: {exc!r}"})
            options.write = None  # no page of a part, unless --no-run asks for it
            outcome.report()
            raise
    outcome.take(bench.found, bench.skipped)


def _break_off(number: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt(signal.Signals(number).name)


if __name__ == "__main__":
    main()
