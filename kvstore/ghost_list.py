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

from kvstore.tiers.tier import ReadStatus

if TYPE_CHECKING:
    from numpy.typing import NDArray

GHOSTS_MAX = 1 << 16
WAYS = 8  # a power of two
STEP_PAGES = 256
KEY_BYTES = 16
_PLACE = np.dtype((np.void, 24))


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


def why_left(status: ReadStatus) -> Left:
    """Why a page goes that was read with this outcome."""
    if status is ReadStatus.WIPED:
        return Left.OPERATOR
    return Left.KEY_GONE if status is ReadStatus.LOCKED else Left.DAMAGE


@dataclass(frozen=True, slots=True)
class Ghost:
    """One page that left."""

    why: Left
    when_s: float  # Unix seconds
    tiers: int  # bits of the tiers it was in


class GhostList:
    """Not thread-safe: the store's lock is held around each call.

    A place is three int64: both halves of the key, and milliseconds, reason and tiers in one:

        | when: milliseconds since 1970 | why: 4 bits | tiers: 4 bits |      0: nothing stands here
    """

    def __init__(self, ghosts_max: int = GHOSTS_MAX) -> None:
        """Room for `ghosts_max` pages, a power of two of at least WAYS; 32 bytes each."""
        rows = ghosts_max // WAYS
        if rows < 1 or rows & (rows - 1) or rows * WAYS != ghosts_max:
            raise ValueError(f"ghosts_max {ghosts_max}: a power of two >= {WAYS} is needed")
        self._mask = np.array([rows - 1])
        self._places = np.zeros((rows * WAYS, 3), np.int64)
        self._rows = self._places.reshape(rows, WAYS, 3)
        self._whole = self._places.view(_PLACE)[:, 0]  # a copy of one item each, not of three
        # The place of each row that is taken next, and the one after each place.
        self._next = np.arange(0, rows * WAYS, WAYS)
        self._after = np.arange(1, rows * WAYS + 1)
        self._after[WAYS - 1 :: WAYS] -= WAYS
        # Pages by reason: that left, and that were stored again while still known here.
        self.left = np.zeros(len(Left) + 1, np.int64)
        self.missed = np.zeros(len(Left) + 1, np.int64)

    def __len__(self) -> int:
        """Pages that are known."""
        return int(np.count_nonzero(self._places[:, 2]))

    def note(
        self, keys: NDArray[np.uint64], tiers: NDArray[np.uint8], why: Left, now_s: float
    ) -> None:
        """These pages left. keys: shape [n, 2]; tiers: shape [n], the bits that each was in.

        Of two in one row and step the later one stays: with few a step hardly any are lost.
        """
        self.left[why] += len(keys)
        words = np.ascontiguousarray(keys).view(np.int64)
        about = int(now_s * 1000) << 8 | why << 4
        for start in range(0, len(words), STEP_PAGES):
            step = words[start : start + STEP_PAGES]
            rows = step[:, 0] & self._mask
            places = self._next[rows]
            made = np.empty((len(step), 3), np.int64)
            made[:, :2] = step
            np.bitwise_or(tiers[start : start + STEP_PAGES], about, out=made[:, 2], dtype=np.int64)
            self._whole[places] = made.view(_PLACE)[:, 0]
            self._next[rows] = self._after[places]

    def find(self, keys: bytes) -> list[Ghost | None]:
        """What is known of each of these keys, KEY_BYTES each."""
        return [
            None if place < 0 else _ghost(int(self._places[place, 2]))
            for place in self._find(keys).tolist()
        ]

    def back(self, keys: bytes) -> int:
        """These pages are stored again: count and forget those that are known; how many."""
        words = np.frombuffer(keys, np.int64).reshape(-1, 2)
        halves = self._rows[words[:, 0] & self._mask, :, 0] == words[:, :1]
        if not halves.any():
            return 0
        places = self._find(keys)
        places = places[places >= 0]
        reasons = self._places[places, 2] >> 4 & 15
        self.missed += np.bincount(reasons, minlength=len(self.missed))
        self._places[places] = 0
        return len(places)

    def counts(self) -> dict[str, int]:
        """Both counts by reason, as counters of the store are named."""
        found = {f"left_{why.name.lower()}": int(self.left[why]) for why in Left}
        return found | {f"missed_{why.name.lower()}": int(self.missed[why]) for why in Left}

    def check(self) -> None:
        """Every page stands in the row of its key, for a reason; AssertionError else."""
        places = np.flatnonzero(self._places[:, 2])
        found = self._places[places]
        assert ((found[:, 0] & self._mask) == places // WAYS).all(), "a key in a wrong row"
        assert (self._next // WAYS == np.arange(len(self._next))).all(), "a row goes on in another"
        unknown = set((found[:, 2] >> 4 & 15).tolist()) - set(map(int, Left))
        assert not unknown, f"unknown reasons {unknown}"

    def _find(self, keys: bytes) -> NDArray[np.int64]:
        """The place of each key, -1 where it is not known; of two places the newer one."""
        words = np.frombuffer(keys, np.int64).reshape(-1, 2)
        rows = words[:, 0] & self._mask
        there = self._rows[rows]
        same = (there[:, :, :2] == words[:, None, :]).all(axis=2) & (there[:, :, 2] != 0)
        ages = (self._next[rows][:, None] - 1 - np.arange(WAYS)) % WAYS
        newest = np.where(same, ages, WAYS).argmin(axis=1)
        return np.where(same.any(axis=1), rows * WAYS + newest, -1)


def _ghost(about: int) -> Ghost:
    return Ghost(Left(about >> 4 & 15), (about >> 8) / 1000, about & 15)
