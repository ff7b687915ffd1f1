"""What leaves a tier first. Pure decisions on columns of numbers; nothing here sees bytes.

A policy gives every page a score, the coldest lowest; the index takes pages by ascending score, and
never before their descendants have left the tier (the leaf rule), so a policy knows no trees.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class LruPolicy:
    """Least recently used first; of pages used at one moment, the index takes the deepest first.

    A touch marks a whole chain at once, so a chain leaves from its tail.
    """

    name = "lru"

    def scores(self, last_use: NDArray[np.float64]) -> NDArray[np.float64]:
        """One number a page, from its last use in seconds of the store's clock."""
        return last_use
