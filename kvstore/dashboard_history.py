"""What a dashboard looks back on: readings of an hour every few seconds, of a day every minute.

Bounded, in memory, gone with the process. Pure: readings and their times come from the caller.
"""

from __future__ import annotations

from collections import deque
from dataclasses import astuple, dataclass, fields

EVERY_S = 5.0
FINE_MAX = 720  # readings: an hour
COARSE_OF = 12  # one of so many is kept for longer
COARSE_MAX = 1440  # a day


@dataclass(frozen=True, slots=True)
class Reading:
    """Counters since the store was opened, and what there is now."""

    time_s: float  # Unix seconds
    requests: int
    hits: int
    tokens: int
    host_hit_tokens: int
    disk_hit_tokens: int
    redis_hit_tokens: int
    stored_pages: int
    saved_s: float
    left_pages: int = 0
    missed_pages: int = 0
    pages: int = 0
    host_bytes: int = 0
    disk_bytes: int = 0
    redis_bytes: int = 0


COLUMNS = tuple(each.name for each in fields(Reading))


class History:
    """Readings in order of time. Thread-safe by being told by one thread and copied by others."""

    def __init__(self) -> None:
        self._fine: deque[Reading] = deque(maxlen=FINE_MAX)
        self._coarse: deque[Reading] = deque(maxlen=COARSE_MAX)
        self._count = 0

    def add(self, reading: Reading) -> None:
        """The newest."""
        if self._count % COARSE_OF == 0:
            self._coarse.append(reading)
        self._count += 1
        self._fine.append(reading)

    def rows(self, after_s: float = 0.0) -> list[tuple[float, ...]]:
        """Readings later than a time as COLUMNS, oldest first; old ones a minute apart."""
        fine, coarse = list(self._fine), list(self._coarse)
        first = fine[0].time_s if fine else 0.0
        kept = [each for each in coarse if each.time_s < first] + fine
        return [astuple(each) for each in kept if each.time_s > after_s]
