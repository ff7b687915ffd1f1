"""What all sessions of one tenant hold together, and its bounds: sessions, reservations, leases.

Leased pages count once, however many sessions lease them: many replicas share one hot prefix. Must
not be here: bytes of pages at rest (evictor.py), pins (tenant_usage.py).
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np

from kvstore.errors import QuotaError

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from kvstore.tenants import Quota

__all__ = ["HeldPages", "TenantHolds"]


class HeldPages:
    """Pages that are held some number of times each. Not thread-safe."""

    def __init__(self) -> None:
        self._holders = np.zeros(0, np.int32)  # by page id
        self.held_bytes = 0

    def fitting(self, pages: NDArray[np.int32], page_bytes: int, bytes_max: int) -> int:
        """How many leading pages may be added without holding more than `bytes_max`."""
        self._grow(pages)
        fresh = self._holders[pages] == 0
        room = (bytes_max - self.held_bytes) // page_bytes
        if int(np.count_nonzero(fresh)) <= room:
            return len(pages)
        return int(np.cumsum(fresh).searchsorted(max(0, room), "right"))

    def add(self, pages: NDArray[np.int32], page_bytes: int) -> None:
        """Hold each of these once more."""
        self._grow(pages)
        self.held_bytes += page_bytes * int(np.count_nonzero(self._holders[pages] == 0))
        self._holders[pages] += 1

    def remove(self, pages: NDArray[np.int32], page_bytes: int) -> None:
        """Hold each of these once less."""
        self._holders[pages] -= 1
        self.held_bytes -= page_bytes * int(np.count_nonzero(self._holders[pages] == 0))

    def _grow(self, pages: NDArray[np.int32]) -> None:
        largest = int(pages.max()) if len(pages) else -1
        if largest >= len(self._holders):
            more = np.zeros(largest + 1, np.int32)
            self._holders = np.concatenate([self._holders, more])


class TenantHolds:
    """Made by SessionRegistry, one a tenant. Thread-safe; takes no other lock."""

    def __init__(
        self,
        tenant: str,
        quota: Callable[[], Quota],
        lease_bytes_max: Callable[[], int | None],
    ) -> None:
        """quota, lease_bytes_max: the tenant's bounds as they are now; None: no bound."""
        self.tenant = tenant
        self._quota = quota
        self._lease_bytes_max = lease_bytes_max
        self._lock = threading.Lock()
        self._leased = HeldPages()
        self.sessions = 0
        self.reservations = 0

    @property
    def leased_bytes(self) -> int:
        """Bytes of the pages that this tenant's sessions lease."""
        return self._leased.held_bytes

    def begin_session(self) -> None:
        """One session more; QuotaError when there are as many as there may be."""
        most = self._quota().sessions_max
        with self._lock:
            if most is not None and self.sessions >= most:
                raise QuotaError(
                    f"{self.sessions} sessions of this tenant are open; sessions_max is {most}"
                )
            self.sessions += 1

    def end_session(self) -> None:
        """One session less."""
        with self._lock:
            self.sessions -= 1

    def begin_reservation(self) -> None:
        """One open reservation more; QuotaError when there are as many as there may be."""
        most = self._quota().reservations_max
        with self._lock:
            if most is not None and self.reservations >= most:
                raise QuotaError(
                    f"{self.reservations} reservations of this tenant are open; reservations_max "
                    f"is {most}: commit or give up some"
                )
            self.reservations += 1

    def end_reservation(self) -> None:
        """One open reservation less."""
        with self._lock:
            self.reservations -= 1

    def lease(self, pages: NDArray[np.int32], page_bytes: int) -> int:
        """Count these pages as leased, as far as the tenant's bound goes; how many leading ones."""
        most = self._lease_bytes_max()
        with self._lock:
            fitting = len(pages)
            if most is not None:
                fitting = self._leased.fitting(pages, page_bytes, most)
            self._leased.add(pages[:fitting], page_bytes)
            return fitting

    def unlease(self, pages: NDArray[np.int32], page_bytes: int) -> None:
        """These leases have ended."""
        with self._lock:
            self._leased.remove(pages, page_bytes)
