"""Page bytes <-> KV tensors: the one place that knows how a declared layout lies in memory.

A layout comes from the cache spec and is never guessed from a shape. Bytes are moved as integers
of the same width, so that every dtype, NaN payloads included, comes back bit for bit. Must not be
here: engines, the store, look-ups.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvstore.errors import SpecError
from kvstore.spec import AttentionKind, PageLayout

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from kvstore.spec import CacheSpec

TORCH_DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
_SAME_WIDTH = {2: (torch.int16, np.int16), 4: (torch.int32, np.int32)}


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

    def view(self, page: memoryview) -> NDArray[np.signedinteger]:
        """A page's bytes as integers [layers, 2 (K, V), heads, tokens, dim]; no copy.

        Writable if `page` is. The view lives as long as the memory behind `page`.
        """
        numbers = np.frombuffer(page, dtype=_SAME_WIDTH[self.dtype.itemsize][1])
        if self.layout is PageLayout.LAYER_KV_TOKEN_HEAD_DIM:
            shape = (self.layers, 2, self.page_tokens, self.kv_heads, self.head_dim)
            return numbers.reshape(shape).transpose(0, 1, 3, 2, 4)
        shape = (self.layers, 2, self.kv_heads, self.page_tokens, self.head_dim)
        return numbers.reshape(shape)

    def holds(self, keys: torch.Tensor, values: torch.Tensor) -> bool:
        """Whether [batch, heads, tokens, dim] tensors of one layer are what these pages hold."""
        wanted = (self.kv_heads, self.head_dim)
        return all(
            each.dtype == self.dtype and (each.shape[1], each.shape[3]) == wanted
            for each in (keys, values)
        )


def as_integers(tensor: torch.Tensor) -> NDArray[np.signedinteger]:
    """A CPU tensor's memory as integers of equal width and shape; no copy, strides kept."""
    numbers: NDArray[np.signedinteger] = tensor.view(_SAME_WIDTH[tensor.element_size()][0]).numpy()
    return numbers


def load_pages(
    pages: Sequence[NDArray[np.signedinteger]],
    layer: int,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> None:
    """Copy the first tokens of a chain into one layer's CPU tensors, both [heads, tokens, dim].

    pages: what PageShape.view() gave. tokens may end within the last page: what is left of that
    page is not read.
    """
    targets = as_integers(keys), as_integers(values)
    tokens = keys.shape[1]
    start = 0
    for page in pages:
        count = min(page.shape[3], tokens - start)
        for kind in (0, 1):
            targets[kind][:, start : start + count] = page[layer, kind, :, :count]
        start += count


def store_pages(
    pages: Sequence[NDArray[np.signedinteger]],
    layer: int,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> None:
    """Copy one layer's CPU tensors, both [heads, len(pages) * page_tokens, dim], into pages.

    pages: what PageShape.view() gave of writable memory.
    """
    sources = as_integers(keys), as_integers(values)
    start = 0
    for page in pages:
        stop = start + page.shape[3]
        for kind in (0, 1):
            page[layer, kind] = sources[kind][:, start:stop]
        start = stop
