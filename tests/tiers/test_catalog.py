"""The catalog and its scan: what is flipped, cut or looped is noticed before it is believed."""

from __future__ import annotations

import random
import struct
from typing import TYPE_CHECKING

import lmdb
import pytest
from disk_pages import Chains

from kvstore.tiers.catalog import Catalog, CatalogError, iterate_read_only
from kvstore.tiers.catalog_pages import PageError, check_pages
from kvstore.tiers.catalog_scan import scan_catalog
from kvstore.tiers.file_layer import FileLayer
from kvstore.tiers.segment import FORMAT_VERSION, SegmentShape

if TYPE_CHECKING:
    from pathlib import Path

UUID = bytes(range(16))
MAP_BYTES = 64 << 20


def make(directory: Path, pages: int, *, churn: int = 0) -> dict[int, int]:
    """A catalog with that many page records; slot -> sequence."""
    catalog = Catalog(directory, MAP_BYTES, FileLayer())
    catalog.put_meta(UUID)
    catalog.put_segment(SegmentShape(1, 0, 1 << 20, 8192, 4096))
    chains = Chains()
    stored = {}
    rng = random.Random(5)
    for _ in range(max(1, churn)):
        removed = [slot for slot in stored if rng.random() < 0.5] if churn else []
        for slot in removed:
            del stored[slot]
        free = [slot for slot in range(1 << 24, (1 << 24) + 2 * pages) if slot not in stored]
        added = []
        for slot in free[: pages - len(stored)]:
            item = chains.page(extras=b"e" * (slot % 3), root=slot % 4)
            added.append((slot, item.page))
            stored[slot] = item.page.sequence
        catalog.commit(removed, added)
    assert list(catalog.slots()) == sorted(stored)
    catalog.close()
    return stored


def found(directory: Path) -> dict[int, int]:
    scan = scan_catalog(directory)
    slots, sequences = scan.fixed["slot"].tolist(), scan.fixed["sequence"].tolist()
    return dict(zip(slots, sequences, strict=True))


def test_a_scan_finds_what_was_committed(tmp_path: Path) -> None:
    stored = make(tmp_path / "c", 500, churn=6)
    scan = scan_catalog(tmp_path / "c")
    assert (scan.store_uuid, scan.format_version) == (UUID, FORMAT_VERSION)
    assert scan.segments == {1: SegmentShape(1, 0, 1 << 20, 8192, 4096)}
    assert sorted(scan.roots.values()) == sorted(
        (bytes([r]) * 32, f"tenant-{r}", bytes([r + 100]) * 16) for r in range(4)
    )
    assert sorted(scan.writers.values()) == ["writer-0", "writer-1", "writer-2"]
    assert found(tmp_path / "c") == stored
    assert scan.bad_keys == []
    assert check_pages(tmp_path / "c" / "data.mdb") == 500 + 4 + 3 + 1 + 1


def test_records_past_a_quarter_page_are_found(tmp_path: Path) -> None:
    """They lie in overflow pages, which the structure check follows too."""
    catalog = Catalog(tmp_path / "c", MAP_BYTES, FileLayer())
    catalog.put_meta(UUID)
    chains = Chains()
    pages = [chains.page(extras=b"x" * size) for size in (10, 1500, 5000, 20_000, 3)]
    for slot, item in enumerate(pages):
        before = catalog.file_bytes
        bound = catalog.growth_bound([item.page], 0)
        catalog.commit([], [(slot, item.page)])
        assert catalog.file_bytes - before <= bound
    catalog.commit([3])
    catalog.close()
    assert found(tmp_path / "c") == {s: pages[s].page.sequence for s in (0, 1, 2, 4)}


def test_a_commit_grows_the_file_no_more_than_its_bound(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path / "c", MAP_BYTES, FileLayer())
    catalog.put_meta(UUID)
    chains = Chains()
    rng = random.Random(3)
    stored: list[int] = []
    for _ in range(60):
        removed = rng.sample(stored, min(len(stored), rng.randrange(200)))
        stored = [slot for slot in stored if slot not in set(removed)]
        free = rng.sample(range(100_000), rng.randrange(1, 300))
        added = [(s, chains.page(root=rng.randrange(50)).page) for s in free if s not in stored]
        before = catalog.file_bytes
        bound = catalog.growth_bound([page for _, page in added], len(removed))
        catalog.commit(removed, added)
        assert catalog.file_bytes - before <= bound
        stored += [slot for slot, _ in added]
    assert catalog.file_bytes == (tmp_path / "c" / "data.mdb").stat().st_size + 8192
    catalog.close()


def test_a_flipped_record_is_dropped_alone(tmp_path: Path) -> None:
    stored = make(tmp_path / "c", 200)
    data = tmp_path / "c" / "data.mdb"
    content = bytearray(data.read_bytes())
    victim = sorted(stored)[77]
    names = struct.pack("<QQ", victim, stored[victim])
    at = content.find(names)
    while at >= 0:  # older copies of its leaf hold it too
        content[at + 40] ^= 1
        at = content.find(names, at + 1)
    data.write_bytes(content)
    scan = scan_catalog(tmp_path / "c")
    assert scan.bad_keys == [b"P" + victim.to_bytes(8, "big")]
    del stored[victim]
    assert found(tmp_path / "c") == stored


