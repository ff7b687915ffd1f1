"""Chains of pages with known bytes, for tests of the disk tier."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvstore.tiers.checksum import checksum
from kvstore.tiers.tier import PageRecord, ReadStatus

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.tiers.disk_tier import DiskTier


@dataclass
class Stored:
    """A page, its bytes, and its slot."""

    page: PageRecord
    payload: bytes
    slot: int = -1


@dataclass
class Chains:
    """Makes pages whose sequences are unique and whose bytes follow from them."""

    boot: int = 1
    counter: int = 0
    rng: random.Random = field(default_factory=lambda: random.Random(1))

    def page(
        self, size: int = 4096, parent: Stored | None = None, extras: bytes = b"", root: int = 0
    ) -> Stored:
        """One more page, the first of a chain unless it has a parent."""
        self.counter += 1
        sequence = (self.boot << 40) + self.counter
        payload = random.Random(sequence).randbytes(size)
        above = parent.page if parent else None
        page = PageRecord(
            root=bytes([root]) * 32,
            tenant=f"tenant-{root}",
            namespace=bytes([root + 100]) * 16,
            key=sequence.to_bytes(16, "little"),
            parent_key=above.key if above else bytes(16),
            sequence=sequence,
            parent_sequence=above.sequence if above else 0,
            page_index=above.page_index + 1 if above else 0,
            tokens=self.rng.randbytes(64),
            extras=extras,
            payload_bytes=size,
            checksum=checksum(payload),
            writer=f"writer-{self.counter % 3}",
            created_s=1_700_000_000 + self.counter,
        )
        return Stored(page, payload)

    def chain(self, length: int, size: int = 4096, root: int = 0) -> list[Stored]:
        """A new chain of pages."""
        pages: list[Stored] = []
        for _ in range(length):
            pages.append(self.page(size, pages[-1] if pages else None, root=root))
        return pages


def write(tier: DiskTier, pages: Sequence[Stored]) -> list[bool]:
    """Reserve and write pages of one size; slots of what was not kept are freed again."""
    slots = tier.reserve("t", pages[0].page.payload_bytes, len(pages))
    if len(slots) < len(pages):
        tier.free_many(slots)
        return [False] * len(pages)
    payloads = [memoryview(item.payload) for item in pages]
    kept = tier.write_many(slots, [item.page for item in pages], payloads)
    for item, slot, ok in zip(pages, slots, kept, strict=True):
        item.slot = slot if ok else -1
    tier.free_many([slot for slot, ok in zip(slots, kept, strict=True) if not ok])
    return kept


def read(tier: DiskTier, item: Stored, slot: int | None = None) -> ReadStatus:
    """Read one page; OK only with the right bytes, which is asserted."""
    buffer = bytearray(item.page.payload_bytes)
    place = item.slot if slot is None else slot
    [status] = tier.read_many([place], [item.page], [memoryview(buffer)])
    if status is ReadStatus.OK:
        assert bytes(buffer) == item.payload, "wrong bytes served"
    return status


def found_slots(tier: DiskTier) -> dict[int, int]:
    """sequence -> slot of all rows that a start found."""
    return {
        int(sequence): int(slot)
        for rows in tier.rows()
        for sequence, slot in zip(rows.sequences, rows.slots, strict=True)
    }
