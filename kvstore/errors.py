"""Every exception that leaves kvstore on purpose. A miss is a value, never one of these.

    KVStoreError
      ConfigError      a setting is unknown, malformed or out of bounds
      SpecError        a cache spec is incomplete or contradicts itself
      InvalidRequest   the arguments of one call cannot be served (names, tokens, sizes)
      CapacityError    more bytes asked than the machine or the tier has
        QuotaError     ... than the quota of this tenant
      DirectoryError   the store directory cannot be used: in use, foreign, newer, network mount
      AccessDenied     a server does not let this credential do that
      ServerUnavailable  an operator's call got no answer; engines' calls are misses then
      ClosedError      the store, session or hit was closed before the call
      SharedMemoryError (shared_memory.py)  a server's memory can't be attached or is gone

Messages say field, value and bound, and the way out. They never hold secrets or token ids.
"""

from __future__ import annotations

__all__ = [
    "AccessDenied",
    "CapacityError",
    "ClosedError",
    "ConfigError",
    "DirectoryError",
    "InvalidRequest",
    "KVStoreError",
    "QuotaError",
    "ServerUnavailable",
    "SpecError",
]


class KVStoreError(Exception):
    """The base of all: `except KVStoreError` catches whatever the store refuses to do."""


class ConfigError(KVStoreError, ValueError):
    """A setting is unknown, malformed or out of bounds; one line a setting."""


class SpecError(KVStoreError, ValueError):
    """A cache spec is incomplete or contradicts itself; the message names the field."""


class InvalidRequest(KVStoreError, ValueError):
    """The arguments of one call cannot be served; nothing was changed."""


class CapacityError(KVStoreError):
    """More bytes were asked than there are; the message gives both numbers."""


class QuotaError(CapacityError):
    """The tenant has as much as its quota says. The message begins "quota: ", with the numbers."""

    def __init__(self, message: str) -> None:
        super().__init__(f"quota: {message}")


class DirectoryError(KVStoreError):
    """The store directory cannot be used; the message says by whom or why, and what to do."""


class AccessDenied(KVStoreError, PermissionError):
    """A server knows no such credential, or its role may not do that; the message says which."""


class ServerUnavailable(KVStoreError):
    """An operator's call got no answer; the message says why. Engines never see it."""


class ClosedError(KVStoreError):
    """The store, session, hit or reservation was closed before this call."""
