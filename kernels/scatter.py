"""Scatter: contiguous pages -> paged KV, all layers of all pages in one launch; gather's inverse.

Reads each byte of the pages once, and 8 bytes for each block id and address; writes each byte of
the blocks once. The picture, the order of bytes, the bound and the kernel are gather.py's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvstore.kernels.gather import (
    DIRECT_BYTES_MAX,
    check_call,
    launch,
    page_pieces,
    staged_parts,
)
from kvstore.kernels.jit import launches_on
from kvstore.kernels.paged_kv import NO_BLOCK, PagedKv, TokenOrder, check_reach

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray


def scatter_reference(
    kv: PagedKv, block_ids: Sequence[int], pages: torch.Tensor, order: TokenOrder, tokens: int
) -> None:
    """What `scatter` does, token by token, in torch; pages: uint8 [n, page_bytes]."""
    page_tokens = pages.shape[1] // kv.block_bytes * kv.block_tokens
    for token in range(min(tokens, len(block_ids) * kv.block_tokens)):
        block = block_ids[token // kv.block_tokens]
        if block == NO_BLOCK:
            continue
        page = pages[token // page_tokens].view(len(kv.planes), -1)
        for source, plane in zip(page, kv.planes, strict=True):
            if order is TokenOrder.HND:
                row = source.view(kv.heads, page_tokens, -1)[:, token % page_tokens]
            else:
                row = source.view(page_tokens, kv.heads, -1)[token % page_tokens]
            plane.view(torch.uint8)[block, :, token % kv.block_tokens] = row


def scatter(
    kv: PagedKv,
    block_ids: Sequence[int] | NDArray[np.integer],
    pages: torch.Tensor | Sequence[torch.Tensor],
    blocks_a_page: int,
    *,
    order: TokenOrder = TokenOrder.HND,
    tokens: int | None = None,
) -> None:
    """Fill blocks from pages. Arguments, checks and streams are those of `gather`.

    Nothing of NO_BLOCK, and no token from `tokens` on, is written. A block that is named twice
    holds one of the two, no one knows which. Pinned pages of more than DIRECT_BYTES_MAX pass a
    stage on the device, for the reason given there.
    """
    ids, rows, count = check_call(kv, block_ids, pages, blocks_a_page, tokens)
    if not launches_on(kv.device, "scatter"):
        for source, target in page_pieces(kv, ids, rows, blocks_a_page, order, count):
            target[...] = source
        return
    if not check_reach(rows, kv.device) or len(rows) * rows[0].nbytes <= DIRECT_BYTES_MAX:
        launch(kv, ids, rows, blocks_a_page, order, count, to_pages=False)
        return
    for at, part in staged_parts(rows):
        stage = list(torch.empty((len(part), part[0].nbytes), dtype=torch.uint8, device=kv.device))
        for staged, row in zip(stage, part, strict=True):
            staged.copy_(row, non_blocking=True)
        part_ids = ids[at * blocks_a_page : (at + len(part)) * blocks_a_page]
        left = count - at * blocks_a_page * kv.block_tokens
        launch(kv, part_ids, stage, blocks_a_page, order, left, to_pages=False)
