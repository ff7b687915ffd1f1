"""The segment format: size classes, headers that are believed only whole."""

from __future__ import annotations

from dataclasses import replace

import pytest
from disk_pages import Chains
from hypothesis import given
from hypothesis import strategies as st

from kvstore.tiers.segment import (
    FORMAT_VERSION,
    SegmentShape,
    decode_page_header,
    decode_segment_head,
    encode_page_header,
    encode_segment_head,
    header_bytes_for,
    payload_class,
    same_page,
    segment_id_of,
    segment_name,
)

UUID = bytes(range(16))
SHAPE = SegmentShape(7, 0, 100, 8192, 4096)


@given(st.integers(0, 1 << 40))
def test_a_class_wastes_at_most_an_eighth(size: int) -> None:
    capacity = payload_class(size)
    assert capacity >= size
    assert capacity % 4096 == 0
    assert capacity - size <= max(4096, capacity / 8)
    assert payload_class(capacity) == capacity


@given(st.integers(1, 1 << 30), st.integers(1, 1 << 30))
def test_classes_grow_with_sizes(one: int, other: int) -> None:
    low, high = sorted((one, other))
    assert payload_class(low) <= payload_class(high)


def test_a_power_of_two_is_a_class_of_its_own() -> None:
    assert payload_class(2 << 20) == 2 << 20
    assert payload_class((2 << 20) + 1) == (2 << 20) + (256 << 10)
    assert payload_class(0) == 4096


def test_a_segment_head_comes_back() -> None:
    block = encode_segment_head(SHAPE, UUID)
    assert len(block) == 4096
    assert decode_segment_head(block) == (SHAPE, UUID, FORMAT_VERSION)


@given(st.integers(0, 63), st.integers(0, 7))
def test_a_flipped_segment_head_is_not_believed(at: int, bit: int) -> None:
    block = bytearray(encode_segment_head(SHAPE, UUID))
    block[at] ^= 1 << bit
    assert decode_segment_head(bytes(block)) is None


def test_a_page_header_comes_back_with_all_fields() -> None:
    page = Chains().page(5000, extras=b"image digest").page
    encoded = encode_page_header(page, 3, UUID, 4096)
    assert encoded is not None
    block = encoded.ljust(4096, b"\0")
    assert decode_page_header(block, 3, UUID) == page
    assert decode_page_header(block, 4, UUID) is None, "of another slot"
    assert decode_page_header(block, 3, bytes(16)) is None, "of another store"
    assert decode_page_header(block[:40], 3, UUID) is None


@given(st.data())
def test_a_flipped_page_header_is_not_believed(data: st.DataObject) -> None:
    encoded = encode_page_header(Chains().page().page, 3, UUID, 4096)
    assert encoded is not None
    block = bytearray(encoded)
    at = data.draw(st.integers(0, len(block) - 1))
    block[at] ^= 1 << data.draw(st.integers(0, 7))
    assert decode_page_header(bytes(block), 3, UUID) is None


def test_a_page_that_needs_a_larger_header_is_told_so() -> None:
    page = replace(Chains().page().page, tokens=bytes(5000))
    assert encode_page_header(page, 3, UUID, 4096) is None
    size = header_bytes_for(5000)
    assert size == 8192
    encoded = encode_page_header(page, 3, UUID, size)
    assert encoded is not None
    assert decode_page_header(encoded.ljust(size, b"\0"), 3, UUID) == page


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("sequence", 9),
        ("root", b"x" * 32),
        ("key", b"x" * 16),
        ("parent_key", b"x" * 16),
        ("parent_sequence", 4),
        ("page_index", 8),
        ("tokens", b"x" * 64),
        ("extras", b"x"),
        ("tenant", "x"),
        ("namespace", b"x" * 16),
        ("payload_bytes", 1),
        ("codec", 3),
        ("checksum", b"x" * 16),
    ],
)
def test_every_field_that_decides_the_bytes_is_compared(name: str, value: object) -> None:
    page = Chains().page().page
    assert same_page(page, replace(page, writer="another", created_s=0))
    assert not same_page(page, replace(page, **{name: value}))


def test_names_of_segments() -> None:
    assert segment_id_of(segment_name(0xABC)) == 0xABC
    for name in ("segment-", "segment-00000ABC", "segment-1", "x-00000001", "segment-0000000g"):
        assert segment_id_of(name) is None


def test_shapes_that_cannot_be_are_unsound() -> None:
    for wrong in (
        replace(SHAPE, slots=0),
        replace(SHAPE, slot_bytes=8000),
        replace(SHAPE, header_bytes=0),
        replace(SHAPE, header_bytes=8192),
        replace(SHAPE, slots=1 << 25),
    ):
        assert not wrong.sound
        assert decode_segment_head(encode_segment_head(wrong, UUID)) is None
