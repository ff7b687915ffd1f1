"""Where an engine's blocks lie in memory, and the order in which a page of the store holds them.

One rank's part of a page is, for each layer in turn and each run of bytes that a layer's block is
made of, that run of each of the page's blocks. What lies inside a run is the engine's business
(`page_format` names it): blocks are moved whole. Invariant: what was declared is compared with the
tensors' strides before the first byte is copied; a layout that is not understood is refused with
one line. Must not be here: requests, jobs, copies.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kvstore.page_layout import ShardGeometry, place_shards

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

# Blocks of these kinds are full once their tokens are computed, and stay until they are freed.
SERVED_KINDS = frozenset({"FullAttentionSpec", "MLAAttentionSpec"})
# Blocks of these are given up as the window moves on; vLLM can keep them all instead.
WINDOWED_KINDS = frozenset({"SlidingWindowSpec", "ChunkedLocalAttentionSpec"})
# A layer's block is one run of bytes; in the last two, a run a head.
SERVED_LAYOUTS = frozenset({"LBHNC", "LBNHC", "BLHNC", "BLNHC", "LHBNC", "BHLNC"})
FORMAT_VERSION = 1


class LayoutProblem(ValueError):
    """Blocks that cannot be served; the message is the line for the user."""


@dataclass(frozen=True, slots=True)
class RegionFacts:
    """What one rank's part of a page is. `problem`: why there is no service, "" if there is.

    `shard_bytes` are those of a page of as many blocks as were asked for; `replicas` neighbouring
    tensor ranks hold equal bytes.
    """

    shard_bytes: int = 0
    page_format: str = ""
    problem: str = ""
    block_bytes: int = 0
    block_tokens: int = 0
    replicas: int = 1

    def for_pages(self, blocks_per_page: int) -> RegionFacts:
        """The same for pages of so many blocks."""
        return replace(self, shard_bytes=self.block_bytes * blocks_per_page)


@dataclass(frozen=True, slots=True)
class PageShard:
    """One rank's part of each page: [offset, offset + size_bytes), of `blocks` blocks.

    `writes`: whether this rank saves it; of ranks with equal bytes only the lowest does.
    """

    offset: int
    size_bytes: int
    blocks: int
    page_bytes: int
    writes: bool

    @classmethod
    def of_rank(cls, facts: RegionFacts, blocks: int, tp: int, rank: int) -> PageShard:
        """As CacheSpec.shard_of() says it for `tp` tensor ranks whose parts are declared equal."""
        size = facts.block_bytes * blocks
        placed = place_shards([size] * (tp // facts.replicas), ShardGeometry(1, 1, tp))
        mine = placed[rank // facts.replicas]
        page_bytes = placed[-1].offset + placed[-1].size_bytes
        return cls(mine.offset, size, blocks, page_bytes, mine.tp == rank)


@dataclass(frozen=True, slots=True)
class Region:
    """Layers whose blocks lie at constant strides: bytes [layers, runs, blocks, run_bytes].

    `tensor` is a view of the engine's own memory as uint8, on whatever device it is. A block of a
    layer is one run, but for K and V that lie apart, or heads. `split`: kernel blocks in a block.
    """

    layers: tuple[str, ...]
    tensor: Any
    split: int = 1

    @property
    def blocks(self) -> int:
        return int(self.tensor.shape[2])

    @property
    def block_bytes(self) -> int:
        """Of one block of all these layers."""
        layers, runs, _, run_bytes = self.tensor.shape
        return int(layers * runs * run_bytes)


def facts_from_config(
    vllm_config: Any,
    kv_cache_config: Any,
    blocks_per_page: int = 1,
    *,
    inside: Callable[[Any, Any], str] | None = None,
) -> RegionFacts:
    """What the engine's configuration says, in whichever process it is asked.

    `inside(vllm_config, layer's spec)` names what decides the bytes within a block; vLLM is asked
    unless it is given.
    """
    try:
        declared = _declared(vllm_config, kv_cache_config, inside or _inside_a_block)
    except LayoutProblem as exc:
        return RegionFacts(problem=str(exc))
    return declared.for_pages(blocks_per_page)


def find_regions(kv_caches: Mapping[str, Any], kv_cache_config: Any) -> list[Region]:
    """The regions of the tensors that the engine registered; LayoutProblem.

    `kv_caches`: one view a layer, [blocks x kernel blocks, ...], all in one or few storages.
    """
    blocks = int(kv_cache_config.num_blocks)
    entries = _layer_entries(kv_cache_config)
    named = [layer for entry in entries for layer in entry.layers]
    missing = [layer for layer in named if layer not in kv_caches]
    if missing:
        raise LayoutProblem(f"layers {missing[:3]} have no KV tensor among {len(kv_caches)}")
    regions = [region for entry in entries for region in _regions(entry, kv_caches, blocks)]
    covered = {_place(kv_caches[layer], layer) for layer in named}
    alone = [layer for layer in kv_caches if _place(kv_caches[layer], layer) not in covered]
    if alone:
        raise LayoutProblem(f"KV tensors {alone[:3]} belong to no group of the KV cache")
    return regions


def difference(facts: RegionFacts, regions: Sequence[Region]) -> str:
    """ "" when the tensors are what was declared; else the line that says how they differ."""
    found = sum(region.block_bytes for region in regions)
    if found != facts.block_bytes:
        return f"a block has {found} bytes in the tensors, {facts.block_bytes} were declared"
    for region in regions:
        if region.split > 1:
            return (
                f"the attention kernel splits each block in {region.split}; set --block-size to "
                f"{facts.block_tokens // region.split}"
            )
    return ""


@dataclass(frozen=True, slots=True)
class _Entry:
    """Layers of equal shape as the engine declares them; strides are None where it does not."""

    layers: tuple[str, ...]
    layer_stride: int | None = None
    block_stride: int | None = None


def _layer_entries(kv_cache_config: Any) -> list[_Entry]:
    entries = []
    for tensor in kv_cache_config.kv_cache_tensors:
        layers = getattr(tensor, "layers", None)
        if layers is None:  # before vLLM 0.30: a tensor a layer, or shared by a layer a group
            layers = tensor.shared_by[:1]
        strides = getattr(tensor, "layer_stride", None), getattr(tensor, "block_stride", None)
        entries.append(_Entry(tuple(layers), *strides))
    return entries


def _place(tensor: Any, layer: str) -> tuple[int, int]:
    """Storage and byte offset in it: equal for layers that share their KV."""
    if not hasattr(tensor, "untyped_storage"):
        raise LayoutProblem(f"layer {layer} has {type(tensor).__name__}, not one tensor, as KV")
    return tensor.untyped_storage().data_ptr(), tensor.storage_offset() * tensor.element_size()


def _regions(entry: _Entry, kv_caches: Mapping[str, Any], blocks: int) -> Iterator[Region]:
    """An entry's layers as one region; without declared strides, a region a layer."""
    places = [_place(kv_caches[layer], layer) for layer in entry.layers]
    shapes = {_block_shape(kv_caches[layer], layer, blocks) for layer in entry.layers}
    if len({storage for storage, _ in places}) > 1 or len(shapes) > 1:
        raise LayoutProblem(f"the layers of {entry.layers[0]} do not lie in one tensor alike")
    [found] = shapes
    if entry.block_stride is not None and found.block_stride != entry.block_stride:
        raise LayoutProblem(
            f"blocks of {entry.layers[0]} lie {found.block_stride} bytes apart, "
            f"{entry.block_stride} were declared"
        )
    first = places[0][1]
    step = entry.layer_stride if entry.layer_stride is not None else 0
    if entry.layer_stride is None and len(places) > 1:
        step = places[1][1] - first
    if any(at != first + number * step for number, (_, at) in enumerate(places)):
        raise LayoutProblem(f"the layers of {entry.layers[0]} do not lie {step} bytes apart")
    flat = _bytes_of(kv_caches[entry.layers[0]])
    shape = (len(places), found.runs, blocks, found.run_bytes)
    strides = (step, found.run_stride, found.block_stride, 1)
    ends = [(size - 1) * stride for size, stride in zip(shape, strides, strict=True)]
    if step < 0 or first + sum(ends) >= flat.numel():
        raise LayoutProblem(f"the layers of {entry.layers[0]} reach beyond their tensor")
    yield Region(entry.layers, flat.as_strided(shape, strides, first), found.split)


