"""kvstore: a KV-cache store for LLM inference. Host memory and SSD, shared prefixes, warm restarts.

Lives here: the store that joins index, tiers and policy; the CLI. Must not be here: engine types,
kernels, or what belongs to a leaf. Public names are resolved lazily, so that importing one room
loads no other room's libraries.
"""

from __future__ import annotations

from kvstore._version import __version__

TYPE_CHECKING = False  # as typing's, which takes time: Ctrl-C in it would print a stack
if TYPE_CHECKING:
    from typing import Any

    from kvstore.config import StoreConfig
    from kvstore.hints import Hints
    from kvstore.spec import CacheSpec
    from kvstore.store import Store

__all__ = ["CacheSpec", "Hints", "Store", "StoreConfig", "__version__"]

_PUBLIC = {
    "CacheSpec": "kvstore.spec",
    "Hints": "kvstore.hints",
    "Store": "kvstore.store",
    "StoreConfig": "kvstore.config",
}


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        import importlib

        return getattr(importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
