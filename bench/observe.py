"""What looking inside costs: metering, events and the ghost list, on the way of a request.

    observe_load_share    of match + stage + copy + release of a prompt that is in memory
    observe_store_share   of reserve + copy + commit of a prompt, with one evicted for it

The same store with all of it on (a watcher too, so that events are recorded), and with meters,
ghost list and events that do nothing; runs are interleaved. 0.02 is 2 % of the thread's time. Pages
are of 2 MiB, 32 a prompt; --page-bytes asks for others.

    python bench/observe.py [--json] [--tiny] [--pairs 30] [--page-bytes 2097152] [--seed 1]
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from paired import PairedRatio, json_line, machine, paired_ratio

from kvstore import CacheSpec, Store
from kvstore.ghost_list import GhostList
from kvstore.meters import Histogram, Meters, Traffic

BUDGET = 0.02
PAGES = 32
PAGE_TOKENS = 16
KEYS = ("observe_load_share", "observe_store_share")


class NoHistogram(Histogram):
    """Observes nothing."""

    def observe(self, seconds: float) -> None:
        """Nothing."""


class NoTraffic(Traffic):
    """Counts nothing of what it is told."""

    def hit(self, states: Any, page_tokens: int) -> None:
        """Nothing."""


class NoMeters(Meters):
    """Meters that do nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.lookup = self.stage = self.load = self.store = NoHistogram()

    def of(self, tenant: str, engine: str) -> Traffic:
        return NoTraffic()

    def move(self, source: str, target: str, size: int) -> None:
        """Nothing."""


class NoGhosts(GhostList):
    """Remembers nothing."""

    def note(self, keys: Any, tiers: Any, why: Any, now_s: float) -> None:
        """Nothing."""

    def back(self, keys: bytes) -> int:
        return 0


@dataclass(slots=True)
class Load:
    """One store and what is asked of it: its memory is the same, observed or not."""

    store: Store
    session: Any
    source: np.ndarray
    target: np.ndarray
    rng: np.random.Generator
    parts: dict[bool, tuple[Any, ...]]

    @classmethod
    def open(cls, page_bytes: int, seed: int) -> Load:
        store = Store.open(None, host_bytes=3 * PAGES * page_bytes + (64 << 20))
        store.events.begin(None)
        spec = CacheSpec.opaque("bench", page_tokens=PAGE_TOKENS, page_bytes=page_bytes)
        rng = np.random.default_rng(seed)
        source = rng.integers(0, 256, (PAGES, page_bytes), dtype=np.uint8)
        session, state = store.session(spec), store.state
        parts = {
            True: (state.meters, state.ghosts, session.traffic, state.index.observer),
            False: (NoMeters(), NoGhosts(8), NoTraffic(), None),
        }
        made = cls(store, session, source, np.empty_like(source), rng, parts)
        for _ in range(4):
            made.save(made.fresh())
        return made

    def observe(self, on: bool) -> None:
        """From now on with all of it, or without."""
        state = self.store.state
        state.meters, state.ghosts, self.session.traffic, state.index.observer = self.parts[on]

    def fresh(self) -> np.ndarray:
        """A prompt that nobody has stored."""
        return self.rng.integers(0, 1 << 30, PAGES * PAGE_TOKENS).astype(np.int32)

    def save(self, tokens: np.ndarray) -> float:
        """Seconds to store a prompt; 0 if it is there."""
        begin = time.thread_time()
        with self.session.reserve(tokens, deadline_s=10.0) as run:
            if run.reason == "present":
                return 0.0
            assert run.count == PAGES, run.reason
            for view, page in zip(run.views(), self.source, strict=True):
                np.copyto(np.frombuffer(view, np.uint8), page)
            run.commit()
        return time.thread_time() - begin

    def load(self, tokens: np.ndarray) -> float:
        """Seconds to read it back."""
        begin = time.thread_time()
        with self.session.match(tokens) as hit:
            assert hit.stage() == PAGES
            for view, page in zip(hit.views(), self.target, strict=True):
                np.copyto(page, np.frombuffer(view, np.uint8))
        return time.thread_time() - begin


def measure(page_bytes: int, pairs: int, seed: int) -> dict[str, PairedRatio]:
    """Shares of the time, by key. A run takes enough rounds to be no accident."""
    load = Load.open(page_bytes, seed)
    rounds = max(3, min(200, (256 << 20) // (PAGES * page_bytes)))
    taken: dict[str, dict[bool, list[float]]] = {key: {True: [], False: []} for key in KEYS}
    for pair in range(pairs):
        prompt = load.fresh()
        for on in (True, False) if pair % 2 else (False, True):
            load.observe(on)
            stored = [load.save(load.fresh()) for _ in range(rounds)]
            load.save(prompt)
            read = [load.load(prompt) for _ in range(rounds)]
            taken["observe_load_share"][on].append(float(np.median(read)))
            taken["observe_store_share"][on].append(float(np.median(stored)))
    load.store.close()
    found = {key: paired_ratio(each[True], each[False]) for key, each in taken.items()}
    return {
        key: replace(r, median=r.median - 1, low=r.low - 1, high=r.high - 1)
        for key, r in found.items()
    }


def main() -> int:
    """Run it as the docstring says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--page-bytes", type=int, default=2 << 20)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    pairs, page_bytes = (2, 4096) if options.tiny else (options.pairs, options.page_bytes)
    results = measure(page_bytes, pairs, options.seed)
    if options.json:
        print(json_line(results, options.seed, page_bytes=page_bytes))
        return 0
    print(machine())
    for key, found in results.items():
        print(
            f"{key:20} {found.median:+.4f} [{found.low:+.4f}, {found.high:+.4f}]  "
            f"budget {BUDGET}: {found.verdict(BUDGET, at_least=False)}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
