"""Ratios of interleaved pairs: their median with a 90 % interval, and how benches report them.

Neighbouring runs share the machine's state of that moment (clock, other tenants), so a ratio of
two runs side by side is far steadier than a ratio of two averages.
"""

from __future__ import annotations

import datetime
import json
import math
import os
import platform
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

CONFIDENCE = 0.90


@dataclass(frozen=True, slots=True)
class PairedRatio:
    """The median of `pairs` ratios; the true median lies in [low, high] with 90 % confidence."""

    median: float
    low: float
    high: float
    pairs: int

    def verdict(self, budget: float, *, at_least: bool) -> str:
        """Whether the budget is kept; "not resolved" when the interval spans it."""
        if self.low <= budget <= self.high:
            return "not resolved, run again"
        return "kept" if (self.median > budget) == at_least else "MISSED"


def paired_ratio(limits: Sequence[float], measured: Sequence[float]) -> PairedRatio:
    """Seconds of the limit over seconds of what is measured, pair by pair: 1.0 is as fast.

    The interval is of order statistics: the rank r such that at most 5 % of samples of a binomial
    with p = 1/2 lie below it. No distribution is assumed.
    """
    ratios = sorted(a / b for a, b in zip(limits, measured, strict=True))
    count = len(ratios)
    rank, below = 0, 0.5**count
    while rank + 1 < (count + 1) // 2:
        below += math.comb(count, rank + 1) * 0.5**count
        if below > (1 - CONFIDENCE) / 2:
            break
        rank += 1
    middle = (ratios[(count - 1) // 2] + ratios[count // 2]) / 2
    return PairedRatio(middle, ratios[rank], ratios[count - 1 - rank], count)


def machine() -> str:
    """What a number was measured on, in a few words."""
    model = platform.processor() or platform.machine()
    with open("/proc/cpuinfo") as lines:
        names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    cpus = len(os.sched_getaffinity(0))
    return f"{cpus} x {names[0] if names else model}, {memory_gib:.0f} GiB, {platform.system()}"


def json_line(results: dict[str, PairedRatio], seed: int, **more: object) -> str:
    """One line: a number a key, its interval beside it, and where and when."""
    line: dict[str, object] = {key: round(ratio.median, 4) for key, ratio in results.items()}
    line["spread"] = {k: [round(r.low, 4), round(r.high, 4)] for k, r in results.items()}
    line |= {"machine": machine(), "date": datetime.date.today().isoformat(), "seed": seed}
    return json.dumps(line | more)
