"""AES-256-GCM with derived keys: what comes back, and what never does."""

from __future__ import annotations

import os
import sys
import threading

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given
from hypothesis import strategies as st
from tenant_keys import MemoryKeys

from kvstore.tiers import cipher as cipher_module
from kvstore.tiers.cipher import (
    KEY_BYTES,
    NONCE_BYTES,
    SALT_BYTES,
    SEAL_BYTES,
    TAG_BYTES,
    Cipher,
    TenantKey,
)
from kvstore.tiers.tier import TierError

KEY = TenantKey(bytes(range(KEY_BYTES)))
OTHER = TenantKey(bytes(range(1, KEY_BYTES + 1)))


@given(st.binary(max_size=5000), st.binary(max_size=100))
def test_what_was_encrypted_comes_back(text: bytes, bound: bytes) -> None:
    sealed = KEY.encrypt(text, bound)
    assert len(sealed) == len(text) + SEAL_BYTES
    assert KEY.decrypt(sealed, bound) == text
    target = bytearray(len(text) + TAG_BYTES)
    nonce = KEY.encrypt_into(memoryview(text), bound, memoryview(target))
    assert KEY.decrypt(nonce + bytes(target), bound) == text
    back = bytearray(len(text))
    assert KEY.decrypt_into(nonce, memoryview(target), bound, memoryview(back))
    assert bytes(back) == text


@given(st.binary(max_size=50), st.data())
def test_any_flipped_bit_is_noticed(text: bytes, data: st.DataObject) -> None:
    sealed = bytearray(KEY.encrypt(text, b"bound"))
    sealed[data.draw(st.integers(0, len(sealed) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert KEY.decrypt(bytes(sealed), b"bound") is None
    nonce, rest = bytes(sealed[:NONCE_BYTES]), memoryview(sealed)[NONCE_BYTES:]
    assert not KEY.decrypt_into(nonce, rest, b"bound", memoryview(bytearray(len(text))))


def test_another_key_or_bound_text_gives_nothing_back() -> None:
    sealed = KEY.encrypt(b"text", b"here")
    assert OTHER.decrypt(sealed, b"here") is None
    assert KEY.decrypt(sealed, b"there") is None
    assert KEY.decrypt(sealed[: SEAL_BYTES - 1], b"here") is None
    assert KEY.decrypt(b"", b"here") is None


def test_it_is_aes_256_gcm_under_a_derived_key() -> None:
    """Spelled out with the library alone, so that the format is what the docstring says."""
    import hashlib

    sealed = KEY.encrypt(b"text", b"bound")
    salt, nonce, rest = sealed[:SALT_BYTES], sealed[SALT_BYTES:NONCE_BYTES], sealed[NONCE_BYTES:]
    text = b"kvstore derived key " + salt
    derived = hashlib.blake2b(text, key=KEY.content, digest_size=32).digest()
    assert AESGCM(derived).decrypt(nonce, rest, b"bound") == b"text"


def test_a_derived_key_is_replaced_before_it_is_used_too_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cipher_module, "USES_MAX", 10)
    key = TenantKey(os.urandom(KEY_BYTES))
    sealed = [key.encrypt(b"x", b"") for _ in range(35)]
    salts = [item[:SALT_BYTES] for item in sealed]
    assert max(salts.count(salt) for salt in set(salts)) == 10
    assert all(key.decrypt(item, b"") == b"x" for item in sealed)
    assert len({item[:NONCE_BYTES] for item in sealed}) == 35


def test_one_key_serves_many_threads() -> None:
    key = TenantKey(os.urandom(KEY_BYTES))
    wrong: list[int] = []

    def work(number: int) -> None:
        text = bytes([number]) * 300_000
        target, back = bytearray(len(text) + TAG_BYTES), bytearray(len(text))
        for _ in range(20):
            nonce = key.encrypt_into(memoryview(text), b"b", memoryview(target))
            if not key.decrypt_into(nonce, memoryview(target), b"b", memoryview(back)):
                wrong.append(number)
            if bytes(back) != text:
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_an_erased_key_is_forgotten_and_a_new_one_reads_nothing_of_it() -> None:
    keys = MemoryKeys()
    cipher = keys.cipher()
    old = cipher.key_of("a")
    sealed = old.encrypt(b"text", b"")
    assert cipher.known(old.key_id) is old
    assert cipher.erase("a")
    assert cipher.known(old.key_id) is None
    assert not cipher.erase("a")
    new = cipher.key_of("a")
    assert new.key_id != old.key_id
    assert new.decrypt(sealed, b"") is None


def test_a_key_that_this_process_only_loaded_can_be_erased() -> None:
    keys = MemoryKeys()
    key_id = keys.cipher().key_of("a").key_id
    again = keys.cipher()
    assert again.known(key_id) is not None
    assert again.erase("a")
    assert again.known(key_id) is None


def test_a_child_decrypts_with_what_was_exported() -> None:
    cipher = MemoryKeys().cipher()
    cipher.store_uuid = os.urandom(16)
    sealed = cipher.key_of("a").encrypt(b"text", b"")
    cipher.key_of("b")
    child = Cipher.of_export(cipher.export())
    known = child.known(cipher.key_of("a").key_id)
    assert known is not None
    assert known.decrypt(sealed, b"") == b"text"
    assert child.store_uuid == cipher.store_uuid
    assert not child.writes


def test_keys_show_in_no_repr() -> None:
    content = b"canary-canary-canary-canary-0123"
    key = TenantKey(content)
    cipher = Cipher([content])
    for text in (repr(key), str(key), repr(cipher), repr(vars(cipher)["_by_id"])):
        assert "canary" not in text
        assert content.hex() not in text


def test_keys_of_another_length_are_refused_without_showing_them() -> None:
    with pytest.raises(TierError, match="a key of 31 bytes; it must have 32") as caught:
        TenantKey(b"s" * 31)
    assert "sss" not in str(caught.value)


@pytest.mark.parametrize("missing", ["cryptography", "decrypt_into"])
def test_a_missing_or_old_library_is_named_with_the_way_out(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if missing == "cryptography":
        monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers.aead", None)
    else:
        module = sys.modules["cryptography.hazmat.primitives.ciphers.aead"]
        monkeypatch.setattr(module, "AESGCM", object)
    with pytest.raises(TierError, match=r"pip install .*kvstore-llm\[secure\]"):
        Cipher([])
