"""AES-256-GCM with a key per tenant: what keeps pages on disk from whoever has the disk.

Invariants: nothing is given back unless its tag holds for exactly the key and the bound data that
it was encrypted with; no key is ever in a message, a repr or a file of this room. The only module
that imports cryptography, and that late, so that a store without encryption does not need it.

    nonce 24 = salt 12, which picks a derived key | nonce 12 of GCM

GCM breaks when a key meets a nonce twice, and random nonces of 96 bits are safe for some 2^32
messages only; pages of 8 KiB get there. So a tenant's key encrypts nothing itself: a key derived
from it and a random salt does, for at most USES_MAX messages (as XAES-256-GCM does).
"""

from __future__ import annotations

import hashlib
import os
import threading
from typing import TYPE_CHECKING, Any, Protocol

from kvstore.tiers.tier import TierError

if TYPE_CHECKING:
    from collections.abc import Iterable

KEY_BYTES = 32
KEY_ID_BYTES = 16
SALT_BYTES = 12
NONCE_BYTES = 24
TAG_BYTES = 16
SEAL_BYTES = NONCE_BYTES + TAG_BYTES  # by which a text grows
UUID_BYTES = 16
USES_MAX = 1 << 24  # messages of one derived key
DERIVED_KEYS_MAX = 256  # of one tenant, kept ready for decryption


class KeySource(Protocol):
    """Where the tenants' keys live."""

    def key_for(self, tenant: str) -> bytes:
        """The 32 bytes of a tenant's key, made and durable first if new. Raises TierError."""

    def find(self, tenant: str) -> bytes | None:
        """The same, or None when there is no such key. Raises TierError."""

    def erase(self, tenant: str) -> None:
        """Delete it durably. Raises TierError."""


class TenantKey:
    """One tenant's key and what is derived from it. Thread-safe."""

    def __init__(self, content: bytes) -> None:
        """Raises TierError for anything but KEY_BYTES, and when the library is missing."""
        if len(content) != KEY_BYTES:
            raise TierError(f"a key of {len(content)} bytes; it must have {KEY_BYTES}")
        name = hashlib.blake2b(b"kvstore key id", key=content, digest_size=KEY_ID_BYTES)
        self.key_id = name.digest()  # tells neither the key nor the tenant
        self.content = content
        self._aesgcm, self._invalid_tag = _library()
        self._derived: dict[bytes, Any] = {}
        self._lock = threading.Lock()
        self._salt, self._writing, self._uses = b"", None, USES_MAX

    def encrypt(self, text: bytes, bound: bytes) -> bytes:
        """nonce | ciphertext | tag of a short text, which is bound to `bound`."""
        salt, derived = self._for_writing()
        nonce = os.urandom(NONCE_BYTES - SALT_BYTES)
        return salt + nonce + bytes(derived.encrypt(nonce, text, bound))

    def decrypt(self, sealed: bytes, bound: bytes) -> bytes | None:
        """The text; None when anything is not as it was."""
        if len(sealed) < SEAL_BYTES:
            return None
        derived = self._for_reading(sealed[:SALT_BYTES])
        try:
            return bytes(
                derived.decrypt(sealed[SALT_BYTES:NONCE_BYTES], sealed[NONCE_BYTES:], bound)
            )
        except self._invalid_tag:
            return None

    def encrypt_into(self, payload: memoryview, bound: bytes, target: memoryview) -> bytes:
        """Ciphertext and tag into `target`, TAG_BYTES longer than `payload`; returns the nonce.

        No copy is made, and the interpreter lock is free meanwhile.
        """
        salt, derived = self._for_writing()
        nonce = os.urandom(NONCE_BYTES - SALT_BYTES)
        derived.encrypt_into(nonce, payload, bound, target)
        return salt + nonce

    def decrypt_into(
        self, nonce: bytes, sealed: memoryview, bound: bytes, target: memoryview
    ) -> bool:
        """Ciphertext and tag decrypted into `target`, TAG_BYTES shorter; whether the tag holds.

        If not, nothing in `target` may be used.
        """
        derived = self._for_reading(nonce[:SALT_BYTES])
        try:
            derived.decrypt_into(nonce[SALT_BYTES:], sealed, bound, target)
        except self._invalid_tag:
            return False
        return True

    def _for_writing(self) -> tuple[bytes, Any]:
        """A salt and its derived key: new in each process, and after USES_MAX messages."""
        with self._lock:
            if self._uses >= USES_MAX:
                self._salt, self._uses = os.urandom(SALT_BYTES), 0
                self._writing = self._derive(self._salt)
            self._uses += 1
            return self._salt, self._writing

    def _for_reading(self, salt: bytes) -> Any:
        found = self._derived.get(salt)
        if found is None:
            found = self._derive(salt)
            with self._lock:
                if len(self._derived) >= DERIVED_KEYS_MAX:
                    self._derived.clear()
                self._derived[salt] = found
        return found

    def _derive(self, salt: bytes) -> Any:
        text = b"kvstore derived key " + salt
        return self._aesgcm(hashlib.blake2b(text, key=self.content, digest_size=KEY_BYTES).digest())


