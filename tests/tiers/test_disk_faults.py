"""Every file operation fails once, in every way; power is cut after any durable step.

After each: what was said to be kept is read after a reopen, what failed is nowhere, nothing wrong.
"""

from __future__ import annotations

import errno
import random
import shutil
from typing import TYPE_CHECKING

import pytest
from disk_pages import Chains, Stored, found_slots, read, write
from faulty_files import Fault, FaultyFiles, ImageFiles

from kvstore.tiers.disk_publisher import Publisher
from kvstore.tiers.disk_state import TierState
from kvstore.tiers.disk_tier import DiskTier
from kvstore.tiers.page_io import PageIo
from kvstore.tiers.segment_set import FREE, Segment
from kvstore.tiers.tier import ReadStatus, TierError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kvstore.tiers.file_layer import FileLayer
    from kvstore.tiers.page_io import PageTask

MIB = 1 << 20
CAPACITY = 3 * MIB
FAULTS_A_KIND = 5  # of some 40 calls; the seed is fixed, so each run tries the same


class Script:
    """A fixed run of calls on a small store, with a note of what the tier promised."""

    def __init__(self, seed: int = 0) -> None:
        self.rng = random.Random(seed)
        self.chains = Chains()
        self.kept: dict[int, Stored] = {}
        self.refused: dict[int, Stored] = {}
        self.freed: dict[int, Stored] = {}

    def run(self, tier: DiskTier, rounds: int) -> None:
        for _ in range(rounds):
            self.step(tier)

    def step(self, tier: DiskTier) -> None:
        """Write a chain, read it and others, free half of an old chain."""
        chain = self.chains.chain(self.rng.randrange(1, 5), size=self.rng.choice([4096, 9000]))
        kept = write(tier, chain)
        for item, ok in zip(chain, kept, strict=True):
            # A page after a lost one is lost with it, as the store would have it.
            alive = ok and (item.page.page_index == 0 or item.page.parent_sequence in self.kept)
            if ok and not alive:
                tier.free_many([item.slot])
            (self.kept if alive else self.refused)[item.page.sequence] = item
        for item in self.rng.sample(list(self.kept.values()), min(4, len(self.kept))):
            read(tier, item)
        chains = [item for item in self.kept.values() if item.page.page_index == 0]
        if len(chains) > 6:
            self.free(tier, chains[self.rng.randrange(len(chains))])

    def free(self, tier: DiskTier, first: Stored) -> None:
        chain = [first]
        for item in list(self.kept.values()):
            if item.page.parent_sequence == chain[-1].page.sequence:
                chain.append(item)
        for item in chain:
            self.freed[item.page.sequence] = self.kept.pop(item.page.sequence)
        tier.free_many([item.slot for item in chain])

    def verify(self, directory: Path) -> None:
        """Reopen with a sound layer: kept pages are hits, refused ones nowhere, all consistent."""
        tier = DiskTier.open([directory], CAPACITY, io_threads=2)
        try:
            found = found_slots(tier)
            tier.check()
            missing = [seq for seq in self.kept if found.get(seq) != self.kept[seq].slot]
            assert not missing, f"{len(missing)} of {len(self.kept)} durable pages are lost"
            assert not set(found) & set(self.refused), "a failed page is visible"
            for item in self.kept.values():
                assert read(tier, item) is ReadStatus.OK, "a durable page cannot be read"
            for sequence in set(found) & set(self.freed):
                read(tier, self.freed[sequence], found[sequence])  # asserts the bytes
        finally:
            tier.close()


def run_with(files: FileLayer, directory: Path, rounds: int = 12) -> Script:
    script = Script()
    try:
        tier = DiskTier.open([directory], CAPACITY, files, io_threads=2, load=True)
    except TierError:
        return script
    try:
        script.run(tier, rounds)
        if tier.state is TierState.READY:
            tier.check()
    finally:
        tier.close()
    return script


def calls_of_a_clean_run(directory: Path) -> dict[str, int]:
    files = FaultyFiles()
    run_with(files, directory).verify(directory)
    return dict(files.calls)


FAULTS: list[tuple[str, str | int]] = [
    ("pwritev", errno.EIO),
    ("pwritev", errno.ENOSPC),
    ("pwritev", "short"),
    ("pwritev", "torn"),
    ("fdatasync", errno.EIO),
    ("preadv", errno.EIO),
    ("preadv", "short"),
    ("preadv", "flip"),
    ("allocate", errno.ENOSPC),
    ("open", errno.EMFILE),
    ("rename", errno.EIO),
    ("sync_directory", errno.EIO),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "action"), FAULTS)
