"""How long nothing is saved after the store refused; the words of it, also for cut look-ups.

Most refusals pass within seconds (the disk is behind, all pages are in use); some last. Pure: time
comes with each call.
"""

from __future__ import annotations

IN_PROGRESS, LIMIT, PRESENT = "in progress", "limit", "present"  # no refusals
HOLD_S_MIN, HOLD_S_MAX = 0.25, 4.0  # after a refusal
# A store that has had no room for so long will not have any soon; some refusals last anyway.
REFUSED_S_MAX = 5.0
LASTING = ("refused", "quota", "unreachable")  # how their reasons begin
# Why the store gives out less of a prompt than it has, in words that name what can be changed.
CUT = {
    "lease limit": "requests that wait or load keep a quarter of the store's memory from moving, "
    "and that is the limit: raise the server's host_bytes, or let fewer requests wait here",
    "lease limit of the tenant": "this tenant's engines keep all of the memory from moving that is "
    "its share: raise the server's host_bytes or the tenant's share, or let fewer requests wait",
}


class Refusals:
    """Of one store, as one engine sees them."""

    def __init__(self) -> None:
        self.count = 0
        self.reason = ""  # the last one's
        self._until = -1.0
        self._hold_s = HOLD_S_MIN
        self._since = -1.0  # nothing but refusals came

    def refused(self, reason: str, now: float) -> None:
        """The store has no room: ask for nothing for a while, longer each time."""
        self.count += 1
        self.reason = reason
        self._until = now + self._hold_s
        self._hold_s = min(2 * self._hold_s, HOLD_S_MAX)
        if self._since < 0:
            self._since = now

    def given(self) -> None:
        """The store gave room."""
        self._hold_s, self._since, self._until = HOLD_S_MIN, -1.0, -1.0

    def holds(self, now: float) -> bool:
        """Whether not to ask now."""
        return now < self._until

    def lasts(self, now: float) -> bool:
        """Whether there is no sense in waiting for the store."""
        waited_s = now - self._since if self._since >= 0 else 0.0
        return self.holds(now) and (waited_s > REFUSED_S_MAX or self.reason.startswith(LASTING))
