"""What is written to disk at all: an SSD lives longer when pages that nobody asks for stay off it.

Pure decisions on 64 bits of page keys; nothing here sees bytes, clocks or trees. Whatever is
decided, a page goes to disk with its ancestors, and one that was promised to be durable always
does. Invariant: what is remembered has a fixed size, as it is for so many pages.

    always         every page
    second-touch   those that were used again since they were stored
    ghost          these, and those that come back soon after they left: LARC (Huang et al.,
                   "Improving Flash-based Disk Cache with Lazy Adaptive Replacement", MSST 2013)
    frequency      those used more often lately than what leaves the disk for them: TinyLFU
                   (Einziger, Friedman, Manes, "TinyLFU: A Highly Efficient Cache Admission
                   Policy", ACM ToS 2017); its victim is the average of the last ones here, as
                   the disk picks its own later, in batches
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from kvstore.tiers.ghost_table import GhostTable

if TYPE_CHECKING:
    from kvstore.tiers.eviction import Keys

ADMISSIONS = ("always", "second-touch", "ghost", "frequency")
ROWS = 4
COUNT_MAX = 15
ROWS_A_PAGE = 4  # of the table of ghosts, where a newer page takes an older one's row
SAMPLE_PAGES = 10  # times its pages, so much is counted before all counts are halved
WIDTH_MIN_BITS, WIDTH_MAX_BITS = 10, 22
VICTIM_SHARE = 0.01  # of the average that one victim makes
# Odd, of good avalanche: from SplitMix64 and the golden ratio.
_SPREADS = np.array(
    [0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0xD6E8FEB86659FD93], np.uint64
)

Bools: TypeAlias = npt.NDArray[np.bool_]


class Admission(Protocol):
    """What any of them can be told and asked. Pages are named by keys, parents first."""

    name: str

    def seen(self, keys: Keys) -> None:
        """Pages were stored, or asked for and found."""

    def admits(self, keys: Keys, uses: npt.NDArray[np.int64]) -> Bools:
        """Which may be written; `uses`: how often each was used since it was stored."""

    def gone(self, keys: Keys) -> None:
        """Pages are in no tier any more."""

    def evicted(self, keys: Keys) -> None:
        """Pages left the disk because others needed the room."""


class AlwaysAdmit:
    """No filter."""

    name = "always"

    def seen(self, keys: Keys) -> None:
        """Nothing to learn."""

    def admits(self, keys: Keys, uses: npt.NDArray[np.int64]) -> Bools:
        return np.ones(len(keys), bool)

    def gone(self, keys: Keys) -> None:
        """Nothing to remember."""

    def evicted(self, keys: Keys) -> None:
        """Nothing to learn."""


class SecondTouch(AlwaysAdmit):
    """Used again since it was stored."""

    name = "second-touch"

    def admits(self, keys: Keys, uses: npt.NDArray[np.int64]) -> Bools:
        used: Bools = uses > 0
        return used


class GhostAdmission(SecondTouch):
    """Used again, or back after it had left."""

    name = "ghost"

    def __init__(self, pages: int) -> None:
        """Remembers about so many pages that have gone."""
        self._ghosts = GhostTable(ROWS_A_PAGE * pages)

    def admits(self, keys: Keys, uses: npt.NDArray[np.int64]) -> Bools:
        known: Bools = self._ghosts.find(keys)[1]
        return known | (uses > 0)

    def gone(self, keys: Keys) -> None:
        zeros = np.zeros(len(keys), np.uint8)
        self._ghosts.put(keys, np.zeros(len(keys)), zeros, zeros)


class FrequencyAdmission(AlwaysAdmit):
    """More frequent than what leaves; with room on the disk, everything."""

    name = "frequency"

    def __init__(self, pages: int) -> None:
        """For a disk of about so many pages."""
        self.sketch = CountMinSketch(pages)
        self._victim = 0.0

    def seen(self, keys: Keys) -> None:
        if self.sketch.add(keys):
            self._victim /= 2

    def admits(self, keys: Keys, uses: npt.NDArray[np.int64]) -> Bools:
        more: Bools = self.sketch.estimate(keys) > round(self._victim)
        return more

    def evicted(self, keys: Keys) -> None:
        if len(keys):
            keep = (1 - VICTIM_SHARE) ** len(keys)
            mean = float(self.sketch.estimate(keys).mean())
            self._victim = keep * self._victim + (1 - keep) * mean


class CountMinSketch:
    """Counts up to 15, a little too high at worst, that fade (Cormode and Muthukrishnan 2005).

    Four rows; a key's count is the least of its four places, and only the least are counted up.
    After SAMPLE_PAGES counts a page all are halved, so that what was popular once is forgotten.
    """

    def __init__(self, pages: int) -> None:
        bits = min(max(WIDTH_MIN_BITS, (pages - 1).bit_length()), WIDTH_MAX_BITS)
        self._shift = np.uint64(64 - bits)
        self._counts = np.zeros((ROWS, 1 << bits), np.uint8)
        self._sample = SAMPLE_PAGES << bits
        self._added = 0

    @property
    def nbytes(self) -> int:
        return self._counts.nbytes

    def add(self, keys: Keys) -> bool:
        """Count each key once; whether all counts were halved."""
        places = self._places(keys)
        counts = self._counts[np.arange(ROWS)[:, None], places]
        least = counts.min(axis=0)
        raised = np.where((counts == least) & (least < COUNT_MAX), counts + 1, counts)
        for row, at in enumerate(places):
            np.maximum.at(self._counts[row], at, raised[row])
        self._added += len(keys)
        if self._added < self._sample:
            return False
        self._added //= 2
        self._counts >>= 1
        return True

    def estimate(self, keys: Keys) -> npt.NDArray[np.uint8]:
        """How often each was counted lately."""
        places = self._places(keys)
        found: npt.NDArray[np.uint8] = self._counts[np.arange(ROWS)[:, None], places].min(axis=0)
        return found

    def _places(self, keys: Keys) -> npt.NDArray[np.int64]:
        mixed = (keys ^ (keys >> np.uint64(31))) + np.uint64(1)
        places: npt.NDArray[np.int64] = ((mixed * _SPREADS[:, None]) >> self._shift).astype(
            np.int64
        )
        return places


def make_admission(name: str, pages: int) -> Admission:
    """By name, for a disk of about so many pages."""
    if name == "always":
        return AlwaysAdmit()
    if name == "second-touch":
        return SecondTouch()
    if name == "ghost":
        return GhostAdmission(pages)
    if name == "frequency":
        return FrequencyAdmission(pages)
    raise ValueError(f"admission {name!r}: one of {', '.join(ADMISSIONS)} is needed")
