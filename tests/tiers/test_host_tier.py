"""The arena: capacity, extents, generations, populating, forks, and refusals with numbers."""

from __future__ import annotations

import fcntl
import gc
import mmap
import os
import random
import struct
import subprocess
import sys
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore.tiers.arena_size import EXTENT_BYTES_MAX
from kvstore.tiers.available_memory import available_memory_bytes, is_bound_by_group
from kvstore.tiers.checksum import PIECE_BYTES, checksum, copy_and_checksum
from kvstore.tiers.extent import (
    EXTENT_MAGIC,
    GENERATIONS_OFFSET,
    HEADER,
    Memfd,
    header_bytes,
    slots_that_fit,
)
from kvstore.tiers.host_tier import HostTier
from kvstore.tiers.tier import SLOT_INDEX_BITS, SLOT_INDEX_MASK, PageRecord, ReadStatus, TierError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

KIB = 1 << 10
MIB = 1 << 20


def page_of(payload: bytes, sequence: int = 1, tenant: str = "a") -> PageRecord:
    return PageRecord(
        root=b"r" * 32,
        tenant=tenant,
        namespace=b"n" * 16,
        key=sequence.to_bytes(16, "little"),
        parent_key=bytes(16),
        sequence=sequence,
        parent_sequence=0,
        page_index=0,
        tokens=b"\1\0\0\0" * 16,
        extras=b"",
        payload_bytes=len(payload),
        checksum=checksum(payload),
    )


@contextmanager
def opened(
    capacity_bytes: int, extent_bytes: int | None = None, **options: object
) -> Iterator[HostTier]:
    tier = HostTier(capacity_bytes, extent_bytes, **options)  # type: ignore[arg-type]
    try:
        yield tier
        tier.check()
    finally:
        tier.close()


def store(tier: HostTier, slot: int, payload: bytes, sequence: int = 1) -> None:
    assert tier.write_many([slot], [page_of(payload, sequence)], [memoryview(payload)]) == [True]


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


# Checksums


@pytest.mark.parametrize("size", [0, 1, 4095, PIECE_BYTES - 1, PIECE_BYTES, 3 * PIECE_BYTES + 17])
def test_copy_and_checksum_copies_and_agrees_with_checksum(size: int) -> None:
    source = random.Random(size).randbytes(size)
    destination = bytearray(size + 5)
    assert copy_and_checksum(source, destination) == checksum(source)
    assert destination == source + bytes(5)


def test_checksum_is_the_canonical_xxh3_128_digest() -> None:
    """A golden value, from the reference implementation: files outlive this process."""
    assert checksum(b"").hex() == "99aa06d3014798d86001c324468d497f"
    assert checksum(b"abc").hex() == "06b05ab6733a618578af5f94892f3950"


def test_copy_and_checksum_refuses_a_short_destination() -> None:
    with pytest.raises(ValueError, match="5 bytes do not fit in a destination of 4"):
        copy_and_checksum(b"12345", bytearray(4))


# Layout


@pytest.mark.parametrize("slot_bytes", [4 * KIB, 64 * KIB, 2 * MIB, 3 * MIB + 4 * KIB])
def test_slots_that_fit_wastes_less_than_one_slot(slot_bytes: int) -> None:
    for size in (0, 4 * KIB, 8 * KIB, MIB, 16 * MIB, 256 * MIB + 36 * KIB):
        slots = slots_that_fit(size, slot_bytes)
        assert slots == 0 or header_bytes(slots) + slots * slot_bytes <= size
        assert header_bytes(slots + 1) + (slots + 1) * slot_bytes > size


def test_default_extents_hold_whole_powers_of_two() -> None:
    """256 MiB extents hold 128 pages of 2 MiB although their header takes a page too."""
    with opened(64 * MIB) as tier:
        assert len(tier.reserve("a", 2 * MIB, 100)) == 31
        assert [c.slots for c in tier.containers()] == [4] * 7 + [3]
    assert slots_that_fit(EXTENT_BYTES_MAX + header_bytes(4096), 2 * MIB) == 128


