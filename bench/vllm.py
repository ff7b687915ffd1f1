"""vLLM with the store against vLLM without: first tokens, misses, chats that do not fit.

vllm_warm_over_cold          3,000-token prompt that an earlier engine stored, in an engine that has
                             never seen it: its TTFT over that of computing one; budget <= 0.12
vllm_warm_over_apc           the same over a hit in vLLM's own prefix cache; budget <= 1.3
vllm_miss_throughput_ratio   prompts that nobody has stored, all saved: tokens a second over those
                             without connector; budget >= 0.97
vllm_miss_cpu_ratio          CPU seconds of it, server and its writing included, over the same;
                             budget <= 1.03. Both are of --miss-pairs pairs in one engine whose
                             connector is switched on and off, see miss_pairs.py
vllm_miss_two_engines_throughput_ratio, vllm_miss_two_engines_cpu_ratio
                             the same from an engine with and one that never had a connector: the
                             switch is right if what it says lies in their intervals; no budget
vllm_chat_over_none          8 chats of 6 turns, KV space for 2: mean TTFT of a chat over that in an
                             engine without connector; budget <= 0.5. A chat begins with 1,000
                             tokens, a turn adds 140 (as vLLM's own multi-turn benchmark has them)
                             and 16 of the answer
vllm_chat_example_over_none  the same with vLLM's ExampleConnector: the peer, no budget

Beside them in the line of --json: miss_server_cpu_share, what the server used of it over what an
engine without uses; idle_cores, what engine and server use while nobody asks, and what an engine
without connector does, which a switch can't show.

Ratios are of interleaved pairs with their 90 % interval; twice --pairs for the first two. Where
engines take turns, each waits until the other's processes have stopped spinning, 1 s after a step.
Engines run in .venv-vllm (made by make) or in the Python that --python or TEST_VLLM_PYTHON names.

    python bench/vllm.py [--json] [--tiny] [--pairs 5] [--python PATH] [--model DIR] [--seed 0]
                         [--rows warm,miss,chat] [--dir DIR] [--miss-pairs 30]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from engines import MODEL, ROOT, SPIN_S, find_python, settle, without_store
from miss_pairs import TINY as TINY_TURN
from miss_pairs import Side, Switched, TurnSize, two_engines
from paired import PairedRatio, json_line, machine, paired_ratio

from kvstore.engine_adapter.demo_vllm_engine import EngineError, VllmEngine

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import TextIO

BLOCK = 128
MISS_STORE = {"load": "always", "host_bytes": "1GiB", "disk_bytes": "8GiB"}
EXAMPLE = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
BUDGETS: dict[str, tuple[float, bool] | None] = {
    "vllm_warm_over_cold": (0.12, False),
    "vllm_warm_over_apc": (1.3, False),
    "vllm_miss_throughput_ratio": (0.97, True),
    "vllm_miss_cpu_ratio": (1.03, False),
    "vllm_miss_two_engines_throughput_ratio": None,
    "vllm_miss_two_engines_cpu_ratio": None,
    "vllm_chat_over_none": (0.5, False),
    "vllm_chat_example_over_none": None,
}


@dataclass(frozen=True)
class Size:
    """How much is asked."""

    prompt_tokens: int = 3000
    chats: int = 8
    turns: int = 6
    first_tokens: int = 1000
    turn_tokens: int = 140
    answer_tokens: int = 16


TINY = Size(2 * BLOCK + 10, 2, 2, BLOCK, BLOCK, 2)


class Bench:
    """Engines, prompts, and where they keep things."""

    def __init__(self, folder: Path, log: TextIO, options: argparse.Namespace) -> None:
        self.folder = folder
        self.log = log
        self.options = options
        self.size = TINY if options.tiny else Size()
        self.rng = np.random.default_rng(options.seed)
        self.more: dict[str, object] = {}  # besides ratios

    def measure(self) -> dict[str, PairedRatio]:
        """The rows that are wanted."""
        found: dict[str, PairedRatio] = {}
        for name in self.options.rows.split(","):
            found |= {"warm": self.warm, "miss": self.miss, "chat": self.chat}[name]()
        return found

    def warm(self) -> dict[str, PairedRatio]:
        """One engine stores, a fresh one is asked: something unknown, something stored, again.

        Before each a block that nobody knows is computed: what was computed or loaded last would
        leave its KV in the processor's caches, for the next one to find, and only for that.
        """
        store, pairs = self.folder / "warm", 2 * self.options.pairs  # they are short
        stored = [self._prompt(self.size.prompt_tokens) for _ in range(pairs)]
        with self._engine(store) as first:
            for tokens in stored:
                first.run([{"tokens": tokens}])
            settle(store)
        cold, warm, own = [], [], []
        with self._engine(store) as engine:
            for tokens in [self._prompt(self.size.prompt_tokens), *stored]:
                unknown = self._prompt(self.size.prompt_tokens)
                cold.append(self._ttft_after_another(engine, unknown, params=without_store()))
                warm.append(self._ttft_after_another(engine, tokens))
                own.append(self._ttft_after_another(engine, tokens, params=without_store()))
        # The first round warmed the engine up, and its "stored" prompt was none.
        return {
            "vllm_warm_over_cold": paired_ratio(warm[1:], cold[1:]),
            "vllm_warm_over_apc": paired_ratio(warm[1:], own[1:]),
        }

    def miss(self) -> dict[str, PairedRatio]:
        """In one engine that is switched, then in two."""
        options, size = self.options, TINY_TURN if self.options.tiny else TurnSize()
        engine = {"python": options.python}
        store = self.folder / "switched"
        with Switched(store, options.model, self.log, MISS_STORE, **engine) as switched:
            switched.wait_ready()
            found = switched.measure(self._prompt, size, options.miss_pairs)
        self.more["miss_server_cpu_share"] = round(found.server_share(), 4)
        names = ("throughput", "cpu")
        rows = {
            f"vllm_miss_{name}_ratio": ratio
            for name, ratio in zip(names, found.ratios(), strict=True)
        }
        store = self.folder / "miss"
        with self._engine(store) as ours, self._engine(None) as plain:
            sides = Side(ours, store), Side(plain, None)
            found = two_engines(*sides, self._prompt, size, options.pairs)
            idle = zip(("with", "without"), sides, strict=True)
            self.more["idle_cores"] = {name: round(side.idle_cores(), 4) for name, side in idle}
        for name, ratio in zip(names, found.ratios(), strict=True):
            rows[f"vllm_miss_two_engines_{name}_ratio"] = ratio
        return rows

    def chat(self) -> dict[str, PairedRatio]:
        """Each chat's turns come after all the others': vLLM alone has forgotten it by then."""
        size = self.size
        longest = size.first_tokens + (size.turns - 1) * size.turn_tokens
        longest += size.turns * size.answer_tokens
        each = -(-longest // BLOCK) + 1
        # vLLM wants room for one request of the greatest length, whatever is asked.
        blocks = {"num_gpu_blocks_override": 2 * each + 1, "max_model_len": each * BLOCK}
        example = {
            "kv_transfer_config": {
                **EXAMPLE,
                "kv_connector_extra_config": {"shared_storage_path": str(self.folder / "example")},
            }
        }
        turns = [
            [
                self._prompt(size.turn_tokens if turn else size.first_tokens)
                for turn in range(size.turns)
            ]
            for _ in range(size.chats)
        ]
        with contextlib.ExitStack() as ends:
            engines = {
                "none": ends.enter_context(self._engine(None, **blocks)),
                "ours": ends.enter_context(self._engine(self.folder / "chat", **blocks)),
            }
            with contextlib.suppress(EngineError):
                engines["example"] = ends.enter_context(self._engine(None, **blocks, **example))
            means = self._chats(engines, turns)
        rows = {"vllm_chat_over_none": paired_ratio(means["ours"], means["none"])}
        if "example" in means:
            rows["vllm_chat_example_over_none"] = paired_ratio(means["example"], means["none"])
        return rows

    def _chats(
        self, engines: dict[str, VllmEngine], turns: list[list[list[int]]]
    ) -> dict[str, list[float]]:
        """Mean TTFT of each chat over all its turns; by turns in all engines.

        Each engine goes on with its own answers.
        """
        sums = {name: [0.0] * len(turns) for name in engines}
        histories: dict[str, list[list[int]]] = {name: [[] for _ in turns] for name in engines}
        for turn in range(self.size.turns):
            for number, chat in enumerate(turns):
                for name in [*engines] if number % 2 else [*engines][::-1]:
                    history = histories[name][number]
                    history += chat[turn]
                    request = {"tokens": history, "max_tokens": self.size.answer_tokens}
                    time.sleep(SPIN_S)
                    [answer] = engines[name].run([request])
                    history += answer["tokens"]
                    sums[name][number] += answer["ttft_s"]
        return {name: [each / self.size.turns for each in made] for name, made in sums.items()}

    @contextlib.contextmanager
    def _engine(self, store: Path | None, **engine: Any) -> Iterator[VllmEngine]:
        extra = None
        if store is not None:
            extra = {
                "store": str(store),
                "load": "always",
                "host_bytes": "2GiB",
                "disk_bytes": "4GiB",
            }
        with VllmEngine(
            self.options.model, self.log, extra_config=extra, python=self.options.python, **engine
        ) as made:
            made.wait_ready()
            yield made

    def _ttft(self, engine: VllmEngine, tokens: list[int], **more: Any) -> float:
        [answer] = engine.run([{"tokens": tokens, **more}])
        return float(answer["ttft_s"])

    def _ttft_after_another(self, engine: VllmEngine, tokens: list[int], **more: Any) -> float:
        self._ttft(engine, self._prompt(BLOCK), params=without_store())
        return self._ttft(engine, tokens, **more)

    def _prompt(self, tokens: int) -> list[int]:
        found: list[int] = self.rng.integers(1000, 40_000, tokens).tolist()
        return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    parser.add_argument("--tiny", action="store_true", help="small and short: a test of the bench")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--miss-pairs", type=int, default=30, help="of seconds each")
    parser.add_argument("--python", default="", help="a Python that has vLLM")
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--rows", default="warm,miss,chat")
    parser.add_argument("--dir", type=Path, default=Path.cwd(), help="where the stores are made")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.tiny:
        options.pairs = options.miss_pairs = 2
    options.python = find_python(options)
    if not options.python:
        print("SKIPPED: NO VLLM here; set TEST_VLLM_PYTHON", file=sys.stderr)
        print(json_line({}, options.seed, skipped="no vLLM"))
        return
    os.environ["PYTHONPATH"] = str(ROOT)
    with (
        tempfile.TemporaryDirectory(prefix="vllm-", dir=options.dir) as folder,
        open(Path(folder) / "engines.log", "w+", encoding="utf-8") as log,
    ):
        try:
            bench = Bench(Path(folder), log, options)
            results = bench.measure()
        except Exception:
            log.seek(0)
            sys.stderr.writelines(log.readlines()[-30:])
            raise
    if options.json:
        print(json_line(results, options.seed, **bench.more))
        return
    print(f"{machine()}; seed {options.seed}")
    for key, ratio in results.items():
        budget = BUDGETS[key]
        verdict = "no budget"
        if budget is not None:
            sign = ">=" if budget[1] else "<="
            verdict = f"budget {sign} {budget[0]}: " + ratio.verdict(budget[0], at_least=budget[1])
        print(f"{key:38} {ratio.median:7.3f}  90 % [{ratio.low:.3f}, {ratio.high:.3f}], {verdict}")
    for key, value in bench.more.items():
        print(f"{key:38} {value}")


if __name__ == "__main__":
    main()