def test_a_fault_at_any_call_loses_nothing_that_was_kept(
    tmp_path: Path, kind: str, action: str | int
) -> None:
    total = calls_of_a_clean_run(tmp_path / "clean")[kind]
    assert total > 0
    numbers = range(1, total + 1)
    rng = random.Random(f"{kind}{action}")
    for number in sorted(rng.sample(numbers, min(len(numbers), FAULTS_A_KIND))):
        directory = tmp_path / f"d{number}"
        files = FaultyFiles([Fault(kind, number, action)])
        script = run_with(files, directory)
        assert files.fired, f"{kind} {number} never came"
        script.verify(directory)
        shutil.rmtree(directory)


def power_cuts(tmp_path: Path, seeds: range, *, sync_lies: bool = False) -> None:
    """Cut the power after some durable step of the script and verify what is left."""
    for seed in seeds:
        live, after = tmp_path / f"live{seed}", tmp_path / f"after{seed}"
        layer = ImageFiles(seed, sync_lies=sync_lies)
        tier = DiskTier.open([live], CAPACITY, layer, io_threads=2, direct=False, load=True)
        script = Script(seed)
        promised = Script(seed)
        last = layer.steps + random.Random(seed).randrange(1, 90)

        def on_step(
            number: int,
            last: int = last,
            script: Script = script,
            promised: Script = promised,
            layer: ImageFiles = layer,
            paths: tuple[Path, Path] = (live, after),
        ) -> None:
            if number == last:
                layer.power_cut(*paths)
                promised.kept, promised.refused = dict(script.kept), dict(script.refused)
                promised.freed = dict(script.freed)

        layer.on_step = on_step
        while layer.steps < last:
            script.step(tier)
        tier.close()
        promised.verify(after)
        shutil.rmtree(live)
        shutil.rmtree(after)


@pytest.mark.slow
def test_what_was_kept_survives_power_cuts(tmp_path: Path) -> None:
    power_cuts(tmp_path, range(12))


@pytest.mark.slow
def test_a_cut_during_the_first_start_leaves_a_store_that_opens(tmp_path: Path) -> None:
    layer = ImageFiles(1)
    live = tmp_path / "live"
    layer.on_step = lambda number: layer.power_cut(live, tmp_path / f"after{number}")
    DiskTier.open([live], CAPACITY, layer, load=True).close()
    assert layer.steps > 5
    for number in range(1, layer.steps + 1):
        DiskTier.open([tmp_path / f"after{number}"], CAPACITY, load=True).close()


# -- the tests above must notice these mutants ---------------------------------------------------


class InPlace(Publisher):
    """Gives freed slots out again before the deletion of their record is committed."""

    def _retire(self, segment: Segment, slot: int) -> None:
        segment.set_state(slot, FREE)


class FailedVisible(Publisher):
    """Publishes pages whose write failed."""

    def _sound(self, group: Sequence[PageTask], errors: Sequence[OSError | None]) -> list[PageTask]:
        return list(group)


class Unverified(PageIo):
    """Believes whatever it reads."""

    def _verify(
        self, task: PageTask, header: memoryview, digest: bytes | None = None
    ) -> ReadStatus:
        return ReadStatus.OK


def mutant(
    publisher: type[Publisher] = Publisher, page_io: type[PageIo] = PageIo
) -> type[DiskTier]:
    return type("Mutant", (DiskTier,), {"publisher_type": publisher, "page_io_type": page_io})


@pytest.mark.slow
def test_a_tier_that_never_syncs_is_caught(tmp_path: Path) -> None:
    # Pages are lost, or what says whose they are: then the directory is refused.
    with pytest.raises((AssertionError, TierError), match=r"durable page|both damaged or gone"):
        power_cuts(tmp_path, range(6), sync_lies=True)


@pytest.mark.slow
def test_overwriting_in_place_is_caught(tmp_path: Path) -> None:
    tier = mutant(publisher=InPlace).open([tmp_path / "d"], CAPACITY, load=True)
    script = Script()
    script.run(tier, 12)
    with pytest.raises(TierError, match="records of unused slots"):
        tier.check()
    tier.close()


@pytest.mark.slow
def test_a_failed_write_left_visible_is_caught(tmp_path: Path) -> None:
    files = FaultyFiles()
    script = Script()
    tier = mutant(publisher=FailedVisible).open([tmp_path / "d"], CAPACITY, files, load=True)
    script.run(tier, 2)
    files.arm(Fault("pwritev", 1, "torn", times=3))
    script.run(tier, 10)
    tier.close()
    with pytest.raises(AssertionError, match="cannot be read"):
        script.verify(tmp_path / "d")


@pytest.mark.slow
def test_a_read_without_verification_is_caught(tmp_path: Path) -> None:
    files = FaultyFiles()
    script = Script()
    tier = mutant(page_io=Unverified).open([tmp_path / "d"], CAPACITY, files, load=True)
    script.run(tier, 3)
    files.arm(Fault("preadv", 1, "flip", times=10**6))
    with pytest.raises(AssertionError, match="wrong bytes served"):
        [read(tier, item) for item in list(script.kept.values()) * 40]
    tier.close()
