"""Quantized pages: reference, interpreted kernels and the tiers' CPU codecs make the same bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from paged_caches import (
    Sizes,
    apart_hnd,
    apart_nhd,
    empty_like,
    latent,
    numbers,
    same_bits,
    strided,
)

from kvstore.kernels import quantize as ints
from kvstore.kernels import quantize_fp8 as fp8
from kvstore.kernels.gather import gather
from kvstore.kernels.jit import INTERPRETED
from kvstore.kernels.paged_kv import NO_BLOCK, PagedKv, TokenOrder
from kvstore.kernels.quantized_page import QuantizedPage, Scheme
from kvstore.tiers.codec import LOSSY_CODECS, KvShape

if TYPE_CHECKING:
    from collections.abc import Callable

needs_interpreter = pytest.mark.skipif(
    not INTERPRETED, reason="kernels are not interpreted: Triton is missing, or TRITON_INTERPRET=0"
)
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
IDS = [5, 0, 3, 2, 1, 4]
CASES = [
    (apart_nhd, Sizes(2, 6, 4, 3, 10), 2),
    (apart_hnd, Sizes(1, 6, 16, 1, 64), 1),
    (strided, Sizes(1, 6, 5, 2, 6), 3),
    (latent, Sizes(2, 6, 4, 1, 48), 2),
    (apart_nhd, Sizes(1, 6, 16, 2, 32), 6),
]


def quantized(kv: PagedKv, scheme: Scheme, blocks_a_page: int) -> torch.Tensor:
    """Pages by the CPU way of the wrapper."""
    shape = QuantizedPage.of(kv, scheme, blocks_a_page)
    pages = torch.full((len(IDS) // blocks_a_page, shape.page_bytes), 0xA5, dtype=torch.uint8)
    if scheme is Scheme.FP8:
        fp8.quantize_fp8(kv, IDS, pages, blocks_a_page)
    else:
        ints.quantize(kv, IDS, pages, blocks_a_page, scheme)
    return pages


def restore(kv: PagedKv, ids: list[int], pages: torch.Tensor, scheme: Scheme, bpp: int) -> PagedKv:
    """An empty cache filled by the CPU way of the wrapper."""
    found = empty_like(kv)
    if scheme is Scheme.FP8:
        fp8.dequantize_fp8(found, ids, pages, bpp)
    else:
        ints.dequantize(found, ids, pages, bpp, scheme)
    return found


@needs_interpreter
@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scheme", Scheme)
@pytest.mark.parametrize(("arrangement", "sizes", "blocks_a_page"), CASES)
def test_kernels_make_the_reference_s_bytes(
    arrangement: Callable[..., PagedKv],
    sizes: Sizes,
    blocks_a_page: int,
    scheme: Scheme,
    dtype: torch.dtype,
) -> None:
    kv = arrangement(sizes, dtype, numbers)
    wanted = quantized(kv, scheme, blocks_a_page)
    pages, found = torch.full_like(wanted, 0x5A), empty_like(kv)
    ids, some = kv.check_ids(IDS), kv.check_ids([NO_BLOCK, *IDS[1:]])
    if scheme is Scheme.FP8:
        fp8.launch_heads(fp8.quantize_fp8_kernel, kv, ids, list(pages), blocks_a_page)
        fp8.launch_heads(fp8.dequantize_fp8_kernel, found, some, list(pages), blocks_a_page)
    else:
        ints.launch_tiles(ints.quantize_kernel, kv, ids, list(pages), scheme, blocks_a_page)
        ints.launch_tiles(ints.dequantize_kernel, found, some, list(pages), scheme, blocks_a_page)
    assert torch.equal(pages, wanted)
    assert same_bits(found, restore(kv, [NO_BLOCK, *IDS[1:]], wanted, scheme, blocks_a_page))
    assert not any(plane[IDS[0]].any() for plane in found.planes)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("order", TokenOrder)
@pytest.mark.parametrize("scheme", Scheme)
@pytest.mark.parametrize(("arrangement", "sizes", "blocks_a_page"), CASES)
def test_cpu_codecs_make_the_kernels_bytes(
    arrangement: Callable[..., PagedKv],
    sizes: Sizes,
    blocks_a_page: int,
    scheme: Scheme,
    order: TokenOrder,
    dtype: torch.dtype,
) -> None:
    kv = arrangement(sizes, dtype, numbers)
    wanted = quantized(kv, scheme, blocks_a_page)
    raw = torch.zeros(len(wanted), blocks_a_page * kv.block_bytes, dtype=torch.uint8)
    gather(kv, IDS, raw, blocks_a_page, order=order)
    shape = KvShape(
        str(dtype).removeprefix("torch."),
        kv.layers,
        kv.kinds,
        kv.heads,
        blocks_a_page * kv.block_tokens,
        kv.dim,
        tokens_first=order is TokenOrder.NHD,
    )
    codec = LOSSY_CODECS[scheme](shape)
    assert codec.encoded_bytes == wanted.shape[1]
    back = torch.zeros_like(raw)
    for page, row, target in zip(raw, wanted, back, strict=True):
        assert codec.encode(page.numpy().data) == row.numpy().tobytes()
        codec.decode(row.numpy().data, target.numpy().data)
    again = torch.zeros_like(raw)
    gather(restore(kv, IDS, wanted, scheme, blocks_a_page), IDS, again, blocks_a_page, order=order)
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
    page = torch.zeros(1, QuantizedPage.of(kv, Scheme.FP8, 1).page_bytes, dtype=torch.uint8)
    fp8.launch_heads(fp8.quantize_fp8_kernel, kv, kv.check_ids([0]), list(page), 1)
    wanted = plane.flatten().to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(page[0, : plane.numel()], wanted)


@pytest.mark.parametrize("scheme", [Scheme.INT8, Scheme.INT4])
def test_no_number_is_off_by_more_than_a_step(scheme: Scheme) -> None:
    kv = apart_hnd(Sizes(1, 6, 16, 2, 32), torch.float32, numbers)
    pages = quantized(kv, scheme, 2)
    found = restore(kv, IDS, pages, scheme, 2)
    for plane, axis in ((0, (0, 2)), (1, (3,))):
        before, after = kv.planes[plane], found.planes[plane]
        wide = before.amax(axis, keepdim=True) - before.amin(axis, keepdim=True)
        step = wide / (2**scheme.bits - 1)
        assert ((after - before).abs() <= step * 0.51 + 1e-6).all()


def test_partial_pages_and_other_dtypes_are_refused() -> None:
    kv = apart_nhd(Sizes(), torch.bfloat16, numbers)
    size = QuantizedPage.of(kv, Scheme.INT8, 2).page_bytes
    pages = torch.zeros(1, size, dtype=torch.uint8)
    with pytest.raises(ValueError, match="whole pages"):
        ints.quantize(kv, [0], pages, 2, Scheme.INT8)
    with pytest.raises(ValueError, match="NO_BLOCK"):
        ints.quantize(kv, [0, NO_BLOCK], pages, 2, Scheme.INT8)
    with pytest.raises(ValueError, match=str(size)):
        ints.dequantize(kv, [0, 1], pages[:, :-1], 2, Scheme.INT8)
    with pytest.raises(ValueError, match="quantize_fp8"):
        ints.quantize(kv, [0, 1], pages, 2, Scheme.FP8)
    odd = apart_nhd(Sizes(dim=7), torch.bfloat16, numbers)
    with pytest.raises(ValueError, match="two channels"):
        QuantizedPage.of(odd, Scheme.INT4, 1)
    small = apart_nhd(Sizes(), torch.float8_e5m2, lambda *a: numbers(*a).to(torch.float8_e5m2))
    with pytest.raises(ValueError, match="not quantized"):
        QuantizedPage.of(small, Scheme.INT8, 1)


def test_a_page_without_a_range_comes_back_exact() -> None:
    plane = torch.full((2, 2, 4, 8), 3.25, dtype=torch.bfloat16)
    kv = PagedKv((plane, plane.clone()), 2)
    for scheme in (Scheme.INT8, Scheme.INT4):
        page = torch.zeros(1, QuantizedPage.of(kv, scheme, 2).page_bytes, dtype=torch.uint8)
        ints.quantize(kv, [0, 1], page, 2, scheme)
        found = empty_like(kv)
        ints.dequantize(found, [0, 1], page, 2, scheme)
        assert same_bits(found, kv)
    assert np.isfinite(page.numpy()).all()
