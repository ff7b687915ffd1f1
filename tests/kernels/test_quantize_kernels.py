"""Quantized pages: reference, interpreted kernels and the tiers' CPU codecs make the same bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from paged_caches import (
    Sizes,
    apart_hnd,
    apart_nhd,
    cross_layer,
    empty_like,
    latent,
    numbers,
    same_bits,
    strided,
    together_first,
)

from kvstore.kernels.gather import gather
from kvstore.kernels.jit import INTERPRETED
from kvstore.kernels.paged_kv import NO_BLOCK, PagedKv, TokenOrder
from kvstore.kernels.quantize import dequantize, launch, quantize
from kvstore.kernels.quantize_fp8 import dequantize_fp8_reference, quantize_fp8_reference
from kvstore.kernels.quantize_int import dequantize_reference, quantize_reference
from kvstore.kernels.quantized_page import QuantizedPage, Scheme
from kvstore.tiers.codec import LOSSY_CODECS, CodecError, KvShape, LossyCodec

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

needs_interpreter = pytest.mark.skipif(
    not INTERPRETED, reason="kernels are not interpreted: Triton is missing, or TRITON_INTERPRET=0"
)
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
IDS = [5, 0, 3, 2, 1, 4]


def tiny(shape: Sequence[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Numbers whose scales are subnormal or 0 in float16."""
    return (numbers(shape, torch.float32, seed) * 1e-6).to(dtype)


