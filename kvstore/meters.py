"""What is counted on the way of a request: who asked, what hit from where, how long it took.

Plain numbers that only grow, changed under the store's lock; metrics.py turns them into the
exposition when somebody looks. Must not be here: clocks, prometheus_client, names of metrics.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from kvstore.prefix_index.page_table import DISK, HOST, TIERS

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Upper bounds of histograms, in seconds; what is longer counts in the last, endless one.
BOUNDS_S = (
    *(25e-6, 50e-6, 100e-6, 250e-6, 500e-6, 1e-3, 2.5e-3, 5e-3, 10e-3, 25e-3, 50e-3),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 10.0),
)
TENANTS_MAX = 256
ENGINES_MAX = 16  # of one tenant; more are counted as OTHER
OTHER = "other"


class Histogram:
    """How often something took how long."""

    __slots__ = ("counts", "sum_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_S) + 1)
        self.sum_s = 0.0

    def observe(self, seconds: float) -> None:
        """Count one."""
        self.counts[bisect_left(BOUNDS_S, seconds)] += 1
        self.sum_s += seconds

    def copy(self) -> Histogram:
        """As it is now."""
        made = Histogram()
        made.counts, made.sum_s = self.counts.copy(), self.sum_s
        return made


@dataclass(slots=True)
class Traffic:
    """What one engine of one tenant asked for and got."""

    requests: int = 0
    hits: int = 0  # requests that found a page at least
    tokens: int = 0  # of all requests
    hit_tokens: list[int] = field(default_factory=lambda: [0] * TIERS)  # by the fastest tier
    stored_pages: int = 0
    prefill_saved_s: float = 0.0  # as the engine's adapter says

    def hit(self, states: NDArray[np.uint8], page_tokens: int) -> None:
        """Count pages that were found, by their state bytes."""
        count = len(states)
        in_host = int(np.count_nonzero(states & (1 << HOST)))
        if in_host == count:
            self.hit_tokens[HOST] += count * page_tokens
            return
        local = int(np.count_nonzero(states & (1 << HOST | 1 << DISK)))
        for tier, pages in enumerate((in_host, local - in_host, count - local)):
            self.hit_tokens[tier] += pages * page_tokens


class Meters:
    """All that is counted besides the store's plain counters."""

    def __init__(self) -> None:
        self.lookup = Histogram()
        self.stage = Histogram()
        self.load = Histogram()
        self.store = Histogram()
        self.moved: dict[tuple[str, str], int] = {}  # bytes, by where from and where to
        self._traffic: dict[str, dict[str, Traffic]] = {}

    def of(self, tenant: str, engine: str) -> Traffic:
        """The row of a tenant's engine. So many tenants and engines have their own; the rest of
        a tenant's engines share one, and the rest of the tenants another."""
        if tenant not in self._traffic and len(self._traffic) >= TENANTS_MAX:
            tenant = engine = OTHER
        engines = self._traffic.setdefault(tenant, {})
        if engine not in engines and len(engines) >= ENGINES_MAX:
            engine = OTHER
        return engines.setdefault(engine, Traffic())

    def move(self, source: str, target: str, size: int) -> None:
        """Count bytes that went from one place to another."""
        self.moved[source, target] = self.moved.get((source, target), 0) + size

    def traffic(self, tenant: str | None = None) -> list[tuple[str, str, Traffic]]:
        """Tenant, engine and row of all that there are, or of one tenant.

        The row that tenants share is nobody's own, not even of one with that name.
        """
        if tenant == OTHER:
            return []
        return [
            (owner, engine, row)
            for owner, engines in self._traffic.items()
            if tenant in (None, owner)
            for engine, row in engines.items()
        ]
