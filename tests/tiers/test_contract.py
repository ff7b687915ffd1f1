"""The contract of tiers/tier.py, over every tier: a new one joins TIERS and passes this first."""

from __future__ import annotations

import random
import threading
from itertools import count
from typing import TYPE_CHECKING, Protocol

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis_server import RedisProcess

from kvstore.tiers.checksum import checksum
from kvstore.tiers.disk_tier import DiskTier
from kvstore.tiers.host_tier import HostTier
from kvstore.tiers.redis_address import RedisAddress
from kvstore.tiers.redis_tier import RedisTier
from kvstore.tiers.tier import (
    SLOT_INDEX_BITS,
    SLOT_INDEX_MASK,
    Container,
    PageRecord,
    ReadStatus,
    Tier,
    Usage,
    aligned,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

MIB = 1 << 20
CAPACITY_BYTES = {"host": 4 * MIB, "disk": 96 * MIB, "redis": 8 * MIB, "device": 16 * MIB}
TIERS = sorted(CAPACITY_BYTES)

# Enough for the smallest tier to be full, few enough for the disk.
FILL_PAYLOAD_BYTES = {"host": 20_000, "disk": MIB, "redis": 20_000, "device": 100_000}


class OpenTier(Tier, Protocol):
    """What the tiers of a store have besides the six calls."""

    def containers(self) -> list[Container]: ...

    def close(self) -> None: ...


def make_tier(name: str, directory: Path, server: RedisProcess | None) -> OpenTier:
    if name == "host":
        return HostTier(CAPACITY_BYTES[name], 256 << 10)
    if name == "disk":
        return DiskTier.open([directory], CAPACITY_BYTES[name], load=True)
    if name == "device":
        pytest.importorskip("torch", reason="the device tier is torch memory")
        return device_tier(CAPACITY_BYTES[name])
    assert server is not None
    tier = RedisTier(
        RedisAddress.parse(server.url),
        CAPACITY_BYTES[name],
        lambda tenant: tenant.encode() * 16,
        timeout_s=10.0,  # a machine that runs tests may be busy
    )
    assert tier.link.wait_first(10.0)
    return tier


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisProcess]:
    with RedisProcess(tmp_path_factory.mktemp("redis")) as server:
        yield server


def device_tier(capacity_bytes: int) -> OpenTier:
    from kvstore.tiers.device_tier import DeviceTier  # torch, which tiers need not have

    return DeviceTier(capacity_bytes)


