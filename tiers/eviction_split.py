"""Memory by one policy and the store by another: each tier asks its own who leaves first.

The store's policy is told of all pages, wherever they are; memory's of what is in memory, and no
more, so that a page that goes on living on disk is a ghost to it. Pure, as all policies are: who
moves pages says so by entered() and exited(). Must not be here: hints (eviction_hints.py lays them
over both).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvstore.tiers.eviction import PAGES_FIRST, Policy, Run, Study, grown

if TYPE_CHECKING:
    from kvstore.tiers.eviction import Ids, Keys, Scores

COLUMNS = ("_here", "_depth", "_parent", "_kind")


class SplitPolicy(Policy):
    """See above. `memory` is the number of its tier."""

    moves = True

    def __init__(self, host: Policy, store: Policy, memory: int) -> None:
        self.host = host
        self.store = store
        self.name = store.name
        self._memory = memory
        self._here = np.zeros(PAGES_FIRST, bool)  # in memory
        self._depth = np.zeros(PAGES_FIRST, np.int32)
        self._parent = np.zeros(PAGES_FIRST, np.int32)
        self._kind = np.zeros(PAGES_FIRST, np.int32)
        # Tokens, bytes and seconds a token of a page: their number.
        self._kinds: dict[tuple[int, int, float], int] = {}

    def insert(self, pages: Ids, keys: Keys, run: Run, now: float) -> None:
        self.store.insert(pages, keys, run, now)
        self._note(pages, run)

    def restore(self, pages: Ids, keys: Keys, run: Run, last: Scores) -> None:
        self.store.restore(pages, keys, run, last)
        self._note(pages, run)

    def entered(self, pages: Ids, keys: Keys, now: float) -> None:
        """Pages that were inserted or restored are in memory from now on."""
        kinds, known = self._kind[pages], list(self._kinds)
        for kind in np.unique(kinds).tolist():
            mine = kinds == kind
            chosen, (tokens, size, token_s) = pages[mine], known[kind]
            whole = tokens * len(chosen)
            depths, parents = self._depth[chosen], self._parent[chosen]
            run = Run(depths, parents, tokens, whole, size, token_s)
            self.host.insert(chosen, keys[mine], run, now)
        self._here[pages] = True

    def exited(self, pages: Ids, keys: Keys, now: float) -> None:
        """Pages are not in memory any more, whether or not they are elsewhere."""
        self.host.remove(pages, keys, now)
        self._here[pages] = False

    def touch(self, pages: Ids, now: float) -> None:
        self.store.touch(pages, now)
        here = pages[self._here[pages]]
        if len(here):
            self.host.touch(here, now)

    def scores(self, pages: Ids, now: float, tier: int = 0) -> Scores:
        return self._of(tier).scores(pages, now, tier)

    def left(self, pages: Ids, now: float, tier: int = 0) -> None:
        self._of(tier).left(pages, now, tier)

    def remove(self, pages: Ids, keys: Keys, now: float) -> None:
        """Of the store; exited() was told before."""
        self.store.remove(pages, keys, now)

    def study(self, now: float) -> Study | None:
        found = [each.study(now) for each in (self.store, self.host)]
        studies = tuple(each for each in found if each is not None)
        return _Studies(studies) if studies else None

    def _of(self, tier: int) -> Policy:
        return self.host if tier == self._memory else self.store

    def _note(self, pages: Ids, run: Run) -> None:
        if len(pages) and int(pages.max()) >= len(self._here):
            for name in COLUMNS:
                setattr(self, name, grown(getattr(self, name), pages))
        self._depth[pages], self._parent[pages] = run.depths, run.parents
        about = (run.page_tokens, run.page_bytes, run.token_s)
        self._kind[pages] = self._kinds.setdefault(about, len(self._kinds))


@dataclass(frozen=True, slots=True)
class _Studies(Study):
    """Of both policies."""

    each: tuple[Study, ...]

    def work(self) -> None:
        for study in self.each:
            study.work()

    def adopt(self) -> None:
        for study in self.each:
            study.adopt()
