"""What left the store lately: the keys of pages that are in no tier any more, when, and why.

A set-associative table as in a processor's cache: a key may stand in one of WAYS places of its
row and takes the place of the oldest there. So it is bounded, remembers about the last GHOSTS_MAX
pages, and noting and asking are a few numpy calls for a whole run of pages. Pure: no clock, no I/O.
Keys come from tenant secrets, so that who can name a key owns it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

GHOSTS_MAX = 1 << 16
WAYS = 8
KEY_BYTES = 16


class Left(IntEnum):
    """Why pages left. The names are those of metrics and of `explain`."""

    ROOM = 1  # the coldest, when others needed the place
    QUOTA = 2  # the coldest of a tenant that had all it may have
    AGE = 3  # older than max_age
    OPERATOR = 4  # evicted on somebody's word
    DAMAGE = 5  # it, or a page before it, failed its check
    KEY_GONE = 6  # encrypted, and its key is no more

    @property
    def words(self) -> str:
        """For people."""
        return _WORDS[self]


_WORDS = {
    Left.ROOM: "evicted to make room",
    Left.QUOTA: "evicted because its tenant was at its quota",
    Left.AGE: "evicted for its age",
    Left.OPERATOR: "evicted by an operator",
    Left.DAMAGE: "dropped because it, or a page before it, was damaged",
    Left.KEY_GONE: "dropped because its key is gone",
}


@dataclass(frozen=True, slots=True)
class Ghost:
    """One page that left."""

    why: Left
    when_s: float  # Unix seconds
    tiers: int  # bits of the tiers it was in


class GhostList:
    """Not thread-safe: the store's lock is held around each call."""

    def __init__(self, ghosts_max: int = GHOSTS_MAX) -> None:
        """Room for `ghosts_max` pages, a power of two of at least WAYS; 32 bytes each."""
        rows = ghosts_max // WAYS
        if rows < 1 or rows & (rows - 1) or rows * WAYS != ghosts_max:
            raise ValueError(f"ghosts_max {ghosts_max}: a power of two >= {WAYS} is needed")
        self._mask = np.uint64(rows - 1)
        self._key = np.zeros((rows, WAYS, 2), np.uint64)
        self._when_s = np.zeros((rows, WAYS), np.float64)
        self._why = np.zeros((rows, WAYS), np.uint8)  # 0: nothing stands here
        self._tiers = np.zeros((rows, WAYS), np.uint8)
        self._next = np.zeros(rows, np.uint8)
        # Pages by reason: that left, and that were stored again while still known here.
        self.left = np.zeros(len(Left) + 1, np.int64)
        self.missed = np.zeros(len(Left) + 1, np.int64)

    def __len__(self) -> int:
        """Pages that are known."""
        return int(np.count_nonzero(self._why))

    def note(
        self, keys: NDArray[np.uint64], tiers: NDArray[np.uint8], why: Left, now_s: float
    ) -> None:
        """These pages left. keys: shape [n, 2]; tiers: shape [n], the bits that each was in."""
        count = len(keys)
        if not count:
            return
        self.left[why] += count
        rows = keys[:, 0] & self._mask
        order = np.argsort(rows, kind="stable")
        rows = rows[order].astype(np.intp)
        first = np.flatnonzero(np.diff(rows, prepend=-1))
        sizes = np.diff(first, append=count)
        rank = np.arange(count) - np.repeat(first, sizes)
        # Of more than WAYS new pages in one row the last ones stay, as assignment goes in order.
        ways = (self._next[rows] + rank) % WAYS
        self._key[rows, ways] = keys[order]
        self._when_s[rows, ways] = now_s
        self._why[rows, ways] = why
        self._tiers[rows, ways] = tiers[order]
        heads = rows[first]
        self._next[heads] = (self._next[heads] + sizes) % WAYS

    def find(self, keys: bytes) -> list[Ghost | None]:
        """What is known of each of these keys, KEY_BYTES each."""
        found: list[Ghost | None] = []
        for row, way in zip(*self._places(keys), strict=True):
            if way < 0:
                found.append(None)
                continue
            why = Left(int(self._why[row, way]))
            when = float(self._when_s[row, way])
            found.append(Ghost(why, when, int(self._tiers[row, way])))
        return found

    def back(self, keys: bytes) -> int:
        """These pages are stored again: count and forget those that are known; how many."""
        rows, ways = self._places(keys)
        known = ways >= 0
        if not known.any():
            return 0
        rows, ways = rows[known], ways[known]
        self.missed += np.bincount(self._why[rows, ways], minlength=len(self.missed))
        self._why[rows, ways] = 0
        return len(rows)

    def counts(self) -> dict[str, int]:
        """Both counts by reason, as counters of the store are named."""
        found = {f"left_{why.name.lower()}": int(self.left[why]) for why in Left}
        return found | {f"missed_{why.name.lower()}": int(self.missed[why]) for why in Left}

    def check(self) -> None:
        """Every page stands in the row of its key, and once; AssertionError else."""
        rows, ways = np.nonzero(self._why)
        keys = self._key[rows, ways]
        assert ((keys[:, 0] & self._mask).astype(np.intp) == rows).all(), "a key in a wrong row"
        known = set(map(int, self._why[rows, ways])) - set(map(int, Left))
        assert not known, f"unknown reasons {known}"

    def _places(self, keys: bytes) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Row and way of each key; the way is -1 where the key is not known."""
        wanted = np.frombuffer(keys, "<u8").reshape(-1, 2)
        rows = (wanted[:, 0] & self._mask).astype(np.intp)
        same = (self._key[rows] == wanted[:, None, :]).all(axis=2) & (self._why[rows] != 0)
        # Of two the later one counts: it stands nearer before the row's next place.
        ages = (self._next[rows][:, None].astype(np.intp) - 1 - np.arange(WAYS)) % WAYS
        nearest = np.where(same, ages, WAYS).argmin(axis=1)
        return rows, np.where(same.any(axis=1), nearest, -1)
