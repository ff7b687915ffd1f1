"""Rows of a catalog as trees: every chain reaches its first page, or is reported."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvstore.tiers.catalog import encode_record
from kvstore.tiers.catalog_scan import RECORD_DTYPE, Scan
from kvstore.tiers.page_rows import root_rows
from kvstore.tiers.tier import PageRecord

ROOTS = {1: (b"a" * 32, "a", b"n" * 16), 2: (b"b" * 32, "b", b"m" * 16)}


def record(
    slot: int, sequence: int, parent: int, index: int, root: int, tokens: int, extras: bytes
) -> bytes:
    name = ROOTS.get(root, (bytes(32), "", bytes(16)))
    page = PageRecord(
        root=name[0],
        tenant=name[1],
        namespace=name[2],
        key=sequence.to_bytes(16, "little"),
        parent_key=bytes(16),
        sequence=sequence,
        parent_sequence=parent,
        page_index=index,
        tokens=slot.to_bytes(4, "little") * tokens,
        extras=extras,
        payload_bytes=10 + slot,
        checksum=bytes([slot % 256]) * 16,
        codec=slot % 5,
        created_s=slot,
    )
    return encode_record(slot, page, root, 7)


def scan_of(records: list[bytes]) -> Scan:
    lengths = np.array([len(value) for value in records], np.int64)
    blob = np.frombuffer(b"".join(records), np.uint8)
    fixed = np.frombuffer(b"".join(value[:96] for value in records), RECORD_DTYPE)
    offsets = np.cumsum(lengths) - lengths
    scan = Scan(roots=dict(ROOTS), writers={7: "w"})
    scan.blob, scan.offsets, scan.lengths, scan.fixed = blob, offsets, lengths, fixed
    return scan


@st.composite
def forests(draw: st.DrawFn) -> list[tuple[int, int, int, int, int, bytes]]:
    """(sequence, parent, index, root, tokens, extras) of pages, some of them cut off."""
    pages: list[tuple[int, int, int, int, int, bytes]] = []
    for sequence in range(1, draw(st.integers(0, 30)) + 1):
        extras = draw(st.sampled_from([b"", b"x", b"long extras"]))
        if pages and draw(st.booleans()):
            parent = draw(st.sampled_from(pages))
            index = parent[2] + draw(st.sampled_from([1, 1, 1, 1, 2]))
            pages.append((sequence, parent[0], index, parent[3], parent[4], extras))
        else:
            parent_sequence = draw(st.sampled_from([0, 0, 0, 999]))
            root = draw(st.sampled_from([1, 1, 2, 3]))
            pages.append(
                (sequence, parent_sequence, 0, root, draw(st.sampled_from([1, 4])), extras)
            )
    kept = [page for page in pages if draw(st.integers(0, 9)) > 0]
    return draw(st.permutations(kept))


@given(forests())
def test_rows_are_what_a_walk_from_the_first_pages_finds(
    pages: list[tuple[int, int, int, int, int, bytes]],
) -> None:
    records = [record(slot, *page) for slot, page in enumerate(pages)]
    groups, orphans = root_rows(scan_of(records)) if records else ([], np.empty(0))
    expected: set[int] = set()
    by_sequence = {page[0]: slot for slot, page in enumerate(pages)}
    changed = True
    while changed:
        changed = False
        for slot, (_, parent, index, root, tokens, _) in enumerate(pages):
            above = by_sequence.get(parent)
            first = parent == 0 and index == 0
            below = (
                above in expected
                and pages[above][2] + 1 == index
                and pages[above][3:5] == (root, tokens)
            )
            if slot not in expected and root in ROOTS and (first or below):
                expected.add(slot)
                changed = True
    got = [int(slot) for rows in groups for slot in rows.slots]
    assert sorted(got) == sorted(expected)
    assert sorted(orphans.tolist()) == sorted(set(range(len(pages))) - expected)
    for rows in groups:
        for row, slot in enumerate(rows.slots.tolist()):
            sequence, parent, index, root, tokens, extras = pages[slot]
            assert (rows.root, rows.tenant, rows.namespace) == ROOTS[root]
            assert rows.page_tokens == tokens
            assert rows.tokens[row].tolist() == [slot] * tokens
            assert rows.extras.get(row, b"") == extras
            assert int(rows.sequences[row]) == sequence
            assert rows.keys[row].tobytes() == sequence.to_bytes(16, "little")
            assert rows.checksums[row].tobytes() == bytes([slot]) * 16
            assert int(rows.payload_bytes[row]) == 10 + slot
            assert int(rows.page_index[row]) == index
            assert int(rows.codecs[row]) == slot % 5
            assert rows.writers[int(rows.writer_ids[row])] == "w"
            above = int(rows.parent_rows[row])
            assert (above == -1) == (parent == 0)
            if above >= 0:
                assert int(rows.sequences[above]) == parent
