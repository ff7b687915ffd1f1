"""The way over a device, on CPU memory: kernels in Triton's interpreter, streams that run late.

What no test here can show is a real device: its streams, its pinned memory, its speed.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch", reason="KV memory is torch's")

from fake_kv_cache import FullAttentionSpec, make_cache  # noqa: E402 - after the importorskip
from late_streams import LateDevice  # noqa: E402

from kvstore.engine_adapter import device_blocks  # noqa: E402
from kvstore.engine_adapter.block_planes import BlockPlanes, HostBlocks, PageCopy  # noqa: E402
from kvstore.engine_adapter.block_regions import (  # noqa: E402
    PageShard,
    RegionFacts,
    facts_from_config,
    find_regions,
)
from kvstore.engine_adapter.device_blocks import DeviceBlocks  # noqa: E402
from kvstore.kernels.jit import INTERPRETED  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [
    pytest.mark.slow,  # the interpreter
    pytest.mark.skipif(
        not INTERPRETED,
        reason="kernels are not interpreted: Triton is missing, or TRITON_INTERPRET=0",
    ),
]
BLOCKS, TOKENS, HEADS, DIM, LAYERS = 7, 4, 3, 8, 3


@dataclass
class Cache:
    """An engine's KV. `views`: as it registers them; `runs(block)`: what a page holds of a block
    for each run of each layer, by plain indexing."""

    views: dict[str, torch.Tensor]
    runs: Callable[[int], list[bytes]]
    memory: list[torch.Tensor]

    def page(self, blocks: list[int]) -> bytes:
        """A page: for each layer and run, each block."""
        return b"".join(b"".join(each) for each in zip(*map(self.runs, blocks), strict=True))

    def planes(self, blocks_per_page: int) -> BlockPlanes:
        names = list(self.views)
        config = SimpleNamespace(
            num_blocks=BLOCKS,
            kv_cache_tensors=[SimpleNamespace(size=0, shared_by=[name]) for name in names],
        )
        regions = find_regions(self.views, config)
        total = sum(region.block_bytes for region in regions)
        facts = RegionFacts(total * blocks_per_page, "", "", total, TOKENS)
        return BlockPlanes(regions, PageShard.of_rank(facts, blocks_per_page, 1, 0))


def noise(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    rng = torch.Generator().manual_seed(sum(shape))
    size = [*shape[:-1], shape[-1] * dtype.itemsize]
    return torch.randint(0, 256, size, dtype=torch.uint8, generator=rng).view(dtype)


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(torch.uint8).numpy().tobytes())


def layered(made: list[torch.Tensor], view: Any, runs: Any) -> Cache:
    views = {f"layers.{number}": view(each) for number, each in enumerate(made)}
    return Cache(views, lambda block: [raw(r) for each in made for r in runs(each, block)], made)


def kv_first(hnd: bool) -> Cache:
    """FlashAttention's (2, blocks, tokens, heads, dim), in either order of memory."""
    inner = (HEADS, TOKENS) if hnd else (TOKENS, HEADS)
    made = [noise(2, BLOCKS, *inner, DIM) for _ in range(LAYERS)]
    turned = (lambda t: t.transpose(2, 3)) if hnd else (lambda t: t)
    return layered(made, turned, lambda t, block: [t[0, block], t[1, block]])


def block_first(hnd: bool) -> Cache:
    """FlashInfer's (blocks, 2, tokens, heads, dim), in either order of memory."""
    inner = (HEADS, TOKENS) if hnd else (TOKENS, HEADS)
    made = [noise(BLOCKS, 2, *inner, DIM) for _ in range(LAYERS)]
    turned = (lambda t: t.transpose(2, 3)) if hnd else (lambda t: t)
    return layered(made, turned, lambda t, block: [t[block]])


def together(hnd: bool) -> Cache:
    """(blocks, heads, tokens, K and V), as vLLM since 0.24 has it, in either order of memory."""
    inner = (HEADS, TOKENS) if hnd else (TOKENS, HEADS)
    made = [noise(BLOCKS, *inner, 2 * DIM) for _ in range(LAYERS)]
    turned = (lambda t: t) if hnd else (lambda t: t.transpose(1, 2))
    return layered(made, turned, lambda t, block: [t[block]])


