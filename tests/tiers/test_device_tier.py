"""The device tier's pages in place: what kernels fill and read without a copy through the host."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="the device tier's memory is torch's")

from kvstore.tiers.checksum import checksum  # noqa: E402 - after the importorskip
from kvstore.tiers.device_tier import DeviceTier  # noqa: E402
from kvstore.tiers.tier import PageRecord, ReadStatus, TierError  # noqa: E402

SIZE = 5000


def record(number: int, payload: bytes) -> PageRecord:
    return PageRecord(
        root=bytes(32),
        tenant="a",
        namespace=bytes(16),
        key=number.to_bytes(16, "little"),
        parent_key=bytes(16),
        sequence=number,
        parent_sequence=0,
        page_index=0,
        tokens=b"",
        extras=b"",
        payload_bytes=len(payload),
        checksum=checksum(payload),
    )


def test_what_was_filled_in_place_is_read_in_place_and_drained_to_the_host() -> None:
    tier = DeviceTier(64 * 8192, "cpu", extent_bytes=8 * 8192)
    payloads = [bytes([number]) * SIZE for number in (1, 2, 3)]
    slots = tier.reserve("a", SIZE, 3)
    for slot, payload in zip(slots, payloads, strict=True):
        tier.view(slot, SIZE)[:] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    pages = [record(number, payload) for number, payload in enumerate(payloads, 1)]
    tier.publish_many(slots, pages)
    found = tier.read_in_place(slots)
    assert [bytes(each.tolist()) for each in found] == payloads
    base = tier.view(slots[0], 1).data_ptr()
    assert found[0].data_ptr() == base  # the pool's own memory
    buffers = [memoryview(bytearray(SIZE)) for _ in payloads]
    assert tier.read_many(slots, pages, buffers) == [ReadStatus.OK] * 3
    assert [bytes(buffer) for buffer in buffers] == payloads
    tier.check()


def test_only_published_slots_are_read_and_only_reserved_ones_published() -> None:
    tier = DeviceTier(64 * 8192, "cpu", extent_bytes=8 * 8192)
    [slot] = tier.reserve("a", SIZE, 1)
    with pytest.raises(ValueError, match="not published"):
        tier.read_in_place([slot])
    page = record(1, bytes(SIZE))
    tier.publish_many([slot], [page])
    with pytest.raises(ValueError, match="not reserved"):
        tier.publish_many([slot], [page])
    tier.free_many([slot])
    with pytest.raises(ValueError, match="no slot"):
        tier.read_in_place([slot])
    tier.close()
    with pytest.raises(TierError, match="closed"):
        tier.read_in_place([])
