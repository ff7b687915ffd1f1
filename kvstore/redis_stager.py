"""Brings pages from Redis into the arena, where they become pages of this store like any other.

Top-down: a page is published only under a page that this store has itself. What can't be read is
forgotten with all below it, which is all in Redis too: nothing of this store hangs there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.prefix_index.page_table import REDIS
from kvstore.stager import Stager
from kvstore.state import LOCAL_BITS, NO_PAGE
from kvstore.tiers.tier import ReadStatus

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from kvstore.disk_writer import DiskWriter
    from kvstore.evictor import Evictor
    from kvstore.redis_finder import RedisFinder
    from kvstore.state import StoreState
    from kvstore.tiers.host_tier import HostTier
    from kvstore.tiers.redis_tier import RedisTier


class RedisStager(Stager):
    """A Stager whose breaker is the tier's own."""

    _tier = REDIS

    def __init__(
        self,
        state: StoreState,
        redis: RedisTier,
        host: HostTier,
        evictor: Evictor,
        disk_writer: DiskWriter | None,
        finder: RedisFinder,
    ) -> None:
        """`disk_writer` is given what arrives, as what is committed; `finder` is told what can't
        be read."""
        self._finder = finder
        self._redis = redis
        self._disk_writer = disk_writer
        super().__init__(state, redis, host, evictor)

    @property
    def open_breaker(self) -> bool:
        """Whether reading is not worth a try now."""
        return not self._redis.link.ready

    def _usable(self, pages: list[int], statuses: list[ReadStatus]) -> list[int]:
        table = self._state.index.table
        arrived = {NO_PAGE}
        good = []
        for position, (page, status) in enumerate(zip(pages, statuses, strict=True)):
            parent = int(table.parent[page])
            has_parent = parent in arrived or int(table.state[parent]) & LOCAL_BITS
            if status is ReadStatus.OK and has_parent and page not in self._state.condemned:
                arrived.add(page)
                good.append(position)
        return good

    def _arrived(self, pages: NDArray[np.int32]) -> None:
        state = self._state
        state.counters.redis_pages_read += state.leave_redis(pages)
        if self._disk_writer is not None and not self._disk_writer.enqueue(pages.tolist()):
            state.unwritten.update(pages.tolist())

    def _account(self, page: int, status: ReadStatus) -> None:
        state = self._state
        if status is ReadStatus.OK:
            return
        # ERROR is nothing that the page is to blame for.
        if status is not ReadStatus.ERROR and state.index.table.is_live(page):
            self._finder.avoid(state.index.root_of(page), state.index.table.key_of(page))
        # An earlier page of the group may have taken this one along.
        if state.index.table.is_live(page) and page not in state.condemned:
            state.drop_subtree(page)
