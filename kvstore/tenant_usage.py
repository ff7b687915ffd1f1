"""What one tenant has of a store now, beside its quota and its shares; pins are held to it here.

Changes nothing. Trees and pins are looked at in pieces, so that no look-up waits for them. What
sessions hold beyond the store (staging, open calls) stands in tenant_holds.py.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvstore.errors import InvalidRequest, QuotaError
from kvstore.inspection import find_chain, not_one
from kvstore.tiers.arena_use import NOTHING

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvstore.state import StoreState

__all__ = ["TenantUsage", "pin_chain", "pinned_pages", "refuse_pin_over_quota", "usage", "usages"]

TREES_A_HOLD = 1024


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
    return _usages(state, [tenant])[0]


def usages(state: StoreState) -> list[TenantUsage]:
    """Every tenant that has a quota, or pages."""
    with state.lock:
        trees = list(state.trees.values())
        quotas = state.tenancy.quotas
    return _usages(state, sorted({*quotas, *(info.tenant for info in trees)}))


def _usages(state: StoreState, names: list[str]) -> list[TenantUsage]:
    with state.lock:
        state.require_open()
        trees = list(state.trees.values())
        hosts = state.host.tenant_use() if state.host else {}
        disk, tenancy = dict(state.disk_use), state.tenancy
    wanted = set(names)
    roots = [(info.root, info.tenant) for info in trees if info.tenant in wanted]
    pages, pinned = _pages(state, roots), _pinned_pages(state, wanted)
    made = []
    for name in names:
        host, known = hosts.get(name, NOTHING), name in tenancy.quotas
        limits = asdict(tenancy.quotas[name]) if known else {}
        made.append(
            TenantUsage(
                tenant=name,
                pages=pages.get(name, 0),
                host_bytes=host.used_bytes,
                host_extent_bytes=host.extent_bytes,
                disk_bytes=disk.get(name, 0),
                pinned_pages=pinned.get(name, 0),
                host_share_bytes=tenancy.host.share(name) if known else None,
                disk_share_bytes=tenancy.disk.share(name) if known else None,
                quota={field: bound for field, bound in limits.items() if bound is not None},
            )
        )
    return made


def _pages(state: StoreState, roots: list[tuple[bytes, str]]) -> dict[str, int]:
    """Pages of these trees by tenant, added up in pieces."""
    found: dict[str, int] = {}
    for at in range(0, len(roots), TREES_A_HOLD):
        if at:
            state.breathe()
        with state.lock:
            for root, tenant in roots[at : at + TREES_A_HOLD]:
                tree = state.index.find_tree(root)
                found[tenant] = found.get(tenant, 0) + (tree.pages if tree is not None else 0)
    return found


def _pinned_pages(state: StoreState, tenants: set[str]) -> dict[str, int]:
    """As pinned_pages of each of these, looked at in pieces."""
    with state.lock:
        pins = list(state.index.pins)
    held: dict[str, NDArray[np.bool_]] = {}
    for part in state.pieces(len(pins)):
        chains = []
        with state.lock:
            for page in pins[part]:
                if state.index.is_pinned(page):
                    tenant = state.trees[state.index.root_of(page)].tenant
                    chains.append((tenant, state.index.chain(page)))
            rows = state.index.table.rows
        for tenant, chain in chains:
            if tenant in tenants:
                held[tenant] = mask = _with_room(held.get(tenant), rows)
                mask[chain] = True
    return {tenant: int(np.count_nonzero(mask)) for tenant, mask in held.items()}


def _with_room(mask: NDArray[np.bool_] | None, rows: int) -> NDArray[np.bool_]:
    if mask is not None and len(mask) >= rows:
        return mask
    longer = np.zeros(rows, np.bool_)
    if mask is not None:
        longer[: len(mask)] = mask
    return longer


def pinned_pages(state: StoreState, tenant: str, besides: NDArray[np.int32] | None = None) -> int:
    """Pages that pins of this tenant hold, each counted once; with those `besides`."""
    index = state.index
    held = np.zeros(index.table.rows, np.bool_)
    now = state.clock()
    for page, until in index.pins.items():
        if until > now and state.trees[index.root_of(page)].tenant == tenant:
            held[index.chain(page)] = True
    if besides is not None:
        held[besides] = True
    return int(np.count_nonzero(held))


def pin_chain(state: StoreState, chain_id: str, ttl_s: float) -> int:
    """See Store.pin_chain."""
    ends = find_chain(state, chain_id)
    if len(ends) != 1:
        raise InvalidRequest(f"pin: {not_one(len(ends), chain_id)}")
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
    wanted = pinned_pages(state, tenant, pages)
    if wanted > most:
        raise QuotaError(
            f"{pinned_pages(state, tenant)} pages are pinned, {wanted} would be with this chain; "
            f"pinned_pages_max is {most}: unpin others, or wait for their time to end"
        )
