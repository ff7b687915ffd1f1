"""Page bytes and tensors: bit for bit, in the declared order, without a model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the engine adapters need torch")

from kvstore.engine_adapter.layout import (  # noqa: E402 - after the importorskip
    PageShape,
    as_integers,
    load_pages,
    store_pages,
)
from kvstore.errors import SpecError  # noqa: E402
from kvstore.spec import (  # noqa: E402
    AttentionKind,
    CacheSpec,
    KvQuantization,
    LayerGroup,
    PageLayout,
    ShardGeometry,
)

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
    size = shape.kv_heads * tokens * shape.head_dim * shape.dtype.itemsize
    raw = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
    plain = torch.from_numpy(raw).view(shape.dtype)
    return plain.reshape(shape.kv_heads, tokens, shape.head_dim)


def bytes_of(tensor: torch.Tensor) -> bytes:
    return as_integers(tensor).tobytes()


@pytest.fixture(params=[(layout, dtype) for layout in LAYOUTS for dtype in DTYPES], ids=str)
def shape(request: pytest.FixtureRequest) -> PageShape:
    layout, dtype = request.param
    return PageShape.of(make_spec(layout, dtype))


def test_what_is_stored_is_loaded_bit_for_bit(shape: PageShape) -> None:
    pages = [bytearray(shape.page_bytes) for _ in range(3)]
    writable = [shape.view(memoryview(page)) for page in pages]
    layers = [
        (random_tensor(shape, 3 * PAGE_TOKENS, layer), random_tensor(shape, 12, 10 + layer))
        for layer in range(LAYERS)
    ]
    for number, (keys, values) in enumerate(layers):
        store_pages(writable, number, keys, values)
    readable = [shape.view(memoryview(bytes(page)).toreadonly()) for page in pages]
    for number, (keys, values) in enumerate(layers):
        loaded = torch.empty_like(keys), torch.empty_like(values)
        load_pages(readable, number, *loaded)
        assert bytes_of(loaded[0]) == bytes_of(keys)
        assert bytes_of(loaded[1]) == bytes_of(values)


def test_a_prefix_that_ends_within_a_page_is_loaded_and_no_more(shape: PageShape) -> None:
    pages = [shape.view(memoryview(bytearray(shape.page_bytes))) for _ in range(2)]
    keys, values = random_tensor(shape, 8, 1), random_tensor(shape, 8, 2)
    store_pages(pages, 1, keys, values)
    room = torch.zeros((2, HEADS, 7, DIM), dtype=shape.dtype)
    load_pages(pages, 1, room[0, :, :5], room[1, :, :5])
    assert bytes_of(room[0, :, :5]) == bytes_of(keys[:, :5])
    assert bytes_of(room[1, :, :5]) == bytes_of(values[:, :5])
    assert not as_integers(room[:, :, 5:]).any()


def test_tensors_with_strides_are_stored_as_their_values(shape: PageShape) -> None:
    page = bytearray(shape.page_bytes)
    wide = random_tensor(shape, 3 * PAGE_TOKENS, 3)
    store_pages([shape.view(memoryview(page))], 0, wide[:, 4:8], wide[:, 8:12])
    loaded = torch.empty((2, HEADS, PAGE_TOKENS, DIM), dtype=shape.dtype)
    load_pages([shape.view(memoryview(page))], 0, loaded[0], loaded[1])
    assert bytes_of(loaded[0]) == bytes_of(wide[:, 4:8])
    assert bytes_of(loaded[1]) == bytes_of(wide[:, 8:12])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_number_lies_where_the_layout_says(layout: PageLayout) -> None:
    """The position of every (layer, K or V, head, token) run is computed here by hand."""
    shape = PageShape.of(make_spec(layout))
    page = bytearray(shape.page_bytes)
    tensors = [
        [random_tensor(shape, PAGE_TOKENS, 20 + 2 * layer + kind) for kind in (0, 1)]
        for layer in range(LAYERS)
    ]
    for layer in range(LAYERS):
        store_pages([shape.view(memoryview(page))], layer, *tensors[layer])
    for layer, kind, head, token in np.ndindex(LAYERS, 2, HEADS, PAGE_TOKENS):
        run = (layer * 2 + kind) * HEADS * PAGE_TOKENS
        heads_first = layout is PageLayout.LAYER_KV_HEAD_TOKEN_DIM
        run += head * PAGE_TOKENS + token if heads_first else token * HEADS + head
        at, size = run * DIM * 4, DIM * 4
        assert page[at : at + size] == bytes_of(tensors[layer][kind][head, token])


def test_page_bytes_are_those_of_the_spec(shape: PageShape) -> None:
    dtype = str(shape.dtype).removeprefix("torch.")
    assert shape.page_bytes == make_spec(shape.layout, dtype).page_bytes


def test_a_page_of_another_size_is_refused(shape: PageShape) -> None:
    with pytest.raises(ValueError, match=r"reshape|multiple of element size"):
        shape.view(memoryview(bytes(shape.page_bytes - 1)))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"kv_dtype": "int8"}, "kv_dtype: int8 is not one of"),
        ({"layout": PageLayout.ENGINE, "shard_bytes": (4096,)}, "no plain key and value"),
        ({"geometry": ShardGeometry(1, 1, 2)}, "several shards"),
        (
            {"groups": (LayerGroup((0, 1, 2), AttentionKind.SLIDING_WINDOW, 2, 8, 8, 128),)},
            "full-attention",
        ),
        ({"groups": (LayerGroup((0, 1, 2), AttentionKind.FULL, 2, 8, 4),)}, "value_dim 4"),
    ],
)
def test_specs_without_plain_tensors_are_refused(changes: dict[str, object], sentence: str) -> None:
    with pytest.raises(SpecError, match=sentence):
        PageShape.of(make_spec(**changes))


def test_tensors_of_another_dtype_or_shape_are_not_held(shape: PageShape) -> None:
    right = torch.zeros((1, HEADS, 5, DIM), dtype=shape.dtype)
    assert shape.holds(right, right)
    assert not shape.holds(right, right.double())
    assert not shape.holds(right[:, :1], right)
    assert not shape.holds(right, right[..., :4])
