"""A match: the longest stored chain of a prompt, leased from the look-up on.

While a match is held none of its pages moves or vanishes. Its views are windows on the arena; they
are valid until release().
"""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

from kvstore.errors import InvalidRequest
from kvstore.prefix_index.page_table import rows_of
from kvstore.request import checked_deadline
from kvstore.state import HOST, REDIS, TIER_NAMES

if TYPE_CHECKING:
    from collections.abc import Hashable

    from numpy.typing import NDArray

    from kvstore.session import Session

# Why a server gave out less of a chain than it has: the session, or all sessions of the tenant,
# keep as much from moving as they may.
LEASE_LIMIT, TENANT_LEASE_LIMIT = "lease limit", "lease limit of the tenant"


class Match:
    """What Session.match() found. Release it, or use it in a `with` statement."""

    def __init__(self, session: Session, page_ids: NDArray[np.int32]) -> None:
        self._session = session
        self._state = session.state
        self._page_ids = page_ids
        self._leased = int(page_ids[-1]) if len(page_ids) else -1
        self._ready_s = perf_counter()  # since when its pages can be read
        self.reason = ""  # why it is shorter than what is stored
        self.is_whole = False  # all whole pages of the prompt were found: see Session.look_ahead

    @property
    def pages(self) -> int:
        """Length of the chain in pages."""
        return len(self._page_ids)

    @property
    def tokens(self) -> int:
        """Length of the chain in tokens."""
        return len(self._page_ids) * self._session.spec.page_tokens

    @property
    def page_ids(self) -> NDArray[np.int32]:
        """Where the pages stand in the page table; stable while the lease is held."""
        return self._page_ids

    @property
    def versions(self) -> list[Hashable]:
        """A name for each page's bytes, which no other page of this store has or will have."""
        with self._state.lock:
            return list(self._state.index.table.sequence[self._page_ids].tolist())

    @property
    def tiers(self) -> list[str]:
        """The fastest tier of each page now: "host", "disk" or "redis"."""
        with self._state.lock:
            bits = self._state.index.table.state[self._page_ids]
        # The lowest bit that is set is the fastest tier's.
        return [TIER_NAMES[(each & -each).bit_length() - 1] for each in bits.tolist()]

    @property
    def host_pages(self) -> int:
        """How many leading pages are in the arena now."""
        with self._state.lock:
            return self._count_host()

    def host_slots(self) -> NDArray[np.int64]:
        """Each page's slot in the arena now, -1 for those that have none."""
        with self._state.lock:
            pages = self._page_ids
            slots = self._state.index.table.slot[HOST][rows_of(pages)].astype(np.int64)
            here = self._state.in_tier(pages, HOST)
            if not here.all():
                slots[~here] = -1
            slots[len(self._state.cut_condemned(pages)) :] = -1
        return slots

    def stage(self, deadline_s: float | None = None, *, pages: int | None = None) -> int:
        """Bring the chain's pages, or its first `pages`, into the arena; how many leading pages
        are there now.

        Returns as soon as all are there, when one turned out to be damaged or unreadable, or after
        `deadline_s` seconds (StoreConfig.stage_deadline_s unless given), whichever comes first.
        Reads that have begun go on in the background.
        """
        state = self._state
        wait_s = state.config.stage_deadline_s if deadline_s is None else deadline_s
        deadline = state.clock() + checked_deadline(wait_s)
        with state.lock:
            state.require_open()
            if self._leased < 0:
                return 0
            wanted = self._page_ids[:pages]
            missing = wanted[~state.in_tier(wanted, HOST)]
            remote = state.in_tier(missing, REDIS)
        started_s = perf_counter()
        self._fetch(missing[~remote].tolist(), missing[remote].tolist(), deadline)
        with state.lock:
            if len(missing):
                self._ready_s = perf_counter()
                state.meters.stage.observe(self._ready_s - started_s)
            there = self._count_host()
            if self.is_whole and len(missing) and there == len(self._page_ids):
                self._session.look_ahead(int(self._page_ids[-1]))
            return there

    def views(self, start: int = 0, stop: int | None = None) -> list[memoryview]:
        """Read-only bytes of pages [start, stop), `spec.page_bytes` each; stage() them first."""
        state = self._state
        with state.lock:
            state.require_open()
            there = self._count_host()
            stop = there if stop is None else stop
            if not isinstance(start, int) or not isinstance(stop, int):
                raise InvalidRequest("views: whole numbers of pages are needed")
            if not 0 <= start <= stop <= there:
                raise InvalidRequest(
                    f"views [{start}, {stop}) of a match with {there} pages in memory"
                )
            slots = state.index.table.slot[HOST][self._page_ids[start:stop]].tolist()
        if state.host is None:
            return []
        size = self._session.spec.page_bytes
        return [state.host.readonly_view(slot, size) for slot in slots]

    def keep(self, pages: int, why: str) -> None:
        """Let go of all but the leading `pages` of the chain: the others may leave from then on.

        `why` becomes the match's reason, unless it is that long anyway.
        """
        state = self._state
        with state.lock:
            if pages >= len(self._page_ids):
                return
            self.reason = why
            state.counters.lookups_cut += 1
            state.counters.pages_cut += len(self._page_ids) - max(pages, 0)
            if pages <= 0:
                self.release()
                return
            kept, dropped = int(self._page_ids[pages - 1]), self._leased
            state.index.lease(kept)
            state.index.unlease(dropped)
            self._leased, self._page_ids = kept, self._page_ids[:pages]
            state.retry_condemned()
            state.changed.notify_all()

    def valid(self) -> bool:
        """Whether what was copied out of views is right: True as long as the lease is held."""
        return self._leased >= 0 and not self._state.closed

    def release(self) -> None:
        """End the lease; doing it again does nothing."""
        state = self._state
        with state.lock:
            if self._leased < 0:
                return
            leased, self._leased = self._leased, -1
            self._page_ids = self._page_ids[:0]
            state.meters.load.observe(perf_counter() - self._ready_s)
            if not state.closed:
                state.index.unlease(leased)
                state.retry_condemned()
                state.changed.notify_all()
        self._session.forget(self)

    def __enter__(self) -> Match:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()

    def _fetch(self, on_disk: list[int], in_redis: list[int], deadline: float) -> None:
        """Wait for pages from both sources at once."""
        disk, share = self._session.stager, self._session.share
        coming = share.stager.begin(in_redis) if share is not None and in_redis else []
        if disk is not None and on_disk:
            disk.wait(disk.begin(on_disk), deadline)
        if share is not None and coming:
            share.stager.wait(coming, deadline)

    def _count_host(self) -> int:
        pages = self._state.cut_condemned(self._page_ids)
        here = self._state.in_tier(pages, HOST)
        return len(here) if here.all() else int(np.argmin(here))
