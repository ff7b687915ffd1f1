"""The real store under a trace: small pages, real tiers, and the hit ratio that the simulator says.

Each block of the trace is a page of two tokens and PAGE_BYTES of payload, stored through reserve
and commit, found through match and, where it has left the arena, staged from disk. Requests come
in the order of the trace, one at a time, on the trace's own clock. The store has as many pages of
disk as the simulator was given; so the disk is what bounds hits.

    python bench/eviction_store.py TRACE                  the first 3,000 requests, LRU and CSL
    python bench/eviction_store.py TRACE --requests 0     all of them
    python bench/eviction_store.py TRACE --memory         host tier only
    python bench/eviction_store.py TRACE --json           one line
"""

from __future__ import annotations

import argparse
import datetime
import json
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from paired import machine

from kvstore.page_policy import PagePolicy
from kvstore.simulation import replay
from kvstore.spec import CacheSpec
from kvstore.store import Store
from kvstore.tiers.policies import POLICIES, make_policy
from kvstore.trace import Trace, read_trace

if TYPE_CHECKING:
    from kvstore.session import Session

PAGE_TOKENS = 2
PAGE_BYTES = 4096 - 64
OFF_BY_MAX = 0.005


class TraceClock:
    """The store's clock, moved by the trace for the policy's eyes only."""

    def __init__(self) -> None:
        self.now = 1.0

    def __call__(self) -> float:
        return self.now


class TracePolicy(PagePolicy):
    """The store's policy on the trace's clock: what the store tells it is dated by that."""

    def __init__(self, name: str, pages: int, clock: TraceClock) -> None:
        super().__init__(name, pages, clock)
        self._trace_clock = clock

    def inserted(self, ids, keys, parent, depth, *size_and_time):  # type: ignore[no-untyped-def]
        """Pages hold a block of the trace each."""
        super().inserted(ids, keys, parent, depth, 512, 0, self._trace_clock())

    def touched(self, ids, now):  # type: ignore[no-untyped-def]
        super().touched(ids, self._trace_clock())


def tokens_of(path: np.ndarray) -> np.ndarray:
    """A block's number in two tokens: a page of its own."""
    tokens = np.empty(2 * len(path), np.int32)
    tokens[0::2], tokens[1::2] = path, 7
    return tokens


def hits_of_store(
    trace: Trace, name: str, capacity: int, directory: Path | None
) -> dict[str, float]:
    """Replay the trace through a store; what it hit and what it had room for."""
    if directory is None:
        store = Store.open(None, host_bytes=capacity * 4096, policy=name)
    else:
        store = Store.open(
            directory, host_bytes="4MiB", disk_bytes=capacity * 8192 + (64 << 20), policy=name
        )
    clock = TraceClock()
    policy = TracePolicy(name, capacity, clock)
    store.state.policy = store.state.index.policy = policy
    session = store.session(
        CacheSpec.opaque("trace", page_tokens=PAGE_TOKENS, page_bytes=PAGE_BYTES)
    )
    hits, most = 0, 0
    for request in range(trace.requests):
        path = trace.blocks[trace.starts[request] : trace.starts[request + 1]]
        clock.now = 1.0 + float(trace.times_s[request] - trace.times_s[0])
        hits += one_request(session, tokens_of(path))
        if request % 100 == 0:
            most = max(most, len(store.state.index))
    store.check()
    counters = store.stats().counters
    store.close()
    return {
        "hits": hits / trace.references,
        "pages_most": most,
        "staged": counters["pages_staged"],
        "written": counters["disk_pages_written"],
        "evicted": counters["host_evictions"] + counters["disk_evictions"],
        "refused": counters["reservations_refused"],
    }


def one_request(session: Session, tokens: np.ndarray) -> int:
    """Look up, read what is there, store the rest; pages hit."""
    with session.match(tokens) as found:
        hit = found.pages
        if found.host_pages < hit:
            found.stage(10.0)
        while True:
            with session.reserve(tokens, deadline_s=5.0) as run:
                if not run.count:
                    break
                for page, view in enumerate(run.views()):
                    view[:8] = int(page).to_bytes(8, "little")
                run.commit()
    return hit


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--capacity", type=int, default=4000, help="pages")
    parser.add_argument("--policy", choices=POLICIES, action="append")
    parser.add_argument("--memory", action="store_true", help="no disk")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    trace = read_trace(options.trace)
    if options.requests:
        trace = trace.head(options.requests)
    worst, results = 0.0, {}
    for name in options.policy or ["lru", "csl"]:
        began = time.perf_counter()
        with tempfile.TemporaryDirectory() as place:
            directory = None if options.memory else Path(place) / "store"
            real = hits_of_store(trace, name, options.capacity, directory)
        size = int(real["pages_most"])
        said = replay(trace, make_policy(name, size), size, ahead_part=64).block_ratio
        off = real["hits"] - said
        worst = max(worst, abs(off))
        results[name] = real | {"simulated": said, "off": off}
        if not options.json:
            print(
                f"{name}: store {real['hits']:.4f}, simulator {said:.4f} at {size} pages, off "
                f"{off:+.4f}; {real['written']:.0f} written, {real['staged']:.0f} staged, "
                f"{real['evicted']:.0f} evicted; {time.perf_counter() - began:.0f} s"
            )
    if options.json:
        line = {"machine": machine(), "date": datetime.date.today().isoformat()}
        print(json.dumps(line | {"trace": trace.name, "results": results}))
    return 0 if worst <= OFF_BY_MAX else 1


if __name__ == "__main__":
    raise SystemExit(main())
