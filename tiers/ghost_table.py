"""What is remembered of pages that have gone: a table of fixed size in numpy, a row a key.

A key has one row, chosen by its hash; a newer key takes the row of an older one. So memory is
bounded, no page costs a Python object, and old ghosts fade at the rate at which new ones come.
Must not be here: what the numbers mean (the policies know).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from kvstore.tiers.eviction import Keys

# Odd, from the golden ratio: spreads keys that were numbered in a row (Knuth, 6.4).
_SPREAD = np.uint64(0x9E3779B97F4A7C15)
ROWS_MIN_BITS = 10
ROWS_MAX_BITS = 21


class GhostTable:
    """Key to (time, a, b): a time in seconds and two small numbers."""

    def __init__(self, rows: int) -> None:
        """At least `rows` rows, as a power of two, within bounds."""
        bits = min(max(ROWS_MIN_BITS, (rows - 1).bit_length()), ROWS_MAX_BITS)
        self._shift = np.uint64(64 - bits)
        self.tag = np.zeros(1 << bits, np.uint64)  # 0: the row is free
        self.time = np.zeros(1 << bits, np.float64)
        self.a = np.zeros(1 << bits, np.uint8)
        self.b = np.zeros(1 << bits, np.uint8)

    def __len__(self) -> int:
        """Rows, used or not."""
        return len(self.tag)

    @property
    def nbytes(self) -> int:
        return self.tag.nbytes + self.time.nbytes + self.a.nbytes + self.b.nbytes

    def find(self, keys: Keys) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """The row of each key, and whether the key is there."""
        mixed = (keys + np.uint64(1)) * _SPREAD
        rows = (mixed >> self._shift).astype(np.int64)
        return rows, self.tag[rows] == mixed | np.uint64(1)

    def put(
        self,
        keys: Keys,
        time: npt.NDArray[np.float64],
        a: npt.NDArray[np.uint8],
        b: npt.NDArray[np.uint8],
    ) -> npt.NDArray[np.int64]:
        """Remember keys; returns the rows that held another key so far, to be read before."""
        mixed = (keys + np.uint64(1)) * _SPREAD
        rows = (mixed >> self._shift).astype(np.int64)
        self.tag[rows] = mixed | np.uint64(1)
        self.time[rows], self.a[rows], self.b[rows] = time, a, b
        return rows

    def forget(self, rows: npt.NDArray[np.int64]) -> None:
        self.tag[rows] = 0
