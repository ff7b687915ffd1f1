"""All policies on one trace: those that the store ships, comparators, and the bound.

python bench/eviction.py TRACE                           at 2, 5, 10, 20 % of unique blocks
python bench/eviction.py TRACE --capacity 1000,10%       other sizes
python bench/eviction.py TRACE --policy csl --policy lhd
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

from kvstore.belady import replay_belady
from kvstore.cli_simulate import parse_sizes
from kvstore.simulation import Hits, replay
from kvstore.tiers.policies import POLICIES, make_policy
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


def run(trace: Trace, name: str, size: int) -> Hits:
    if name == "belady":
        return replay_belady(trace, size)
    made = COMPARATORS[name](size) if name in COMPARATORS else make_policy(name, size)
    return replay(trace, made, size)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--capacity", default="2%,5%,10%,20%")
    parser.add_argument("--policy", choices=ALL, action="append")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    trace = read_trace(options.trace)
    sizes = parse_sizes(options.capacity, trace.unique)
    found: dict[str, list[Hits]] = {}
    for name in options.policy or ALL:
        found[name] = [run(trace, name, size) for size in sizes]
        if not options.json:
            ratios = "  ".join(f"{each.block_ratio:.4f}" for each in found[name])
            speed = min(each.references_per_s for each in found[name])
            print(f"{name:8} {ratios}  {speed:9,.0f} references/s at least", flush=True)
    if options.json:
        line = {"machine": machine(), "date": datetime.date.today().isoformat()}
        ratios_of = {name: [each.block_ratio for each in hits] for name, hits in found.items()}
        print(json.dumps(line | {"trace": trace.name, "capacity": sizes, "block": ratios_of}))


if __name__ == "__main__":
    main()
