"""Encrypted headers, records and names: plain ones come back, and nothing can be moved."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from disk_pages import Chains
from hypothesis import given
from hypothesis import strategies as st
from tenant_keys import MemoryKeys

from kvstore.tiers.catalog import encode_record
from kvstore.tiers.checksum import check64
from kvstore.tiers.cipher import SEAL_BYTES, TenantKey
from kvstore.tiers.encrypted_page import (
    HEADER_SEAL_BYTES,
    decrypt_name,
    decrypt_record,
    encrypt_header,
    encrypt_name,
    encrypt_record,
    is_encrypted,
    is_encrypted_record,
    payload_bound,
    read_encrypted_header,
)
from kvstore.tiers.segment import decode_page_header, encode_page_header

if TYPE_CHECKING:
    from kvstore.tiers.tier import PageRecord

UUID = bytes(range(16))
OTHER_UUID = bytes(range(1, 17))
SLOT = 7
KEY = TenantKey(b"0123456789abcdef0123456789abcdef")
WRONG = TenantKey(b"1123456789abcdef0123456789abcdef")
SEAL = bytes(range(100, 100 + SEAL_BYTES))
PAGE = replace(
    Chains().page(extras=b"extras of a page").page,
    root=bytes(range(32)),
    key=bytes(range(60, 76)),
    parent_key=bytes(range(80, 96)),
)


def header_of(page: PageRecord, seal: bytes = SEAL) -> bytes:
    plain = encode_page_header(page, SLOT, UUID, 4096)
    assert plain is not None
    encrypted = encrypt_header(plain, KEY, seal, 4096)
    assert encrypted is not None
    return encrypted


def opened(block: bytes, slot: int = SLOT, uuid: bytes = UUID, key: TenantKey = KEY) -> object:
    found = read_encrypted_header(block, slot, uuid)
    known = found is not None and found.key_id == KEY.key_id
    plain = found.decrypt(key) if found is not None and known else None
    return None if plain is None else decode_page_header(plain, slot, uuid)


def resealed(block: bytes) -> bytes:
    """What somebody writes who can compute the check, but has no key."""
    return block[:8] + check64(block[16:]) + block[16:]


@given(st.binary(max_size=400), st.binary(max_size=300), st.text("ab.-", max_size=20))
def test_an_encrypted_header_gives_its_page_back(tokens: bytes, extras: bytes, name: str) -> None:
    page = replace(PAGE, tokens=tokens, extras=extras, writer=name, tenant="t" + name)
    encrypted = header_of(page)
    assert is_encrypted(encrypted)
    assert opened(encrypted.ljust(4096, b"\0")) == page
    assert decode_page_header(encrypted.ljust(4096, b"\0"), SLOT, UUID) is None


def test_a_header_shows_nothing_of_prompt_and_user() -> None:
    encrypted = header_of(PAGE)
    hidden = (
        PAGE.tokens,
        PAGE.extras,
        PAGE.tenant.encode(),
        PAGE.writer.encode(),
        PAGE.root,
        PAGE.namespace,
        PAGE.key,
        PAGE.checksum,
    )
    plain = encode_page_header(PAGE, SLOT, UUID, 4096)
    assert plain is not None
    assert all(item in plain for item in hidden)
    assert not any(item in encrypted for item in hidden)


def test_a_header_that_does_not_fit_is_refused() -> None:
    plain = encode_page_header(PAGE, SLOT, UUID, 4096)
    assert plain is not None
    room = len(plain) + HEADER_SEAL_BYTES
    assert encrypt_header(plain, KEY, SEAL, room - 1) is None
    assert encrypt_header(plain, KEY, SEAL, room) is not None


def test_a_header_is_of_one_slot_store_and_key() -> None:
    block = header_of(PAGE).ljust(4096, b"\0")
    assert opened(block) == PAGE
    assert opened(block, slot=SLOT + 1) is None
    assert opened(block, uuid=OTHER_UUID) is None
    assert opened(block, key=WRONG) is None
    assert opened(block[: len(header_of(PAGE)) - 1]) is None
    assert read_encrypted_header(b"", SLOT, UUID) is None


def test_every_flipped_bit_of_a_header_is_noticed_also_with_a_right_check() -> None:
    """All but the slot's own number is authenticated, and that must be the one asked for."""
    whole = header_of(PAGE)
    header_bytes_at = range(20, 24)  # a fact of the segment, checked with it
    for at in range(len(whole)):
        damaged = bytearray(whole)
        damaged[at] ^= 1 << at % 8
        assert opened(bytes(damaged)) is None, at
        if at >= 16 and at not in header_bytes_at:
            assert opened(resealed(bytes(damaged))) is None, at


