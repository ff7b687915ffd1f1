"""The disk tier over restarts, lost files, full disks, and every order of its calls."""

from __future__ import annotations

import errno
import os
import random
import shutil
import threading
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from disk_pages import Chains, Stored, found_slots, read, write
from faulty_files import Fault, FaultyFiles

from kvstore.tiers.catalog import Catalog
from kvstore.tiers.disk_space import CAPACITY_BYTES_MIN
from kvstore.tiers.disk_state import TierState
from kvstore.tiers.disk_tier import DiskTier
from kvstore.tiers.file_layer import FileLayer, Space
from kvstore.tiers.segment import segment_name
from kvstore.tiers.tier import ReadStatus, TierError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MIB = 1 << 20
CAPACITY = 64 * MIB


def bytes_below(*directories: Path) -> int:
    return sum(FileLayer().tree_bytes(directory) for directory in directories)


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[DiskTier]:
    tier = DiskTier.open([tmp_path / "d"], CAPACITY, load=True)
    yield tier
    if tier.state is TierState.READY:
        tier.check()
    tier.close()


def reopen(tier: DiskTier, tmp_path: Path, capacity: int = CAPACITY) -> DiskTier:
    tier.close()
    return DiskTier.open([tmp_path / "d"], capacity, load=True)


def test_a_restart_finds_every_page(tier: DiskTier, tmp_path: Path) -> None:
    chains = Chains()
    stored = chains.chain(5) + chains.chain(3, root=1) + chains.chain(4, size=10_000)
    stored.append(chains.page(extras=b"image", parent=stored[4]))
    for item in stored:
        assert write(tier, [item]) == [True]
    tier = reopen(tier, tmp_path)
    groups = tier.rows()
    assert tier.rows() == [], "handed over once"
    assert sum(map(len, groups)) == len(stored)
    for rows in groups:
        for row, sequence in enumerate(rows.sequences.tolist()):
            item = next(item for item in stored if item.page.sequence == sequence)
            page = item.page
            assert int(rows.slots[row]) == item.slot
            assert (rows.root, rows.tenant, rows.namespace) == (
                page.root,
                page.tenant,
                page.namespace,
            )
            assert rows.tokens[row].tobytes() == page.tokens
            assert rows.extras.get(row, b"") == page.extras
            assert rows.checksums[row].tobytes() == page.checksum
            assert rows.writers[int(rows.writer_ids[row])] == page.writer
            assert int(rows.created_s[row]) == page.created_s
    assert all(read(tier, item) is ReadStatus.OK for item in stored)
    tier.check()
    tier.close()


def test_a_freed_page_is_gone_after_a_restart(tier: DiskTier, tmp_path: Path) -> None:
    stored = Chains().chain(6)
    write(tier, stored)
    tier.free_many([item.slot for item in stored[4:]])
    assert read(tier, stored[5]) is ReadStatus.STALE
    tier = reopen(tier, tmp_path)
    assert set(found_slots(tier)) == {item.page.sequence for item in stored[:4]}
    tier.close()


def test_a_freed_slot_waits_for_its_commit(tier: DiskTier) -> None:
    stored = Chains().chain(3)
    write(tier, stored)
    tier.free_many([stored[2].slot])
    room = tier.usage().free_slots
    taken = tier.reserve("t", 4096, room)
    assert stored[2].slot not in taken
    assert tier.usage().free_slots == 0
    tier.commit_frees()
    assert tier.reserve("t", 4096, 1) == [stored[2].slot]
    with pytest.raises(ValueError, match="not in use"):
        tier.free_many([taken[0], taken[0]])


def test_a_page_without_its_parent_is_dropped_at_start(tier: DiskTier, tmp_path: Path) -> None:
    chains = Chains()
    stored = chains.chain(5)
    write(tier, stored)
    tier.free_many([stored[2].slot])
    tier = reopen(tier, tmp_path)
    assert set(found_slots(tier)) == {item.page.sequence for item in stored[:2]}
    assert tier.counters.records_dropped == 2
    assert tier.usage().used_slots == 2
    tier.check()
    tier.close()


