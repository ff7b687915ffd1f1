"""Codecs: exact ones are, lossy ones keep their bounds, damage is an error and never a crash."""

from __future__ import annotations

import random
import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.tiers import codec_lossless as lossless
from kvstore.tiers.codec import LOSSY_CODECS, CodecError, KvShape, disk_codec
from kvstore.tiers.codec_shape import WIDTHS, from_float32, to_float32

if TYPE_CHECKING:
    from numpy.typing import NDArray

pytestmark = pytest.mark.skipif(
    not lossless.available(), reason="the extra `lossless` is not installed"
)
SHAPE = KvShape("bfloat16", layers=3, kinds=2, heads=2, tokens=32, dim=64)


def kv_numbers(shape: KvShape, seed: int = 0) -> bytes:
    """A page as models make them: channels of different size, most numbers small."""
    rng = np.random.default_rng(seed)
    size = (shape.planes, shape.heads, shape.tokens, shape.dim)
    x = rng.standard_normal(size, np.float32)
    x *= np.exp(rng.standard_normal(shape.dim).astype(np.float32))
    return from_float32(x, shape.dtype).tobytes()


def floats(page: bytes | bytearray, shape: KvShape) -> NDArray[np.float32]:
    return to_float32(shape.numbers(page), shape.dtype)


@settings(max_examples=60, deadline=None)
@given(payload=st.binary(max_size=3000))
def test_lossless_gives_back_any_bytes(payload: bytes) -> None:
    frame = lossless.encode(payload)
    out = bytearray(len(payload))
    assert lossless.decode(frame + b"anything", out) == len(frame)
    assert out == payload


@pytest.mark.parametrize("dtype", WIDTHS)
def test_lossless_finds_the_width_and_saves(dtype: str) -> None:
    shape = KvShape(dtype, 4, 2, 2, 64, 64)
    page = kv_numbers(shape)
    frame = lossless.encode(page)
    assert lossless.read_head(frame)[0] == WIDTHS[dtype]
    assert len(page) / len(frame) > {"bfloat16": 1.3, "float16": 1.05, "float32": 1.13}[dtype]
    out = bytearray(len(page))
    lossless.decode(frame, out)
    assert out == page


def test_a_damaged_frame_is_an_error_or_other_bytes_never_a_crash() -> None:
    """The bytes that are kept as they are carry no check: the tier's checksum of the page does."""
    page = kv_numbers(SHAPE)
    frame = lossless.encode(page)
    rng = random.Random(3)
    refused = 0
    for _ in range(400):
        damaged = bytearray(frame)
        for _ in range(rng.randrange(1, 4)):
            damaged[rng.randrange(rng.choice([32, 200, len(frame)]))] ^= rng.randrange(1, 256)
        try:
            out = bytearray(len(page))
            lossless.decode(damaged[: rng.choice([len(frame), rng.randrange(len(frame))])], out)
        except CodecError:
            refused += 1
    assert refused > 200


@pytest.mark.parametrize("cut", [0, 3, 31, 32, 33, 5000])
def test_a_cut_frame_is_refused(cut: int) -> None:
    page = kv_numbers(SHAPE)
    with pytest.raises(CodecError):
        lossless.decode(lossless.encode(page)[:cut], bytearray(len(page)))


def test_a_frame_is_never_unpacked_beyond_what_is_wanted() -> None:
    frame = lossless.encode(bytes(1 << 20))
    assert len(frame) < 1000
    with pytest.raises(CodecError, match="1048576"):
        lossless.decode(frame, bytearray(4096))


