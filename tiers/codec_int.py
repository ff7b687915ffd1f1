"""int8 and int4 on the CPU: keys per channel, values per token, as KIVI (arXiv 2402.02750).

    | codes: plane 0, plane 1, ... | scales of all planes | minima of all planes |

    codes     each plane [heads, tokens, dim]; int8: a byte each; int4: two a byte, the even
              channel in the low half; the section is padded with zeros to 16 bytes
    keys      a scale and a minimum for each (head, group of tokens, channel)
    values    a scale and a minimum for each (head, token, group of channels); so for MLA's latent

A group is the largest power of two up to 32 that divides the tokens, or the channels. Scales and
minima have the page's dtype. code = floor((x - minimum) / scale + 1/2), x = minimum + code * scale,
in float32, scale = (maximum - minimum) / (255 or 15). kernels/quantize.py makes the same bytes.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from kvstore.tiers.codec_shape import STORED_AS, WIDTHS, CodecError, KvShape, from_float32
from kvstore.tiers.codec_shape import to_float32 as widened

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from typing_extensions import Buffer

GROUP_MAX = 32
SECTION_BYTES = 16


class IntCodec:
    """Pages of one shape in codes of 8 or 4 bits. Stateless; threads may share it."""

    def __init__(self, shape: KvShape, bits: int) -> None:
        if bits not in (4, 8) or (bits == 4 and shape.dim % 2):
            raise CodecError(f"{bits} bits for a dim of {shape.dim}: 8, or 4 and an even dim")
        self.shape = shape
        self.bits = bits
        self.most = (1 << bits) - 1
        self.token_group = math.gcd(shape.tokens, GROUP_MAX)
        self.channel_group = math.gcd(shape.dim, GROUP_MAX)
        self._plane_bytes = shape.plane_values * bits // 8
        self._scales_at = -(-shape.planes * self._plane_bytes // SECTION_BYTES) * SECTION_BYTES
        keys = shape.heads * (shape.tokens // self.token_group) * shape.dim
        values = shape.heads * shape.tokens * (shape.dim // self.channel_group)
        self._scales_of = (keys, values) if shape.kinds == 2 else (values,)
        self._scales = shape.layers * sum(self._scales_of)

    @property
    def name(self) -> str:
        """What the spec's KvQuantization calls the scheme."""
        return f"int{self.bits}-g{self.token_group}-g{self.channel_group}"

    @property
    def encoded_bytes(self) -> int:
        """Bytes of every encoded page of this shape."""
        return self._scales_at + 2 * self._scales * WIDTHS[self.shape.dtype]

    def encode(self, page: Buffer) -> bytearray:
        """A page's codes; CodecError if it has another size or a number that is not finite."""
        shape = self.shape
        encoded = bytearray(self.encoded_bytes)
        out = np.frombuffer(encoded, np.uint8)
        scales, minima = self._parameters(out)
        at = 0
        for plane, stored in enumerate(shape.numbers(page)):
            groups, axis = self._grouped(widened(stored, shape.dtype), plane)
            low = groups.min(axis, keepdims=True) + np.float32(
                0.0
            )  # -0.0 becomes 0.0: which of the two a machine finds differs
            high = groups.max(axis, keepdims=True) + np.float32(0.0)
            with np.errstate(over="ignore", invalid="ignore"):
                scale = from_float32((high - low) / np.float32(self.most), shape.dtype)
            wide = widened(scale, shape.dtype)
            if not (np.isfinite(wide).all() and np.isfinite(low).all()):
                raise CodecError(f"plane {plane} has numbers that are not finite, or too far apart")
            codes = groups - low
            codes /= np.where(wide > 0, wide, np.float32(1))
            codes += np.float32(0.5)
            np.floor(codes, out=codes)
            np.minimum(codes, np.float32(self.most), out=codes)
            if not wide.all():
                codes *= wide > 0
            numbers = codes.reshape(-1).astype(np.uint8)
            if self.bits == 4:
                pairs = numbers.view("<u2")
                numbers = (pairs | pairs >> 4).astype(np.uint8)
            out[plane * self._plane_bytes : (plane + 1) * self._plane_bytes] = numbers
            end = at + self._scales_of[plane % shape.kinds]
            scales[at:end] = scale.reshape(-1)
            minima[at:end] = from_float32(low, shape.dtype).reshape(-1)
            at = end
        return encoded

    def decode(self, encoded: Buffer, out: Buffer) -> None:
        """Fill `out`, a page of this shape, writable. CodecError for a size that no page has."""
        shape = self.shape
        source = np.frombuffer(memoryview(encoded).cast("B"), np.uint8)
        if source.size != self.encoded_bytes:
            raise CodecError(
                f"{source.size} bytes; a page in int{self.bits} has {self.encoded_bytes}"
            )
        scales, minima = self._parameters(source)
        target = shape.numbers(out)
        at = 0
        for plane in range(shape.planes):
            codes = source[plane * self._plane_bytes : (plane + 1) * self._plane_bytes]
            if self.bits == 4:
                pairs = codes.astype("<u2")
                codes = ((pairs | pairs << 4) & 0x0F0F).view(np.uint8)
            form = (shape.heads, shape.tokens, shape.dim)
            groups, axis = self._grouped(codes.reshape(form).astype(np.float32), plane)
            parameters = [1 if i == axis else size for i, size in enumerate(groups.shape)]
            end = at + self._scales_of[plane % shape.kinds]
            with np.errstate(over="ignore", invalid="ignore"):
                groups *= widened(scales[at:end], shape.dtype).reshape(parameters)
                groups += widened(minima[at:end], shape.dtype).reshape(parameters)
            target[plane] = from_float32(groups, shape.dtype).reshape(form)
            at = end

    def _parameters(self, page: NDArray[np.uint8]) -> tuple[NDArray[Any], NDArray[Any]]:
        numbers = page[self._scales_at :].view(STORED_AS[self.shape.dtype])
        return numbers[: self._scales], numbers[self._scales :]

    def _grouped(self, x: NDArray[np.float32], plane: int) -> tuple[NDArray[np.float32], int]:
        """[heads, tokens, dim] with its groups on an axis of their own, and that axis."""
        heads, tokens, dim = x.shape
        if self.shape.kinds == 2 and plane % 2 == 0:
            return x.reshape(heads, -1, self.token_group, dim), 2
        return x.reshape(heads, tokens, -1, self.channel_group), 3
