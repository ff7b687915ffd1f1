"""CacheSpec: what differs never shares a key, what is incomplete is refused by name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvstore.errors import InvalidRequest, SpecError
from kvstore.page_layout import RANKS_MAX
from kvstore.prefix_index.page_key import page_keys
from kvstore.spec import (
    AttentionKind,
    CacheSpec,
    KvQuantization,
    LayerGroup,
    PageLayout,
    ShardGeometry,
    canonical_json,
    default_page_tokens,
    json_digest,
)
from kvstore.tenant import tenant_secret, tree_root

SECRET = bytes(range(32))
PLAIN: dict[str, Any] = {
    "model": "HuggingFaceTB/SmolLM2-135M",
    "weights": "hub:" + "0123456789" * 4,
    "config_digest": "ab" * 16,
    "backend": "transformers",
    "page_format": "plain",
    "kv_dtype": "bfloat16",
    "groups": (LayerGroup.uniform(30, 3, 64),),
    "rope": '{"rope_theta":100000.0}',
    "page_tokens": 64,
    "layout": PageLayout.LAYER_KV_HEAD_TOKEN_DIM,
    "quantization": KvQuantization.none(),
    "adapter": "none",
    "geometry": ShardGeometry.single(),
}

digests = st.text("0123456789abcdef", min_size=32, max_size=64)
texts = st.text(st.characters(codec="utf-8", exclude_categories=["C", "Z"]), min_size=1, max_size=9)
heads_and_ranks = st.sampled_from([(8, 1), (8, 2), (8, 8), (2, 8), (1, 4)])


@st.composite
def model_specs(draw: st.DrawFn) -> CacheSpec:
    """Any spec whose layout is plain or an engine's."""
    kv_heads, tp = draw(heads_and_ranks)
    pp, cp = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2]))
    layers = 2 * draw(st.integers(1, 3))
    split = draw(st.integers(0, layers - 1))
    dim = draw(st.sampled_from([32, 64]))
    window = draw(st.sampled_from([128, 4096]))
    full = tuple(range(split))
    windowed = LayerGroup(
        tuple(range(split, layers)), AttentionKind.SLIDING_WINDOW, kv_heads, dim, dim, window
    )
    groups = (windowed,)
    if full:
        groups = (LayerGroup(full, AttentionKind.FULL, kv_heads, dim, dim), windowed)
    stages = draw(st.sampled_from([(), (1, layers - 1)])) if pp == 2 else ()
    layout = draw(
        st.sampled_from([each for each in PageLayout if each.value.startswith("layer_kv")])
        | st.just(PageLayout.ENGINE)
    )
    engine = layout is PageLayout.ENGINE
    shards = pp * cp * min(kv_heads, tp)
    return CacheSpec(
        model=draw(texts),
        weights=draw(st.sampled_from(["hub:", "files:"])) + draw(digests),
        config_digest=draw(digests),
        backend=draw(texts),
        page_format=draw(texts),
        kv_dtype=draw(st.sampled_from(["float32", "float16", "bfloat16", "int8"])),
        groups=groups,
        rope=canonical_json(
            draw(st.dictionaries(texts, st.integers() | st.booleans(), max_size=2))
        ),
        page_tokens=draw(st.sampled_from([16, 32, 64])),
        layout=layout,
        quantization=KvQuantization(draw(texts), draw(st.just("none") | digests)),
        adapter=draw(st.just("none") | digests),
        geometry=ShardGeometry(pp, cp, tp, stages),
        shard_bytes=(draw(st.integers(1, 1 << 20)),) * shards if engine else (),
    )


opaque_specs = st.builds(
    CacheSpec.opaque,
    st.text("abcdefgh", min_size=1, max_size=3),
    st.integers(1, 64),
    st.integers(1, 1 << 20),
)
specs = model_specs() | opaque_specs


def first_key(spec: CacheSpec) -> bytes:
    """The key of one fixed page under this spec."""
    root = tree_root(tenant_secret(SECRET, "default"), spec.namespace)
    return page_keys(root, np.arange(16, dtype=np.int32), 16)


