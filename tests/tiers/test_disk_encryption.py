"""The disk tier with a cipher: every damage is a miss, and lost keys cost only their own pages."""

from __future__ import annotations

import json
import os
import shutil
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from disk_pages import Chains, Stored, found_slots, read, write
from faulty_files import Fault, FaultyFiles
from hypothesis import given, settings
from hypothesis import strategies as st
from tenant_keys import MemoryKeys

from kvstore.tiers.disk_tier import DiskTier
from kvstore.tiers.store_directory import IDENTITY_NAMES
from kvstore.tiers.tier import ReadStatus, TierError

if TYPE_CHECKING:
    from collections.abc import Iterator

CAPACITY = 24 << 20
GOLDEN = Path(__file__).parents[1] / "data" / "format-1.tar.gz"
SHAPES = st.tuples(st.integers(1, 40_000), st.binary(max_size=2000))  # payload bytes, extras
MARKER = b"MARKER-OF-A-SECRET-PROMPT"


def opened(directory: Path, keys: MemoryKeys | None, *, writes: bool = True) -> DiskTier:
    cipher = keys.cipher(writes=writes) if keys is not None else None
    return DiskTier.open([directory], CAPACITY, load=True, cipher=cipher)


@pytest.fixture
def keys() -> MemoryKeys:
    return MemoryKeys()


@pytest.fixture
def tier(tmp_path: Path, keys: MemoryKeys) -> Iterator[DiskTier]:
    tier = opened(tmp_path / "d", keys)
    yield tier
    tier.close()


def statuses(tier: DiskTier, stored: list[Stored]) -> list[ReadStatus]:
    return [read(tier, item) for item in stored]


def slot_place(tier: DiskTier, item: Stored) -> tuple[Path, int, int]:
    """File, offset and header bytes of a page's slot."""
    segment = tier._segments.of(item.slot)
    assert segment is not None
    return segment.path, segment.shape.offset(item.slot), segment.shape.header_bytes


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        [byte] = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))
        file.flush()
        os.fsync(file.fileno())


@pytest.mark.parametrize("size", [1, 100, 4096, 10_000, 65_536, 2 << 20, 9 << 20])
def test_pages_of_all_sizes_come_back(tier: DiskTier, size: int) -> None:
    """Neighbours whose payload fills the slot share a block: a tag must not hit the next one."""
    stored = Chains().chain(1 if size > 1 << 20 else 9, size=size)
    assert all(write(tier, stored))
    slots = [item.slot for item in stored]
    buffers = [bytearray(size) for _ in stored]
    found = tier.read_many(slots, [item.page for item in stored], list(map(memoryview, buffers)))
    assert set(found) == {ReadStatus.OK}
    assert [bytes(buffer) for buffer in buffers] == [item.payload for item in stored]
    tier.check()


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 40_000), st.binary(max_size=2000)), min_size=1, max_size=6)
)
def test_what_was_written_is_read_after_a_restart(
    tmp_path_factory: pytest.TempPathFactory, shapes: list[tuple[int, bytes]]
) -> None:
    directory, keys, chains = tmp_path_factory.mktemp("t") / "d", MemoryKeys(), Chains()
    tier = opened(directory, keys)
    stored = [chains.page(size, extras=extras) for size, extras in shapes]
    assert all(write(tier, [item])[0] for item in stored)
    tier.close()
    tier = opened(directory, keys)
    rows = {int(s): (group, row) for group in tier.rows() for row, s in enumerate(group.sequences)}
    for item in stored:
        group, row = rows[item.page.sequence]
        assert group.tokens[row].tobytes() == item.page.tokens
        assert group.extras.get(row, b"") == item.page.extras
        assert group.keys[row].tobytes() == item.page.key
        assert group.checksums[row].tobytes() == item.page.checksum
        assert group.writers[int(group.writer_ids[row])] == item.page.writer
        assert (group.root, group.tenant) == (item.page.root, item.page.tenant)
        assert read(tier, item) is ReadStatus.OK
    tier.check()
    tier.close()


