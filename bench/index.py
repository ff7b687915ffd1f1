"""The prefix index against its budget: match, page keys, memory.

Canonical workload: 1 M pages of 16 tokens, edges of 8 pages on average, built by inserts; in it one
prompt of 128 Ki tokens stored as one edge and another as 64 edges, of which the slower counts.
Times are medians with a 90 % interval. Beside each stands the least that any index must do with the
same tokens, timed in turn with it: pass over them once in memory (array), turn the list into int32
(list), hash them in one call (keys). Memory is what the process grew by, tokens taken off.

    python bench/index.py            a few lines
    python bench/index.py --json     one line
    python bench/index.py --tiny     seconds, for tests: its figures mean nothing
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import os
import time
from array import array
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash
from paired import PairedRatio, machine, paired_ratio

from kvstore.prefix_index.index import PrefixIndex
from kvstore.prefix_index.page_key import page_keys
from kvstore.prefix_index.page_table import DISK, NO_PAGE

if TYPE_CHECKING:
    from collections.abc import Callable

Tokens: TypeAlias = npt.NDArray[np.int32]

PAGE_TOKENS = 16
PAGE_BYTES = PAGE_TOKENS * 4
ROOT = bytes(range(32))
VOCABULARY = 128_000
EDGE_PAGES_MEAN = 8
PATH_EDGES = 64
BUDGETS = {
    "match_array_ms": 0.15,
    "match_list_ms": 5.0,
    "hash_ms": 2.0,
    "index_bytes_per_page": 200.0,
}


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much of everything."""

    pages: int
    prompt_pages: int
    samples: int


CANONICAL = Sizes(pages=1_000_000, prompt_pages=8192, samples=200)
TINY = Sizes(pages=4_000, prompt_pages=256, samples=10)


@dataclass(frozen=True, slots=True)
class Timed:
    """Milliseconds of a call, and its ratio to the limit timed beside it, pair by pair."""

    ms: PairedRatio
    over_limit: PairedRatio


