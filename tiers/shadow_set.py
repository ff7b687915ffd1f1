"""The shadows of `auto`: all policies at all sizes, on small samples, and how well they do.

Works on what was asked for, in batches and in order, without anybody's lock. Larger sizes have
smaller samples, so no shadow has more than SHADOW_PAGES, whatever the store has. Whether the few
pages that everybody asks for are in a sample or not is luck, so they are counted exactly, by the
store, as hits at any size; the sample speaks for the others. ("SHARDS-adj" takes all that a sample
has too much of for hits: that was off by 9 points where long documents are asked about.)
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log2
from typing import TYPE_CHECKING

import numpy as np

from kvstore.tiers.contest import Contest
from kvstore.tiers.eviction import Run
from kvstore.tiers.shadow import Sample

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstore.tiers.eviction import Policy, Scores
    from kvstore.tiers.page_cost import PageCost
    from kvstore.tiers.shadow import Asked, Shadow

# By sample: how much smaller it is than the first, in powers of two, and the sizes that it shows.
SAMPLES = ((0, (0.5, 1.0)), (1, (2.0,)), (2, (4.0,)))
SHADOW_PAGES = 384
SHADOW_PAGES_MIN = 32
ROWS = 8 * SHADOW_PAGES  # of a sample: its shadows do not have the same pages
EPOCH_REFERENCES = 1000  # sampled ones
HALF_LIFE_EPOCHS = 200.0  # of the curves
CAPACITY_CHANGE = 0.1
BITS_MAX = 30
STUDY_REQUESTS = 16


@dataclass(frozen=True, slots=True)
class Counted:
    """How much a store was asked for, by worth."""

    all: float = 0.0
    hot: float = 0.0  # of that, pages that are asked for all the time


@dataclass(frozen=True, slots=True)
class Point:
    """What a policy would hit at one size."""

    factor: float  # of the present size
    pages: int
    hit_ratio: float  # of all pages asked for; of their worth, where the objective is not hits


class ShadowSet:
    """See above. One thread at a time."""

    def __init__(
        self,
        make: Callable[[str, int], Policy],
        names: tuple[str, ...],
        first: str,
        cost: PageCost,
    ) -> None:
        self.bits = 0
        self.contest = Contest(names, first)
        self.capacity = 0.0  # pages that the shadows are for; 0: the store is not full yet
        self.since = 0.0  # when counting began
        self._names = names
        self._cost = cost

        def small(name: str) -> Policy:
            return make(name, SHADOW_PAGES)

        self._samples = [Sample(small, names, sizes, ROWS, less) for less, sizes in SAMPLES]
        self._epoch = Counted()  # of the store when it began
        self._sampled = 0
        self._asked = self._hot = 0.0  # of the store, as far as counted here, fading
        self._hits = {each: 0.0 for sample in self._samples for each in sample.shadows}
        self._seen = [0.0] * len(self._samples)  # references by sample, fading
        self._until_study = STUDY_REQUESTS
        self._pages_most = SHADOW_PAGES
        self._epoch_references = EPOCH_REFERENCES

    @property
    def pages(self) -> int:
        """Pages known, of all samples."""
        return sum(map(len, self._samples))

    def shadow(self, name: str, factor: float = 1.0) -> Shadow:
        """One of them."""
        return next(s.shadows[name, factor] for s in self._samples if (name, factor) in s.shadows)

    def run(self, events: Sequence[Asked], asked: Counted, live: int, full: float) -> str | None:
        """Answer what was asked for; the policy to follow from now on, if that changes.

        asked: of the store since its beginning. live, full: pages that it has, and has when it is
        full, 0 as long as nobody knows.
        """
        if not events:
            return None
        now = events[-1].now
        self._fit(max(live, full), now)
        if full and abs(full - self.capacity) > CAPACITY_CHANGE * self.capacity:
            self._resize(full, asked, now)
        worth = self._worth if self._cost.objective != "hits" else None
        for event in events:
            self._sampled += len(event.keys)
            for sample in self._samples:
                sample.ask(event, worth)
            self._until_study -= 1
            if self._until_study <= 0:
                self._until_study = STUDY_REQUESTS
                for sample in self._samples:
                    sample.study(event.now)
        if self.capacity and self._sampled >= self._epoch_references:
            return self._end_epoch(asked, now)
        return None

    def use_less(self) -> None:
        """Look at half as many pages from the next run on, down to SHADOW_PAGES_MIN."""
        self._pages_most = max(SHADOW_PAGES_MIN, self._pages_most // 2)

    @property
    def left_out(self) -> set[int]:
        """Hashes of pages that need not be noted, though they are in the sample."""
        return self._samples[0].left_out

    def curves(self) -> dict[str, tuple[Point, ...]]:
        """What each policy would hit at each size; nothing as long as the store is not full."""
        if not self._asked or not all(self._seen):
            return {}
        found: dict[str, list[Point]] = {name: [] for name in self._names}
        for sample, seen in zip(self._samples, self._seen, strict=True):
            for name, factor in sample.shadows:
                hot = self._hot / self._asked
                ratio = hot + (1.0 - hot) * self._hits[name, factor] / seen
                found[name].append(Point(factor, round(self.capacity * factor), ratio))
        return {name: tuple(points) for name, points in found.items()}

    def check(self) -> None:
        """Recount; raises AssertionError with the numbers."""
        for sample in self._samples:
            sample.check()

    def _worth(self, asked: Asked) -> Scores:
        parents = np.zeros(len(asked.keys), np.int32)
        tokens = asked.end_depth * asked.page_tokens
        size, token_s = asked.page_bytes, asked.token_s
        return self._cost.of(Run(asked.depths, parents, asked.page_tokens, tokens, size, token_s))

    def _fit(self, pages: float, now: float) -> None:
        """Make the samples so small that the present size is within bounds."""
        bits = min(BITS_MAX, max(0, int(np.ceil(log2(max(pages, 1.0) / self._pages_most)))))
        if bits <= self.bits:
            return
        self.bits = bits
        for sample, (less, _) in zip(self._samples, SAMPLES, strict=True):
            sample.thin(bits + less, now)
        if self.capacity:
            for sample in self._samples:
                sample.resize(self.capacity, now)

    def _resize(self, pages: float, asked: Counted, now: float) -> None:
        """The store has another size: what was counted says nothing of it."""
        self.capacity, self.since = pages, now
        for sample in self._samples:
            sample.resize(pages, now)
        self._asked = self._hot = 0.0
        self._hits = dict.fromkeys(self._hits, 0.0)
        self._seen = [0.0] * len(self._samples)
        self._begin_epoch(asked)

    def _begin_epoch(self, asked: Counted) -> None:
        self._epoch, self._sampled = asked, 0
        for sample in self._samples:
            sample.references = 0.0
            for shadow in sample.shadows.values():
                shadow.hits = 0.0

    def _end_epoch(self, asked: Counted, now: float) -> str | None:
        fade = 0.5 ** (1 / HALF_LIFE_EPOCHS)
        self._asked = self._asked * fade + asked.all - self._epoch.all
        self._hot = self._hot * fade + asked.hot - self._epoch.hot
        for number, sample in enumerate(self._samples):
            self._seen[number] = self._seen[number] * fade + sample.references
            for each, shadow in sample.shadows.items():
                self._hits[each] = self._hits[each] * fade + shadow.hits
        first = self._samples[0]
        seen = max(first.references, 1e-9)
        ratios = [first.shadows[name, 1.0].hits / seen for name in self._names]
        self._begin_epoch(asked)
        for sample in self._samples:
            sample.leave_out_hot(now)
        return self.contest.add(ratios)
