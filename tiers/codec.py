"""The codecs by name: which there are, which a disk may use, which change numbers.

`raw` and `lossless` give back what they were given, byte for byte, and are the disk tier's choice:
nobody above notices. The others change numbers, so a page in them is another page: it is stored
under a spec whose KvQuantization names the scheme (kvstore/quantized_session.py), and can never be
taken for an exact one. No codec does I/O.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from kvstore.tiers import codec_lossless
from kvstore.tiers.codec_fp8 import Fp8Codec
from kvstore.tiers.codec_int import IntCodec
from kvstore.tiers.codec_shape import CodecError, KvShape

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Buffer

__all__ = ["DISK_CODECS", "LOSSY_CODECS", "CodecError", "KvShape", "LossyCodec", "disk_codec"]

RAW, LOSSLESS = 0, 1  # PageRecord.codec; these stand on disk
DISK_CODECS = {"raw": RAW, "lossless": LOSSLESS}


class LossyCodec(Protocol):
    """What changes a page's numbers. Threads may share one."""

    @property
    def name(self) -> str:
        """The scheme as the spec's KvQuantization calls it, parameters included."""

    @property
    def encoded_bytes(self) -> int:
        """Bytes of every encoded page of the shape."""

    def encode(self, page: Buffer) -> bytearray:
        """The codes of a page. CodecError: of another size, or with numbers not finite."""

    def decode(self, encoded: Buffer, out: Buffer) -> None:
        """Fill `out`, a writable page. CodecError: no page has this size."""


LOSSY_CODECS: dict[str, Callable[[KvShape], LossyCodec]] = {
    "fp8": Fp8Codec,
    "int8": lambda shape: IntCodec(shape, 8),
    "int4": lambda shape: IntCodec(shape, 4),
}


def disk_codec(name: str) -> int:
    """The number of a codec for a disk tier. CodecError says why not, and what instead."""
    if name in LOSSY_CODECS:
        raise CodecError(
            f"{name} changes numbers, so it can't be a store's doing: store quantized pages under "
            "a spec that names the scheme (KvQuantization; kvstore.quantized_session does)"
        )
    if name not in DISK_CODECS:
        raise CodecError(f"{name!r} is not one of {', '.join(DISK_CODECS)}")
    if name == "lossless" and not codec_lossless.available():
        raise CodecError("lossless needs zstandard; pip install 'kvstore-llm[lossless]'")
    return DISK_CODECS[name]
