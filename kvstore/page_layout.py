"""How the KV bytes of one page are arranged: layer groups, shards, layouts. Arithmetic only.

A layout is declared, never guessed from a shape: two readings of one buffer can have equal shapes.
Must not be here: tensors, engines, or anything that copies a byte.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from kvstore.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "KV_DTYPE_BYTES",
    "AttentionKind",
    "KvQuantization",
    "LayerGroup",
    "PageLayout",
    "ShardGeometry",
    "ShardRange",
]

SHARD_ALIGNMENT_BYTES = 4096
PAGE_BYTES_MAX = 1 << 30
PAGE_TOKENS_MAX = 1 << 16
LAYERS_MAX = 4096
HEADS_MAX = 1 << 16
HEAD_DIM_MAX = 1 << 16
RANKS_MAX = 4096
WINDOW_TOKENS_MAX = 1 << 30

KV_DTYPE_BYTES = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
}


class PageLayout(StrEnum):
    """The order of a page's bytes within one shard; layers ascend, each dense and row-major.

    LAYER_KV_HEAD_TOKEN_DIM   layer 0: K [heads, tokens, key_dim]   V [heads, tokens, value_dim]
                              layer 1: ...                          (transformers)
    LAYER_KV_TOKEN_HEAD_DIM   layer 0: K [tokens, heads, key_dim]   V [tokens, heads, value_dim]
    LAYER_TOKEN_LATENT        layer 0: [tokens, key_dim]            (MLA: one latent, no V)
    ENGINE                    whatever `backend` and `page_format` say; sizes are declared
    BYTES                     the caller's own bytes; `model` alone names them
    """

    LAYER_KV_HEAD_TOKEN_DIM = "layer_kv_head_token_dim"  # noqa: S105 - a layout, no secret
    LAYER_KV_TOKEN_HEAD_DIM = "layer_kv_token_head_dim"  # noqa: S105 - a layout, no secret
    LAYER_TOKEN_LATENT = "layer_token_latent"  # noqa: S105 - a layout, no secret
    ENGINE = "engine"
    BYTES = "bytes"

    @property
    def declares_bytes(self) -> bool:
        """True when the engine states the shards' sizes, False when they follow from the spec."""
        return self in (PageLayout.ENGINE, PageLayout.BYTES)