def test_header_names_the_extent_for_other_processes() -> None:
    with opened(MIB, boot_epoch=77) as tier:
        [slot] = tier.reserve("a", 8 * KIB, 1)
        [record] = tier.extents("a")
        header = os.pread(record.fd.fileno(), HEADER.size, 0)
        assert HEADER.unpack(header) == (
            *(EXTENT_MAGIC, 1, 1, 77, slot >> SLOT_INDEX_BITS),
            *(8 * KIB, record.slots, record.data_offset),
        )
        offset = GENERATIONS_OFFSET + 8 * (slot & SLOT_INDEX_MASK)
        generation = os.pread(record.fd.fileno(), 8, offset)
        assert struct.unpack("<Q", generation) == (tier.generation(slot),)


# Slots


def test_generation_moves_at_each_step_and_is_even_only_while_published() -> None:
    with opened(MIB) as tier:
        seen = []
        for _ in range(3):
            [slot] = tier.reserve("a", 4 * KIB, 1)
            seen.append(tier.generation(slot))
            assert seen[-1] % 2 == 1
            tier.publish_many([slot])
            seen.append(tier.generation(slot))
            assert seen[-1] % 2 == 0
            tier.free_many([slot])
            seen.append(tier.generation(slot))
            assert seen[-1] % 2 == 1
        [slot] = tier.reserve("a", 4 * KIB, 1)
        tier.free_many([slot])
        seen.append(tier.generation(slot))
        assert seen == sorted(set(seen))


def test_write_many_keeps_only_what_matches_its_checksum() -> None:
    with opened(MIB) as tier:
        slots = tier.reserve("a", 4 * KIB, 3)
        good, bad = b"g" * 4096, b"b" * 4096
        records = [page_of(good), page_of(bad), page_of(good[:100])]
        payloads = [memoryview(good), memoryview(good), memoryview(good)]
        assert tier.write_many(slots, records, payloads) == [True, False, True]
        assert [tier.generation(slot) % 2 for slot in slots] == [0, 1, 0]
        tier.free_many(slots)


def test_a_page_written_in_place_is_readable_once_published() -> None:
    with opened(MIB) as tier:
        [slot] = tier.reserve("a", 5000, 1)
        payload, buffer = random.Random(1).randbytes(5000), bytearray(5000)
        tier.view(slot, 5000)[:] = payload
        page = page_of(payload)
        assert tier.read_many([slot], [page], [memoryview(buffer)]) == [ReadStatus.STALE]
        tier.publish_many([slot])
        assert tier.read_many([slot], [page], [memoryview(buffer)]) == [ReadStatus.OK]
        assert buffer == payload
        with pytest.raises(TypeError):
            tier.readonly_view(slot, 5000)[0] = 1


def test_a_flipped_byte_reads_as_corrupt_and_another_page_as_stale() -> None:
    with opened(MIB) as tier:
        [slot] = tier.reserve("a", 4096, 1)
        payload, buffer = b"p" * 4096, memoryview(bytearray(4096))
        store(tier, slot, payload, sequence=5)
        assert tier.read_many([slot], [page_of(payload, 6)], [buffer]) == [ReadStatus.STALE]
        tier.view(slot, 4096)[17] ^= 4
        assert tier.read_many([slot], [page_of(payload, 5)], [buffer]) == [ReadStatus.CORRUPT]


@pytest.mark.parametrize("call", ["free_many", "publish_many"])
def test_slots_that_are_not_in_use_are_refused_without_a_change(call: str) -> None:
    with opened(MIB) as tier:
        slots = tier.reserve("a", 4096, 2)
        tier.free_many(slots[1:])
        for wrong in (
            [slots[0], slots[1]],
            [slots[0], slots[0]],
            [slots[0], 99 << 24],
            [-1],
            [slots[0] + 10**6],
        ):
            with pytest.raises(ValueError, match=r"named twice|is free|no slot"):
                getattr(tier, call)(wrong)
        assert tier.usage().used_slots == 1
        assert tier.generation(slots[0]) % 2 == 1


