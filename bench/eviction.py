"""All policies on one trace: those that the store ships, comparators, and the bound.

python bench/eviction.py TRACE                           at 2, 5, 10, 20 % of unique blocks
python bench/eviction.py TRACE --capacity 1000,10%       other sizes
python bench/eviction.py TRACE --policy csl --policy lhd
python bench/eviction.py --workload agents               made from a seed, see workloads.py
python bench/eviction.py TRACE --json                    one line
"""

from __future__ import annotations

import argparse
import datetime
import json
from pathlib import Path
from typing import TYPE_CHECKING

from paired import machine
from policies.fifo import S3FifoPolicy, SievePolicy
from policies.frequency import LfuDaPolicy, PgdsfPolicy
from policies.learned import LhdPolicy, WildPolicy
from policies.recency import Lru2Policy, SlruPolicy
from workloads import NAMES, make_trace

from kvstore.belady import replay_belady
from kvstore.cli_replay import parse_sizes
from kvstore.simulation import Hits, replay
from kvstore.tiers.policies import OBJECTIVES, POLICIES, make_policy
from kvstore.trace import Trace, read_trace

if TYPE_CHECKING:
    from policies.columns import ColumnPolicy

COMPARATORS: dict[str, type[ColumnPolicy]] = {
    each.name: each
    for each in (
        LfuDaPolicy,
        PgdsfPolicy,
        Lru2Policy,
        SlruPolicy,
        S3FifoPolicy,
        SievePolicy,
        LhdPolicy,
        WildPolicy,
    )
}
ALL = (*POLICIES, *COMPARATORS, "belady")


def run(trace: Trace, name: str, size: int, objective: str) -> Hits:
    if name == "belady":
        return replay_belady(trace, size)
    shipped = name not in COMPARATORS
    made = make_policy(name, size, objective) if shipped else COMPARATORS[name](size)
    return replay(trace, made, size)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", type=Path, nargs="?")
    parser.add_argument("--workload", choices=NAMES)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--requests", type=int, default=0, help="the first only; 0: all")
    parser.add_argument("--objective", choices=OBJECTIVES, default="hits")
    parser.add_argument("--capacity", default="2%,5%,10%,20%")
    parser.add_argument("--policy", choices=ALL, action="append")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if (options.trace is None) == (options.workload is None):
        parser.error("a trace or a --workload is needed")
    if options.workload:
        trace = make_trace(options.workload, options.seed, options.requests)
    else:
        trace = read_trace(options.trace)
        trace = trace.head(options.requests or trace.requests)
    sizes = parse_sizes(options.capacity, trace.unique)
    found: dict[str, list[Hits]] = {}
    for name in options.policy or ALL:
        found[name] = [run(trace, name, size, options.objective) for size in sizes]
        if not options.json:
            ratios = "  ".join(f"{each.block_ratio:.4f}" for each in found[name])
            speed = min(each.references_per_s for each in found[name])
            print(f"{name:8} {ratios}  {speed:9,.0f} references/s at least", flush=True)
    if options.json:
        line = {"machine": machine(), "date": datetime.date.today().isoformat()}
        ratios = {
            weight: {
                name: [getattr(each, f"{weight}_ratio") for each in hits]
                for name, hits in found.items()
            }
            for weight in ("block", "token", "compute", "ttft")
        }
        speeds = {name: min(each.references_per_s for each in hits) for name, hits in found.items()}
        print(
            json.dumps(
                line | {"trace": trace.name, "capacity": sizes, "references_per_s": speeds} | ratios
            )
        )


if __name__ == "__main__":
    main()