def test_the_places_of_two_pages_cannot_be_mixed() -> None:
    other = replace(PAGE, sequence=PAGE.sequence + 1)
    one, two = header_of(PAGE), header_of(other, SEAL[::-1])
    assert len(one) == len(two)
    for cut in (64, 160, 196, len(one) - HEADER_SEAL_BYTES, len(one) - SEAL_BYTES):
        assert opened(resealed(one[:cut] + two[cut:])) is None, cut


def test_payloads_are_bound_to_their_page_and_store() -> None:
    bound = payload_bound(PAGE, UUID)
    others = (
        replace(PAGE, sequence=PAGE.sequence + 1),
        replace(PAGE, key=bytes(16)),
        replace(PAGE, root=b"x" * 32),
        replace(PAGE, payload_bytes=PAGE.payload_bytes - 1),
    )
    assert all(payload_bound(page, UUID) != bound for page in others)
    assert payload_bound(PAGE, OTHER_UUID) != bound


@given(st.binary(max_size=400), st.binary(max_size=300))
def test_an_encrypted_record_gives_the_plain_one_back(tokens: bytes, extras: bytes) -> None:
    page = replace(PAGE, tokens=tokens, extras=extras)
    plain = encode_record(SLOT, page, 3, 4)
    encrypted = encrypt_record(plain, page.root, KEY, UUID)
    assert is_encrypted_record(encrypted)
    assert not is_encrypted_record(plain)
    assert encrypted[:8] == check64(encrypted[8:])
    assert decrypt_record(encrypted, page.root, KEY, UUID) == plain


def test_a_record_shows_nothing_of_its_prompt() -> None:
    encrypted = encrypt_record(encode_record(SLOT, PAGE, 3, 4), PAGE.root, KEY, UUID)
    assert not any(item in encrypted for item in (PAGE.tokens, PAGE.extras, PAGE.key))
    assert PAGE.checksum not in encrypted


def test_every_flipped_bit_of_a_record_is_noticed_without_its_check() -> None:
    whole = encrypt_record(encode_record(SLOT, PAGE, 3, 4), PAGE.root, KEY, UUID)
    slot_at, format_at = range(8, 16), range(86, 88)  # the key in LMDB; looked at before
    for at in range(16, len(whole)):
        damaged = bytearray(whole)
        damaged[at] ^= 1 << at % 8
        if at not in slot_at and at not in format_at:
            assert decrypt_record(bytes(damaged), PAGE.root, KEY, UUID) is None, at
    assert decrypt_record(whole, b"x" * 32, KEY, UUID) is None
    assert decrypt_record(whole, PAGE.root, KEY, OTHER_UUID) is None
    assert decrypt_record(whole, PAGE.root, WRONG, UUID) is None
    assert decrypt_record(whole[:100], PAGE.root, KEY, UUID) is None


def test_names_are_of_one_id_and_store() -> None:
    cipher = MemoryKeys().cipher()
    cipher.store_uuid = UUID
    key = cipher.key_of("tenant")
    body = encrypt_name(b"w\0\0\0\1", b"the writer", key, UUID)
    assert b"writer" not in body
    assert decrypt_name(b"w\0\0\0\1", body, cipher) == b"the writer"
    assert decrypt_name(b"w\0\0\0\2", body, cipher) is None
    assert decrypt_name(b"w\0\0\0\1", body, MemoryKeys().cipher()) is None
    cipher.store_uuid = OTHER_UUID
    assert decrypt_name(b"w\0\0\0\1", body, cipher) is None
