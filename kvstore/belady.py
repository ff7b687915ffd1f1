"""The bound that no online policy can pass: evict what is asked for last (Belady), by leaves.

It knows the whole trace. A block that would be asked for later than all that is resident is not
stored at all (bypass). A block's next use is never later than its children's, so the latest is
always a leaf. Must not be here: anything that a store could run.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvstore.simulation import PROGRESS_REQUESTS, Hits, Tally, next_uses
from kvstore.tiers.eviction import SCORE_MIN, LruPolicy
from kvstore.tiers.leaf_tree import NO_BLOCK, LeafTree
from kvstore.tiers.page_cost import EVEN_TOKENS

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.tiers.eviction import Ids, Scores
    from kvstore.trace import Trace


class FarthestUse(LruPolicy):
    """Scores by the next use, which somebody tells it."""

    name = "belady"

    def __init__(self, unique: int) -> None:
        super().__init__()
        self._worth = np.full(unique, SCORE_MIN)

    def foresee(self, blocks: Ids, request: npt.NDArray[np.int64], never: int) -> None:
        self._worth[blocks] = np.where(request < never, 1.0 / (1.0 + request), SCORE_MIN)

    def scores(self, pages: Ids, now: float, tier: int = 0) -> Scores:
        found: Scores = self._worth[pages]
        return found


def replay_belady(
    trace: Trace,
    capacity: int,
    *,
    warmup_s: float = 0.0,
    even_tokens: float = EVEN_TOKENS,
    progress: Callable[[int], None] | None = None,
) -> Hits:
    """Run the bound at one capacity, in blocks of the trace."""
    tally, policy = Tally(trace, warmup_s, even_tokens), FarthestUse(trace.unique)
    tree, following = LeafTree(trace.parent.tolist(), policy), next_uses(trace)
    began, evicted, starts = time.thread_time(), 0, trace.starts.tolist()
    for request in range(trace.requests):
        path = trace.blocks[starts[request] : starts[request + 1]]
        if not len(path):
            continue
        hit = tree.hit(path)
        tally.add(request, hit)
        policy.foresee(path, following[starts[request] : starts[request + 1]], trace.requests)
        tree.rescore(path[:hit])
        if hit < len(path):
            tree.add(path[hit:], int(path[hit - 1]) if hit else NO_BLOCK)
            evicted += len(tree.evict(tree.used - capacity, 0.0))
        if progress is not None and request % PROGRESS_REQUESTS == 0:
            progress(request)
    return tally.result(policy.name, capacity, evicted, time.thread_time() - began)
