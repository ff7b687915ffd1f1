"""The device tier: pages in a pool of torch memory, on the engine's GPU or on "cpu".

The pool is one tensor, cut in equal extents; an extent has one tenant and one slot size while it
has pages, and is anybody's when it has none: the pool lives in the engine's process, so no other
process can see what a page left behind. Kernels fill slots in place (`view`, `publish_many`).

Copies to and from host memory run on a stream of their own, never on the one that computes, through
a pinned buffer. Invariant: the buffer is filled again only after the event behind its last copy;
a page is read only after the event of whoever filled it. Must not be here: what is kept, block ids.
"""

from __future__ import annotations

import threading
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kvstore.tiers.checksum import checksum
from kvstore.tiers.tier import (
    SLOT_INDEX_BITS,
    SLOT_INDEX_MASK,
    Container,
    PageRecord,
    ReadStatus,
    TierError,
    Usage,
    aligned,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

EXTENTS = 16  # a tenant with one page takes no more than this part of the pool
EXTENT_BYTES_MAX = 256 << 20
BOUNCE_BYTES = 16 << 20
FREE, RESERVED, PUBLISHED = range(3)


@dataclass(slots=True)
class _Extent:
    """A run of slots of one size. Counts are derived."""

    number: int
    start: int  # in the pool
    tenant: str
    slot_bytes: int
    states: bytearray
    pages: dict[int, PageRecord] = field(default_factory=dict)  # of published slots
    ready: dict[int, Any] = field(default_factory=dict)  # the event behind a published slot's bytes

    @property
    def used(self) -> int:
        return len(self.states) - self.states.count(FREE)


class DeviceTier:
    """The Tier contract on a torch device. Calls are thread-safe, and hold a lock while they copy.

    Raises TierError when the device lacks `capacity_bytes`.
    """

    def __init__(
        self,
        capacity_bytes: int,
        device: str | torch.device = "cpu",
        extent_bytes: int | None = None,
    ) -> None:
        if extent_bytes is None:
            extent_bytes = min(capacity_bytes // EXTENTS // 4096 * 4096, EXTENT_BYTES_MAX)
        if not 4096 <= extent_bytes <= capacity_bytes or extent_bytes % 4096:
            raise TierError(
                f"device tier: extents of {extent_bytes} bytes asked; multiples of 4096 up to the "
                f"capacity of {capacity_bytes} are possible"
            )
        self.capacity_bytes = capacity_bytes
        self.device = torch.device(device)
        self._extent_bytes = extent_bytes
        self._lock = threading.Lock()
        self._next_number = 0
        self._blank = [at * extent_bytes for at in range(capacity_bytes // extent_bytes)][::-1]
        self._extents: dict[int, _Extent] = {}
        self._closed = False
        gpu = self.device.type == "cuda"
        try:
            size = len(self._blank) * extent_bytes
            self._pool = torch.zeros(size, dtype=torch.uint8, device=self.device)
            bounce = min(BOUNCE_BYTES, extent_bytes)
            self._bounce = torch.empty(bounce, dtype=torch.uint8, pin_memory=gpu)
        except RuntimeError as error:
            raise TierError(
                f"device tier: {capacity_bytes} bytes on {self.device}: {error}; lower its capacity"
            ) from error
        stream: Any = torch.cuda.Stream
        self._stream = stream(self.device) if gpu else None
        self._bounce_free: Any = None  # the event behind the last copy that used the buffer

    # -- the contract ---------------------------------------------------------------------------

    def reserve(self, tenant: str, payload_bytes: int, count: int) -> list[int]:
        """Up to `count` slots; fewer when full. TierError for pages that no extent holds."""
        slot_bytes = aligned(max(payload_bytes, 1))
        if slot_bytes > self._extent_bytes:
            raise TierError(
                f"device tier: a page of {payload_bytes} bytes; extents have {self._extent_bytes}"
            )
        slots: list[int] = []
        with self._lock:
            self._refuse_if_closed()
            while len(slots) < count:
                extent = self._with_room(tenant, slot_bytes)
                if extent is None:
                    break
                while len(slots) < count and (at := extent.states.find(FREE)) >= 0:
                    extent.states[at] = RESERVED
                    slots.append(extent.number << SLOT_INDEX_BITS | at)
        return slots

    def write_many(
        self, slots: Sequence[int], pages: Sequence[PageRecord], payloads: Sequence[memoryview]
    ) -> list[bool]:
        """Copy payloads to the device and publish them. See Tier.

        False: the payload does not match its checksum. ValueError, and no change, for a slot that
        is not reserved or too small.
        """
        kept = []
        with self._lock:
            self._refuse_if_closed()
            for slot, page, payload in zip(slots, pages, payloads, strict=True):
                extent = self._reserved(slot)
                if not page.payload_bytes <= min(payload.nbytes, extent.slot_bytes):
                    raise ValueError(
                        f"a page of {page.payload_bytes} bytes, with {payload.nbytes} given and "
                        f"{extent.slot_bytes} in its slot"
                    )
            for slot, page, payload in zip(slots, pages, payloads, strict=True):
                source = payload.cast("B")[: page.payload_bytes]
                event = self._to_device(self._slice(slot, page.payload_bytes), source)
                kept.append(checksum(source) == page.checksum)
                if kept[-1]:
                    self._publish(slot, page, event)
        return kept

    def read_many(
        self, slots: Sequence[int], pages: Sequence[PageRecord], buffers: Sequence[memoryview]
    ) -> list[ReadStatus]:
        """Copy pages to host memory and verify the copies. See Tier."""
        statuses = []
        for slot, page, buffer in zip(slots, pages, buffers, strict=True):
            if buffer.nbytes < page.payload_bytes:
                raise ValueError(f"a buffer of {buffer.nbytes} for {page.payload_bytes} bytes")
            target = buffer.cast("B")[: page.payload_bytes]
            with self._lock:
                self._refuse_if_closed()
                if not self._holds(slot, page):
                    statuses.append(ReadStatus.STALE)
                    continue
                extent, at = self._place(slot)
                self._to_host(target, self._slice(slot, page.payload_bytes), extent.ready.get(at))
            sound = checksum(target) == page.checksum
            statuses.append(ReadStatus.OK if sound else ReadStatus.CORRUPT)
        return statuses

    def free_many(self, slots: Sequence[int]) -> None:
        """Give slots back. ValueError, and no change, if one is not in use."""
        with self._lock:
            self._refuse_if_closed()
            for slot in slots:
                extent, at = self._place(slot)
                if extent.states[at] == FREE or slots.count(slot) > 1:
                    raise ValueError(f"device tier: slot {slot:#x} is not in use, or named twice")
            for slot in slots:
                extent, at = self._place(slot)
                extent.states[at] = FREE
                extent.pages.pop(at, None)
                extent.ready.pop(at, None)
            for extent in [each for each in self._extents.values() if each.used == 0]:
                del self._extents[extent.number]
                self._blank.append(extent.start)

    def usage(self) -> Usage:
        """Bytes now; the pool is taken from the device as a whole."""
        with self._lock:
            extents = list(self._extents.values())
            return Usage(
                capacity_bytes=self.capacity_bytes,
                allocated_bytes=self._pool.numel(),
                used_bytes=sum(each.used * each.slot_bytes for each in extents),
                used_slots=sum(each.used for each in extents),
                free_slots=sum(each.states.count(FREE) for each in extents),
            )

    def check(self) -> None:
        """Recount extents, states and pages; TierError with the numbers."""
        with self._lock:
            if self._closed:
                return
            starts = sorted([*self._blank, *(each.start for each in self._extents.values())])
            if starts != list(range(0, self._pool.numel(), self._extent_bytes)):
                raise TierError(f"device tier: extents begin at {starts}")
            for extent in self._extents.values():
                published = {at for at, s in enumerate(extent.states) if s == PUBLISHED}
                if published != set(extent.pages) or not extent.ready.keys() <= published:
                    raise TierError(
                        f"device tier: extent {extent.number} has {len(published)} published "
                        f"slots, {len(extent.pages)} pages, {len(extent.ready)} events"
                    )
                if extent.used == 0 or len(extent.states) * extent.slot_bytes > self._extent_bytes:
                    raise TierError(
                        f"device tier: extent {extent.number} has {extent.used} used slots of "
                        f"{len(extent.states)} x {extent.slot_bytes} in {self._extent_bytes} bytes"
                    )

    # -- pages in place -------------------------------------------------------------------------

    def view(self, slot: int, size: int) -> torch.Tensor:
        """The first `size` bytes of a slot in use, uint8 on the device: what kernels fill or read.

        The memory is the pool's. Only a reserved slot may be written.
        """
        with self._lock:
            self._refuse_if_closed()
            extent, at = self._place(slot)
            if extent.states[at] == FREE or not 0 <= size <= extent.slot_bytes:
                raise ValueError(f"device tier: slot {slot:#x}, {size} bytes: not in use, or less")
            return self._slice(slot, size)

    def read_in_place(self, slots: Sequence[int]) -> list[torch.Tensor]:
        """The bytes of published slots, uint8 on the device, for kernels of the current stream.

        The stream waits for whoever fills them. The caller sees to it that no slot is freed before
        the kernels are done. ValueError for a slot that is not published.
        """
        with self._lock:
            self._refuse_if_closed()
            places = [self._place(slot) for slot in slots]
            if any(at not in extent.pages for extent, at in places):
                raise ValueError("device tier: a slot to read is not published")
            for event in {e.ready[at] for e, at in places if at in e.ready}:
                torch.cuda.current_stream(self.device).wait_event(event)
            return [
                self._slice(slot, extent.pages[at].payload_bytes)
                for slot, (extent, at) in zip(slots, places, strict=True)
            ]

    def publish_many(
        self, slots: Sequence[int], pages: Sequence[PageRecord], ready: Any = None
    ) -> None:
        """Make slots readable that were filled in place; `ready`: the event behind the kernels."""
        with self._lock:
            self._refuse_if_closed()
            for slot in slots:
                self._reserved(slot)
            for slot, page in zip(slots, pages, strict=True):
                self._publish(slot, page, ready)

    def containers(self) -> list[Container]:
        """The extents in use."""
        with self._lock:
            return [
                Container(e.number, e.tenant, e.slot_bytes, len(e.states), e.used)
                for e in self._extents.values()
            ]

    def close(self) -> None:
        """Give the pool back once its copies have ended. Views that are held stay valid."""
        with self._lock:
            if self._stream is not None:
                self._stream.synchronize()
            self._closed = True
            self._extents.clear()
            self._blank.clear()
            self._pool = torch.empty(0, dtype=torch.uint8)

    # -- private: under the lock ----------------------------------------------------------------

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise TierError("device tier: closed")

    def _with_room(self, tenant: str, slot_bytes: int) -> _Extent | None:
        for extent in self._extents.values():
            if (extent.tenant, extent.slot_bytes) == (tenant, slot_bytes) and FREE in extent.states:
                return extent
        if not self._blank:
            return None
        states = bytearray(min(self._extent_bytes // slot_bytes, SLOT_INDEX_MASK + 1))
        extent = _Extent(self._next_number, self._blank.pop(), tenant, slot_bytes, states)
        self._extents[extent.number] = extent
        self._next_number += 1
        return extent

    def _place(self, slot: int) -> tuple[_Extent, int]:
        extent, at = self._extents.get(slot >> SLOT_INDEX_BITS), slot & SLOT_INDEX_MASK
        if extent is None or slot < 0 or at >= len(extent.states):
            raise ValueError(f"device tier: no slot {slot:#x} is in use")
        return extent, at

    def _reserved(self, slot: int) -> _Extent:
        extent, at = self._place(slot)
        if extent.states[at] != RESERVED:
            raise ValueError(f"device tier: slot {slot:#x} is not reserved")
        return extent

    def _holds(self, slot: int, page: PageRecord) -> bool:
        extent = self._extents.get(slot >> SLOT_INDEX_BITS)
        held = None if extent is None else extent.pages.get(slot & SLOT_INDEX_MASK)
        return held is not None and (held.sequence, held.key) == (page.sequence, page.key)

    def _slice(self, slot: int, size: int) -> torch.Tensor:
        extent, at = self._place(slot)
        start = extent.start + at * extent.slot_bytes
        return self._pool[start : start + size]

    def _publish(self, slot: int, page: PageRecord, event: Any) -> None:
        extent, at = self._place(slot)
        extent.states[at] = PUBLISHED
        extent.pages[at] = page
        if event is not None:
            extent.ready[at] = event

    def _to_device(self, target: torch.Tensor, source: memoryview) -> Any:
        """Copy into the pool; the event behind the copy, None on the CPU."""
        origin = np.frombuffer(source, np.uint8)
        if self._stream is None:
            np.copyto(target.numpy(), origin)
            return None
        with self._side_stream():
            for start in range(0, origin.size, self._bounce.numel()):
                piece = origin[start : start + self._bounce.numel()]
                self._wait_for_bounce()
                np.copyto(self._bounce.numpy()[: piece.size], piece)
                part = target[start : start + piece.size]
                part.copy_(self._bounce[: piece.size], non_blocking=True)
                self._bounce_free = self._stream.record_event()
        return self._bounce_free

    def _to_host(self, target: memoryview, source: torch.Tensor, ready: Any) -> None:
        """Copy out of the pool, after `ready`, and wait for it."""
        destination = np.frombuffer(target, np.uint8)
        if self._stream is None:
            np.copyto(destination, source.numpy())
            return
        with self._side_stream():
            if ready is not None:
                self._stream.wait_event(ready)
            for start in range(0, destination.size, self._bounce.numel()):
                part = source[start : start + self._bounce.numel()]
                self._wait_for_bounce()
                self._bounce[: part.numel()].copy_(part, non_blocking=True)
                self._bounce_free = self._stream.record_event()
                self._wait_for_bounce()
                stop = start + part.numel()
                np.copyto(destination[start:stop], self._bounce.numpy()[: part.numel()])

    def _side_stream(self) -> Any:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _wait_for_bounce(self) -> None:
        if self._bounce_free is not None:
            self._bounce_free.synchronize()
