"""Time to the first token over the length of the prompt: vLLM cold, from its own cache, from ours.

One engine stores prompts of each length; it ends, and its server is killed with -9. Then a fresh
engine is asked for each of them, and for one as long that nobody knows, by turns:

cold   an unknown prompt, computed
disk   a stored one: its pages come from disk, where the killed server left them
host   the same again after vLLM has forgotten its own prefix cache: from the server's memory
own    and again: a hit in vLLM's own prefix cache

Medians of --prompts of each length. Before each a block that nobody knows is computed: KV that was
touched last would lie in the processor's caches. Ends with 1 if pages did not come from where the
row says, or an answer from disk or memory is not that of vLLM's own cache.

    python bench/ttft.py [--json] [--tiny] [--prompts 5] [--lengths 256,512,1024,2048,3000]
                         [--write FOLDER] [--readme FILE] [--python PATH] [--model DIR] [--seed 0]
                         [--dir DIR]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from engine_arms import answer_of
from engine_report import is_wrong
from engines import MODEL, ROOT, find_python, settle, without_store
from paired import machine
from readme_block import put_into
from ttft_report import KINDS, Point, drawing, page, short, today

from kvstore.engine_adapter.demo_vllm import server_pid
from kvstore.engine_adapter.demo_vllm_engine import VllmEngine

if TYPE_CHECKING:
    from typing import TextIO

BLOCK = 128
ANSWER_TOKENS = 4
WARM_UPS = (1500, 200)
PICTURE = "![Time to first token over the length of the prompt](docs/ttft.svg)"


class Bench:
    """Prompts of several lengths, and what they took."""

    def __init__(self, store: Path, log: TextIO, options: argparse.Namespace) -> None:
        self.store = store
        self.log = log
        self.options = options
        self.rng = np.random.default_rng(options.seed)
        self.wrong: list[str] = []

    def measure(self) -> list[Point]:
        """A point for each length."""
        lengths = self.options.lengths
        stored = {length: self._prompts(length) for length in lengths}
        with self._engine() as engine:
            engine.wait_ready()
            for prompts in stored.values():
                for tokens in prompts:
                    engine.run([{"tokens": tokens}])
            settle(self.store)
            os.kill(server_pid(self.store / "kvstore.sock"), signal.SIGKILL)
        found: dict[int, dict[str, list[float]]] = {
            length: {kind: [] for kind in KINDS} for length in lengths
        }
        with self._engine() as engine:
            engine.wait_ready()
            settle(self.store)  # until all that is on disk can be hit
            for tokens in WARM_UPS:
                self._ask(engine, self._prompt(tokens), ours=False)
            for number in range(self.options.prompts):
                for length in lengths:
                    asked = self._round(engine, stored[length][number])
                    for kind, seconds in asked.items():
                        found[length][kind].append(seconds)
            os.kill(server_pid(self.store / "kvstore.sock"), signal.SIGTERM)
        return [
            Point(length, {kind: statistics.median(each) for kind, each in kinds.items()})
            for length, kinds in found.items()
        ]

    def _round(self, engine: VllmEngine, tokens: list[int]) -> dict[str, float]:
        """One prompt of each kind."""
        cold = self._ask(engine, self._prompt(len(tokens)), ours=False)
        disk = self._ask(engine, tokens)
        engine.reset()
        host = self._ask(engine, tokens)
        own = self._ask(engine, tokens, ours=False)
        answers = {"cold": cold, "disk": disk, "host": host, "own": own}
        for kind, answer in answers.items():
            self._check(kind, tokens, answer, own)
        return {kind: float(answer["ttft_s"]) for kind, answer in answers.items()}

    def _check(
        self, kind: str, tokens: list[int], answer: dict[str, Any], own: dict[str, Any]
    ) -> None:
        """Whether its pages came from where its row says, and it says the same."""
        found, reference = answer_of(tokens, answer), answer_of(tokens, own)
        reused = found.reused_tokens
        # vLLM computes the last token, or its block: then a load ends before that one.
        right = (0,) if kind == "cold" else ((len(tokens) - 1) // BLOCK, len(tokens) // BLOCK)
        if reused not in [BLOCK * blocks for blocks in right]:
            self.wrong.append(f"{kind}, {len(tokens)} tokens: {reused} were reused")
        if found.disk_tokens != (reused if kind == "disk" else 0):
            self.wrong.append(f"{kind}, {len(tokens)} tokens: {found.disk_tokens} came from disk")
        if kind == "cold":
            return
        equal = found.tokens == reference.tokens
        # Where another number of tokens is computed, a close call may go the other way.
        if is_wrong(found, reference) or (reused == reference.reused_tokens and not equal):
            self.wrong.append(f"{kind}, {len(tokens)} tokens: another answer than vLLM's cache")

    def _ask(self, engine: VllmEngine, tokens: list[int], *, ours: bool = True) -> dict[str, Any]:
        params = {} if ours else {"params": without_store()}
        engine.run([{"tokens": self._prompt(BLOCK), "params": without_store()}])
        [answer] = engine.run([{"tokens": tokens, "max_tokens": ANSWER_TOKENS} | params])
        return answer

    def _engine(self) -> VllmEngine:
        extra = {"store": str(self.store), "load": "always", "page_tokens": BLOCK}
        extra |= {"host_bytes": "1536MiB", "disk_bytes": "4GiB"}
        options = self.options
        return VllmEngine(options.model, self.log, extra_config=extra, python=options.python)

    def _prompts(self, tokens: int) -> list[list[int]]:
        return [self._prompt(tokens) for _ in range(self.options.prompts)]

    def _prompt(self, tokens: int) -> list[int]:
        found: list[int] = self.rng.integers(1000, 40_000, tokens).tolist()
        return found


def parsed() -> argparse.Namespace:
    """The command's options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    parser.add_argument("--tiny", action="store_true", help="small and short: a test of the bench")
    parser.add_argument("--prompts", type=int, default=5, help="of each length")
    parser.add_argument("--lengths", default="256,512,1024,2048,3000")
    parser.add_argument("--write", type=Path, help="a folder for ttft.md and ttft.svg")
    parser.add_argument("--readme", type=Path, help="a page that has the short form, between marks")
    parser.add_argument("--python", default="", help="a Python that has vLLM")
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--dir", type=Path, default=Path.cwd(), help="where the store is made")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.tiny:
        options.prompts, options.lengths = 1, "256,300"
    options.lengths = [int(each) for each in options.lengths.split(",")]
    return options


