"""How the numbers of a KV page lie, and how floats of its dtype become float32 and back, in numpy.

Rounding is to nearest, ties to even, on every machine and in the kernels. Must not be here: codecs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvstore.tiers.tier import TierError

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from typing_extensions import Buffer

WIDTHS = {"bfloat16": 2, "float16": 2, "float32": 4}
STORED_AS: dict[str, np.dtype[Any]] = {
    "bfloat16": np.dtype("<u2"),
    "float16": np.dtype("<f2"),
    "float32": np.dtype("<f4"),
}


class CodecError(TierError):
    """Bytes that no encoder made, or numbers that a lossy codec does not take."""


@dataclass(frozen=True, slots=True)
class KvShape:
    """One page: `layers` of `kinds` planes (2: K, V; 1: MLA's latent) of equal size.

    A plane is [heads, tokens, dim], or [tokens, heads, dim] if `tokens_first`.
    """

    dtype: str  # a key of WIDTHS
    layers: int
    kinds: int
    heads: int
    tokens: int
    dim: int
    tokens_first: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in WIDTHS:
            raise CodecError(f"dtype {self.dtype!r} is not one of {', '.join(WIDTHS)}")
        sizes = (self.layers, self.heads, self.tokens, self.dim)
        if self.kinds not in (1, 2) or min(sizes) < 1:
            raise CodecError(f"a page of {sizes} (layers, heads, tokens, dim), kinds {self.kinds}")

    @property
    def planes(self) -> int:
        return self.layers * self.kinds

    @property
    def plane_values(self) -> int:
        return self.heads * self.tokens * self.dim

    @property
    def page_bytes(self) -> int:
        """Bytes of the page as the engine has it."""
        return self.planes * self.plane_values * WIDTHS[self.dtype]

    def numbers(self, page: Buffer) -> NDArray[Any]:
        """A view [planes, heads, tokens, dim] of a page's bytes; CodecError for another size."""
        view = memoryview(page).cast("B")
        if view.nbytes != self.page_bytes:
            raise CodecError(f"a page of {view.nbytes} bytes; this shape has {self.page_bytes}")
        flat = np.frombuffer(view, STORED_AS[self.dtype])
        if self.tokens_first:
            rows = flat.reshape(self.planes, self.tokens, self.heads, self.dim)
            return rows.transpose(0, 2, 1, 3)
        return flat.reshape(self.planes, self.heads, self.tokens, self.dim)


def to_float32(stored: NDArray[Any], dtype: str) -> NDArray[np.float32]:
    """The numbers as float32, exactly; `stored` has STORED_AS[dtype]."""
    if dtype == "bfloat16":
        wide = stored.astype(np.uint32)
        wide <<= 16
        return wide.view(np.float32)
    return stored.astype(np.float32)


def from_float32(numbers: NDArray[np.float32], dtype: str) -> NDArray[Any]:
    """Float32 rounded to the dtype, as STORED_AS[dtype]."""
    if dtype == "bfloat16":
        bits = numbers.view(np.uint32)
        rounded = bits >> 16
        rounded &= 1
        rounded += 0x7FFF
        rounded += bits
        rounded >>= 16
        return rounded.astype(np.uint16)
    with np.errstate(over="ignore"):
        return numbers.astype(STORED_AS[dtype])
