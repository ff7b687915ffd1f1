"""A disk that is full, or has no room for the catalog alone: on a real small file system."""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING

import pytest
from disk_pages import Chains, Stored, found_slots, read, write

from kvstore.tiers.disk_state import TierState
from kvstore.tiers.disk_tier import DiskTier
from kvstore.tiers.tier import ReadStatus

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MIB = 1 << 20


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 24 MiB in memory."""
    place = tmp_path / "small"
    place.mkdir()
    if os.geteuid() != 0:
        pytest.skip("NOT ROOT: cannot mount a small file system")
    mount = ["mount", "-t", "tmpfs", "-o", "size=24m,mode=0700", "kvstore-test", str(place)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("no right to mount a small file system")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def fill(directory: Path) -> Path:
    """Take all that is free on the file system."""
    ballast = directory / "ballast"
    with open(ballast, "wb") as stream:
        try:
            while True:
                os.write(stream.fileno(), bytes(4096))
        except OSError:
            return ballast


@pytest.mark.root
@pytest.mark.slow
def test_a_disk_filled_by_others_refuses_writes_and_recovers(small_disk: Path) -> None:
    tier = DiskTier.open([small_disk / "d"], 200 * MIB, load=True)
    chains = Chains()
    kept: list[Stored] = []
    while all(write(tier, group := chains.chain(20))):
        kept += group
    assert "free on" in tier.last_refusal
    assert 100 < len(kept) < 3000
    ballast = fill(small_disk)
    tier.free_many([item.slot for item in kept[-40:]])
    kept = kept[:-40]
    for _ in range(30):  # LMDB has no room to grow, and says so in the middle of a commit
        group = chains.chain(5)
        if all(write(tier, group)):
            kept += group
    assert tier.state in (TierState.READY, TierState.READ_ONLY)
    assert all(read(tier, item) is ReadStatus.OK for item in kept)
    ballast.unlink()
    if tier.state is TierState.READ_ONLY:
        tier.close()
        tier = DiskTier.open([small_disk / "d"], 200 * MIB, load=True)
    tier.maintain()
    gone = kept[:40]
    tier.free_many([item.slot for item in gone])
    kept = kept[40:]
    group = chains.chain(10)
    assert all(write(tier, group)), tier.last_refusal
    kept += group
    tier.check()
    tier.close()
    tier = DiskTier.open([small_disk / "d"], 200 * MIB, load=True)
    assert found_slots(tier) == {item.page.sequence: item.slot for item in kept}
    assert all(read(tier, item) is ReadStatus.OK for item in kept)
    tier.close()


@pytest.mark.root
@pytest.mark.slow
def test_a_file_system_in_memory_is_named_in_the_log(
    small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    DiskTier.open([small_disk / "d"], 20 * MIB, load=True).close()
    assert "tmpfs" in caplog.text


@pytest.mark.root
@pytest.mark.slow
def test_a_catalog_that_finds_no_room_loses_nothing_that_was_kept(small_disk: Path) -> None:
    """Slots are there, but LMDB fails in the middle of commits; the reserve file helps at first."""
    tier = DiskTier.open([small_disk / "d"], 200 * MIB, load=True)
    chains = Chains()
    slots = tier.reserve("t", 4096, 1500)
    assert len(slots) == 1500
    ballast = fill(small_disk)
    kept: list[Stored] = []
    refused = 0
    while slots and tier.writable:
        group = chains.chain(30)
        mine, slots = slots[:30], slots[30:]
        pages = [item.page for item in group]
        done = tier.write_many(mine, pages, [memoryview(item.payload) for item in group])
        assert len(set(done)) == 1, "a group is one transaction"
        for item, slot in zip(group, mine, strict=True):
            item.slot = slot
        if all(done):
            kept += group
        else:
            refused += 1
            tier.free_many(mine)
            assert "catalog" in tier.last_refusal
    assert kept
    assert refused
    assert tier.counters.catalog_reopens > 0
    assert all(read(tier, item) is ReadStatus.OK for item in kept)
    ballast.unlink()
    tier.maintain()
    if tier.writable:
        group = chains.chain(10)
        assert all(write(tier, group)), tier.last_refusal
        kept += group
        tier.check()
    tier.close()
    tier = DiskTier.open([small_disk / "d"], 200 * MIB, load=True)
    assert found_slots(tier) == {item.page.sequence: item.slot for item in kept}
    assert all(read(tier, item) is ReadStatus.OK for item in kept)
    tier.close()
