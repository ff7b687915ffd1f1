"""Calls a second of each tenant: a bucket that refills steadily and holds one second's worth.

What a tenant did not use for a second is gone; a burst is at most one second's calls.
"""

from __future__ import annotations

import threading
from time import monotonic
from typing import TYPE_CHECKING

from kvstore.errors import CapacityError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["CallBudgets", "TooManyCalls"]


class TooManyCalls(CapacityError):
    """The tenant is over its calls a second; `retry_after_s` from now one more would do."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class CallBudgets:
    """One bucket a tenant that has a limit. As many buckets as the tenant file has tenants."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._buckets: dict[str, tuple[float, float]] = {}  # calls left, and when that was true

    def charge(self, tenant: str, calls_per_s_max: int | None) -> None:
        """Take one call from the tenant's bucket; TooManyCalls if it is empty."""
        if calls_per_s_max is None:
            return
        with self._lock:
            now = self._clock()
            left, then = self._buckets.get(tenant, (float(calls_per_s_max), now))
            left = min(calls_per_s_max, left + (now - then) * calls_per_s_max)
            if left < 1.0:
                wait_s = (1.0 - left) / calls_per_s_max if calls_per_s_max else 60.0
                raise TooManyCalls(
                    f"tenant {tenant}: more than {calls_per_s_max} calls a second; try again in "
                    f"{wait_s:.3f} s",
                    wait_s,
                )
            self._buckets[tenant] = (left - 1.0, now)
