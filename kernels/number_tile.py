"""What the kernels that look at numbers share: floats as bits, and a tile of the engine's memory.

Bits of each float dtype become float32 and back by integer arithmetic, rounding to nearest, ties to
even, on every machine alike. Must not be here: kernels, launches.
"""

from __future__ import annotations

import torch

from kvstore.kernels.jit import jit, tl

KINDS_OF_FLOAT = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}


@jit
def as_float(bits, KIND: tl.constexpr):
    """float32 of an integer's bits. KIND: 0 bfloat16, 1 float16, 2 float32."""
    if KIND == 0:
        x = (bits.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    elif KIND == 1:
        x = bits.to(tl.float16, bitcast=True).to(tl.float32)
    else:
        x = bits.to(tl.float32, bitcast=True)
    return x


@jit
def as_bits(x, KIND: tl.constexpr):
    """A float32 rounded to nearest, ties to even, as an integer's bits; `as_float`'s inverse."""
    if KIND == 0:
        wide = x.to(tl.uint32, bitcast=True)
        rounded = (wide + 0x7FFF + ((wide >> 16) & 1)) >> 16
        bits = tl.where(x == x, rounded, 0x7FC0).to(tl.uint16)
    elif KIND == 1:
        bits = x.to(tl.float16).to(tl.uint16, bitcast=True)
    else:
        bits = x.to(tl.uint32, bitcast=True)
    return bits


@jit
def page_and_plane(
    addresses, pages, number, PLANES: tl.constexpr, BLOCKS: tl.constexpr, WORD: tl.constexpr
):
    """Of this program: its page's address, its plane in words, where its page's block ids begin.

    addresses: of planes, then of pages, then the block ids of each page.
    """
    page = tl.load(addresses + PLANES + number)
    plane = tl.load(addresses + tl.program_id(1)).to(tl.pointer_type(WORD))
    return page, plane, addresses + PLANES + pages + number.to(tl.int64) * BLOCKS


@jit
def tile_in_engine(blocks, strides, token, channel, BLOCK_TOKENS: tl.constexpr):
    """Places of [token, channel] of this program's plane and head, in words, and their blocks.

    blocks: where the ids of the page's blocks begin. strides: of a block, a head, a token.
    """
    block = tl.load(blocks + token // BLOCK_TOKENS)
    rows = block * strides[0] + (token % BLOCK_TOKENS) * strides[2]
    rows += tl.program_id(2).to(tl.int64) * strides[1]
    return rows[:, None] + channel[None, :], block
