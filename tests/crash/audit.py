"""Looks at a store that nobody has open: does each record's slot hold exactly the recorded page?

That must be so at any moment, because a record is committed after its slot was synced, and a slot
is written only when no record names it any more (rule R5). It is asked of the files themselves, so
that the store's own checks on reads can't hide a breach. Encrypted pages are decrypted with
the keys that lie beside them. Also does the damage between two runs.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstore.key_folder import KeyFolder
from kvstore.tenant import load_secret
from kvstore.tiers.catalog import (
    RECORD,
    CatalogError,
    catalog_name,
    decode_root,
    decode_segment,
    decrypt_small,
    iterate_read_only,
    small_key_id,
)
from kvstore.tiers.checksum import checksum
from kvstore.tiers.cipher import Cipher
from kvstore.tiers.encrypted_page import (
    decrypt_record,
    is_encrypted_record,
    payload_bound,
    read_encrypted_header,
)
from kvstore.tiers.segment import FORMAT_VERSION, decode_page_header, segment_name

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator
    from pathlib import Path

    from kvstore.tiers.segment import SegmentShape
    from kvstore.tiers.tier import PageRecord

CATALOG = catalog_name(FORMAT_VERSION)
UUID_AT = slice(8, 24)  # in the M record, after its check
MAGIC_BYTES = 8


@dataclass(frozen=True, slots=True)
class Recorded:
    """A page record and where its slot lies."""

    slot: int
    sequence: int
    key: str
    checksum: bytes
    payload_bytes: int
    path: Path
    shape: SegmentShape

    @property
    def place(self) -> str:
        """What the ledger calls it."""
        return f"{self.slot}:{self.sequence}"


@dataclass(slots=True)
class Audit:
    """The catalog of a closed store, as it lies on disk."""

    records: list[Recorded]
    uuid: bytes
    cipher: Cipher | None = None

    @classmethod
    def of_store(cls, directory: Path) -> Audit:
        """Read the catalog; one that can't be read has no records: the store must rebuild it."""
        audit = cls([], b"")
        keys = directory / "keys"
        if (keys / "kvstore-keys").exists():
            audit.cipher = Cipher(KeyFolder(keys, load_secret(directory / "secret")).load())
        if (directory / CATALOG / "data.mdb").exists():
            with contextlib.suppress(CatalogError, OSError):
                audit._read(directory)
        return audit

    def unsound(
        self, excused: set[str], required: set[str], only: set[str] | None = None
    ) -> list[str]:
        """A line for each record whose slot holds something else, but for `excused` places.

        A page that is not required may have a wiped header: its eviction was under way. `only`
        limits it to pages of these keys.
        """
        return [
            line
            for record in self.records
            if record.place not in excused
            and (only is None or record.key in only)
            and (line := self._look(record, record.key in required))
        ]

    def flip(self, rng: random.Random) -> Iterator[Recorded]:
        """Flip one bit of a random live slot, once the caller has noted which (one yield)."""
        if not self.records:
            return
        record = rng.choice(self.records)
        yield record
        header_bytes = record.shape.header_bytes
        within = rng.choice(
            [
                rng.randrange(200),
                header_bytes + rng.randrange(record.payload_bytes),
                header_bytes + rng.randrange(record.payload_bytes),
                rng.randrange(record.shape.slot_bytes),
            ]
        )
        offset = record.shape.offset(record.slot) + within
        descriptor = os.open(record.path, os.O_RDWR)
        try:
            byte = os.pread(descriptor, 1, offset)[0]
            os.pwrite(descriptor, bytes([byte ^ (1 << rng.randrange(8))]), offset)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _read(self, directory: Path) -> None:
        shapes: dict[int, SegmentShape] = {}
        rows = []
        for key, value in iterate_read_only(directory / CATALOG):
            if key == b"M":
                self.uuid = value[UUID_AT]
            elif key[:1] == b"S" and (shape := decode_segment(key, value)) is not None:
                shapes[shape.segment_id] = shape
            elif key[:1] == b"P":
                rows.append(value)
        if self.cipher is not None:
            self.cipher.store_uuid = self.uuid
            rows = self._decrypt_records(directory, rows)
        for row in map(RECORD.unpack_from, rows):
            _, slot, sequence, _, page_key, digest, _, _, _, payload_bytes = row[:10]
            shape = shapes[slot >> 24]
            path = directory / segment_name(shape.segment_id)
            self.records.append(
                Recorded(slot, sequence, page_key.hex(), digest, payload_bytes, path, shape)
            )

    def _decrypt_records(self, directory: Path, values: list[bytes]) -> list[bytes]:
        """Page records in plain; a tag that does not hold is a breach: only slots are flipped."""
        assert self.cipher is not None
        roots = {}
        for key, value in iterate_read_only(directory / CATALOG, b"r"):
            plain = decrypt_small(key, value, self.cipher) if key[:1] == b"r" else None
            if plain is not None:
                root = decode_root(key, plain)
                known = self.cipher.known(small_key_id(key, value) or b"")
                assert root is not None
                assert known is not None
                roots[int.from_bytes(key[1:], "big")] = root[0], known
        records = []
        for value in values:
            assert is_encrypted_record(value), "a plain record in an encrypted store"
            root_id = int.from_bytes(value[64:68], "little")
            record = decrypt_record(value, *roots[root_id], self.uuid)
            assert record is not None, "a record's tag does not hold"
            records.append(record)
        return records

    def _open(self, record: Recorded, content: bytes) -> tuple[PageRecord | None, bytes]:
        """The page that a slot names, and its payload."""
        header, start = content[: record.shape.header_bytes], record.shape.header_bytes
        payload = content[start : start + record.payload_bytes]
        if self.cipher is None:
            return decode_page_header(header, record.slot, self.uuid), payload
        found = read_encrypted_header(header, record.slot, self.uuid)
        key = self.cipher.known(found.key_id) if found is not None else None
        plain = found.decrypt(key) if found is not None and key is not None else None
        page = None if plain is None else decode_page_header(plain, record.slot, self.uuid)
        if page is None or found is None or key is None:
            return None, payload
        sealed = found.payload_nonce + payload + found.payload_tag
        return page, key.decrypt(sealed, payload_bound(page, self.uuid)) or b""

    def _look(self, record: Recorded, required: bool) -> str:
        shape = record.shape
        try:
            with record.path.open("rb") as stream:
                stream.seek(shape.offset(record.slot))
                content = stream.read(shape.slot_bytes)
        except FileNotFoundError:
            return f"slot {record.slot}: {record.path.name} is missing"
        if not any(content[:MAGIC_BYTES]) and not required:
            return ""
        page, payload = self._open(record, content)
        if page is None:
            return f"slot {record.slot}: recorded, but its header is not sound"
        if page.sequence != record.sequence or page.key.hex() != record.key:
            return (
                f"slot {record.slot}: recorded as page {record.sequence:#x}, "
                f"holds {page.sequence:#x}"
            )
        if checksum(payload) != record.checksum:
            return f"slot {record.slot}: recorded, but its payload is another"
        return ""


def cut_catalog(directory: Path, rng: random.Random) -> bool:
    """Cut the catalog file short somewhere; False when there is none."""
    data = directory / CATALOG / "data.mdb"
    if not data.exists():
        return False
    os.truncate(data, rng.randrange(data.stat().st_size + 1))
    return True
