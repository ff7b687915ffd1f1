"""Memory that writers fill and the server copies from: a fixed share of the arena's bytes.

It is set aside at the start, so that a writer finds some also when the arena is full of pages. Each
session has a memory of its own; once a client has mapped one it is never handed to another.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from kvstore.shares import room_beside
from kvstore.tiers.extent import Memfd
from kvstore.tiers.host_tier import Staging
from kvstore.tiers.large_pages import LargePages
from kvstore.tiers.tier import TierError, aligned

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

SESSION_BYTES_MAX = 64 << 20
# A session gets this part of what is left, so that many find some and few find much.
# Each piece of a large store costs two round trips: with an eighth it took 1.16 times as long.
SHARE_OF_FREE = 4


class StagingPool:
    """Hands out memories of a session's size while `capacity_bytes` last. Thread-safe."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self._lock = threading.Lock()
        self._used: dict[str, int] = {}  # by tenant
        self._large_pages = LargePages()

    @property
    def used_bytes(self) -> int:
        """Bytes of the memories that are out."""
        return sum(self._used.values())

    def used_by(self, tenant: str) -> int:
        """Bytes of one tenant's."""
        return self._used.get(tenant, 0)

    def take(
        self,
        page_bytes: int,
        tenant: str = "",
        tenants: Iterable[str] = (),
        bytes_max: int | None = None,
    ) -> Staging | None:
        """Memory for at least one page, populated; None when there is no room or no memory.

        Part of the pool is kept for the other `tenants`. bytes_max: of this tenant's in all.
        """
        unit = aligned(page_bytes)
        with self._lock:
            free = room_beside(tenant, self._used, self.capacity_bytes, tenants)
            if bytes_max is not None:
                free = min(free, bytes_max - self.used_by(tenant))
            share = min(SESSION_BYTES_MAX, free // SHARE_OF_FREE)
            size = max(share // unit, 1) * unit
            if size > free:
                return None
            self._used[tenant] = self.used_by(tenant) + size
        try:
            memory = Memfd(size, shared_writable=True)
            memory.populate()
        except (TierError, MemoryError):
            self._forget(size, tenant)
            return None
        self._large_pages.add(memory.mapping)
        return Staging(memory, memory.fd, size)

    def close(self) -> None:
        """End its thread."""
        self._large_pages.close()

    def give_back(self, staging: Staging, tenant: str = "") -> None:
        """End a memory's life here; nobody copies from it any more."""
        staging.memory.close()
        self._forget(staging.size, tenant)

    def _forget(self, size: int, tenant: str) -> None:
        with self._lock:
            self._used[tenant] -= size
            if not self._used[tenant]:
                del self._used[tenant]


class StagingSlots:
    """Which pages of one session's staging are in use. Not thread-safe: its session locks."""

    def __init__(self, size: int, page_bytes: int) -> None:
        self._unit = aligned(page_bytes)
        self._free = list(range(size // self._unit))[::-1]

    @property
    def free(self) -> int:
        """How many pages fit now."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Byte offsets of `count` free pages."""
        return [self._free.pop() * self._unit for _ in range(count)]

    def give_back(self, offsets: Sequence[int]) -> None:
        """Those are free again."""
        self._free.extend(offset // self._unit for offset in reversed(offsets))
