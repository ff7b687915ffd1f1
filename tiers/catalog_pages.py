"""Checks the page structure of a closed LMDB file that reading its records cannot check.

A walk over all records proves that they can be read; it never looks at the free list, nor at the
room that a page claims to have. A damaged number there kills the process that writes, or lets it
write over live pages, much later. So the child that walks a catalog also runs this, before anything
writes to it. Knows the layout of LMDB 0.9 on 64-bit little-endian machines (mdb.c), reads only.

    page   | number u64 | pad u16 | flags u16 | lower u16 | upper u16 | offsets u16 ... | nodes |
    meta   | header 16 | magic u32 | version u32 | address u64 | map size u64 | free db, main db
           | last page u64 | transaction u64 |
    db     | pad u32 | flags u16 | depth u16 | branch, leaf, overflow pages, entries, root: u64s |
    node   | low u16 | high u16 | flags u16 | key size u16 | key | data |
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from pathlib import Path

    import numpy.typing as npt

    Pages = npt.NDArray[np.uint8]
    Numbers = npt.NDArray[np.int64]

PAGE_BYTES = 4096
HEADER_BYTES = 16
NODE_BYTES = 8
MAGIC = 0xBEEFC0DE
NO_PAGE = (1 << 64) - 1
BRANCH, LEAF, OVERFLOW, META = 1, 2, 4, 8
INTEGER_KEYS = 8  # database flag: of the free list
BIG_DATA = 1  # node flag: the data lies in overflow pages
DEPTH_MAX = 32
PAGES_AT_ONCE = 4096
_META = struct.Struct("<IIQQ")
_DB = struct.Struct("<IHHQQQQQ")
_NODE = struct.Struct("<HHHH")
_U64 = struct.Struct("<Q")


class PageError(Exception):
    """The file's structure is not what LMDB would have written."""


@dataclass(frozen=True, slots=True)
class Database:
    """One B-tree, as the meta page describes it."""

    flags: int
    depth: int
    branch_pages: int
    leaf_pages: int
    overflow_pages: int
    entries: int
    root: int


