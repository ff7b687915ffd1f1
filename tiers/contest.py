"""Which of several policies to follow, by what each would have hit, epoch by epoch.

Another one is followed when it was better than the present one by MARGIN on average since the last
change, over EPOCHS_MIN epochs at least, and by SURE standard errors of that mean. Evidence is of
EPOCHS_MAX epochs at most, so that old load is forgotten; a change begins it anew, so that none
follows another soon. Pure: no clock; epochs are counted in references by whoever adds them.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

MARGIN = 0.005  # of hit ratio
EPOCHS_MIN = 8
EPOCHS_MAX = 32
SURE = 4.0


class Contest:
    """Hit ratios of all that take part, in a fixed order, since the last change."""

    def __init__(self, names: Sequence[str], following: str) -> None:
        self.names = tuple(names)
        self.following = following
        self.switches = 0
        self._epochs: deque[tuple[float, ...]] = deque(maxlen=EPOCHS_MAX)

    def add(self, ratios: Sequence[float]) -> str | None:
        """One more epoch; the name of the one to follow from now on, if that changes."""
        self._epochs.append(tuple(ratios))
        count = len(self._epochs)
        if count < EPOCHS_MIN:
            return None
        table = np.array(self._epochs)
        lead = table - table[:, [self.names.index(self.following)]]
        mean = lead.mean(axis=0)
        error = lead.std(axis=0, ddof=1) / count**0.5
        sure = np.where((mean >= MARGIN) & (mean >= SURE * error), mean, 0.0)
        if not sure.any():
            return None
        self.following = self.names[int(sure.argmax())]
        self.switches += 1
        self._epochs.clear()
        return self.following
