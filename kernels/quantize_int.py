"""int8 and int4, fused: gather + quantize into pages, dequantize + scatter into blocks (KIVI).

Keys are quantized per channel over groups of tokens, values per token over groups of channels
(KIVI, arXiv 2402.02750): a few channels of keys are large for all tokens. A group's code is
floor((x - minimum) / scale + 1/2), its value minimum + code * scale, in float32, where the scale is
(maximum - minimum) / 255 or 15, rounded to the KV's dtype. Pages: quantized_page.py.

Quantizing n numbers of b bytes reads n * b bytes once and writes n (int8) or n / 2 (int4) bytes of
codes and 2 * b bytes for each group of up to 32; dequantizing moves the same the other way. Only
whole pages are quantized: what a last, partial page holds stays as it is in the engine. A group
with a number that is not finite comes back as numbers that are not finite.
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

TILE_VALUES_A_WARP = 2048  # 64 a thread; more would not stay in registers


def quantize_reference(
    kv: PagedKv,
    block_ids: Sequence[int],
    pages: Sequence[torch.Tensor],
    scheme: Scheme,
    blocks_a_page: int,
) -> None:
    """What the kernel does, plane by plane, in torch."""
    shape = QuantizedPage.of(kv, scheme, blocks_a_page)
    for number, page in enumerate(pages):
        ids = torch.as_tensor(block_ids[number * blocks_a_page : (number + 1) * blocks_a_page])
        page[shape.planes * shape.plane_bytes : shape.scales_at] = 0
        scales, minima = _parameters(page, shape)
        at = 0
        for plane, source in enumerate(kv.planes):
            x = source[ids].transpose(0, 1).reshape(shape.heads, shape.tokens, shape.dim).float()
            groups, axis = _grouped(x, shape, plane)
            # Of 0.0 and -0.0, which one is found differs by machine; adding 0.0 makes both 0.0.
            low = groups.amin(axis, keepdim=True) + 0.0
            high = groups.amax(axis, keepdim=True) + 0.0
            scale = ((high - low) / (2**scheme.bits - 1)).to(shape.dtype)
            wide = scale.float()
            safe = torch.where(wide > 0, wide, torch.ones_like(wide))
            codes = ((groups - low) / safe + 0.5).floor().clamp(0, 2**scheme.bits - 1)
            codes = torch.where(wide > 0, codes, torch.zeros_like(codes))
            codes = codes.reshape(-1).to(torch.uint8)
            if scheme is Scheme.INT4:
                codes = codes[::2] | codes[1::2] << 4
            page[plane * shape.plane_bytes : (plane + 1) * shape.plane_bytes] = codes
            end = at + shape.scales_of(plane)
            scales[at:end] = scale.reshape(-1)
            minima[at:end] = low.reshape(-1).to(shape.dtype)
            at = end


def dequantize_reference(
    kv: PagedKv,
    block_ids: Sequence[int],
    pages: Sequence[torch.Tensor],
    scheme: Scheme,
    blocks_a_page: int,
) -> None:
    """What the kernel does, plane by plane, in torch."""
    shape = QuantizedPage.of(kv, scheme, blocks_a_page)
    for number, page in enumerate(pages):
        ids = torch.as_tensor(block_ids[number * blocks_a_page : (number + 1) * blocks_a_page])
        wanted = ids != NO_BLOCK
        scales, minima = _parameters(page, shape)
        at = 0
        for plane, target in enumerate(kv.planes):
            codes = page[plane * shape.plane_bytes : (plane + 1) * shape.plane_bytes]
            if scheme is Scheme.INT4:
                codes = torch.stack([codes & 15, codes >> 4], 1).reshape(-1)
            x = codes.reshape(shape.heads, shape.tokens, shape.dim).float()
            groups, axis = _grouped(x, shape, plane)
            form = [1 if i == axis else n for i, n in enumerate(groups.shape)]
            end = at + shape.scales_of(plane)
            scale = scales[at:end].float().reshape(form)
            low = minima[at:end].float().reshape(form)
            blocks = (low + groups * scale).to(shape.dtype)
            blocks = blocks.reshape(shape.heads, -1, kv.block_tokens, shape.dim).transpose(0, 1)
            target[ids[wanted]] = blocks[wanted]
            at = end


@jit
def store_group(
    page,
    scales_at,
    minima_at,
    at,
    kept,
    low,
    high,
    BITS: tl.constexpr,
    KIND: tl.constexpr,
    WORD: tl.constexpr,
):
    """Write the scale and the minimum of each group; the scale as it was rounded."""
    steps = tl.full(low.shape, (1 << BITS) - 1, tl.float32)
    bits = as_bits(tl.div_rn(high - low, steps), KIND)
    pointer: tl.constexpr = tl.pointer_type(WORD)
    tl.store((page + scales_at).to(pointer) + at, bits.to(WORD, bitcast=True), kept)
    below = as_bits(low, KIND).to(WORD, bitcast=True)
    tl.store((page + minima_at).to(pointer) + at, below, kept)
    return as_float(bits, KIND)


@jit
def codes_of(x, low, scale, BITS: tl.constexpr):
    """floor((x - low) / scale + 1/2) within the codes; 0 where the scale is 0. All of one shape."""
    steps = tl.div_rn(x - low, tl.where(scale > 0, scale, 1.0))
    codes = tl.where(scale > 0, tl.floor(steps + 0.5), 0.0)
    return tl.minimum(tl.maximum(codes, 0.0), (1 << BITS) - 1).to(tl.int32)


@jit
def store_codes(target, row, codes, DIM: tl.constexpr, BITS: tl.constexpr):
    """Write the codes [tokens, channels] of rows of DIM, two to a byte if BITS is 4."""
    if BITS == 4:
        half: tl.constexpr = codes.shape[1] // 2
        even, odd = tl.split(tl.reshape(codes, (codes.shape[0], half, 2)))
        code = even | (odd << 4)
    else:
        code = codes
    width: tl.constexpr = DIM * BITS // 8
    byte = tl.arange(0, code.shape[1])
    at = row[:, None] * width + byte[None, :]
    kept = (byte < width)[None, :] & (row >= 0)[:, None]
    tl.store(target + at, code.to(tl.uint8), kept)


@jit
def value_codes(
    page,
    scales_at,
    minima_at,
    at,
    x,
    PARTS: tl.constexpr,
    CHANNELS: tl.constexpr,
    BITS: tl.constexpr,
    KIND: tl.constexpr,
    WORD: tl.constexpr,
):
    """Codes of [tokens, channels] by groups of channels; a row's parameters lie from `at` on."""
    split: tl.constexpr = x.shape[1] // CHANNELS
    groups = tl.reshape(x, (x.shape[0], split, CHANNELS))
    low, high = tl.min(groups, 2) + 0.0, tl.max(groups, 2) + 0.0
    part = tl.arange(0, split)
    place = at[:, None] + part[None, :]
    kept = (part < PARTS)[None, :] & (at >= 0)[:, None]
    scale = store_group(page, scales_at, minima_at, place, kept, low, high, BITS, KIND, WORD)
    wide_low = tl.broadcast_to(low[:, :, None], groups.shape)
    wide_scale = tl.broadcast_to(scale[:, :, None], groups.shape)
    return tl.reshape(codes_of(groups, wide_low, wide_scale, BITS), x.shape)


