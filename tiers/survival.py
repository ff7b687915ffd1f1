"""What holding a page of some class and age is worth: survival curves, and the best odds on them.

An interval opens when a page is used and closes when it is used again, whether or not it was still
stored: pages that have left count too, as long as their ghosts are known, for else only what stayed
would ever be seen to be used. Intervals still open count as at risk up to their age; those whose
ghost was lost, up to the age at which that happened (Kaplan-Meier). Bins of age are logarithmic,
and values are read between their edges, so they never jump.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from kvstore.tiers.eviction import Scores

BINS = 40
AGE_FIRST_S = 0.5
AGE_FACTOR = 1.45
# Observations that the pooled hazard weighs against a class's own.
PRIOR_WEIGHT = 20.0
# What was counted fades by half about every so many events, so that a change of load is noticed.
HALF_LIFE_EVENTS = 20_000
# Touches that wait to be counted together: a look-up does not pay for it.
PENDING_MAX = 64
JOINED_MIN = 64  # pages; of fewer, joining costs more than it spares
WORTH_MIN = 1e-12
HAZARD_MAX = 1 - 1e-6
_EDGES_S = np.concatenate([[0.0], AGE_FIRST_S * AGE_FACTOR ** np.arange(1, BINS + 1)])
_PER_OCTAVE = 1 / math.log2(AGE_FACTOR)

Classes = npt.NDArray[np.integer]


def age_place(ages_s: Scores) -> Scores:
    """Where ages lie on the axis of bins: bin b is [b, b + 1); younger than the first edge is 0."""
    place: Scores = np.log2(np.maximum(ages_s, AGE_FIRST_S) * (1 / AGE_FIRST_S)) * _PER_OCTAVE
    return np.minimum(place, BINS - 1e-6, out=place)


class SurvivalTable:
    """Counts by class and bin of age, and the survival learnt from them at the last refit."""

    def __init__(self, classes: int) -> None:
        self._classes = classes
        self._closed = np.zeros((classes, BINS))
        self._lost = np.zeros((classes, BINS))
        # Closed and not counted yet: of so many pages each.
        self._pending: list[tuple[Classes, Scores, npt.NDArray[np.int64]]] = []
        self._log_worth = np.full(classes * (BINS + 1), math.log(WORTH_MIN))

    def close(self, classes: Classes, ages_s: Scores) -> None:
        """Pages were used again, at those ages. Both arrays are kept for a while."""
        if len(classes) < JOINED_MIN:
            self._pending.append((classes, ages_s, np.ones(len(classes), np.int64)))
        else:
            self._pending.append(_joined(classes, ages_s))
        if len(self._pending) >= PENDING_MAX:
            self._count()

    def lose(self, classes: Classes, ages_s: Scores) -> None:
        """Nobody will know whether these are used again."""
        self._lost += self.histogram(classes, ages_s)

    def histogram(
        self, classes: Classes, ages_s: Scores, counts: npt.NDArray[np.int64] | None = None
    ) -> Scores:
        """Counts by class and bin, of one page each or of `counts`."""
        cells = classes.astype(np.int64) * BINS + age_place(ages_s).astype(np.int64)
        found = np.bincount(cells, counts, minlength=self._classes * BINS)
        return found.astype(np.float64).reshape(self._classes, BINS)

    def copy(self) -> SurvivalTable:
        """To refit while this one is used."""
        self._count()
        made = SurvivalTable(self._classes)
        made._closed, made._lost = self._closed.copy(), self._lost.copy()
        made._log_worth = self._log_worth
        return made

    def adopt(self, learnt: SurvivalTable, events: int) -> None:
        """Go by what a copy has learnt; so many events passed since that was done last."""
        self._count()
        self._log_worth = learnt._log_worth
        fade = 0.5 ** (events / HALF_LIFE_EVENTS)
        self._closed *= fade
        self._lost *= fade

    def refit(self, still_open: Scores) -> None:
        """Learn survival from all that is known; `still_open` is a histogram of open intervals."""
        self._count()
        used = self._closed
        ended = used + self._lost + still_open
        # At risk in a bin: all that got so far, but for half of those that were last seen in it.
        reached = ended[:, ::-1].cumsum(axis=1)[:, ::-1]
        at_risk = np.maximum(reached - (self._lost + still_open) / 2, used)
        pooled = used.sum(axis=0) / np.maximum(at_risk.sum(axis=0), 1.0)
        hazard = (used + PRIOR_WEIGHT * pooled) / (at_risk + PRIOR_WEIGHT)
        survival = np.zeros((self._classes, BINS + 1))
        survival[:, 1:] = np.log1p(-np.minimum(hazard, HAZARD_MAX)).cumsum(axis=1)
        self._log_worth = np.log(_best_odds(survival)).ravel()

    def _count(self) -> None:
        """Add up what is pending."""
        if self._pending:
            self._closed += self.histogram(*map(np.concatenate, zip(*self._pending, strict=True)))
            self._pending.clear()

    def worth(self, classes: Classes, ages_s: Scores) -> Scores:
        """Hits a second that holding such a page yields at best, WORTH_MIN if none is known of.

        That is Gittins' index: of all times for which it could be held from now on, the one with
        the best chance of a use over the time that it is expected to be held. So there is no
        horizon to choose: pages that return soon and pages that surely return are compared fairly.
        """
        base = classes.astype(np.int64) * (BINS + 1)
        found: Scores = np.exp(_between(self._log_worth, base, age_place(ages_s)))
        return found


def _joined(classes: Classes, ages_s: Scores) -> tuple[Classes, Scores, npt.NDArray[np.int64]]:
    """The same with neighbours of one class and age as one, and how many each stands for: pages of
    a long chain were mostly used last at one time."""
    differ = (classes[1:] != classes[:-1]) | (ages_s[1:] != ages_s[:-1])
    edges = np.concatenate([[0], np.flatnonzero(differ) + 1, [len(classes)]])
    firsts = edges[:-1]
    return classes[firsts], ages_s[firsts], edges[1:] - firsts


def _best_odds(log_survival: Scores) -> Scores:
    """Gittins' index by class at each edge, of curves given at the edges."""
    alive = np.exp(log_survival)
    held = np.zeros_like(alive)
    held[:, 1:] = ((alive[:, 1:] + alive[:, :-1]) / 2 * np.diff(_EDGES_S)).cumsum(axis=1)
    used_by = alive[:, :, None] - alive[:, None, :]
    held_for = held[:, None, :] - held[:, :, None]
    odds = np.where(held_for > 0, used_by / np.where(held_for > 0, held_for, 1.0), 0.0)
    best = odds.max(axis=2)
    best[:, -1] = best[:, -2]  # nothing is known beyond
    found: Scores = np.maximum(best, WORTH_MIN)
    return found


def _between(log: Scores, base: npt.NDArray[np.int64], place: Scores) -> Scores:
    """Values at places between two edges, straight lines between them."""
    edge = place.astype(np.int64)
    at = base + edge
    low = log[at]
    found: Scores = low + (log[at + 1] - low) * (place - edge)
    return found
