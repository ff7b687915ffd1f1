"""What callers hand in, checked once at the door: tokens, extras, waits.

Everything behind this module may rely on int32 tokens in [0, 2^31) and bounded bytes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeAlias

from kvstore.errors import InvalidRequest
from kvstore.prefix_index.page_key import TOKEN_BYTES, page_extras, token_buffer

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

Tokens: TypeAlias = "NDArray[np.integer] | Sequence[int] | bytes"
Extras: TypeAlias = "Mapping[int, bytes]"

TOKENS_MAX = 16 * 1024 * 1024  # of one prompt
EXTRAS_BYTES_MAX = 1024  # of one page: digests and offsets, not content


def checked_tokens(tokens: Tokens) -> bytes:
    """Token ids as int32 little-endian bytes; raises InvalidRequest for anything else.

    tokens: a flat array or sequence of integers in [0, 2^31), or such bytes already.
    """
    return bytes(token_view(tokens))


def token_view(tokens: Tokens) -> bytes | memoryview:
    """The same without a copy where the caller's array is like that: to be read at once."""
    if isinstance(tokens, set | frozenset | Mapping | str):
        raise InvalidRequest(f"tokens: a {type(tokens).__name__} has no order; give a list")
    try:
        packed = token_buffer(tokens)
    except ValueError as exc:
        raise InvalidRequest(f"tokens: {exc}") from exc
    if len(packed) > TOKENS_MAX * TOKEN_BYTES:
        raise InvalidRequest(
            f"tokens: {len(packed) // TOKEN_BYTES} given, {TOKENS_MAX} is the limit"
        )
    return packed


def checked_extras(extras: Extras | None) -> dict[int, bytes]:
    """Extras by page index, without empty ones; raises InvalidRequest."""
    if not extras:
        return {}
    if not isinstance(extras, Mapping):
        raise InvalidRequest("extras: a mapping of page index to bytes is needed")
    for page, value in extras.items():
        if not isinstance(page, int) or not isinstance(value, bytes):
            raise InvalidRequest(f"extras[{page!r}]: bytes under an int page index are needed")
        if len(value) > EXTRAS_BYTES_MAX:
            raise InvalidRequest(
                f"extras[{page}]: {len(value)} bytes, {EXTRAS_BYTES_MAX} a page is the limit; "
                "give a digest of larger content"
            )
    try:
        return dict(page_extras(extras))
    except ValueError as exc:
        raise InvalidRequest(f"extras: {exc}") from exc


def checked_chain_id(digits: str) -> str:
    """The beginning of a page's id in lower case; raises InvalidRequest."""
    if not isinstance(digits, str) or not re.fullmatch(r"[0-9a-fA-F]{1,32}", digits):
        raise InvalidRequest(f"chain {digits!r:.60}: 1 to 32 hex digits are needed")
    return digits.lower()


def checked_sequence(number: int) -> int:
    """The number of an event, or 0; raises InvalidRequest."""
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < 1 << 64:
        raise InvalidRequest(f"after_sequence: {number!r:.60} given; an event's number, or 0")
    return number


def checked_deadline(deadline_s: float) -> float:
    """A wait in seconds, finite and >= 0; raises InvalidRequest."""
    if (
        isinstance(deadline_s, bool)
        or not isinstance(deadline_s, int | float)
        or not 0 <= deadline_s < float("inf")
    ):
        raise InvalidRequest(f"{deadline_s!r} seconds given; a finite number >= 0 is needed")
    return float(deadline_s)