class Cipher:
    """The keys of one store that this process knows. Thread-safe."""

    def __init__(
        self, keys: Iterable[bytes], source: KeySource | None = None, *, writes: bool = False
    ) -> None:
        """Decrypts with `keys`; `writes` says whether new pages are to be encrypted.

        Raises TierError when the library is missing or too old.
        """
        _library()
        self.writes = writes
        self.store_uuid = bytes(UUID_BYTES)  # set by the tier; all that is encrypted is bound to it
        self._source = source
        self._lock = threading.Lock()
        self._by_tenant: dict[str, TenantKey] = {}
        self._by_id = {key.key_id: key for key in map(TenantKey, keys)}

    def known(self, key_id: bytes) -> TenantKey | None:
        """The key of this id, or None: then what it encrypted can't be read."""
        return self._by_id.get(key_id)

    def key_of(self, tenant: str) -> TenantKey:
        """The key for new pages of a tenant; made if there is none. Raises TierError."""
        key = self._by_tenant.get(tenant)
        if key is None:
            assert self._source is not None, "a cipher without a source of keys only decrypts"
            with self._lock:
                fresh = TenantKey(self._source.key_for(tenant))
                key = self._by_id.setdefault(fresh.key_id, fresh)
                self._by_tenant[tenant] = key
        return key

    def id_of(self, tenant: str) -> bytes | None:
        """The id of a tenant's key if it was used before in this process; makes none."""
        key = self._by_tenant.get(tenant)
        return None if key is None else key.key_id

    def prepare(self, tenants: Iterable[str]) -> str:
        """Have the keys for new pages of these tenants ready; why that fails, or ""."""
        try:
            for tenant in tenants:
                self.key_of(tenant)
        except TierError as error:
            return str(error)
        return ""

    def erase(self, tenant: str) -> bool:
        """Delete a tenant's key here and at its source; False when there was none.

        Raises TierError when it can't be deleted: then it is still in use.
        """
        if self._source is None:
            return False
        with self._lock:  # nobody fetches it in between
            content = self._source.find(tenant)
            self._source.erase(tenant)
            key = self._by_tenant.pop(tenant, None)
            if key is None and content is not None:
                key = TenantKey(content)
            if key is not None:
                self._by_id.pop(key.key_id, None)
            return key is not None

    def export(self) -> bytes:
        """Store and keys for a child process that decrypts; to be handed over by a pipe only."""
        with self._lock:
            return self.store_uuid + b"".join(key.content for key in self._by_id.values())

    @classmethod
    def of_export(cls, content: bytes) -> Cipher:
        """A cipher that decrypts what the exporting one can."""
        ends = range(UUID_BYTES, len(content), KEY_BYTES)
        cipher = cls(content[at : at + KEY_BYTES] for at in ends)
        cipher.store_uuid = content[:UUID_BYTES]
        return cipher


def _library() -> tuple[Any, type[Exception]]:
    try:
        import cryptography
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError as error:
        raise TierError(
            "encryption needs the package cryptography: pip install 'kvstore-llm[secure]'"
        ) from error
    if not hasattr(AESGCM, "decrypt_into"):
        raise TierError(
            f"encryption needs cryptography >= 47, {cryptography.__version__} is installed: "
            "pip install -U 'kvstore-llm[secure]'"
        )
    return AESGCM, InvalidTag
