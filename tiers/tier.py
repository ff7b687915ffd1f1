"""The contract that every tier keeps, and the plain records that cross it.

A tier holds bytes of pages in slots of one medium. It never looks at tokens beyond storing and
comparing them, never decides what leaves, and never grows past its capacity: a full tier hands out
fewer slots than asked, and the caller evicts.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

# A slot number is container << SLOT_INDEX_BITS | index. A container is an extent of the arena, a
# segment file of the disk tier: a run of slots of one size.
SLOT_INDEX_BITS = 24
SLOT_INDEX_MASK = (1 << SLOT_INDEX_BITS) - 1
NO_SLOT = -1

# Memory and file offsets of payloads are multiples of this, so that O_DIRECT works.
ALIGNMENT_BYTES = 4096


class TierError(Exception):
    """A medium failed, or refuses to open; the message says what to do about it."""


class ReadStatus(IntEnum):
    """What became of one page of a read_many call."""

    OK = 0
    CORRUPT = 1  # the bytes fail their checksum
    STALE = 2  # a sound page, but not the one that was asked for
    ERROR = 3  # the medium failed
    LOCKED = 4  # encrypted with a key that is gone
    WIPED = 5  # its header was wiped: an eviction that was cut off before it deleted the record


@dataclass(frozen=True, slots=True)
class PageRecord:
    """All that names one page, without its payload.

    `sequence` is unique in a store directory and never used again; `parent_sequence` is 0 for the
    first page of a chain. `tokens` are int32 little-endian. `checksum` is XXH3-128 of the payload.
    """

    root: bytes  # 32 bytes: names tenant, namespace and salt
    tenant: str
    namespace: bytes  # 16 bytes
    key: bytes  # 16 bytes
    parent_key: bytes  # 16 bytes; zeros for the first page
    sequence: int
    parent_sequence: int
    page_index: int
    tokens: bytes
    extras: bytes
    payload_bytes: int
    checksum: bytes  # 16 bytes
    codec: int = 0
    writer: str = ""
    created_s: int = 0  # Unix seconds; for people and max_age only


@dataclass(frozen=True, slots=True)
class Usage:
    """Bytes of a tier. used <= allocated <= capacity, always."""

    capacity_bytes: int
    allocated_bytes: int  # taken from the machine: containers, catalog, reserve files
    used_bytes: int  # slots handed out, at their slot size
    used_slots: int
    free_slots: int  # in containers that exist


@dataclass(frozen=True, slots=True)
class Container:
    """One extent or segment: the unit in which capacity moves between slot sizes and tenants."""

    container_id: int
    tenant: str
    slot_bytes: int
    slots: int
    used_slots: int


class Tier(Protocol):
    """Six calls. All are safe to call from several threads; none blocks without a bound."""

    def reserve(self, tenant: str, payload_bytes: int, count: int) -> list[int]:
        """Hand out up to `count` slots that hold `payload_bytes` each; fewer when full."""

    def write_many(
        self, slots: Sequence[int], pages: Sequence[PageRecord], payloads: Sequence[memoryview]
    ) -> list[bool]:
        """Store payloads; True means kept as the medium keeps things (disk: durably).

        A False page's slot stays the caller's, unpublished: free it.
        """

    def read_many(
        self, slots: Sequence[int], pages: Sequence[PageRecord], buffers: Sequence[memoryview]
    ) -> list[ReadStatus]:
        """Fill buffers (>= payload_bytes each, writable) with what is stored, verified."""

    def free_many(self, slots: Sequence[int]) -> None:
        """Give slots back. No reader may hold them; their content is gone for good."""

    def usage(self) -> Usage:
        """Bytes now; derived by counting, not kept beside."""

    def check(self) -> None:
        """Walk everything, recount, raise TierError with the numbers when something is off."""


def aligned(size: int) -> int:
    """The smallest multiple of ALIGNMENT_BYTES that is >= size."""
    return -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
