"""Sizes and durations: exact, bounded, and helpful about typos."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import ConfigError
from kvstore.quantity import (
    DURATION_S_MAX,
    SIZE_BYTES_MAX,
    format_bytes,
    parse_bytes,
    parse_duration,
)

if TYPE_CHECKING:
    from collections.abc import Callable

SIZES: list[tuple[Any, int]] = [
    (0, 0),
    (4096, 4096),
    ("4096", 4096),
    ("12B", 12),
    ("8GiB", 8 << 30),
    ("8gib", 8 << 30),
    (" 8 GiB ", 8 << 30),
    ("512MB", 512 * 10**6),
    ("1.5G", 3 << 29),
    ("0.5k", 512),
    ("2T", 2 << 40),
    ("1.000001MB", 1_000_001),
    ("0.1KB", 100),
    (SIZE_BYTES_MAX, SIZE_BYTES_MAX),
]


@pytest.mark.parametrize(("value", "size"), SIZES)
def test_sizes_are_exact(value: Any, size: int) -> None:
    assert parse_bytes(value) == size


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        ("8GBi", "did you mean '8GiB'"),
        ("8Gi", "did you mean '8GiB'"),
        ("8GIG", "did you mean '8G"),
        ("512megs", "did you mean '512M"),
        ("8iGB", "did you mean '8GiB'"),
        ("5XB", "the units are B, KiB,"),
        ("5Bytes", "did you mean '5B'"),
        ("1.5x", "the units are B, KiB"),
        ("", "write like '8GiB'"),
        ("GiB", "write like '8GiB'"),
        ("-1", "write like '8GiB'"),
        ("-8GiB", "write like '8GiB'"),
        ("+8GiB", "write like '8GiB'"),
        ("1e9", "not a size"),
        ("1,5GiB", "not a size"),
        ("1.5.2G", "not a size"),
        (".5G", "not a size"),
        ("8  GiB", "not a size"),
        ("8GiB\n8GiB", "not a size"),
        ("0x10", "not a size"),
        ("\u0668GiB", "not a size"),
        ("nan", "not a size"),
        ("inf", "not a size"),
        ("1.0001K", "whole number of bytes"),
        ("0.5", "whole number of bytes"),
        ("9" * 20 + "PiB", "out of bounds"),
        ("9" * 5000, "not a size"),
        (-1, "out of bounds"),
        (SIZE_BYTES_MAX + 1, "out of bounds"),
        (1.5, "not a size"),
        (True, "not a size"),
        (None, "not a size"),
        (b"8GiB", "not a size"),
        (["8GiB"], "not a size"),
    ],
)
def test_bad_sizes_are_refused_with_a_hint(value: Any, hint: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_bytes(value)
    assert hint in str(refused.value)
    assert len(str(refused.value)) < 200


@given(st.integers(0, SIZE_BYTES_MAX), st.sampled_from(["", "B", " B", "b"]))
def test_whole_bytes_come_back(size: int, unit: str) -> None:
    assert parse_bytes(f"{size}{unit}") == parse_bytes(size) == size


@given(st.text(max_size=12), st.sampled_from([parse_bytes, parse_duration]))
def test_any_text_is_a_quantity_or_a_clear_error(text: str, parse: Callable[[str], float]) -> None:
    try:
        assert parse(text) >= 0
    except ConfigError as exc:
        if len(str(exc).splitlines()) != 1:
            raise


DURATIONS: list[tuple[Any, float]] = [
    (0, 0),
    (90, 90),
    (0.5, 0.5),
    ("90", 90),
    ("0.25", 0.25),
    ("250ms", 0.25),
    ("90s", 90),
    ("10m", 600),
    ("1h30m", 5400),
    ("1.5h", 5400),
    ("2d", 172_800),
    ("1w", 604_800),
    (" 10m ", 600),
]


@pytest.mark.parametrize(("value", "seconds"), DURATIONS)
def test_durations_are_seconds(value: Any, seconds: float) -> None:
    assert parse_duration(value) == seconds


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        ("10min", "did you mean '10m'"),
        ("10M", "did you mean '10m'"),
        ("3 d", "not a duration"),
        ("10x", "the units are ms, s, m"),
        ("", "write like"),
        ("m", "write like"),
        ("-5s", "write like"),
        ("1h 30m", "write like"),
        ("1h30", "write like"),
        ("nan", "write like"),
        ("99999999w", "out of bounds"),
        (-1, "out of bounds"),
        (float("nan"), "out of bounds"),
        (float("inf"), "out of bounds"),
        (10**400, "out of bounds"),
        (DURATION_S_MAX + 1, "out of bounds"),
        (True, "not a duration"),
        (None, "not a duration"),
    ],
)
def test_bad_durations_are_refused_with_a_hint(value: Any, hint: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_duration(value)
    assert hint in str(refused.value)


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (8 << 30, "8 GiB"), (5 << 50, "5 PiB")],
)
def test_sizes_are_shown_short(size: int, text: str) -> None:
    assert format_bytes(size) == text
