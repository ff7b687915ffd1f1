"""fp8 (e4m3), fused: gather + quantize into pages, dequantize + scatter into blocks.

One float32 scale for each head of each plane: the largest magnitude over 448, so that this one
becomes the largest code. e4m3 is made of integer arithmetic, rounding to nearest, ties to even, so
it is the same on every machine, also on those without fp8. Pages: quantized_page.py.

Quantizing n numbers of b bytes reads n * b bytes twice, the second time mostly from the cache (a
head of a page is some tens of KiB), and writes n bytes of codes and 4 bytes a head of a plane;
dequantizing reads these and writes n * b bytes. Only whole pages are quantized. A head with a
number that is not finite comes back as numbers that are not finite, or wrong.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvstore.kernels.jit import jit, tl
from kvstore.kernels.number_tile import as_bits, as_float, page_and_plane, tile_in_engine
from kvstore.kernels.paged_kv import NO_BLOCK, PagedKv
from kvstore.kernels.quantized_page import QuantizedPage, Scheme

if TYPE_CHECKING:
    from collections.abc import Sequence

LARGEST = 448.0
TILE_TOKENS = 32


def quantize_fp8_reference(
    kv: PagedKv, block_ids: Sequence[int], pages: Sequence[torch.Tensor], blocks_a_page: int
) -> None:
    """What the kernel does, plane by plane, in torch."""
    shape = QuantizedPage.of(kv, Scheme.FP8, blocks_a_page)
    for number, page in enumerate(pages):
        ids = torch.as_tensor(block_ids[number * blocks_a_page : (number + 1) * blocks_a_page])
        page[shape.planes * shape.plane_bytes : shape.scales_at] = 0
        scales = page[shape.scales_at :].view(torch.float32).view(shape.planes, shape.heads)
        codes = page[: shape.planes * shape.plane_bytes].view(shape.planes, shape.heads, -1)
        for plane, source in enumerate(kv.planes):
            x = source[ids].transpose(0, 1).reshape(shape.heads, -1).float()
            scale = x.abs().amax(1) / LARGEST
            safe = torch.where(scale > 0, scale, torch.ones_like(scale))
            small = (x / safe[:, None]).clamp(-LARGEST, LARGEST)
            codes[plane] = small.to(torch.float8_e4m3fn).view(torch.uint8)
            scales[plane] = scale


def dequantize_fp8_reference(
    kv: PagedKv, block_ids: Sequence[int], pages: Sequence[torch.Tensor], blocks_a_page: int
) -> None:
    """What the kernel does, plane by plane, in torch."""
    shape = QuantizedPage.of(kv, Scheme.FP8, blocks_a_page)
    for number, page in enumerate(pages):
        ids = torch.as_tensor(block_ids[number * blocks_a_page : (number + 1) * blocks_a_page])
        wanted = ids != NO_BLOCK
        scales = page[shape.scales_at :].view(torch.float32).view(shape.planes, shape.heads)
        codes = page[: shape.planes * shape.plane_bytes].view(shape.planes, shape.heads, -1)
        for plane, target in enumerate(kv.planes):
            x = codes[plane].view(torch.float8_e4m3fn).float() * scales[plane][:, None]
            blocks = x.to(shape.dtype).reshape(shape.heads, -1, kv.block_tokens, shape.dim)
            target[ids[wanted]] = blocks.transpose(0, 1)[wanted]


@jit
def as_e4m3(x):
    """The e4m3 code of a float32 within [-448, 448], rounded to nearest, ties to even.

    Below 2^-6 the code is x in units of 2^-9: adding 2^14 to a float32 rounds to just these.
    """
    bits = x.to(tl.uint32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - 960
    lifted = size.to(tl.float32, bitcast=True) + 16384.0
    tiny = lifted.to(tl.uint32, bitcast=True) - 0x46800000
    return (tl.where(size < 0x3C800000, tiny, normal) | ((bits >> 24) & 0x80)).to(tl.uint8)


@jit
def of_e4m3(code):
    """The float32 of an e4m3 code; `as_e4m3`'s inverse. The two NaN codes are not produced."""
    size = code.to(tl.uint32) & 0x7F
    normal = (((size >> 3) + 120) << 23) | ((size & 7) << 20)
    tiny = (size.to(tl.float32) * 0.001953125).to(tl.uint32, bitcast=True)
    bits = tl.where(size < 8, tiny, normal) | ((code.to(tl.uint32) & 0x80) << 24)
    return bits.to(tl.float32, bitcast=True)