def latent() -> Cache:
    """MLA's (blocks, tokens, dim), of an odd number of bytes in all."""
    made = [noise(BLOCKS, 3, 5, dtype=torch.float8_e4m3fn) for _ in range(LAYERS)]
    return layered(made, lambda t: t, lambda t, block: [t[block]])


def cross_layer() -> Cache:
    """(blocks, layers, 2, tokens, heads, dim): all layers of a block are neighbours."""
    made = noise(BLOCKS, LAYERS, 2, TOKENS, HEADS, DIM)
    views = {f"layers.{layer}": made[:, layer] for layer in range(LAYERS)}
    return Cache(views, lambda block: [raw(made[block, n]) for n in range(LAYERS)], [made])


def heads_apart() -> Cache:
    """(heads, blocks, tokens, dim) in memory: a block is a run a head."""
    made = [noise(HEADS, BLOCKS, TOKENS, 2 * DIM) for _ in range(LAYERS)]
    return layered(
        made, lambda t: t.transpose(0, 1), lambda t, b: [t[head, b] for head in range(HEADS)]
    )


ARRANGEMENTS: dict[str, Callable[[], Cache]] = {
    "K and V first, NHD": lambda: kv_first(False),
    "K and V first, HND": lambda: kv_first(True),
    "blocks first, NHD": lambda: block_first(False),
    "blocks first, HND": lambda: block_first(True),
    "together, NHD": lambda: together(False),
    "together, HND": lambda: together(True),
    "MLA": latent,
    "cross-layer": cross_layer,
    "heads apart": heads_apart,
}


def device_blocks_of(planes: BlockPlanes, device: LateDevice) -> DeviceBlocks:
    return DeviceBlocks(planes, accelerator=device, gather=device.gather, scatter=device.scatter)


def pages_of(planes: BlockPlanes, blocks: list[list[int]], **more: Any) -> list[PageCopy]:
    size = planes.shard.page_bytes
    return [PageCopy(memoryview(bytearray(size)), each, **more) for each in blocks]


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_blocks_are_saved_wiped_and_loaded_elsewhere_bit_for_bit(
    arrangement: str, in_place: bool
) -> None:
    cache = ARRANGEMENTS[arrangement]()
    planes, device = cache.planes(2), LateDevice()
    copies = device_blocks_of(planes, device)
    saved, there = [[1, 2], [6, 4]], [[5, 3], [2, 1]]
    expected = [cache.page(blocks) for blocks in saved]
    pages = pages_of(planes, saved)
    copies.begin(copies.mark())
    assert copies.save(pages) == sum(map(len, expected))
    assert [bytes(page.memory) for page in pages] == expected
    for tensor in cache.memory:
        tensor.view(torch.uint8).zero_()
    loads = [
        PageCopy(page.memory, blocks, in_place) for page, blocks in zip(pages, there, strict=True)
    ]
    copies.begin(copies.mark())
    assert copies.load(loads) == sum(map(len, expected))
    copies.finish()
    assert [cache.page(blocks) for blocks in there] == expected
    assert not any(any(run) for block in (0, 4, 6) for run in cache.runs(block))
    one_each = len(planes.whole)
    assert [name for name, _ in device.launches] == ["gather"] * one_each + ["scatter"] * one_each
    assert all(stream is not device.compute for _, stream in device.launches)


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "BLHNC", "BLNHC", "LHBNC", "BHLNC"])
def test_what_a_device_saves_a_host_loads_and_the_other_way_round(layout: str) -> None:
    """Of layers of two sizes: two launches, one page."""
    specs = (FullAttentionSpec(4), FullAttentionSpec(4, head_size=6))
    cache = make_cache(layers=2, blocks=BLOCKS, layout=layout, specs=specs, seed=3)
    facts = facts_from_config(
        cache.vllm_config, cache.config, 2, inside=lambda config, spec: "FAKE"
    )
    planes = BlockPlanes(
        find_regions(cache.kv_caches, cache.config), PageShard.of_rank(facts, 2, 1, 0)
    )
    assert len(planes.whole) == 2
    device = LateDevice()
    host, over = HostBlocks(planes), device_blocks_of(planes, device)
    by_host, by_device = pages_of(planes, [[1, 2]]), pages_of(planes, [[1, 2]])
    host.save(by_host)
    over.save(by_device)
    assert bytes(by_host[0].memory) == bytes(by_device[0].memory)
    host.load([PageCopy(by_device[0].memory, [3, -1])])
    over.load([PageCopy(by_host[0].memory, [-1, 5])])
    over.finish()
    again = pages_of(planes, [[3, 5]])
    host.save(again)
    assert bytes(again[0].memory) == bytes(by_host[0].memory)


