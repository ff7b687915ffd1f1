"""The one thread that gives pages to Redis: after commits, in the background, never in the way.

The queue holds page numbers only, and leases nothing: what leaves the arena before its turn is not
written. A page that another store has written already is not written again. After Redis was away or
empty, the pages of the arena that were used last are offered again, each store at its own moment.
"""

from __future__ import annotations

import logging
import random
import threading
from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from kvstore.state import HOST, StoreState
from kvstore.tiers.tier import PageRecord, TierError, aligned

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvstore.tiers.host_tier import HostTier
    from kvstore.tiers.redis_tier import RedisTier

QUEUE_BYTES_MAX = 256 << 20
GROUP_BYTES_MAX = 8 << 20
HOST_SHARE = 8  # of the arena, at most one part of so many is leased for writing
IDLE_WAIT_S = 1.0
# All stores that share a Redis notice its return at once; they must not all write at once.
ANNOUNCE_WITHIN_S = 20.0

_log = logging.getLogger("kvstore.redis")


class RedisWriter:
    """Queue and thread."""

    def __init__(self, state: StoreState, redis: RedisTier, host: HostTier) -> None:
        self._state = state
        self._redis = redis
        self._host = host
        self._group_bytes_max = min(GROUP_BYTES_MAX, state.config.host_bytes // HOST_SHARE)
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._queue: deque[tuple[int, int, int]] = deque()  # page, sequence, bytes
        self._queue_bytes = 0
        self._writing: set[int] = set()
        self._losses = redis.link.losses
        self._announce_at_s: float | None = None
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="kvstore-redis-write", daemon=True)
        self._thread.start()

    @property
    def queue_bytes(self) -> int:
        """Bytes of pages that wait."""
        return self._queue_bytes

    def enqueue(self, pages: Iterable[int]) -> None:
        """Offer pages, parents before children; what there is no room for is dropped. The store's
        lock is held."""
        table = self._state.index.table
        ready = self._redis.takes_writes
        with self._lock:
            for page in pages:
                size = int(table.payload_bytes[page])
                if not ready or self._queue_bytes + size > QUEUE_BYTES_MAX or self._stopping:
                    self._state.counters.redis_dropped += 1
                    continue
                self._queue.append((page, int(table.sequence[page]), size))
                self._queue_bytes += size
            self._work.notify()

    def cancel(self, pages: set[int]) -> None:
        """Take pages out of the queue that are about to be evicted."""
        with self._lock:
            self._queue = deque(item for item in self._queue if item[0] not in pages)
            self._queue_bytes = sum(size for _, _, size in self._queue)

    def is_writing(self, pages: set[int]) -> bool:
        """Whether one of these pages is on its way this moment. The store's lock is held."""
        return not self._writing.isdisjoint(pages)

    def flush(self, deadline: float) -> bool:
        """Wait until the queue is empty; False when `deadline` (store's clock) passed first."""
        state = self._state
        with state.lock:
            while self._queue or self._writing:
                left = deadline - state.clock()
                if left <= 0 or not self._redis.takes_writes:
                    return False
                state.changed.wait(min(left, 0.05))
        return True

    def stop(self, deadline: float) -> None:
        """Write what waits, as long as Redis takes it; then end the thread."""
        self.flush(deadline)
        with self._lock:
            self._stopping = True
            self._work.notify_all()
        self._thread.join(max(0.1, deadline - self._state.clock()))

    def announce(self) -> int:
        """Offer the pages of the arena that were used last, as many as half the queue takes."""
        state = self._state
        with state.lock:
            if state.closed:
                return 0
            table = state.index.table
            pages = table.live()
            pages = pages[state.in_tier(pages, HOST)]
            pages = pages[np.argsort(-table.last_use[pages], kind="stable")]
            fits = np.cumsum(table.payload_bytes[pages].astype(np.int64)) <= QUEUE_BYTES_MAX // 2
            pages = pages[fits]
            pages = pages[np.argsort(table.depth[pages], kind="stable")]  # parents first
            self.enqueue(pages.tolist())
            return len(pages)

    # The thread

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._queue and not self._stopping:
                    self._work.wait(IDLE_WAIT_S)
                if self._stopping:
                    return
                group = self._pop_group()
            try:
                self._write_group(group)
                self._announce_when_due()
            except TierError:
                continue  # counted, and the breaker says it
            except Exception:  # our bug; the thread must live on
                _log.exception("writing to Redis failed")

    def _pop_group(self) -> list[tuple[int, int]]:
        group: list[tuple[int, int]] = []
        size = 0
        while self._queue and (not group or size + self._queue[0][2] <= self._group_bytes_max):
            page, sequence, payload_bytes = self._queue.popleft()
            group.append((page, sequence))
            size += payload_bytes
        self._queue_bytes -= size
        self._writing.update(page for page, _ in group)
        return group

    def _write_group(self, group: list[tuple[int, int]]) -> None:
        state = self._state
        with state.lock:
            pages = (
                [] if state.closed else [page for page, mark in group if self._is_there(page, mark)]
            )
            for page in pages:
                state.index.lease(page)
            records = [state.record(page) for page in pages]
            column = state.index.table.slot[HOST]
            views = [
                self._host.view(int(column[page]), aligned(record.payload_bytes))
                for page, record in zip(pages, records, strict=True)
            ]
        present = written = 0
        try:
            if pages and self._redis.takes_writes:
                present, written = self._write(records, views)
        finally:
            del views
            with state.lock:
                state.counters.redis_pages_present += present
                state.counters.redis_pages_written += written
                state.counters.redis_dropped += len(group) - present - written
                self._writing.clear()
                for page in pages:
                    state.index.unlease(page)
                if pages:
                    state.retry_condemned()
                state.changed.notify_all()

    def _write(self, records: list[PageRecord], views: list[memoryview]) -> tuple[int, int]:
        """How many pages Redis had already, and how many it has now on top."""
        known = self._redis.renew(records)
        wanted = [at for at, there in enumerate(known) if not there]
        slots: list[int] = []
        for at in wanted:
            got = self._redis.reserve(records[at].tenant, records[at].payload_bytes, 1)
            if not got:  # pages that were only looked up count for less than one to write
                with self._state.lock:
                    self._state.drop_idle_remote(0.0)
                got = self._redis.reserve(records[at].tenant, records[at].payload_bytes, 1)
            if not got:
                break
            slots += got
        wanted = wanted[: len(slots)]
        try:
            kept = self._redis.write_many(
                slots, [records[at] for at in wanted], [views[at] for at in wanted]
            )
        finally:
            self._redis.forget(slots)
        return sum(known), sum(kept)

    def _is_there(self, page: int, sequence: int) -> bool:
        state, table = self._state, self._state.index.table
        return (
            table.is_live(page)
            and int(table.sequence[page]) == sequence
            and bool((table.state[page] >> HOST) & 1)
            and page not in state.condemned
        )

    def _announce_when_due(self) -> None:
        now, losses = self._state.clock(), self._redis.link.losses
        if losses != self._losses:
            self._losses = losses
            self._announce_at_s = now + random.uniform(0.0, ANNOUNCE_WITHIN_S)
        if self._announce_at_s is not None and now >= self._announce_at_s:
            self._announce_at_s = None
            count = self.announce()
            _log.info("redis: offering %d pages again", count)
