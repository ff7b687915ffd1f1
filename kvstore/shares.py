"""How much of each tier is whose, and who gives when there is no room. Pure decisions on numbers.

A tenant's share is guaranteed: what it says of it, or an equal part of what others have not said.
Who asks for room within its own share gets it from tenants above theirs, the furthest first; who
asks beyond its share has its own coldest pages leave. So nobody loses a page to others while it is
within its share. What no share covers is lent to whoever comes first. Must not be here: pages.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvstore.errors import ConfigError
from kvstore.quantity import format_bytes

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from kvstore.tenants import Quota

__all__ = ["NO_QUOTAS", "Claims", "Tenancy", "TierShares", "queue_room", "room_beside"]

KEPT_PART = 4  # of what can't be taken back, such a part is kept for whoever comes later


@dataclass(frozen=True, slots=True)
class TierShares:
    """What each tenant is guaranteed of one tier, and may have at most; others: nothing, all."""

    capacity_bytes: int = 0
    share_bytes: Mapping[str, int] = field(default_factory=dict)
    most_bytes: Mapping[str, int] = field(default_factory=dict)

    @staticmethod
    def of(tier: str, quotas: Mapping[str, Quota], capacity_bytes: int) -> TierShares:
        """ConfigError when more is promised than there is. tier: "host" or "disk"."""
        said = {name: getattr(quota, f"{tier}_bytes_share") for name, quota in quotas.items()}
        most = {name: getattr(quota, f"{tier}_bytes_max") for name, quota in quotas.items()}
        promised = sum(share for share in said.values() if share is not None)
        if promised > capacity_bytes:
            raise ConfigError(
                f"{tier}_bytes_share: {format_bytes(promised)} are promised to "
                f"{sum(share is not None for share in said.values())} tenants, the tier has "
                f"{format_bytes(capacity_bytes)}; lower shares or raise --{tier}-bytes"
            )
        silent = sum(share is None for share in said.values())
        part = (capacity_bytes - promised) // silent if silent else 0
        bounds = {name: bound for name, bound in most.items() if bound is not None}
        shares = {
            name: min(part, bounds.get(name, part)) if share is None else share
            for name, share in said.items()
        }
        return TierShares(capacity_bytes, shares, bounds)

    def share(self, tenant: str) -> int:
        """Bytes guaranteed to it; 0 for a tenant that nobody promised anything."""
        return self.share_bytes.get(tenant, 0)

    def most(self, tenant: str) -> int | None:
        """Bytes it may have at most."""
        return self.most_bytes.get(tenant)

    def in_units(self, unit_bytes: int) -> dict[str, int]:
        """Shares where capacity moves by whole units: each in bytes of the units it makes whole.

        The last unit may be smaller than the others; nobody's share is missed for that. A share
        that is smaller than a unit guarantees nothing.
        """
        whole, rest = divmod(self.capacity_bytes, unit_bytes)
        units = whole + (2 * rest >= unit_bytes)
        missing = max(0, units * unit_bytes - self.capacity_bytes)
        return {
            tenant: max(0, share * units // self.capacity_bytes * unit_bytes - missing)
            for tenant, share in self.share_bytes.items()
        }

    def of_what_is_left(self, left_bytes: int) -> dict[str, int]:
        """Shares of a tier that keeps some of its capacity for itself, in proportion."""
        left = min(left_bytes, self.capacity_bytes)
        return {
            tenant: share * left // self.capacity_bytes
            for tenant, share in self.share_bytes.items()
        }


@dataclass(frozen=True, slots=True)
class Tenancy:
    """The quotas of all tenants, applied to a store's tiers. Replaced whole when they change."""

    quotas: Mapping[str, Quota] = field(default_factory=dict)
    host: TierShares = field(default_factory=TierShares)
    disk: TierShares = field(default_factory=TierShares)

    @staticmethod
    def of(quotas: Mapping[str, Quota], host_bytes: int, disk_bytes: int) -> Tenancy:
        """ConfigError when a tier has less than is promised of it."""
        return Tenancy(
            dict(quotas),
            TierShares.of("host", quotas, host_bytes),
            TierShares.of("disk", quotas, disk_bytes),
        )


NO_QUOTAS = Tenancy()


@dataclass(frozen=True, slots=True)
class Claims:
    """Who may take how much from whom, at one moment."""

    guaranteed: Mapping[str, int]
    used: Mapping[str, int]

    def over(self, tenant: str) -> int:
        """Bytes that a tenant has beyond what it is guaranteed; negative below it."""
        return self.used.get(tenant, 0) - self.guaranteed.get(tenant, 0)

    def is_within(self, tenant: str, more_bytes: int) -> bool:
        """Whether a tenant with so many bytes more would have no more than it is guaranteed."""
        return self.over(tenant) + more_bytes <= 0

    def donors(self, asker: str, more_bytes: int) -> list[str]:
        """Whom the asker takes from before it gives of its own: the furthest above its share first.

        None when it asks beyond its share.
        """
        return self._above(asker, 0) if self.is_within(asker, more_bytes) else []

    def richer(self, asker: str) -> list[str]:
        """Whom it takes from when it has nothing of its own to give: who borrows more than it."""
        return self._above(asker, max(0, self.over(asker)))

    def _above(self, asker: str, bytes_over: int) -> list[str]:
        found = [each for each in self.used if each != asker and self.over(each) > bytes_over]
        return sorted(found, key=lambda tenant: (-self.over(tenant), tenant))


def room_beside(tenant: str, used: Mapping[str, int], capacity: int, tenants: Iterable[str]) -> int:
    """How much a tenant may take where nothing can be taken back: all that is free, less what the
    other tenants' parts of the kept quarter still lack."""
    names = {*tenants, tenant}
    part = capacity // KEPT_PART // len(names)
    kept = sum(max(0, part - used.get(other, 0)) for other in names if other != tenant)
    return max(0, capacity - sum(used.values()) - kept)


def queue_room(
    tenant: str, used: Mapping[str, int], capacity: int, tenants: Collection[str]
) -> int:
    """How much more a tenant may queue: what is left of its own part, and of what all may borrow.

    Half of the capacity is the tenants' own, in equal parts; nobody else's queue takes from it.
    Without tenants all of it is to borrow.
    """
    part = capacity // 2 // len(tenants) if tenants else 0
    mine = part if tenant in tenants else 0
    own = {name: part if name in tenants else 0 for name in used}
    borrowed = sum(max(0, size - own[name]) for name, size in used.items())
    to_borrow = capacity - part * len(tenants)
    return max(0, mine - used.get(tenant, 0)) + max(0, to_borrow - borrowed)
