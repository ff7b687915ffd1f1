"""What makes KV bytes interchangeable: the cache spec and its digest, the namespace.

Two specs that differ in any field have different namespaces, and so share no tree and no page key.
A spec that cannot be completed is refused with the field's name: most silent corruption of KV
caches is a key that names too little. Must not be here: engines, tensors, tokens.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from kvstore.errors import InvalidRequest, SpecError
from kvstore.page_layout import (
    KV_DTYPE_BYTES,
    PAGE_BYTES_MAX,
    PAGE_TOKENS_MAX,
    AttentionKind,
    KvQuantization,
    LayerGroup,
    PageLayout,
    ShardGeometry,
    ShardRange,
    check_int,
    computed_shard_bytes,
    place_shards,
)
from kvstore.tenant import NAMESPACE_BYTES, check_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from enum import Enum

__all__ = [
    "AttentionKind",
    "CacheSpec",
    "KvQuantization",
    "LayerGroup",
    "PageLayout",
    "ShardGeometry",
    "ShardRange",
    "canonical_json",
    "default_page_tokens",
    "json_digest",
]

SPEC_FORMAT_VERSION = 1
TEXT_CHARS_MAX = 256
SPEC_JSON_BYTES_MAX = 1 << 20
PAGE_BYTES_AIM = 1 << 20

_DIGEST = re.compile(r"[0-9a-f]{32,128}", re.ASCII)
_WEIGHTS = re.compile(r"(hub|files|tensors):[0-9a-f]{32,128}", re.ASCII)

_T = TypeVar("_T")
_E = TypeVar("_E", bound="Enum")


@dataclass(frozen=True, kw_only=True)
class CacheSpec:
    """All that decides a page's bytes besides its tokens, extras and the tenant.

    No field has a default that means something: what is left out is refused with SpecError, which
    names it. Say "none" (`KvQuantization.none()`, `ShardGeometry.single()`) where there is none.
    """

    model: str = ""  # for people and for equality; weights and config decide
    weights: str = ""  # "hub:<commit>", "files:<digest>" (kvstore.weights), "tensors:<digest>"
    config_digest: str = ""  # json_digest() of the model's config
    backend: str = ""  # whose KV this is: "transformers", "vllm-cpu", ...
    page_format: str = ""  # "plain", or the packing by ISA or kernel that the backend uses
    kv_dtype: str = ""  # a key of KV_DTYPE_BYTES
    groups: tuple[LayerGroup, ...] = ()
    rope: str = ""  # canonical_json() of RoPE parameters and scaling; "{}" when there is no RoPE
    page_tokens: int = 0
    layout: PageLayout | None = None
    quantization: KvQuantization | None = None
    adapter: str = ""  # digest of the LoRA or other adapter, or "none"
    geometry: ShardGeometry | None = None
    shard_bytes: tuple[int, ...] = ()  # declared by ENGINE and BYTES layouts, else empty
    format_version: int = SPEC_FORMAT_VERSION

    def __post_init__(self) -> None:
        _check_spec(self)

    @classmethod
    def opaque(cls, name: str, page_tokens: int, page_bytes: int) -> CacheSpec:
        """A spec for a caller whose pages are just bytes; `name` alone answers for their meaning.

        `name` follows check_name (InvalidRequest otherwise). Two callers that use one name with
        equal sizes under one tenant share pages.
        """
        return cls(
            model=check_name("spec name", name),
            page_tokens=page_tokens,
            layout=PageLayout.BYTES,
            geometry=ShardGeometry.single(),
            shard_bytes=(page_bytes,),
            **_BYTES_FIELDS,
        )

    @cached_property
    def namespace(self) -> bytes:
        """BLAKE2b-128 of the canonical JSON: 16 bytes, equal on every machine."""
        return hashlib.blake2b(self.to_json().encode(), digest_size=NAMESPACE_BYTES).digest()

    @cached_property
    def page_bytes(self) -> int:
        """Bytes of one page's payload over all shards, gaps between shards included."""
        last = self.shard_ranges()[-1]
        return last.offset + last.size_bytes

    @property
    def layers(self) -> int:
        """Number of layers over all groups; 0 for BYTES."""
        return sum(len(group.layer_ids) for group in self.groups)

    def shard_ranges(self) -> tuple[ShardRange, ...]:
        """The distinct shards of a page in (pp, cp, tp) order; replicated ones appear once."""
        return self._shard_ranges

    def shard_of(self, pp: int, cp: int, tp: int) -> ShardRange:
        """The bytes that this rank holds. It writes them only if `tp` is the range's own."""
        for shard in self.shard_ranges():
            if (shard.pp, shard.cp) == (pp, cp) and 0 <= tp - shard.tp < shard.replicas:
                return shard
        raise InvalidRequest(f"rank pp {pp} cp {cp} tp {tp} is not in the spec's geometry")

    def to_json(self) -> str:
        """Canonical JSON: sorted keys, no spaces, ASCII. `from_json` gives an equal spec back."""
        return canonical_json(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> CacheSpec:
        """The spec of a `to_json` text; SpecError names what is unknown, missing or wrong."""
        values = _json_object("spec", text)
        _check_keys("spec", cls, values)
        groups = [_record(f"groups[{i}]", LayerGroup, g) for i, g in _items(values, "groups")]
        values["groups"] = tuple(groups)
        values["shard_bytes"] = tuple(size for _, size in _items(values, "shard_bytes"))
        values["layout"] = _enum("layout", PageLayout, values["layout"])
        values["quantization"] = _record("quantization", KvQuantization, values["quantization"])
        values["geometry"] = _record("geometry", ShardGeometry, values["geometry"])
        return cls(**values)

    @cached_property
    def _shard_ranges(self) -> tuple[ShardRange, ...]:
        geometry = _present("geometry", self.geometry)
        sizes = self.shard_bytes or computed_shard_bytes(
            self.groups, geometry, self.page_tokens, KV_DTYPE_BYTES[self.kv_dtype]
        )
        return place_shards(sizes, geometry)


# What a BYTES spec says in the fields that only a model could answer.
_BYTES_FIELDS: dict[str, Any] = {
    "weights": "none",
    "config_digest": "none",
    "backend": "none",
    "page_format": "bytes",
    "kv_dtype": "none",
    "groups": (),
    "rope": "{}",
    "quantization": KvQuantization.none(),
    "adapter": "none",
}


def default_page_tokens(bytes_per_token: int, block_tokens: int) -> int:
    """The smallest multiple of the engine's block whose page holds at least 1 MiB of KV."""
    blocks = -(-PAGE_BYTES_AIM // (bytes_per_token * block_tokens))
    return min(blocks * block_tokens, max(block_tokens, PAGE_TOKENS_MAX))


def canonical_json(value: object) -> str:
    """One text for equal values: sorted keys, no spaces, ASCII; SpecError for what JSON lacks."""
    try:
        return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as exc:
        raise SpecError(f"cannot be written as JSON: {exc}") from exc


def json_digest(value: Mapping[str, Any]) -> str:
    """32 hex digits over canonical JSON: the `config_digest` of a model's config."""
    return hashlib.blake2b(canonical_json(value).encode(), digest_size=16).hexdigest()


def _check_spec(spec: CacheSpec) -> None:
    check_int("format_version", spec.format_version, SPEC_FORMAT_VERSION, SPEC_FORMAT_VERSION)
    check_int("page_tokens", spec.page_tokens, 1, PAGE_TOKENS_MAX)
    layout = _present("layout", spec.layout)
    if not isinstance(layout, PageLayout):
        raise SpecError(f"layout: {layout!r} is not a PageLayout")
    for name in ("model", "backend", "page_format"):
        _check_text(name, getattr(spec, name))
    for name, kind in (("quantization", KvQuantization), ("geometry", ShardGeometry)):
        if not isinstance(_present(name, getattr(spec, name)), kind):
            raise SpecError(f"{name}: {getattr(spec, name)!r} is not a {kind.__name__}")
    _present("geometry", spec.geometry).check("geometry")
    if layout is PageLayout.BYTES:
        for name, expected in _BYTES_FIELDS.items():
            if getattr(spec, name) != expected:
                raise SpecError(f"{name}: must be {expected!r} for layout BYTES; see opaque()")
    else:
        _check_model_fields(spec)
        _check_groups(spec, layout)
    _check_shards(spec, layout)


def _check_model_fields(spec: CacheSpec) -> None:
    quantization = _present("quantization", spec.quantization)
    patterns = [
        (
            "weights",
            spec.weights,
            _WEIGHTS,
            "'hub:<commit>', 'files:' or 'tensors:<digest>'",
        ),
        ("config_digest", spec.config_digest, _DIGEST, "32 to 128 hex digits; see json_digest()"),
    ]
    if spec.adapter != "none":
        patterns.append(("adapter", spec.adapter, _DIGEST, "'none' or 32 to 128 hex digits"))
    if quantization.scales not in ("none", "page"):
        field = "quantization.scales"
        patterns.append((field, quantization.scales, _DIGEST, "'none', 'page' or a hex digest"))
    for field, value, pattern, wanted in patterns:
        if not isinstance(value, str) or not pattern.fullmatch(value):
            state = f"{value!r} given" if value else "missing"
            raise SpecError(f"{field}: {state}; must be {wanted}")
    _check_text("quantization.scheme", quantization.scheme)
    if spec.kv_dtype not in KV_DTYPE_BYTES:
        state = f"{spec.kv_dtype!r} given" if spec.kv_dtype else "missing"
        raise SpecError(f"kv_dtype: {state}; must be one of {', '.join(KV_DTYPE_BYTES)}")
    if canonical_json(_json_object("rope", spec.rope)) != spec.rope:
        raise SpecError("rope: must be as canonical_json() writes it")


def _check_groups(spec: CacheSpec, layout: PageLayout) -> None:
    if not isinstance(spec.groups, tuple) or not spec.groups:
        raise SpecError("groups: missing; a tuple of LayerGroup that covers all layers")
    for number, group in enumerate(spec.groups):
        if not isinstance(group, LayerGroup):
            raise SpecError(f"groups[{number}]: {group!r} is not a LayerGroup")
        group.check(f"groups[{number}]")
        if not layout.declares_bytes:
            latent = layout is PageLayout.LAYER_TOKEN_LATENT
            if latent != (group.attention is AttentionKind.MLA):
                raise SpecError(f"groups[{number}].attention: {group.attention} is not {layout}")
    named = sorted(layer for group in spec.groups for layer in group.layer_ids)
    if named != list(range(len(named))):
        raise SpecError("groups: they must cover layers 0 to n-1, each layer once")
    _present("geometry", spec.geometry).stages(len(named))


def _check_shards(spec: CacheSpec, layout: PageLayout) -> None:
    geometry = _present("geometry", spec.geometry)
    if not isinstance(spec.shard_bytes, tuple):
        raise SpecError("shard_bytes: must be a tuple")
    if layout.declares_bytes:
        parts = geometry.pp * geometry.cp
        shards = len(spec.shard_bytes) // parts
        if not shards or len(spec.shard_bytes) % parts or geometry.tp % shards:
            raise SpecError(
                f"shard_bytes: {len(spec.shard_bytes)} sizes given; layout {layout} needs one for "
                f"each distinct shard of pp {geometry.pp} x cp {geometry.cp} x tp {geometry.tp}"
            )
        for size in spec.shard_bytes:
            check_int("shard_bytes", size, 1, PAGE_BYTES_MAX)
    elif spec.shard_bytes:
        raise SpecError(f"shard_bytes: must be empty, they follow from layout {layout}")
    elif _present("quantization", spec.quantization).scales == "page":
        raise SpecError("quantization.scales: 'page' needs layout ENGINE, which declares sizes")
    if spec.page_tokens % geometry.cp:
        raise SpecError(f"page_tokens: {spec.page_tokens} do not split over cp {geometry.cp}")
    check_int("page_bytes", spec.page_bytes, 1, PAGE_BYTES_MAX)


def _present(field: str, value: _T | None) -> _T:
    if value is None:
        raise SpecError(f"{field}: missing")
    return value


def _check_text(field: str, text: object) -> None:
    if not isinstance(text, str) or not text:
        raise SpecError(f"{field}: missing; say what it is, or 'none'")
    if len(text) > TEXT_CHARS_MAX or not text.isprintable():
        raise SpecError(f"{field}: must be at most {TEXT_CHARS_MAX} printable characters")


def _json_object(field: str, text: object) -> dict[str, Any]:
    """The object of a JSON text; no key twice, no NaN."""
    if not isinstance(text, str | bytes) or not text:
        raise SpecError(f"{field}: missing; a JSON object")
    if len(text) > SPEC_JSON_BYTES_MAX:
        raise SpecError(f"{field}: {len(text)} bytes of JSON; at most {SPEC_JSON_BYTES_MAX}")
    try:
        value = json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_no_constant)
    except (ValueError, RecursionError) as exc:
        raise SpecError(f"{field}: is not JSON: {exc}") from exc
    if not isinstance(value, dict):
        raise SpecError(f"{field}: must be a JSON object")
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ValueError("a key appears twice")
    return values


def _no_constant(text: str) -> float:
    raise ValueError(f"{text} is not a number")


def _check_keys(field: str, kind: type, values: Mapping[str, Any]) -> None:
    known = {each.name for each in fields(kind)}
    for problem, names in (("missing", known - set(values)), ("unknown", set(values) - known)):
        if names:
            raise SpecError(f"{field}: {problem} {', '.join(sorted(names))}")


def _items(values: Mapping[str, Any], field: str) -> Iterable[tuple[int, Any]]:
    if not isinstance(values[field], list):
        raise SpecError(f"{field}: must be a list")
    return enumerate(values[field])


def _enum(field: str, kind: type[_E], value: object) -> _E:
    try:
        return kind(value)
    except ValueError as exc:
        raise SpecError(f"{field}: {value!r} is not a {kind.__name__}") from exc


def _record(field: str, kind: type[_T], value: object) -> _T:
    """One nested record of a spec; lists become the tuples that its fields hold."""
    if not isinstance(value, dict):
        raise SpecError(f"{field}: must be a JSON object")
    _check_keys(field, kind, value)
    named = {key: tuple(each) if isinstance(each, list) else each for key, each in value.items()}
    if "attention" in named:
        named["attention"] = _enum(f"{field}.attention", AttentionKind, named["attention"])
    return kind(**named)