def test_an_empty_or_missing_file_is_not_a_new_catalog(tmp_path: Path) -> None:
    make(tmp_path / "c", 10)
    (tmp_path / "c" / "data.mdb").write_bytes(b"")
    with pytest.raises(CatalogError, match="missing or empty"):
        scan_catalog(tmp_path / "c")
    (tmp_path / "c" / "data.mdb").unlink()
    with pytest.raises(CatalogError, match="missing or empty"):
        scan_catalog(tmp_path / "c")


@pytest.mark.slow
@pytest.mark.parametrize("part", [0.1, 0.5, 0.9, 0.999])
def test_a_cut_file_is_refused(tmp_path: Path, part: float) -> None:
    make(tmp_path / "c", 500)
    data = tmp_path / "c" / "data.mdb"
    content = data.read_bytes()
    data.write_bytes(content[: int(len(content) * part)])
    with pytest.raises(CatalogError):
        scan_catalog(tmp_path / "c")


def test_a_file_that_ends_before_its_last_page_is_sound(tmp_path: Path) -> None:
    """LMDB counts pages that one transaction allots and frees again, and never writes them."""
    rng = random.Random(7)
    data = tmp_path / "data.mdb"
    short, sound = 0, 0
    with lmdb.open(str(tmp_path), map_size=1 << 28, sync=False) as env:
        for _ in range(60):
            with env.begin(write=True) as txn:
                first, count = rng.randrange(2000), rng.randrange(1, 900)
                for number in range(first, first + count):
                    txn.put(b"%06d" % number, bytes(rng.randrange(20, 400)))
                first, count = rng.randrange(2000), rng.randrange(1, 900)
                for number in range(first, first + count):
                    txn.delete(b"%06d" % number)
            if (env.info()["last_pgno"] + 1) * 4096 > data.stat().st_size:
                short += 1
                sound += check_pages(data) == env.stat()["entries"]
    assert short >= 3, "the case did not come up: another seed"
    assert sound == short
    assert len(list(iterate_read_only(tmp_path))) == check_pages(data)


def test_structure_check_survives_any_flip(tmp_path: Path) -> None:
    """Every byte of a small file: sound as before, or a PageError; never another exception."""
    make(tmp_path / "c", 60, churn=4)
    data = tmp_path / "c" / "data.mdb"
    content = bytearray(data.read_bytes())
    rng = random.Random(1)
    refused = 0
    for at in [*range(256), *range(4096, 4352), *rng.sample(range(len(content)), 1500)]:
        bit = 1 << rng.randrange(8)
        content[at] ^= bit
        (tmp_path / "flipped").write_bytes(content)
        content[at] ^= bit
        try:
            check_pages(tmp_path / "flipped")
        except PageError:
            refused += 1
    assert refused > 100


@pytest.mark.parametrize("field", ["data size", "kind", "key size"])
def test_a_node_that_lies_about_its_length_is_refused(tmp_path: Path, field: str) -> None:
    """Its record could be read, and was dropped as unsound; deleting it moved the wrong bytes, and
    the next walk over the open catalog met pages that are none."""
    make(tmp_path / "c", 300)
    data = tmp_path / "c" / "data.mdb"
    whole = data.read_bytes()
    leaves = [
        page
        for page in range(2, len(whole) // 4096)
        if whole[page * 4096 + 10] == 2 and whole[page * 4096 + 16 : page * 4096 + 18] != b"\0\0"
    ]
    refused = 0
    for page in leaves:
        node = int.from_bytes(whole[page * 4096 + 16 : page * 4096 + 18], "little")
        at = page * 4096 + node + {"data size": 0, "kind": 4, "key size": 6}[field]
        content = bytearray(whole)
        content[at] ^= 16
        data.write_bytes(content)
        try:
            check_pages(data)
        except PageError as error:
            refused += "node" in str(error)
    assert refused >= 5, "leaves of the free list's past states are not looked at"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_a_flipped_catalog_gives_true_records_or_is_refused(tmp_path: Path, seed: int) -> None:
    """Flips weighted to structure; what the scan lets through can also be written to."""
    stored = make(tmp_path / "c", 300, churn=5)
    data = tmp_path / "c" / "data.mdb"
    content = bytearray(data.read_bytes())
    rng = random.Random(seed)
    for _ in range(rng.choice([1, 1, 3])):
        page = rng.randrange(len(content) // 4096)
        at = page * 4096 + rng.choice([rng.randrange(160), rng.randrange(4096)])
        content[at] ^= 1 << rng.randrange(8)
    data.write_bytes(content)
    try:
        survived = found(tmp_path / "c")
    except CatalogError:
        return
    catalog = Catalog(tmp_path / "c", MAP_BYTES, FileLayer())
    chains = Chains(boot=9)
    for start in range(0, 400, 40):
        added = [(s, chains.page().page) for s in range(5000 + start, 5040 + start)]
        catalog.commit(list(survived)[start : start + 20], added)
    catalog.close()
    assert len(found(tmp_path / "c")) >= 400
    if set(survived) <= set(stored):  # else an older meta page won: a whole, older state
        assert all(stored[slot] == sequence for slot, sequence in survived.items())


def test_a_full_map_is_told_from_other_errors(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path / "c", 1 << 16, FileLayer())
    chains = Chains()
    with pytest.raises(CatalogError) as caught:
        catalog.commit([], [(slot, chains.page().page) for slot in range(5000)])
    assert caught.value.full
    catalog.close()
