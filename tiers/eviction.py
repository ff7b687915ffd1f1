"""What leaves a tier first: the face of all policies, and least recently used.

Pure decisions on columns of numbers, a row a page; nothing here sees bytes, clocks or trees. A
policy is told what is used, what comes and what goes, and gives pages scores, the coldest lowest;
the caller takes pages by ascending score, and none before its descendants have left the tier (the
leaf rule). Invariant: scores are in SCORE_MIN..SCORE_MAX, so that hints can shift them into bands
by powers of two, which are exact (eviction_hints.py).
"""

from __future__ import annotations

from typing import Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

Ids: TypeAlias = npt.NDArray[np.int32]
Keys: TypeAlias = npt.NDArray[np.uint64]
Scores: TypeAlias = npt.NDArray[np.float64]

SCORE_MIN = 2.0**-60
SCORE_MAX = 2.0**60
PAGES_FIRST = 1024

Number = TypeVar("Number", bound=np.generic)


class Policy(Protocol):
    """What any policy can be told and asked. All arrays are in chain order, parents first.

    `now` never goes back. A page that is asked for again while it is absent is an insert; `keys`
    name pages beyond their stay, 64 bits of the page key.
    """

    name: str
    # Whether scores change by themselves: else only a touch or an insert of that page moves them.
    moves: bool

    def insert(self, pages: Ids, keys: Keys, depth: int, tokens: int, now: float) -> None:
        """New pages of `tokens` tokens each; the first stands `depth` pages deep."""

    def restore(self, pages: Ids, last: Scores) -> None:
        """Pages from before this policy was made: when they were used last is all it knows."""

    def touch(self, pages: Ids, now: float) -> None:
        """Pages from the first of a chain on were used again."""

    def scores(self, pages: Ids, now: float, tier: int = 0) -> Scores:
        """What each is worth to that tier now."""

    def left(self, pages: Ids, now: float, tier: int = 0) -> None:
        """The policy's own choice has made pages leave that tier."""

    def remove(self, pages: Ids, keys: Keys, now: float) -> None:
        """Pages are in no tier any more: what is worth remembering moves to ghosts."""


class LruPolicy(Policy):
    """Least recently used first. A touch marks a whole chain, so a chain leaves from its tail."""

    name = "lru"
    moves = False

    def __init__(self) -> None:
        self._last = np.full(PAGES_FIRST, SCORE_MIN)

    def insert(self, pages: Ids, keys: Keys, depth: int, tokens: int, now: float) -> None:
        self._last = grown(self._last, pages)
        self._last[pages] = now

    def restore(self, pages: Ids, last: Scores) -> None:
        self._last = grown(self._last, pages)
        self._last[pages] = last

    def touch(self, pages: Ids, now: float) -> None:
        self._last[pages] = now

    def scores(self, pages: Ids, now: float, tier: int = 0) -> Scores:
        """Seconds of the last use."""
        found: Scores = np.maximum(self._last[pages], SCORE_MIN)
        return found

    def left(self, pages: Ids, now: float, tier: int = 0) -> None:
        """Nothing to learn."""

    def remove(self, pages: Ids, keys: Keys, now: float) -> None:
        """Nothing to remember."""


def grown(column: npt.NDArray[Number], pages: Ids) -> npt.NDArray[Number]:
    """The column, or a longer copy of it that has rows for all of `pages`."""
    rows = int(pages.max()) + 1 if len(pages) else 0
    if rows <= len(column):
        return column
    longer: npt.NDArray[Number] = np.zeros(max(rows, 2 * len(column)), column.dtype)
    longer[: len(column)] = column
    return longer
