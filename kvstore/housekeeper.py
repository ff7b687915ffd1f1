"""What must happen now and then: pins end, old pages leave, accounts are set right, LMDB is tidied.

A thread that wakes once a second; nothing it does takes longer than a look-up may wait.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

from kvstore import accounts, removal
from kvstore.errors import ClosedError
from kvstore.ghost_list import Left
from kvstore.redis_share import IDLE_S
from kvstore.removal import Selection
from kvstore.slot_recovery import SlotRecovery

if TYPE_CHECKING:
    from kvstore.disk_writer import DiskWriter
    from kvstore.recording import Recordings
    from kvstore.state import StoreState

TICK_S = 1.0
ACCOUNTS_EVERY_TICKS = 60

_log = logging.getLogger("kvstore.store")


class Housekeeper:
    """Owns the thread; `tick` is one round, so that tests need no waiting."""

    def __init__(
        self, state: StoreState, writer: DiskWriter | None, recordings: Recordings
    ) -> None:
        self._state = state
        self._recordings = recordings
        self._writer = writer
        self._recovery = SlotRecovery(state, writer)
        self._studying = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvstore-housekeeper", daemon=True)
        self._thread.start()

    def tick(self, number: int = 0) -> None:
        """One round."""
        state = self._state
        state.end_pins()
        with state.lock:
            if state.closed:
                return
            state.retry_condemned()
            state.drop_idle_remote(IDLE_S)
        self._study()
        self._recordings.follow_note()
        max_age_s = state.config.max_age_s
        if max_age_s is not None and state.warm:
            old = Selection(older_than_s=max_age_s)
            removal.evict(state, self._writer, old, dry_run=False, why=Left.AGE)
        if number % ACCOUNTS_EVERY_TICKS == 0 and state.warm:
            self.check_accounting()
            self.recover_slots()
            with state.lock:
                state.forget_empty_trees()
            if state.disk is not None:
                state.disk.maintain()

    def _study(self) -> None:
        """Let the policy think without the lock, one thought at a time."""
        state = self._state
        if not self._studying.acquire(blocking=False):
            return
        try:
            with state.lock:
                study = state.policy.study()
            if study is not None:
                began_s = time.thread_time()
                study.work()
                with state.lock:
                    study.adopt()
                    state.policy.studied(time.thread_time() - began_s)
        finally:
            self._studying.release()

    def check_accounting(self) -> None:
        """See accounts.check: raises AssertionError with the numbers."""
        accounts.check(self._state)

    def recover_slots(self) -> int:
        """See SlotRecovery.run."""
        return self._recovery.run()

    def stop(self, deadline: float) -> None:
        """End the thread."""
        self._stop.set()
        self._thread.join(max(0.1, deadline - self._state.clock()))

    def _run(self) -> None:
        number = 1
        while not self._stop.wait(TICK_S):
            try:
                self.tick(number)
            except ClosedError:
                return
            except Exception:
                _log.exception("housekeeping failed; trying again in %g s", TICK_S)
            number += 1
