"""What reading ahead is worth: waits for the disk, with and without, and what it costs others.

steps   a client asks for a chain part by part, as an agent that replays a conversation, with a
        pause of a few milliseconds in which it works; chains by Zipf, memory holds a tenth
whole   every prompt is asked for once and in full, parts of chains among them: nothing that is
        read ahead is of use, and it must not delay what is asked for

    python bench/prefetch.py            seconds waited in stage(), pairs of runs, interleaved
    python bench/prefetch.py --json     one line
"""

from __future__ import annotations

import argparse
import datetime
import json
import random
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
from paired import machine

from kvstore.spec import CacheSpec
from kvstore.store import Store

PAGE_TOKENS, PAGE_BYTES = 16, 256 << 10
SPEC = CacheSpec.opaque("prefetch", page_tokens=PAGE_TOKENS, page_bytes=PAGE_BYTES)
CHAIN_PAGES, STEP_PAGES = 32, 4
PAUSE_S = 0.004
BUDGET = "16MiB"


def chain(number: int, pages: int = CHAIN_PAGES) -> np.ndarray:
    return np.arange(pages * PAGE_TOKENS, dtype=np.int32) + number * 1_000_000


def ask(session, tokens: np.ndarray) -> tuple[float, int, int]:
    """Seconds waited for pages, how many were in memory at once, and how many there were."""
    with session.match(tokens) as hit:
        ready = hit.host_pages
        began = time.perf_counter()
        hit.stage(10.0)
        return time.perf_counter() - began, ready, hit.pages


def run(store: Store, workload: str, chains: int, requests: int, seed: int) -> dict[str, float]:
    session, rng = store.session(SPEC), random.Random(seed)
    weights = [1 / (1 + number) for number in range(chains)]
    waited, ready, asked = 0.0, 0, 0
    for _ in range(requests):
        number = rng.choices(range(chains), weights)[0]
        if workload == "steps":
            parts = range(STEP_PAGES, CHAIN_PAGES + 1, STEP_PAGES)
        else:
            parts = range(rng.randint(1, CHAIN_PAGES), CHAIN_PAGES + 1, CHAIN_PAGES)
        for pages in parts:
            found = ask(session, chain(number, pages))
            waited, ready, asked = waited + found[0], ready + found[1], asked + found[2]
            time.sleep(PAUSE_S)
    counters = store.stats().counters
    return {
        "waited_s": waited,
        "in_memory": ready / asked,
        "read_ahead": counters["pages_prefetched"],
        "used": counters["prefetched_used"],
        "disk_reads": counters["disk_reads"],
    }


def measure(place: Path, workload: str, budget: str, chains: int, requests: int, seed: int):
    host = chains * CHAIN_PAGES * PAGE_BYTES // 10
    settings = {"host_bytes": host, "disk_bytes": 16 * host, "policy": "lru"}
    with Store.open(place, **settings, prefetch_bytes=budget) as store:
        session = store.session(SPEC)
        for number in range(chains):
            while True:
                with session.reserve(chain(number), deadline_s=10.0) as made:
                    if not made.count:
                        break
                    made.commit()
        store.flush(60.0)
        return run(store, workload, chains, requests, seed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chains", type=int, default=60)
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    results = {}
    for workload in ("steps", "whole"):
        rows: dict[str, list[dict[str, float]]] = {"0": [], BUDGET: []}
        with tempfile.TemporaryDirectory() as folder:
            for pair in range(options.pairs):
                for budget in rows if pair % 2 else reversed(rows):
                    place = Path(folder) / "store"
                    rows[budget].append(
                        measure(place, workload, budget, options.chains, options.requests, pair)
                    )
        without, ahead = rows["0"], rows[BUDGET]
        ratios = sorted(
            b["waited_s"] / max(a["waited_s"], 1e-9) for a, b in zip(without, ahead, strict=True)
        )
        results[workload] = {
            "waited_ratio": statistics.median(ratios),
            "waited_ratio_range": [ratios[0], ratios[-1]],
            "in_memory_without": statistics.median(each["in_memory"] for each in without),
            "in_memory_ahead": statistics.median(each["in_memory"] for each in ahead),
            "read_ahead": sum(each["read_ahead"] for each in ahead),
            "used": sum(each["used"] for each in ahead),
            "disk_reads_without": sum(each["disk_reads"] for each in without),
            "disk_reads_ahead": sum(each["disk_reads"] for each in ahead),
        }
        if not options.json:
            print(workload, json.dumps(results[workload]), flush=True)
    if options.json:
        line = {"machine": machine(), "date": datetime.date.today().isoformat()}
        print(json.dumps(line | results))


if __name__ == "__main__":
    main()