class Builder:
    """Makes an index of the canonical shape, and the two prompts that it holds."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._sequence = 1
        self._index = PrefixIndex()

    def build(self, sizes: Sizes) -> tuple[PrefixIndex, list[Tokens]]:
        prompts = [self._tokens(sizes.prompt_pages) for _ in range(2)]
        self._insert(NO_PAGE, prompts[0])
        ids = self._insert(NO_PAGE, prompts[1])
        step = sizes.prompt_pages // PATH_EDGES
        for last in range(step - 1, sizes.prompt_pages - step, step):
            self._insert(int(ids[last]), self._tokens(1))  # a side branch ends an edge
        self._fill(sizes.pages)
        return self._index, prompts

    def _tokens(self, pages: int) -> Tokens:
        return self._rng.integers(0, VOCABULARY, pages * PAGE_TOKENS, dtype=np.int32)

    def _insert(self, parent: int, tokens: Tokens) -> npt.NDArray[np.int32]:
        count = len(tokens) // PAGE_TOKENS
        numbers = np.arange(self._sequence, self._sequence + count, dtype=np.uint64)
        sums = np.stack([numbers, numbers], axis=1)
        self._sequence += count
        run = tokens.tobytes()
        ids = self._index.insert(
            ROOT, PAGE_TOKENS, parent, run, None, sums.tobytes(), numbers, 8192, sums, 1.0
        )
        self._index.set_tier(ids, DISK, numbers.astype(np.int64))
        return ids

    def _fill(self, pages: int) -> None:
        """Edges of 1 to 15 pages, two and two under the end of a random earlier edge or the root.

        Two, so that they stay apart: an only child would be one edge with its parent.
        """
        ends = [NO_PAGE]
        while len(self._index) < pages:
            under = ends[int(self._rng.integers(len(ends)))]
            for length in self._rng.integers(1, 2 * EDGE_PAGES_MEAN, 2).tolist():
                ends.append(int(self._insert(under, self._tokens(length))[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    parser.add_argument("--tiny", action="store_true", help="seconds; the figures mean nothing")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    sizes = TINY if arguments.tiny else CANONICAL

    before = resident_bytes()
    index, prompts = Builder(arguments.seed).build(sizes)
    gc.collect()
    grown = resident_bytes() - before
    bytes_per_page = grown / len(index) - PAGE_BYTES
    shape = {"pages": len(index), "pages_per_edge": round(len(index) / index.nodes, 2)}
    times = measure(index, prompts, sizes.samples)
    if arguments.json:
        print(json_line(times, bytes_per_page, seed=arguments.seed, **shape))
        return
    print(f"{machine()}, seed {arguments.seed}, {shape}")
    for key, timed in times.items():
        print(row(key, timed.ms), f"{timed.over_limit.median:.1f} x the limit beside it")
    print(row("index_bytes_per_page", PairedRatio(*[bytes_per_page] * 3, pairs=1)))


def measure(index: PrefixIndex, prompts: list[Tokens], samples: int) -> dict[str, Timed]:
    """The times of the three rows; of two paths the slower one."""
    times: dict[str, list[Timed]] = {"match_array_ms": [], "match_list_ms": [], "hash_ms": []}
    for tokens in prompts:
        stored = tokens.tobytes()
        listed = tokens.tolist()
        assert len(index.match(ROOT, tokens)) == len(stored) // PAGE_BYTES, "prompt is not stored"
        times["match_array_ms"].append(
            in_pairs(
                partial(index.match, ROOT, tokens),
                partial(one_pass, tokens, stored),
                samples,
            )
        )
        times["match_list_ms"].append(
            in_pairs(partial(index.match, ROOT, listed), partial(array, "i", listed), samples)
        )
        times["hash_ms"].append(
            in_pairs(
                partial(page_keys, ROOT, stored, PAGE_TOKENS),
                partial(xxhash.xxh3_128_digest, stored),
                samples,
            )
        )
    return {key: max(paths, key=lambda timed: timed.ms.median) for key, paths in times.items()}


def one_pass(tokens: Tokens, stored: bytes) -> bool:
    """Copy the tokens out of their array and compare them once: no index can do less."""
    return tokens.tobytes() == stored


def in_pairs(call: Callable[[], object], limit: Callable[[], object], samples: int) -> Timed:
    calls, limits = [], []
    for _ in range(samples):
        calls.append(milliseconds(call))
        limits.append(milliseconds(limit))
    return Timed(paired_ratio(calls, [1.0] * samples), paired_ratio(calls, limits))


def milliseconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def row(key: str, value: PairedRatio) -> str:
    verdict = value.verdict(BUDGETS[key], at_least=False)
    spread = f"[{value.low:.3f}, {value.high:.3f}]"
    return f"{key:22}{value.median:9.3f} {spread:18} budget {BUDGETS[key]:6} {verdict:10}"


def json_line(times: dict[str, Timed], bytes_per_page: float, *, seed: int, **shape: object) -> str:
    """One line: a number a key, intervals and ratios to the limits beside, where and when."""
    line: dict[str, object] = {key: round(timed.ms.median, 4) for key, timed in times.items()}
    line["index_bytes_per_page"] = round(bytes_per_page, 1)
    line["spread"] = {key: bounds(timed.ms) for key, timed in times.items()}
    line["over_limit"] = {key: round(timed.over_limit.median, 2) for key, timed in times.items()}
    line["over_limit_spread"] = {key: bounds(timed.over_limit) for key, timed in times.items()}
    line |= {"machine": machine(), "date": datetime.date.today().isoformat(), "seed": seed}
    return json.dumps(line | shape)


def bounds(value: PairedRatio) -> list[float]:
    return [round(value.low, 4), round(value.high, 4)]


if __name__ == "__main__":
    main()
