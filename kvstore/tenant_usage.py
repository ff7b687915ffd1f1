"""What one tenant has of a store now, beside its quota and its shares; pins are held to it here.

Changes nothing. What sessions hold beyond the store (staging, open calls) stands in
tenant_holds.py.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvstore.errors import InvalidRequest, QuotaError
from kvstore.inspection import find_chain
from kvstore.tiers.arena_use import NOTHING

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvstore.state import StoreState

__all__ = ["TenantUsage", "pin_chain", "pinned_pages", "refuse_pin_over_quota", "usage", "usages"]


@dataclass(frozen=True, slots=True)
class TenantUsage:
    """One tenant's part of a store. Shares and quota are None and empty where there are none."""

    tenant: str
    pages: int
    host_bytes: int  # of slots in the arena
    host_extent_bytes: int  # of the extents that hold them: what others cannot have
    disk_bytes: int  # of slots on disk
    pinned_pages: int
    host_share_bytes: int | None
    disk_share_bytes: int | None
    quota: dict[str, int]

    def to_dict(self) -> dict[str, Any]:
        """Plain types only, for JSON."""
        return asdict(self)


def usage(state: StoreState, tenant: str) -> TenantUsage:
    """What this tenant has now; zeros for one that is not known."""
    with state.lock:
        state.require_open()
        host = state.host.tenant_use().get(tenant, NOTHING) if state.host else NOTHING
        tenancy = state.tenancy
        known = tenant in tenancy.quotas
        limits = asdict(tenancy.quotas[tenant]) if known else {}
        trees = [
            state.index.find_tree(root)
            for root, info in state.trees.items()
            if info.tenant == tenant
        ]
        return TenantUsage(
            tenant=tenant,
            pages=sum(tree.pages for tree in trees if tree is not None),
            host_bytes=host.used_bytes,
            host_extent_bytes=host.extent_bytes,
            disk_bytes=state.disk_use.get(tenant, 0),
            pinned_pages=pinned_pages(state, tenant),
            host_share_bytes=tenancy.host.share(tenant) if known else None,
            disk_share_bytes=tenancy.disk.share(tenant) if known else None,
            quota={name: bound for name, bound in limits.items() if bound is not None},
        )


def usages(state: StoreState) -> list[TenantUsage]:
    """Every tenant that has a quota, or pages."""
    with state.lock:
        names = {*state.tenancy.quotas, *(info.tenant for info in state.trees.values())}
        return [usage(state, name) for name in sorted(names)]


def pinned_pages(state: StoreState, tenant: str, besides: NDArray[np.int32] | None = None) -> int:
    """Pages that pins of this tenant hold, each counted once; with those `besides`."""
    index = state.index
    held = np.zeros(index.table.rows, np.bool_)
    for page in index.pins:
        if state.trees[index.root_of(page)].tenant == tenant:
            held[index.chain(page)] = True
    if besides is not None:
        held[besides] = True
    return int(np.count_nonzero(held))


def pin_chain(state: StoreState, chain_id: str, ttl_s: float) -> int:
    """See Store.pin_chain."""
    ends = find_chain(state, chain_id)
    if len(ends) != 1:
        raise InvalidRequest(f"pin: {len(ends)} pages' ids begin with {chain_id}; one is needed")
    with state.lock:
        page = ends[0]
        if not state.index.table.is_live(page):
            raise InvalidRequest(f"pin: page {chain_id} has just left")
        chain = state.cut_remote(state.index.chain(page))
        if not ttl_s:
            for each in chain.tolist():
                state.index.unpin(each)
        elif len(chain):
            refuse_pin_over_quota(state, state.trees[state.index.root_of(page)].tenant, chain)
            state.index.pin(int(chain[-1]), state.clock() + ttl_s)
        return len(chain)


def refuse_pin_over_quota(state: StoreState, tenant: str, pages: NDArray[np.int32]) -> None:
    """QuotaError when pinning this chain too would hold more pages than the tenant may."""
    quota = state.tenancy.quotas.get(tenant)
    most = quota.pinned_pages_max if quota is not None else None
    if most is None:
        return
    state.index.expire_pins(state.clock())
    wanted = pinned_pages(state, tenant, pages)
    if wanted > most:
        raise QuotaError(
            f"{pinned_pages(state, tenant)} pages are pinned, {wanted} would be with this chain; "
            f"pinned_pages_max is {most}: unpin others, or wait for their time to end"
        )