@pytest.mark.slow
def test_a_rebuild_from_headers_needs_the_keys_and_finds_all(
    tier: DiskTier, tmp_path: Path, keys: MemoryKeys
) -> None:
    stored = Chains().chain(9) + Chains(boot=2).chain(4, root=1)
    write(tier, stored)
    tier.close()
    shutil.rmtree(tmp_path / "d" / "catalog")
    tier = opened(tmp_path / "d", keys)
    assert found_slots(tier) == {item.page.sequence: item.slot for item in stored}
    assert set(statuses(tier, stored)) == {ReadStatus.OK}
    tier.close()
    tier = opened(tmp_path / "d", keys)
    assert len(found_slots(tier)) == len(stored)
    tier.close()


@pytest.mark.slow
@pytest.mark.parametrize("rebuild", [False, True])
def test_the_pages_of_a_lost_key_are_given_up_and_no_others(
    tier: DiskTier, tmp_path: Path, keys: MemoryKeys, rebuild: bool
) -> None:
    mine, others = Chains().chain(6), Chains(boot=2).chain(5, root=1)
    write(tier, mine)
    write(tier, others)
    tier.close()
    del keys.keys["tenant-0"]
    if rebuild:
        shutil.rmtree(tmp_path / "d" / "catalog")
    tier = opened(tmp_path / "d", keys)
    assert found_slots(tier) == {item.page.sequence: item.slot for item in others}
    assert tier.counters.key_missing == 6
    assert tier.counters.records_dropped == 0
    assert tier.usage().used_slots == 5
    assert set(statuses(tier, mine)) == {ReadStatus.STALE}
    assert set(statuses(tier, others)) == {ReadStatus.OK}
    again = Chains(boot=3).chain(8)  # its tenant starts again, under a new key
    assert all(write(tier, again))
    tier.check()
    tier.close()
    tier = opened(tmp_path / "d", keys)
    assert set(statuses(tier, again + others)) == {ReadStatus.OK}
    assert tier.counters.key_missing == 0
    tier.close()


def test_an_erased_key_makes_its_pages_unreadable_at_once(
    tier: DiskTier, tmp_path: Path, keys: MemoryKeys
) -> None:
    stored, others = Chains().chain(3), Chains(boot=2).chain(2, root=1)
    write(tier, stored)
    write(tier, others)
    assert tier.cipher is not None
    assert tier.cipher.erase("tenant-0")
    assert set(statuses(tier, stored)) == {ReadStatus.LOCKED}
    assert tier.counters.key_missing == 3
    late = Chains(boot=3).page()  # of the same tree: its names are interned with the new key
    write(tier, [late])
    assert read(tier, late) is ReadStatus.OK
    tier.close()
    tier = opened(tmp_path / "d", keys)
    assert set(statuses(tier, [late, *others])) == {ReadStatus.OK}
    assert tier.counters.key_missing == 3
    tier.close()


def test_flipped_bits_of_a_slot_are_misses(tier: DiskTier) -> None:
    """Nonce, tag, ciphertext and names of the header; the payload's first and last byte."""
    chains = Chains()
    used = 196 + 64 + len("tenant-0") + len("writer-0") + 96
    places = [0, 8, 17, 30, 45, 50, 70, 150, 170, 200, used - 90, used - 70, used - 50]
    places += [used - 35, used - 10, 4096, 4096 + 9_999]
    for place in places:
        item = chains.page(10_000)
        write(tier, [item])
        path, offset, header_bytes = slot_place(tier, item)
        assert header_bytes == 4096
        assert read(tier, item) is ReadStatus.OK
        flip(path, offset + place)
        assert read(tier, item) in (ReadStatus.CORRUPT, ReadStatus.STALE), place


