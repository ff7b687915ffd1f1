"""Which way bytes take between memory and disk: straight, or through contiguous bounce memory.

The arena is shared memory of 4 KiB pages, scattered over the machine. A drive that takes long lists
of addresses does not mind; a virtual one does: measured on virtio, O_DIRECT from and to huge pages
is 2.3 times as fast as from and to the arena, at the price of one copy. Nothing tells beforehand
which kind a disk is, so both ways are timed, in large batches only, and the faster is taken; the
other is tried again from time to time. A pure decision: the times come from the caller.
"""

from __future__ import annotations

import threading
from enum import IntEnum

TRIAL_EVERY = 64  # large batches until the slower way is tried again
RUN_BYTES_MIN = 1 << 20  # runs that are timed
RUNS_MIN = 8  # of a batch that is timed: else the disk is not kept busy
BOUNCE_GAIN_MIN = 1.15  # a copy must pay for the processor time that it takes
WEIGHT_OF_NEW = 0.1


class Route(IntEnum):
    """The two ways."""

    STRAIGHT = 0
    BOUNCE = 1


class RouteChooser:
    """Remembers how fast each way was; one for reads, one for writes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seconds_a_byte: list[float | None] = [None, None]
        self._batches = 0

    @property
    def best(self) -> Route:
        """The way for batches that are too small for a trial."""
        straight, bounce = self._seconds_a_byte
        if straight is None or bounce is None:
            return Route.STRAIGHT
        return Route.BOUNCE if bounce * BOUNCE_GAIN_MIN < straight else Route.STRAIGHT

    def choose(self, runs: int, run_bytes: int) -> tuple[Route, bool]:
        """The way for a batch of that many runs, and whether to note its times."""
        if runs < RUNS_MIN or run_bytes < RUN_BYTES_MIN:
            return self.best, False
        with self._lock:
            self._batches += 1
            for route in Route:
                if self._seconds_a_byte[route] is None:
                    return route, True
            best = self.best
            if self._batches % TRIAL_EVERY == 0:
                return Route(1 - best), True
            return best, True

    def note(self, route: Route, run_bytes: int, seconds: float) -> None:
        """One run of a batch took this long."""
        sample = seconds / run_bytes
        with self._lock:
            known = self._seconds_a_byte[route]
            mean = sample if known is None else known + (sample - known) * WEIGHT_OF_NEW
            self._seconds_a_byte[route] = mean