def check_pages(data_file: Path) -> int:
    """Check meta, trees and free list; the number of records. Raises PageError."""
    content = np.fromfile(data_file, np.uint8)
    if len(content) < 2 * PAGE_BYTES:
        raise PageError(f"{len(content)} bytes hold no two meta pages")
    pages = content[: len(content) // PAGE_BYTES * PAGE_BYTES].reshape(-1, PAGE_BYTES)
    free, main, last = _newest_meta(pages)
    # The file may end earlier: what one transaction allots and frees again is never written.
    reach = min(last, len(pages) - 1)
    if main.flags or free.flags & ~INTEGER_KEYS:
        raise PageError(f"database flags {main.flags:#x}, {free.flags:#x}")
    used = np.concatenate([_tree(pages, main, reach), _tree(pages, free, reach)])
    listed = _free_pages(pages, free, last)
    every = np.concatenate([used, listed])
    if len(np.unique(every)) != len(every):
        raise PageError("a page is used twice, or used and free")
    return main.entries


def _newest_meta(pages: Pages) -> tuple[Database, Database, int]:
    found = []
    for number in (0, 1):
        page = pages[number].tobytes()
        magic, version, _, _ = _META.unpack_from(page, HEADER_BYTES)
        if magic != MAGIC or version != 1:
            raise PageError(f"meta page {number} has magic {magic:#x}, version {version}")
        at = HEADER_BYTES + _META.size
        (size, *free), (_, *main) = _DB.unpack_from(page, at), _DB.unpack_from(page, at + _DB.size)
        if number == 0 and size != PAGE_BYTES:
            raise PageError(f"pages of {size} bytes")
        last, transaction = struct.unpack_from("<QQ", page, at + 2 * _DB.size)
        found.append((transaction, Database(*free), Database(*main), last))
    _, free_db, main_db, last = max(found, key=lambda meta: meta[0])
    return free_db, main_db, last


def _tree(pages: Pages, tree: Database, last: int) -> Numbers:
    """Numbers of all pages of a tree, each checked; overflow pages included. `last`: of the file's
    pages that the meta page knows of."""
    if tree.root == NO_PAGE:
        if tree.entries or tree.depth:
            raise PageError("entries without a root")
        return np.empty(0, np.int64)
    if not 1 <= tree.depth <= DEPTH_MAX:
        raise PageError(f"depth {tree.depth}")
    level = np.array([tree.root], np.int64)
    _expect_range(level, last)
    numbers = []
    for _ in range(tree.depth - 1):
        _expect_headers(pages, level, BRANCH)
        numbers.append(level)
        level = np.concatenate([_children(pages[number].tobytes()) for number in level.tolist()])
        _expect_range(level, last)
    entries = _expect_headers(pages, level, LEAF)
    branches = sum(map(len, numbers))
    if (branches, len(level), entries) != (tree.branch_pages, tree.leaf_pages, tree.entries):
        raise PageError(
            f"{branches} branches, {len(level)} leaves, {entries} entries; the meta page says "
            f"{tree.branch_pages}, {tree.leaf_pages}, {tree.entries}"
        )
    overflow = _overflow_pages(pages, level, last) if tree.overflow_pages else level[:0]
    if len(overflow) != tree.overflow_pages:
        raise PageError(f"{len(overflow)} overflow pages, the meta page says {tree.overflow_pages}")
    return np.concatenate([*numbers, level, overflow])


def _expect_range(numbers: Numbers, last: int) -> None:
    if len(numbers) > last or (numbers < 2).any() or (numbers > last).any():
        raise PageError("a page number points outside the file")


def _expect_headers(pages: Pages, numbers: Numbers, flags: int) -> int:
    """Check headers and node offsets of pages of one kind; how many nodes they have."""
    heads = pages[numbers, :HEADER_BYTES]
    own = heads[:, :8].copy().view("<u8")[:, 0]
    words = heads[:, 8:16].copy().view("<u2").astype(np.int64)
    lower, upper = words[:, 2], words[:, 3]
    if (own != numbers.astype(np.uint64)).any() or (words[:, 1] != flags).any():
        raise PageError("a page is not what its parent says")
    if ((lower < HEADER_BYTES) | (lower > upper) | (upper > PAGE_BYTES) | (lower % 2 == 1)).any():
        raise PageError("a page claims impossible room")
    counts = (lower - HEADER_BYTES) // 2
    if not counts.all():
        raise PageError("an empty page in a tree")
    reach = HEADER_BYTES + 2 * int(counts.max())
    offsets = pages[numbers, HEADER_BYTES:reach].copy().view("<u2").astype(np.int64)
    present = np.arange(offsets.shape[1]) < counts[:, None]
    if (offsets[present] > PAGE_BYTES - NODE_BYTES).any():
        raise PageError("a node lies outside its page")
    starts = np.where(present, offsets, PAGE_BYTES)
    if (starts.min(axis=1) != upper).any():
        raise PageError("a node lies where a page claims room")
    for first in range(0, len(numbers), PAGES_AT_ONCE):
        part = slice(first, first + PAGES_AT_ONCE)
        _expect_no_gaps(pages, numbers[part], np.sort(starts[part], axis=1), flags)
    return int(counts.sum())


def _expect_no_gaps(pages: Pages, numbers: Numbers, starts: Numbers, flags: int) -> None:
    """Each node of a page ends where the next begins: who deletes one trusts the length it names.

    `starts`: a row a page, ascending, filled up with PAGE_BYTES.
    """
    row, column = np.nonzero(starts < PAGE_BYTES)
    begin = starts[row, column]
    at = (numbers[row] * PAGE_BYTES + begin)[:, None] + np.arange(NODE_BYTES)
    low, high, node_flags, key = pages.reshape(-1)[at].view("<u2").astype(np.int64).T
    size = NODE_BYTES + key
    if flags == LEAF:
        size = size + np.where(node_flags & BIG_DATA, 8, low | high << 16)
        if (node_flags & ~BIG_DATA).any():
            raise PageError("a node is of a kind that a catalog has not")
    end = np.append(starts, np.full((len(starts), 1), PAGE_BYTES), axis=1)[row, column + 1]
    if (begin + size + size % 2 != end).any():
        raise PageError("a node does not end where the next one begins")


def _nodes(page: bytes) -> list[tuple[int, int, int, int, int]]:
    """(offset, low, high, flags, key size) of each node of a page."""
    (lower,) = struct.unpack_from("<H", page, 12)
    offsets = struct.unpack_from(f"<{(lower - HEADER_BYTES) // 2}H", page, HEADER_BYTES)
    return [(offset, *_NODE.unpack_from(page, offset)) for offset in offsets]


def _children(page: bytes) -> Numbers:
    return np.array([low | high << 16 | flags << 32 for _, low, high, flags, _ in _nodes(page)])


def _overflow_pages(pages: Pages, leaves: Numbers, last: int) -> Numbers:
    numbers: list[int] = []
    for leaf in leaves.tolist():
        page = pages[leaf].tobytes()
        for offset, low, high, flags, key_bytes in _nodes(page):
            if flags & BIG_DATA:
                first, count = _run(pages, page, offset + NODE_BYTES + key_bytes, low | high << 16)
                if not 2 <= first <= last + 1 - count:
                    raise PageError("overflow pages lie outside the file")
                numbers.extend(range(first, first + count))
    return np.array(numbers, np.int64)


def _run(pages: Pages, page: bytes, at: int, data_bytes: int) -> tuple[int, int]:
    """First page and length of the overflow run that a node's 8 bytes at `at` name."""
    if at > PAGE_BYTES - 8:
        raise PageError("a node lies outside its page")
    (first,) = _U64.unpack_from(page, at)
    if first >= len(pages):
        raise PageError("overflow pages lie outside the file")
    head = pages[first, :HEADER_BYTES].tobytes()
    own, _, flags, count = struct.unpack("<QHHI", head)
    if own != first or flags != OVERFLOW or count < -(-(data_bytes + HEADER_BYTES) // PAGE_BYTES):
        raise PageError("an overflow page is not what its node says")
    return first, count


def _free_pages(pages: Pages, free: Database, last: int) -> Numbers:
    """All page numbers in the free list's records."""
    if free.root == NO_PAGE:
        return np.empty(0, np.int64)
    level = [free.root]
    for _ in range(free.depth - 1):
        level = [child for number in level for child in _children(pages[number].tobytes()).tolist()]
    lists = []
    for leaf in level:
        page = pages[leaf].tobytes()
        for offset, low, high, flags, key_bytes in _nodes(page):
            size, at = low | high << 16, offset + NODE_BYTES + key_bytes
            if key_bytes != 8 or size % 8 or size < 8:
                raise PageError("a record of the free list has an impossible size")
            if flags & BIG_DATA:
                first, _ = _run(pages, page, at, size)
                data = pages.reshape(-1)[first * PAGE_BYTES + HEADER_BYTES :][:size].tobytes()
            else:
                data = page[at : at + size]
            lists.append(_free_list(data, size, last))
    return np.concatenate(lists) if lists else np.empty(0, np.int64)


def _free_list(data: bytes, size: int, last: int) -> Numbers:
    if len(data) != size:
        raise PageError("a record of the free list reaches over its page")
    words = np.frombuffer(data, "<u8")
    count = int(words[0])
    if count > len(words) - 1:
        raise PageError(f"the free list names {count} pages in {len(words) - 1} words")
    numbers = words[1 : count + 1]
    if len(numbers) and (int(numbers.max()) > last or int(numbers.min()) < 2):
        raise PageError("the free list names a page outside the file")
    ordered = numbers.astype(np.int64)
    if (np.diff(ordered) >= 0).any():
        raise PageError("the free list is out of order")
    return ordered
