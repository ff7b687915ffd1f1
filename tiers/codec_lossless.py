"""Bit-exact and smaller: the byte with sign and exponent by zstd, the rest as it is.

    | head, 32 bytes | zstd of high bytes | second bytes | ... | what is left of the last number |

The high bytes of KV hold 3 bits of information in 8, the low ones 8 (measured: SmolLM2, bf16),
so only the former are worth the time. The width of the numbers is found by looking at the bytes,
and stands in the head. A frame tells its own length, so it may be followed by anything.
"""

from __future__ import annotations

import struct
import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from kvstore.tiers.checksum import check64
from kvstore.tiers.codec_shape import CodecError

try:
    import zstandard
except ImportError:  # the extra `lossless` is not installed
    zstandard = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from typing_extensions import Buffer

MAGIC = b"KVL1"
# magic | width | zeros | raw bytes | bytes of the zstd frame | check of all this
_HEAD = struct.Struct("<4sB3xQQ8s")
HEAD_BYTES = _HEAD.size
_CHECKED_BYTES = HEAD_BYTES - 8
ZSTD_LEVEL = 1  # 3 is half as fast and, on KV, no smaller
WIDTHS = (1, 2, 4)
SAMPLE_BYTES = 16 << 10
SAMPLES = 4

_WORDS: dict[int, tuple[np.dtype[Any], int]] = {
    2: (np.dtype("<u2"), 8),
    4: (np.dtype("<u4"), 24),
}
_own = threading.local()  # zstd contexts are not to be shared by threads


def available() -> bool:
    """Whether the package that this codec needs is installed."""
    return zstandard is not None


def encode(payload: Buffer) -> bytes:
    """A frame that `decode` makes the payload of again; it may be a little larger than that."""
    raw = np.frombuffer(memoryview(payload).cast("B"), np.uint8)
    width = _likely_width(raw)
    whole = raw[: raw.size // width * width]
    high, rest = _split(whole, width)
    packed = _compressor().compress(high.data)
    head = _HEAD.pack(MAGIC, width, raw.size, len(packed), bytes(8))[:_CHECKED_BYTES]
    left = raw[whole.size :]
    return b"".join([head, check64(head), packed, *(each.data for each in (*rest, left))])


def decode(frame: Buffer, out: Buffer) -> int:
    """Fill `out` with the payload; how many bytes the frame has. CodecError for what is no frame.

    `frame` may go on behind its end. Nothing is believed but the head, and that by its check: the
    caller compares the payload with a checksum of its own.
    """
    source = memoryview(frame).cast("B")
    target = np.frombuffer(memoryview(out).cast("B"), np.uint8)
    width, raw_bytes, packed_bytes = read_head(source)
    if raw_bytes != target.size:
        raise CodecError(f"a frame of {raw_bytes} bytes; {target.size} are wanted")
    count = raw_bytes // width
    end = HEAD_BYTES + packed_bytes + raw_bytes - count
    if packed_bytes > source.nbytes or end > source.nbytes:
        raise CodecError(f"a frame of {end} bytes, of which {source.nbytes} are there")
    packed = source[HEAD_BYTES : HEAD_BYTES + packed_bytes]
    high = np.frombuffer(_unpacked(packed, count), np.uint8)
    rest = np.frombuffer(source[HEAD_BYTES + packed_bytes : end], np.uint8)
    _join(high, rest, width, target[: count * width])
    target[count * width :] = rest[count * (width - 1) :]
    return end


def read_head(frame: Buffer) -> tuple[int, int, int]:
    """Width of the numbers, bytes of payload and of the zstd part; CodecError if not sound."""
    head = bytes(memoryview(frame).cast("B")[:HEAD_BYTES])
    if len(head) < HEAD_BYTES or head[:4] != MAGIC:
        raise CodecError("no frame of the lossless codec")
    _, width, raw_bytes, packed_bytes, check = _HEAD.unpack(head)
    if check != check64(head[:_CHECKED_BYTES]) or width not in WIDTHS:
        raise CodecError("the head of a frame fails its check")
    return width, raw_bytes, packed_bytes


def _likely_width(raw: NDArray[np.uint8]) -> int:
    """The width of numbers with which the high bytes seem to be worth most."""
    starts = np.linspace(0, max(0, raw.size - SAMPLE_BYTES), SAMPLES).astype(int) // 4 * 4
    sample = np.concatenate([raw[start : start + SAMPLE_BYTES] for start in starts])
    return min(WIDTHS, key=lambda width: _expected_share(sample[width - 1 :: width], width))


def _expected_share(high: NDArray[np.uint8], width: int) -> float:
    """Bytes after over bytes before, if the high bytes were packed to their entropy."""
    counts = np.bincount(high, minlength=256)
    seen = counts[counts > 0] / max(high.size, 1)
    bits = float(-(seen * np.log2(seen)).sum())
    return (bits / 8 + width - 1) / width


def _split(
    whole: NDArray[np.uint8], width: int
) -> tuple[NDArray[np.uint8], list[NDArray[np.uint8]]]:
    """The high byte of each number, and planes of the others from the second highest down."""
    if width == 1:
        return whole, []
    dtype, shift = _WORDS[width]
    numbers = _aligned(whole, width).view(dtype)
    planes = [(numbers >> at).astype(np.uint8) for at in range(shift, -1, -8)]
    return planes[0], planes[1:]


def _join(
    high: NDArray[np.uint8], rest: NDArray[np.uint8], width: int, target: NDArray[np.uint8]
) -> None:
    if width == 1:
        target[:] = high
        return
    dtype, _ = _WORDS[width]
    numbers = high.astype(dtype)
    for plane in range(width - 1):
        numbers <<= 8
        numbers |= rest[plane * high.size : (plane + 1) * high.size]
    target[:] = numbers.view(np.uint8)


def _aligned(whole: NDArray[np.uint8], width: int) -> NDArray[np.uint8]:
    return whole.copy() if whole.ctypes.data % width else whole


def _compressor() -> zstandard.ZstdCompressor:
    if zstandard is None:
        raise CodecError("the lossless codec needs zstandard; pip install 'kvstore-llm[lossless]'")
    if not hasattr(_own, "compressor"):
        _own.compressor = zstandard.ZstdCompressor(level=ZSTD_LEVEL)
        _own.decompressor = zstandard.ZstdDecompressor()
    compressor: zstandard.ZstdCompressor = _own.compressor
    return compressor


def _unpacked(packed: memoryview, size: int) -> bytes:
    """What a zstd frame holds, exactly `size` bytes."""
    _compressor()
    try:
        told = zstandard.frame_content_size(packed)
        if told != size:
            raise CodecError(f"a zstd frame of {told} bytes; {size} are wanted")
        unpacked: bytes = _own.decompressor.decompress(packed)
    except zstandard.ZstdError as error:
        raise CodecError(f"a zstd frame is damaged: {error}") from error
    if len(unpacked) != size:
        raise CodecError(f"a zstd frame of {len(unpacked)} bytes; {size} are wanted")
    return unpacked
