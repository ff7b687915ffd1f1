"""What a page of plain keys and values holds: its numbers, and tensors seen as pages of it.

A layout comes from the cache spec and is never guessed from a shape. How bytes move between the two
is page_copier.py's. Must not be here: engines, the store, look-ups.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from kvstore.errors import SpecError
from kvstore.kernels.paged_kv import PagedKv, TokenOrder
from kvstore.spec import AttentionKind, PageLayout

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.spec import CacheSpec

LayerKv: TypeAlias = "tuple[torch.Tensor, torch.Tensor]"  # keys and values
TORCH_DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


@dataclass(frozen=True, slots=True)
class PageShape:
    """One page of equal layers with separate keys and values, both [heads, tokens, dim] a layer."""

    layout: PageLayout
    layers: int
    kv_heads: int
    page_tokens: int
    head_dim: int
    dtype: torch.dtype

    @classmethod
    def of(cls, spec: CacheSpec) -> PageShape:
        """The shape that a spec declares; SpecError when its pages are not plain K and V."""
        if spec.layout not in (
            PageLayout.LAYER_KV_HEAD_TOKEN_DIM,
            PageLayout.LAYER_KV_TOKEN_HEAD_DIM,
        ):
            raise SpecError(f"layout: {spec.layout} has no plain key and value tensors")
        if spec.kv_dtype not in TORCH_DTYPES:
            raise SpecError(f"kv_dtype: {spec.kv_dtype} is not one of {', '.join(TORCH_DTYPES)}")
        if len(spec.shard_ranges()) != 1:
            raise SpecError("geometry: pages of several shards are not plain tensors")
        group = spec.groups[0]
        if len(spec.groups) != 1 or group.attention is not AttentionKind.FULL:
            raise SpecError("groups: one group of full-attention layers is needed")
        if group.key_dim != group.value_dim:
            raise SpecError(f"groups[0]: key_dim {group.key_dim}, value_dim {group.value_dim}")
        return cls(
            spec.layout,
            spec.layers,
            group.kv_heads,
            spec.page_tokens,
            group.key_dim,
            TORCH_DTYPES[spec.kv_dtype],
        )

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        values = self.layers * 2 * self.kv_heads * self.page_tokens * self.head_dim
        return values * self.dtype.itemsize

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer in a page: they follow each other, layer by layer."""
        return self.page_bytes // self.layers

    @property
    def order(self) -> TokenOrder:
        """The order of heads and tokens in a layer's keys, or values."""
        if self.layout is PageLayout.LAYER_KV_TOKEN_HEAD_DIM:
            return TokenOrder.NHD
        return TokenOrder.HND

    def paged(self, layers: Sequence[LayerKv]) -> PagedKv:
        """Keys and values of some layers, each [heads, tokens of whole pages, dim], page by page.

        A block is a page's tokens; no copy. ValueError for layers that lie in different ways.
        """
        planes: list[Any] = [each for pair in layers for each in pair]  # unflatten is untyped
        blocks = [each.unflatten(1, (-1, self.page_tokens)).transpose(0, 1) for each in planes]
        return PagedKv(tuple(blocks), 2)

    def holds(self, keys: torch.Tensor, values: torch.Tensor) -> bool:
        """Whether [batch, heads, tokens, dim] tensors of one layer are what these pages hold."""
        wanted = (self.kv_heads, self.head_dim)
        return all(
            each.dtype == self.dtype and (each.shape[1], each.shape[3]) == wanted
            for each in (keys, values)
        )
