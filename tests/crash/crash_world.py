"""Everything the crash loops may ever store: two tenants, chains that share prefixes, known bytes.

A page's bytes follow from its tenant and its whole chain, so every read can be checked, and a page
served to the wrong tenant or prompt is noticed. There are several times more pages than the disk
has slots, so all slots are used again and again.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from kvstore.prefix_index.page_key import page_keys
from kvstore.spec import CacheSpec
from kvstore.tenant import load_secret, tenant_secret, tree_root

if TYPE_CHECKING:
    from pathlib import Path

TENANTS = ("red", "blue")
PAGE_TOKENS = 4
PAGE_BYTES = 10_000  # not a multiple of 4 KiB: the padded last block is exercised too
FAMILIES = 10  # prompts of a tenant that share nothing
STEM_PAGES = 3
BRANCHES = 4
TAIL_PAGES_MAX = 5
KEY_BYTES = 16
SPEC = CacheSpec.opaque("crash", page_tokens=PAGE_TOKENS, page_bytes=PAGE_BYTES)

# The store under test: an arena of some 35 pages; a disk of 2 MiB has some 80 slots.
STORE_SETTINGS = {"host_bytes": 512 << 10, "io_threads": 2}


@dataclass(frozen=True, slots=True)
class Chain:
    """One prompt of one tenant, whole pages."""

    tenant: str
    tokens: np.ndarray

    @property
    def pages(self) -> int:
        return len(self.tokens) // PAGE_TOKENS

    def content(self, page: int) -> bytes:
        """The bytes that belong to one page of this chain."""
        return _content(self.tenant, self.tokens[: (page + 1) * PAGE_TOKENS].tobytes())


@lru_cache(maxsize=4096)
def _content(tenant: str, tokens: bytes) -> bytes:
    return random.Random(tenant.encode() + tokens).randbytes(PAGE_BYTES)


def all_chains() -> list[Chain]:
    """The same chains in every process: each branch leaves its family's stem somewhere."""
    rng = random.Random(4)
    chains = []
    for number in range(FAMILIES):
        stem = np.arange(STEM_PAGES * PAGE_TOKENS, dtype=np.int32) + 10_000 * (number + 1)
        for branch in range(BRANCHES):
            pages = rng.randint(1, TAIL_PAGES_MAX)
            tail = np.arange(pages * PAGE_TOKENS, dtype=np.int32) + 10_000 * (number + 1)
            tokens = np.concatenate(
                [stem[: rng.randint(1, STEM_PAGES) * PAGE_TOKENS], tail + 1000 * (branch + 1)]
            )
            chains += [Chain(tenant, tokens) for tenant in TENANTS]
    return chains


@dataclass(slots=True)
class KeyMap:
    """The store's own names of all pages, which follow from its secret."""

    chains: list[Chain]
    keys: list[list[str]] = field(default_factory=list)  # hexadecimal, of each chain's pages
    _below: dict[str, set[str]] = field(default_factory=dict)

    @classmethod
    def of_store(cls, directory: Path, chains: list[Chain]) -> KeyMap:
        """The key map of the store in `directory`, which must have its secret."""
        secret = load_secret(directory / "secret")
        found = cls(chains)
        for chain in chains:
            root = tree_root(tenant_secret(secret, chain.tenant), SPEC.namespace, b"")
            raw = page_keys(root, chain.tokens.tobytes(), PAGE_TOKENS, None)
            keys = [raw[at : at + KEY_BYTES].hex() for at in range(0, len(raw), KEY_BYTES)]
            found.keys.append(keys)
            for page, key in enumerate(keys):
                found._below.setdefault(key, set()).update(keys[page:])
        return found

    def subtree(self, key: str) -> set[str]:
        """A page and all pages that can only be reached through it."""
        return self._below.get(key, {key})

    def name(self, key: str) -> str:
        """Where a page stands, for messages."""
        for chain, keys in zip(self.chains, self.keys, strict=True):
            if key in keys:
                first = int(chain.tokens[keys.index(key) * PAGE_TOKENS])
                return f"{chain.tenant}/{first}/page {keys.index(key)}"
        return f"unknown key {key}"