@jit
def tile_of_program(
    addresses,
    pages,
    strides,
    PLANES: tl.constexpr,
    KINDS: tl.constexpr,
    HEADS: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    GROUP: tl.constexpr,
    CHANNELS: tl.constexpr,
    WORD: tl.constexpr,
):
    """What one program works on: a group of tokens of one head of one plane of one page.

    The page's address and the plane's; places of [token, channel] in it, and which of them count;
    rows of codes [token]; which parameters are a channel's, if these are keys, and the first of a
    token's, if they are values.
    """
    groups: tl.constexpr = PAGE_TOKENS // GROUP
    blocks_a_page: tl.constexpr = PAGE_TOKENS // BLOCK_TOKENS
    parts: tl.constexpr = DIM // CHANNELS
    keys: tl.constexpr = (KINDS - 1) * HEADS * groups * DIM
    values: tl.constexpr = HEADS * PAGE_TOKENS * parts
    number, group = tl.program_id(0) // groups, tl.program_id(0) % groups
    plane, head = tl.program_id(1), tl.program_id(2)
    token = group * GROUP + tl.arange(0, GROUP)
    channel = tl.arange(0, DIM_PADDED)
    page, memory, blocks = page_and_plane(addresses, pages, number, PLANES, blocks_a_page, WORD)
    place, block = tile_in_engine(blocks, strides, token, channel, BLOCK_TOKENS)
    counts = (channel < DIM)[None, :] & (block >= 0)[:, None]
    row = (plane.to(tl.int64) * HEADS + head) * PAGE_TOKENS + token
    first = plane // KINDS * (keys + values)
    of_channel = first + (head * groups + group) * DIM + channel
    of_token = first + keys + (head * PAGE_TOKENS + token) * parts
    return page, memory, place, counts, row, of_channel, of_token


