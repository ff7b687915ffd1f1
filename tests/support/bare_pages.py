"""Pages of an open store that have a place in its index and no bytes: to look at many of them.

Good for what reads the index; a look-up that loads would find nothing. In a store without a disk
they count as being on disk, so that they can also be evicted.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from kvstore.prefix_index.page_table import DISK, NO_PAGE

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore import CacheSpec, Store

TIER = DISK


def add_pages(
    store: Store,
    spec: CacheSpec,
    tokens: np.ndarray,
    *,
    tenant: str = "default",
    under: int = NO_PAGE,
) -> np.ndarray:
    """Their ids. tokens: of whole pages that are not there; under: the page before them."""
    state = store.state
    root, count = store._tree(spec, tenant, b"").root, len(tokens) // spec.page_tokens
    with state.lock:
        first = state.take_sequences(count)
        sequences = np.arange(first, first + count, dtype=np.uint64)
        twice = np.stack([sequences, sequences], axis=1)
        ids = state.index.insert(
            root,
            spec.page_tokens,
            under,
            tokens.astype("<i4").tobytes(),
            None,
            twice.tobytes(),
            sequences,
            spec.page_bytes,
            twice,
            state.wall_clock(),
        )
        state.index.set_tier(ids, TIER, sequences.astype(np.int64))
    return ids


class OpenLock:
    """A store's own lock, which tells when its owner has let it go: then others may come in."""

    def __init__(self, store: Store, between: Callable[[int], None]) -> None:
        """between: called without the lock, with how often it was let go of before."""
        self._lock: Any = store.state.lock
        self._between = between
        self._depth = 0  # of this thread: others hold the lock again when they wake up
        self._is_telling = False
        self._thread = threading.current_thread()
        self.times = 0
        store.state.lock = self  # type: ignore[assignment]

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        taken = bool(self._lock.acquire(blocking, timeout))
        self._depth += taken and threading.current_thread() is self._thread
        return taken

    def release(self) -> None:
        mine = threading.current_thread() is self._thread
        self._depth -= mine
        is_free = mine and self._depth == 0
        self._lock.release()
        if is_free and not self._is_telling:
            self._is_telling = True
            self._between(self.times)
            self._is_telling = False
            self.times += 1

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *exc: object) -> None:
        self.release()
