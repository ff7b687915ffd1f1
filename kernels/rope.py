"""RoPE: turn stored keys from the positions they were computed at to other ones, in place.

Rotations compose: R(new) x = R(new - old) R(old) x. So a key is turned by the difference alone, in
float32, with sines and cosines of float64 angles, and rounded once to its dtype: the result differs
from a key computed at the new position by the two roundings to that dtype, and by nothing else. A
model's attention scaling (YaRN) lies in the stored key and stays. What is true of a key says
nothing about deeper layers: reuse away from where text was computed is an approximation.

    pairs    (i, i + half) of the rotated channels (GPT-NeoX, Llama), or (2i, 2i + 1) if interleaved

Reads and writes the rotated channels of each key once, and reads 8 bytes for each token and pair.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from kvstore.kernels.jit import FP_OPTIONS, jit, launches_on, tl
from kvstore.kernels.number_tile import KINDS_OF_FLOAT, as_bits, as_float
from kvstore.kernels.paged_kv import NO_BLOCK, PagedKv, addresses_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray


def rotate_reference(
    kv: PagedKv,
    block_ids: Sequence[int],
    cosines: torch.Tensor,
    sines: torch.Tensor,
    first_channel: int,
    interleaved: bool,
) -> None:
    """What `rotate` does, block by block, in torch; tables: float32 [tokens, pairs]."""
    pairs = cosines.shape[1]
    end = first_channel + 2 * pairs
    if interleaved:
        low, high = slice(first_channel, end, 2), slice(first_channel + 1, end, 2)
    else:
        low = slice(first_channel, first_channel + pairs)
        high = slice(first_channel + pairs, end)
    for number, block in enumerate(block_ids):
        if block == NO_BLOCK:
            continue
        part = slice(number * kv.block_tokens, (number + 1) * kv.block_tokens)
        cos, sin = cosines[part], sines[part]
        for keys in kv.planes[:: kv.kinds]:
            held = keys[block, :, : len(cos)]
            x, y = held[..., low].float(), held[..., high].float()
            turned = x * cos - y * sin, x * sin + y * cos  # both, before either is overwritten
            held[..., low], held[..., high] = (each.to(kv.dtype) for each in turned)


@jit
def rotate_kernel(
    addresses,
    cosines,
    sines,
    tokens,
    stride_block,
    stride_head,
    stride_token,
    FIRST: tl.constexpr,
    KINDS: tl.constexpr,
    PLANES: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    TOKENS_PADDED: tl.constexpr,
    PAIRS: tl.constexpr,
    PAIRS_PADDED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    KIND: tl.constexpr,
    WORD: tl.constexpr,
):
    """One program: one head of the keys of one layer of one block."""
    number, layer, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    block = tl.load(addresses + PLANES + number)
    token = tl.arange(0, TOKENS_PADDED)
    pair = tl.arange(0, PAIRS_PADDED)
    at = number.to(tl.int64) * BLOCK_TOKENS + token
    held = tl.where(block >= 0, BLOCK_TOKENS, 0)
    counts = ((token < held) & (at < tokens))[:, None] & (pair < PAIRS)[None, :]
    table = at[:, None] * PAIRS + pair[None, :]
    cos = tl.load(cosines + table, mask=counts, other=0)
    sin = tl.load(sines + table, mask=counts, other=0)
    keys = tl.load(addresses + layer * KINDS).to(tl.pointer_type(WORD))
    row = block * stride_block + head.to(tl.int64) * stride_head + token * stride_token
    if INTERLEAVED:
        low = keys + row[:, None] + FIRST + 2 * pair[None, :]
        high = low + 1
    else:
        low = keys + row[:, None] + FIRST + pair[None, :]
        high = low + PAIRS
    x = as_float(tl.load(low, mask=counts, other=0), KIND)
    y = as_float(tl.load(high, mask=counts, other=0), KIND)
    turned_x, turned_y = as_bits(x * cos - y * sin, KIND), as_bits(x * sin + y * cos, KIND)
    tl.store(low, turned_x.to(WORD, bitcast=True), mask=counts)
    tl.store(high, turned_y.to(WORD, bitcast=True), mask=counts)


def rotate(
    kv: PagedKv,
    block_ids: Sequence[int] | NDArray[np.integer],
    old_positions: torch.Tensor,
    new_positions: torch.Tensor,
    frequencies: torch.Tensor,
    *,
    first_channel: int = 0,
    interleaved: bool = False,
) -> None:
    """Turn the keys of the tokens of these blocks, in order, from old to new positions.

    positions: integers [tokens], up to all tokens of the blocks; later ones are left alone, and so
    are blocks of NO_BLOCK. frequencies: radians a position [pairs]. Channels [first_channel,
    first_channel + 2 * pairs) are turned. A block may be named once. On a GPU the work is queued
    on the current stream. ValueError, before anything is written, for what does not fit together.
    """
    ids = kv.check_ids(block_ids)
    named = np.sort(ids[ids != NO_BLOCK])
    if (named[1:] == named[:-1]).any():
        raise ValueError("a block is named twice; it would be turned twice")
    tokens, pairs = old_positions.numel(), frequencies.numel()
    if old_positions.shape != new_positions.shape or tokens > len(ids) * kv.block_tokens:
        raise ValueError(
            f"positions of {tuple(old_positions.shape)} and {tuple(new_positions.shape)} for "
            f"{len(ids)} blocks of {kv.block_tokens} tokens"
        )
    if first_channel < 0 or not 1 <= pairs <= (kv.dim - first_channel) // 2:
        raise ValueError(f"{pairs} pairs from channel {first_channel} of {kv.dim}")
    if kv.dtype not in KINDS_OF_FLOAT:
        raise ValueError(f"keys of {kv.dtype} are not turned")
    shift = (new_positions.long() - old_positions.long()).reshape(-1, 1).cpu()
    angles = shift * frequencies.reshape(1, -1).double().cpu()
    cosines, sines = angles.cos().float(), angles.sin().float()
    if launches_on(kv.device, "rotate"):
        launch_blocks(kv, ids, cosines, sines, first_channel, interleaved)
    else:
        rotate_reference(kv, ids.tolist(), cosines, sines, first_channel, interleaved)


def launch_blocks(
    kv: PagedKv,
    ids: NDArray[np.int64],
    cosines: torch.Tensor,
    sines: torch.Tensor,
    first_channel: int,
    interleaved: bool,
) -> None:
    """Queue the kernel on the current stream of the KV's device."""
    if not len(ids) or not len(cosines):
        return
    addresses = torch.cat([addresses_of(kv.planes), torch.from_numpy(ids)])
    if kv.device.type != "cpu":
        addresses, cosines, sines = (
            each.pin_memory().to(kv.device, non_blocking=True)
            for each in (addresses, cosines, sines)
        )
    pairs = cosines.shape[1]
    rotate_kernel[(len(ids), kv.layers, kv.heads)](
        addresses,
        cosines,
        sines,
        len(cosines),
        *kv.planes[0].stride()[:3],
        FIRST=first_channel,
        KINDS=kv.kinds,
        PLANES=len(kv.planes),
        BLOCK_TOKENS=kv.block_tokens,
        TOKENS_PADDED=1 << (kv.block_tokens - 1).bit_length(),
        PAIRS=pairs,
        PAIRS_PADDED=1 << (pairs - 1).bit_length(),
        INTERLEAVED=interleaved,
        KIND=KINDS_OF_FLOAT[kv.dtype],
        WORD=tl.uint16 if kv.dtype.itemsize == 2 else tl.uint32,
        **FP_OPTIONS,
    )
