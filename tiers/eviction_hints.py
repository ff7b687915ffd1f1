"""What callers know beats what statistics say: hints laid over the scores of any policy.

Bands, coldest first: pages that won't come back; by priority, low to high; pages whose next use is
known, the later the colder. Within a band the policy decides. A band is a power of two, by which
scores are multiplied, so their order is kept exactly. A next use that has passed by GRACE_S is
forgotten, a touch ends "won't come back", and both end with the page.
"""

from __future__ import annotations

import numpy as np

from kvstore.tiers.eviction import PAGES_FIRST, Ids, Keys, Policy, Run, Scores, Study, grown

PRIORITY_MIN, PRIORITY_MAX = -2, 2
GRACE_S = 60.0
_BAND = 2.0**128
_DONE = 2.0**-600
_EXPECTED = 2.0**600
_BANDS = _BAND ** np.arange(PRIORITY_MIN, PRIORITY_MAX + 1)
_NEVER = np.inf


class HintedPolicy(Policy):
    """A policy, and the hints that were given about its pages."""

    def __init__(self, inner: Policy) -> None:
        self.inner = inner
        self.name = inner.name
        self.moves = True  # hints come between two touches
        self._hinted = False  # whether any hint was given yet
        self._next = np.full(PAGES_FIRST, _NEVER)
        self._priority = np.zeros(PAGES_FIRST, np.int8)
        self._done = np.zeros(PAGES_FIRST, bool)

    def expect(self, pages: Ids, next_use: Scores | float) -> None:
        """They are asked for again at that time; infinity: nobody knows."""
        self._make_room(pages)
        self._next[pages] = next_use

    def expected(self, pages: Ids) -> Scores:
        """The next use of each page as hinted; infinity where nothing is known."""
        self._make_room(pages)
        found: Scores = self._next[pages]
        return found

    def prefer(self, pages: Ids, priority: int) -> None:
        """They leave before (below 0) or after (above 0) pages of priority 0."""
        self._make_room(pages)
        self._priority[pages] = min(max(priority, PRIORITY_MIN), PRIORITY_MAX)

    def dismiss(self, pages: Ids) -> None:
        """They won't come back: first to leave, until somebody uses them after all."""
        self._make_room(pages)
        self._done[pages] = True
        self._next[pages] = _NEVER

    def insert(self, pages: Ids, keys: Keys, run: Run, now: float) -> None:
        self.inner.insert(pages, keys, run, now)
        self._forget(pages)

    def restore(self, pages: Ids, keys: Keys, run: Run, last: Scores) -> None:
        self.inner.restore(pages, keys, run, last)
        self._forget(pages)

    def touch(self, pages: Ids, now: float) -> None:
        self.inner.touch(pages, now)
        if self._hinted:
            self._make_room(pages)
            self._done[pages] = False
            self._next[pages] = _NEVER

    def scores(self, pages: Ids, now: float, tier: int = 0) -> Scores:
        found = self.inner.scores(pages, now, tier)
        if not self._hinted or not len(pages):
            return found
        self._make_room(pages)
        found = found * _BANDS[self._priority[pages] - PRIORITY_MIN]
        found[self._done[pages]] *= _DONE
        wait_s = self._next[pages] - now
        known = np.isfinite(wait_s) & (wait_s > -GRACE_S)
        found[known] = _EXPECTED / (1.0 + np.maximum(wait_s[known], 0.0))
        return found

    def left(self, pages: Ids, now: float, tier: int = 0) -> None:
        self.inner.left(pages, now, tier)

    def remove(self, pages: Ids, keys: Keys, now: float) -> None:
        self.inner.remove(pages, keys, now)
        self._forget(pages)

    def study(self, now: float) -> Study | None:
        return self.inner.study(now)

    def _forget(self, pages: Ids) -> None:
        if self._hinted:
            self._make_room(pages)
            self._next[pages] = _NEVER
            self._priority[pages] = 0
            self._done[pages] = False

    def _make_room(self, pages: Ids) -> None:
        self._hinted = True
        known = len(self._next)
        self._next = grown(self._next, pages)
        self._next[known:] = _NEVER
        self._priority = grown(self._priority, pages)
        self._done = grown(self._done, pages)
