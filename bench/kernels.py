"""Gather and scatter: an engine's paged KV to and from pages of 2 MiB, 32 layers.

gather_cpu_ratio    on the CPU, over a one-thread numpy copy of the same pieces in the same order
scatter_cpu_ratio   between private buffers; budget >= 0.8 each
gather_gpu_ratio    on a GPU, over a device-to-device copy of as many bytes; budget >= 0.85
gather_host_ratio   to pinned host memory, over one pinned cudaMemcpyAsync; budget >= 0.9
device_load_ratio   pages out of the device tier, verified, over a plain copy of the same pages; and
device_store_ratio  into it, checksummed; of the CPU's memory, no budget
quantize_, rotate_  GB of KV a second, there and back for quantize_, on the GPU if there is one
... _index_select, _memcpy_per_block: the same gather as engines do it today, over ours, on a GPU

Blocks lie in random order. Without a GPU its rows are absent, and "gpu" says "none".

    python bench/kernels.py [--json] [--tiny] [--pairs 31] [--pages 128] [--seed 0]
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from paired import PairedRatio, json_line, machine, paired_ratio

from kvstore.kernels.gather import gather
from kvstore.kernels.jit import INTERPRETED
from kvstore.kernels.paged_kv import PagedKv, TokenOrder
from kvstore.kernels.quantize import dequantize, quantize
from kvstore.kernels.quantized_page import QuantizedPage, Scheme
from kvstore.kernels.rope import rotate
from kvstore.kernels.scatter import scatter
from kvstore.tiers.checksum import checksum
from kvstore.tiers.codec import LOSSY_CODECS, KvShape
from kvstore.tiers.device_tier import DeviceTier
from kvstore.tiers.tier import PageRecord

if TYPE_CHECKING:
    from collections.abc import Callable

LAYERS, HEADS, TOKENS, DIM = 32, 8, 16, 128  # Llama-3-8B: a block is 32 KiB a plane, 2 MiB in all
BUDGETS = {"gather_cpu_ratio": 0.8, "scatter_cpu_ratio": 0.8}
BUDGETS |= {"gather_gpu_ratio": 0.85, "scatter_gpu_ratio": 0.85, "gather_host_ratio": 0.9}
GPU_CALLS = 20  # in one timed run, so that a launch costs little of it


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    parser.add_argument("--tiny", action="store_true", help="a few pages: a test of the bench")
    parser.add_argument("--pairs", type=int, default=31)
    parser.add_argument("--pages", type=int, default=128, help="2 MiB pages a run")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.tiny:
        options.pairs, options.pages = 3, 4
    results = on_cpu(options)
    results |= device_tier(options)
    gpu = "none"
    if torch.cuda.is_available() and not INTERPRETED:
        gpu = torch.cuda.get_device_name()
        results |= on_gpu(options)
    rates = conversions(options, "cpu" if gpu == "none" else "cuda")
    if options.json:
        print(json_line(results, options.seed, gpu=gpu, pages=options.pages, **rates))
        return
    print(f"{machine()}; seed {options.seed}; {options.pages} pages of 2 MiB; GPU: {gpu}")
    for key, ratio in results.items():
        line = f"{key:28} {ratio.median:.3f}  90 % [{ratio.low:.3f}, {ratio.high:.3f}]"
        if key in BUDGETS:
            line += f", budget >= {BUDGETS[key]}: " + ratio.verdict(BUDGETS[key], at_least=True)
        print(line)
    print("  ".join(f"{key} {rate}" for key, rate in rates.items()))
    if gpu == "none":
        print("no GPU here: its rows were not measured")


def cache(pages: int, device: str) -> PagedKv:
    """A cache of that many blocks, K and V of a layer in one tensor, as FlashAttention's."""
    shape = (2, pages, TOKENS, HEADS, DIM)
    layers = [torch.ones(shape, dtype=torch.bfloat16, device=device) for _ in range(LAYERS)]
    return PagedKv.together(layers, TokenOrder.NHD, 0)


def shuffled(options: argparse.Namespace) -> list[int]:
    ids = list(range(options.pages))
    random.Random(options.seed).shuffle(ids)
    return ids


