"""Gather and scatter: reference, CPU way and interpreted kernel move the same bits."""

from __future__ import annotations

import contextlib
import mmap
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from paged_caches import ARRANGEMENTS, Sizes, apart_hnd, apart_nhd, bits, empty_like, same_bits

from kvstore.kernels.gather import gather, gather_reference, launch, page_runs
from kvstore.kernels.jit import INTERPRETED, interpreted
from kvstore.kernels.paged_kv import NO_BLOCK, PagedKv, TokenOrder
from kvstore.kernels.scatter import scatter, scatter_reference

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

needs_interpreter = pytest.mark.skipif(
    not INTERPRETED, reason="kernels are not interpreted: Triton is missing, or TRITON_INTERPRET=0"
)
DTYPES = [
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]
IDS = [5, 0, NO_BLOCK, 2, 1]


def three_ways(
    kv: PagedKv, ids: list[int], blocks_a_page: int, order: TokenOrder, tokens: int
) -> list[torch.Tensor]:
    """Pages as the reference, the CPU way and the kernel gather them, over bytes of 0xA5."""
    shape = (-(-len(ids) // blocks_a_page), blocks_a_page * kv.block_bytes)
    made = [torch.full(shape, 0xA5, dtype=torch.uint8) for _ in range(3)]
    gather_reference(kv, ids, made[0], order, tokens)
    gather(kv, ids, made[1], blocks_a_page, order=order, tokens=tokens)
    if INTERPRETED:
        launch(kv, kv.check_ids(ids), list(made[2]), blocks_a_page, order, tokens, to_pages=True)
    else:
        made.pop()
    return made


@pytest.mark.parametrize("order", TokenOrder)
@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_all_ways_gather_the_same_bits_from_every_arrangement(
    arrangement: Callable[..., PagedKv], order: TokenOrder
) -> None:
    kv = arrangement(Sizes(), torch.bfloat16, bits)
    for tokens in (20, 18, 3):
        wanted, *found = three_ways(kv, IDS, 2, order, tokens)
        assert not (wanted == 0xA5).all()
        for pages in found:
            assert torch.equal(pages, wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "sizes", [Sizes(dim=7), Sizes(1, 6, 1, 1, 1), Sizes(1, 6, 3, 2, 64)], ids=str
)
def test_every_dtype_and_odd_shapes(dtype: torch.dtype, sizes: Sizes) -> None:
    for arrangement in (apart_nhd, apart_hnd):
        kv = arrangement(sizes, dtype, bits)
        wanted, *found = three_ways(kv, IDS, 3, TokenOrder.HND, len(IDS) * sizes.tokens)
        for pages in found:
            assert torch.equal(pages, wanted)


@pytest.mark.parametrize("order", TokenOrder)
@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_scatter_gives_back_what_gather_took_and_touches_nothing_else(
    arrangement: Callable[..., PagedKv], order: TokenOrder
) -> None:
    kv = arrangement(Sizes(), torch.float16, bits)
    pages = torch.zeros(3, 2 * kv.block_bytes, dtype=torch.uint8)
    gather(kv, [b if b != NO_BLOCK else 3 for b in IDS], pages, 2, order=order)
    for tokens in (20, 17, 0):
        wanted = empty_like(kv)
        scatter_reference(wanted, IDS, pages, order, tokens)
        found = empty_like(kv)
        scatter(found, IDS, pages, 2, order=order, tokens=tokens)
        assert same_bits(found, wanted)
        if INTERPRETED:
            found = empty_like(kv)
            ids = kv.check_ids(IDS)
            launch(found, ids, list(pages), 2, order, tokens, to_pages=False)
            assert same_bits(found, wanted)
        for number, block in enumerate(IDS):
            held = max(0, min(4, tokens - number * 4)) if block != NO_BLOCK else 0
            for plane, original in zip(found.planes, kv.planes, strict=True):
                if held:
                    here = plane[block, :, :held].contiguous().view(torch.int16)
                    there = original[block, :, :held].contiguous().view(torch.int16)
                    assert torch.equal(here, there)
                assert block == NO_BLOCK or not plane[block, :, held:].view(torch.int16).any()
        assert all(not plane[3].view(torch.int16).any() for plane in found.planes)


@needs_interpreter
def test_wrappers_run_the_kernel_on_the_cpu_only_where_they_are_told_to() -> None:
    kv = apart_nhd(Sizes(), torch.bfloat16, bits)
    pages = [torch.zeros(3, 2 * kv.block_bytes, dtype=torch.uint8) for _ in range(2)]
    calls = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_name == "copy_kernel":
            calls.append(event)

    counts = []
    for made, way in zip(pages, (contextlib.nullcontext(), interpreted()), strict=True):
        sys.setprofile(note)
        try:
            with way:
                gather(kv, IDS, made, 2)
                scatter(empty_like(kv), IDS, made, 2)
        finally:
            sys.setprofile(None)
        counts.append(len(calls))
    assert counts == [0, 2 * len(IDS) * len(kv.planes)]
    assert torch.equal(*pages)


def test_an_empty_list_moves_nothing() -> None:
    kv = apart_nhd(Sizes(), torch.bfloat16, bits)
    pages = torch.empty(0, kv.block_bytes, dtype=torch.uint8)
    gather(kv, [], pages, 1)
    scatter(kv, [], pages, 1)
    if INTERPRETED:
        launch(kv, kv.check_ids([]), [], 1, TokenOrder.HND, 0, to_pages=True)


@needs_interpreter
def test_offsets_are_64_bits_wide() -> None:
    """Block 3 of this cache lies 6 GiB behind block 0; the memory between is never touched."""
    far = 1 << 31  # bytes between blocks, as bfloat16 2**30 numbers
    storage = torch.empty(3 * far + 64, dtype=torch.uint8)
    plane = storage.view(torch.bfloat16).as_strided((4, 1, 2, 8), (far // 2, 16, 8, 1))
    plane[3] = torch.arange(16).reshape(1, 2, 8)
    plane[0] = 77
    kv = PagedKv((plane,), 1)
    pages = torch.zeros(2, kv.block_bytes, dtype=torch.uint8)
    launch(kv, kv.check_ids([3, 0]), list(pages), 1, TokenOrder.HND, 4, to_pages=True)
    assert pages[0].view(torch.bfloat16).tolist() == list(range(16))
    launch(kv, kv.check_ids([0, 3]), list(pages), 1, TokenOrder.HND, 4, to_pages=False)
    assert plane[0].flatten().tolist() == list(range(16))
    assert plane[3].flatten().tolist() == [77] * 16


def test_pages_may_lie_anywhere() -> None:
    kv = apart_nhd(Sizes(), torch.bfloat16, bits)
    room = torch.zeros(3, 5000, dtype=torch.uint8)
    rows = [row[1 : 1 + kv.block_bytes] for row in room]
    wanted = torch.zeros(3, kv.block_bytes, dtype=torch.uint8)
    gather(kv, [4, 2, 0], wanted, 1)
    gather(kv, [4, 2, 0], rows, 1)
    assert all(torch.equal(a, b) for a, b in zip(rows, wanted, strict=True))
    assert not room[:, 0].any()
    if INTERPRETED:
        room.zero_()
        launch(kv, kv.check_ids([4, 2, 0]), rows, 1, TokenOrder.HND, 12, to_pages=True)
        assert all(torch.equal(a, b) for a, b in zip(rows, wanted, strict=True))


def test_pages_of_a_heap_and_of_a_mapping_go_together() -> None:
    blocks = torch.arange(2 * 16 * 192, dtype=torch.int32).view(2, 16, 192)
    kv, before = PagedKv.latent([blocks]), blocks.clone()
    mapped = torch.frombuffer(mmap.mmap(-1, 1 << 20), dtype=torch.uint8)
    for pages in (
        [torch.zeros(kv.block_bytes, dtype=torch.uint8), mapped[: kv.block_bytes]],
        [mapped[: kv.block_bytes], torch.zeros(kv.block_bytes, dtype=torch.uint8)],
    ):
        gather(kv, [0, 1], pages, 1)
        assert [bytes(page.numpy()) for page in pages] == [bytes(b.numpy()) for b in before]
        blocks.zero_()
        scatter(kv, [0, 1], pages, 1)
        assert torch.equal(blocks, before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_ids": [6]}, "6 blocks"),
        ({"block_ids": [-2]}, "-2"),
        ({"block_ids": [[0]]}, "flat"),
        ({"tokens": 5}, "5 tokens"),
        ({"tokens": -1}, "-1 tokens"),
        ({"pages": torch.zeros(2, 960, dtype=torch.uint8)}, "2 pages"),
        ({"pages": torch.zeros(1, 959, dtype=torch.uint8)}, "959"),
        ({"pages": torch.zeros(1, 960, dtype=torch.int8)}, "int8"),
        ({"pages": torch.zeros(1, 1920, dtype=torch.uint8)[:, ::2]}, "dense"),
        ({"blocks_a_page": 0}, "0 blocks a page"),
    ],
)
def test_what_does_not_fit_is_refused_before_a_byte_moves(
    change: dict[str, Any], message: str
) -> None:
    kv = apart_nhd(Sizes(), torch.bfloat16, bits)
    fine = {"block_ids": [0], "pages": torch.zeros(1, 960, dtype=torch.uint8), "blocks_a_page": 1}
    assert kv.block_bytes == 960
    for call in (gather, scatter):
        with pytest.raises(ValueError, match=message):
            call(kv, **(fine | change))


def test_a_page_in_the_heap_and_one_in_a_mapping_are_never_one_view() -> None:
    """numpy's copy from a view that spans both ran out of its stack: see page_runs."""
    size = 1 << 14
    heap = torch.zeros(size, dtype=torch.uint8)
    mapped = torch.frombuffer(mmap.mmap(-1, 4 * size), dtype=torch.uint8)
    places = sorted((heap.data_ptr(), mapped.data_ptr(), mapped.data_ptr() + size))
    ids = np.arange(3)
    alone = sorted((heap.data_ptr(), mapped.data_ptr()))
    assert list(page_runs(np.arange(2), alone, 1, 2, size)) == [(0, 1), (1, 2)]
    first = places.index(mapped.data_ptr())
    joined = [(0, 1), (1, 3)] if first else [(0, 2), (2, 3)]
    assert list(page_runs(ids, places, 1, 3, size)) == joined


def test_planes_that_differ_are_refused() -> None:
    a, b = torch.zeros(4, 2, 3, 8), torch.zeros(4, 2, 3, 8, dtype=torch.float16)
    for planes in ((a, b), (a, a[:, :1]), (a, torch.zeros(4, 3, 2, 8).transpose(1, 2)), (a,), ()):
        with pytest.raises(ValueError, match="plane"):
            PagedKv(planes, 2)
    with pytest.raises(ValueError, match="dense"):
        PagedKv((torch.zeros(4, 2, 3, 8)[..., ::2],), 1)


def test_shapes_are_declared_never_guessed() -> None:
    with pytest.raises(ValueError, match="axis 0"):
        PagedKv.together([torch.zeros(3, 2, 4, 2, 8)], TokenOrder.NHD, 0)
    with pytest.raises(ValueError, match=r"\[blocks, tokens, dim\]"):
        PagedKv.latent([torch.zeros(3, 2, 4, 8)])