@pytest.mark.slow
@given(specs, specs)
def test_specs_share_keys_exactly_if_they_are_equal(one: CacheSpec, other: CacheSpec) -> None:
    equal = one == other
    assert (one.to_json() == other.to_json()) == equal
    assert (one.namespace == other.namespace) == equal
    assert (first_key(one) == first_key(other)) == equal


@pytest.mark.slow
@given(model_specs(), model_specs(), st.sampled_from([each.name for each in fields(CacheSpec)]))
def test_one_field_of_another_spec_is_enough_to_share_nothing(
    one: CacheSpec, other: CacheSpec, field: str
) -> None:
    try:
        mixed = replace(one, **{field: getattr(other, field)})
    except SpecError:
        assume(False)
    changed = getattr(one, field) != getattr(other, field)
    assert (mixed.namespace != one.namespace) == changed
    assert (first_key(mixed) != first_key(one)) == changed


# A change of every single value in a spec, by its place in the JSON.
CHANGES: dict[str, dict[str, Any]] = {
    "model": {"model": "HuggingFaceTB/SmolLM2-360M"},
    "weights": {"weights": "hub:" + "1123456789" * 4},
    "config_digest": {"config_digest": "ac" * 16},
    "backend": {"backend": "vllm-cpu"},
    "page_format": {"page_format": "amx"},
    "kv_dtype": {"kv_dtype": "float16"},
    "groups.layer_ids": {"groups": (LayerGroup.uniform(29, 3, 64),)},
    "groups.attention": {
        "groups": (replace(PLAIN["groups"][0], attention="sliding", window_tokens=9),)
    },
    "groups.kv_heads": {"groups": (LayerGroup.uniform(30, 4, 64),)},
    "groups.key_dim": {"groups": (replace(PLAIN["groups"][0], key_dim=65),)},
    "groups.value_dim": {"groups": (replace(PLAIN["groups"][0], value_dim=65),)},
    "groups.window_tokens": {"groups": "see below"},
    "rope": {"rope": '{"rope_theta":100001.0}'},
    "page_tokens": {"page_tokens": 32},
    "layout": {"layout": PageLayout.LAYER_KV_TOKEN_HEAD_DIM},
    "quantization.scheme": {"quantization": KvQuantization("fp8", "none")},
    "quantization.scales": {"quantization": KvQuantization("none", "cd" * 16)},
    "adapter": {"adapter": "ef" * 16},
    "geometry.pp": {"geometry": ShardGeometry(2, 1, 1)},
    "geometry.cp": {"geometry": ShardGeometry(1, 2, 1)},
    "geometry.tp": {"geometry": ShardGeometry(1, 1, 3)},
    "geometry.stage_layers": {"geometry": ShardGeometry(1, 1, 1, (30,))},
    "shard_bytes": {"layout": PageLayout.ENGINE, "shard_bytes": (7,)},
}
_SLIDING = replace(PLAIN["groups"][0], attention=AttentionKind.SLIDING_WINDOW, window_tokens=4096)
CHANGES["groups.attention"] = {"groups": (_SLIDING,)}
CHANGES["groups.window_tokens"] = {"groups": (replace(_SLIDING, window_tokens=8192),)}


def test_every_value_of_a_spec_is_in_the_list_of_changes() -> None:
    """Whoever adds a field adds its change; the format version is ours and has one value."""
    nested = {"groups": LayerGroup, "quantization": KvQuantization, "geometry": ShardGeometry}
    places = {
        f"{each.name}.{part.name}" if part else each.name
        for each in fields(CacheSpec)
        for part in (fields(nested[each.name]) if each.name in nested else [None])
    }
    assert places - set(CHANGES) == {"format_version"}


def test_each_single_change_has_a_namespace_of_its_own() -> None:
    everything = [CacheSpec(**PLAIN), *(CacheSpec(**PLAIN | each) for each in CHANGES.values())]
    assert len({spec.namespace for spec in everything}) == len(CHANGES) + 1