def test_a_published_slot_cannot_be_published_again() -> None:
    with opened(MIB) as tier:
        slots = tier.reserve("a", 4096, 1)
        tier.publish_many(slots)
        with pytest.raises(ValueError, match="is published, not reserved"):
            tier.publish_many(slots)


def test_views_stay_inside_their_slot() -> None:
    with opened(MIB) as tier:
        [slot] = tier.reserve("a", 4096, 1)
        with pytest.raises(ValueError, match="4097 bytes asked of a slot of 4096"):
            tier.view(slot, 4097)


# Capacity


def test_reserve_gives_fewer_when_full_and_all_again_after_freeing() -> None:
    with opened(MIB, 128 * KIB) as tier:
        slots = tier.reserve("a", 4096, 10_000)
        assert 200 < len(slots) == len(set(slots)) < 256
        assert tier.reserve("a", 4096, 1) == []
        usage = tier.usage()
        assert usage.used_bytes <= usage.allocated_bytes <= MIB
        tier.free_many(slots)
        assert sorted(tier.reserve("a", 4096, 10_000)) == sorted(slots)


def test_an_emptied_extent_serves_another_size_of_its_tenant_in_place() -> None:
    with opened(MIB, 128 * KIB) as tier:
        old = tier.reserve("a", 4096, 10_000)
        [*_, last] = tier.extents("a")
        tier.free_many(old)
        new = tier.reserve("a", 8192, 10_000)
        assert len(new) >= 8 * 15
        assert not {slot >> SLOT_INDEX_BITS for slot in old} & {s >> SLOT_INDEX_BITS for s in new}
        # a process that still has the old extent mapped shares the memory, and sees that it ended
        state, _, container_id = struct.unpack_from("<IQQ", os.pread(last.fd.fileno(), 64, 0), 12)
        assert (state, container_id != last.container_id) == (1, True)


def test_the_number_of_an_extent_tells_nothing_of_those_that_others_made_before() -> None:
    """A tenant sees those of its own extents: counted, they would tell how fast others are."""
    numbers = []
    for others in (0, 5):
        with opened(MIB, 128 * KIB) as tier:
            for _ in range(others):
                tier.free_many(tier.reserve("b", 4096, 1))
                tier.free_many(tier.reserve("b", 8192, 1))
            tier._begun_s -= 1000.0  # a while later
            [slot] = tier.reserve("a", 4096, 1)
            numbers.append(slot >> SLOT_INDEX_BITS)
    assert all(1_000_000 <= number < 1_060_000 for number in numbers)


def test_an_emptied_extent_goes_back_to_the_machine_before_another_tenant_gets_memory() -> None:
    with opened(MIB, 128 * KIB) as tier:
        slots = tier.reserve("a", 4096, 10_000)
        tier.view(slots[0], 4096)[:] = b"s" * 4096
        [old, *_] = tier.extents("a")
        assert tier.reserve("b", 4096, 1) == []
        tier.free_many([slot for slot in slots if slot >> SLOT_INDEX_BITS == old.container_id])
        [slot] = tier.reserve("b", 4096, 1)
        assert tier.view(slot, 4096) == bytes(4096)
        assert b"s" in os.pread(old.fd.fileno(), 1 << 17, 0)  # still the old memory
        assert os.pread(old.fd.fileno(), 16, 0)[12:] == bytes(4)  # that says: retired
        assert {c.tenant for c in tier.containers()} == {"a", "b"}
        assert {r.container_id for r in tier.extents("b")} == {slot >> SLOT_INDEX_BITS}


def test_memory_that_somebody_still_looks_at_counts_until_it_is_let_go() -> None:
    with opened(256 * KIB, 256 * KIB) as tier:
        [slot] = tier.reserve("a", 4096, 1)
        held = tier.view(slot, 4096)
        tier.free_many([slot])
        assert tier.reserve("b", 4096, 1) == []
        assert tier.usage().allocated_bytes == 256 * KIB
        del held
        assert len(tier.reserve("b", 4096, 1)) == 1


