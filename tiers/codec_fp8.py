"""fp8 (e4m3) on the CPU: one float32 scale for each head of each plane.

    | codes: plane 0, plane 1, ..., each [heads, tokens, dim] | scales [planes, heads] |

The codes are padded with zeros to 16 bytes. scale = largest magnitude / 448; code = e4m3 of
x / scale, to nearest, ties to even. kernels/quantize_fp8.py makes the same bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvstore.tiers.codec_int import SECTION_BYTES
from kvstore.tiers.codec_shape import CodecError, KvShape, from_float32, to_float32

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from typing_extensions import Buffer

LARGEST = np.float32(448.0)
SMALLEST_NORMAL_BITS = 0x3C800000  # 2^-6
TINY_OFFSET = np.float32(16384.0)  # adding it to a float32 rounds to units of 2^-9
TINY_OFFSET_BITS = 0x46800000


class Fp8Codec:
    """Pages of one shape in e4m3. Stateless; threads may share it."""

    name = "fp8-e4m3-head"

    def __init__(self, shape: KvShape) -> None:
        self.shape = shape
        codes = shape.planes * shape.plane_values
        self._codes_bytes = codes
        self._scales_at = -(-codes // SECTION_BYTES) * SECTION_BYTES

    @property
    def encoded_bytes(self) -> int:
        """Bytes of every encoded page of this shape."""
        return self._scales_at + 4 * self.shape.planes * self.shape.heads

    def encode(self, page: Buffer) -> bytearray:
        """A page's codes; CodecError if it has another size or a number that is not finite."""
        encoded = bytearray(self.encoded_bytes)
        codes, scales = self._sections(np.frombuffer(encoded, np.uint8))
        for plane, stored in enumerate(self.shape.numbers(page)):
            x = to_float32(stored, self.shape.dtype).reshape(self.shape.heads, -1)
            scale = np.abs(x).max(1) / LARGEST
            if not np.isfinite(scale).all():
                raise CodecError(f"plane {plane} has numbers that are not finite")
            x /= np.where(scale > 0, scale, np.float32(1))[:, None]
            np.clip(x, -LARGEST, LARGEST, out=x)
            codes[plane] = to_e4m3(x)
            scales[plane] = scale
        return encoded

    def decode(self, encoded: Buffer, out: Buffer) -> None:
        """Fill `out`, a page of this shape, writable. CodecError for a size that no page has."""
        shape = self.shape
        source = np.frombuffer(memoryview(encoded).cast("B"), np.uint8)
        if source.size != self.encoded_bytes:
            raise CodecError(f"{source.size} bytes; a page in fp8 has {self.encoded_bytes}")
        codes, scales = self._sections(source)
        target = shape.numbers(out)
        for plane in range(shape.planes):
            x = _VALUES[codes[plane]]
            with np.errstate(over="ignore", invalid="ignore"):
                x *= scales[plane][:, None]
            form = (shape.heads, shape.tokens, shape.dim)
            target[plane] = from_float32(x, shape.dtype).reshape(form)

    def _sections(self, page: NDArray[np.uint8]) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
        codes = page[: self._codes_bytes].reshape(self.shape.planes, self.shape.heads, -1)
        scales = page[self._scales_at :].view("<f4")
        return codes, scales.reshape(self.shape.planes, self.shape.heads)


def to_e4m3(x: NDArray[np.float32]) -> NDArray[np.uint8]:
    """The code of each number within [-448, 448]."""
    bits = x.view(np.uint32)
    size = bits & 0x7FFFFFFF
    normal = (size >> 20) & 1
    normal += size
    normal += 0x7FFFF
    normal >>= 20
    normal -= 960
    tiny = (size.view(np.float32) + TINY_OFFSET).view(np.uint32)
    tiny -= TINY_OFFSET_BITS
    codes = np.where(size < SMALLEST_NORMAL_BITS, tiny, normal)
    codes |= (bits >> 24) & 0x80
    return codes.astype(np.uint8)


def _all_values() -> NDArray[np.float32]:
    """The number of each code; the two NaN codes, which no encoder makes, are NaN."""
    code = np.arange(128)
    exponent, fraction = code >> 3, code & 7
    normal = np.ldexp(1 + fraction / 8, exponent - 7)
    values = np.where(exponent > 0, normal, fraction / 512)
    values[127] = np.nan
    return np.concatenate([values, -values]).astype(np.float32)


_VALUES = _all_values()