@jit
def quantize_fp8_kernel(
    addresses,
    pages,
    stride_block,
    stride_head,
    stride_token,
    scales_at,
    PLANES: tl.constexpr,
    HEADS: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    TILE: tl.constexpr,
    KIND: tl.constexpr,
    WORD: tl.constexpr,
):
    """One program: one head of one plane of one page, in two passes over its tokens."""
    number, plane, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    channel = tl.arange(0, DIM_PADDED)
    blocks_a_page: tl.constexpr = PAGE_TOKENS // BLOCK_TOKENS
    page, source, blocks = page_and_plane(addresses, pages, number, PLANES, blocks_a_page, WORD)
    strides = (stride_block, stride_head, stride_token)
    largest = tl.full((TILE, DIM_PADDED), 0.0, tl.float32)
    for start in range(0, PAGE_TOKENS, TILE):
        token = start + tl.arange(0, TILE)
        counts = (token < PAGE_TOKENS)[:, None] & (channel < DIM)[None, :]
        near = tl.minimum(token, PAGE_TOKENS - 1)
        at, _ = tile_in_engine(blocks, strides, near, channel, BLOCK_TOKENS)
        x = as_float(tl.load(source + at, mask=counts, other=0), KIND)
        largest = tl.maximum(largest, tl.abs(x))
    most = tl.full((1,), 0.0, tl.float32) + tl.max(tl.max(largest, 1), 0)
    scale = tl.div_rn(most, tl.full((1,), 448.0, tl.float32))
    where = (page + scales_at).to(tl.pointer_type(tl.float32)) + plane * HEADS + head
    tl.store(where + tl.arange(0, 1), scale)
    safe = tl.broadcast_to(tl.where(scale > 0, scale, 1.0)[:, None], (TILE, DIM_PADDED))
    target = page.to(tl.pointer_type(tl.uint8))
    for start in range(0, PAGE_TOKENS, TILE):
        token = start + tl.arange(0, TILE)
        counts = (token < PAGE_TOKENS)[:, None] & (channel < DIM)[None, :]
        near = tl.minimum(token, PAGE_TOKENS - 1)
        at, _ = tile_in_engine(blocks, strides, near, channel, BLOCK_TOKENS)
        x = tl.div_rn(as_float(tl.load(source + at, mask=counts, other=0), KIND), safe)
        code = as_e4m3(tl.minimum(tl.maximum(x, -448.0), 448.0))
        row = (plane.to(tl.int64) * HEADS + head) * PAGE_TOKENS + token
        tl.store(target + row[:, None] * DIM + channel[None, :], code, mask=counts)


@jit
def dequantize_fp8_kernel(
    addresses,
    pages,
    stride_block,
    stride_head,
    stride_token,
    scales_at,
    PLANES: tl.constexpr,
    HEADS: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    TILE: tl.constexpr,
    KIND: tl.constexpr,
    WORD: tl.constexpr,
):
    """One program: one head of one plane of one page."""
    number, plane, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    channel = tl.arange(0, DIM_PADDED)
    blocks_a_page: tl.constexpr = PAGE_TOKENS // BLOCK_TOKENS
    page, target, blocks = page_and_plane(addresses, pages, number, PLANES, blocks_a_page, WORD)
    strides = (stride_block, stride_head, stride_token)
    scale = tl.load((page + scales_at).to(tl.pointer_type(tl.float32)) + plane * HEADS + head)
    source = page.to(tl.pointer_type(tl.uint8))
    for start in range(0, PAGE_TOKENS, TILE):
        token = start + tl.arange(0, TILE)
        near = tl.minimum(token, PAGE_TOKENS - 1)
        at, block = tile_in_engine(blocks, strides, near, channel, BLOCK_TOKENS)
        counts = ((token < PAGE_TOKENS) & (block >= 0))[:, None] & (channel < DIM)[None, :]
        row = (plane.to(tl.int64) * HEADS + head) * PAGE_TOKENS + token
        place = source + row[:, None] * DIM + channel[None, :]
        x = of_e4m3(tl.load(place, mask=counts, other=0)) * scale
        tl.store(target + at, as_bits(x, KIND).to(WORD, bitcast=True), mask=counts)
