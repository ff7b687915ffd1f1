"""Gather + quantize into pages, dequantize + scatter into blocks: what callers use, every scheme.

On a GPU a fused kernel does both in one pass (quantize_int.py, quantize_fp8.py; the page byte by
byte: quantized_page.py). On the CPU numpy does, through a codec that the caller brings, because the
codecs are the tiers' and this folder knows no tier: gather, encode; decode, scatter. Both make the
same bytes. Measured, one thread, 2 MiB pages in bf16: 1.4 to 2.8 times the torch reference's speed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from kvstore.kernels.gather import gather
from kvstore.kernels.jit import FP_OPTIONS, launches_on, tl
from kvstore.kernels.number_tile import KINDS_OF_FLOAT
from kvstore.kernels.paged_kv import NO_BLOCK, PagedKv, addresses_of, check_reach, page_rows
from kvstore.kernels.quantize_fp8 import TILE_TOKENS, dequantize_fp8_kernel, quantize_fp8_kernel
from kvstore.kernels.quantize_int import TILE_VALUES_A_WARP, dequantize_kernel, quantize_kernel
from kvstore.kernels.quantized_page import QuantizedPage, Scheme
from kvstore.kernels.scatter import scatter

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray


class PageCodec(Protocol):
    """Whole pages [planes, heads, tokens, dim] in host memory to quantized ones and back."""

    @property
    def encoded_bytes(self) -> int:
        """Bytes of every quantized page."""

    def encode(self, page: memoryview) -> bytearray:
        """The quantized page; its own error for numbers that are not finite."""

    def decode(self, encoded: memoryview, out: memoryview) -> None:
        """Fill `out`, a page."""


def quantize(
    kv: PagedKv,
    block_ids: Sequence[int] | NDArray[np.integer],
    pages: torch.Tensor | Sequence[torch.Tensor],
    blocks_a_page: int,
    scheme: Scheme,
    codec: PageCodec | None = None,
) -> None:
    """Fill quantized pages from blocks; `pages` are as `gather` wants them, in their own size.

    codec: the CPU's way, needed for a cache in its memory and not used for one on a GPU:
    kvstore.tiers.codec.LOSSY_CODECS[scheme] of the page's KvShape. It refuses numbers that are not
    finite, after earlier pages were filled; a GPU makes pages that come back as not finite of them.
    Every page needs all its blocks. On a GPU the work is queued on the current stream. ValueError,
    before anything is written, for what does not fit together.
    """
    shape, ids, rows = _check(kv, block_ids, pages, blocks_a_page, scheme)
    if (ids == NO_BLOCK).any():
        raise ValueError("a page is quantized from all its blocks; NO_BLOCK is among the ids")
    if launches_on(kv.device, "quantize"):
        check_reach(rows, kv.device)
        launch(True, kv, ids, rows, shape)
        return
    codec = _checked(codec, shape)
    plain = torch.empty(blocks_a_page * kv.block_bytes, dtype=torch.uint8)
    for part, row in zip(ids.reshape(-1, blocks_a_page), rows, strict=True):
        gather(kv, part, [plain], blocks_a_page)
        row.numpy()[:] = np.frombuffer(codec.encode(plain.numpy().data), np.uint8)


def dequantize(
    kv: PagedKv,
    block_ids: Sequence[int] | NDArray[np.integer],
    pages: torch.Tensor | Sequence[torch.Tensor],
    blocks_a_page: int,
    scheme: Scheme,
    codec: PageCodec | None = None,
) -> None:
    """Fill blocks from quantized pages; blocks of NO_BLOCK are left out. See `quantize`."""
    shape, ids, rows = _check(kv, block_ids, pages, blocks_a_page, scheme)
    if launches_on(kv.device, "dequantize"):
        check_reach(rows, kv.device)
        launch(False, kv, ids, rows, shape)
        return
    codec = _checked(codec, shape)
    plain = torch.empty(blocks_a_page * kv.block_bytes, dtype=torch.uint8)
    for part, row in zip(ids.reshape(-1, blocks_a_page), rows, strict=True):
        codec.decode(row.numpy().data, plain.numpy().data)
        scatter(kv, part, [plain], blocks_a_page)


def _check(
    kv: PagedKv,
    block_ids: Sequence[int] | NDArray[np.integer],
    pages: torch.Tensor | Sequence[torch.Tensor],
    blocks_a_page: int,
    scheme: Scheme,
) -> tuple[QuantizedPage, NDArray[np.int64], list[torch.Tensor]]:
    ids = kv.check_ids(block_ids)
    if blocks_a_page < 1 or len(ids) % blocks_a_page:
        raise ValueError(f"{len(ids)} blocks make no whole pages of {blocks_a_page}")
    shape = QuantizedPage.of(kv, scheme, blocks_a_page)
    rows = page_rows(pages, shape.page_bytes, len(ids) // blocks_a_page)
    if kv.device.type == "cpu" and rows and rows[0].device.type != "cpu":
        raise ValueError(f"pages on {rows[0].device}, the KV cache is on the CPU")
    return shape, ids, rows


def _checked(codec: PageCodec | None, shape: QuantizedPage) -> PageCodec:
    if codec is None:
        raise ValueError(
            f"a cache in the CPU's memory needs a codec: LOSSY_CODECS[{shape.scheme.value!r}] of "
            "kvstore.tiers.codec"
        )
    if codec.encoded_bytes != shape.page_bytes:
        raise ValueError(
            f"the codec makes pages of {codec.encoded_bytes} bytes, this cache in "
            f"{shape.scheme.value} has pages of {shape.page_bytes}"
        )
    return codec


def launch(
    quantizing: bool,
    kv: PagedKv,
    ids: NDArray[np.int64],
    rows: Sequence[torch.Tensor],
    shape: QuantizedPage,
) -> None:
    """Queue one of the four kernels on the current stream of the KV's device."""
    if not len(ids):
        return
    addresses = torch.cat([addresses_of(kv.planes), addresses_of(rows), torch.from_numpy(ids)])
    if kv.device.type != "cpu":
        addresses = addresses.pin_memory().to(kv.device, non_blocking=True)
    if quantizing:
        for row in rows:
            row[shape.planes * shape.plane_bytes : shape.scales_at] = 0
    item = kv.dtype.itemsize
    scalars = [len(rows), *kv.planes[0].stride()[:3], shape.scales_at]
    constants: dict[str, Any] = {
        "PLANES": shape.planes,
        "HEADS": shape.heads,
        "PAGE_TOKENS": shape.tokens,
        "BLOCK_TOKENS": kv.block_tokens,
        "DIM": shape.dim,
        "DIM_PADDED": 1 << (shape.dim - 1).bit_length(),
        "KIND": KINDS_OF_FLOAT[kv.dtype],
        "WORD": tl.uint16 if item == 2 else tl.uint32,
    }
    if shape.scheme is Scheme.FP8:
        kernel = quantize_fp8_kernel if quantizing else dequantize_fp8_kernel
        programs = len(rows)
        constants |= {"TILE": TILE_TOKENS}
    else:
        kernel = quantize_kernel if quantizing else dequantize_kernel
        programs = len(rows) * (shape.tokens // shape.token_group)
        scalars.append(shape.scales_at + shape.scales * item)
        few = shape.token_group * shape.dim <= TILE_VALUES_A_WARP * 4
        constants |= {"KINDS": shape.kinds, "GROUP": shape.token_group, "BITS": shape.scheme.bits}
        constants |= {"CHANNELS": shape.channel_group, "num_warps": 4 if few else 16}
    kernel[(programs, shape.planes, shape.heads)](addresses, *scalars, **constants, **FP_OPTIONS)
