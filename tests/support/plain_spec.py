"""A small spec of plain keys and values, and tensors of every bit pattern in its shape."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kvstore.spec import (
    CacheSpec,
    KvQuantization,
    LayerGroup,
    PageLayout,
    ShardGeometry,
)

if TYPE_CHECKING:
    import torch

    from kvstore.engine_adapter.layout import PageShape

LAYERS, HEADS, DIM, PAGE_TOKENS = 3, 2, 8, 4
LAYOUTS = [PageLayout.LAYER_KV_HEAD_TOKEN_DIM, PageLayout.LAYER_KV_TOKEN_HEAD_DIM]
DTYPES = ["float32", "float16", "bfloat16"]


def make_spec(
    layout: PageLayout = LAYOUTS[0], dtype: str = "float32", **changes: object
) -> CacheSpec:
    fields: dict[str, Any] = {
        "model": "test",
        "weights": "files:" + "0" * 64,
        "config_digest": "0" * 32,
        "backend": "test",
        "page_format": "plain",
        "kv_dtype": dtype,
        "groups": (LayerGroup.uniform(LAYERS, HEADS, DIM),),
        "rope": "{}",
        "page_tokens": PAGE_TOKENS,
        "layout": layout,
        "quantization": KvQuantization.none(),
        "adapter": "none",
        "geometry": ShardGeometry.single(),
    }
    return CacheSpec(**fields | changes)


def random_tensor(shape: PageShape, tokens: int, seed: int) -> torch.Tensor:
    """Every bit pattern of the dtype may appear, NaN payloads included."""
    import torch  # specs are made where torch is not installed, too

    size = shape.kv_heads * tokens * shape.head_dim * shape.dtype.itemsize
    raw = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
    plain = torch.from_numpy(raw).view(shape.dtype)
    return plain.reshape(shape.kv_heads, tokens, shape.head_dim)
