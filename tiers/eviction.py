"""What leaves a tier first: the face of all policies, and least recently used.

Pure decisions on columns of numbers, a row a page; nothing here sees bytes, clocks or trees. A
policy is told what is used, what comes and what goes, and gives pages scores, the coldest lowest;
the caller takes pages by ascending score, and none before its descendants have left the tier (the
leaf rule). Invariant: scores are in SCORE_MIN..SCORE_MAX, so that hints can shift them into bands
by powers of two, which are exact (eviction_hints.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

Ids: TypeAlias = npt.NDArray[np.int32]
Keys: TypeAlias = npt.NDArray[np.uint64]
Scores: TypeAlias = npt.NDArray[np.float64]

SCORE_MIN = 2.0**-60
SCORE_MAX = 2.0**60
NO_PARENT = -1
PAGES_FIRST = 1024
CONSECUTIVE_MIN = 32  # of fewer pages, looking costs as much as picking

Number = TypeVar("Number", bound=np.generic)


@dataclass(frozen=True, slots=True)
class Run:
    """How pages came: all of one size, usually one piece of one chain."""

    depths: Ids  # pages before each of them in its chain
    parents: Ids  # the page before each, NO_PARENT at the beginning of a prompt
    page_tokens: int
    tokens: int  # of all that came in one piece; more than the pages have, of a sample
    page_bytes: int = 0  # of a page's payload; 0: nobody knows, all are alike
    # Of prefill, a token at the beginning of a prompt, as its engine measured; 0: it did not.
    token_s: float = 0.0
    # How often each was used, where pages are told that somebody else has watched so far.
    uses: npt.NDArray[np.uint8] | None = None

    @staticmethod
    def of(
        pages: Ids,
        parent: int,
        depth: int,
        page_tokens: int,
        page_bytes: int = 0,
        token_s: float = 0.0,
    ) -> Run:
        """Of pages that follow one another, the first `depth` pages deep."""
        depths = np.arange(depth, depth + len(pages), dtype=np.int32)
        parents = np.empty(len(pages), np.int32)
        parents[:1], parents[1:] = parent, pages[:-1]
        return Run(depths, parents, page_tokens, len(pages) * page_tokens, page_bytes, token_s)


class Study(Protocol):
    """What a policy has to think about for longer than a look-up may wait."""

    def work(self) -> None:
        """The long part: it touches nothing that the policy decides by."""

    def adopt(self) -> None:
        """The short part: from now on the policy decides by what was found."""


class Policy(Protocol):
    """What any policy can be told and asked. All arrays are in chain order, parents first.

    `now` never goes back. A page that is asked for again while it is absent is an insert; `keys`
    name pages beyond their stay, 64 bits of the page key.
    """

    name: str
    # Whether scores change by themselves: else only a touch or an insert of that page moves them.
    moves: bool

    def insert(self, pages: Ids, keys: Keys, run: Run, now: float) -> None:
        """New pages, first page first."""

    def restore(self, pages: Ids, keys: Keys, run: Run, last: Scores) -> None:
        """Pages from before this policy was made, and when they were used last."""

    def touch(self, pages: Ids, now: float) -> None:
        """Pages from the first of a chain on were used again."""

    def scores(self, pages: Ids, now: float, tier: int = 0) -> Scores:
        """What each is worth to that tier now."""

    def left(self, pages: Ids, now: float, tier: int = 0) -> None:
        """The policy's own choice has made pages leave that tier."""

    def remove(self, pages: Ids, keys: Keys, now: float) -> None:
        """Pages are in no tier any more: what is worth remembering moves to ghosts."""

    def study(self, now: float) -> Study | None:
        """What there is to think about now, if there is enough of it; one at a time.

        Whoever guards the policy by a lock calls this and adopt() with it, and work() without.
        """
        return None


class LruPolicy(Policy):
    """Least recently used first. A touch marks a whole chain, so a chain leaves from its tail."""

    name = "lru"
    moves = False

    def __init__(self) -> None:
        self._last = np.full(PAGES_FIRST, SCORE_MIN)

    def insert(self, pages: Ids, keys: Keys, run: Run, now: float) -> None:
        self._last = grown(self._last, pages)
        self._last[pages] = now

    def restore(self, pages: Ids, keys: Keys, run: Run, last: Scores) -> None:
        self._last = grown(self._last, pages)
        self._last[pages] = last

    def touch(self, pages: Ids, now: float) -> None:
        self._last[rows_of(pages)] = now

    def scores(self, pages: Ids, now: float, tier: int = 0) -> Scores:
        """Seconds of the last use."""
        found: Scores = np.maximum(self._last[pages], SCORE_MIN)
        return found

    def left(self, pages: Ids, now: float, tier: int = 0) -> None:
        """Nothing to learn."""

    def remove(self, pages: Ids, keys: Keys, now: float) -> None:
        """Nothing to remember."""

    def study(self, now: float) -> Study | None:
        """Nothing to think about."""
        return None


def study_at_once(policy: Policy, now: float) -> None:
    """For a policy that nobody else uses."""
    study = policy.study(now)
    if study is not None:
        study.work()
        study.adopt()


def rows_of(pages: Ids) -> Ids | slice:
    """What picks their rows of a column fastest: a slice, hence a view, where they stand together,
    as pages that came together mostly do."""
    count = len(pages)
    if count < CONSECUTIVE_MIN or int(pages[-1]) - int(pages[0]) != count - 1:
        return pages
    stand_together = (pages[1:] - pages[:-1] == 1).all()
    return slice(int(pages[0]), int(pages[-1]) + 1) if stand_together else pages


def grown(column: npt.NDArray[Number], pages: Ids) -> npt.NDArray[Number]:
    """The column, or a longer copy of it that has rows for all of `pages`."""
    rows = int(pages.max()) + 1 if len(pages) else 0
    if rows <= len(column):
        return column
    longer: npt.NDArray[Number] = np.zeros(max(rows, 2 * len(column)), column.dtype)
    longer[: len(column)] = column
    return longer