def test_pages_larger_than_an_extent_get_extents_of_their_own() -> None:
    with opened(8 * MIB) as tier:
        small = tier.reserve("a", 4096, 10)
        large = tier.reserve("a", 2 * MIB, 10)
        assert (len(small), len(large)) == (10, 3)
        assert tier.usage().allocated_bytes <= 8 * MIB
        with pytest.raises(TierError, match=r"pages of 9437184 bytes do not fit in 8388608"):
            tier.reserve("a", 9 * MIB, 1)


def test_staging_counts_in_the_capacity_and_comes_back() -> None:
    with opened(MIB, 128 * KIB) as tier:
        tier.wait_populated(5)
        staging = tier.new_staging(300_000)
        assert staging is not None
        assert len(staging.view(303_100, 4)) == 4
        with pytest.raises(ValueError, match="outside of 303104 bytes"):
            staging.view(303_100, 5)
        few = tier.reserve("a", 4096, 10_000)
        assert tier.new_staging(MIB // 2) is None
        assert tier.usage().allocated_bytes <= MIB
        tier.release_staging(staging)
        more = tier.reserve("a", 4096, 10_000)
        assert len(few) + len(more) >= 7 * 31


def test_staging_takes_the_place_of_empty_extents() -> None:
    with opened(MIB, 128 * KIB) as tier:
        assert tier.wait_populated(5)
        tier.free_many(tier.reserve("a", 4096, 10_000))
        staging = tier.new_staging(MIB)
        assert staging is not None
        assert tier.usage().allocated_bytes == MIB
        assert tier.reserve("a", 4096, 1) == []


def test_serving_starts_before_the_whole_capacity_is_populated() -> None:
    with opened(64 * MIB, MIB) as tier:
        assert len(tier.reserve("a", 4096, 1)) == 1
        assert tier.wait_populated(60)
        assert tier.usage().allocated_bytes == 64 * MIB


def test_reserve_waits_for_memory_that_is_on_its_way() -> None:
    with opened(32 * MIB, MIB) as tier:
        assert len(tier.reserve("a", 4096, 100_000)) == 32 * 255


@pytest.mark.parametrize(
    ("capacity", "extent", "message"),
    [
        (0, None, "0 bytes asked, at least 8192"),
        (-5, None, "-5 bytes asked, at least 8192"),
        (1 << 50, None, r"1048576.00 GiB asked, [0-9.]+ GiB available; lower --host-bytes"),
        (MIB, 5000, "extents of 5000 bytes asked; they are multiples of 4096"),
        (MIB, 2 * MIB, "extents of 2097152 bytes asked"),
        (MIB, 0, "extents of 0 bytes asked"),
    ],
)
def test_bad_sizes_are_refused_with_numbers(
    capacity: int, extent: int | None, message: str
) -> None:
    with pytest.raises(TierError, match=message):
        HostTier(capacity, extent)


def test_more_than_the_machine_has_is_refused() -> None:
    with pytest.raises(
        TierError, match=r"host tier: 40\.00 GiB asked, 23\.00 GiB available; lower"
    ):
        HostTier(40 << 30, available_bytes=23 << 30)


def test_huge_pages_are_refused_when_the_machine_has_none_reserved() -> None:
    with pytest.raises(TierError, match=r"0\.00 GiB in free huge pages.*vm\.nr_hugepages=32"):
        HostTier(64 * MIB, huge_pages=True, available_bytes=0)


def test_huge_pages_serve_like_others() -> None:
    try:
        Memfd(2 * MIB, huge_pages=True).populate()
    except TierError:
        pytest.skip("this machine has no reserved huge pages (sysctl vm.nr_hugepages)")
    with opened(4 * MIB, huge_pages=True) as tier:
        [slot] = tier.reserve("a", MIB, 1)
        store(tier, slot, b"h" * MIB)


def test_available_memory_is_the_least_of_machine_and_control_groups(tmp_path: Path) -> None:
    proc, cgroup = tmp_path / "proc", tmp_path / "cgroup"

    def write(path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    write(proc / "meminfo", "MemTotal: 100 kB\nMemAvailable: 1000 kB\nHugePages_Free: 3\n")
    assert available_memory_bytes(proc, cgroup) == 1000 * KIB
    write(proc / "self/cgroup", "4:cpu,memory:/pod/task\n0::/\n")
    write(cgroup / "memory/pod/task/memory.limit_in_bytes", "9223372036854771712\n")
    write(cgroup / "memory/pod/task/memory.usage_in_bytes", "4096\n")
    write(cgroup / "memory/pod/memory.limit_in_bytes", "500000\n")
    write(cgroup / "memory/pod/memory.usage_in_bytes", "400000\n")
    write(cgroup / "memory/pod/memory.stat", "inactive_file 5\ntotal_inactive_file 50000\n")
    assert available_memory_bytes(proc, cgroup) == 150_000
    write(proc / "self/cgroup", "0::/not/visible/here\n")
    write(cgroup / "memory.max", "max\n")
    write(cgroup / "memory.current", "4096\n")
    assert available_memory_bytes(proc, cgroup) == 1000 * KIB
    assert not is_bound_by_group(proc, cgroup)
    write(cgroup / "memory.max", "10000\n")
    assert available_memory_bytes(proc, cgroup) == 5904
    assert is_bound_by_group(proc, cgroup)
    write(cgroup / "memory.current", "20000\n")
    assert available_memory_bytes(proc, cgroup) == 0


@pytest.mark.slow
def test_a_machine_that_gives_no_memory_leaves_a_smaller_tier_not_a_dead_one() -> None:
    """The size limit of files stands in for a machine whose memory is gone."""
    done = run_python(
        "import resource, time\n"
        "from kvstore.tiers.host_tier import HostTier\n"
        "tier = HostTier(8 << 20, 1 << 20)\n"
        "few = tier.reserve('a', 4096, 10)\n"
        "tier.wait_populated(10)\n"
        "staging = tier.new_staging(4 << 20)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "tier.release_staging(staging)\n"
        "begin = time.monotonic()\n"
        "slots = tier.reserve('a', 4096, 10_000)\n"
        "tier.check()\n"
        "print(len(few + slots), tier.usage().allocated_bytes, time.monotonic() - begin < 1)\n"
    )
    assert done.stdout.split() == [str(4 * 255), str(4 << 20), "True"], done
    assert "stays smaller than its capacity" in done.stderr


# Sharing


def test_an_extent_is_sealed_and_its_descriptor_cannot_write() -> None:
    with opened(MIB) as tier:
        tier.reserve("a", 4096, 1)
        [record] = tier.extents("a")
        seals = fcntl.fcntl(record.fd.fileno(), fcntl.F_GET_SEALS)
        assert seals == fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL | 0x10
        with pytest.raises(PermissionError):
            mmap.mmap(record.fd.fileno(), record.total_bytes, mmap.MAP_SHARED)


def test_nothing_with_a_name_is_left_in_the_file_system() -> None:
    before = set(os.listdir("/dev/shm"))  # noqa: S108 - the place where named segments would be
    with opened(MIB) as tier:
        tier.reserve("a", 4096, 1)
        assert set(os.listdir("/dev/shm")) == before  # noqa: S108


def test_a_closed_tier_refuses_and_its_views_stay_valid() -> None:
    with opened(MIB) as tier:
        [slot] = tier.reserve("a", 4096, 1)
        view = tier.view(slot, 4096)
        view[:] = b"v" * 4096
    for call in (lambda: tier.reserve("a", 4096, 1), tier.usage, lambda: tier.view(slot, 1)):
        with pytest.raises(TierError, match="closed"):
            call()
    tier.close()
    assert view == b"v" * 4096


def test_closing_gives_descriptors_and_threads_back() -> None:
    gc.collect()
    before, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(3):
        with opened(MIB) as tier:
            tier.reserve("a", 4096, 1)
    assert len(os.listdir("/proc/self/fd")) == before
    assert threading.active_count() == threads


@pytest.mark.slow
def test_a_forked_child_is_told_to_open_its_own() -> None:
    """F26: a child would read memory that its parent goes on changing, so it must not get far."""
    done = run_python(
        "import os\n"
        "from kvstore.tiers.host_tier import HostTier\n"
        "tier = HostTier(1 << 20)\n"
        "[slot] = tier.reserve('a', 4096, 1)\n"
        "memfds = lambda: sum('memfd' in os.readlink('/proc/self/fd/' + fd)\n"
        "    for fd in os.listdir('/proc/self/fd') if os.path.islink('/proc/self/fd/' + fd))\n"
        "assert memfds() > 0\n"
        "tier._lock.acquire()\n"  # as if another thread were at work during the fork
        "if os.fork() == 0:\n"
        "    assert memfds() == 0, 'the child keeps the memory alive'\n"
        "    for call in (tier.usage, tier.check, lambda: tier.reserve('a', 1, 1),\n"
        "                 lambda: tier.view(slot, 1), lambda: tier.free_many([slot]),\n"
        "                 lambda: tier.extents('a')):\n"
        "        try:\n"
        "            call()\n"
        "        except RuntimeError as exc:\n"
        "            print(exc, flush=True)\n"
        "    tier.close()\n"
        "    os._exit(0)\n"
        "print(os.wait()[1])\n"
        "tier._lock.release()\n"
        "tier.free_many([slot])\n"
        "tier.check()\n"
        "tier.close()\n"
    )
    lines = done.stdout.splitlines()
    assert len(lines) == 7, done
    assert lines[-1] == "0", done
    assert all("spawn" in line for line in lines[:-1])
    assert done.returncode == 0, done


@pytest.mark.slow
def test_a_view_kept_across_a_fork_ends_the_child_instead_of_showing_moving_bytes() -> None:
    done = run_python(
        "import os\n"
        "from kvstore.tiers.host_tier import HostTier\n"
        "tier = HostTier(1 << 20)\n"
        "view = tier.view(tier.reserve('a', 4096, 1)[0], 4096)\n"
        "if os.fork() == 0:\n"
        "    view[0]\n"
        "    os._exit(0)\n"
        "print(os.WTERMSIG(os.wait()[1]))\n"
    )
    assert done.stdout == "11\n", done


def test_check_finds_a_header_and_a_generation_that_were_overwritten() -> None:
    with opened(MIB) as tier:
        [slot] = tier.reserve("a", 4096, 1)
        [extent] = tier._extents.values()
        extent.generations[slot & SLOT_INDEX_MASK] += 1
        with pytest.raises(TierError, match="slot 0 is reserved at generation 4"):
            tier.check()
        extent.generations[slot & SLOT_INDEX_MASK] -= 1
        tier.check()
        extent.free_count -= 1
        with pytest.raises(TierError, match="slots are free, the free list has"):
            tier.check()
        extent.free_count += 1
        extent.memory.mapping[0] ^= 1
        with pytest.raises(TierError, match="header was overwritten"):
            tier.check()
        extent.memory.mapping[0] ^= 1


@pytest.mark.slow
def test_threads_never_get_the_same_slot_and_never_read_each_others_bytes() -> None:
    with opened(2 * MIB, 256 * KIB) as tier:
        failures: list[object] = []

        def work(worker: int) -> None:
            rng = random.Random(worker)
            tenant, size = "ab"[worker % 2], rng.choice([4096, 10_000])
            buffer = memoryview(bytearray(size))
            for step in range(150):
                payload = rng.randbytes(size)
                slots = tier.reserve(tenant, size, rng.randrange(1, 8))
                pages = [page_of(payload, 1 + worker + 8 * step)] * len(slots)
                kept = tier.write_many(slots, pages, [memoryview(payload)] * len(slots))
                for slot, page in zip(slots, pages, strict=True):
                    status = tier.read_many([slot], [page], [buffer])
                    if not all(kept) or status != [ReadStatus.OK] or buffer != payload:
                        failures.append((worker, step, kept, status))
                tier.free_many(slots)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        assert tier.usage().used_slots == 0


class HostTierMachine(RuleBasedStateMachine):
    """The tier against a dict: slot -> payload, or None while it is only reserved."""

    CAPACITY_BYTES = 512 * KIB

    def __init__(self) -> None:
        super().__init__()
        self.tier = HostTier(self.CAPACITY_BYTES, 64 * KIB)
        self.model: dict[int, bytes | None] = {}
        self.made_for: dict[int, tuple[str, int]] = {}
        self.sequences: dict[int, int] = {}
        self.clock = 0

    @rule(
        tenant=st.sampled_from(["a", "b"]),
        size=st.sampled_from([1, 4096, 9000, 20_000, 100_000]),
        count=st.integers(0, 60),
    )
    def reserve(self, tenant: str, size: int, count: int) -> None:
        slots = self.tier.reserve(tenant, size, count)
        assert len(slots) <= count
        assert len(set(slots) - self.model.keys()) == len(slots)
        for slot in slots:
            self.model[slot] = None
            self.made_for[slot] = (tenant, size)
        if len(slots) < count:  # then there is really no place left for one more
            slot_bytes = -(-size // 4096) * 4096
            free = self.CAPACITY_BYTES - self.tier.usage().allocated_bytes
            assert free < slot_bytes + 4096 or free < 64 * KIB
            for container in self.tier.containers():
                assert container.used_slots > 0
                same = (container.tenant, container.slot_bytes) == (tenant, slot_bytes)
                assert not same or container.used_slots == container.slots

    @precondition(lambda self: self.model)
    @rule(data=st.data(), in_place=st.booleans(), seed=st.integers(0, 255))
    def write(self, data: st.DataObject, in_place: bool, seed: int) -> None:
        slot = data.draw(st.sampled_from(sorted(self.model)))
        payload = bytes([seed]) * self.made_for[slot][1]
        self.clock += 1
        if self.model[slot] is not None:
            with pytest.raises(ValueError, match="is published, not reserved"):
                store(self.tier, slot, payload, self.clock)
            return
        if in_place:
            self.tier.view(slot, len(payload))[:] = payload
            self.tier.publish_many([slot])
        else:
            store(self.tier, slot, payload, self.clock)
        self.model[slot], self.sequences[slot] = payload, self.clock

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        choice = st.lists(st.sampled_from(sorted(self.model)), unique=True, min_size=1)
        for slot in (slots := data.draw(choice)):
            del self.model[slot]
        self.tier.free_many(slots)

    @rule(tenant=st.sampled_from(["a", "b"]))
    def free_all_of(self, tenant: str) -> None:
        slots = [slot for slot in self.model if self.made_for[slot][0] == tenant]
        for slot in slots:
            del self.model[slot]
        self.tier.free_many(slots)

    @invariant()
    def pages_read_as_written(self) -> None:
        for slot, payload in self.model.items():
            size = self.made_for[slot][1]
            buffer = memoryview(bytearray(size))
            page = page_of(payload or bytes(size), self.sequences.get(slot, 1))
            expected = ReadStatus.STALE if payload is None else ReadStatus.OK
            assert self.tier.read_many([slot], [page], [buffer]) == [expected]
            assert payload is None or buffer == payload

    @invariant()
    def counts_agree(self) -> None:
        self.tier.check()
        usage = self.tier.usage()
        assert usage.used_slots == len(self.model)
        assert usage.used_bytes <= usage.allocated_bytes <= usage.capacity_bytes
        for container in self.tier.containers():
            members = [s for s in self.model if s >> SLOT_INDEX_BITS == container.container_id]
            assert len(members) == container.used_slots
            assert {self.made_for[slot][0] for slot in members} <= {container.tenant}

    def teardown(self) -> None:
        self.tier.close()


TestHostTierMachine = HostTierMachine.TestCase
TestHostTierMachine.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
TestHostTierMachine.pytestmark = [pytest.mark.slow]