def report(points: list[Point], options: argparse.Namespace) -> None:
    """In the form that is wanted."""
    about = {"machine": machine(), "date": today(), "prompts": options.prompts}
    if options.json:
        found = {point.tokens: point.seconds for point in points}
        print(json.dumps({"ttft_s": found, "seed": options.seed} | about))
    else:
        print(short(points, **about))
    if not options.write:
        return
    options.write.mkdir(parents=True, exist_ok=True)
    (options.write / "ttft.svg").write_text(drawing(points, **about), encoding="ascii")
    (options.write / "ttft.md").write_text(page(points, **about), encoding="ascii")
    if options.readme:
        put_into(options.readme, "ttft.md", f"{PICTURE}\n\n{short(points, **about)}")


def main() -> None:
    """Measure and print."""
    options = parsed()
    options.python = find_python(options)
    if not options.python:
        print("SKIPPED: NO VLLM here; set TEST_VLLM_PYTHON", file=sys.stderr)
        return
    os.environ["PYTHONPATH"] = str(ROOT)
    with (
        tempfile.TemporaryDirectory(prefix="ttft-", dir=options.dir) as folder,
        open(Path(folder) / "engines.log", "w+", encoding="utf-8") as log,
    ):
        bench = Bench(Path(folder).resolve() / "store", log, options)
        try:
            points = bench.measure()
        except Exception:
            log.seek(0)
            sys.stderr.writelines(log.readlines()[-30:])
            raise
    if bench.wrong:
        raise SystemExit("\n".join(bench.wrong))
    report(points, options)


if __name__ == "__main__":
    main()
