"""Blocks of an engine to pages and back, for each layout that is served; others are refused."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="KV memory is torch's")

import torch
from fake_kv_cache import FakeCache, FullAttentionSpec, MambaSpec, make_cache

from kvstore.engine_adapter.block_regions import (
    HostBlocks,
    LayoutProblem,
    PageShard,
    RegionFacts,
    difference,
    facts_from_config,
    find_regions,
    runs,
)
from kvstore.engine_adapter.device_blocks import DeviceBlocks

WIDE = FullAttentionSpec(head_size=8)


def ask(cache: FakeCache, blocks_per_page: int = 1) -> RegionFacts:
    return facts_from_config(
        cache.vllm_config, cache.config, blocks_per_page, inside=lambda config, spec: "FAKE"
    )


def facts_of(cache: FakeCache, blocks_per_page: int = 1) -> RegionFacts:
    facts = ask(cache, blocks_per_page)
    assert facts.problem == ""
    return facts


def host_blocks(
    cache: FakeCache, blocks_per_page: int, rank: int = 0, kind: Any = HostBlocks
) -> Any:
    facts = facts_of(cache, blocks_per_page)
    tp = cache.vllm_config.parallel_config.tensor_parallel_size
    shard = PageShard.of_rank(facts, blocks_per_page, tp, rank)
    return kind(find_regions(cache.kv_caches, cache.config), shard)


def block_bytes(cache: FakeCache, layer: str, block: int) -> bytes:
    """One layer's block, read by address arithmetic from the configuration alone."""
    raw = cache.raw.numpy().view(np.uint8)
    for tensor in cache.config.kv_cache_tensors:
        if layer in tensor.layers:
            spec = cache.config.kv_cache_groups[0].kv_cache_spec
            size = getattr(spec, "kv_cache_specs", {layer: spec})[layer].page_size_bytes
            at = tensor.offset + tensor.layers.index(layer) * tensor.layer_stride
            at += block * tensor.block_stride
            return raw[at : at + size].tobytes()
    raise AssertionError(layer)


def expected_page(cache: FakeCache, blocks: list[int]) -> bytes:
    """A page as the module's docstring says it: for each layer, each block."""
    return b"".join(block_bytes(cache, layer, b) for layer in cache.kv_caches for b in blocks)


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "BLHNC", "BLNHC"])
@pytest.mark.parametrize("specs", [(FullAttentionSpec(),), (FullAttentionSpec(), WIDE)])
@pytest.mark.parametrize("blocks", [[3], [5, 6], [9, 2, 3], [4, 3]])
@pytest.mark.parametrize("kind", [HostBlocks, DeviceBlocks])
def test_a_page_goes_round_bit_exact_and_its_neighbours_stay(
    layout: str, specs: tuple[Any, ...], blocks: list[int], kind: Any
) -> None:
    cache = make_cache(layout=layout, specs=specs, seed=1)
    copies = host_blocks(cache, len(blocks), kind=kind)
    page = bytearray(facts_of(cache, len(blocks)).shard_bytes)
    assert copies.save(blocks, memoryview(page)) == len(page)
    assert bytes(page) == expected_page(cache, blocks)
    there = [7, 8, 10][: len(blocks)]
    before = cache.raw.clone()
    assert copies.load(memoryview(bytes(page)), there) == len(page)
    copies.finish()
    assert expected_page(cache, there) == bytes(page)
    for untouched in set(range(12)) - set(there):
        for layer in cache.kv_caches:
            now = block_bytes(cache, layer, untouched)
            assert now == block_bytes(replace(cache, raw=before), layer, untouched)


def test_blocks_that_are_left_out_are_not_touched() -> None:
    cache = make_cache()
    copies = host_blocks(cache, 4)
    page = bytearray(facts_of(cache, 4).shard_bytes)
    copies.save([1, 2, 3, 4], memoryview(page))
    before = expected_page(cache, [6, 8])
    third = expected_page(cache, [2])
    assert copies.load(memoryview(page), [-1, 7, -1, -1]) == len(page) // 4
    assert expected_page(cache, [7]) == third
    assert expected_page(cache, [6, 8]) == before