@pytest.mark.parametrize("damage", ["gone", "empty", "cut", "noise", "other store"])
def test_a_lost_catalog_is_rebuilt_from_headers(
    tier: DiskTier, tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    chains = Chains()
    stored = chains.chain(9) + chains.chain(4, size=100_000)
    write(tier, stored[:9])
    write(tier, stored[9:])
    tier.close()
    data = tmp_path / "d" / "catalog" / "data.mdb"
    if damage == "gone":
        shutil.rmtree(data.parent)
    elif damage == "other store":
        other = DiskTier.open([tmp_path / "o"], CAPACITY, load=True)
        write(other, Chains(boot=7).chain(3))
        other.close()
        shutil.copy(tmp_path / "o" / "catalog" / "data.mdb", data)
    else:
        content = data.read_bytes()
        data.write_bytes(
            {"empty": b"", "cut": content[:9000], "noise": os.urandom(len(content))}[damage]
        )
    steps: list[tuple[int, int]] = []
    tier = DiskTier.open([tmp_path / "d"], CAPACITY)
    tier.load(lambda done, total: steps.append((done, total)))
    assert "catalog unusable" in caplog.text
    assert steps[-1][0] == steps[-1][1] > 13
    assert found_slots(tier) == {item.page.sequence: item.slot for item in stored}
    assert all(read(tier, item) is ReadStatus.OK for item in stored)
    kept = [name for name in os.listdir(tmp_path / "d") if name.startswith("quarantine-")]
    assert len(kept) == (damage != "gone")
    tier.check()
    tier.close()


def test_erased_pages_do_not_come_back_by_a_rebuild(tier: DiskTier, tmp_path: Path) -> None:
    stored = Chains().chain(6)
    write(tier, stored)
    tier.free_many([item.slot for item in stored[3:]], erase=True)
    tier.close()
    (tmp_path / "d" / "catalog" / "data.mdb").write_bytes(b"")
    tier = DiskTier.open([tmp_path / "d"], CAPACITY)
    assert set(found_slots(tier)) == {item.page.sequence for item in stored[:3]}
    tier.close()


def test_a_damaged_segment_head_is_written_anew(tier: DiskTier, tmp_path: Path) -> None:
    stored = Chains().chain(3)
    write(tier, stored)
    tier.close()
    path = tmp_path / "d" / segment_name(1)
    with open(path, "r+b") as stream:
        stream.write(bytes(100))
    for _ in range(2):
        tier = DiskTier.open([tmp_path / "d"], CAPACITY, load=True)
        assert read(tier, stored[2]) is ReadStatus.OK
        tier.close()
    (tmp_path / "d" / "catalog" / "data.mdb").write_bytes(b"")
    tier = DiskTier.open([tmp_path / "d"], CAPACITY, load=True)
    assert len(found_slots(tier)) == 3
    tier.close()


@pytest.mark.parametrize("damage", ["gone", "cut", "empty"])
def test_a_lost_segment_costs_only_its_pages(tier: DiskTier, tmp_path: Path, damage: str) -> None:
    chains = Chains()
    small, large = chains.chain(3), chains.chain(3, size=50_000)
    write(tier, small)
    write(tier, large)
    tier.close()
    path = tmp_path / "d" / segment_name(2)
    if damage == "gone":
        path.unlink()
    else:
        os.truncate(path, 4096 + 60_000 if damage == "cut" else 0)
    tier = DiskTier.open([tmp_path / "d"], CAPACITY, load=True)
    assert all(read(tier, item) is ReadStatus.OK for item in small)
    sound = [read(tier, item) is ReadStatus.OK for item in large]
    assert sound == [damage == "cut", False, False]
    assert write(tier, chains.chain(4, size=50_000)) == [True] * 4
    tier.check()
    tier.close()


def test_a_leftover_segment_file_is_removed(tier: DiskTier, tmp_path: Path) -> None:
    write(tier, Chains().chain(3))
    tier.close()
    stray = tmp_path / "d" / segment_name(77)
    stray.write_bytes(bytes(100))
    DiskTier.open([tmp_path / "d"], CAPACITY, load=True).close()
    assert not stray.exists()


def test_a_flipped_byte_is_a_miss(tier: DiskTier, tmp_path: Path) -> None:
    stored = Chains().chain(8, size=5000)
    write(tier, stored)
    rng = random.Random(4)
    with open(tmp_path / "d" / segment_name(1), "r+b") as stream:
        for number, item in enumerate(stored[:6]):
            start = 4096 + (item.slot & 0xFFFFFF) * 12_288
            at = start + (rng.randrange(300) if number < 3 else 4096 + rng.randrange(5000))
            stream.seek(at)
            byte = stream.read(1)[0]
            stream.seek(at)
            stream.write(bytes([byte ^ 4]))
    statuses = [read(tier, item) for item in stored]
    assert statuses[6:] == [ReadStatus.OK] * 2
    assert all(status is not ReadStatus.OK for status in statuses[:6])
    assert statuses[3:6] == [ReadStatus.CORRUPT] * 3
    assert tier.counters.corrupt_pages + tier.counters.stale_pages == 6


def test_swapped_slots_are_misses(tier: DiskTier, tmp_path: Path) -> None:
    """A drive that writes to the wrong place: each page is sound, but not the one asked for."""
    stored = Chains().chain(2)
    write(tier, stored)
    with open(tmp_path / "d" / segment_name(1), "r+b") as stream:
        slots = []
        for item in stored:
            stream.seek(4096 + (item.slot & 0xFFFFFF) * 8192)
            slots.append(stream.read(8192))
        for item, content in zip(stored, reversed(slots), strict=True):
            stream.seek(4096 + (item.slot & 0xFFFFFF) * 8192)
            stream.write(content)
    assert ReadStatus.OK not in [read(tier, item) for item in stored]


def test_another_page_than_the_stored_one_is_stale(tier: DiskTier) -> None:
    [stored] = Chains().chain(1)
    write(tier, [stored])
    for change in ({"tokens": bytes(64)}, {"key": bytes(16)}, {"extras": b"x"}, {"sequence": 5}):
        other = Stored(replace(stored.page, **change), stored.payload, stored.slot)
        assert read(tier, other) is ReadStatus.STALE
    assert (
        read(
            tier, Stored(replace(stored.page, writer="?", created_s=1), stored.payload), stored.slot
        )
        is ReadStatus.OK
    )


def test_capacity_is_kept_by_all_files_at_every_moment(tmp_path: Path) -> None:
    directory = tmp_path / "d"
    seen = []

    class Watching(FileLayer):
        def allocate(self, descriptor: int, size: int) -> None:
            super().allocate(descriptor, size)
            seen.append(bytes_below(directory))

        def catalog_committed(self, path: Path) -> None:
            seen.append(bytes_below(directory))

    capacity = 4 * MIB
    tier = DiskTier.open([directory], capacity, Watching(), load=True)
    chains = Chains()
    rng = random.Random(2)
    stored: list[Stored] = []
    for _ in range(150):
        size = rng.choice([4096, 4096, 20_000, 100_000])
        group = chains.chain(rng.randrange(1, 12), size=size)
        if all(write(tier, group)):
            stored += group
        else:
            assert "full" in tier.last_refusal
            gone = rng.sample(stored, min(len(stored), 30))
            tier.free_many([item.slot for item in gone])
            stored = [item for item in stored if item not in gone]
        usage = tier.usage()
        assert usage.used_bytes <= usage.allocated_bytes <= usage.capacity_bytes
        assert bytes_below(directory) <= usage.allocated_bytes
    assert max(seen) <= capacity
    assert all(read(tier, item) is ReadStatus.OK for item in stored)
    tier.check()
    tier.close()


def test_many_sizes_find_room_in_a_small_store(tmp_path: Path) -> None:
    """Each size class takes segments of its own: they start small, so that eight fit in 16 MiB."""
    tier = DiskTier.open([tmp_path / "d"], 16 * MIB, load=True)
    chains = Chains()
    stored = [chains.chain(2, size=size) for size in range(4096, 9 * 4096, 4096)]
    assert all(all(write(tier, chain)) for chain in stored), tier.last_refusal
    assert len(tier.containers()) == 8
    many = [chains.chain(1)[0] for _ in range(700)]
    assert all(write(tier, many[:350]) + write(tier, many[350:]))
    assert len(tier.containers()) <= 12, "large reservations make large segments"
    assert all(read(tier, item) is ReadStatus.OK for chain in stored for item in chain)
    tier.check()
    tier.close()


def test_an_empty_segment_is_recycled_for_another_size(tmp_path: Path) -> None:
    tier = DiskTier.open([tmp_path / "d"], 4 * MIB, load=True)
    chains = Chains()
    stored = chains.chain(1)
    while all(write(tier, stored[-1:])):
        stored += chains.chain(1)
    stored.pop()
    assert tier.reserve("t", 300_000, 1) == []
    assert "full" in tier.last_refusal
    containers = tier.containers()
    assert sum(container.used_slots for container in containers) == len(stored)
    victim = max(containers, key=lambda container: container.slots).container_id
    gone = [item for item in stored if item.slot >> 24 == victim]
    tier.free_many([item.slot for item in gone])
    [large] = chains.chain(1, size=300_000)
    assert write(tier, [large]) == [True]
    assert read(tier, large) is ReadStatus.OK
    assert victim not in {container.container_id for container in tier.containers()}
    left = [item for item in stored if item not in gone]
    assert all(read(tier, item) is ReadStatus.OK for item in left)
    tier.check()
    tier.close()


def test_a_smaller_capacity_is_kept_from_the_start(tier: DiskTier, tmp_path: Path) -> None:
    chains = Chains()
    stored = [chains.chain(1, size=200_000)[0] for _ in range(200)]
    write(tier, stored)
    tier = reopen(tier, tmp_path, 24 * MIB)
    kept = found_slots(tier)
    assert 50 < len(kept) < 200
    assert bytes_below(tmp_path / "d") <= tier.usage().allocated_bytes <= 24 * MIB
    for item in stored:
        expected = ReadStatus.OK if item.page.sequence in kept else ReadStatus.STALE
        assert read(tier, item) is expected
    tier.check()
    tier.close()


def test_a_capacity_that_holds_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TierError, match=f"{CAPACITY_BYTES_MIN}"):
        DiskTier.open([tmp_path / "d"], 1 * MIB)
    DiskTier.open([tmp_path / "d"], CAPACITY).close()


