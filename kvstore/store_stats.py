"""What a store says about itself: bytes of each tier, pages, events since it was opened.

Plain frozen records, which travel to clients as JSON. Nothing here walks: what is asked for is
counted as it changes. Must not be here: whoever may see them.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from kvstore.state import TIER_NAMES

if TYPE_CHECKING:
    from kvstore.state import StoreState
    from kvstore.tiers.tier import Tier


@dataclass(frozen=True, slots=True)
class TierStats:
    """Bytes of one tier."""

    name: str
    capacity_bytes: int
    allocated_bytes: int
    used_bytes: int
    pages: int
    free_slots: int
    state: str  # "ok", or what is wrong with it


@dataclass(frozen=True, slots=True)
class Stats:
    """What is in the store and what happened since it was opened."""

    directory: str
    warm: bool
    pages: int
    nodes: int
    index_bytes: int
    trees: int
    leases: int
    pinned_pages: int
    dirty_bytes: int
    tiers: tuple[TierStats, ...]
    counters: dict[str, int]
    disk_bytes_per_hit: float = 0.0  # written to disk, over pages that hit in any tier
    encryption: str = "off"  # of pages on disk: "off", or "on" and what is not
    service: dict[str, Any] = field(default_factory=dict)  # who is connected, where a server has it
    policy: dict[str, Any] = field(default_factory=dict)  # what leaves first, and its shadows
    tenants: list[dict[str, Any]] = field(default_factory=list)  # what each has, from a server

    def to_dict(self) -> dict[str, Any]:
        """Plain types only, for JSON."""
        return asdict(self)


def stats_of(state: StoreState, dirty_bytes: int) -> Stats:
    """The store's figures now. `dirty_bytes`: what waits for the disk.

    Tiers are asked before the store's lock is taken: they have locks of their own to wait for.
    """
    tiers = _tier_stats(state)
    with state.lock:
        state.require_open()
        return Stats(
            directory=str(state.config.directory or ""),
            warm=state.warm,
            pages=len(state.index),
            nodes=state.index.nodes,
            index_bytes=state.index.nbytes,
            trees=len(state.trees),
            leases=state.index.leases,
            pinned_pages=len(state.index.pins),
            dirty_bytes=dirty_bytes,
            tiers=tuple(tiers),
            counters=state.counters.to_dict() | state.ghosts.counts(),
            disk_bytes_per_hit=state.counters.disk_bytes_written / max(1, state.counters.hit_pages),
            encryption=_encryption(state),
            policy=state.policy.report(),
        )


def _encryption(state: StoreState) -> str:
    disk = state.disk
    if disk is None or not disk.encrypts:
        return "off"
    plain = disk.plain_pages_found
    return f"on; {plain} pages from before were plain at the start" if plain else "on"


def _tier_stats(state: StoreState) -> list[TierStats]:
    rows = []
    problems = {
        "disk": state.disk.problem if state.disk is not None else "",
        "redis": state.redis.state if state.redis is not None else "",
    }
    media: tuple[Tier | None, ...] = (state.host, state.disk, state.redis)
    for number, (name, medium) in enumerate(zip(TIER_NAMES, media, strict=True)):
        if medium is None:
            continue
        usage = medium.usage()
        rows.append(
            TierStats(
                name=name,
                capacity_bytes=usage.capacity_bytes,
                allocated_bytes=usage.allocated_bytes,
                used_bytes=usage.used_bytes,
                pages=state.resident_pages(number),
                free_slots=usage.free_slots,
                state=problems.get(name) or "ok",
            )
        )
    return rows