def test_buffers_are_used_again_only_when_the_device_is_done_with_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Many more pages than the buffers hold: each buffer is used a dozen times, both ways."""
    cache = together(False)
    planes, device = cache.planes(1), LateDevice()
    monkeypatch.setattr(device_blocks, "BOUNCE_BYTES", 2 * planes.shard.size_bytes)
    copies = device_blocks_of(planes, device)
    order = [[1 + number % (BLOCKS - 1)] for number in range(46)]
    pages = pages_of(planes, order)
    copies.save(pages)
    assert [bytes(page.memory) for page in pages] == [cache.page(blocks) for blocks in order]
    assert len(device.launches) == 23
    contents = [bytes([number]) * planes.shard.page_bytes for number in range(46)]
    copies.load(
        [PageCopy(memoryview(c), blocks) for c, blocks in zip(contents, order, strict=True)]
    )
    copies.finish()
    assert len(device.launches) == 46
    for block in range(1, BLOCKS):
        last = max(number for number, blocks in enumerate(order) if blocks == [block])
        assert cache.page([block]) == contents[last]


def test_copies_come_behind_what_the_engine_gave_before() -> None:
    """The step before may still write to blocks that are loaded, or compute those to be saved."""
    cache = together(False)
    planes, device = cache.planes(1), LateDevice()
    copies = device_blocks_of(planes, device)
    content = bytes([1]) * planes.shard.page_bytes
    device.compute.give(lambda: cache.memory[0].view(torch.uint8)[3].fill_(0))
    copies.begin(copies.mark())
    copies.load([PageCopy(memoryview(content), [3])])
    copies.finish()
    device.compute.synchronize()
    assert cache.page([3]) == content
    device.compute.give(lambda: cache.memory[0].view(torch.uint8)[3].fill_(2))
    copies.begin(copies.mark())
    saved = pages_of(planes, [[3]])
    copies.save(saved)
    device.compute.synchronize()
    assert set(cache.page([3])) == {1, 2}
    assert bytes(saved[0].memory) == cache.page([3])


def test_what_the_engine_gives_after_waiting_finds_the_copy_done() -> None:
    cache = together(False)
    planes, device = cache.planes(1), LateDevice()
    copies = device_blocks_of(planes, device)
    content = bytes([1]) * planes.shard.page_bytes
    copies.load([PageCopy(memoryview(content), [3])])
    seen: list[bytes] = []
    copies.wait(copies.ready())
    device.compute.give(lambda: seen.append(cache.page([3])))
    device.compute.synchronize()
    assert seen == [content]


@pytest.mark.parametrize("in_place", [False, True])
def test_layers_come_one_after_the_other(in_place: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.engine_adapter.block_planes.STEP_BYTES_MIN", 1)
    cache = kv_first(False)
    planes, device = cache.planes(2), LateDevice()
    copies = device_blocks_of(planes, device)
    pages = pages_of(planes, [[1, 2], [3, 4]])
    copies.save(pages)
    expected = [cache.page(page.blocks) for page in pages]
    for tensor in cache.memory:
        tensor.view(torch.uint8).zero_()
    loads = [PageCopy(page.memory, page.blocks, in_place) for page in pages]
    steps = planes.steps(len(loads))
    assert [step.layers for step in steps] == [(f"layers.{n}",) * 2 for n in range(LAYERS)]
    for number, step in enumerate(steps):
        copies.load(loads, (step,))
        copies.wait(copies.ready())
        device.compute.synchronize()
        whole = [any(any(run) for run in cache.runs(1)[2 * n : 2 * n + 2]) for n in range(LAYERS)]
        assert whole == [n <= number for n in range(LAYERS)]
    assert [cache.page(page.blocks) for page in pages] == expected


def test_a_page_with_a_hole_is_not_saved() -> None:
    cache = together(True)
    planes = cache.planes(2)
    for copies in (HostBlocks(planes), device_blocks_of(planes, LateDevice())):
        with pytest.raises(ValueError, match="block -1"):
            copies.save(pages_of(planes, [[3, -1]]))