@pytest.fixture(params=TIERS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def tier(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[OpenTier]:
    server = request.getfixturevalue("redis_server") if name == "redis" else None
    tier = make_tier(name, tmp_path, server)
    yield tier
    tier.check()
    tier.close()


SEQUENCES = count(1)


def page_of(payload: bytes, tenant: str = "a", **fields: object) -> PageRecord:
    """A first page of a chain with that payload, unlike every other."""
    sequence = next(SEQUENCES)
    record: dict[str, object] = {
        "root": tenant.encode().ljust(32, b"-"),
        "tenant": tenant,
        "namespace": b"n" * 16,
        "key": sequence.to_bytes(16, "little"),
        "parent_key": bytes(16),
        "sequence": sequence,
        "parent_sequence": 0,
        "page_index": 0,
        "tokens": (sequence % 2**31).to_bytes(4, "little") * 16,
        "extras": b"",
        "payload_bytes": len(payload),
        "checksum": checksum(payload),
    }
    return PageRecord(**(record | fields))  # type: ignore[arg-type]


def write(
    tier: Tier, payloads: Sequence[bytes], tenant: str = "a"
) -> tuple[list[int], list[PageRecord]]:
    """Store payloads of one size, all of them."""
    slots = tier.reserve(tenant, len(payloads[0]), len(payloads))
    assert len(slots) == len(payloads)
    pages = [page_of(payload, tenant) for payload in payloads]
    kept = tier.write_many(slots, pages, [memoryview(payload) for payload in payloads])
    assert kept == [True] * len(slots)
    return slots, pages


def read(tier: Tier, slots: Sequence[int], pages: Sequence[PageRecord]) -> list[bytes | None]:
    """The payloads that are there; None for any status but OK."""
    buffers = [bytearray(page.payload_bytes) for page in pages]
    statuses = tier.read_many(slots, pages, [memoryview(buffer) for buffer in buffers])
    assert len(statuses) == len(slots)
    return [
        bytes(buffer) if status is ReadStatus.OK else None
        for buffer, status in zip(buffers, statuses, strict=True)
    ]


@pytest.mark.parametrize("size", [1, 4095, 4096, 4097, 65_536, 200_001])
def test_what_is_written_is_read(tier: Tier, size: int) -> None:
    payloads = [random.Random(size + i).randbytes(size) for i in range(3)]
    slots, pages = write(tier, payloads)
    assert read(tier, slots, pages) == payloads
    assert read(tier, slots[::-1], pages[::-1]) == payloads[::-1]


@pytest.mark.parametrize("offset", [0, 1, 64])
def test_buffers_and_payloads_need_no_alignment(tier: Tier, offset: int) -> None:
    size = 12_288
    source = random.Random(offset).randbytes(size + offset)
    payload = source[offset:]
    [slot] = tier.reserve("a", size, 1)
    page = page_of(payload)
    assert tier.write_many([slot], [page], [memoryview(source)[offset:]]) == [True]
    target = bytearray(size + offset + 5)
    view = memoryview(target)[offset : offset + size]
    assert tier.read_many([slot], [page], [view]) == [ReadStatus.OK]
    assert target == bytes(offset) + payload + bytes(5)


def test_a_buffer_shorter_than_its_page_is_refused(tier: Tier) -> None:
    slots, pages = write(tier, [b"p" * 5000])
    with pytest.raises(ValueError, match="5000"):
        tier.read_many(slots, pages, [memoryview(bytearray(4999))])


def test_nothing_asked_is_nothing_done(tier: Tier) -> None:
    assert tier.reserve("a", 4096, 0) == []
    assert tier.write_many([], [], []) == []
    assert tier.read_many([], [], []) == []
    tier.free_many([])
    assert tier.usage().used_slots == 0


def test_lists_of_different_lengths_are_refused(tier: Tier) -> None:
    slots, pages = write(tier, [b"p" * 5000])
    for call in (tier.write_many, tier.read_many):
        with pytest.raises(ValueError, match=r"."):
            call(slots, pages, [])


def test_slot_numbers_name_container_and_index(tier: OpenTier) -> None:
    slots = tier.reserve("a", 4096, 50)
    assert len(set(slots)) == 50
    containers = {c.container_id: c for c in tier.containers()}
    for slot in slots:
        assert slot & SLOT_INDEX_MASK < containers[slot >> SLOT_INDEX_BITS].slots
    assert sum(c.used_slots for c in containers.values()) == 50
    assert all(c.slot_bytes >= 4096 for c in containers.values())


def test_a_reserved_slot_holds_no_page_yet(tier: Tier) -> None:
    [slot] = tier.reserve("a", 4096, 1)
    assert read(tier, [slot], [page_of(bytes(4096))]) == [None]


def test_a_freed_slot_holds_no_page_any_more(tier: Tier) -> None:
    slots, pages = write(tier, [b"1" * 4096, b"2" * 4096])
    tier.free_many(slots[:1])
    assert read(tier, slots, pages) == [None, b"2" * 4096]


def test_a_reused_slot_never_answers_for_its_old_page(tier: Tier) -> None:
    """Also not when both pages have the same bytes: another page is another page."""
    old_slots, old_pages = write(tier, [bytes([7]) * 4096] * 40)
    tier.free_many(old_slots)
    new_slots, new_pages = write(tier, [bytes([7 + i % 2]) * 4096 for i in range(40)])
    assert read(tier, old_slots, old_pages) == [None] * 40
    assert None not in read(tier, new_slots, new_pages)


def test_a_record_that_differs_in_its_sequence_is_another_page(tier: Tier) -> None:
    slots, [page] = write(tier, [b"p" * 4096])
    other = page_of(b"p" * 4096, key=page.key, tokens=page.tokens)
    assert read(tier, slots, [other]) == [None]


def test_slots_that_never_were_hold_no_page(tier: Tier) -> None:
    page = page_of(b"p" * 4096)
    assert read(tier, [(1 << 39) + 5, 12_345 << SLOT_INDEX_BITS], [page, page]) == [None, None]


def test_slots_that_are_not_in_use_cannot_be_freed(tier: Tier) -> None:
    slots, _ = write(tier, [b"p" * 4096])
    tier.free_many(slots)
    for wrong in (slots, [12_345 << SLOT_INDEX_BITS]):
        with pytest.raises(ValueError, match="slot"):
            tier.free_many(wrong)


def test_an_unwritten_slot_can_be_given_back(tier: Tier) -> None:
    slots = tier.reserve("a", 4096, 5)
    tier.free_many(slots)
    assert tier.usage().used_slots == 0


def test_a_page_that_does_not_fit_its_slot_is_refused_with_all_its_call(tier: Tier) -> None:
    slots = tier.reserve("a", 4096, 3)
    payloads = [b"1" * 4096, b"2" * 400_000, b"3" * 4096]
    pages = [page_of(payload) for payload in payloads]
    for cut in (400_000, 4096):  # a longer page than the slot, and than its payload
        with pytest.raises(ValueError, match="page of 400000 bytes"):
            tier.write_many(slots, pages, [memoryview(payload)[:cut] for payload in payloads])
    assert read(tier, slots, pages) == [None] * 3
    tier.free_many(slots)


def test_a_published_page_never_changes(tier: Tier) -> None:
    slots, pages = write(tier, [b"1" * 4096])
    other = b"2" * 4096
    with pytest.raises(ValueError, match="not reserved"):
        tier.write_many(slots, [page_of(other)], [memoryview(other)])
    assert read(tier, slots, pages) == [b"1" * 4096]


def test_a_payload_may_be_longer_than_its_page(tier: Tier) -> None:
    """Views of arena slots are as long as their slot."""
    payload = random.Random(8).randbytes(8192)
    [slot] = tier.reserve("a", 5000, 1)
    page = page_of(payload[:5000])
    assert tier.write_many([slot], [page], [memoryview(payload)]) == [True]
    assert read(tier, [slot], [page]) == [payload[:5000]]


def fill(tier: Tier, payload_bytes: int, tenant: str = "a") -> list[int]:
    slots: list[int] = []
    while more := tier.reserve(tenant, payload_bytes, 64):
        slots += more
        usage = tier.usage()
        assert usage.used_bytes <= usage.allocated_bytes <= usage.capacity_bytes
    return slots


def test_a_full_tier_hands_out_fewer_and_never_exceeds_its_capacity(name: str, tier: Tier) -> None:
    size = FILL_PAYLOAD_BYTES[name]
    slots = fill(tier, size)
    assert len(slots) == len(set(slots)) == tier.usage().used_slots
    assert len(slots) * size > CAPACITY_BYTES[name] // 4  # most of it is for pages
    assert tier.reserve("a", size, 1) == []
    tier.free_many(slots[:3])
    assert len(tier.reserve("a", size, 10)) == 3


def test_capacity_moves_to_another_size_and_tenant_once_emptied(name: str, tier: OpenTier) -> None:
    size = FILL_PAYLOAD_BYTES[name]
    first = fill(tier, size)
    tier.free_many(first)
    second = fill(tier, size // 4, "b")
    assert len(second) * (size // 4) > len(first) * size // 2
    tier.free_many(second)
    assert len(fill(tier, size)) >= len(first) * 3 // 4


def test_usage_counts_slots_at_their_size(tier: Tier) -> None:
    def counted() -> Usage:
        usage = tier.usage()
        assert usage.used_bytes <= usage.allocated_bytes <= usage.capacity_bytes
        return usage

    assert counted().used_bytes == 0
    slots, _ = write(tier, [b"p" * 10_000] * 7)
    usage = counted()
    assert usage.used_slots == 7
    assert 7 * aligned(10_000) <= usage.used_bytes <= 7 * (aligned(10_000) + 16_384)
    tier.free_many(slots)
    assert tier.reserve("a", 10_000, 7)
    assert counted().used_slots >= 7


@settings(
    max_examples=15,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    steps=st.lists(st.tuples(st.integers(1, 30_000), st.integers(1, 6), st.booleans()), max_size=8)
)
@pytest.mark.slow
def test_any_mix_of_sizes_reads_as_written(tier: Tier, steps: list[tuple[int, int, bool]]) -> None:
    live: dict[int, tuple[PageRecord, bytes]] = {}
    for size, number, drop in steps:
        payloads = [random.Random(size + i).randbytes(size) for i in range(number)]
        slots, pages = write(tier, payloads)
        live |= {s: (p, b) for s, p, b in zip(slots, pages, payloads, strict=True)}
        if drop:
            gone = list(live)[::2]
            tier.free_many(gone)
            assert read(tier, gone, [live.pop(slot)[0] for slot in gone]) == [None] * len(gone)
        found = read(tier, list(live), [page for page, _ in live.values()])
        assert found == [payload for _, payload in live.values()]
        tier.check()
    tier.free_many(list(live))


@pytest.mark.slow
def test_threads_share_a_tier_without_sharing_pages(tier: Tier) -> None:
    failures: list[object] = []

    def work(worker: int) -> None:
        rng = random.Random(worker)
        for _ in range(15):
            payloads = [rng.randbytes(6000)] * rng.randrange(1, 5)
            try:
                slots, pages = write(tier, payloads, "ab"[worker % 2])
                if read(tier, slots, pages) != payloads:
                    failures.append(slots)
                tier.free_many(slots)
            except Exception as exc:
                failures.append(exc)

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert tier.usage().used_slots <= tier.usage().used_bytes // aligned(6000)
