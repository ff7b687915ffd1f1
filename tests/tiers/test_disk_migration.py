"""Older formats are copied to this one, safely at any point; this one can be read for ever."""

from __future__ import annotations

import json
import os
import shutil
import tarfile
from pathlib import Path

import pytest
from disk_pages import Chains, Stored, found_slots, read, write
from faulty_files import Fault, FaultyFiles

from kvstore.tiers import store_directory
from kvstore.tiers.catalog import Catalog, CatalogError
from kvstore.tiers.disk_migration import MIGRATIONS
from kvstore.tiers.disk_tier import DiskTier
from kvstore.tiers.segment import FORMAT_VERSION, SegmentShape
from kvstore.tiers.store_directory import IDENTITY_NAMES
from kvstore.tiers.tier import PageRecord, ReadStatus, TierError

CAPACITY = 16 << 20
OLD_FORMAT = 0  # never released: its catalog is a list in JSON
GOLDEN = Path(__file__).parents[1] / "data"


def read_format_0(folder: Path, catalog: Catalog) -> None:
    try:
        body = json.loads((folder / "catalog.json").read_text())
    except ValueError as error:
        raise CatalogError(str(error)) from error
    for item in body["pages"]:
        page = {k: bytes.fromhex(v[1:]) if v[:1] == "x" else v[1:] for k, v in item["text"].items()}
        catalog.commit([], [(item["slot"], PageRecord(**page, **item["numbers"]))])
    for values in body["segments"]:
        catalog.put_segment(SegmentShape(*values))


@pytest.fixture
def old_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, list[Stored]]:
    """A store in format 0, made from one of this format."""
    monkeypatch.setitem(MIGRATIONS, OLD_FORMAT, read_format_0)
    directory = tmp_path / "d"
    tier = DiskTier.open([directory], CAPACITY, load=True)
    stored = Chains().chain(5) + Chains(boot=2).chain(3, size=20_000)
    write(tier, stored[:5])
    write(tier, stored[5:])
    shapes = [segment.shape for segment in tier._segments]
    tier.close()
    shutil.rmtree(directory / "catalog")
    pages = []
    for item in stored:
        text, numbers = {}, {}
        for name in PageRecord.__dataclass_fields__:
            value = getattr(item.page, name)
            if isinstance(value, bytes):
                text[name] = "x" + value.hex()
            elif isinstance(value, str):
                text[name] = "s" + value
            else:
                numbers[name] = value
        pages.append({"slot": item.slot, "text": text, "numbers": numbers})
    segments = [
        [s.segment_id, s.directory_index, s.slots, s.slot_bytes, s.header_bytes] for s in shapes
    ]
    (directory / "catalog-0").mkdir(mode=0o700)
    body = json.dumps({"pages": pages, "segments": segments})
    (directory / "catalog-0" / "catalog.json").write_text(body)
    for name in IDENTITY_NAMES:
        identity = json.loads((directory / name).read_bytes())
        identity.pop("check")
        identity["format"] = OLD_FORMAT
        identity["check"] = store_directory._check_of(identity)
        (directory / name).write_text(json.dumps(identity))
    return directory, stored


def expect_all(directory: Path, stored: list[Stored]) -> None:
    tier = DiskTier.open([directory], CAPACITY, load=True)
    assert found_slots(tier) == {item.page.sequence: item.slot for item in stored}
    assert all(read(tier, item) is ReadStatus.OK for item in stored)
    tier.check()
    tier.close()


def test_an_older_store_is_migrated_and_the_old_catalog_removed(
    old_store: tuple[Path, list[Stored]],
) -> None:
    directory, stored = old_store
    expect_all(directory, stored)
    assert not (directory / "catalog-0").exists()
    identity = json.loads((directory / IDENTITY_NAMES[0]).read_bytes())
    assert identity["format"] == FORMAT_VERSION
    expect_all(directory, stored)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pytest.mark.parametrize("kind", ["rename", "fdatasync", "sync_directory", "open"])
def test_a_migration_that_is_killed_anywhere_starts_again(
    old_store: tuple[Path, list[Stored]], tmp_path: Path, kind: str
) -> None:
    """The process dies before its N-th call of a kind, for every N of a start."""
    directory, stored = old_store
    for number in range(1, 30):
        copy = tmp_path / f"copy{number}"
        shutil.copytree(directory, copy)
        copy.chmod(0o700)
        child = os.fork()
        if child == 0:
            layer = FaultyFiles([Fault(kind, number, "kill")])
            try:
                DiskTier.open([copy], CAPACITY, layer, load=True)
            finally:
                os._exit(0)
        _, status = os.waitpid(child, 0)
        expect_all(copy, stored)
        shutil.rmtree(copy)
        if os.WIFEXITED(status):
            assert number > 1
            return
    pytest.fail("a start makes more than 30 calls")


def test_an_unsound_older_catalog_is_rebuilt_from_headers(
    old_store: tuple[Path, list[Stored]],
) -> None:
    directory, stored = old_store
    (directory / "catalog-0" / "catalog.json").write_text("{")
    expect_all(directory, stored)


def test_a_format_that_nobody_reads_any_more_is_refused(
    old_store: tuple[Path, list[Stored]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(MIGRATIONS, OLD_FORMAT)
    with pytest.raises(TierError, match=f"format 0, this kvstore reads from {FORMAT_VERSION}"):
        DiskTier.open([old_store[0]], CAPACITY)


@pytest.mark.parametrize("archive", sorted(GOLDEN.glob("format-*.tar.gz")), ids=lambda p: p.name)
def test_stores_of_released_formats_are_read(archive: Path, tmp_path: Path) -> None:
    """Each archive holds a directory written by a release: Chains().chain(5) of 4096 bytes."""
    with tarfile.open(archive) as content:
        content.extractall(tmp_path, filter="data")
    for folder, _, _ in os.walk(tmp_path / "store"):
        os.chmod(folder, 0o700)
    stored = Chains().chain(5)
    tier = DiskTier.open([tmp_path / "store"], 2 << 20)
    slots = found_slots(tier)
    assert len(slots) == 5
    for item in stored:
        assert read(tier, item, slots[item.page.sequence]) is ReadStatus.OK
    tier.close()


def test_there_is_a_golden_store_of_this_format() -> None:
    assert (GOLDEN / f"format-{FORMAT_VERSION}.tar.gz").exists()
