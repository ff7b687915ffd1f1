"""What each tenant has of the arena: bytes of its slots in use, and of the extents they lie in.

Counted where it changes, since an allocation asks; `check` compares with the extents. An extent
belongs to one tenant whole, so its bytes are what others cannot have.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstore.tiers.tier import TierError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvstore.tiers.extent import Extent

__all__ = ["ArenaUse", "TenantUse"]


@dataclass(frozen=True, slots=True)
class TenantUse:
    """Bytes of one tenant."""

    used_bytes: int = 0  # slots reserved or published
    extent_bytes: int = 0


NOTHING = TenantUse()


class ArenaUse:
    """Not thread-safe: the host tier changes it under its lock."""

    def __init__(self) -> None:
        self._use: dict[str, TenantUse] = {}

    def of(self, tenant: str) -> TenantUse:
        """What this tenant has now."""
        return self._use.get(tenant, NOTHING)

    def all(self) -> dict[str, TenantUse]:
        """Every tenant that has an extent."""
        return dict(self._use)

    def add_slots(self, extent: Extent, count: int) -> None:
        """So many slots of an extent were taken; given back if negative."""
        self._add(extent.tenant, count * extent.slot_bytes, 0)

    def add_extent(self, extent: Extent) -> None:
        """An extent was made for its tenant."""
        self._add(extent.tenant, 0, extent.memory.size)

    def remove_extent(self, extent: Extent) -> None:
        """An empty extent is its tenant's no more."""
        self._add(extent.tenant, 0, -extent.memory.size)

    def clear(self) -> None:
        """All extents are gone."""
        self._use.clear()

    def check(self, extents: Iterable[Extent]) -> None:
        """Recount; TierError with the numbers."""
        counted = ArenaUse()
        for extent in extents:
            counted.add_extent(extent)
            counted.add_slots(extent, extent.used_slots)
        if counted._use != self._use:
            raise TierError(f"tenants have {counted._use} of the arena, counted: {self._use}")

    def _add(self, tenant: str, used_bytes: int, extent_bytes: int) -> None:
        old = self.of(tenant)
        new = TenantUse(old.used_bytes + used_bytes, old.extent_bytes + extent_bytes)
        if new == NOTHING:
            self._use.pop(tenant, None)
        else:
            self._use[tenant] = new
