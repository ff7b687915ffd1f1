"""The store's policy at work: told by the index what is used, asked by the evictor what is coldest.

It lives under the store's lock. Policies count time from EPOCH_S before the store's clock began, so
that times of pages from before a restart are positive too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.tiers.eviction_hints import HintedPolicy
from kvstore.tiers.policies import make_policy

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

    from kvstore.tiers.eviction import Ids, Keys, Scores

EPOCH_S = 1e9
# What is remembered of pages that have gone is for so many pages at least.
PAGES_MIN = 4096


class PagePolicy:
    """Satisfies prefix_index.index.PageUses."""

    def __init__(
        self, name: str, pages: int, clock: Callable[[], float], objective: str = "hits"
    ) -> None:
        """A policy for a store of about so many pages."""
        self._policy = HintedPolicy(make_policy(name, max(pages, PAGES_MIN), objective))
        self._clock = clock
        self.hints = 0  # given so far: a ranking from before one is void

    @property
    def name(self) -> str:
        return self._policy.name

    def inserted(self, ids: Ids, keys: Keys, depth: int, page_tokens: int, now: float) -> None:
        self._policy.insert(ids, keys, depth, page_tokens, now + EPOCH_S)

    def touched(self, ids: Ids, now: float) -> None:
        self._policy.touch(ids, now + EPOCH_S)

    def removed(self, ids: Ids, keys: Keys) -> None:
        self._policy.remove(ids, keys, self._clock() + EPOCH_S)

    def restored(self, ids: Ids, last_use: Scores) -> None:
        """Pages of the catalog are in the index."""
        self._policy.restore(ids, last_use + EPOCH_S)

    def scores(self, ids: Ids, tier: int) -> NDArray[np.float64]:
        """What each page is worth to a tier now."""
        return self._policy.scores(ids, self._clock() + EPOCH_S, tier)

    def left(self, ids: Ids, tier: int) -> None:
        """These are about to leave a tier because they were worth least."""
        if len(ids):
            self._policy.left(ids, self._clock() + EPOCH_S, tier)

    def hint(
        self,
        ids: Ids,
        *,
        next_use_s: float | None = None,
        priority: int | None = None,
        done: bool = False,
    ) -> None:
        """What a caller knows of pages: see Session.hint."""
        if not len(ids):
            return
        self.hints += 1
        if priority is not None:
            self._policy.prefer(ids, priority)
        if done:
            self._policy.dismiss(ids)
        elif next_use_s is not None:
            self._policy.expect(ids, self._clock() + EPOCH_S + next_use_s)