@pytest.mark.skipif(not torch.cuda.is_available(), reason="NO GPU: copies by stream not tested")
@pytest.mark.parametrize("blocks", [[5, 6], [9, 2]])
def test_a_page_goes_round_on_a_gpu_behind_the_work_that_was_given_before(
    blocks: list[int],
) -> None:
    cache = make_cache(seed=1)
    device = {name: tensor.cuda() for name, tensor in cache.kv_caches.items()}
    cache.config.kv_cache_tensors = [
        SimpleNamespace(size=0, shared_by=[name]) for name in cache.kv_caches
    ]
    facts = facts_of(cache, 2)
    copies = DeviceBlocks(find_regions(device, cache.config), PageShard.of_rank(facts, 2, 1, 0))
    for tensor in device.values():
        tensor[blocks] += 1
    copies.begin(copies.mark())
    page = bytearray(facts.shard_bytes)
    copies.save(blocks, memoryview(page))
    for tensor in cache.kv_caches.values():
        tensor[blocks] += 1
    assert bytes(page) == expected_page(cache, blocks)
    copies.begin(copies.mark())
    for _ in range(6):  # more than there are bounce buffers
        copies.load(memoryview(bytes(page)), [7, 8])
    copies.finish()
    for name, tensor in device.items():
        assert (tensor[[7, 8]].cpu() == cache.kv_caches[name][blocks]).all()


def test_runs_join_neighbours_and_skip_what_is_left_out() -> None:
    assert list(runs([4, 5, 6, 9, -1, 1, 2])) == [(0, 4, 3), (3, 9, 1), (5, 1, 2)]
    assert list(runs([-1, -1])) == []
    assert list(runs([3, 2])) == [(0, 3, 1), (1, 2, 1)]


def test_kernel_blocks_smaller_than_the_engines_are_the_same_bytes() -> None:
    whole, split = make_cache(), make_cache(ratio=4)
    pages = []
    for cache in (whole, split):
        page = bytearray(facts_of(cache, 2).shard_bytes)
        host_blocks(cache, 2).save([3, 8], memoryview(page))
        pages.append(bytes(page))
    assert pages[0] == pages[1]


def test_a_kernel_block_that_was_not_declared_is_told() -> None:
    cache = make_cache(ratio=4)
    found = difference(
        facts_of(cache), find_regions(cache.kv_caches, cache.config), cache.kv_caches
    )
    assert "--block-size to 2" in found


def test_ranks_write_their_own_part_of_a_page_and_replicas_write_once() -> None:
    for tp, replicas in [(3, 1), (4, 2)]:
        facts = facts_of(make_cache(tp=tp, replicas=replicas), 2)
        shards = [PageShard.of_rank(facts, 2, tp, rank) for rank in range(tp)]
        writers = [shard for shard in shards if shard.writes]
        assert len(writers) == tp // replicas
        assert len({shard.offset for shard in writers}) == tp // replicas
        ends = sorted((shard.offset, shard.offset + shard.size_bytes) for shard in writers)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ends))
        assert ends[-1][1] == shards[0].page_bytes
        page = bytearray(shards[0].page_bytes)
        caches = [make_cache(tp=tp, replicas=replicas, seed=rank) for rank in range(tp)]
        for rank, cache in enumerate(caches):
            if shards[rank].writes:
                host_blocks(cache, 2, rank).save([1, 2], memoryview(page))
        for rank, cache in enumerate(caches):
            host_blocks(cache, 2, rank).load(memoryview(page), [6, 9])
            writer = rank - rank % replicas
            assert expected_page(cache, [6, 9]) == expected_page(caches[writer], [1, 2])


def test_equal_parts_are_where_the_cache_spec_says(spec_offsets: list[int]) -> None:
    facts = facts_of(make_cache(tp=3), 2)
    assert [PageShard.of_rank(facts, 2, 3, rank).offset for rank in range(3)] == spec_offsets


@pytest.fixture
def spec_offsets() -> list[int]:
    from kvstore.page_layout import KvQuantization, LayerGroup, PageLayout, ShardGeometry
    from kvstore.spec import CacheSpec

    size = facts_of(make_cache(tp=3), 2).shard_bytes
    spec = CacheSpec(
        model="m",
        weights="files:" + "0" * 32,
        config_digest="0" * 32,
        backend="vllm",
        page_format="f",
        kv_dtype="bfloat16",
        groups=(LayerGroup.uniform(5, 3, 4),),
        rope="{}",
        page_tokens=16,
        layout=PageLayout.ENGINE,
        quantization=KvQuantization.none(),
        adapter="none",
        geometry=ShardGeometry(1, 1, 3),
        shard_bytes=(size,) * 3,
    )
    return [spec.shard_of(0, 0, rank).offset for rank in range(3)]


def test_layers_that_share_their_memory_are_copied_once() -> None:
    cache = make_cache()
    first = next(iter(cache.kv_caches))
    cache.kv_caches["model.layers.shared.attn"] = cache.kv_caches[first]
    regions = find_regions(cache.kv_caches, cache.config)
    assert sum(region.block_bytes for region in regions) == facts_of(cache).block_bytes


