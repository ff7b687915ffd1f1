"""What must happen now and then: pins end, old pages leave, accounts are compared, LMDB is tidied.

A thread that wakes once a second; nothing it does takes longer than a look-up may wait.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

import numpy as np

from kvstore import removal
from kvstore.removal import Selection
from kvstore.state import DISK, HOST

if TYPE_CHECKING:
    from kvstore.disk_writer import DiskWriter
    from kvstore.state import StoreState

TICK_S = 1.0
ACCOUNTS_EVERY_TICKS = 60

_log = logging.getLogger("kvstore.store")


class Housekeeper:
    """Owns the thread; `tick` is one round, so that tests need no waiting."""

    def __init__(self, state: StoreState, writer: DiskWriter | None) -> None:
        self._state = state
        self._writer = writer
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvstore-housekeeper", daemon=True)
        self._thread.start()

    def tick(self, number: int = 0) -> None:
        """One round."""
        state = self._state
        with state.lock:
            if state.closed:
                return
            state.index.expire_pins(state.clock())
            state.retry_condemned()
        max_age_s = state.config.max_age_s
        if max_age_s is not None and state.warm:
            removal.evict(state, self._writer, Selection(older_than_s=max_age_s), dry_run=False)
        if number % ACCOUNTS_EVERY_TICKS == 0 and state.warm:
            self.check_accounting()
            with state.lock:
                state.forget_empty_trees()
            if state.disk is not None:
                state.disk.maintain()

    def check_accounting(self) -> None:
        """Compare each tier's used slots with the index; raises AssertionError with the numbers.

        A tier may use more slots than the index has pages in it, by what is being written or read
        at this moment; never fewer, and no two pages share one.
        """
        state = self._state
        with state.lock:
            table = state.index.table
            pages = table.live()
            for tier, medium in ((HOST, state.host), (DISK, state.disk)):
                if medium is None:
                    continue
                resident = pages[state.in_tier(pages, tier)]
                slots = table.slot[tier][resident]
                if len(np.unique(slots)) != len(slots):
                    raise AssertionError(f"tier {tier}: two pages share a slot")
                if medium.usage().used_slots < len(slots):
                    raise AssertionError(
                        f"tier {tier}: {len(slots)} pages, {medium.usage().used_slots} slots used"
                    )

    def stop(self, deadline: float) -> None:
        """End the thread."""
        self._stop.set()
        self._thread.join(max(0.1, deadline - self._state.clock()))

    def _run(self) -> None:
        number = 1
        while not self._stop.wait(TICK_S):
            try:
                self.tick(number)
            except Exception:
                _log.exception("housekeeping failed; trying again in %g s", TICK_S)
            number += 1