@dataclass(frozen=True, slots=True)
class _BlockShape:
    """How a layer's blocks lie: `runs` of `run_bytes`, `run_stride` apart; all in bytes."""

    runs: int
    run_bytes: int
    run_stride: int
    block_stride: int
    split: int


def _block_shape(tensor: Any, layer: str, blocks: int) -> _BlockShape:
    """Read from strides; LayoutProblem unless a block is one run, or runs at one distance."""
    shape, strides, item = tuple(tensor.shape), tuple(tensor.stride()), tensor.element_size()
    axis = 1 if len(shape) == 5 and shape[0] == 2 and shape[1] % blocks == 0 else 0
    if not shape or shape[axis] % blocks or shape[axis] == 0:
        raise LayoutProblem(f"layer {layer} has shape {list(shape)} for {blocks} blocks")
    inside = sorted(
        (stride, size)
        for place, (stride, size) in enumerate(zip(strides, shape, strict=True))
        if place != axis and size > 1
    )
    dense = 1
    while inside and inside[0][0] == dense:
        dense *= inside.pop(0)[1]
    split = shape[axis] // blocks
    run_stride, runs = inside[0] if inside else (0, 1)
    if len(inside) > 1 or (runs > 1 and (split > 1 or run_stride < dense)):
        raise LayoutProblem(
            f"a block of layer {layer} is scattered: shape {list(shape)}, strides "
            f"{list(strides)}; set VLLM_KV_CACHE_LAYOUT to LBHNC or LBNHC"
        )
    if split > 1 and strides[axis] != dense:
        raise LayoutProblem(f"the kernel blocks of layer {layer} are not neighbours")
    if strides[axis] < dense:
        raise LayoutProblem(f"the blocks of layer {layer} overlap: strides {list(strides)}")
    size = item * split
    return _BlockShape(runs, dense * size, run_stride * item, strides[axis] * size, split)


