"""What most comparators keep of each page: last use, uses, and ghosts of both."""

from __future__ import annotations

import numpy as np

from kvstore.tiers.eviction import (
    PAGES_FIRST,
    SCORE_MAX,
    SCORE_MIN,
    Ids,
    Keys,
    Policy,
    Run,
    Scores,
    grown,
)
from kvstore.tiers.ghost_table import GhostTable

GHOSTS_PER_PAGE = 8


class ColumnPolicy(Policy):
    """Last use, first use and uses by page; uses outlive a page in its ghost if `remembers`."""

    name = ""
    moves = True
    remembers = True

    def __init__(self, capacity_pages: int) -> None:
        self.capacity = capacity_pages
        self.last = np.zeros(PAGES_FIRST)
        self.first = np.zeros(PAGES_FIRST)
        self.uses = np.zeros(PAGES_FIRST, np.uint8)
        self.depth = np.zeros(PAGES_FIRST, np.int32)
        self.ghosts = GhostTable(GHOSTS_PER_PAGE * capacity_pages)

    def insert(self, pages: Ids, keys: Keys, run: Run, now: float) -> None:
        self.last, self.first = grown(self.last, pages), grown(self.first, pages)
        self.uses, self.depth = grown(self.uses, pages), grown(self.depth, pages)
        uses = np.ones(len(pages), np.uint8)
        rows, known = self.ghosts.find(keys)
        if self.remembers and known.any():
            old = self.ghosts.a[rows[known]]
            uses[known] = old + (old < 255)
        self.ghosts.forget(rows[known])
        self.last[pages] = self.first[pages] = now
        self.uses[pages] = uses
        self.depth[pages] = run.depths

    def restore(self, pages: Ids, keys: Keys, run: Run, last: Scores) -> None:
        self.insert(pages, keys, run, float(last.max()))

    def touch(self, pages: Ids, now: float) -> None:
        self.last[pages] = now
        uses = self.uses[pages]
        self.uses[pages] = uses + (uses < 255)

    def left(self, pages: Ids, now: float, tier: int = 0) -> None:
        """Nothing to learn, for most."""

    def remove(self, pages: Ids, keys: Keys, now: float) -> None:
        none = np.zeros(len(pages), np.uint8)
        self.ghosts.put(keys, self.last[pages], self.uses[pages], none)


def within(scores: Scores) -> Scores:
    """Scores in the bounds that all policies keep."""
    return np.clip(scores, SCORE_MIN, SCORE_MAX)