def test_equal_page_bytes_are_not_equality() -> None:
    one = CacheSpec(**PLAIN)
    other = replace(one, layout=PageLayout.LAYER_KV_TOKEN_HEAD_DIM)
    assert one.page_bytes == other.page_bytes
    assert one.namespace != other.namespace


@pytest.mark.slow
@given(specs)
def test_json_gives_an_equal_spec_back(spec: CacheSpec) -> None:
    text = spec.to_json()
    assert text.isascii()
    assert CacheSpec.from_json(text) == spec
    assert CacheSpec.from_json(json.dumps(json.loads(text), indent=3).encode()) == spec


def test_namespace_of_today_is_the_namespace_of_tomorrow() -> None:
    """Golden values: a change here orphans every page on every disk, and needs a new format."""
    assert (
        CacheSpec.opaque("golden", 16, 4096).namespace.hex() == "0dad1f5d3247526e1a7824d757e7e96a"
    )
    assert CacheSpec(**PLAIN).namespace.hex() == "288b6c9e8bb57cf9b5b1d572fa2ce0a1"


@pytest.mark.slow
def test_namespace_does_not_depend_on_the_process() -> None:
    script = (
        "from kvstore.spec import *; "
        "print(CacheSpec.opaque('golden', 16, 4096).namespace.hex(), json_digest({'b': 1, 'a': 2}))"
    )
    printed = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for seed in ("0", "12345")
    }
    expected = CacheSpec.opaque("golden", 16, 4096).namespace.hex(), json_digest({"a": 2, "b": 1})
    assert printed == {" ".join(expected) + "\n"}


@pytest.mark.parametrize("field", sorted(PLAIN))
def test_a_missing_field_is_named(field: str) -> None:
    with pytest.raises(SpecError, match=f"^{field}"):
        CacheSpec(**{name: value for name, value in PLAIN.items() if name != field})


@pytest.mark.parametrize("field", [each.name for each in fields(CacheSpec)])
def test_json_without_a_field_is_refused_by_name(field: str) -> None:
    values = json.loads(CacheSpec(**PLAIN).to_json())
    del values[field]
    with pytest.raises(SpecError, match=f"missing {field}"):
        CacheSpec.from_json(json.dumps(values))


