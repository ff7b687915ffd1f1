"""How large the extents of an arena are, and whether the machine has the memory for one.

Decisions on numbers only; the arena itself is host_tier.py.
"""

from __future__ import annotations

from kvstore.tiers.available_memory import (
    HUGE_PAGE_BYTES,
    available_memory_bytes,
    free_huge_pages_bytes,
)
from kvstore.tiers.extent import header_bytes
from kvstore.tiers.process_limits import file_bytes_allowed, file_limit_said
from kvstore.tiers.tier import ALIGNMENT_BYTES, TierError

EXTENT_BYTES_MAX = 256 << 20
EXTENT_BYTES_MIN = 64 << 10
# A small arena is cut in so many extents, so that a few tenants and slot sizes find room.
EXTENTS_MIN = 8
# Nominal extents have room for the generations of slots of this size beside whole slots.
HEADER_SLOT_BYTES = 64 << 10


def default_extent_bytes(capacity_bytes: int, huge_pages: bool) -> int:
    """The usual size of an extent of an arena of so many bytes."""
    unit = HUGE_PAGE_BYTES if huge_pages else ALIGNMENT_BYTES
    size = min(max(capacity_bytes // EXTENTS_MIN, EXTENT_BYTES_MIN, unit), EXTENT_BYTES_MAX)
    size = size // unit * unit
    if not huge_pages:
        size += header_bytes(size // HEADER_SLOT_BYTES)
    return min(size, capacity_bytes // unit * unit)


def refuse_bad_sizes(
    capacity_bytes: int, extent_bytes: int, huge_pages: bool, available_bytes: int | None
) -> None:
    """Raise TierError for an arena that makes no sense, or that this machine has no memory for."""
    unit = HUGE_PAGE_BYTES if huge_pages else ALIGNMENT_BYTES
    if capacity_bytes < 2 * ALIGNMENT_BYTES:
        raise TierError(f"host tier: {capacity_bytes} bytes asked, at least 8192 are needed")
    if not 0 < extent_bytes <= capacity_bytes or extent_bytes % unit:
        raise TierError(
            f"host tier: extents of {extent_bytes} bytes asked; they are multiples of {unit} up to "
            f"the capacity of {capacity_bytes}"
        )
    if extent_bytes > file_bytes_allowed():
        raise TierError(f"host tier: {file_limit_said(extent_bytes)}")
    if available_bytes is None:
        available_bytes = free_huge_pages_bytes() if huge_pages else available_memory_bytes()
    if capacity_bytes > available_bytes:
        way_out = "lower --host-bytes"
        if huge_pages:
            pages = -(-capacity_bytes // HUGE_PAGE_BYTES)
            way_out += f", or reserve them: sysctl -w vm.nr_hugepages={pages}"
        raise TierError(
            f"host tier: {capacity_bytes / 2**30:.2f} GiB asked, {available_bytes / 2**30:.2f} GiB "
            f"{'in free huge pages' if huge_pages else 'available'}; {way_out}"
        )
