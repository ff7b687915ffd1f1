"""Start of a full store: how soon it answers, how soon everything hits again.

restart_first_answer_s   from spawning a fresh process to its first answered look-up (a miss may
                         be the answer); budget <= 1.5
restart_all_hits_s       from spawning it until every chain has been matched whole and one page in
                         1,000 has been read back and compared; budget <= 10

The store writes its own million slots of 8 KiB first (4 KiB of payload a page), in chains of 64
pages of which groups of eight share their first 16. The median of five starts counts.

    python bench/restart.py [--json] [--tiny] [--pages 1000000] [--starts 5] [--dir DIR] [--seed 0]
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from paired import machine

from kvstore import CacheSpec, Store

PAGE_TOKENS = 16
PAYLOAD_BYTES = 4096
CHAIN_PAGES = 64
SHARED_PAGES = 16
CHAINS_A_GROUP = 8
READ_ONE_IN = 1000
SPEC = CacheSpec.opaque("restart", page_tokens=PAGE_TOKENS, page_bytes=PAYLOAD_BYTES)
BUDGETS = {"restart_first_answer_s": 1.5, "restart_all_hits_s": 10.0}


def main() -> None:
    """Build, restart, print; or, with --child, be one start."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    parser.add_argument("--tiny", action="store_true", help="4,000 pages: a test of the bench")
    parser.add_argument("--pages", type=int, default=1_000_000)
    parser.add_argument("--starts", type=int, default=5)
    parser.add_argument("--dir", type=Path, default=Path.cwd(), help="where the store is made")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.tiny:
        options.pages, options.starts = 4000, 2
    if options.child:
        child(options)
        return
    with tempfile.TemporaryDirectory(prefix="restart-", dir=options.dir) as folder:
        build_s = build(Path(folder), options)
        runs = [start(Path(folder), options) for _ in range(options.starts)]
    report(options, build_s, runs)


def chains(pages: int, seed: int) -> list[np.ndarray]:
    """Token arrays of all chains: groups share a beginning, so that the tree has forks."""
    rng = np.random.default_rng(seed)
    made, left = [], pages
    while left > 0:
        head = rng.integers(0, 50_000, SHARED_PAGES * PAGE_TOKENS, dtype=np.int32)
        for number in range(CHAINS_A_GROUP):
            fresh = CHAIN_PAGES if number == 0 else CHAIN_PAGES - SHARED_PAGES
            tail_pages = CHAIN_PAGES - SHARED_PAGES
            tail = rng.integers(0, 50_000, tail_pages * PAGE_TOKENS, dtype=np.int32)
            made.append(np.concatenate([head, tail]))
            left -= fresh
            if left <= 0:
                break
    return made


def payload(tokens: np.ndarray, page: int) -> bytes:
    """Page bytes that follow from the page's own tokens and its place."""
    own = tokens[page * PAGE_TOKENS : (page + 1) * PAGE_TOKENS].tobytes()
    return own * (PAYLOAD_BYTES // len(own))


def build(folder: Path, options: argparse.Namespace) -> float:
    """Write all chains through the store; seconds."""
    begun = time.perf_counter()
    # Slots, their catalog and the reserve: about 9 KiB a page; capacity is reserved, not written.
    size = options.pages * 10_240 + (256 << 20)
    with Store.open(folder / "store", host_bytes="512MiB", disk_bytes=size) as store:
        session = store.session(SPEC)
        every = chains(options.pages, options.seed)
        for number, tokens in enumerate(every):
            written = 0
            while written < CHAIN_PAGES:
                with session.reserve(tokens, deadline_s=30.0) as run:
                    if run.reason == "present":
                        break
                    assert run.count, run.reason
                    for offset, view in enumerate(run.views()):
                        view[:] = payload(tokens, run.start + offset)
                    run.commit()
                    written = run.start + run.count
            if not options.json and number % 1000 == 0:
                print(f"  writing: chain {number} of {len(every)}", flush=True)
        assert store.flush(300.0), "the disk did not take all pages"
    return time.perf_counter() - begun


def start(folder: Path, options: argparse.Namespace) -> dict[str, float]:
    """One fresh process; seconds since it was spawned at each of its marks."""
    command = [sys.executable, __file__, "--child", str(folder / "store")]
    command += ["--pages", str(options.pages), "--seed", str(options.seed)]
    begun = time.perf_counter()
    marks: dict[str, float] = {}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            marks[line.strip()] = time.perf_counter() - begun
    assert process.returncode == 0, "the restarted process failed"
    # Making the prompts is the bench's own work, not the store's.
    own = marks["prompts made"] - marks["making prompts"]
    return {
        "restart_first_answer_s": marks["first answer"],
        "restart_all_hits_s": marks["all hits"] - own,
    }


def child(options: argparse.Namespace) -> None:
    """Open the store, answer at once, then match every chain and read some back."""
    with Store.open(options.child, host_bytes="256MiB", wait_warm=False) as store:
        session = store.session(SPEC)
        session.match(np.zeros(PAGE_TOKENS, np.int32)).release()
        print("first answer", flush=True)
        assert store.wait_warm(120.0), "not warm after 120 s"
        print("making prompts", flush=True)
        every = chains(options.pages, options.seed)
        print("prompts made", flush=True)
        for number, tokens in enumerate(every):
            with session.match(tokens) as hit:
                assert hit.pages == CHAIN_PAGES, f"chain {number}: {hit.pages} pages"
                if number % READ_ONE_IN == 0:
                    read_back(hit, tokens)
        print("all hits", flush=True)


def read_back(hit: Any, tokens: np.ndarray) -> None:
    """Stage one chain and compare every byte."""
    assert hit.stage(10.0) == CHAIN_PAGES
    for page, view in enumerate(hit.views()):
        assert bytes(view) == payload(tokens, page), f"page {page} is not what was stored"


def report(options: argparse.Namespace, build_s: float, runs: list[dict[str, float]]) -> None:
    """Medians and ranges."""
    results = {key: statistics.median(run[key] for run in runs) for key in BUDGETS}
    spread = {
        key: [min(run[key] for run in runs), max(run[key] for run in runs)] for key in runs[0]
    }
    if options.json:
        line: dict[str, object] = {key: round(value, 3) for key, value in results.items()}
        line["spread"] = {
            key: [round(all_of[0], 3), round(all_of[-1], 3)] for key, all_of in spread.items()
        }
        line |= {"pages": options.pages, "starts": options.starts, "build_s": round(build_s, 1)}
        line |= {"machine": machine(), "date": datetime.date.today().isoformat()}
        print(json.dumps(line | {"seed": options.seed}))
        return
    print(f"{options.pages} pages on {machine()}, written in {build_s:.0f} s; seed {options.seed}")
    for key, budget in BUDGETS.items():
        verdict = "kept" if results[key] <= budget else "MISSED"
        low, high = spread[key][0], spread[key][-1]
        print(f"{key}: {results[key]:.2f} s [{low:.2f}, {high:.2f}], budget {budget}: {verdict}")


if __name__ == "__main__":
    main()
