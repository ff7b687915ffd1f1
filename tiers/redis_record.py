"""What Redis holds of a page: names of keys, the sealed header, the seal of the payload.

    kv:{NAME}             header:  fixed part | tokens | extras | writer | seal of all before it
    kv:{NAME}:SEAL:I      piece I of the payload, PIECE_BYTES each but the last

NAME is a keyed digest of root and page key, SEAL begins the payload's seal; the braces keep a page
on one node of a cluster. Seals are BLAKE2b keyed with a secret that Redis never sees: who can write
to Redis can lose a page, but can't change one, nor give one for another. The root is in the seal
and in the name, never in clear: with it, prompts could be guessed from page keys. Pieces are named
after their content, so two writers of one page never mix. Pure: no I/O.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass
from struct import Struct

from kvstore.tiers.tier import PageRecord

MAGIC = b"KVR1"
VERSION = 1
SEAL_BYTES = 32
PIECE_BYTES = 1 << 20
NAME_BYTES = 16
HEADER_BYTES_MAX = 1 << 22

# magic, version, codec, bytes of tokens, extras, writer, page index, payload bytes, sequence,
# parent's sequence, created, namespace, key, parent's key, XXH3-128 of the payload, its seal
_FIXED = Struct("<4sHHIIIIQQQQ16s16s16s16s32s")


class RecordError(ValueError):
    """A value that is no header of ours, or not the page that was asked for."""


@dataclass(frozen=True, slots=True)
class Sealed:
    """A page that Redis has: its record, and the seal that its pieces are named after."""

    record: PageRecord
    seal: bytes


def header_key(secret: bytes, root: bytes, key: bytes) -> bytes:
    """The Redis key of a page's header."""
    name = hashlib.blake2b(root + key, key=secret, digest_size=NAME_BYTES, person=b"kvstore name")
    return b"kv:{" + name.hexdigest().encode() + b"}"


def piece_keys(header: bytes, seal: bytes, payload_bytes: int) -> list[bytes]:
    """The Redis keys of a payload's pieces, in order."""
    stem = header + b":" + seal[:NAME_BYTES].hex().encode() + b":"
    return [stem + str(number).encode() for number in range(-(-payload_bytes // PIECE_BYTES))]


def payload_seal(secret: bytes, payload: memoryview) -> bytes:
    """BLAKE2b-256 of a payload; the interpreter lock is free meanwhile."""
    sealed = hashlib.blake2b(payload, key=secret, digest_size=SEAL_BYTES, person=b"kvstore payload")
    return sealed.digest()


def encode(secret: bytes, page: Sealed) -> bytes:
    """A header's bytes."""
    record, writer = page.record, page.record.writer.encode()
    fixed = _FIXED.pack(
        MAGIC,
        VERSION,
        record.codec,
        len(record.tokens),
        len(record.extras),
        len(writer),
        record.page_index,
        record.payload_bytes,
        record.sequence,
        record.parent_sequence,
        record.created_s,
        record.namespace,
        record.key,
        record.parent_key,
        record.checksum,
        page.seal,
    )
    content = fixed + record.tokens + record.extras + writer
    return content + _header_seal(secret, record.root, content)


def decode(secret: bytes, root: bytes, tenant: str, value: bytes) -> Sealed:
    """The page of a header, whose seal is checked before anything is believed.

    Raises RecordError for whatever nobody with the secret has written for this root.
    """
    if not _FIXED.size + SEAL_BYTES <= len(value) <= HEADER_BYTES_MAX:
        raise RecordError(f"a header of {len(value)} bytes")
    content, seal = value[:-SEAL_BYTES], value[-SEAL_BYTES:]
    if not hmac.compare_digest(seal, _header_seal(secret, root, content)):
        raise RecordError("a header whose seal is wrong")
    magic, version, codec, tokens, extras, writer, *numbers = _FIXED.unpack_from(content)
    if magic != MAGIC or version != VERSION:
        raise RecordError(f"a header of version {version}; this is {VERSION}")
    if len(content) != _FIXED.size + tokens + extras + writer:
        raise RecordError(f"a header of {len(value)} bytes, not what its lengths say")
    index, payload_bytes, sequence, parent_sequence, created_s = numbers[:5]
    namespace, key, parent_key, checksum, payload = numbers[5:]
    at = _FIXED.size
    record = PageRecord(
        root=root,
        tenant=tenant,
        namespace=namespace,
        key=key,
        parent_key=parent_key,
        sequence=sequence,
        parent_sequence=parent_sequence,
        page_index=index,
        tokens=content[at : at + tokens],
        extras=content[at + tokens : at + tokens + extras],
        payload_bytes=payload_bytes,
        checksum=checksum,
        codec=codec,
        writer=content[at + tokens + extras :].decode("ascii", "replace"),
        created_s=created_s,
    )
    return Sealed(record, payload)


def _header_seal(secret: bytes, root: bytes, content: bytes) -> bytes:
    sealed = hashlib.blake2b(key=secret, digest_size=SEAL_BYTES, person=b"kvstore header")
    sealed.update(root)
    sealed.update(content)
    return sealed.digest()