def test_another_slots_content_is_not_taken_for_the_page(tier: DiskTier) -> None:
    one, two = Chains().chain(2)
    write(tier, [one, two])
    path, first, header_bytes = slot_place(tier, one)
    _, second, _ = slot_place(tier, two)
    content = path.read_bytes()
    slot_bytes = abs(second - first)
    with path.open("r+b") as file:  # the payload alone, under the right header
        file.seek(second + header_bytes)
        file.write(content[first + header_bytes : first + slot_bytes])
        os.fsync(file.fileno())
    assert read(tier, two) is ReadStatus.CORRUPT
    with path.open("r+b") as file:  # the whole slot
        file.seek(second)
        file.write(content[first : first + slot_bytes])
        os.fsync(file.fileno())
    assert read(tier, two) is ReadStatus.CORRUPT
    assert read(tier, one) is ReadStatus.OK


@pytest.mark.slow
def test_flipped_bits_of_records_cost_only_what_they_hit(
    tier: DiskTier, tmp_path: Path, keys: MemoryKeys
) -> None:
    stored = [Chains(boot=boot).page() for boot in range(1, 40)]
    write(tier, stored)
    tier.close()
    data = tmp_path / "d" / "catalog" / "data.mdb"
    whole = data.read_bytes()
    for number in range(1, 12):
        item = stored[number]
        numbers = item.slot.to_bytes(8, "little") + item.page.sequence.to_bytes(8, "little")
        at = whole.find(numbers)
        assert at > 0
        while at > 0:  # each copy that LMDB keeps
            flip(data, at + 8 + 11 * number)
            at = whole.find(numbers, at + 1)
    tier = opened(tmp_path / "d", keys)
    found = found_slots(tier)
    assert stored[0].page.sequence in found
    assert not {item.page.sequence for item in stored[1:12]} & set(found)
    assert {item.page.sequence for item in stored[12:]} <= set(found)
    tier.check()
    tier.close()


@pytest.mark.slow
def test_nothing_of_a_prompt_lies_in_any_file(tmp_path: Path, keys: MemoryKeys) -> None:
    def marked(tier: DiskTier, boot: int) -> None:
        chains = Chains(boot=boot)
        for number in range(20):
            item = chains.page(8000)
            item.payload = MARKER * 320
            fields = {name: getattr(item.page, name) for name in item.page.__dataclass_fields__}
            fields |= {"tokens": MARKER + b"-tok", "extras": MARKER, "writer": MARKER.decode()}
            fields |= {"tenant": MARKER.decode(), "root": b"MARKER-ROOT-" + bytes(20)}
            fields |= {"key": b"MARKER-KEY-%05d" % number}
            item.page = type(item.page)(**fields)
            write(tier, [item])
            if number % 4 == 0:
                tier.free_many([item.slot], erase=number % 8 == 0)

    tier = opened(tmp_path / "d", keys)
    marked(tier, 1)
    tier.close()
    shutil.rmtree(tmp_path / "d" / "catalog")
    tier = opened(tmp_path / "d", keys)
    marked(tier, 2)
    tier.close()
    files = [path for path in (tmp_path / "d").rglob("*") if path.is_file()]
    assert any(path.name == "data.mdb" for path in files)
    assert [path.name for path in files if b"MARKER" in path.read_bytes()] == []
    plain = opened(tmp_path / "plain", None)  # the search can find
    marked(plain, 1)
    plain.close()
    files = [path for path in (tmp_path / "plain").rglob("*") if path.is_file()]
    found = {path.name for path in files if b"MARKER" in path.read_bytes()}
    assert {"data.mdb", "segment-00000001"} <= found


@pytest.mark.slow
def test_no_keys_at_all_is_refused_and_costs_nothing(
    tier: DiskTier, tmp_path: Path, keys: MemoryKeys
) -> None:
    stored = Chains().chain(4)
    write(tier, stored)
    tier.close()
    for _ in range(5):  # nor is it taken for a catalog that kills the server
        with pytest.raises(TierError, match="4 pages here are encrypted and no keys were given"):
            opened(tmp_path / "d", None)
    identity = json.loads((tmp_path / "d" / IDENTITY_NAMES[0]).read_bytes())
    assert identity["unproven_starts"] <= 1
    shutil.rmtree(tmp_path / "d" / "catalog")
    with pytest.raises(TierError, match="4 pages here are encrypted and no keys were given"):
        opened(tmp_path / "d", None)
    tier = opened(tmp_path / "d", keys)
    assert set(statuses(tier, stored)) == {ReadStatus.OK}
    tier.close()


