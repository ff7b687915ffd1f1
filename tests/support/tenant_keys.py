"""Keys of tenants in memory, for tests of ciphers without a key folder."""

from __future__ import annotations

import hashlib

from kvstore.tiers.cipher import Cipher


class MemoryKeys:
    """A KeySource; the keys follow from the tenants' names and how often they were erased."""

    def __init__(self) -> None:
        self.keys: dict[str, bytes] = {}
        self.erased = 0

    def key_for(self, tenant: str) -> bytes:
        made = hashlib.sha256(f"{tenant} {self.erased}".encode()).digest()
        return self.keys.setdefault(tenant, made)

    def find(self, tenant: str) -> bytes | None:
        return self.keys.get(tenant)

    def erase(self, tenant: str) -> None:
        self.erased += 1
        self.keys.pop(tenant, None)

    def cipher(self, *, writes: bool = True) -> Cipher:
        """A cipher that knows the keys made so far."""
        return Cipher(self.keys.values(), self, writes=writes)