def wide(shape: Sequence[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Numbers up to the largest of float16, of both signs."""
    x = numbers(shape, torch.float32, seed)
    return (x * (65504 / x.abs().max())).to(dtype)


CASES = [
    (apart_nhd, Sizes(2, 6, 4, 3, 10), 2, numbers),
    (apart_hnd, Sizes(1, 6, 16, 1, 64), 1, numbers),
    (strided, Sizes(1, 6, 5, 2, 6), 3, numbers),
    (latent, Sizes(2, 6, 4, 1, 48), 2, numbers),
    (apart_nhd, Sizes(1, 6, 16, 2, 32), 6, numbers),
    (cross_layer, Sizes(1, 6, 1, 1, 2), 1, numbers),
    (together_first, Sizes(1, 6, 3, 2, 7), 2, numbers),
    (latent, Sizes(1, 6, 7, 1, 5), 1, numbers),
    (apart_hnd, Sizes(1, 6, 8, 2, 12), 3, tiny),
    (strided, Sizes(1, 6, 4, 2, 20), 2, wide),
]
SCHEMES_OF_CASES = [
    (*case, scheme)
    for case in CASES
    for scheme in Scheme
    if scheme.bits == 8 or not case[1].dim % 2
]


def codec_of(kv: PagedKv, scheme: Scheme, bpp: int, *, tokens_first: bool = False) -> LossyCodec:
    """The tiers' codec of this cache's pages."""
    name, tokens = str(kv.dtype).removeprefix("torch."), bpp * kv.block_tokens
    shape = KvShape(name, kv.layers, kv.kinds, kv.heads, tokens, kv.dim, tokens_first=tokens_first)
    return LOSSY_CODECS[scheme](shape)


def quantized(kv: PagedKv, scheme: Scheme, bpp: int) -> torch.Tensor:
    """Pages by the wrapper, which on CPU tensors goes through the codec."""
    size = QuantizedPage.of(kv, scheme, bpp).page_bytes
    pages = torch.full((len(IDS) // bpp, size), 0xA5, dtype=torch.uint8)
    quantize(kv, IDS, pages, bpp, scheme, codec_of(kv, scheme, bpp))
    return pages


def restored(kv: PagedKv, ids: list[int], pages: torch.Tensor, scheme: Scheme, bpp: int) -> PagedKv:
    """An empty cache filled by the wrapper."""
    found = empty_like(kv)
    dequantize(found, ids, pages, bpp, scheme, codec_of(kv, scheme, bpp))
    return found


def by_reference(kv: PagedKv, scheme: Scheme, bpp: int) -> torch.Tensor:
    """Pages by torch."""
    size = QuantizedPage.of(kv, scheme, bpp).page_bytes
    pages = torch.full((len(IDS) // bpp, size), 0x3C, dtype=torch.uint8)
    if scheme is Scheme.FP8:
        quantize_fp8_reference(kv, IDS, list(pages), bpp)
    else:
        quantize_reference(kv, IDS, list(pages), scheme, bpp)
    return pages


def back_by_reference(
    kv: PagedKv, ids: list[int], pages: torch.Tensor, scheme: Scheme, bpp: int
) -> PagedKv:
    """An empty cache filled by torch."""
    found = empty_like(kv)
    if scheme is Scheme.FP8:
        dequantize_fp8_reference(found, ids, list(pages), bpp)
    else:
        dequantize_reference(found, ids, list(pages), scheme, bpp)
    return found


@needs_interpreter
@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("arrangement", "sizes", "bpp", "fill", "scheme"), SCHEMES_OF_CASES)
def test_kernel_reference_and_cpu_codec_make_the_same_bytes(
    arrangement: Callable[..., PagedKv],
    sizes: Sizes,
    bpp: int,
    fill: Callable[..., torch.Tensor],
    scheme: Scheme,
    dtype: torch.dtype,
) -> None:
    kv = arrangement(sizes, dtype, fill)
    shape, ids, some = QuantizedPage.of(kv, scheme, bpp), IDS, [NO_BLOCK, *IDS[1:]]
    wanted = quantized(kv, scheme, bpp)
    pages, found = torch.full_like(wanted, 0x5A), empty_like(kv)
    launch(True, kv, kv.check_ids(ids), list(pages), shape)
    launch(False, found, kv.check_ids(some), list(pages), shape)
    assert torch.equal(pages, wanted)
    assert torch.equal(by_reference(kv, scheme, bpp), wanted)
    assert same_bits(found, restored(kv, some, wanted, scheme, bpp))
    assert same_bits(found, back_by_reference(kv, some, wanted, scheme, bpp))
    assert not any(plane[IDS[0]].any() for plane in found.planes)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("order", TokenOrder)
@pytest.mark.parametrize(("arrangement", "sizes", "bpp", "fill", "scheme"), SCHEMES_OF_CASES)
def test_cpu_codecs_make_the_reference_s_bytes_of_pages_in_either_order(
    arrangement: Callable[..., PagedKv],
    sizes: Sizes,
    bpp: int,
    fill: Callable[..., torch.Tensor],
    scheme: Scheme,
    order: TokenOrder,
    dtype: torch.dtype,
) -> None:
    kv = arrangement(sizes, dtype, fill)
    wanted = by_reference(kv, scheme, bpp)
    raw = torch.zeros(len(wanted), bpp * kv.block_bytes, dtype=torch.uint8)
    gather(kv, IDS, raw, bpp, order=order)
    codec = codec_of(kv, scheme, bpp, tokens_first=order is TokenOrder.NHD)
    assert codec.encoded_bytes == wanted.shape[1]
    back = torch.zeros_like(raw)
    for page, row, target in zip(raw, wanted, back, strict=True):
        assert codec.encode(page.numpy().data) == row.numpy().tobytes()
        codec.decode(row.numpy().data, target.numpy().data)
    again = torch.zeros_like(raw)
    gather(back_by_reference(kv, IDS, wanted, scheme, bpp), IDS, again, bpp, order=order)
    assert torch.equal(back, again)


@needs_interpreter
def test_the_kernel_s_e4m3_is_torch_s_for_every_code_and_between() -> None:
    kv_codes = torch.arange(256, dtype=torch.uint8)
    exact = kv_codes.view(torch.float8_e4m3fn).float()
    exact = exact[exact.isfinite()]
    between = torch.cat([exact, (exact[1:] + exact[:-1]) / 2, torch.randn(200).exp() / 1000])
    x = between[between.abs() <= 448][:512].contiguous()
    x[-1] = 448.0  # the scale is 1, so the numbers are their own codes' numbers
    plane = x.reshape(1, 1, len(x) // 4, 4) if len(x) % 4 == 0 else x[: len(x) // 4 * 4]
    plane = plane.reshape(1, 1, -1, 4)
    plane[0, 0, -1, -1] = 448.0
    kv = PagedKv((plane,), 1)
    shape = QuantizedPage.of(kv, Scheme.FP8, 1)
    page = torch.zeros(1, shape.page_bytes, dtype=torch.uint8)
    launch(True, kv, kv.check_ids([0]), list(page), shape)
    wanted = plane.flatten().to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(page[0, : plane.numel()], wanted)


@pytest.mark.parametrize("scheme", [Scheme.INT8, Scheme.INT4])
def test_no_number_is_off_by_more_than_a_step(scheme: Scheme) -> None:
    kv = apart_hnd(Sizes(1, 6, 16, 2, 32), torch.float32, numbers)
    pages = quantized(kv, scheme, 2)
    found = restored(kv, IDS, pages, scheme, 2)
    for plane, axis in ((0, (0, 2)), (1, (3,))):
        before, after = kv.planes[plane], found.planes[plane]
        wide = before.amax(axis, keepdim=True) - before.amin(axis, keepdim=True)
        step = wide / (2**scheme.bits - 1)
        assert ((after - before).abs() <= step * 0.51 + 1e-6).all()


def test_what_makes_no_whole_page_is_refused() -> None:
    kv = apart_nhd(Sizes(), torch.bfloat16, numbers)
    size = QuantizedPage.of(kv, Scheme.INT8, 2).page_bytes
    pages = torch.zeros(1, size, dtype=torch.uint8)
    codec = codec_of(kv, Scheme.INT8, 2)
    with pytest.raises(ValueError, match="whole pages"):
        quantize(kv, [0], pages, 2, Scheme.INT8, codec)
    with pytest.raises(ValueError, match="NO_BLOCK"):
        quantize(kv, [0, NO_BLOCK], pages, 2, Scheme.INT8, codec)
    with pytest.raises(ValueError, match=str(size)):
        dequantize(kv, [0, 1], pages[:, :-1], 2, Scheme.INT8, codec)
    odd = apart_nhd(Sizes(dim=7), torch.bfloat16, numbers)
    with pytest.raises(ValueError, match="two channels"):
        QuantizedPage.of(odd, Scheme.INT4, 1)
    small = apart_nhd(Sizes(), torch.float8_e5m2, lambda *a: numbers(*a).to(torch.float8_e5m2))
    with pytest.raises(ValueError, match="not quantized"):
        QuantizedPage.of(small, Scheme.INT8, 1)
    assert not pages.any()


def test_the_cpu_s_way_needs_the_codec_of_these_pages() -> None:
    kv = apart_nhd(Sizes(), torch.bfloat16, numbers)
    pages = torch.zeros(1, QuantizedPage.of(kv, Scheme.INT8, 2).page_bytes, dtype=torch.uint8)
    for call in (quantize, dequantize):
        with pytest.raises(ValueError, match="LOSSY_CODECS"):
            call(kv, [0, 1], pages, 2, Scheme.INT8)
        with pytest.raises(ValueError, match=r"the codec makes pages of \d+ bytes"):
            call(kv, [0, 1], pages, 2, Scheme.INT8, codec_of(kv, Scheme.INT4, 2))
    kv.planes[1][1, 0, 0, 0] = float("inf")
    with pytest.raises(CodecError, match="plane 1 has numbers that are not finite"):
        quantize(kv, [0, 1], pages, 2, Scheme.INT8, codec_of(kv, Scheme.INT8, 2))


@pytest.mark.parametrize("scheme", Scheme)
def test_no_pages_are_no_work(scheme: Scheme) -> None:
    kv = apart_nhd(Sizes(), torch.bfloat16, numbers)
    codec = codec_of(kv, scheme, 2)
    none = torch.zeros(0, codec.encoded_bytes, dtype=torch.uint8)
    found = empty_like(kv)
    quantize(kv, [], none, 2, scheme, codec)
    dequantize(found, [], none, 2, scheme, codec)
    launch(True, kv, kv.check_ids([]), [], QuantizedPage.of(kv, scheme, 2))
    assert not any(plane.any() for plane in found.planes)


@pytest.mark.parametrize("scheme", [Scheme.INT8, Scheme.INT4])
def test_a_page_without_a_range_comes_back_exact(scheme: Scheme) -> None:
    plane = torch.full((2, 2, 4, 8), 3.25, dtype=torch.bfloat16)
    kv = PagedKv((plane, plane.clone()), 2)
    page = torch.zeros(1, QuantizedPage.of(kv, scheme, 2).page_bytes, dtype=torch.uint8)
    quantize(kv, [0, 1], page, 2, scheme, codec_of(kv, scheme, 2))
    assert same_bits(restored(kv, [0, 1], page, scheme, 2), kv)
