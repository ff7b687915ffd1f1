"""Pages in slots smaller than they are: packed by an exact codec, so that they cost less disk.

A page is packed only if that takes it to a smaller size class, so the slot tells: a page larger
than its slot's payload is packed, any other is raw. Its payload is then the codec's frame, padded
with zeros to what the slot holds; header and catalog name the page as it is unpacked, its checksum
too, which is compared after unpacking. No I/O here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kvstore.tiers import codec_lossless
from kvstore.tiers.checksum import checksum
from kvstore.tiers.codec import LOSSLESS, CodecError
from kvstore.tiers.file_layer import aligned_buffer, copy_bytes
from kvstore.tiers.segment import payload_class
from kvstore.tiers.tier import ReadStatus

if TYPE_CHECKING:
    from kvstore.tiers.segment import SegmentShape
    from kvstore.tiers.tier import PageRecord


def pack(payload: memoryview) -> memoryview | None:
    """The packed payload, aligned and as long as its size class; None if no disk is saved."""
    frame = codec_lossless.encode(payload)
    room = payload_class(len(frame))
    if room >= payload_class(payload.nbytes):
        return None
    packed = aligned_buffer(room)
    copy_bytes(packed[: len(frame)], memoryview(frame))
    packed[len(frame) :] = bytes(room - len(frame))
    return packed


def is_packed(page: PageRecord, shape: SegmentShape) -> bool:
    """Whether this page, in a slot of this shape, must be packed."""
    return page.payload_bytes > shape.payload_capacity


def fits(page: PageRecord, payload_bytes: int, shape: SegmentShape) -> bool:
    """Whether a payload of that length, packed if the page says so, can be this page in a slot."""
    if page.codec == LOSSLESS:
        return shape.payload_capacity <= min(payload_bytes, page.payload_bytes - 1)
    return page.payload_bytes <= min(payload_bytes, shape.payload_capacity)


def stored_bytes(page: PageRecord, shape: SegmentShape) -> int:
    """Bytes of payload that the slot holds of this page."""
    return min(page.payload_bytes, shape.payload_capacity)


def as_packed(page: PageRecord) -> PageRecord:
    """What names the page in the header and the catalog when it is packed."""
    return replace(page, codec=LOSSLESS)


def unpack(packed: memoryview, page: PageRecord, target: memoryview, verify: bool) -> ReadStatus:
    """Fill `target` with the page; CORRUPT for bytes that are no frame, or of another page."""
    if not codec_lossless.available():
        return ReadStatus.ERROR
    try:
        codec_lossless.decode(packed, target[: page.payload_bytes])
    except CodecError:
        return ReadStatus.CORRUPT
    if verify and checksum(target[: page.payload_bytes]) != page.checksum:
        return ReadStatus.CORRUPT
    return ReadStatus.OK
