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

from kvstore.engine_adapter.block_planes import BlockPlanes, HostBlocks, PageCopy, runs
from kvstore.engine_adapter.block_regions import (
    LayoutProblem,
    PageShard,
    RegionFacts,
    difference,
    facts_from_config,
    find_regions,
)

WIDE = FullAttentionSpec(head_size=8)


def ask(cache: FakeCache, blocks_per_page: int = 1) -> RegionFacts:
    return facts_from_config(
        cache.vllm_config, cache.config, blocks_per_page, inside=lambda config, spec: "FAKE"
    )


def facts_of(cache: FakeCache, blocks_per_page: int = 1) -> RegionFacts:
    facts = ask(cache, blocks_per_page)
    assert facts.problem == ""
    return facts


class Copies:
    """HostBlocks, a page at a time."""

    def __init__(self, cache: FakeCache, blocks_per_page: int, rank: int = 0) -> None:
        facts = facts_of(cache, blocks_per_page)
        tp = cache.vllm_config.parallel_config.tensor_parallel_size
        shard = PageShard.of_rank(facts, blocks_per_page, tp, rank)
        regions = find_regions(cache.kv_caches, cache.config)
        self._blocks = HostBlocks(BlockPlanes(regions, shard))

    def save(self, blocks: list[int], page: bytearray) -> int:
        return self._blocks.save([PageCopy(memoryview(page), blocks)])

    def load(self, page: bytes | bytearray, blocks: list[int]) -> int:
        return self._blocks.load([PageCopy(memoryview(page), blocks)])


def expected_page(cache: FakeCache, blocks: list[int]) -> bytes:
    """A page as the module's docstring says it, by address arithmetic from the configuration."""
    raw = cache.raw.numpy().view(np.uint8)
    spec = cache.config.kv_cache_groups[0].kv_cache_spec
    heads_apart = cache.config.kv_cache_layout in ("LHBNC", "BHLNC")
    page = b""
    for tensor in cache.config.kv_cache_tensors:
        for number, layer in enumerate(tensor.layers):
            kind = getattr(spec, "kv_cache_specs", {layer: spec})[layer]
            runs_there = kind.num_heads if heads_apart else 1
            size = kind.page_size_bytes // runs_there
            between = cache.config.num_blocks * size
            if cache.config.kv_cache_layout == "BHLNC":
                between = len(tensor.layers) * size
            for run in range(runs_there):
                start = tensor.offset + number * tensor.layer_stride + run * between
                for block in blocks:
                    at = start + block * tensor.block_stride
                    page += raw[at : at + size].tobytes()
    return page


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "BLHNC", "BLNHC", "LHBNC", "BHLNC"])
@pytest.mark.parametrize("specs", [(FullAttentionSpec(),), (FullAttentionSpec(), WIDE)])
@pytest.mark.parametrize("blocks", [[3], [5, 6], [9, 2, 3], [4, 3]])
def test_a_page_goes_round_bit_exact_and_its_neighbours_stay(
    layout: str, specs: tuple[Any, ...], blocks: list[int]
) -> None:
    cache = make_cache(layout=layout, specs=specs, seed=1)
    copies = Copies(cache, len(blocks))
    page = bytearray(facts_of(cache, len(blocks)).shard_bytes)
    assert copies.save(blocks, page) == len(page)
    assert bytes(page) == expected_page(cache, blocks)
    there = [7, 8, 10][: len(blocks)]
    before = cache.raw.clone()
    assert copies.load(bytes(page), there) == len(page)
    assert expected_page(cache, there) == bytes(page)
    for untouched in set(range(12)) - set(there):
        assert expected_page(cache, [untouched]) == expected_page(
            replace(cache, raw=before), [untouched]
        )


