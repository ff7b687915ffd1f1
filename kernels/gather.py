"""Gather: paged KV -> contiguous pages, all layers of all pages in one launch.

    page     | plane 0 | plane 1 | ...      each [heads, tokens, dim] or [tokens, heads, dim]
    plane p  | block ids[0] | block ids[1] | ...     page_tokens / block_tokens blocks a page

Reads each byte of the blocks once, and 8 bytes for each block id and address; writes each byte of
the pages once. So the bound is the slower of two memories: with n bytes of pages, 2n over a GPU's
own bandwidth, or n over PCIe. Offsets are 64 bits wide. Bytes are moved as integers as wide as
addresses and strides allow, so every dtype comes out bit for bit, NaN payloads included.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided

from kvstore.kernels.jit import FP_OPTIONS, jit, launches_on, tl
from kvstore.kernels.paged_kv import (
    NO_BLOCK,
    PagedKv,
    TokenOrder,
    addresses_of,
    check_reach,
    page_rows,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

WORDS_A_PROGRAM = 1024  # 8 KiB in 4 warps: two 16-byte accesses a thread and direction
# Up to this a kernel writes to pinned host memory itself: one launch, no wait for a second engine.
# Above, it fills a stage on the device that the copy engine drains: stores over PCIe by a kernel
# keep processors of the GPU busy for as long as the copy lasts. A guess until a GPU has been
# measured; both ways give the same bytes.
DIRECT_BYTES_MAX = 4 << 20
STAGE_BYTES_MAX = 64 << 20
GAP_BYTES_MAX = 4096  # too little for memory of its own to be mapped there


def gather_reference(
    kv: PagedKv, block_ids: Sequence[int], pages: torch.Tensor, order: TokenOrder, tokens: int
) -> None:
    """What `gather` does, token by token, in torch; pages: uint8 [n, page_bytes]."""
    blocks_a_page = pages.shape[1] // kv.block_bytes
    page_tokens = blocks_a_page * kv.block_tokens
    for token in range(min(tokens, len(block_ids) * kv.block_tokens)):
        block = block_ids[token // kv.block_tokens]
        if block == NO_BLOCK:
            continue
        page = pages[token // page_tokens].view(len(kv.planes), -1)
        for target, plane in zip(page, kv.planes, strict=True):
            source = plane[block, :, token % kv.block_tokens].contiguous().view(torch.uint8)
            if order is TokenOrder.HND:
                target.view(kv.heads, page_tokens, -1)[:, token % page_tokens] = source
            else:
                target.view(page_tokens, kv.heads, -1)[token % page_tokens] = source


@jit
def copy_kernel(
    addresses,
    pages,
    tokens,
    stride_block,
    stride_head,
    stride_token,
    PLANES: tl.constexpr,
    BLOCKS_A_PAGE: tl.constexpr,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    WORDS: tl.constexpr,
    HEADS_FIRST: tl.constexpr,
    WORD: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
    TO_PAGES: tl.constexpr,
):
    """One program copies up to BLOCK words of one plane of one block, to the pages or from them.

    addresses: those of all planes, of all pages, then the block ids. Strides are in words.
    """
    chunks: tl.constexpr = (HEADS * TOKENS * WORDS + BLOCK - 1) // BLOCK
    place = tl.program_id(0) // chunks
    plane = tl.program_id(1)
    within = tl.program_id(0) % chunks * BLOCK + tl.arange(0, BLOCK)
    word = within % WORDS
    row = within // WORDS
    first = place % BLOCKS_A_PAGE * TOKENS
    if HEADS_FIRST:
        token = row % TOKENS
        head = row // TOKENS
        within_page = (head * (BLOCKS_A_PAGE * TOKENS) + first + token) * WORDS + word
    else:
        head = row % HEADS
        token = row // HEADS
        within_page = ((first + token) * HEADS + head) * WORDS + word
    block = tl.load(addresses + PLANES + pages + place)
    in_engine = tl.load(addresses + plane)
    in_page = tl.load(addresses + PLANES + place // BLOCKS_A_PAGE)
    in_engine = in_engine.to(tl.pointer_type(WORD))
    in_page = in_page.to(tl.pointer_type(WORD))
    if ALIGNED:
        in_engine = tl.multiple_of(in_engine, 16)
        in_page = tl.multiple_of(in_page, 16)
    held = tl.where(block >= 0, HEADS * TOKENS * WORDS, 0)
    counts = (within < held) & (place.to(tl.int64) * TOKENS + token < tokens)
    in_engine += block * stride_block + head.to(tl.int64) * stride_head + token * stride_token
    in_engine += word
    in_page += plane.to(tl.int64) * (BLOCKS_A_PAGE * HEADS * TOKENS * WORDS) + within_page
    if TO_PAGES:
        tl.store(in_page, tl.load(in_engine, mask=counts), mask=counts)
    else:
        tl.store(in_engine, tl.load(in_page, mask=counts), mask=counts)


def gather(
    kv: PagedKv,
    block_ids: Sequence[int] | NDArray[np.integer],
    pages: torch.Tensor | Sequence[torch.Tensor],
    blocks_a_page: int,
    *,
    order: TokenOrder = TokenOrder.HND,
    tokens: int | None = None,
) -> None:
    """Fill pages from blocks: page i from ids [i * blocks_a_page, (i + 1) * blocks_a_page).

    pages: uint8, one dense run of blocks_a_page * kv.block_bytes each, on the KV's device or, for a
    GPU, in pinned host memory. The last page may be given fewer ids. Of NO_BLOCK, and of tokens
    from `tokens` on, counted over the whole list, the pages keep what they hold. On a GPU the work
    is queued on the current stream, and the call returns at once; the caller keeps the pages until
    it is done. ValueError, before anything is written, for what does not fit together.
    """
    ids, rows, count = check_call(kv, block_ids, pages, blocks_a_page, tokens)
    if not launches_on(kv.device, "gather"):
        for target, source in page_pieces(kv, ids, rows, blocks_a_page, order, count):
            target[...] = source
        return
    if not check_reach(rows, kv.device) or len(rows) * rows[0].nbytes <= DIRECT_BYTES_MAX:
        launch(kv, ids, rows, blocks_a_page, order, count, to_pages=True)
        return
    for at, part in staged_parts(rows):
        stage = list(torch.empty((len(part), part[0].nbytes), dtype=torch.uint8, device=kv.device))
        part_ids = ids[at * blocks_a_page : (at + len(part)) * blocks_a_page]
        left = count - at * blocks_a_page * kv.block_tokens
        if left < len(part) * blocks_a_page * kv.block_tokens or (part_ids == NO_BLOCK).any():
            for staged, row in zip(stage, part, strict=True):  # what is to stay must be in it
                staged.copy_(row, non_blocking=True)
        launch(kv, part_ids, stage, blocks_a_page, order, left, to_pages=True)
        for staged, row in zip(stage, part, strict=True):
            row.copy_(staged, non_blocking=True)


def check_call(
    kv: PagedKv,
    block_ids: Sequence[int] | NDArray[np.integer],
    pages: torch.Tensor | Sequence[torch.Tensor],
    blocks_a_page: int,
    tokens: int | None,
) -> tuple[NDArray[np.int64], list[torch.Tensor], int]:
    """Ids, pages and the number of tokens of a call, all checked; ValueError otherwise."""
    ids = kv.check_ids(block_ids)
    if blocks_a_page < 1:
        raise ValueError(f"{blocks_a_page} blocks a page; at least 1")
    rows = page_rows(pages, blocks_a_page * kv.block_bytes, -(-len(ids) // blocks_a_page))
    room = len(ids) * kv.block_tokens
    count = room if tokens is None else tokens
    if not 0 <= count <= room:
        raise ValueError(f"{count} tokens; {len(ids)} blocks have {room}")
    if kv.device.type == "cpu" and rows and rows[0].device.type != "cpu":
        raise ValueError(f"pages on {rows[0].device}, the KV cache is on the CPU")
    return ids, rows, count


def launch(
    kv: PagedKv,
    ids: NDArray[np.int64],
    rows: Sequence[torch.Tensor],
    blocks_a_page: int,
    order: TokenOrder,
    tokens: int,
    *,
    to_pages: bool,
) -> None:
    """Queue the copy kernel, in one direction, on the current stream of the KV's device."""
    if not len(ids) or tokens <= 0:
        return
    first = kv.planes[0]
    places = addresses_of(rows)
    width = kv.word_bytes(places.tolist())
    scale = width / kv.dtype.itemsize
    words = int(kv.dim / scale)
    addresses = torch.cat([addresses_of(kv.planes), places, torch.from_numpy(ids)])
    if kv.device.type != "cpu":
        addresses = addresses.pin_memory().to(kv.device, non_blocking=True)
    chunks = -(-kv.heads * kv.block_tokens * words // WORDS_A_PROGRAM)
    copy_kernel[(len(ids) * chunks, len(kv.planes))](
        addresses,
        len(rows),
        tokens,
        *(int(stride / scale) for stride in first.stride()[:3]),
        PLANES=len(kv.planes),
        BLOCKS_A_PAGE=blocks_a_page,
        HEADS=kv.heads,
        TOKENS=kv.block_tokens,
        WORDS=words,
        HEADS_FIRST=order is TokenOrder.HND,
        WORD={1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}[width],
        ALIGNED=not int(np.bitwise_or.reduce(addresses_of([*kv.planes, *rows]).numpy())) % 16,
        BLOCK=WORDS_A_PROGRAM,
        TO_PAGES=to_pages,
        **FP_OPTIONS,
    )


def staged_parts(rows: Sequence[torch.Tensor]) -> Iterator[tuple[int, list[torch.Tensor]]]:
    """Runs of pages of at most STAGE_BYTES_MAX, at least one page, with the first one's number."""
    step = max(1, STAGE_BYTES_MAX // rows[0].nbytes)
    for at in range(0, len(rows), step):
        yield at, list(rows[at : at + step])


def page_pieces(
    kv: PagedKv,
    ids: NDArray[np.int64],
    rows: Sequence[torch.Tensor],
    blocks_a_page: int,
    order: TokenOrder,
    tokens: int,
) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
    """Numpy views (in a page, in the engine's memory) of equal shape that make up all that counts.

    A piece is a block of one plane, or of all planes where they lie at equal distances; of a run of
    pages, too, where neither they nor their blocks are scattered: a call of numpy costs as much as
    a copy of some KiB. Seen as wide integers: numpy then copies a dense run by memcpy, and a
    strided one word by word.
    """
    places = [row.data_ptr() for row in rows]
    width = kv.word_bytes(places)
    words = kv.dim * kv.dtype.itemsize // width
    sources = kv.stacked(width)
    size, count, kind = kv.block_tokens, len(kv.planes), np.dtype(f"i{width}")
    blocks = ids.tolist()  # numpy's own integers cost more a step
    whole = tokens // (blocks_a_page * size)
    for first, stop in page_runs(ids, places, blocks_a_page, whole, blocks_a_page * kv.block_bytes):
        page = rows[first].numpy().view(kind)
        if order is TokenOrder.HND:
            planes = page.reshape(count, kv.heads, blocks_a_page, size, words).swapaxes(1, 2)
        else:
            planes = page.reshape(count, blocks_a_page, size, kv.heads, words).swapaxes(2, 3)
        begin = first * blocks_a_page
        if stop - first > 1:
            step = places[first + 1] - places[first]
            shape, strides = (stop - first, *planes.shape), (step, *planes.strides)
            run = as_strided(planes, shape, strides).swapaxes(0, 1)
            some = slice(blocks[begin], blocks[begin] + (stop - first) * blocks_a_page)
            yield from pairs_of(run, [source[:, some] for source in sources])
            continue
        for at, block in enumerate(blocks[begin : begin + blocks_a_page]):
            held = min(size, tokens - (begin + at) * size)
            if block == NO_BLOCK or held <= 0:
                continue
            if held < size:
                parts = [source[:, block, :, :held] for source in sources]
                yield from pairs_of(planes[:, at, :, :held], parts)
            elif len(sources) > 1:
                yield from zip(planes[:, at], [source[0, block] for source in sources], strict=True)
            else:
                yield planes[:, at], sources[0][:, block]


def page_runs(
    ids: NDArray[np.int64], places: Sequence[int], blocks_a_page: int, whole: int, page_bytes: int
) -> Iterator[tuple[int, int]]:
    """Runs [first, stop) of pages at equal distances whose blocks are neighbours in that order.

    All of a run of several pages counts: it is among the `whole` first, and has no NO_BLOCK. Less
    than GAP_BYTES_MAX lie between two of them, so that no memory of others does: numpy takes a
    copy for overlapping what it is copied from when it lies between the first and the last byte of
    that view, then copies to a temporary array, which lies there as well, and so on until the
    stack is full (seen in numpy 2.4 with one page in the heap and one in a mapping).
    """
    whole = min(whole, len(ids) // blocks_a_page)
    starts = ids[: whole * blocks_a_page].reshape(whole, blocks_a_page)
    inner = (np.diff(starts) == 1).all(1) & (starts[:, 0] != NO_BLOCK)
    joined = inner[1:] & inner[:-1] & (starts[1:, 0] == starts[:-1, -1] + 1)
    steps = np.diff(places).tolist()
    first = 0
    while first < len(places):
        stop = first + 1
        near = stop < whole and 0 <= steps[first] - page_bytes < GAP_BYTES_MAX
        while near and stop < whole and joined[stop - 1] and steps[stop - 1] == steps[first]:
            stop += 1
        yield first, stop
        first = stop


def pairs_of(
    pages: NDArray[Any], sources: Sequence[NDArray[Any]]
) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
    """Parts of pages [planes, ...], and the same of each source, in the pages' shape."""
    if len(sources) == 1:
        yield pages, sources[0].reshape(pages.shape)
        return
    for page, source in zip(pages, sources, strict=True):
        yield page, source.reshape(page.shape)
