"""Layers and page bytes: bit for bit, in the declared order, by every way, without a model."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the engine adapters need torch")

from plain_spec import (  # noqa: E402 - after the importorskip
    DIM,
    DTYPES,
    HEADS,
    LAYERS,
    LAYOUTS,
    PAGE_TOKENS,
    make_spec,
    random_tensor,
)
from tensor_bits import as_integers  # noqa: E402

from kvstore.engine_adapter import page_copier  # noqa: E402
from kvstore.engine_adapter.layout import LayerKv, PageShape  # noqa: E402
from kvstore.engine_adapter.page_copier import PageCopier  # noqa: E402
from kvstore.kernels.jit import INTERPRETED, interpreted  # noqa: E402
from kvstore.kernels.paged_kv import page_tensor  # noqa: E402
from kvstore.spec import PageLayout  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator

CPU = torch.device("cpu")
PAGES = 3
WAYS = [
    "straight",
    "through buffers",
    pytest.param(
        "through the kernel",
        marks=pytest.mark.skipif(not INTERPRETED, reason="kernels are not interpreted"),
    ),
]


@pytest.fixture(params=[(layout, dtype) for layout in LAYOUTS for dtype in DTYPES], ids=str)
def shape(request: pytest.FixtureRequest) -> PageShape:
    layout, dtype = request.param
    return PageShape.of(make_spec(layout, dtype))


@pytest.fixture(params=WAYS)
def copier(
    request: pytest.FixtureRequest, shape: PageShape, monkeypatch: pytest.MonkeyPatch
) -> Iterator[PageCopier]:
    # One page of one layer fills a buffer: runs and buffers follow each other.
    monkeypatch.setattr(page_copier, "RUN_BYTES", shape.layer_bytes)
    with interpreted() if request.param == "through the kernel" else contextlib.nullcontext():
        yield PageCopier(shape, CPU, bounce=request.param == "through buffers")


def bytes_of(tensor: torch.Tensor) -> bytes:
    return as_integers(tensor).tobytes()


def random_layers(shape: PageShape, pages: int) -> list[LayerKv]:
    tokens = pages * shape.page_tokens
    return [
        (random_tensor(shape, tokens, n), random_tensor(shape, tokens, 10 + n))
        for n in range(shape.layers)
    ]


def save_one_by_one(copier: PageCopier, layers: list[LayerKv], pages: list[torch.Tensor]) -> None:
    for number, layer in enumerate(layers):
        copier.save(number, [layer], pages)
    copier.finish()


def test_what_is_stored_is_loaded_bit_for_bit(shape: PageShape, copier: PageCopier) -> None:
    pages = [torch.zeros(shape.page_bytes, dtype=torch.uint8) for _ in range(PAGES)]
    layers = random_layers(shape, PAGES)
    save_one_by_one(copier, layers, pages)
    readable = [page_tensor(memoryview(bytes(page.tolist()))) for page in pages]
    for number, (keys, values) in enumerate(layers):
        loaded = torch.empty_like(keys), torch.empty_like(values)
        copier.load(number, [loaded], readable, PAGES * PAGE_TOKENS)
        assert bytes_of(loaded[0]) == bytes_of(keys)
        assert bytes_of(loaded[1]) == bytes_of(values)


def test_several_layers_at_once_are_as_one_by_one(shape: PageShape) -> None:
    copier = PageCopier(shape, CPU)
    assert copier.layers_together(PAGES) >= LAYERS
    one, all_at_once = (
        [torch.zeros(shape.page_bytes, dtype=torch.uint8) for _ in range(PAGES)] for _ in range(2)
    )
    layers = random_layers(shape, PAGES)
    save_one_by_one(copier, layers, one)
    copier.save(0, layers, all_at_once)
    copier.finish()
    assert all(torch.equal(a, b) for a, b in zip(one, all_at_once, strict=True))
    room = torch.empty((2, 2, HEADS, PAGES * PAGE_TOKENS, DIM), dtype=shape.dtype)
    copier.load(1, [(k, v) for k, v in room], one, PAGES * PAGE_TOKENS)
    for number in (0, 1):
        assert bytes_of(room[number, 0]) == bytes_of(layers[1 + number][0])
        assert bytes_of(room[number, 1]) == bytes_of(layers[1 + number][1])


def test_a_prefix_that_ends_within_a_page_is_loaded_and_no_more(
    shape: PageShape, copier: PageCopier
) -> None:
    pages = [torch.zeros(shape.page_bytes, dtype=torch.uint8) for _ in range(2)]
    layers = random_layers(shape, 2)
    save_one_by_one(copier, layers, pages)
    room = torch.zeros((2, HEADS, 8, DIM), dtype=shape.dtype)
    copier.load(1, [(room[0], room[1])], pages, 5)
    for kind in (0, 1):
        assert bytes_of(room[kind, :, :5]) == bytes_of(layers[1][kind][:, :5])
    assert not as_integers(room[:, :, 5:].contiguous()).any()


def test_tensors_with_strides_are_stored_as_their_values(
    shape: PageShape, copier: PageCopier
) -> None:
    page = torch.zeros(shape.page_bytes, dtype=torch.uint8)
    wide = random_tensor(shape, 3 * PAGE_TOKENS, 3)
    # Keys and values that lie in different ways: one of them is a copy of its own.
    copier.save(0, [(wide[:, 4:8], wide[:, 8:12].clone())], [page])
    copier.finish()
    loaded = torch.empty((2, HEADS, PAGE_TOKENS, DIM), dtype=shape.dtype)
    copier.load(0, [(loaded[0], loaded[1])], [page], PAGE_TOKENS)
    assert bytes_of(loaded[0]) == bytes_of(wide[:, 4:8])
    assert bytes_of(loaded[1]) == bytes_of(wide[:, 8:12])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_number_lies_where_the_layout_says(layout: PageLayout) -> None:
    """The position of every (layer, K or V, head, token) run is computed here by hand."""
    shape = PageShape.of(make_spec(layout))
    page = torch.zeros(shape.page_bytes, dtype=torch.uint8)
    tensors = [
        [random_tensor(shape, PAGE_TOKENS, 20 + 2 * layer + kind) for kind in (0, 1)]
        for layer in range(LAYERS)
    ]
    copier = PageCopier(shape, CPU)
    copier.save(0, [(keys, values) for keys, values in tensors], [page])
    copier.finish()
    for layer, kind, head, token in np.ndindex(LAYERS, 2, HEADS, PAGE_TOKENS):
        run = (layer * 2 + kind) * HEADS * PAGE_TOKENS
        heads_first = layout is PageLayout.LAYER_KV_HEAD_TOKEN_DIM
        run += head * PAGE_TOKENS + token if heads_first else token * HEADS + head
        at, size = run * DIM * 4, DIM * 4
        assert bytes(page[at : at + size].tolist()) == bytes_of(tensors[layer][kind][head, token])


def test_a_page_of_another_size_is_refused() -> None:
    shape = PageShape.of(make_spec())
    layers = random_layers(shape, 1)
    with pytest.raises(ValueError, match="dense uint8"):
        PageCopier(shape, CPU).save(0, layers, [torch.zeros(shape.page_bytes - 1).byte()])