def test_segments_spread_over_directories(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in "abc"]
    capacity = 24 * MIB
    tier = DiskTier.open(paths, capacity, load=True)
    chains = Chains()
    stored = [chains.chain(1, size=200_000)[0] for _ in range(80)]
    for start in range(0, 80, 8):
        assert all(write(tier, stored[start : start + 8]))
    for path in paths:
        assert any(name.startswith("segment-") for name in os.listdir(path))
    assert bytes_below(*paths) <= capacity
    tier.close()
    with pytest.raises(TierError, match="name it first"):
        DiskTier.open([paths[1], paths[0]], capacity)
    tier = DiskTier.open([paths[0], paths[2], paths[1]], capacity, load=True)
    assert all(read(tier, item) is ReadStatus.OK for item in stored)
    tier.close()
    tier = DiskTier.open(paths[:2], capacity, load=True)
    kept = found_slots(tier)
    assert 0 < len(kept) < 80
    assert all(read(tier, i) is ReadStatus.OK for i in stored if i.page.sequence in kept)
    tier.check()
    tier.close()


def test_buffered_files_keep_the_same_promises(tmp_path: Path) -> None:
    tier = DiskTier.open([tmp_path / "d"], CAPACITY, direct=False, load=True)
    stored = Chains().chain(5, size=9999)
    write(tier, stored)
    assert not tier.direct_io
    assert all(read(tier, item) is ReadStatus.OK for item in stored)
    tier.close()