@pytest.mark.slow
def test_a_chain_may_be_plain_above_and_encrypted_below(
    tmp_path: Path, keys: MemoryKeys, caplog: pytest.LogCaptureFixture
) -> None:
    """A tree then has two root records; its pages are one tree all the same."""
    chains = Chains()
    plain = chains.chain(3)
    tier = opened(tmp_path / "d", None)
    write(tier, plain)
    tier.close()
    tier = opened(tmp_path / "d", keys)
    assert tier.plain_pages_found == 3
    assert "3 pages from before encryption are plain on disk" in caplog.text
    below = [chains.page(parent=plain[-1])]
    below.append(chains.page(parent=below[0]))
    write(tier, below)
    tier.close()
    for rebuild in (False, True, False):
        if rebuild:
            shutil.rmtree(tmp_path / "d" / "catalog")
        tier = opened(tmp_path / "d", keys, writes=not rebuild)
        assert len(tier.rows()) == 1
        assert set(statuses(tier, plain + below)) == {ReadStatus.OK}
        tier.check()
        tier.close()
    for item in below:
        data = (tmp_path / "d" / "catalog" / "data.mdb").read_bytes()
        assert item.page.tokens not in data, "a rebuild without encryption keeps records encrypted"


def test_the_golden_plain_store_opens_with_a_cipher(tmp_path: Path, keys: MemoryKeys) -> None:
    with tarfile.open(GOLDEN) as content:
        content.extractall(tmp_path, filter="data")
    for folder, _, _ in os.walk(tmp_path / "store"):
        os.chmod(folder, 0o700)
    tier = opened(tmp_path / "store", keys)
    slots = found_slots(tier)
    for item in Chains().chain(5):
        assert read(tier, item, slots[item.page.sequence]) is ReadStatus.OK
    tier.close()


def test_a_key_that_cannot_be_made_costs_the_write_only(tmp_path: Path) -> None:
    class NoKeys(MemoryKeys):
        def key_for(self, tenant: str) -> bytes:
            raise TierError("the medium of the keys is full")

    tier = opened(tmp_path / "d", NoKeys())
    stored = Chains().chain(2)
    assert write(tier, stored) == [False, False]
    assert tier.last_refusal == "the medium of the keys is full"
    assert tier.usage().used_slots == 0
    tier.check()
    tier.close()


def test_a_cipher_comes_before_the_first_page(tier: DiskTier, keys: MemoryKeys) -> None:
    with pytest.raises(ValueError, match="before it is loaded"):
        tier.use_cipher(keys.cipher())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pytest.mark.parametrize("kind", ["pwritev", "fdatasync", "open"])
def test_giving_up_a_lost_key_survives_a_kill_anywhere(tmp_path: Path, kind: str) -> None:
    keys = MemoryKeys()
    tier = opened(tmp_path / "d", keys)
    mine, others = Chains().chain(4), Chains(boot=2).chain(3, root=1)
    write(tier, mine)
    write(tier, others)
    tier.close()
    del keys.keys["tenant-0"]
    for number in range(1, 30):
        copy = tmp_path / f"copy{number}"
        shutil.copytree(tmp_path / "d", copy)
        copy.chmod(0o700)
        child = os.fork()
        if child == 0:
            try:
                layer = FaultyFiles([Fault(kind, number, "kill")])
                DiskTier.open([copy], CAPACITY, layer, load=True, cipher=keys.cipher()).close()
            finally:
                os._exit(0)
        _, status = os.waitpid(child, 0)
        tier = opened(copy, keys)
        assert set(found_slots(tier)) == {item.page.sequence for item in others}
        assert tier.usage().used_slots == 3
        tier.check()
        tier.close()
        shutil.rmtree(copy)
        if os.WIFEXITED(status):
            assert number > 1
            return
    pytest.fail("a start makes more than 30 calls")