def on_cpu(options: argparse.Namespace) -> dict[str, PairedRatio]:
    """The two CPU rows. The limit's buffers are as large and as many, but nobody else's.

    Its views are made beforehand, so that it is copies and nothing else; ours makes its own.
    """
    ids = shuffled(options)
    ours, other = cache(options.pages, "cpu"), cache(options.pages, "cpu")
    pages = torch.ones(options.pages, ours.block_bytes, dtype=torch.uint8)
    private = np.ones((options.pages, LAYERS * 2, ours.block_bytes // LAYERS // 2), np.uint8)
    planes = [plane.transpose(1, 2).flatten(1) for plane in other.planes]
    blocks = [plane.view(torch.int8).numpy().view(np.uint8) for plane in planes]
    pieces = [
        (piece, plane[block])
        for page, block in zip(private, ids, strict=True)
        for piece, plane in zip(page, blocks, strict=True)
    ]

    def copy_in() -> None:
        for piece, block in pieces:
            np.copyto(piece, block)

    def copy_out() -> None:
        for piece, block in pieces:
            np.copyto(block, piece)

    def gathered() -> None:
        gather(ours, ids, pages, 1, order=TokenOrder.NHD)

    def scattered() -> None:
        scatter(ours, ids, pages, 1, order=TokenOrder.NHD)

    return {
        "gather_cpu_ratio": pairs(copy_in, gathered, seconds, options.pairs),
        "scatter_cpu_ratio": pairs(copy_out, scattered, seconds, options.pairs),
    }


def device_tier(options: argparse.Namespace) -> dict[str, PairedRatio]:
    """The device tier on the CPU: what its checks cost. On a GPU its copies are the bus's."""
    size = LAYERS * 2 * HEADS * TOKENS * DIM * 2
    tier = DeviceTier((options.pages + 16) * size * 2, "cpu", extent_bytes=size * 4)
    rng = np.random.default_rng(options.seed)
    source = [rng.bytes(size) for _ in range(options.pages)]
    target = [bytearray(size) for _ in range(options.pages)]
    records = [page_record(number, page) for number, page in enumerate(source)]
    payloads, buffers = [memoryview(page) for page in source], [memoryview(page) for page in target]
    slots: list[int] = []

    def plain() -> None:
        for page, buffer in zip(payloads, buffers, strict=True):
            buffer[:] = page

    def store() -> None:
        tier.free_many(slots)
        slots[:] = tier.reserve("bench", size, options.pages)
        assert all(tier.write_many(slots, records, payloads))

    def load() -> None:
        assert not any(tier.read_many(slots, records, buffers))

    results = {"device_store_ratio": pairs(plain, store, seconds, options.pairs)}
    return results | {"device_load_ratio": pairs(plain, load, seconds, options.pairs)}


def page_record(number: int, payload: bytes) -> PageRecord:
    return PageRecord(
        root=bytes(32),
        tenant="bench",
        namespace=bytes(16),
        key=number.to_bytes(16, "little"),
        parent_key=bytes(16),
        sequence=number + 1,
        parent_sequence=0,
        page_index=0,
        tokens=number.to_bytes(4, "little") * TOKENS,
        extras=b"",
        payload_bytes=len(payload),
        checksum=checksum(payload),
    )


def conversions(options: argparse.Namespace, device: str) -> dict[str, float]:
    """Rates of what changes numbers: medians of a few runs, for people; no limit stands beside."""
    few = max(1, options.pages // 16)
    kv, ids = cache(few, device), list(range(few))
    clock = seconds if device == "cpu" else gpu_seconds
    calls = 1 if device == "cpu" else GPU_CALLS
    positions = torch.arange(few * TOKENS)
    frequencies = 10_000.0 ** (-torch.arange(DIM // 2) / (DIM // 2))
    work: dict[str, Callable[[], Any]] = {
        "rotate_gb_s": lambda: rotate(kv, ids, positions, positions + 777, frequencies)
    }
    for scheme in Scheme:
        size = QuantizedPage.of(kv, scheme, 1).page_bytes
        pages = torch.zeros(few, size, dtype=torch.uint8, device=device)
        work[f"quantize_{scheme}_gb_s"] = partial(there_and_back, kv, ids, pages, scheme)
    rates = {}
    for key, call in work.items():
        taken = statistics.median(clock(call) for _ in range(3)) / calls
        rates[key] = round(few * kv.block_bytes / taken / 1e9, 3)
    return rates


def there_and_back(kv: PagedKv, ids: list[int], pages: torch.Tensor, scheme: Scheme) -> None:
    codec = LOSSY_CODECS[scheme](KvShape("bfloat16", LAYERS, 2, HEADS, TOKENS, DIM))
    quantize(kv, ids, pages, 1, scheme, codec)
    dequantize(kv, ids, pages, 1, scheme, codec)


def on_gpu(options: argparse.Namespace) -> dict[str, PairedRatio]:
    """The rows of a GPU, beside what a copy takes and what engines do."""
    ids = shuffled(options)
    kv = cache(options.pages, "cuda")
    pages = torch.ones(options.pages, kv.block_bytes, dtype=torch.uint8, device="cuda")
    twin, host = torch.ones_like(pages), torch.ones(pages.shape, dtype=torch.uint8).pin_memory()
    index = torch.tensor(ids, device="cuda")
    sections = pages.view(torch.bfloat16).view(options.pages, LAYERS * 2, -1)
    blocks = [plane.transpose(1, 2).flatten(1) for plane in kv.planes]

    def index_select() -> None:
        for number, plane in enumerate(blocks):
            sections[:, number] = plane.index_select(0, index)

    def memcpy_per_block() -> None:
        for page, block in enumerate(ids):
            for number, plane in enumerate(blocks):
                sections[page, number].copy_(plane[block], non_blocking=True)

    def ours() -> None:
        gather(kv, ids, pages, 1, order=TokenOrder.NHD)

    limits: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "gather_gpu_ratio": (lambda: pages.copy_(twin), ours),
        "scatter_gpu_ratio": (
            lambda: pages.copy_(twin),
            lambda: scatter(kv, ids, pages, 1, order=TokenOrder.NHD),
        ),
        "gather_host_ratio": (
            lambda: host.copy_(pages, non_blocking=True),
            lambda: gather(kv, ids, host, 1, order=TokenOrder.NHD),
        ),
        "gather_over_index_select": (index_select, ours),
        "gather_over_memcpy_per_block": (memcpy_per_block, ours),
    }
    return {
        key: pairs(limit, measured, gpu_seconds, options.pairs)
        for key, (limit, measured) in limits.items()
    }


def pairs(
    limit: Callable[[], Any],
    measured: Callable[[], Any],
    clock: Callable[[Callable[[], Any]], float],
    count: int,
) -> PairedRatio:
    """Interleaved, either first in turn; the first pair warms up."""
    limits, found = [], []
    for pair in range(-1, count):
        if pair % 2:
            seconds, limit_s = clock(measured), clock(limit)
        else:
            limit_s, seconds = clock(limit), clock(measured)
        if pair >= 0:
            limits.append(limit_s)
            found.append(seconds)
    return paired_ratio(limits, found)


def seconds(call: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def gpu_seconds(call: Callable[[], Any]) -> float:
    """Between two events on the stream, for several calls."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(GPU_CALLS):
        call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


if __name__ == "__main__":
    main()
