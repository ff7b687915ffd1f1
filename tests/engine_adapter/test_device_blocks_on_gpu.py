"""The worker's copies on a real GPU: real streams, pinned buffers, memory read in place.

TRITON_INTERPRET=0 python -m pytest -m gpu tests/engine_adapter
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="KV memory is torch's")

from kvstore.engine_adapter import device_blocks  # noqa: E402 - after the importorskip
from kvstore.engine_adapter.block_planes import BlockPlanes, PageCopy  # noqa: E402
from kvstore.engine_adapter.block_regions import PageShard, RegionFacts, find_regions  # noqa: E402
from kvstore.engine_adapter.device_blocks import DeviceBlocks  # noqa: E402
from kvstore.kernels.jit import INTERPRETED  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or INTERPRETED,
        reason="NOT TESTED: no copy ran on a GPU: none is here, or TRITON_INTERPRET=1",
    ),
]
BLOCKS, SHAPE, LAYERS = 40, (16, 8, 256), 4


def caches() -> dict[str, torch.Tensor]:
    """[blocks, heads, tokens, K and V], tokens before heads in memory."""
    made = {
        f"layers.{n}": torch.randn(BLOCKS, *SHAPE, device="cuda").bfloat16() for n in range(LAYERS)
    }
    return {name: tensor.transpose(1, 2) for name, tensor in made.items()}


def planes_of(views: dict[str, torch.Tensor]) -> BlockPlanes:
    config = SimpleNamespace(
        num_blocks=BLOCKS,
        kv_cache_tensors=[SimpleNamespace(size=0, shared_by=[name]) for name in views],
    )
    regions = find_regions(views, config)
    total = sum(region.block_bytes for region in regions)
    return BlockPlanes(
        regions, PageShard.of_rank(RegionFacts(2 * total, "", "", total, 16), 2, 1, 0)
    )


@pytest.mark.parametrize("in_place", [False, True])
def test_pages_go_round_behind_the_work_that_was_given_before(
    in_place: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    views = caches()
    planes = planes_of(views)
    monkeypatch.setattr(device_blocks, "BOUNCE_BYTES", 3 * planes.shard.size_bytes)
    copies = DeviceBlocks(planes)
    saved = [[1 + 2 * n, 2 + 2 * n] for n in range(19)]
    there = saved[1:] + saved[:1]
    memory = torch.empty(19, planes.shard.page_bytes, dtype=torch.uint8, pin_memory=True)
    pages = [PageCopy(row.numpy().data, blocks) for row, blocks in zip(memory, saved, strict=True)]
    for view in views.values():
        view += 1
    before = {name: view.clone() for name, view in views.items()}
    copies.begin(copies.mark())
    copies.save(pages)
    for view in views.values():
        view.zero_()
    copies.begin(copies.mark())
    loads = [
        PageCopy(page.memory, blocks, in_place) for page, blocks in zip(pages, there, strict=True)
    ]
    for step in planes.steps(len(loads)):
        copies.load(loads, (step,))
        copies.wait(copies.ready())
        assert all(
            torch.equal(views[layer][target], before[layer][source])
            for layer in set(step.layers)
            for source, target in zip(saved, there, strict=True)
        )
    copies.finish()
