"""How an encrypted page is written: the plain header and record, with ciphertext in their places.

    header   magic | check | clear: format .. parent sequence | ciphertext of root .. checksum
             | clear: payload bytes .. created | ciphertext of tenant, tokens, extras, writer
             | key id 16 | nonce 24, tag 16 of the header | nonce 24, tag 16 of the payload
    record   check | clear: slot .. parent sequence | ciphertext of key, checksum
             | clear: root id .. extras bytes | ciphertext of tokens, extras | nonce 24 | tag 16
    name     check | key id 16 | nonce 24 | ciphertext | tag 16

What names a prompt or a user is ciphertext; what a walk, a recount or the order of a rebuild needs
is not. The checks (XXH3-64) cover ciphertext, so that damage is seen without a key. Each ciphertext
is bound to its purpose, its store and the page's clear fields, all but the slot, so that none can
pass for another. Pure: bytes in, bytes out.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstore.tiers.checksum import check64
from kvstore.tiers.cipher import KEY_ID_BYTES, NONCE_BYTES, SEAL_BYTES, TAG_BYTES
from kvstore.tiers.segment import FORMAT_VERSION, PAGE_FIXED_BYTES, PAGE_MAGIC

if TYPE_CHECKING:
    from kvstore.tiers.cipher import Cipher, TenantKey
    from kvstore.tiers.tier import PageRecord

ENCRYPTED_MAGIC = b"KVCRYPT\n"
HEADER_SEAL_BYTES = KEY_ID_BYTES + 2 * SEAL_BYTES  # by which a header grows
ENCRYPTED_RECORD = 0x8000 | FORMAT_VERSION  # the format field of an encrypted record
CHECK_BYTES = 8

# Places in a plain header (segment.py) and in a plain record (catalog.py).
_ORDER = slice(48, 64)  # sequence, parent sequence
_NAMES = slice(64, 160)  # root, namespace, key, parent key, checksum
_SIZES = slice(160, PAGE_FIXED_BYTES)  # payload bytes .. created
_NAMES_BYTES = 96
_HEAD = struct.Struct("<II16sQ")  # at 16: format, header bytes, store uuid, slot
_LENGTHS = struct.Struct("<IIHH")  # at 176: tokens, extras, tenant, writer
RECORD_BYTES = 96
_RECORD_ORDER = slice(16, 32)
_RECORD_NAMES = slice(32, 64)
_RECORD_NAMES_BYTES = 32
_RECORD_SIZES = slice(64, RECORD_BYTES)
_FORMAT_AT = slice(86, 88)


# -- headers ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EncryptedHeader:
    """A sound header of the slot and store that were asked for; not decrypted yet."""

    content: bytes
    key_id: bytes
    payload_nonce: bytes
    payload_tag: bytes

    def decrypt(self, key: TenantKey) -> bytes | None:
        """The plain header; None when its tag does not hold."""
        content = self.content
        end = len(content) - HEADER_SEAL_BYTES
        at = end + KEY_ID_BYTES
        nonce, tag = content[at : at + NONCE_BYTES], content[at + NONCE_BYTES : at + SEAL_BYTES]
        hidden = content[_NAMES] + content[PAGE_FIXED_BYTES:end]
        text = key.decrypt(nonce + hidden + tag, _header_bound(content, content[at + SEAL_BYTES :]))
        if text is None:
            return None
        body = b"".join((content[16:64], text[:_NAMES_BYTES], content[_SIZES], text[_NAMES_BYTES:]))
        return PAGE_MAGIC + check64(body) + body


def encrypt_header(
    plain: bytes, key: TenantKey, payload_seal: bytes, header_bytes: int
) -> bytes | None:
    """A plain header encrypted; None when that takes more than `header_bytes`.

    `payload_seal` is nonce and tag of the page's payload.
    """
    if len(plain) + HEADER_SEAL_BYTES > header_bytes:
        return None
    text = plain[_NAMES] + plain[PAGE_FIXED_BYTES:]
    sealed = key.encrypt(text, _header_bound(plain, payload_seal))
    nonce, hidden, tag = sealed[:NONCE_BYTES], sealed[NONCE_BYTES:-TAG_BYTES], sealed[-TAG_BYTES:]
    body = b"".join(
        (
            plain[16:64],
            hidden[:_NAMES_BYTES],
            plain[_SIZES],
            hidden[_NAMES_BYTES:],
            key.key_id,
            nonce,
            tag,
            payload_seal,
        )
    )
    return ENCRYPTED_MAGIC + check64(body) + body


def read_encrypted_header(
    block: bytes | memoryview, slot: int, store_uuid: bytes
) -> EncryptedHeader | None:
    """The encrypted header in a slot; None unless it is sound and of this slot and store."""
    if len(block) < PAGE_FIXED_BYTES or block[:8] != ENCRYPTED_MAGIC:
        return None
    version, _, uuid, found_slot = _HEAD.unpack_from(block, 16)
    if (version, uuid, found_slot) != (FORMAT_VERSION, store_uuid, slot):
        return None
    end = PAGE_FIXED_BYTES + sum(_LENGTHS.unpack_from(block, 176)) + HEADER_SEAL_BYTES
    if end > len(block):
        return None
    content = bytes(block[:end])
    if content[8:16] != check64(content[16:]):
        return None
    at = end - HEADER_SEAL_BYTES
    seal = content[end - SEAL_BYTES :]
    return EncryptedHeader(
        content, content[at : at + KEY_ID_BYTES], seal[:NONCE_BYTES], seal[NONCE_BYTES:]
    )


def is_encrypted(block: bytes | memoryview) -> bool:
    """Whether a slot says that it holds an encrypted page; nothing is checked."""
    return bytes(block[:8]) == ENCRYPTED_MAGIC


def payload_bound(page: PageRecord, store_uuid: bytes) -> bytes:
    """What a page's payload is bound to."""
    numbers = page.sequence.to_bytes(8, "little") + page.payload_bytes.to_bytes(8, "little")
    return b"".join((b"payload 1 ", store_uuid, page.root, page.key, numbers))