def _bytes_of(tensor: Any) -> Any:
    """All of a tensor's storage, as uint8."""
    import torch

    empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return empty.set_(tensor.untyped_storage())


def _declared(
    vllm_config: Any, kv_cache_config: Any, inside: Callable[[Any, Any], str]
) -> RegionFacts:
    tp = _tensor_ranks(vllm_config.parallel_config)
    group, by_layer = _one_group(kv_cache_config)
    layout = _served_layout(kv_cache_config)
    layers = [layer for entry in _layer_entries(kv_cache_config) for layer in entry.layers]
    if sorted(layers) != sorted(by_layer):
        raise LayoutProblem(f"{len(layers)} layers have KV memory, {len(by_layer)} a block table")
    sizes = [_block_bytes(by_layer[layer]) for layer in layers]
    block_tokens = int(group.kv_cache_spec.block_size)
    replicas = int(getattr(kv_cache_config, "kv_tp_replicas", 1))
    if replicas < 1 or tp % replicas:
        raise LayoutProblem(f"{tp} ranks, {replicas} hold equal KV")
    shape = "+".join(f"{count}x{size}" for size, count in sorted(Counter(sizes).items()))
    order = hashlib.blake2b("\n".join(layers).encode(), digest_size=8).hexdigest()
    page_format = (
        f"blocks-by-region;v{FORMAT_VERSION};{layout};block={block_tokens};regions={shape};"
        f"order={order};{inside(vllm_config, by_layer[layers[0]])}"
    )
    total = sum(sizes)
    return RegionFacts(total, page_format, "", total, block_tokens, replicas)