def test_a_file_system_without_direct_io_is_used_buffered(tmp_path: Path) -> None:
    class NoDirect(FileLayer):
        def open(
            self,
            path: Path,
            *,
            create: bool = False,
            direct: bool = False,
            read_only: bool = False,
        ) -> int:
            if direct:
                raise OSError(errno.EINVAL, "no O_DIRECT here")
            return super().open(path, create=create, read_only=read_only)

    tier = DiskTier.open([tmp_path / "d"], CAPACITY, NoDirect(), load=True)
    stored = Chains().chain(3)
    assert all(write(tier, stored))
    assert not tier.direct_io
    assert read(tier, stored[1]) is ReadStatus.OK
    tier.close()


def test_a_page_with_long_extras_needs_a_larger_header(tier: DiskTier) -> None:
    item = Chains().page(extras=b"e" * 6000)
    [slot] = tier.reserve("t", 4096, 1)
    assert tier.write_many([slot], [item.page], [memoryview(item.payload)]) == [False]
    assert "do not fit a header of 4096" in tier.last_refusal
    tier.free_many([slot])
    [slot] = tier.reserve("t", 4096, 1, metadata_bytes=6064)
    assert tier.write_many([slot], [item.page], [memoryview(item.payload)]) == [True]
    assert read(tier, item, slot) is ReadStatus.OK