def test_threads_share_the_lossless_codec() -> None:
    pages = [kv_numbers(SHAPE, seed) for seed in range(4)]
    wrong: list[int] = []

    def work(seed: int) -> None:
        for _ in range(10):
            out = bytearray(len(pages[seed]))
            lossless.decode(lossless.encode(pages[seed]), out)
            if out != pages[seed]:
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("dtype", WIDTHS)
@pytest.mark.parametrize("name", LOSSY_CODECS)
def test_lossy_codecs_stay_within_their_step(name: str, dtype: str) -> None:
    shape = KvShape(dtype, 2, 2, 2, 32, 64)
    codec = LOSSY_CODECS[name](shape)
    page = kv_numbers(shape)
    encoded, out = codec.encode(page), bytearray(shape.page_bytes)
    assert len(encoded) == codec.encoded_bytes < shape.page_bytes
    codec.decode(encoded, out)
    before, after = floats(page, shape), floats(out, shape)
    largest = np.abs(before).max()
    bound = {"fp8": largest * 2.0**-4, "int8": largest / 80, "int4": largest / 5}[name]
    assert 0 < np.abs(after - before).max() <= bound
    again = bytearray(shape.page_bytes)
    codec.decode(codec.encode(out), again)
    assert np.abs(floats(again, shape) - after).max() <= bound


@pytest.mark.parametrize("name", LOSSY_CODECS)
def test_token_order_of_the_page_does_not_change_the_codes(name: str) -> None:
    page = kv_numbers(SHAPE)
    other = KvShape("bfloat16", 3, 2, 2, 32, 64, tokens_first=True)
    turned = SHAPE.numbers(page).transpose(0, 2, 1, 3).tobytes()
    encoded = LOSSY_CODECS[name](SHAPE).encode(page)
    assert LOSSY_CODECS[name](other).encode(turned) == encoded
    a, b = bytearray(SHAPE.page_bytes), bytearray(SHAPE.page_bytes)
    LOSSY_CODECS[name](SHAPE).decode(encoded, a)
    LOSSY_CODECS[name](other).decode(encoded, b)
    assert np.array_equal(SHAPE.numbers(a), other.numbers(b))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", LOSSY_CODECS)
def test_numbers_that_are_not_finite_are_refused(name: str, bad: float) -> None:
    shape = KvShape("float32", 1, 2, 1, 4, 8)
    page = bytearray(kv_numbers(shape))
    shape.numbers(page)[1, 0, 2, 3] = bad
    with pytest.raises(CodecError, match="not finite"):
        LOSSY_CODECS[name](shape).encode(page)


@pytest.mark.parametrize("name", LOSSY_CODECS)
def test_the_widest_range_of_bfloat16_survives(name: str) -> None:
    shape = KvShape("bfloat16", 1, 1, 1, 1, 32)
    page = bytearray(shape.page_bytes)
    shape.numbers(page)[0, 0, 0, :] = from_float32(np.full(32, 1.5e38, np.float32), "bfloat16")
    shape.numbers(page)[0, 0, 0, 0] = 0
    codec, out = LOSSY_CODECS[name](shape), bytearray(shape.page_bytes)
    codec.decode(codec.encode(page), out)
    np.testing.assert_allclose(floats(out, shape), floats(page, shape), rtol=0.05)


@pytest.mark.parametrize("name", LOSSY_CODECS)
def test_any_bytes_of_the_right_size_decode_and_others_are_refused(name: str) -> None:
    codec = LOSSY_CODECS[name](SHAPE)
    noise = random.Random(1).randbytes(codec.encoded_bytes)
    codec.decode(noise, bytearray(SHAPE.page_bytes))
    for size in (0, codec.encoded_bytes - 1, codec.encoded_bytes + 1):
        with pytest.raises(CodecError, match=str(size)):
            codec.decode(bytes(size), bytearray(SHAPE.page_bytes))
    with pytest.raises(CodecError, match="page of 5 bytes"):
        codec.encode(bytes(5))


def test_shapes_that_make_no_page_are_refused() -> None:
    with pytest.raises(CodecError, match="int8"):
        KvShape("int8", 1, 2, 1, 4, 8)
    with pytest.raises(CodecError, match="kinds 3"):
        KvShape("float16", 1, 3, 1, 4, 8)
    with pytest.raises(CodecError, match="even dim"):
        LOSSY_CODECS["int4"](KvShape("float16", 1, 2, 1, 4, 7))


def test_a_disk_takes_exact_codecs_only() -> None:
    assert (disk_codec("raw"), disk_codec("lossless")) == (0, 1)
    for name in LOSSY_CODECS:
        with pytest.raises(CodecError, match="KvQuantization"):
            disk_codec(name)
    with pytest.raises(CodecError, match="raw, lossless"):
        disk_codec("zip")
