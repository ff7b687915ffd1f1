"""Segment files: a run of slots of one size, each slot telling by itself what it holds.

    file   | head 4 KiB | slot 0 | slot 1 | ...     all offsets and sizes are multiples of 4 KiB
    slot   | header: header_bytes, n x 4 KiB | payload, padded with zeros to payload_capacity |

A header names its page completely and is checked by its own XXH3-64; the payload is checked by the
XXH3-128 in the header. A slot is believed only if all of it equals what was asked for, so a stale,
torn or misdirected slot is a miss. This module knows the format and does no I/O.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from kvstore.tiers.checksum import check64
from kvstore.tiers.tier import ALIGNMENT_BYTES, SLOT_INDEX_MASK, PageRecord, aligned

FORMAT_VERSION = 1
SEGMENT_MAGIC = b"KVSEGMNT"
PAGE_MAGIC = b"KVPAGE\r\n"
SEGMENT_HEAD_BYTES = ALIGNMENT_BYTES
HEADER_BYTES_MAX = 1 << 20
NAME_BYTES_MAX = 255  # tenant, writer
SIZE_STEPS = 8  # size classes between one power of two and the next
SEGMENT_ID_MAX = (1 << 31) - 1

# magic | check | format | directory | store uuid | segment | slots | slot bytes | header bytes
_SEGMENT = struct.Struct("<8s8sII16sIIQQ")
_CHECKED_FROM = 16  # magic and check stand before what the check covers

# magic | check | format | header bytes | store uuid | slot | sequence | parent sequence
# | root | namespace | key | parent key | checksum | payload bytes | page index | codec
# | token bytes | extras bytes | tenant bytes | writer bytes | created
_PAGE = struct.Struct("<8s8sII16sQQQ32s16s16s16s16sQIIIIHHQ")
PAGE_FIXED_BYTES = _PAGE.size


@dataclass(frozen=True, slots=True)
class SegmentShape:
    """The head of a segment file: all that places its slots."""

    segment_id: int
    directory_index: int
    slots: int
    slot_bytes: int
    header_bytes: int

    @property
    def payload_capacity(self) -> int:
        """Payload bytes that fit a slot."""
        return self.slot_bytes - self.header_bytes

    @property
    def file_bytes(self) -> int:
        """Size of the whole segment file."""
        return SEGMENT_HEAD_BYTES + self.slots * self.slot_bytes

    def offset(self, slot: int) -> int:
        """Where the slot of this number begins in the file."""
        return SEGMENT_HEAD_BYTES + (slot & SLOT_INDEX_MASK) * self.slot_bytes

    @property
    def sound(self) -> bool:
        """Whether the numbers can be true at all."""
        return (
            0 <= self.segment_id <= SEGMENT_ID_MAX
            and 0 < self.slots <= SLOT_INDEX_MASK + 1
            and self.slot_bytes % ALIGNMENT_BYTES == 0
            and self.header_bytes % ALIGNMENT_BYTES == 0
            and 0 < self.header_bytes <= HEADER_BYTES_MAX
            and self.header_bytes < self.slot_bytes
        )


def payload_class(payload_bytes: int) -> int:
    """Payload bytes of the size class: the next of 8 steps between powers of two, 4 KiB-aligned.

    Of the payload alone: with the header in, a page of 2 MiB would take 2.25 MiB.
    """
    size = aligned(max(payload_bytes, 1))
    step = max(ALIGNMENT_BYTES, (1 << (size.bit_length() - 1)) // SIZE_STEPS)
    return -(-size // step) * step


def header_bytes_for(metadata_bytes: int) -> int:
    """Header size, a multiple of 4 KiB, for a page with this many bytes of tokens + extras."""
    return aligned(PAGE_FIXED_BYTES + 2 * NAME_BYTES_MAX + metadata_bytes)


def segment_name(segment_id: int) -> str:
    """File name of a segment."""
    return f"segment-{segment_id:08x}"


def segment_id_of(name: str) -> int | None:
    """The id in a segment's file name; None for any other name."""
    prefix, _, digits = name.partition("-")
    if prefix != "segment" or len(digits) != 8:
        return None
    try:
        found = int(digits, 16)
    except ValueError:
        return None
    return found if segment_name(found) == name and found <= SEGMENT_ID_MAX else None