def test_a_failed_sync_makes_the_tier_read_only_until_reopened(tmp_path: Path) -> None:
    files = FaultyFiles()
    tier = DiskTier.open([tmp_path / "d"], CAPACITY, files, load=True)
    chains = Chains()
    before, after = chains.chain(3), chains.chain(3)
    write(tier, before)
    files.arm(Fault("fdatasync", 1))
    assert write(tier, after) == [False] * 3
    assert tier.state is TierState.READ_ONLY
    assert not tier.writable
    assert "sync failed" in tier.problem
    assert tier.reserve("t", 4096, 1) == []
    assert write(tier, chains.chain(2)) == [False] * 2
    assert all(read(tier, item) is ReadStatus.OK for item in before)
    with pytest.raises(TierError, match="cannot erase"):
        tier.free_many([before[2].slot], erase=True)
    tier.close()
    tier = DiskTier.open([tmp_path / "d"], CAPACITY, load=True)
    assert tier.writable
    assert set(found_slots(tier)) == {item.page.sequence for item in before}
    assert all(write(tier, after))
    tier.close()


def test_a_full_disk_refuses_and_goes_on_when_there_is_room(tmp_path: Path) -> None:
    files = FaultyFiles()
    tier = DiskTier.open([tmp_path / "d"], CAPACITY, files, load=True)
    chains = Chains()
    files.arm(Fault("allocate", 1, errno.ENOSPC, times=2))
    assert tier.reserve("t", 4096, 1) == []
    assert "bytes free on" in tier.last_refusal
    assert [name for name in os.listdir(tmp_path / "d") if "segment" in name] == []
    assert tier.reserve("t", 4096, 1) == []
    assert all(write(tier, chains.chain(2)))
    tier.check()
    tier.close()


def test_a_disk_that_is_nearly_full_is_not_filled(tmp_path: Path) -> None:
    class Small(FileLayer):
        def space(self, path: Path) -> Space:
            return Space(100 * MIB, 1 * MIB)

    tier = DiskTier.open([tmp_path / "d"], CAPACITY, Small(), load=True)
    assert tier.reserve("t", 4096, 1) == []
    assert f"{MIB} of {100 * MIB} bytes free on {tmp_path / 'd'}" in tier.last_refusal
    tier.close()


class FailingCatalog(Catalog):
    """Fails its next commits: before or after LMDB made them durable."""

    fail = 0
    after = False
    truncates = False

    def commit(self, removed: object, added: object = ()) -> None:
        if type(self).fail:
            type(self).fail -= 1
            if self.after:
                super().commit(removed, added)  # type: ignore[arg-type]
            if self.truncates:
                os.truncate(self.directory / "data.mdb", 0)
            raise self._failure(OSError(errno.ENOSPC, "no space"))
        super().commit(removed, added)  # type: ignore[arg-type]


