"""Takes the records of a sound catalog over into slot states; deletes those that fit nothing."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import numpy as np

from kvstore.tiers.codec import LOSSLESS
from kvstore.tiers.page_rows import RootRows, root_rows
from kvstore.tiers.segment_set import FREE, USED
from kvstore.tiers.tier import SLOT_INDEX_BITS, SLOT_INDEX_MASK

if TYPE_CHECKING:
    import numpy.typing as npt

    from kvstore.tiers.catalog import Catalog
    from kvstore.tiers.catalog_scan import Scan
    from kvstore.tiers.disk_space import DiskSpace
    from kvstore.tiers.segment_set import Segment, SegmentSet

log = logging.getLogger("kvstore.tiers.disk")

DELETE_BATCH = 4096


def adopt(
    scan: Scan, catalog: Catalog | None, segments: SegmentSet, space: DiskSpace
) -> tuple[list[RootRows], int]:
    """Mark the slots of sound rows as used; returns the rows and how many records were dropped.

    Dropped is what names a slot that is not there, what no chain reaches, and, after a start with a
    smaller capacity, what lies in the youngest segments. Encrypted pages whose key is missing go
    too and are not counted here. Without a catalog, on a read-only file system, nothing is deleted.
    Raises CatalogError.
    """
    surplus = _surplus(segments, space.excess_bytes(catalog)) if catalog else []
    slots = scan.fixed["slot"]
    good = _placed(scan, [segment for segment in segments if segment not in surplus])
    lost = slots[~good].tolist()
    scan.narrow(good)
    groups, orphans = root_rows(scan)
    lost += orphans.tolist()
    dropped = len(lost) + len(scan.bad_keys)
    if catalog is not None:
        for start in range(0, len(lost), DELETE_BATCH):
            catalog.commit(lost[start : start + DELETE_BATCH])
        # Pages before names: a start that is cut off must not find pages of an unknown root.
        for start in range(0, len(scan.locked_keys), DELETE_BATCH):
            catalog.remove_keys(scan.locked_keys[start : start + DELETE_BATCH])
        catalog.remove_keys([*scan.bad_keys, *scan.unused_names()])
        for segment in surplus:
            space.drop(segment, catalog)
    for rows in groups:
        _mark_used(segments, rows.slots)
    if surplus:
        log.warning(
            "the capacity was lowered: %d segments and the pages in them are given up", len(surplus)
        )
    if scan.locked_pages:
        log.warning(
            "%d encrypted pages are given up: the keys they need are gone", scan.locked_pages
        )
    if dropped:
        log.warning("%d catalog records dropped: unsound, out of reach, or given up", dropped)
    return groups, dropped


def _surplus(segments: SegmentSet, excess_bytes: int) -> list[Segment]:
    """The youngest segments, as many as a lowered capacity no longer holds."""
    surplus: list[Segment] = []
    for segment in sorted(segments, key=lambda s: s.shape.segment_id, reverse=True):
        if excess_bytes <= 0:
            break
        surplus.append(segment)
        excess_bytes -= segment.shape.file_bytes
    return surplus


def _placed(scan: Scan, segments: list[Segment]) -> npt.NDArray[np.bool_]:
    """Which rows lie in a slot that exists and holds as much as they say."""
    slots = scan.fixed["slot"]
    order = np.argsort(slots, kind="stable") if (np.diff(slots) < 0).any() else None
    ordered = slots if order is None else slots[order]
    packed = scan.fixed["codec"] == LOSSLESS  # these are larger than their slot
    sizes = np.where(packed, 0, scan.fixed["payload_bytes"])
    sizes = sizes if order is None else sizes[order]
    good = np.zeros(len(slots), np.bool_)
    for segment in segments:
        begin, end = np.searchsorted(ordered, [segment.base, segment.base + segment.shape.slots])
        good[begin:end] = sizes[begin:end] <= segment.shape.payload_capacity
    if order is not None:
        good[order] = good.copy()
    return good


def _mark_used(segments: SegmentSet, slots: npt.NDArray[Any]) -> None:
    owners = slots >> SLOT_INDEX_BITS
    for owner in np.unique(owners).tolist():
        segment = segments.of(owner << SLOT_INDEX_BITS)
        assert segment is not None, "only placed rows are taken over"
        states = np.frombuffer(segment.states, np.uint8)
        states[slots[owners == owner] & SLOT_INDEX_MASK] = USED
        segment.free = segment.states.count(FREE)