def encode_segment_head(shape: SegmentShape, store_uuid: bytes) -> bytes:
    """The first 4 KiB of a segment file."""
    body = _SEGMENT.pack(
        SEGMENT_MAGIC,
        bytes(8),
        FORMAT_VERSION,
        shape.directory_index,
        store_uuid,
        shape.segment_id,
        shape.slots,
        shape.slot_bytes,
        shape.header_bytes,
    )
    return _sealed(body).ljust(SEGMENT_HEAD_BYTES, b"\0")


def decode_segment_head(block: bytes) -> tuple[SegmentShape, bytes, int] | None:
    """(shape, store uuid, format version) of a head; None when it is not a sound one."""
    if len(block) < _SEGMENT.size or not _seal_holds(block[: _SEGMENT.size], SEGMENT_MAGIC):
        return None
    _, _, version, directory, uuid, segment_id, slots, slot_bytes, header_bytes = (
        _SEGMENT.unpack_from(block)
    )
    shape = SegmentShape(segment_id, directory, slots, slot_bytes, header_bytes)
    return (shape, uuid, version) if shape.sound else None


def encode_page_header(
    page: PageRecord, slot: int, store_uuid: bytes, header_bytes: int
) -> bytes | None:
    """The used part of a slot's header; None when the page needs more than `header_bytes`."""
    tenant = page.tenant.encode()
    writer = page.writer.encode()
    body = _PAGE.pack(
        PAGE_MAGIC,
        bytes(8),
        FORMAT_VERSION,
        header_bytes,
        store_uuid,
        slot,
        page.sequence,
        page.parent_sequence,
        page.root,
        page.namespace,
        page.key,
        page.parent_key,
        page.checksum,
        page.payload_bytes,
        page.page_index,
        page.codec,
        len(page.tokens),
        len(page.extras),
        len(tenant),
        len(writer),
        page.created_s,
    )
    used = b"".join((body, tenant, page.tokens, page.extras, writer))
    return _sealed(used) if len(used) <= header_bytes else None


def decode_page_header(
    block: bytes | memoryview, slot: int, store_uuid: bytes
) -> PageRecord | None:
    """The page that a slot's header names; None unless it is sound and of this slot and store."""
    if len(block) < PAGE_FIXED_BYTES:
        return None
    fields = _PAGE.unpack_from(block)
    if fields[0] != PAGE_MAGIC or fields[2] != FORMAT_VERSION:
        return None
    if fields[4] != store_uuid or fields[5] != slot:
        return None
    token_bytes, extras_bytes, tenant_bytes, writer_bytes, created_s = fields[16:]
    used = PAGE_FIXED_BYTES + token_bytes + extras_bytes + tenant_bytes + writer_bytes
    if used > len(block) or not _seal_holds(bytes(block[:used]), PAGE_MAGIC):
        return None
    at = PAGE_FIXED_BYTES
    pieces = []
    for length in (tenant_bytes, token_bytes, extras_bytes, writer_bytes):
        pieces.append(bytes(block[at : at + length]))
        at += length
    tenant, tokens, extras, writer = pieces
    try:
        names = tenant.decode(), writer.decode()
    except UnicodeDecodeError:
        return None
    return PageRecord(
        root=fields[8],
        tenant=names[0],
        namespace=fields[9],
        key=fields[10],
        parent_key=fields[11],
        sequence=fields[6],
        parent_sequence=fields[7],
        page_index=fields[14],
        tokens=tokens,
        extras=extras,
        payload_bytes=fields[13],
        checksum=fields[12],
        codec=fields[15],
        writer=names[1],
        created_s=created_s,
    )


def same_page(found: PageRecord, wanted: PageRecord) -> bool:
    """Whether all that decides a page's bytes is equal; who wrote it and when does not."""
    return (
        found.sequence == wanted.sequence
        and found.root == wanted.root
        and found.key == wanted.key
        and found.parent_key == wanted.parent_key
        and found.parent_sequence == wanted.parent_sequence
        and found.page_index == wanted.page_index
        and found.tokens == wanted.tokens
        and found.extras == wanted.extras
        and found.tenant == wanted.tenant
        and found.namespace == wanted.namespace
        and found.payload_bytes == wanted.payload_bytes
        and found.codec == wanted.codec
        and found.checksum == wanted.checksum
    )


def _sealed(body: bytes) -> bytes:
    return body[:8] + check64(body[_CHECKED_FROM:]) + body[_CHECKED_FROM:]


def _seal_holds(body: bytes, magic: bytes) -> bool:
    return body[:8] == magic and body[8:_CHECKED_FROM] == check64(body[_CHECKED_FROM:])
