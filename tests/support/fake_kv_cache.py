"""KV memory as vLLM 0.32 makes it: one int8 buffer, a 4-D view a layer. No vLLM is needed."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

ORDERS = {  # which logical axis of [layers, blocks, heads, tokens, content] is where in memory
    "LBHNC": (0, 1, 2, 3, 4),
    "LBNHC": (0, 1, 3, 2, 4),
    "LHBNC": (0, 2, 1, 3, 4),
    "BLHNC": (1, 0, 2, 3, 4),
    "BLNHC": (1, 0, 3, 2, 4),
    "BHLNC": (1, 2, 0, 3, 4),
}


@dataclass(frozen=True)
class FullAttentionSpec:
    """What the adapter reads of vLLM's class of this name."""

    block_size: int = 8
    num_heads: int = 3
    head_size: int = 4
    item_bytes: int = 2

    @property
    def num_kv_heads(self) -> int:
        return self.num_heads

    @property
    def content(self) -> int:
        return 2 * self.head_size

    @property
    def page_size_bytes(self) -> int:
        return self.block_size * self.num_heads * self.content * self.item_bytes


@dataclass(frozen=True)
class MambaSpec(FullAttentionSpec):
    """A kind that is not served."""


@dataclass
class FakeCache:
    """Views by layer, and the configuration that declares them."""

    kv_caches: dict[str, torch.Tensor]
    config: Any
    vllm_config: Any
    raw: torch.Tensor = field(repr=False)


def make_cache(
    layers: int = 5,
    blocks: int = 12,
    layout: str = "LBHNC",
    *,
    specs: tuple[Any, ...] = (FullAttentionSpec(),),
    ratio: int = 1,
    tp: int = 1,
    replicas: int = 1,
    seed: int = 0,
) -> FakeCache:
    """Each of `specs` has `layers` layers of its own, one after the other in one buffer."""
    sizes = [layers * blocks * spec.page_size_bytes for spec in specs]
    noise = np.random.default_rng(seed).integers(0, 256, sum(sizes), np.uint8)
    raw = torch.from_numpy(noise).view(torch.int8)
    caches: dict[str, torch.Tensor] = {}
    tensors, by_layer, at = [], {}, 0
    for number, spec in enumerate(specs):
        names = [f"model.layers.{number}.{layer}.attn" for layer in range(layers)]
        shape = (layers, blocks, spec.num_heads, spec.block_size, spec.content * spec.item_bytes)
        strides = [0] * 5
        stride = 1
        for axis in reversed(ORDERS[layout]):
            strides[axis] = stride
            stride *= shape[axis]
        view = raw.as_strided(shape, strides, at)
        for layer, name in enumerate(names):
            caches[name] = split_blocks(view[layer], ratio).view(torch.int16)
        tensors.append(
            SimpleNamespace(
                size=len(raw),
                layers=names,
                layer_stride=strides[0],
                block_stride=strides[1],
                offset=at,
            )
        )
        by_layer |= dict.fromkeys(names, spec)
        at += sizes[number]
    group_spec = specs[0]
    if len(specs) > 1:
        group_spec = SimpleNamespace(kv_cache_specs=by_layer, block_size=specs[0].block_size)
    group = SimpleNamespace(layer_names=list(by_layer), kv_cache_spec=group_spec)
    config = SimpleNamespace(
        num_blocks=blocks,
        kv_cache_tensors=tensors,
        kv_cache_groups=[group],
        kv_cache_layout=layout,
        kv_tp_replicas=replicas,
    )
    return FakeCache(caches, config, make_config(tp), raw)


def make_config(tp: int = 1) -> Any:
    """As much of a VllmConfig as is read without vLLM; the device is none."""
    return SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=tp, pipeline_parallel_size=1),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        model_config=SimpleNamespace(dtype="bfloat16"),
        device_config=SimpleNamespace(device_type="fake"),
    )


def split_blocks(view: torch.Tensor, ratio: int) -> torch.Tensor:
    """A layer's [blocks, heads, tokens, bytes] as the kernel sees it, in smaller blocks."""
    if ratio == 1:
        return view
    blocks, heads, tokens, size = view.shape
    shape = (blocks * ratio, heads, tokens // ratio, size)
    piece = view.stride(0) // ratio
    strides = (piece, tokens // ratio * size, size, 1)
    return view.as_strided(shape, strides, view.storage_offset())
