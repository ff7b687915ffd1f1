"""The kernels on a real GPU, against the references. Skipped where there is none, loudly.

TRITON_INTERPRET=0 python -m pytest -m gpu tests/kernels
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from paged_caches import ARRANGEMENTS, Sizes, apart_nhd, bits, empty_like, numbers, same_bits

from kvstore.kernels import gather as gather_module
from kvstore.kernels.gather import gather
from kvstore.kernels.jit import INTERPRETED
from kvstore.kernels.paged_kv import NO_BLOCK, PagedKv, TokenOrder
from kvstore.kernels.quantize import dequantize, quantize
from kvstore.kernels.quantized_page import QuantizedPage, Scheme
from kvstore.kernels.rope import rotate
from kvstore.kernels.scatter import scatter
from kvstore.tiers.codec import LOSSY_CODECS, KvShape

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or INTERPRETED,
        reason="NOT TESTED: the kernels have not run on a GPU: none is here, or TRITON_INTERPRET=1",
    ),
]
IDS = [5, 0, NO_BLOCK, 2, 1]


def on_gpu(kv: PagedKv) -> PagedKv:
    return PagedKv(tuple(plane.cuda() for plane in kv.planes), kv.kinds)


def on_cpu(kv: PagedKv) -> PagedKv:
    return PagedKv(tuple(plane.cpu() for plane in kv.planes), kv.kinds)


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("order", TokenOrder)
@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_gather_and_scatter(
    arrangement: Callable[..., PagedKv],
    order: TokenOrder,
    staged: bool,
    pinned: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if staged:
        monkeypatch.setattr(gather_module, "DIRECT_BYTES_MAX", 0)
        monkeypatch.setattr("kvstore.kernels.scatter.DIRECT_BYTES_MAX", 0)
    kv = arrangement(Sizes(dim=16), torch.bfloat16, bits)
    wanted = torch.full((3, 2 * kv.block_bytes), 0xA5, dtype=torch.uint8)
    pages = wanted.clone().pin_memory() if pinned else wanted.cuda()
    gather(kv, IDS, wanted, 2, order=order, tokens=18)
    there = on_gpu(kv)
    gather(there, IDS, pages, 2, order=order, tokens=18)
    torch.cuda.synchronize()
    assert torch.equal(pages.cpu(), wanted)
    back, expected = on_gpu(empty_like(kv)), empty_like(kv)
    scatter(back, IDS, pages, 2, order=order, tokens=17)
    scatter(expected, IDS, wanted, 2, order=order, tokens=17)
    torch.cuda.synchronize()
    assert same_bits(on_cpu(back), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("scheme", Scheme)
def test_quantize_and_back(scheme: Scheme, dtype: torch.dtype) -> None:
    kv = apart_nhd(Sizes(2, 6, 16, 3, 64), dtype, numbers)
    ids = [5, 0, 3, 2, 1, 4]
    shape = QuantizedPage.of(kv, scheme, 2)
    wanted = torch.zeros(3, shape.page_bytes, dtype=torch.uint8)
    pages, there, back, expected = wanted.cuda(), on_gpu(kv), empty_like(kv), empty_like(kv)
    back = on_gpu(back)
    codec = LOSSY_CODECS[scheme](KvShape(str(dtype).removeprefix("torch."), 2, 2, 3, 32, 64))
    quantize(kv, ids, wanted, 2, scheme, codec)
    quantize(there, ids, pages, 2, scheme)
    dequantize(back, ids, pages, 2, scheme)
    dequantize(expected, ids, wanted, 2, scheme, codec)
    torch.cuda.synchronize()
    assert torch.equal(pages.cpu(), wanted)
    assert same_bits(on_cpu(back), expected)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotate(interleaved: bool) -> None:
    kv = apart_nhd(Sizes(2, 6, 16, 3, 64), torch.bfloat16, numbers)
    there = on_gpu(kv)
    old = torch.arange(30)
    frequencies = 10_000.0 ** (-torch.arange(32) / 32)
    for each in (kv, there):
        rotate(each, [4, 1], old, old + 901, frequencies, interleaved=interleaved)
    torch.cuda.synchronize()
    assert same_bits(on_cpu(there), kv)