BAD: list[tuple[str, dict[str, Any]]] = [
    ("weights", {"weights": "latest"}),
    ("weights", {"weights": "hub:main"}),
    ("weights", {"weights": "none"}),
    ("weights", {"weights": "hub:" + "0" * 40 + "\n"}),
    ("config_digest", {"config_digest": "none"}),
    ("kv_dtype", {"kv_dtype": "bf16"}),
    ("kv_dtype", {"kv_dtype": "auto"}),
    ("model", {"model": "a\nb"}),
    ("model", {"model": "m" * 257}),
    ("model", {"model": 7}),
    ("backend", {"backend": b"transformers"}),
    ("rope", {"rope": "{ }"}),
    ("rope", {"rope": "[]"}),
    ("rope", {"rope": '{"a":NaN}'}),
    ("rope", {"rope": '{"a":1,"a":2}'}),
    ("rope", {"rope": "theta=1"}),
    ("page_tokens", {"page_tokens": 0}),
    ("page_tokens", {"page_tokens": -16}),
    ("page_tokens", {"page_tokens": True}),
    ("page_tokens", {"page_tokens": 16.0}),
    ("page_tokens", {"page_tokens": 1 << 20}),
    ("page_tokens", {"page_tokens": 63, "geometry": ShardGeometry(1, 2, 1)}),
    ("layout", {"layout": "layer_kv_head_token_dim"}),
    ("config_digest", {"layout": PageLayout.BYTES, "shard_bytes": (1,), "weights": "none"}),
    ("groups", {"groups": [LayerGroup.uniform(30, 3, 64)]}),
    ("groups", {"groups": (LayerGroup.uniform(2, 3, 64), LayerGroup.uniform(2, 3, 64))}),
    ("groups", {"groups": (LayerGroup((1, 2), AttentionKind.FULL, 1, 8, 8),)}),
    ("groups", {"groups": (LayerGroup((1, 0), AttentionKind.FULL, 1, 8, 8),)}),
    ("groups", {"groups": (LayerGroup((0,), AttentionKind.FULL, 1, 8),)}),
    ("groups", {"groups": (LayerGroup((0,), AttentionKind.FULL, 1, 8, 8, 4096),)}),
    ("groups", {"groups": (LayerGroup((0,), AttentionKind.SLIDING_WINDOW, 1, 8, 8),)}),
    ("groups", {"groups": (LayerGroup((0,), AttentionKind.MLA, 1, 576, 0),)}),
    ("groups", {"groups": (LayerGroup((0,), None, 1, 8, 8),)}),
    ("groups", {"groups": ("all",)}),
    ("quantization", {"quantization": "none"}),
    ("quantization", {"quantization": KvQuantization()}),
    ("quantization", {"quantization": KvQuantization("int4-g64", "page")}),
    ("quantization", {"quantization": KvQuantization("fp8", "dynamic")}),
    ("adapter", {"adapter": "my-lora"}),
    ("geometry", {"geometry": (1, 1, 1)}),
    ("geometry", {"geometry": ShardGeometry()}),
    ("geometry", {"geometry": ShardGeometry(1, 1, 2)}),
    ("geometry", {"geometry": ShardGeometry(4, 1, 1)}),
    ("geometry", {"geometry": ShardGeometry(2, 1, 1, (10, 19))}),
    ("geometry", {"geometry": ShardGeometry(2, 1, 1, (30,))}),
    ("geometry", {"geometry": ShardGeometry(64, 64, RANKS_MAX)}),
    ("shard_bytes", {"shard_bytes": (4096,)}),
    ("shard_bytes", {"layout": PageLayout.ENGINE}),
    ("shard_bytes", {"layout": PageLayout.ENGINE, "shard_bytes": (0,)}),
    ("shard_bytes", {"layout": PageLayout.ENGINE, "shard_bytes": (1, 2, 3)}),
    ("shard_bytes", {"layout": PageLayout.ENGINE, "shard_bytes": [4096]}),
    ("page_bytes", {"groups": (LayerGroup.uniform(4000, 8, 4096),), "page_tokens": 4096}),
    ("format_version", {"format_version": 2}),
]


@pytest.mark.parametrize(("field", "change"), BAD, ids=range(len(BAD)))
def test_a_spec_that_contradicts_itself_is_refused(field: str, change: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match=f"^{field}") as refused:
        CacheSpec(**PLAIN | change)
    assert len(str(refused.value)) < 500


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[]",
        "{",
        b"\xff\xfe",
        "{}",
        "[" * 100_000,
        '{"model":1e999}',
        json.dumps(json.loads(CacheSpec(**PLAIN).to_json()) | {"extra": 1}),
        json.dumps(json.loads(CacheSpec(**PLAIN).to_json()) | {"groups": {}}),
        json.dumps(json.loads(CacheSpec(**PLAIN).to_json()) | {"groups": [3]}),
        json.dumps(json.loads(CacheSpec(**PLAIN).to_json()) | {"geometry": {"pp": 1}}),
        json.dumps(json.loads(CacheSpec(**PLAIN).to_json()) | {"layout": ["x"]}),
        json.dumps(json.loads(CacheSpec(**PLAIN).to_json()) | {"quantization": None}),
    ],
    ids=range(14),
)
def test_json_that_is_no_spec_is_refused(text: str | bytes) -> None:
    with pytest.raises(SpecError):
        CacheSpec.from_json(text)


@pytest.mark.parametrize("name", ["", "_x", "a/b", "..", "a" * 65, "n\u00e9", "a\0", "a b", "a\n"])
def test_an_opaque_spec_needs_a_plain_name(name: str) -> None:
    with pytest.raises(InvalidRequest, match="spec name"):
        CacheSpec.opaque(name, 16, 4096)


