"""What must happen now and then: pins end, old pages leave, accounts are set right, LMDB is tidied.

A thread that wakes once a second; nothing it does takes longer than a look-up may wait.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

import numpy as np

from kvstore import removal
from kvstore.ghost_list import Left
from kvstore.redis_share import IDLE_S
from kvstore.removal import Selection
from kvstore.state import DISK, HOST, LOCAL_BITS, NO_PAGE, REDIS

if TYPE_CHECKING:
    from numpy.typing import NDArray

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
        self._suspects: dict[int, set[tuple[int, int]]] = {HOST: set(), DISK: set()}
        self._studying = threading.Lock()
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
        """Compare each tier's used slots with the index; raises AssertionError with the numbers.

        A tier may use more slots than the index has pages in it, by what is being written or read
        at this moment; never fewer, and no two pages share one.
        """
        state = self._state
        with state.lock:
            table = state.index.table
            pages = table.live()
            for tier, medium in ((HOST, state.host), (DISK, state.disk), (REDIS, state.redis)):
                if medium is None:
                    continue
                if tier == DISK:
                    self._check_disk_use(pages)
                resident = pages[state.in_tier(pages, tier)]
                slots = table.slot[tier][resident]
                if len(np.unique(slots)) != len(slots):
                    raise AssertionError(f"tier {tier}: two pages share a slot")
                if medium.usage().used_slots < len(slots):
                    raise AssertionError(
                        f"tier {tier}: {len(slots)} pages, {medium.usage().used_slots} slots used"
                    )
            remote = pages[state.in_tier(pages, REDIS)]
            if np.any(table.state[remote] & LOCAL_BITS):
                raise AssertionError("a page of Redis is in a tier of this store too")
            parents = table.parent[pages[~state.in_tier(pages, REDIS)]]
            if np.any(state.in_tier(parents[parents != NO_PAGE], REDIS)):
                raise AssertionError("a page of this store hangs below one that only Redis has")

    def recover_slots(self) -> int:
        """Give back published slots that no page has, and had none the last time either; how many.

        Slots that are reserved have owners of their own. Looks at the disk only while nothing is
        on its way there: until the index is told, what was written belongs to the writer.
        """
        state, recovered = self._state, 0
        with state.freeing, state.lock:
            pages = state.index.table.live()
            for tier, medium in ((HOST, state.host), (DISK, state.disk)):
                is_busy = tier == DISK and self._writer is not None and self._writer.is_busy
                if medium is None or is_busy or state.closed:
                    continue
                owned = state.index.table.slot[tier][pages[state.in_tier(pages, tier)]]
                leaving = [*state.unused_slots, *state.wiped_slots] if tier == DISK else []
                owned = np.append(owned.astype(np.int64), np.array(leaving, np.int64))
                loose = medium.published_slots()
                loose = loose[:0] if len(loose) == len(owned) else np.setdiff1d(loose, owned)
                marks = set(zip(loose.tolist(), self._marks(tier, loose), strict=True))
                lost = sorted(slot for slot, _ in marks & self._suspects[tier])
                self._suspects[tier] = marks
                if tier == DISK:
                    state.unused_slots.extend(lost)
                elif lost and state.host is not None:
                    state.host.free_many(lost)
                recovered += len(lost)
            state.counters.slots_recovered += recovered
        if recovered:
            _log.error("%d slots were in use and of no page: given back", recovered)
            state.free_unused_slots()
        return recovered

    def _marks(self, tier: int, slots: NDArray[np.int64]) -> list[int]:
        """What changes when a slot of the arena is used again."""
        host = self._state.host
        if tier == DISK or host is None:
            return [0] * len(slots)
        marks: list[int] = host.generations(slots).tolist()
        return marks

    def _check_disk_use(self, pages: NDArray[np.int32]) -> None:
        state = self._state
        resident = pages[state.in_tier(pages, DISK)]
        counted = state.disk_bytes_by_tenant(resident, state.index.table.slot[DISK][resident])
        noted = {tenant: size for tenant, size in state.disk_use.items() if size}
        if counted != noted:
            raise AssertionError(f"tenants have {counted} bytes on disk, counted: {noted}")

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