@jit
def quantize_kernel(
    addresses,
    pages,
    stride_block,
    stride_head,
    stride_token,
    scales_at,
    minima_at,
    PLANES: tl.constexpr,
    KINDS: tl.constexpr,
    HEADS: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    GROUP: tl.constexpr,
    CHANNELS: tl.constexpr,
    BITS: tl.constexpr,
    KIND: tl.constexpr,
    WORD: tl.constexpr,
):
    """One program: tile_of_program's."""
    strides = (stride_block, stride_head, stride_token)
    page, source, place, counts, row, of_channel, of_token = tile_of_program(
        addresses, pages, strides, PLANES, KINDS, HEADS, PAGE_TOKENS, BLOCK_TOKENS, DIM,
        DIM_PADDED, GROUP, CHANNELS, WORD,
    )  # fmt: skip
    x = as_float(tl.load(source + place, mask=counts, other=0), KIND)
    if KINDS == 2 and tl.program_id(1) % 2 == 0:
        low, high = tl.min(x, 0) + 0.0, tl.max(x, 0) + 0.0
        kept = tl.arange(0, DIM_PADDED) < DIM
        scale = store_group(
            page, scales_at, minima_at, of_channel, kept, low, high, BITS, KIND, WORD
        )
        wide_low = tl.broadcast_to(low[None, :], (GROUP, DIM_PADDED))
        wide_scale = tl.broadcast_to(scale[None, :], (GROUP, DIM_PADDED))
        codes = codes_of(x, wide_low, wide_scale, BITS)
    else:
        parts: tl.constexpr = DIM // CHANNELS
        codes = value_codes(
            page, scales_at, minima_at, of_token, x, parts, CHANNELS, BITS, KIND, WORD
        )
    store_codes(page.to(tl.pointer_type(tl.uint8)), row, codes, DIM, BITS)


@jit
def dequantize_kernel(
    addresses,
    pages,
    stride_block,
    stride_head,
    stride_token,
    scales_at,
    minima_at,
    PLANES: tl.constexpr,
    KINDS: tl.constexpr,
    HEADS: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    GROUP: tl.constexpr,
    CHANNELS: tl.constexpr,
    BITS: tl.constexpr,
    KIND: tl.constexpr,
    WORD: tl.constexpr,
):
    """One program: tile_of_program's."""
    strides = (stride_block, stride_head, stride_token)
    page, target, place, counts, row, of_channel, of_token = tile_of_program(
        addresses, pages, strides, PLANES, KINDS, HEADS, PAGE_TOKENS, BLOCK_TOKENS, DIM,
        DIM_PADDED, GROUP, CHANNELS, WORD,
    )  # fmt: skip
    channel = tl.arange(0, DIM_PADDED)
    at = of_token[:, None] + channel[None, :] // CHANNELS
    if KINDS == 2 and tl.program_id(1) % 2 == 0:
        at = tl.broadcast_to(of_channel[None, :], (GROUP, DIM_PADDED))
    word: tl.constexpr = tl.pointer_type(WORD)
    scale = as_float(tl.load((page + scales_at).to(word) + at, mask=counts, other=0), KIND)
    low = as_float(tl.load((page + minima_at).to(word) + at, mask=counts, other=0), KIND)
    source = page.to(tl.pointer_type(tl.uint8)) + row[:, None] * (DIM * BITS // 8)
    code = tl.load(source + channel[None, :] * BITS // 8, mask=counts, other=0).to(tl.int32)
    if BITS == 4:
        code = (code >> (4 * (channel % 2)[None, :])) & 15
    bits = as_bits(low + code.to(tl.float32) * scale, KIND)
    tl.store(target + place, bits.to(WORD, bitcast=True), mask=counts)


def _parameters(page: torch.Tensor, shape: QuantizedPage) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and minima of a page in memory; no copy."""
    numbers = page[shape.scales_at :].view(shape.dtype)
    return numbers[: shape.scales], numbers[shape.scales :]


def _grouped(x: torch.Tensor, shape: QuantizedPage, plane: int) -> tuple[torch.Tensor, int]:
    """[heads, tokens, dim] with its groups on an axis of their own, and that axis."""
    if shape.kinds == 2 and plane % 2 == 0:
        return x.reshape(shape.heads, -1, shape.token_group, shape.dim), 2
    return x.reshape(shape.heads, shape.tokens, -1, shape.channel_group), 3