@pytest.mark.parametrize("pages", [1, 7])
def test_steps_bring_whole_layers_and_all_of_them_once(
    pages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = make_cache(layout="LHBNC", specs=(FullAttentionSpec(), WIDE))
    facts = facts_of(cache, 2)
    monkeypatch.setattr(
        "kvstore.engine_adapter.block_planes.STEP_BYTES_MIN", 3 * facts.shard_bytes // 10
    )
    regions = find_regions(cache.kv_caches, cache.config)
    planes = BlockPlanes(regions, PageShard.of_rank(facts, 2, 1, 0))
    steps = planes.steps(pages)
    assert len(steps) == {1: 4, 7: 10}[pages]
    assert [step.start for step in steps[1:]] == [step.stop for step in steps[:-1]]
    assert (steps[0].start, steps[-1].stop) == (0, facts.shard_bytes)
    seen = [set(step.layers) for step in steps]
    assert sum(map(len, seen)) == len(cache.kv_caches), "a layer is in two steps"
    copies, page = HostBlocks(planes), bytearray(facts.shard_bytes)
    copies.save([PageCopy(memoryview(page), [1, 2])])
    for step in steps:
        copies.load([PageCopy(memoryview(page), [7, 5])], (step,))
    assert expected_page(cache, [7, 5]) == bytes(page)


def test_blocks_that_are_left_out_are_not_touched() -> None:
    cache = make_cache()
    copies = Copies(cache, 4)
    page = bytearray(facts_of(cache, 4).shard_bytes)
    copies.save([1, 2, 3, 4], page)
    before = expected_page(cache, [6, 8])
    third = expected_page(cache, [2])
    assert copies.load(page, [-1, 7, -1, -1]) == len(page) // 4
    assert expected_page(cache, [7]) == third
    assert expected_page(cache, [6, 8]) == before


def test_runs_join_neighbours_and_skip_what_is_left_out() -> None:
    assert list(runs([4, 5, 6, 9, -1, 1, 2])) == [(0, 4, 3), (3, 9, 1), (5, 1, 2)]
    assert list(runs([-1, -1])) == []
    assert list(runs([3, 2])) == [(0, 3, 1), (1, 2, 1)]


def test_kernel_blocks_smaller_than_the_engines_are_the_same_bytes() -> None:
    whole, split = make_cache(), make_cache(ratio=4)
    pages = []
    for cache in (whole, split):
        page = bytearray(facts_of(cache, 2).shard_bytes)
        Copies(cache, 2).save([3, 8], page)
        pages.append(bytes(page))
    assert pages[0] == pages[1]


def test_a_kernel_block_that_was_not_declared_is_told() -> None:
    cache = make_cache(ratio=4)
    found = difference(facts_of(cache), find_regions(cache.kv_caches, cache.config))
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
                Copies(cache, 2, rank).save([1, 2], page)
        for rank, cache in enumerate(caches):
            Copies(cache, 2, rank).load(page, [6, 9])
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


def test_scattered_blocks_are_refused_with_a_way_out() -> None:
    """Heads apart are runs; heads and tokens apart are crumbs."""
    cache = make_cache(blocks=12)
    crumbs = {
        name: torch.zeros(3, 8, 12, 4, dtype=torch.int16).permute(2, 0, 1, 3)[:, :, ::2]
        for name in cache.kv_caches
    }
    cache.config.kv_cache_tensors = [SimpleNamespace(size=0, shared_by=[n]) for n in crumbs]
    with pytest.raises(LayoutProblem, match=r"scattered.*set VLLM_KV_CACHE_LAYOUT"):
        find_regions(crumbs, cache.config)


def spoil_name(cache: FakeCache) -> None:
    cache.config.kv_cache_layout = "LBNCH"


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
        (spoil_group, "2 KV cache groups (10 FullAttentionSpec), one is served"),
        (spoil_kind, "5 of 5 layers are state spaces"),
        (spoil_stages, "pipeline_parallel_size is 2"),
        (spoil_context, "decode_context_parallel_size is 2"),
        (spoil_layout, "KV cache layout None"),
        (spoil_name, "KV cache layout LBNCH; set VLLM_KV_CACHE_LAYOUT to one of"),
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
    copies = Copies(cache, 2)
    page = bytes(facts_of(cache, 2).shard_bytes)
    before = cache.raw.clone()
    with pytest.raises(ValueError, match="block"):
        copies.load(page, blocks)
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
