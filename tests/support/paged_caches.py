"""Small paged KV caches in every arrangement that engines use, filled with known bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvstore.kernels.paged_kv import PagedKv, TokenOrder

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

NHD, HND = TokenOrder.NHD, TokenOrder.HND


@dataclass(frozen=True)
class Sizes:
    """Numbers of a cache."""

    layers: int = 2
    blocks: int = 6
    tokens: int = 4
    heads: int = 3
    dim: int = 10


def bits(shape: Sequence[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Any bits, NaN payloads included: what moves bytes must not care."""
    rng = torch.Generator().manual_seed(seed)
    size = [*shape[:-1], shape[-1] * dtype.itemsize]
    return torch.randint(0, 256, size, dtype=torch.uint8, generator=rng).view(dtype)


def numbers(shape: Sequence[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Finite numbers as KV has them: channels of very different size, some zeros of both signs."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=rng) * torch.randn(shape[-1], generator=rng).exp()
    x[torch.rand(*shape, generator=rng) < 0.05] = 0.0
    x[torch.rand(*shape, generator=rng) < 0.05] = -0.0
    return x.to(dtype)


def apart_nhd(s: Sizes, dtype: torch.dtype, fill: Callable[..., torch.Tensor]) -> PagedKv:
    """Keys and values in tensors of their own, [blocks, tokens, heads, dim]."""
    made = [fill((s.blocks, s.tokens, s.heads, s.dim), dtype, n) for n in range(2 * s.layers)]
    return PagedKv.apart(made[::2], made[1::2], NHD)


def apart_hnd(s: Sizes, dtype: torch.dtype, fill: Callable[..., torch.Tensor]) -> PagedKv:
    """Keys and values in tensors of their own, [blocks, heads, tokens, dim]."""
    made = [fill((s.blocks, s.heads, s.tokens, s.dim), dtype, n) for n in range(2 * s.layers)]
    return PagedKv.apart(made[::2], made[1::2], HND)


def together_first(s: Sizes, dtype: torch.dtype, fill: Callable[..., torch.Tensor]) -> PagedKv:
    """[2, blocks, tokens, heads, dim] a layer, as FlashAttention's."""
    shape = (2, s.blocks, s.tokens, s.heads, s.dim)
    return PagedKv.together([fill(shape, dtype, n) for n in range(s.layers)], NHD, 0)


def together_second(s: Sizes, dtype: torch.dtype, fill: Callable[..., torch.Tensor]) -> PagedKv:
    """[blocks, 2, heads, tokens, dim] a layer, as FlashInfer's."""
    shape = (s.blocks, 2, s.heads, s.tokens, s.dim)
    return PagedKv.together([fill(shape, dtype, n) for n in range(s.layers)], HND, 1)


def latent(s: Sizes, dtype: torch.dtype, fill: Callable[..., torch.Tensor]) -> PagedKv:
    """MLA: [blocks, tokens, dim] a layer."""
    shape = (s.blocks, s.tokens, s.dim)
    return PagedKv.latent([fill(shape, dtype, n) for n in range(s.layers)])


def cross_layer(s: Sizes, dtype: torch.dtype, fill: Callable[..., torch.Tensor]) -> PagedKv:
    """One tensor for all, [blocks, layers, 2, heads, tokens, dim]."""
    shape = (s.blocks, s.layers, 2, s.heads, s.tokens, s.dim)
    return PagedKv.cross_layer(fill(shape, dtype, 1), 1, HND, 1)


def strided(s: Sizes, dtype: torch.dtype, fill: Callable[..., torch.Tensor]) -> PagedKv:
    """Keys and values as views of larger tensors: gaps between blocks, heads, tokens and rows."""
    shape = (s.blocks * 2, s.heads + 1, s.tokens + 2, s.dim + 6)
    made = [fill(shape, dtype, n) for n in range(2 * s.layers)]
    part = [t[1::2, 1:, 1 : 1 + s.tokens, 2 : 2 + s.dim] for t in made]
    return PagedKv.apart(part[::2], part[1::2], HND)


ARRANGEMENTS = [
    apart_nhd,
    apart_hnd,
    together_first,
    together_second,
    latent,
    cross_layer,
    strided,
]


def empty_like(kv: PagedKv) -> PagedKv:
    """A cache of that shape with other memory, dense, all zeros."""
    return PagedKv(
        tuple(torch.zeros_like(p, memory_format=torch.contiguous_format) for p in kv.planes),
        kv.kinds,
    )


def same_bits(a: PagedKv, b: PagedKv) -> bool:
    """Whether two caches hold the same bits, NaNs compared as bits."""
    return all(
        torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8))
        for x, y in zip(a.planes, b.planes, strict=True)
    )
