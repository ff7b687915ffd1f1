"""Which pages of a session also lie in a pool on the engine's device.

The store says which page continues a prompt, by its version (Match.versions); the pool only spares
the way of its bytes. So nothing is served from here that the store would not serve: an evicted or
replaced page is never asked for again, and leaves in its turn. Nothing here is the only copy, so
what leaves is dropped, not written back. Must not be here: tensors of an engine, look-ups.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvstore.errors import InvalidRequest
from kvstore.tiers.checksum import checksum
from kvstore.tiers.device_tier import EXTENT_BYTES_MAX, EXTENTS, DeviceTier
from kvstore.tiers.tier import PageRecord, aligned

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

TENANT = "session"  # the pool has one user
SEEN_MAX = 1 << 16  # versions remembered that were asked for once


@dataclass(frozen=True, slots=True)
class DeviceStats:
    """What a pool did since it was made, and what it holds."""

    capacity_bytes: int = 0
    pages: int = 0
    hits: int = 0  # pages that were used from the pool
    fills: int = 0  # pages copied into it
    evictions: int = 0


@dataclass(slots=True)
class _Entry:
    """One page. `read`: the event behind the last kernel that reads it."""

    slot: int
    leases: int = 0
    read: Any = None


class DeviceLease:
    """Pages of one match that stay in the pool until release()."""

    def __init__(self, pool: DevicePages, versions: Sequence[Hashable]) -> None:
        self._pool = pool
        self.versions = versions
        self.held: dict[int, Hashable] = {}  # by index in the chain
        self.wanted: list[int] = []  # worth copying into the pool

    @property
    def leading(self) -> int:
        """How many leading pages are in the pool."""
        return next((i for i in range(len(self.versions)) if i not in self.held), len(self.held))

    def pages(self) -> dict[int, Any]:
        """The pages by index in the chain, for kernels of the current stream."""
        return self._pool.read(self)

    def release(self, event: Any = None) -> None:
        """Let go, `event` being behind the last use. Doing it again does nothing."""
        self._pool.release(self, event)


class DevicePages:
    """A pool of `capacity_bytes` for pages of one size. Thread-safe.

    A page comes in when it is asked for the second time: most prefixes are met once. What was not
    used for the longest time leaves; a page never before those after it in its chain.
    """

    def __init__(self, capacity_bytes: int, device: Any, page_bytes: int) -> None:
        slot = aligned(page_bytes)
        if capacity_bytes < slot:
            raise InvalidRequest(
                f"device_bytes: {capacity_bytes} given, one page has {slot}; give a multiple, or 0"
            )
        share = min(capacity_bytes // EXTENTS, EXTENT_BYTES_MAX)
        self._tier = DeviceTier(capacity_bytes, device, max(1, share // slot) * slot)
        self._page_bytes = page_bytes
        self._lock = threading.Lock()
        self._entries: OrderedDict[Hashable, _Entry] = OrderedDict()  # least recent first
        self._seen: OrderedDict[Hashable, None] = OrderedDict()
        self._hits = self._fills = self._evictions = 0
        self._number = 0  # of fills begun

    def lease(self, versions: Sequence[Hashable]) -> DeviceLease:
        """Note that a chain is used, and hold those of its pages that are here."""
        lease = DeviceLease(self, versions)
        with self._lock:
            # From the end, so that a page is always more recent than those after it.
            for index in range(len(versions) - 1, -1, -1):
                version = versions[index]
                entry = self._entries.get(version)
                if entry is not None:
                    entry.leases += 1
                    self._entries.move_to_end(version)
                    lease.held[index] = version
                elif version in self._seen:
                    lease.wanted.append(index)
                elif version is not None:
                    self._seen[version] = None
            self._hits += len(lease.held)
            while len(self._seen) > SEEN_MAX:
                self._seen.popitem(last=False)
        lease.wanted.reverse()
        return lease

    def fill(
        self, lease: DeviceLease, payloads: dict[int, memoryview], valid: Callable[[], bool]
    ) -> None:
        """Copy wanted pages in, in the chain's order, as far as there is room, and hold them too.

        payloads: by index in the chain. `valid` says after the copy whether it was of those pages.
        """
        with self._lock:
            for index in lease.wanted:
                version, payload = lease.versions[index], payloads.get(index)
                if payload is None or version in self._entries:
                    continue
                slots = self._tier.reserve(TENANT, self._page_bytes, 1) or self._replaced()
                if not slots:
                    break
                record = self._record(payload)
                if not all(self._tier.write_many(slots, [record], [payload])) or not valid():
                    self._tier.free_many(slots)
                    break
                self._seen.pop(version, None)
                self._entries[version] = _Entry(slots[0], leases=1)
                lease.held[index] = version
                self._fills += 1
            for index in sorted(lease.held, reverse=True):
                self._entries.move_to_end(lease.held[index])

    def read(self, lease: DeviceLease) -> dict[int, Any]:
        """See DeviceLease.pages()."""
        with self._lock:
            slots = [self._entries[version].slot for version in lease.held.values()]
            return dict(zip(lease.held, self._tier.read_in_place(slots), strict=True))

    def release(self, lease: DeviceLease, event: Any) -> None:
        """See DeviceLease.release()."""
        with self._lock:
            held, lease.held = lease.held, {}
            for version in held.values():
                entry = self._entries.get(version)
                if entry is not None:  # the pool is open
                    entry.leases -= 1
                    entry.read = event or entry.read

    def stats(self) -> DeviceStats:
        """A snapshot."""
        with self._lock:
            return DeviceStats(
                self._tier.capacity_bytes,
                len(self._entries),
                self._hits,
                self._fills,
                self._evictions,
            )

    def check(self) -> None:
        """Compare entries with slots; AssertionError or TierError with the numbers."""
        with self._lock:
            self._tier.check()
            used = self._tier.usage().used_slots
            slots = {entry.slot for entry in self._entries.values()}
            assert used == len(slots) == len(self._entries), (
                f"{used} slots in use, {len(slots)} named by {len(self._entries)} pages"
            )
            assert all(entry.leases >= 0 for entry in self._entries.values()), "a lease too few"

    def close(self) -> None:
        """Give the device's memory back; leases that are held keep theirs."""
        with self._lock:
            self._tier.close()
            self._entries.clear()

    def _replaced(self) -> list[int]:
        """The slot of the least recent page that nobody holds, reserved again."""
        for version, entry in self._entries.items():
            if entry.leases == 0:
                if entry.read is not None:
                    entry.read.synchronize()
                self._tier.free_many([entry.slot])
                del self._entries[version]
                self._evictions += 1
                return self._tier.reserve(TENANT, self._page_bytes, 1)
        return []

    def _record(self, payload: memoryview) -> PageRecord:
        # All that the tier compares is a number: which page it is, the version says.
        self._number += 1
        return PageRecord(
            root=bytes(32),
            tenant=TENANT,
            namespace=bytes(16),
            key=self._number.to_bytes(16, "little"),
            parent_key=bytes(16),
            sequence=self._number,
            parent_sequence=0,
            page_index=0,
            tokens=b"",
            extras=b"",
            payload_bytes=self._page_bytes,
            checksum=checksum(payload[: self._page_bytes]),
        )
