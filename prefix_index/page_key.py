"""Page keys: 16 bytes that name a chain, and the one conversion of tokens to bytes.

key i = digest, after page i, of one XXH3-128 stream over root, then for each page its tokens (int32
little-endian) and, where it has extras, int32 -1, int32 length, the extras. A key is a hint: who
finds a page by it compares the tokens. Nothing here depends on PYTHONHASHSEED or byte order.
"""

from __future__ import annotations

import sys
from array import array
from struct import Struct, iter_unpack
from typing import TYPE_CHECKING, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

PAGE_KEY_BYTES = 16
TOKEN_BYTES = 4
# A page's extras are digests and offsets, not the things themselves.
EXTRAS_BYTES_MAX = 1 << 16

Tokens: TypeAlias = "bytes | npt.NDArray[np.integer] | Sequence[int]"

_EXTRAS_HEADER = Struct("<ii")
_NO_EXTRAS: dict[int, bytes] = {}


class Digest(Protocol):
    """What page_keys needs of a streaming hash; xxhash.xxh3_128 and hashlib objects have it."""

    def update(self, data: bytes, /) -> None: ...

    def digest(self) -> bytes: ...


def token_bytes(tokens: Tokens) -> bytes:
    """Tokens as int32 little-endian bytes.

    Bytes are taken to be that already. Raises ValueError for tokens outside [0, 2^31), for bytes
    that are no whole tokens, and for arrays that are not one-dimensional integers.
    """
    return bytes(token_buffer(tokens))


def token_buffer(tokens: Tokens) -> bytes | memoryview:
    """What token_bytes gives, but a window on the memory of an array that is like that already."""
    if isinstance(tokens, np.ndarray):
        return _array_buffer(tokens)
    if isinstance(tokens, bytes | bytearray | memoryview):
        if len(tokens) % TOKEN_BYTES:
            raise ValueError(f"tokens: {len(tokens)} bytes are no whole int32 tokens")
        return bytes(tokens)
    try:
        packed = array("i", tokens)
    except (OverflowError, TypeError) as exc:
        raise ValueError(f"tokens must be integers in [0, 2^31): {exc}") from exc
    return _array_buffer(np.frombuffer(packed, np.int32))


def page_extras(extras: Mapping[int, bytes] | None) -> Mapping[int, bytes]:
    """Extras by page index, checked; empty ones mean none and are left out."""
    if not extras:
        return _NO_EXTRAS
    for index, value in extras.items():
        if index < 0 or len(value) > EXTRAS_BYTES_MAX:
            raise ValueError(
                f"extras of page {index}: {len(value)} bytes; "
                f"page index >= 0 and at most {EXTRAS_BYTES_MAX} bytes a page"
            )
    return {index: bytes(value) for index, value in extras.items() if len(value)}


def page_keys(
    root: bytes,
    tokens: Tokens,
    page_tokens: int,
    extras: Mapping[int, bytes] | None = None,
    *,
    first: int = 0,
    digest: Callable[[bytes], Digest] = xxhash.xxh3_128,
) -> bytes:
    """Keys of the whole pages of `tokens` from page `first` on, PAGE_KEY_BYTES each.

    `tokens` and `extras` begin at the chain's first page whatever `first` says. A trailing piece
    of a page has no key.
    """
    if page_tokens < 1 or first < 0:
        raise ValueError(f"page_tokens {page_tokens} must be >= 1, first page {first} >= 0")
    data = token_bytes(tokens)
    page_bytes = page_tokens * TOKEN_BYTES
    pages = len(data) // page_bytes
    stream = digest(root)
    known = page_extras(extras)
    if known:
        return _keys_with_extras(stream, data, page_bytes, known, first)
    if first >= pages:
        return b""
    update, take = stream.update, stream.digest
    update(data[: first * page_bytes])
    rest = memoryview(data)[first * page_bytes : pages * page_bytes]
    return b"".join([take() for (page,) in iter_unpack(f"{page_bytes}s", rest) if not update(page)])


def _keys_with_extras(
    stream: Digest, data: bytes, page_bytes: int, extras: Mapping[int, bytes], first: int
) -> bytes:
    keys = []
    for index in range(len(data) // page_bytes):
        stream.update(data[index * page_bytes : (index + 1) * page_bytes])
        value = extras.get(index)
        if value is not None:
            stream.update(_EXTRAS_HEADER.pack(-1, len(value)) + value)
        if index >= first:
            keys.append(stream.digest())
    return b"".join(keys)


def _array_buffer(tokens: npt.NDArray[np.integer]) -> bytes | memoryview:
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise ValueError(f"tokens: {tokens.dtype} array of {tokens.ndim} dimensions; want 1-d int")
    if not tokens.size:
        return b""
    if tokens.min() < 0 or (tokens.dtype != np.int32 and tokens.max() >= 1 << 31):
        raise ValueError(f"tokens from {tokens.min()} to {tokens.max()} are not all in [0, 2^31)")
    if tokens.dtype != np.int32 or sys.byteorder != "little":
        tokens = tokens.astype("<i4")
    return np.ascontiguousarray(tokens).data.cast("B")


def run_length(
    tokens: bytes,
    page_tokens: int,
    keys: bytes,
    sequences: npt.NDArray[np.uint64],
    checksums: npt.NDArray[np.uint64],
) -> int:
    """Pages in a run, having checked that its parts agree."""
    count = len(keys) // PAGE_KEY_BYTES
    sizes = len(tokens), len(keys), len(sequences), checksums.shape
    if not count or sizes != (count * page_tokens * 4, count * 16, count, (count, 2)):
        raise ValueError(f"tokens, keys, sequences, checksums of sizes {sizes} do not agree")
    if np.frombuffer(tokens, np.int32).min() < 0:
        raise ValueError("tokens must be in [0, 2^31)")
    return count