@pytest.mark.parametrize("layout", ["LHBNC", "BHLNC"])
def test_scattered_blocks_are_refused_with_a_way_out(layout: str) -> None:
    cache = make_cache(layout=layout)
    assert "set VLLM_KV_CACHE_LAYOUT" in ask(cache).problem
    with pytest.raises(LayoutProblem, match="scattered"):
        find_regions(cache.kv_caches, cache.config)


def spoil_group(cache: FakeCache) -> None:
    cache.config.kv_cache_groups = cache.config.kv_cache_groups * 2


def spoil_kind(cache: FakeCache) -> None:
    cache.config.kv_cache_groups[0].kv_cache_spec = MambaSpec()


def spoil_stages(cache: FakeCache) -> None:
    cache.vllm_config.parallel_config.pipeline_parallel_size = 2


def spoil_context(cache: FakeCache) -> None:
    cache.vllm_config.parallel_config.decode_context_parallel_size = 2


def spoil_layout(cache: FakeCache) -> None:
    cache.config.kv_cache_layout = None


def spoil_layers(cache: FakeCache) -> None:
    cache.config.kv_cache_tensors[0].layers = cache.config.kv_cache_tensors[0].layers[:-1]


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (spoil_group, "2 KV cache groups (FullAttentionSpec, FullAttentionSpec)"),
        (spoil_kind, "has MambaSpec; served are FullAttentionSpec"),
        (spoil_stages, "pipeline_parallel_size is 2"),
        (spoil_context, "decode_context_parallel_size is 2"),
        (spoil_layout, "KV cache layout None"),
        (spoil_layers, "4 layers have KV memory, 5 a block table"),
    ],
)
def test_what_is_not_served_is_said_in_one_line(spoil: Any, said: str) -> None:
    cache = make_cache()
    spoil(cache)
    facts = ask(cache)
    assert said in facts.problem
    assert "\n" not in facts.problem
    assert facts.shard_bytes == 0


def test_tensors_that_are_not_what_was_declared_are_refused() -> None:
    for name, value, said in [
        ("block_stride", 64, "bytes apart, 64 were declared"),
        ("layer_stride", 4096, "do not lie 4096 bytes apart"),
    ]:
        cache = make_cache()
        setattr(cache.config.kv_cache_tensors[0], name, value)
        with pytest.raises(LayoutProblem, match=said):
            find_regions(cache.kv_caches, cache.config)
    cache = make_cache()
    first = next(iter(cache.kv_caches))
    moved = make_cache().kv_caches[first]
    with pytest.raises(LayoutProblem, match="do not lie in one tensor"):
        find_regions({**cache.kv_caches, first: moved}, cache.config)
    with pytest.raises(LayoutProblem, match="have no KV tensor"):
        find_regions({}, cache.config)
    with pytest.raises(LayoutProblem, match="belong to no group"):
        find_regions({**cache.kv_caches, "other": moved}, cache.config)
    with pytest.raises(LayoutProblem, match="has list, not one tensor"):
        find_regions({**cache.kv_caches, first: [moved]}, cache.config)


def test_old_engines_declare_no_strides_and_are_read_from_their_tensors() -> None:
    """Before vLLM 0.30 each layer had a tensor of its own."""
    cache = make_cache()
    names = list(cache.kv_caches)
    cache.config.kv_cache_tensors = [SimpleNamespace(size=0, shared_by=[name]) for name in names]
    regions = find_regions({n: t.clone() for n, t in cache.kv_caches.items()}, cache.config)
    assert [region.layers for region in regions] == [(name,) for name in names]
    assert sum(region.block_bytes for region in regions) == facts_of(cache).block_bytes


@pytest.mark.parametrize("blocks", [[1], [0, 1], [1, 12], [1, -2]])
def test_a_page_that_cannot_be_is_refused_before_a_byte_moves(blocks: list[int]) -> None:
    cache = make_cache()
    copies = host_blocks(cache, 2)
    page = bytes(facts_of(cache, 2).shard_bytes)
    before = cache.raw.clone()
    with pytest.raises(ValueError, match="block"):
        copies.load(memoryview(page), blocks)
    assert (cache.raw == before).all()


def test_the_format_names_what_changes_the_bytes() -> None:
    """The same facts twice are equal; another layout, block or backend is another format."""
    formats = {
        facts_of(cache).page_format
        for cache in (
            make_cache(),
            make_cache(layout="LBNHC"),
            make_cache(layers=4),
            make_cache(specs=(FullAttentionSpec(block_size=16),)),
            make_cache(specs=(WIDE,)),
        )
    }
    assert len(formats) == 5
    assert facts_of(make_cache(blocks=99)).page_format in formats
    assert all(len(text) < 200 for text in formats)