def _tensor_ranks(parallel: Any) -> int:
    for name in (
        "pipeline_parallel_size",
        "decode_context_parallel_size",
        "prefill_context_parallel_size",
    ):
        ranks = getattr(parallel, name, 1)
        if ranks != 1:
            raise LayoutProblem(f"{name} is {ranks}; only tensor parallelism is served")
    return int(parallel.tensor_parallel_size)


def _one_group(kv_cache_config: Any) -> tuple[Any, dict[str, Any]]:
    """The only group, and the spec of each of its layers."""
    groups = kv_cache_config.kv_cache_groups
    kinds = [_kind_of(spec) for group in groups for spec in _specs_of(group).values()]
    if any("Mamba" in kind for kind in kinds):
        raise LayoutProblem(
            f"{sum('Mamba' in kind for kind in kinds)} of {len(kinds)} layers are state spaces: "
            "what they keep of a prompt is no page of tokens"
        )
    if len(groups) != 1:
        told = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
        way = "; --disable-hybrid-kv-cache-manager makes them one, for more KV memory"
        windows = any(kind in WINDOWED_KINDS for kind in kinds)
        raise LayoutProblem(
            f"{len(groups)} KV cache groups ({told}), one is served{way if windows else ''}"
        )
    group = groups[0]
    if getattr(group, "host_resident", False):
        raise LayoutProblem("the KV cache group lives in host memory")
    by_layer = _specs_of(group)
    for layer, spec in by_layer.items():
        if _kind_of(spec) not in SERVED_KINDS:
            raise LayoutProblem(
                f"layer {layer} has {_kind_of(spec)}; served are {', '.join(sorted(SERVED_KINDS))}"
            )
    return group, by_layer


def _specs_of(group: Any) -> dict[str, Any]:
    """A group's layers with their specs."""
    specs = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    return dict(specs) if specs else dict.fromkeys(group.layer_names, group.kv_cache_spec)


def _served_layout(kv_cache_config: Any) -> str:
    layout = getattr(kv_cache_config, "kv_cache_layout", None)
    name = str(getattr(layout, "name", layout))
    if name not in SERVED_LAYOUTS:
        raise LayoutProblem(
            f"KV cache layout {name}; set VLLM_KV_CACHE_LAYOUT to one of "
            f"{', '.join(sorted(SERVED_LAYOUTS))}"
        )
    return name


def _kind_of(spec: Any) -> str:
    return type(spec).__name__


def _block_bytes(spec: Any) -> int:
    """One layer's block, without the padding that some layouts put behind it."""
    size = getattr(spec, "unpadded_page_size_bytes", None)
    return int(spec.page_size_bytes if size is None else size)


def _inside_a_block(vllm_config: Any, spec: Any) -> str:
    """What decides the bytes within a block: the backend, and on a CPU how it packs them."""
    kv_dtype = str(vllm_config.cache_config.cache_dtype)
    device = str(getattr(vllm_config.device_config, "device_type", ""))
    if device == "cpu":
        try:
            from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

            isa = _get_attn_isa(
                vllm_config.model_config.dtype, spec.block_size, spec.head_size, kv_dtype
            )
        except Exception as exc:
            raise LayoutProblem(
                f"how the CPU backend packs its pages can't be told: {exc}"
            ) from exc
        return f"cpu_attn;isa={isa};kv={kv_dtype}"
    try:
        return f"{_selected_backend(vllm_config, spec)};kv={kv_dtype}"
    except Exception as exc:
        raise LayoutProblem(f"the attention backend can't be told: {exc}") from exc


def _selected_backend(vllm_config: Any, spec: Any) -> str:
    from vllm.config import set_current_vllm_config
    from vllm.v1.attention.selector import get_attn_backend

    with set_current_vllm_config(vllm_config):
        backend = get_attn_backend(
            spec.head_size,
            vllm_config.model_config.dtype,
            vllm_config.cache_config.cache_dtype,
            use_mla=_kind_of(spec) == "MLAAttentionSpec",
        )
    return str(backend.get_name())
