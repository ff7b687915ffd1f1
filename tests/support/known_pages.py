"""Prompts and pages whose bytes follow from their tokens: so every read can be checked."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvstore import CacheSpec

if TYPE_CHECKING:
    from kvstore.session import Session

PAGE_TOKENS = 4
PAGE_BYTES = 4096
SPEC = CacheSpec.opaque("unit", page_tokens=PAGE_TOKENS, page_bytes=PAGE_BYTES)


def prompt(seed: int, pages: int) -> np.ndarray:
    """A prompt of whole pages that no other seed shares."""
    return np.arange(pages * PAGE_TOKENS, dtype=np.int32) + 1_000_000 * (seed + 1)


def content(tokens: np.ndarray, page: int) -> bytes:
    """The bytes that this project's tests store for a page: they follow from the whole chain."""
    seen = tokens[: (page + 1) * PAGE_TOKENS].tobytes()
    return (seen * (PAGE_BYTES // len(seen) + 1))[:PAGE_BYTES]


def save(
    session: Session, tokens: np.ndarray, *, wait_s: float = 10.0, durable: bool = False
) -> int:
    """Store what is missing of a prompt, waiting so long for room; how many pages that were."""
    saved = 0
    while True:
        with session.reserve(tokens, deadline_s=wait_s) as run:
            if not run.count:
                return saved
            for offset, view in enumerate(run.views()):
                view[:] = content(tokens, run.start + offset)
            saved += run.commit(durable=durable).pages


def load(session: Session, tokens: np.ndarray) -> int:
    """Pages that hit; their bytes are compared."""
    with session.match(tokens) as hit:
        pages = hit.stage(5.0)
        for page, view in enumerate(hit.views(0, pages)):
            assert bytes(view) == content(tokens, page)
        return pages