@pytest.mark.parametrize("size", [0, -1, True, 1.5, 1 << 40])
def test_an_opaque_spec_needs_a_sane_size(size: Any) -> None:
    with pytest.raises(SpecError, match="shard_bytes"):
        CacheSpec.opaque("x", 16, size)


def test_page_bytes_follow_from_the_model() -> None:
    assert CacheSpec(**PLAIN).page_bytes == 64 * 30 * 3 * 64 * 2 * 2
    mla = LayerGroup(tuple(range(61)), AttentionKind.MLA, 1, 576, 0)
    deepseek = CacheSpec(**PLAIN | {"groups": (mla,), "layout": PageLayout.LAYER_TOKEN_LATENT})
    assert deepseek.page_bytes == 64 * 61 * 576 * 2
    assert CacheSpec.opaque("x", 16, 12_345).page_bytes == 12_345


@pytest.mark.slow
@given(model_specs())
def test_shards_are_aligned_disjoint_and_cover_all_ranks(spec: CacheSpec) -> None:
    geometry = spec.geometry
    assert geometry is not None
    ranges = spec.shard_ranges()
    assert [(r.pp, r.cp, r.tp) for r in ranges] == sorted((r.pp, r.cp, r.tp) for r in ranges)
    end = 0
    for each in ranges:
        assert each.offset % 4096 == 0
        assert each.offset - end in range(4096)
        end = each.offset + each.size_bytes
    assert spec.page_bytes == end
    ranks = [
        (pp, cp, tp)
        for pp in range(geometry.pp)
        for cp in range(geometry.cp)
        for tp in range(geometry.tp)
    ]
    held = [spec.shard_of(*rank) for rank in ranks]
    assert set(held) == set(ranges)
    writers = [rank for rank, each in zip(ranks, held, strict=True) if each.tp == rank[2]]
    assert len(writers) == len(ranges), "each distinct shard has one writer"
    if spec.layout is not PageLayout.ENGINE:
        whole = replace(spec, geometry=ShardGeometry.single())
        assert sum(each.size_bytes for each in ranges) == whole.page_bytes
    for absent in ((geometry.pp, 0, 0), (0, geometry.cp, 0), (0, 0, geometry.tp), (0, 0, -1)):
        with pytest.raises(InvalidRequest, match="not in the spec's geometry"):
            spec.shard_of(*absent)


def test_uneven_stages_hold_what_their_layers_need() -> None:
    spec = CacheSpec(**PLAIN | {"geometry": ShardGeometry(2, 1, 1, (10, 20))})
    first, second = spec.shard_ranges()
    assert second.size_bytes == 2 * first.size_bytes


def test_latent_kv_is_stored_once_whatever_the_tensor_ranks() -> None:
    mla = LayerGroup((0, 1), AttentionKind.MLA, 1, 576, 0)
    change = {"groups": (mla,), "layout": PageLayout.LAYER_TOKEN_LATENT}
    spec = CacheSpec(**PLAIN | change | {"geometry": ShardGeometry(1, 1, 8)})
    (only,) = spec.shard_ranges()
    assert (only.tp, only.replicas) == (0, 8)


@pytest.mark.parametrize(
    ("bytes_per_token", "block", "page_tokens"),
    [(131_072, 16, 16), (23_040, 64, 64), (131_072, 128, 128), (1 << 30, 1, 1), (1, 16, 1 << 16)],
)
def test_default_pages_hold_a_mebibyte(bytes_per_token: int, block: int, page_tokens: int) -> None:
    assert default_page_tokens(bytes_per_token, block) == page_tokens


@pytest.mark.slow
@given(st.dictionaries(texts, st.integers() | st.floats(allow_nan=False, allow_infinity=False)))
def test_json_digest_does_not_see_the_order_of_keys(values: dict[str, float]) -> None:
    assert json_digest(values) == json_digest(dict(reversed(values.items())))


@pytest.mark.parametrize("value", [float("nan"), {"a": float("inf")}, {1, 2}, b"x", object()])
def test_canonical_json_refuses_what_json_lacks(value: object) -> None:
    with pytest.raises(SpecError, match="JSON"):
        canonical_json(value)
