"""A circuit breaker: after some failures in a row, don't ask until there is a sign of life.

Pure: it has no clock of its own. Closed, every call is made. Open, none is, until the server has
shown elsewhere that it lives, and not before a pause that doubles each time the breaker opens again
without a success in between.
"""

from __future__ import annotations

import threading

FAILURES_MAX = 3
PAUSE_S_MIN = 0.25
PAUSE_S_MAX = 2.0


class Breaker:
    """Guards one server. Thread-safe."""

    def __init__(
        self,
        *,
        failures_max: int = FAILURES_MAX,
        pause_s_min: float = PAUSE_S_MIN,
        pause_s_max: float = PAUSE_S_MAX,
    ) -> None:
        self._failures_max = failures_max
        self._pause_s_min = pause_s_min
        self._pause_s_max = pause_s_max
        self._lock = threading.Lock()
        self._failures = 0
        self._pause_s = pause_s_min
        self._pause_until = 0.0
        self.is_open = False
        self.times_opened = 0

    def succeeded(self) -> bool:
        """A call was answered; True if that closed the breaker."""
        if not self._failures and not self.is_open:
            return False
        with self._lock:
            was_open, self.is_open = self.is_open, False
            self._failures = 0
            self._pause_s = self._pause_s_min
            return was_open

    def failed(self, now: float) -> bool:
        """A call was not answered in time; True if that opened the breaker."""
        with self._lock:
            self._failures += 1
            if self.is_open or self._failures < self._failures_max:
                return False
            self.is_open = True
            self.times_opened += 1
            self._pause_until = now + self._pause_s
            self._pause_s = min(2 * self._pause_s, self._pause_s_max)
            return True

    def alive(self, now: float) -> bool:
        """The server gave a sign of life, though not to a call; True if that closed the breaker.

        One more failure opens it again, for longer.
        """
        if not self.is_open:
            return False
        with self._lock:
            if not self.is_open or now < self._pause_until:
                return False
            self.is_open = False
            self._failures = self._failures_max - 1
            return True
