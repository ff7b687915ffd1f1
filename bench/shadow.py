"""What `auto` says of policies and sizes, beside the exact replay, and what saying it costs.

The curves of a run through a trace are compared with exact replays of each policy at each size,
counted from the same request on. Cost is that of the shadows alone, in time of one core.

    python bench/shadow.py TRACE                          at 5 % of unique blocks
    python bench/shadow.py --workload agents --capacity 2%
    python bench/shadow.py TRACE --json                   one line
"""

from __future__ import annotations

import argparse
import datetime
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

from paired import machine
from workloads import NAMES, make_trace

from kvstore.cli_replay import parse_sizes
from kvstore.simulation import replay
from kvstore.tiers.eviction_auto import AutoPolicy
from kvstore.tiers.policies import CANDIDATES, make_policy
from kvstore.trace import Trace, read_trace

if TYPE_CHECKING:
    from collections.abc import Callable


class Stopwatch:
    """Adds up the time of one core that calls of a function take."""

    def __init__(self, function: Callable[..., object]) -> None:
        self._function = function
        self.seconds = 0.0

    def __call__(self, *arguments: object) -> object:
        began = time.thread_time()
        try:
            return self._function(*arguments)
        finally:
            self.seconds += time.thread_time() - began


def measure(trace: Trace, size: int) -> dict[str, object]:
    """Run auto once, and every policy at every size that it speaks of."""
    policy = make_policy("auto", size)
    assert isinstance(policy, AutoPolicy)
    watch = Stopwatch(policy.shadows.run)
    policy.shadows.run = watch  # type: ignore[assignment]
    whole = replay(trace, policy, size, ahead_part=64)
    since_s = policy.shadows.since - 1.0
    errors, rows = [], []
    for name in CANDIDATES:
        for point in policy.report.curves.get(name, ()):
            pages = max(1, round(size * point.factor))
            exact = replay(
                trace, make_policy(name, pages), pages, warmup_s=since_s, ahead_part=64
            ).block_ratio
            errors.append(point.hit_ratio - exact)
            rows.append([name, point.factor, round(point.hit_ratio, 4), round(exact, 4)])
    return {
        "capacity": size,
        "hits": whole.block_ratio,
        "following": policy.following,
        "switches": policy.report.switches,
        "sampled_part": policy.report.sampled_part,
        "shadow_us_per_reference": 1e6 * watch.seconds / trace.references,
        "shadow_us_per_request": 1e6 * watch.seconds / trace.requests,
        "error_max": max(map(abs, errors), default=0.0),
        "error_mean": sum(map(abs, errors)) / max(1, len(errors)),
        "rows": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", type=Path, nargs="?")
    parser.add_argument("--workload", choices=NAMES)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--capacity", default="5%")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if (options.trace is None) == (options.workload is None):
        parser.error("a trace or a --workload is needed")
    made = options.workload and make_trace(options.workload, options.seed)
    trace = made or read_trace(options.trace)
    found = [measure(trace, size) for size in parse_sizes(options.capacity, trace.unique)]
    if options.json:
        line = {"machine": machine(), "date": datetime.date.today().isoformat()}
        print(json.dumps(line | {"trace": trace.name, "results": found}))
        return
    for each in found:
        print(
            f"{each['capacity']:,} blocks: hits {each['hits']:.4f}, follows {each['following']} "
            f"after {each['switches']} changes; a sample of {each['sampled_part']:.4f}; shadows "
            f"{each['shadow_us_per_reference']:.1f} us a reference, "
            f"{each['shadow_us_per_request']:.0f} a request; curves off by "
            f"{each['error_mean']:.3f} on average, {each['error_max']:.3f} at most"
        )
        for row in each["rows"]:
            print("   {:5} x {:3}  said {:.4f}  exact {:.4f}".format(*row))


if __name__ == "__main__":
    main()
