"""The store's policy at work: told by the index what is used, asked by the evictor what is coldest.

It lives under the store's lock. Policies count time from EPOCH_S before the store's clock began, so
that times of pages from before a restart are positive too.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from kvstore.prefix_index.page_table import HOST
from kvstore.tiers.eviction import Run
from kvstore.tiers.eviction_auto import AutoPolicy
from kvstore.tiers.eviction_hints import HintedPolicy
from kvstore.tiers.eviction_split import SplitPolicy
from kvstore.tiers.policies import EVEN_TOKENS, make_policy

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

    from kvstore.prefix_index.page_table import PageTable
    from kvstore.tiers.eviction import Ids, Keys, Study

EPOCH_S = 1e9
# What is remembered of pages that have gone is for so many pages at least.
PAGES_MIN = 4096
SAME = "same"  # one policy decides for memory and disk
STUDY_SHARE_MAX = 0.02  # of one core
_SHARE_WEIGHT = 0.1  # of the last study


class PagePolicy:
    """Satisfies prefix_index.index.PageUses."""

    def __init__(
        self,
        name: str,
        pages: int,
        clock: Callable[[], float],
        objective: str = "hits",
        even_tokens: float = EVEN_TOKENS,
        *,
        host_policy: str = SAME,
        host_pages: int = 0,
    ) -> None:
        """A policy for a store of about so many pages; of them memory, where it has its own."""
        made = make_policy(name, max(pages, PAGES_MIN), objective, even_tokens)
        self._auto = made if isinstance(made, AutoPolicy) else None
        self._objective = objective
        self._studied = clock()
        self._share = 0.0  # of one core, that studies took lately
        self._split: SplitPolicy | None = None
        self._host_policy = host_policy
        if host_policy != SAME:
            of_host = make_policy(host_policy, max(host_pages, PAGES_MIN), objective, even_tokens)
            self._split = SplitPolicy(of_host, made, HOST)
        self._policy = HintedPolicy(self._split or made)
        self._clock = clock
        self.hints = 0  # given so far: a ranking from before one is void

    @property
    def name(self) -> str:
        return self._policy.name

    def inserted(
        self,
        ids: Ids,
        keys: Keys,
        parent: int,
        depth: int,
        page_tokens: int,
        payload_bytes: int,
        now: float,
        token_s: float = 0.0,
    ) -> None:
        pace_s = token_s if self._objective == "compute" else 0.0
        run = Run.of(ids, parent, depth, page_tokens, payload_bytes, pace_s)
        self._policy.insert(ids, keys, run, now + EPOCH_S)

    def touched(self, ids: Ids, now: float) -> None:
        self._policy.touch(ids, now + EPOCH_S)

    def moved(self, ids: Ids, keys: Keys, tier: int, *, there: bool) -> None:
        """Pages are in a tier from now on, or not any more."""
        if self._split is not None and tier == HOST and len(ids):
            now = self._clock() + EPOCH_S
            (self._split.entered if there else self._split.exited)(ids, keys, now)

    def removed(self, ids: Ids, keys: Keys) -> None:
        self._policy.remove(ids, keys, self._clock() + EPOCH_S)

    def restored(self, ids: Ids, table: PageTable, page_tokens: int) -> None:
        """Pages of the catalog are in the index: parents before children, of one size."""
        if len(ids):
            size = int(table.payload_bytes[ids[0]])
            run = Run(table.depth[ids], table.parent[ids], page_tokens, page_tokens, size)
            self._policy.restore(ids, table.key[ids, 0], run, table.last_use[ids] + EPOCH_S)

    def study(self) -> Study | None:
        """What the policy has to think about without the lock; see tiers.eviction.Study."""
        return self._policy.study(self._clock() + EPOCH_S)

    def studied(self, core_s: float) -> None:
        """A study took so much time of a core: shadows that take too much get less to look at."""
        now = self._clock()
        took = core_s / max(now - self._studied, 1e-3)
        self._studied = now
        self._share += _SHARE_WEIGHT * (took - self._share)
        if self._auto is not None and self._share > STUDY_SHARE_MAX:
            self._auto.shadows.use_less()
            self._share /= 2

    def report(self) -> dict[str, Any]:
        """What the policy knows, in plain types."""
        found: dict[str, Any] = {"name": self.name, "objective": self._objective}
        found["host_policy"] = self._host_policy
        found["study_share"] = round(self._share, 6)
        return found | asdict(self._auto.report) if self._auto is not None else found

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