class AttentionKind(StrEnum):
    """What a layer attends to. Multi-head and grouped-query are FULL: `kv_heads` tells them."""

    FULL = "full"
    SLIDING_WINDOW = "sliding_window"
    MLA = "mla"


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers whose KV has one shape. The groups of a spec cover layers 0..n-1, each once.

    MLA: kv_heads is 1, key_dim the latent's width with its RoPE part, value_dim 0.
    """

    layer_ids: tuple[int, ...] = ()
    attention: AttentionKind | None = None
    kv_heads: int = 0
    key_dim: int = 0
    value_dim: int = -1
    window_tokens: int = 0  # SLIDING_WINDOW only

    @classmethod
    def uniform(cls, layers: int, kv_heads: int, head_dim: int) -> LayerGroup:
        """All `layers` of a model with full attention and equal heads: the common case."""
        ids = tuple(range(check_int("layers", layers, 1, LAYERS_MAX)))
        return cls(ids, AttentionKind.FULL, kv_heads, head_dim, head_dim)

    def check(self, field: str) -> None:
        """Refuse, with SpecError, what contradicts itself; `field` is how the message calls it."""
        if not isinstance(self.layer_ids, tuple) or not self.layer_ids:
            raise SpecError(f"{field}.layer_ids: missing; a non-empty tuple of layer numbers")
        for layer in self.layer_ids:
            check_int(f"{field}.layer_ids", layer, 0, LAYERS_MAX - 1)
        if list(self.layer_ids) != sorted(set(self.layer_ids)):
            raise SpecError(f"{field}.layer_ids: must ascend, each once")
        if not isinstance(self.attention, AttentionKind):
            raise SpecError(f"{field}.attention: {self.attention!r} is not an AttentionKind")
        check_int(f"{field}.kv_heads", self.kv_heads, 1, HEADS_MAX)
        check_int(f"{field}.key_dim", self.key_dim, 1, HEAD_DIM_MAX)
        mla = self.attention is AttentionKind.MLA
        check_int(f"{field}.value_dim", self.value_dim, 0 if mla else 1, HEAD_DIM_MAX)
        if mla and (self.kv_heads, self.value_dim) != (1, 0):
            raise SpecError(f"{field}: MLA has kv_heads 1 and value_dim 0: one latent is both")
        sliding = self.attention is AttentionKind.SLIDING_WINDOW
        window_max = WINDOW_TOKENS_MAX if sliding else 0
        check_int(f"{field}.window_tokens", self.window_tokens, int(sliding), window_max)

    def values_per_token(self) -> int:
        """Numbers that one layer of this group holds for one token, over all heads."""
        return self.kv_heads * (self.key_dim + self.value_dim)


@dataclass(frozen=True, slots=True)
class ShardGeometry:
    """Ranks that write one page: pipeline stages x context shards x tensor shards."""

    pp: int = 0
    cp: int = 0
    tp: int = 0
    stage_layers: tuple[int, ...] = ()  # layers of each stage; empty = an equal split

    @classmethod
    def single(cls) -> ShardGeometry:
        """One process holds all layers and heads."""
        return cls(1, 1, 1)

    def check(self, field: str) -> None:
        """Refuse missing or absurd sizes with SpecError."""
        for name in ("pp", "cp", "tp"):
            check_int(f"{field}.{name}", getattr(self, name), 1, RANKS_MAX)
        check_int(f"{field}: pp x cp x tp", self.pp * self.cp * self.tp, 1, RANKS_MAX)
        if not isinstance(self.stage_layers, tuple):
            raise SpecError(f"{field}.stage_layers: must be a tuple")
        for layers in self.stage_layers:
            check_int(f"{field}.stage_layers", layers, 1, LAYERS_MAX)
        if self.stage_layers and len(self.stage_layers) != self.pp:
            raise SpecError(
                f"{field}.stage_layers: {len(self.stage_layers)} stages named, pp is {self.pp}"
            )

    def stages(self, layers: int) -> list[range]:
        """The half-open run of layers [a, b) of each pipeline stage."""
        sizes = self.stage_layers
        if not sizes:
            if layers % self.pp:
                raise SpecError(
                    f"geometry.stage_layers: missing; {layers} layers do not split evenly over "
                    f"pp {self.pp}, so say how many each stage has"
                )
            sizes = (layers // self.pp,) * self.pp
        if sum(sizes) != layers:
            raise SpecError(
                f"geometry.stage_layers: they sum to {sum(sizes)}, the spec has {layers} layers"
            )
        ends = [sum(sizes[: stage + 1]) for stage in range(len(sizes))]
        return [range(end - size, end) for end, size in zip(ends, sizes, strict=True)]


@dataclass(frozen=True, slots=True)
class KvQuantization:
    """How KV numbers were made smaller before they became page bytes.

    `scheme` is "none" or the codec's name with its parameters ("int4-g64"). `scales` is "none",
    "page" (they lie in the page, whose size the engine then declares), or a hex digest of scales
    that belong to the model.
    """

    scheme: str = ""
    scales: str = ""

    @classmethod
    def none(cls) -> KvQuantization:
        """KV as the model computed it, in `kv_dtype`."""
        return cls("none", "none")


@dataclass(frozen=True, slots=True)
class ShardRange:
    """Bytes [offset, offset + size_bytes) of a page, written by one rank.

    `tp` is the lowest tensor rank that holds these bytes, the one that writes them; ranks
    [tp, tp + replicas) read them.
    """

    pp: int
    cp: int
    tp: int
    replicas: int
    offset: int
    size_bytes: int


def check_int(field: str, value: object, low: int, high: int) -> int:
    """The value, if it is an int (no bool) in [low, high]; else SpecError with all three."""
    if type(value) is not int or not low <= value <= high:
        raise SpecError(f"{field}: {value!r} given; must be a whole number in [{low}, {high}]")
    return value


def tensor_replicas(groups: Sequence[LayerGroup], tp: int) -> int:
    """Tensor ranks that hold the same heads; SpecError if heads and ranks don't divide.

    MLA is replicated on all ranks. A model whose groups are replicated differently has no single
    answer, and is refused.
    """
    found: set[int] = set()
    for group in groups:
        if group.attention is AttentionKind.MLA:
            found.add(tp)
        elif group.kv_heads % tp == 0:
            found.add(1)
        elif tp % group.kv_heads == 0:
            found.add(tp // group.kv_heads)
        else:
            raise SpecError(f"geometry.tp: {tp} and kv_heads {group.kv_heads} do not divide")
    if len(found) > 1:
        raise SpecError(f"geometry.tp: the layer groups are replicated differently: {found}")
    return found.pop()


def computed_shard_bytes(
    groups: Sequence[LayerGroup], geometry: ShardGeometry, page_tokens: int, value_bytes: int
) -> list[int]:
    """Bytes of each distinct shard in (pp, cp, tp) order, for layouts that the spec describes."""
    values = {layer: group.values_per_token() for group in groups for layer in group.layer_ids}
    shards = geometry.tp // tensor_replicas(groups, geometry.tp)
    sizes = []
    for stage in geometry.stages(len(values)):
        stage_values = sum(values[layer] for layer in stage) * page_tokens
        sizes += [stage_values * value_bytes // (geometry.cp * shards)] * (geometry.cp * shards)
    return sizes


def place_shards(sizes: Sequence[int], geometry: ShardGeometry) -> tuple[ShardRange, ...]:
    """Lay distinct shards out at 4 KiB-aligned offsets, in (pp, cp, tp) order."""
    shards = len(sizes) // (geometry.pp * geometry.cp)
    replicas = geometry.tp // shards
    placed = []
    offset = 0
    for number, size in enumerate(sizes):
        stage_and_context, shard = divmod(number, shards)
        pp, cp = divmod(stage_and_context, geometry.cp)
        placed.append(ShardRange(pp, cp, shard * replicas, replicas, offset, size))
        offset += -(-size // SHARD_ALIGNMENT_BYTES) * SHARD_ALIGNMENT_BYTES
    return tuple(placed)
