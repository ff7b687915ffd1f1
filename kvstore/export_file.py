"""The file that `export` writes and `import` reads: chains of pages, portable between servers.

    magic "KVSTORE-EXPORT\\r\\n", then frames; all integers little-endian

    | kind 4 | head length u32 | body length u64 | number u64 | head: JSON | body | XXH3-128: 16 |

Kinds, in the order in which they come: FILE, then for each tree TREE and for each run of pages RUN
(all tokens of the chain up to its end as the body) and a PAGE for each of its pages (the payload
as the body); END last. The checksum covers all of a frame before it, the number says its place:
what is altered, cut, moved or left out is refused with its position. No key, no secret. Pure.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvstore.errors import InvalidRequest
from kvstore.tiers.checksum import CHECKSUM_BYTES, checksum

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MAGIC = b"KVSTORE-EXPORT\r\n"
FORMAT = 1
KINDS = (b"FILE", b"TREE", b"RUN ", b"PAGE", b"END ")
HEAD_BYTES_MAX = 4 << 20
BODY_BYTES_MAX = 1 << 30
_FRAME = struct.Struct("<4sIQQ")


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame, checked."""

    kind: bytes
    head: dict[str, Any]
    body: memoryview
    position: int  # of its first byte in the file


class FrameWriter:
    """Makes frames in order."""

    def __init__(self) -> None:
        self._number = 0

    def frame(self, kind: bytes, head: dict[str, Any], body: bytes | memoryview = b"") -> bytes:
        """The bytes of one frame; the first has the magic before it."""
        assert kind in KINDS
        text = json.dumps(head, sort_keys=True, separators=(",", ":")).encode()
        start = MAGIC if self._number == 0 else b""
        fixed = _FRAME.pack(kind, len(text), len(body), self._number)
        self._number += 1
        content = b"".join((fixed, text, body))
        return b"".join((start, content, checksum(content)))


def frames(read: Callable[[int], bytes]) -> Iterator[Frame]:
    """The frames of a file, END the last; InvalidRequest says where it is not as it should be.

    read: up to so many bytes, fewer only at the end. Nothing of a frame is believed before its
    checksum is compared, but the lengths, and those are bounded.
    """
    at = len(MAGIC)
    if read(len(MAGIC)) != MAGIC:
        raise InvalidRequest("byte 0: this is no export of kvstore")
    for number in range(1 << 62):
        frame, size = _frame(read, at, number)
        yield frame
        if frame.kind == b"END ":
            break
        at += size
    if read(1):
        raise InvalidRequest(f"byte {at + size}: something follows the end of the export")


def _frame(read: Callable[[int], bytes], at: int, number: int) -> tuple[Frame, int]:
    fixed = read(_FRAME.size)
    if len(fixed) < _FRAME.size:
        raise InvalidRequest(f"byte {at + len(fixed)}: the file ends before its end was written")
    kind, head_size, body_size, found = _FRAME.unpack(fixed)
    if kind not in KINDS or head_size > HEAD_BYTES_MAX or body_size > BODY_BYTES_MAX:
        raise InvalidRequest(f"byte {at}: no frame of an export begins here; the file is damaged")
    size = head_size + body_size + CHECKSUM_BYTES
    rest = read(size)
    end = at + _FRAME.size + size
    if len(rest) < size:
        cut = at + _FRAME.size + len(rest)
        raise InvalidRequest(f"byte {cut}: the file is cut off in the frame that began at {at}")
    content = memoryview(fixed + rest)
    if checksum(content[:-CHECKSUM_BYTES]) != bytes(content[-CHECKSUM_BYTES:]):
        raise InvalidRequest(f"bytes {at} to {end - 1}: the checksum fails; the file is damaged")
    if found != number:
        raise InvalidRequest(f"byte {at}: frame {found} where {number} should be")
    start = _FRAME.size
    try:
        head = json.loads(bytes(content[start : start + head_size]))
    except (ValueError, RecursionError) as exc:
        raise InvalidRequest(f"byte {at + start}: not JSON: {exc}") from exc
    if not isinstance(head, dict):
        raise InvalidRequest(f"byte {at + start}: not a JSON object")
    body = content[start + head_size : start + head_size + body_size]
    return Frame(kind, head, body, at), _FRAME.size + size


class PieceReader:
    """read(n) over pieces of any size, as they come in a stream."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._rest = memoryview(b"")

    def __call__(self, size: int) -> bytes:
        """Up to `size` bytes, fewer only at the end."""
        parts = []
        while size:
            if not self._rest:
                piece = next(self._pieces, None)
                if piece is None:
                    break
                self._rest = memoryview(piece)
                continue
            part, self._rest = self._rest[:size], self._rest[size:]
            parts.append(part)
            size -= len(part)
        return b"".join(parts)
