"""XXH3-128 of payloads, alone or while copying; XXH3-64 of small records.

The copy is hashed, not the source: the source may be memory that another process still scribbles
on, and only the bytes that stay are worth a checksum.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import xxhash

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray
    from typing_extensions import Buffer

CHECKSUM_BYTES = 16

# XXH3-64 that headers, records and identities carry, 8 bytes; the bare function, for its speed.
check64: Callable[[bytes], bytes] = xxhash.xxh3_64_digest

# A piece is copied and hashed while it lies in the second-level cache, so that hashing reads no
# memory again. Smaller pieces cost more calls, larger ones fall out of the cache.
PIECE_BYTES = 512 << 10


def checksum(payload: Buffer) -> bytes:
    """XXH3-128 of the bytes of a C-contiguous buffer, 16 bytes, as its canonical digest."""
    return bytes(xxhash.xxh3_128_digest(_bytes_of(payload).data))


def copy_and_checksum(source: Buffer, destination: Buffer) -> bytes:
    """Copy `source` to the start of `destination`; return the checksum of what arrived there.

    Both are C-contiguous; the destination is writable and at least as long, else ValueError. The
    interpreter lock is free during the copies and the hashing of all but small payloads.
    """
    origin, target = _bytes_of(source), _bytes_of(destination)
    size = origin.nbytes
    if target.nbytes < size:
        raise ValueError(f"{size} bytes do not fit in a destination of {target.nbytes}")
    hasher = xxhash.xxh3_128()
    for start in range(0, size, PIECE_BYTES):
        piece = target[start : min(start + PIECE_BYTES, size)]
        np.copyto(piece, origin[start : start + PIECE_BYTES])
        hasher.update(piece.data)
    return bytes(hasher.digest())


def _bytes_of(buffer: Buffer) -> NDArray[np.uint8]:
    # frombuffer refuses empty buffers
    view = memoryview(buffer)
    return np.frombuffer(view, np.uint8) if view.nbytes else np.empty(0, np.uint8)
