"""The last line of a crash loop, for people or as JSON, and its exit status."""

from __future__ import annotations

import json
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from crash_loop import CrashLoop


def print_summary(
    name: str, loops: Sequence[CrashLoop], seed: int, seconds: float, as_json: bool
) -> int:
    """What came of the loops; 1 when anything was bad."""
    bad: Counter[str] = Counter()
    ends: Counter[str] = Counter()
    for loop in loops:
        bad.update(loop.tally.bad)
        ends.update(loop.tally.ends)
    facts: dict[str, Any] = {
        "cycles": sum(loop.tally.cycles for loop in loops),
        "acked_pages": sum(loop.acked_pages for loop in loops),
        "verified_pages": sum(loop.tally.verified for loop in loops),
        "audited_slots": sum(loop.tally.audited for loop in loops),
        "wrong": bad["wrong"],
        "lost": bad["lost"],
        "unsound": bad["unsound"],
        "revived": bad["revived"],
        "errors": bad["error"],
        "seconds": round(seconds, 1),
        "seed": seed,
    }
    if as_json:
        sys.stdout.write(json.dumps({"bench": name, **facts, "ends": dict(ends)}) + "\n")
    else:
        endings = ", ".join(f"{count} {kind}" for kind, count in ends.most_common())
        sys.stdout.write(f"lives ended: {endings}\n")
        words = ", ".join(f"{key} {value}" for key, value in facts.items())
        sys.stdout.write(f"{name}: {words}\n")
    if facts["cycles"] >= 10 and facts["acked_pages"] and not facts["audited_slots"]:
        sys.stderr.write("the audit never saw a record: it looks in the wrong place\n")
        return 1
    return 1 if bad.total() else 0


def print_mutant(mutant: str, loops: Sequence[CrashLoop], *, as_json: bool) -> int:
    """By which variants a mutant was caught and how soon; 0 when by all of them."""
    rows = [
        {
            "variant": loop.variant,
            "caught": bool(loop.tally.bad_total),
            "after_cycles": loop.tally.first_bad_cycle or loop.tally.cycles,
            "bad": dict(loop.tally.bad),
        }
        for loop in loops
    ]
    if as_json:
        sys.stdout.write(json.dumps({"mutant": mutant, "variants": rows}) + "\n")
    else:
        for row in rows:
            found = ", ".join(f"{count} {kind}" for kind, count in row["bad"].items())
            verdict = f"caught in cycle {row['after_cycles']}: {found}"
            if not row["caught"]:
                verdict = f"NOT caught in {row['after_cycles']} cycles"
            sys.stdout.write(f"{mutant}: {row['variant']}: {verdict}\n")
    return 0 if all(row["caught"] for row in rows) else 1