@pytest.mark.parametrize("after", [False, True])
def test_a_failed_commit_leaves_no_record_and_writing_goes_on(
    tier: DiskTier, tmp_path: Path, after: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error of LMDB does not tell whether the transaction is on disk: see rule R8."""
    chains = Chains()
    before, failed, later = chains.chain(3), chains.chain(3), chains.chain(3)
    write(tier, before)
    tier.free_many([before[2].slot])
    publisher = tier._publisher
    publisher.catalog.__class__ = FailingCatalog
    monkeypatch.setattr(FailingCatalog, "fail", 1)
    monkeypatch.setattr(FailingCatalog, "after", after)
    assert write(tier, failed) == [False] * 3
    assert tier.counters.catalog_reopens == 1
    assert tier.state is TierState.READY
    assert all(write(tier, later))
    tier.check()
    tier = reopen(tier, tmp_path)
    expected = {item.page.sequence for item in before[:2] + later}
    assert set(found_slots(tier)) == expected
    tier.close()


def test_a_catalog_that_fails_again_makes_the_tier_read_only(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = Chains().chain(3)
    write(tier, stored)
    tier._publisher.catalog.__class__ = FailingCatalog
    monkeypatch.setattr(FailingCatalog, "fail", 1)
    monkeypatch.setattr(FailingCatalog, "truncates", True)
    assert write(tier, Chains(boot=2).chain(2)) == [False] * 2
    assert tier.state is TierState.READ_ONLY
    assert "catalog failed" in tier.problem
    assert read(tier, stored[0]) is ReadStatus.OK


def test_starts_that_die_before_a_commit_put_the_catalog_aside(
    tier: DiskTier, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A catalog that passes its checks and still kills the server is not tried for ever."""
    stored = Chains().chain(3)
    write(tier, stored)
    tier.close()
    for start in range(1, 8):
        tier = DiskTier.open([tmp_path / "d"], CAPACITY, load=True)
        assert ("starts in a row" in caplog.text) == (start in (4, 7)), start
        caplog.clear()
        assert len(found_slots(tier)) == 3
        tier._publisher.prove = lambda: None  # type: ignore[method-assign]  # as after a kill
        tier.close()


class ReadOnlyDisk(FileLayer):
    """A file system that is mounted read-only."""

    def _refuse(self, *_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    unlink = remove_tree = rename = replace_file = pwritev = allocate = fdatasync = _refuse  # type: ignore[assignment]

    def open(
        self, path: Path, *, create: bool = False, direct: bool = False, read_only: bool = False
    ) -> int:
        if create and path.exists():
            raise FileExistsError(errno.EEXIST, "exists")
        if create or not read_only:
            self._refuse()
        return super().open(path, direct=direct, read_only=True)


def contents(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


def test_a_read_only_file_system_is_read_and_not_written(tier: DiskTier, tmp_path: Path) -> None:
    stored = Chains().chain(4)
    write(tier, stored)
    tier.free_many([stored[3].slot])
    tier.close()
    before = contents(tmp_path / "d")
    tier = DiskTier.open([tmp_path / "d"], CAPACITY, ReadOnlyDisk())
    assert len(found_slots(tier)) == 3
    assert "read-only file system" in tier.problem
    assert not tier.writable
    assert all(read(tier, item) is ReadStatus.OK for item in stored[:3])
    assert tier.reserve("t", 4096, 1) == []
    tier.free_many([stored[2].slot])
    tier.check()
    usage = tier.usage()
    assert usage.used_bytes <= usage.allocated_bytes <= usage.capacity_bytes
    tier.maintain()
    tier.close()
    assert contents(tmp_path / "d") == before


def test_a_read_only_file_system_without_a_sound_store_is_refused(
    tier: DiskTier, tmp_path: Path
) -> None:
    write(tier, Chains().chain(2))
    tier.close()
    (tmp_path / "d" / "catalog" / "data.mdb").write_bytes(b"")
    tier = DiskTier.open([tmp_path / "d"], CAPACITY, ReadOnlyDisk())
    with pytest.raises(TierError, match="read-only file system and its catalog is unusable"):
        tier.load()
    tier.close()
    (tmp_path / "empty").mkdir()
    with pytest.raises(TierError, match="read-only file system and holds no store"):
        DiskTier.open([tmp_path / "empty"], CAPACITY, ReadOnlyDisk())


def test_many_threads_read_write_and_free(tier: DiskTier) -> None:
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            chains = Chains(boot=10 + number)
            rng = random.Random(number)
            mine: list[Stored] = []
            for _ in range(25):
                group = chains.chain(rng.randrange(1, 6), size=rng.choice([4096, 30_000]))
                assert all(write(tier, group)), tier.last_refusal
                mine += group
                for item in rng.sample(mine, min(3, len(mine))):
                    assert read(tier, item) is ReadStatus.OK
                gone = rng.sample(mine, len(mine) // 3)
                tier.free_many([item.slot for item in gone])
                mine = [item for item in mine if item not in gone]
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    tier.check()


def test_threads_of_different_sizes_recycle_each_others_segments(tmp_path: Path) -> None:
    """A segment that is being recycled must not hand out slots at the same time."""
    tier = DiskTier.open([tmp_path / "d"], 4 * MIB, load=True)
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            chains = Chains(boot=20 + number)
            for turn in range(30):
                group = chains.chain(4, size=(4096, 20_000, 90_000)[(number + turn) % 3])
                if all(write(tier, group)):
                    assert all(read(tier, item) is ReadStatus.OK for item in group)
                    tier.free_many([item.slot for item in group])
                    tier.usage()
                    tier.containers()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    tier.commit_frees()
    tier.check()
    assert tier.usage().used_slots == 0
    tier.close()


def test_a_wrong_count_is_found_and_set_right(tier: DiskTier) -> None:
    write(tier, Chains().chain(3))
    next(iter(tier._segments)).free += 2
    with pytest.raises(TierError, match="slots free"):
        tier.check()
    tier.maintain()
    tier.check()
    assert tier.counters.accounting_fixes == 1


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_fork_is_refused(tier: DiskTier) -> None:
    child = os.fork()
    if child == 0:
        try:
            tier.reserve("t", 4096, 1)
        except RuntimeError as error:
            os._exit(0 if "spawn" in str(error) else 1)
        os._exit(2)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def test_calls_after_close_are_misses_or_refused(tier: DiskTier) -> None:
    stored = Chains().chain(1)
    write(tier, stored)
    tier.close()
    tier.close()
    assert tier.reserve("t", 4096, 1) == []
    assert read(tier, stored[0]) is ReadStatus.ERROR
    assert tier.problem == "closed"
