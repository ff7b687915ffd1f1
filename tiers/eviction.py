"""What leaves a tier first. Pure decisions on columns of numbers; nothing here sees bytes.

A policy ranks candidates; the index then walks the ranking and takes those whose descendants have
left the tier (the leaf rule), so a policy needs to know nothing about trees.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


class LruPolicy:
    """Least recently used first; of pages used at one moment, the deepest first.

    A touch marks a whole chain at once, so an ancestor is never older than its descendants, and
    this order takes every chain from its tail.
    """

    name = "lru"

    def rank(
        self, last_use: NDArray[np.float64], depth: NDArray[np.int32], limit: int
    ) -> NDArray[np.int64]:
        """Positions of the `limit` coldest candidates, coldest first.

        last_use in seconds of the store's clock, depth in pages; equal lengths.
        """
        positions = np.arange(len(last_use))
        if 0 < limit < len(last_use):
            # Ties at the border are kept, so that no ancestor is chosen before its descendants.
            border = np.partition(last_use, limit - 1)[limit - 1]
            positions = np.flatnonzero(last_use <= border)
        order = np.lexsort((-depth[positions].astype(np.int64), last_use[positions]))
        return positions[order]
