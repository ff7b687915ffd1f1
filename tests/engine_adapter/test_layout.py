"""What a page of plain keys and values is, and which specs have none."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="the engine adapters need torch")

from plain_spec import DIM, DTYPES, HEADS, LAYOUTS, make_spec  # noqa: E402 - after the importorskip

from kvstore.engine_adapter.layout import PageShape  # noqa: E402
from kvstore.errors import SpecError  # noqa: E402
from kvstore.spec import (  # noqa: E402
    AttentionKind,
    LayerGroup,
    PageLayout,
    ShardGeometry,
)


@pytest.fixture(params=[(layout, dtype) for layout in LAYOUTS for dtype in DTYPES], ids=str)
def shape(request: pytest.FixtureRequest) -> PageShape:
    layout, dtype = request.param
    return PageShape.of(make_spec(layout, dtype))


def test_page_bytes_are_those_of_the_spec(shape: PageShape) -> None:
    dtype = str(shape.dtype).removeprefix("torch.")
    assert shape.page_bytes == make_spec(shape.layout, dtype).page_bytes


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
