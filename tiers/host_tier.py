"""The host tier: pages in the arena, memory that all processes of the host share.

The arena is a set of extents, each with one tenant and one slot size while it lives. Capacity moves
between tenants and sizes only by emptying an extent: one that emptied becomes, in place, an extent
of another size of its tenant; for another tenant its memory goes back to the machine first, since
the old tenant's processes may still have it mapped.

Invariant: a slot is free, reserved (its bytes may change, nobody reads it) or published (its bytes
never change until it is freed). Must not be here: who may evict what, leases, sockets.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvstore.tiers.arena_size import default_extent_bytes, refuse_bad_sizes
from kvstore.tiers.arena_use import ArenaUse, TenantUse
from kvstore.tiers.checksum import checksum, copy_and_checksum
from kvstore.tiers.extent import (
    Extent,
    ExtentRecord,
    Memfd,
    OwnedFd,
    SlotState,
    header_bytes,
    slots_that_fit,
)
from kvstore.tiers.extent_pool import ExtentPool
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
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

__all__ = ["HostTier", "Staging", "checksum", "copy_and_checksum"]

# How long a reserve waits for memory that is being populated (a step of 256 MiB takes 0.13 s).
POPULATE_WAIT_S = 2.0


@dataclass(frozen=True, slots=True)
class Staging:
    """Memory that one client may write, of a fixed size. Give it back with release_staging."""

    memory: Memfd
    fd: OwnedFd
    size: int

    def view(self, start: int, size: int) -> memoryview:
        """Bytes [start, start + size); their owner may change them at any time."""
        if start < 0 or size < 0 or start + size > self.size:
            raise ValueError(f"[{start}, {start + size}) is outside of {self.size} bytes")
        return memoryview(self.memory.mapping)[start : start + size]


class HostTier:
    """The tier contract over shared memory; safe to call from several threads.

    `boot_epoch` stands in every extent, so that readers notice a restart. Raises TierError when the
    machine has less memory than `capacity_bytes`, and RuntimeError in a forked child.
    """

    def __init__(
        self,
        capacity_bytes: int,
        extent_bytes: int | None = None,
        huge_pages: bool = False,
        boot_epoch: int = 0,
        *,
        populate_wait_s: float = POPULATE_WAIT_S,
        available_bytes: int | None = None,
    ) -> None:
        if extent_bytes is None:
            extent_bytes = default_extent_bytes(capacity_bytes, huge_pages)
        refuse_bad_sizes(capacity_bytes, extent_bytes, huge_pages, available_bytes)
        self.capacity_bytes = capacity_bytes
        self.boot_epoch = boot_epoch
        self._populate_wait_s = populate_wait_s
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._extents: dict[int, Extent] = {}
        # Extents with a free slot, by tenant and slot size; the last one is filled first.
        self._open: dict[tuple[str, int], list[Extent]] = {}
        self._drained: set[int] = set()  # extents in which no slot is taken
        self._use = ArenaUse()
        self._begun_s = time.monotonic()
        self._last_container_id = 0
        self._closed = False
        self._pool = ExtentPool(capacity_bytes, extent_bytes, huge_pages=huge_pages)

    def reserve(
        self, tenant: str, payload_bytes: int, count: int, *, extent_bytes_max: int | None = None
    ) -> list[int]:
        """Hand out up to `count` slots; fewer when the arena is full. See Tier.

        Waits, for a bounded time, only for memory that is still being populated. A tenant that has
        `extent_bytes_max` gets no further extent. TierError when a page of that size can never fit.
        """
        slot_bytes = aligned(payload_bytes)
        bytes_min = header_bytes(1) + slot_bytes
        if payload_bytes <= 0 or bytes_min > self.capacity_bytes:
            raise TierError(
                f"host tier: pages of {payload_bytes} bytes do not fit in {self.capacity_bytes} "
                "bytes; raise --host-bytes"
            )
        slots: list[int] = []
        while len(slots) < count:
            with self._guard():
                slots += self._take_slots(tenant, slot_bytes, count - len(slots))
                if len(slots) == count or self._recycle(tenant, slot_bytes):
                    continue
                extent_bytes = self._use.of(tenant).extent_bytes
            if extent_bytes_max is not None and extent_bytes >= extent_bytes_max:
                break
            memory = self._pool.take(bytes_min, self._populate_wait_s)
            if memory is None and not self._retire_empty_extent():
                break
            if memory is not None:
                with self._guard():
                    self._add_extent(memory, tenant, slot_bytes)
        return slots

    def fits(self, payload_bytes: int) -> bool:
        """Whether a page of that size can ever have a slot."""
        return header_bytes(1) + aligned(payload_bytes) <= self.capacity_bytes

    def view(self, slot: int, payload_bytes: int) -> memoryview:
        """The slot's first bytes, writable. Only its reserver writes, and only until publishing."""
        extent = self._extent(slot)
        if payload_bytes > extent.slot_bytes:
            raise ValueError(f"{payload_bytes} bytes asked of a slot of {extent.slot_bytes}")
        return extent.view(slot & SLOT_INDEX_MASK, payload_bytes)

    def readonly_view(self, slot: int, payload_bytes: int) -> memoryview:
        """The slot's first bytes, to read. They are the page's as long as its slot isn't freed."""
        return self.view(slot, payload_bytes).toreadonly()

    def generation(self, slot: int) -> int:
        """Odd while the slot isn't published; moves at every reserve, publish and free."""
        return int(self._extent(slot).generations[slot & SLOT_INDEX_MASK])

    def generations(self, slots: NDArray[np.int64]) -> NDArray[np.uint64]:
        """The generations of many slots at once; odd ones for -1, which names no slot."""
        containers = slots >> SLOT_INDEX_BITS
        first = int(containers[0]) if len(slots) else -1
        if first >= 0 and (containers == first).all():
            extent = self._extent(first << SLOT_INDEX_BITS)
            return np.asarray(extent.generations[slots & SLOT_INDEX_MASK], np.uint64)
        found = np.ones(len(slots), np.uint64)
        left = slots >= 0
        while left.any():
            container = int(containers[left.argmax()])
            here = containers == container
            extent = self._extent(container << SLOT_INDEX_BITS)
            found[here] = extent.generations[slots[here] & SLOT_INDEX_MASK]
            left &= ~here
        return found

    def publish_many(self, slots: Sequence[int]) -> None:
        """Make reserved slots readable whose bytes were written in place; ValueError for others."""
        with self._guard():
            groups = list(self._groups(slots))
            for extent, indices in groups:
                _refuse_others(extent, indices, extent.states[indices] != SlotState.RESERVED)
            for extent, indices in groups:
                extent.publish(indices)

    def write_many(
        self, slots: Sequence[int], pages: Sequence[PageRecord], payloads: Sequence[memoryview]
    ) -> list[bool]:
        """Copy payloads in, verify the copies, publish them. See Tier.

        Payloads have at least payload_bytes each. False: the bytes do not match their checksum.
        ValueError, and no change, for a slot that is not reserved or too small.
        """
        targets = [
            self._write_target(slot, page, payload)
            for slot, page, payload in zip(slots, pages, payloads, strict=True)
        ]
        kept = []
        for slot, page, payload, target in zip(slots, pages, payloads, targets, strict=True):
            digest = copy_and_checksum(payload.cast("B")[: page.payload_bytes], target)
            kept.append(digest == page.checksum)
            self._extent(slot).sequences[slot & SLOT_INDEX_MASK] = page.sequence
        self.publish_many([slot for slot, ok in zip(slots, kept, strict=True) if ok])
        return kept

    def read_many(
        self, slots: Sequence[int], pages: Sequence[PageRecord], buffers: Sequence[memoryview]
    ) -> list[ReadStatus]:
        """Copy pages out and verify the copies. See Tier; readers that can, take a view instead."""
        self._refuse_if_unusable()
        return [
            self._read(slot, page, buffer)
            for slot, page, buffer in zip(slots, pages, buffers, strict=True)
        ]

    def free_many(self, slots: Sequence[int]) -> None:
        """Give reserved or published slots back. ValueError, and no change, if one is neither."""
        with self._guard():
            groups = list(self._groups(slots))
            for extent, indices in groups:
                _refuse_others(extent, indices, extent.states[indices] == SlotState.FREE)
            for extent, indices in groups:
                if extent.free_count == 0 and extent.container_id not in self._drained:
                    self._open.setdefault(_class_of(extent), []).append(extent)
                extent.give_back(indices)
                self._use.add_slots(extent, -len(indices))

    def drain(self, container_id: int, *, on: bool) -> None:
        """Take no more slots in an extent, so that it can be emptied; or take them again."""
        with self._guard():
            extent = self._extents.get(container_id)
            if extent is None or (container_id in self._drained) == on:
                return
            if on:
                self._drained.add(container_id)
            else:
                self._drained.discard(container_id)
            if extent.free_count and on:
                self._open[_class_of(extent)].remove(extent)
            elif extent.free_count:
                self._open.setdefault(_class_of(extent), []).append(extent)

    def usage(self) -> Usage:
        """Bytes now. Allocated counts blank memory, staging and what readers still hold."""
        with self._guard():
            allocated = self._pool.allocated_bytes
            extents = list(self._extents.values())
            used = [extent.used_slots for extent in extents]
            return Usage(
                capacity_bytes=self.capacity_bytes,
                allocated_bytes=allocated,
                used_bytes=sum(n * e.slot_bytes for n, e in zip(used, extents, strict=True)),
                used_slots=sum(used),
                free_slots=sum(extent.free_count for extent in extents),
            )

    def published_slots(self) -> NDArray[np.int64]:
        """All slots that hold a page to be read."""
        with self._guard():
            found = [
                np.flatnonzero(extent.states == SlotState.PUBLISHED) + (number << SLOT_INDEX_BITS)
                for number, extent in self._extents.items()
            ]
        return np.concatenate(found) if found else np.empty(0, np.int64)

    @property
    def extent_bytes(self) -> int:
        """The usual size of an extent, in which capacity moves between tenants."""
        return self._pool.extent_bytes

    def tenant_use(self) -> dict[str, TenantUse]:
        """What each tenant has of the arena now; tenants without an extent are absent."""
        with self._guard():
            return self._use.all()

    def containers(self) -> list[Container]:
        """The extents that exist now, oldest first."""
        with self._guard():
            return [
                Container(e.container_id, e.tenant, e.slot_bytes, e.slots, e.used_slots)
                for e in self._extents.values()
            ]

    def extents(self, tenant: str) -> list[ExtentRecord]:
        """What a process of that tenant needs to map its pages, read-only."""
        with self._guard():
            return [e.record() for e in self._extents.values() if e.tenant == tenant]

    def new_staging(self, size: int) -> Staging | None:
        """Memory for a writer, within the capacity; None when the arena has no room for it."""
        self._refuse_if_unusable()
        size = aligned(size)
        memory = self._pool.take_staging(size, self._populate_wait_s)
        while memory is None and self._retire_empty_extent():
            memory = self._pool.take_staging(size, self._populate_wait_s)
        return None if memory is None else Staging(memory, memory.fd, size)

    def release_staging(self, staging: Staging) -> None:
        """Take staging out of the capacity again; its client is gone, or told to unmap."""
        self._pool.give_back(staging.memory)

    def wait_large_pages(self, wait_s: float) -> bool:
        """Wait until all that is populated lies in large pages, if there are any; False on timeout.

        Only a matter of speed: see large_pages.py.
        """
        return self._pool.wait_large_pages(wait_s)

    def wait_populated(self, wait_s: float) -> bool:
        """Wait until the whole capacity is taken from the machine; False on timeout."""
        return self._pool.wait_populated(wait_s)

    def check(self) -> None:
        """Recount every extent, list and byte; TierError with the numbers. See Tier.

        Extent by extent: others take and give back slots in between.
        """
        with self._guard():
            self._pool.check()
            numbers = list(self._extents)
        for number in numbers:
            with self._guard():
                extent = self._extents.get(number)
                if extent is not None:
                    extent.check()
                    self._check_listed(extent)
        with self._guard():
            listed = sum(map(len, self._open.values()))
            known = sum(map(self._is_open, self._extents.values()))
            if listed != known:
                raise TierError(f"{listed} extents listed as open, {known} have free slots to take")
            self._use.check(self._extents.values())

    def close(self) -> None:
        """Give all memory back. Views that are still held stay valid, and pin their extent."""
        if self._pid != os.getpid():
            return
        with self._lock:
            self._closed = True
            for extent in self._extents.values():
                extent.retire()
            self._extents.clear()
            self._open.clear()
            self._use.clear()
        self._pool.close()

    def _guard(self) -> threading.Lock:
        # Before taking the lock: in a forked child its holder may not exist.
        self._refuse_if_unusable()
        return self._lock

    def _refuse_if_unusable(self) -> None:
        if self._pid != os.getpid():
            raise RuntimeError(
                f"host tier: opened by process {self._pid}, used in its forked child "
                f"{os.getpid()}; start processes with the spawn method, or open a store after the "
                "fork"
            )
        if self._closed:
            raise TierError("host tier: closed")

    def _take_slots(self, tenant: str, slot_bytes: int, count: int) -> list[int]:
        opened = self._open.get((tenant, slot_bytes), [])
        slots: list[int] = []
        while opened and len(slots) < count:
            extent = opened[-1]
            indices = extent.take(count - len(slots))
            slots += (indices + (extent.container_id << SLOT_INDEX_BITS)).tolist()
            self._use.add_slots(extent, len(indices))
            if extent.free_count == 0:
                opened.pop()
        return slots

    def _recycle(self, tenant: str, slot_bytes: int) -> bool:
        """Make an empty extent of this tenant one of that slot size, in place."""
        for extent in self._extents.values():
            fits = slots_that_fit(extent.memory.size, slot_bytes) > 0
            fits = fits and extent.container_id not in self._drained  # it is another's soon
            if fits and extent.tenant == tenant and extent.used_slots == 0:
                self._add_extent(self._remove_extent(extent), tenant, slot_bytes)
                return True
        return False

    def _retire_empty_extent(self) -> bool:
        """Give the memory of one empty extent back to the pool; False when there is none."""
        with self._guard():
            empty = [e for e in self._extents.values() if e.used_slots == 0]
            if not empty:
                return False
            memory = self._remove_extent(empty[0])
        self._pool.give_back(memory)
        return True

    def _is_open(self, extent: Extent) -> bool:
        return extent.free_count > 0 and extent.container_id not in self._drained

    def _check_listed(self, extent: Extent) -> None:
        listed = self._open.get(_class_of(extent), []).count(extent)
        if listed != self._is_open(extent):
            raise TierError(
                f"extent {extent.container_id}: {extent.free_count} free slots, "
                f"listed {listed} times as open"
            )

    def _add_extent(self, memory: Memfd, tenant: str, slot_bytes: int) -> None:
        container_id = self._next_container_id()
        extent = Extent(memory, container_id, tenant, slot_bytes, self.boot_epoch)
        self._extents[container_id] = extent
        self._use.add_extent(extent)
        self._open.setdefault(_class_of(extent), []).append(extent)

    def _next_container_id(self) -> int:
        """Ids only rise, and tell the milliseconds since the start: clients see those of their own
        extents, and counting would tell them how fast other tenants make theirs."""
        age_ms = int((time.monotonic() - self._begun_s) * 1000)
        self._last_container_id = max(self._last_container_id + 1, age_ms)
        return self._last_container_id

    def _remove_extent(self, extent: Extent) -> Memfd:
        del self._extents[extent.container_id]
        self._use.remove_extent(extent)
        if extent.container_id in self._drained:
            self._drained.discard(extent.container_id)
            return extent.retire()
        opened = self._open[_class_of(extent)]
        opened.remove(extent)
        if not opened:
            del self._open[_class_of(extent)]
        return extent.retire()

    def _extent(self, slot: int) -> Extent:
        self._refuse_if_unusable()
        extent = self._extents.get(slot >> SLOT_INDEX_BITS)
        if extent is None or slot & SLOT_INDEX_MASK >= extent.slots:
            raise ValueError(f"host tier: no slot {slot:#x}")
        return extent

    def _groups(self, slots: Sequence[int]) -> Iterator[tuple[Extent, NDArray[np.int64]]]:
        """The slots by extent. ValueError when one is named twice or does not exist."""
        numbers = np.array(slots, np.int64)
        numbers.sort()
        if (numbers[1:] == numbers[:-1]).any():
            raise ValueError("host tier: a slot is named twice")
        start = 0
        while start < len(numbers):
            extent = self._extent(int(numbers[start]))
            end = int(numbers.searchsorted((extent.container_id + 1) << SLOT_INDEX_BITS))
            self._extent(int(numbers[end - 1]))
            yield extent, numbers[start:end] & SLOT_INDEX_MASK
            start = end

    def _write_target(self, slot: int, page: PageRecord, payload: memoryview) -> memoryview:
        extent, index = self._extent(slot), slot & SLOT_INDEX_MASK
        if extent.states[index] != SlotState.RESERVED:
            _refuse_others(extent, np.array([index]), np.array([True]))
        if payload.nbytes < page.payload_bytes or page.payload_bytes > extent.slot_bytes:
            raise ValueError(
                f"page of {page.payload_bytes} bytes: payload has {payload.nbytes}, the slot "
                f"{extent.slot_bytes}"
            )
        return extent.view(index, page.payload_bytes)

    def _read(self, slot: int, page: PageRecord, buffer: memoryview) -> ReadStatus:
        extent, index = self._extents.get(slot >> SLOT_INDEX_BITS), slot & SLOT_INDEX_MASK
        if extent is None or index >= extent.slots or page.payload_bytes > extent.slot_bytes:
            return ReadStatus.STALE
        generation, sequence = int(extent.generations[index]), int(extent.sequences[index])
        if generation % 2 or (sequence and sequence != page.sequence):
            return ReadStatus.STALE
        digest = copy_and_checksum(extent.view(index, page.payload_bytes), buffer)
        if int(extent.generations[index]) != generation:
            return ReadStatus.STALE
        return ReadStatus.OK if digest == page.checksum else ReadStatus.CORRUPT


def _class_of(extent: Extent) -> tuple[str, int]:
    return extent.tenant, extent.slot_bytes


def _refuse_others(
    extent: Extent, indices: NDArray[np.int64], are_wrong: NDArray[np.bool_]
) -> None:
    if are_wrong.any():
        index = int(indices[are_wrong][0])
        state = SlotState(int(extent.states[index])).name.lower()
        wanted = "reserved" if state == "published" else "in use"
        raise ValueError(
            f"host tier: slot {index} of extent {extent.container_id} is {state}, not {wanted}"
        )