def _header_bound(header: bytes, payload_seal: bytes) -> bytes:
    uuid = header[24:40]
    return b"".join((b"header 1 ", uuid, header[_ORDER], header[_SIZES], payload_seal))


# -- the catalog's records ----------------------------------------------------------------------


def encrypt_record(plain: bytes, root: bytes, key: TenantKey, store_uuid: bytes) -> bytes:
    """A plain P record, SEAL_BYTES longer."""
    bound = _record_bound(plain, root, store_uuid)
    sealed = key.encrypt(plain[_RECORD_NAMES] + plain[RECORD_BYTES:], bound)
    hidden = sealed[NONCE_BYTES:-TAG_BYTES]
    body = b"".join(
        (
            plain[CHECK_BYTES:32],
            hidden[:_RECORD_NAMES_BYTES],
            plain[64:86],
            ENCRYPTED_RECORD.to_bytes(2, "little"),
            plain[88:RECORD_BYTES],
            hidden[_RECORD_NAMES_BYTES:],
            sealed[:NONCE_BYTES],
            sealed[-TAG_BYTES:],
        )
    )
    return check64(body) + body


def is_encrypted_record(value: bytes) -> bool:
    """Whether a P record is an encrypted one."""
    return int.from_bytes(value[_FORMAT_AT], "little") == ENCRYPTED_RECORD


def decrypt_record(value: bytes, root: bytes, key: TenantKey, store_uuid: bytes) -> bytes | None:
    """The plain record, with its check; None when its tag does not hold."""
    if len(value) < RECORD_BYTES + SEAL_BYTES:
        return None
    start = b"".join((value[:86], FORMAT_VERSION.to_bytes(2, "little"), value[88:RECORD_BYTES]))
    nonce, tag = value[-SEAL_BYTES:-TAG_BYTES], value[-TAG_BYTES:]
    sealed = b"".join((nonce, value[_RECORD_NAMES], value[RECORD_BYTES:-SEAL_BYTES], tag))
    text = key.decrypt(sealed, _record_bound(start, root, store_uuid))
    if text is None:
        return None
    body = b"".join(
        (
            start[CHECK_BYTES:32],
            text[:_RECORD_NAMES_BYTES],
            start[_RECORD_SIZES],
            text[_RECORD_NAMES_BYTES:],
        )
    )
    return check64(body) + body


def encrypt_name(key_bytes: bytes, body: bytes, key: TenantKey, store_uuid: bytes) -> bytes:
    """The body of a root's or writer's record, encrypted."""
    return key.key_id + key.encrypt(body, _name_bound(key_bytes, store_uuid))


def decrypt_name(key_bytes: bytes, body: bytes, cipher: Cipher) -> bytes | None:
    """The plain body; None when its key is missing (see `name_key_id`) or its tag does not hold."""
    key = cipher.known(name_key_id(body))
    if key is None:
        return None
    return key.decrypt(body[KEY_ID_BYTES:], _name_bound(key_bytes, cipher.store_uuid))


def name_key_id(body: bytes) -> bytes:
    """Whose key a name's body is encrypted with."""
    return body[:KEY_ID_BYTES]


def _record_bound(record: bytes, root: bytes, store_uuid: bytes) -> bytes:
    return b"".join((b"record 1 ", store_uuid, root, record[_RECORD_ORDER], record[_RECORD_SIZES]))


def _name_bound(key_bytes: bytes, store_uuid: bytes) -> bytes:
    return b"name 1 " + store_uuid + key_bytes
