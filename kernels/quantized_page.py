"""What a quantized page looks like, byte by byte: sizes and offsets, no arithmetic on numbers.

    | codes: plane 0, plane 1, ... | scales of all planes | minima of all planes |

    codes     each plane [heads, tokens, dim]; int8: a byte each; int4: two a byte, the even
              channel in the low half; the section is padded with zeros to 16 bytes
    keys      a scale and a minimum for each (head, group of tokens, channel)    (KIVI)
    values    a scale and a minimum for each (head, token, group of channels); so for MLA's latent
    fp8       no minima; one float32 scale for each (plane, head)

Scales and minima have the KV's own dtype, so that a minimum is exact and no range overflows them.
tiers/codec_int.py and tiers/codec_fp8.py read and write the same bytes on the CPU; a test compares.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from kvstore.kernels.paged_kv import PagedKv

GROUP_MAX = 32  # KIVI's
SECTION_BYTES = 16
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Scheme(StrEnum):
    """How a number becomes a code."""

    FP8 = "fp8"
    INT8 = "int8"
    INT4 = "int4"

    @property
    def bits(self) -> int:
        return 4 if self is Scheme.INT4 else 8


@dataclass(frozen=True, slots=True)
class QuantizedPage:
    """One page of `planes` planes [heads, tokens, dim] in codes of a scheme."""

    scheme: Scheme
    planes: int
    kinds: int  # 2: K and V alternate; 1: MLA's latent
    heads: int
    tokens: int
    dim: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"{self.dtype} is not quantized: it is none of {DTYPES}")
        if self.scheme is Scheme.INT4 and self.dim % 2:
            raise ValueError(f"int4 packs two channels a byte; dim is {self.dim}")

    @classmethod
    def of(cls, kv: PagedKv, scheme: Scheme, blocks_a_page: int) -> QuantizedPage:
        """What pages of `blocks_a_page` blocks of this cache become."""
        tokens = blocks_a_page * kv.block_tokens
        return cls(scheme, len(kv.planes), kv.kinds, kv.heads, tokens, kv.dim, kv.dtype)

    @property
    def token_group(self) -> int:
        """Tokens that share a key's scale: the largest power of two up to 32 that divides them."""
        return math.gcd(self.tokens, GROUP_MAX)

    @property
    def channel_group(self) -> int:
        """Channels that share a value's scale, likewise."""
        return math.gcd(self.dim, GROUP_MAX)

    @property
    def plane_bytes(self) -> int:
        """Bytes of one plane's codes."""
        return self.heads * self.tokens * self.dim * self.scheme.bits // 8

    @property
    def scales_at(self) -> int:
        """Where the scales begin."""
        return -(-self.planes * self.plane_bytes // SECTION_BYTES) * SECTION_BYTES

    def scales_of(self, plane: int) -> int:
        """How many scales a plane has."""
        if self.scheme is Scheme.FP8:
            return self.heads
        if self.kinds == 2 and plane % 2 == 0:
            return self.heads * (self.tokens // self.token_group) * self.dim
        return self.heads * self.tokens * (self.dim // self.channel_group)

    @property
    def scales(self) -> int:
        """How many scales all planes have."""
        layers = self.planes // self.kinds
        return layers * sum(self.scales_of(kind) for kind in range(self.kinds))

    @property
    def page_bytes(self) -> int:
        """Bytes of the whole page."""
        if self.scheme is Scheme.FP8:
            return self.scales_at + 4 * self.scales
        return self.scales_at + 2 * self.scales * self.dtype.itemsize
