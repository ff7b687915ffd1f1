"""Who owns pages: names of tenants, their secrets, and the roots that keep their trees apart.

A root is keyed by a secret, so that nobody without it can compute a page key of another tenant.
Must not be here: pages, sessions, or a default that stands in for a missing secret.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import stat
from typing import TYPE_CHECKING

from kvstore.errors import ConfigError, InvalidRequest

if TYPE_CHECKING:
    from pathlib import Path

__all__ = [
    "check_name",
    "check_salt",
    "load_or_create_secret",
    "load_secret",
    "tenant_secret",
    "tree_root",
]

NAMESPACE_BYTES = 16
ROOT_BYTES = 32
SECRET_BYTES = 32
SECRET_BYTES_MIN = 16
SECRET_BYTES_MAX = 64  # what BLAKE2b takes as a key
SALT_BYTES_MAX = 4096

_NAME = re.compile(r"[A-Za-z0-9.-][A-Za-z0-9._-]{0,63}", re.ASCII)


def check_name(what: str, name: object) -> str:
    """The name, if it is 1 to 64 of `A-Za-z0-9._-` and starts with no `_`; else InvalidRequest."""
    if isinstance(name, str) and _NAME.fullmatch(name) and name not in (".", ".."):
        return name
    shown = repr(name) if len(repr(name)) <= 80 else repr(name)[:80] + "..."
    raise InvalidRequest(
        f"{what}: {shown} given; must be 1 to 64 letters, digits, '.', '-', '_', not starting "
        "with '_'"
    )


def tenant_secret(store_secret: bytes, tenant: str) -> bytes:
    """32 bytes that only this store's tenant has: BLAKE2b-256 keyed by the store secret."""
    _check_secret("store secret", store_secret)
    name = check_name("tenant", tenant)
    return hashlib.blake2b(name.encode(), key=store_secret, digest_size=SECRET_BYTES).digest()


def tree_root(secret: bytes, namespace: bytes, salt: bytes = b"") -> bytes:
    """32 bytes naming one radix tree: BLAKE2b keyed by the tenant's secret, over both.

    The namespace has a fixed length, so that no two (namespace, salt) run together.
    """
    _check_secret("tenant secret", secret)
    if len(namespace) != NAMESPACE_BYTES:
        raise InvalidRequest(f"namespace: {len(namespace)} bytes given; must be {NAMESPACE_BYTES}")
    check_salt(salt)
    return hashlib.blake2b(namespace + salt, key=secret, digest_size=ROOT_BYTES).digest()


def check_salt(salt: object) -> None:
    """InvalidRequest for what is no salt: bytes, at most SALT_BYTES_MAX."""
    if not isinstance(salt, bytes):
        raise InvalidRequest(f"salt: a {type(salt).__name__} given; bytes are needed")
    if len(salt) > SALT_BYTES_MAX:
        raise InvalidRequest(
            f"salt: {len(salt)} bytes given; at most {SALT_BYTES_MAX}, so give a digest of more"
        )


def load_or_create_secret(path: Path) -> bytes:
    """The store secret in `path`; made, 32 random bytes, 0600 under any umask, if there is none.

    Two processes that start at once end with the same secret. ConfigError as `load_secret`.
    """
    if not os.path.lexists(path):
        try:
            _create_secret(path)
        except OSError as exc:
            raise ConfigError(f"secret file {path}: cannot be made ({exc.strerror})") from exc
    return load_secret(path)


def load_secret(path: Path) -> bytes:
    """The secret in `path`, 16 to 64 bytes; a text's trailing newline does not count.

    ConfigError if there is none, or it belongs to someone else, is open to others, or is empty or
    too short: a check against an empty secret is no check.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as exc:
        raise ConfigError(f"secret file {path}: cannot be opened ({exc.strerror})") from exc
    try:
        _check_owner_and_mode(path, os.fstat(descriptor))
        content = os.read(descriptor, SECRET_BYTES_MAX + 3)
    finally:
        os.close(descriptor)
    secret = content if len(content) == SECRET_BYTES else content.rstrip(b"\r\n")
    return _check_secret(f"secret file {path}", secret)


def _create_secret(path: Path) -> None:
    """Write aside, then link: the name never shows a half-written secret, and the first wins."""
    aside = path.with_name(f"{path.name}.{os.getpid()}-{secrets.token_hex(8)}.tmp")
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(secrets.token_bytes(SECRET_BYTES))
            file.flush()
            os.fsync(file.fileno())
        _link_if_absent(aside, path)
    finally:
        os.unlink(aside)
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _link_if_absent(aside: Path, path: Path) -> None:
    try:
        os.link(aside, path)
    except FileExistsError:
        return  # another process was first: its secret counts


def _check_owner_and_mode(path: Path, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise ConfigError(f"secret file {path}: is not a regular file")
    if found.st_uid != os.geteuid():
        raise ConfigError(
            f"secret file {path}: belongs to uid {found.st_uid}, this process is uid "
            f"{os.geteuid()}; use a file of your own"
        )
    if found.st_mode & 0o077:
        raise ConfigError(
            f"secret file {path}: mode {stat.S_IMODE(found.st_mode):04o} lets others read it; "
            f"run: chmod 600 {path}"
        )


def _check_secret(what: str, secret: bytes) -> bytes:
    length = len(secret.strip())
    if length < SECRET_BYTES_MIN or len(secret) > SECRET_BYTES_MAX or len(set(secret)) < 4:
        raise ConfigError(
            f"{what}: {length} bytes that count; must be {SECRET_BYTES_MIN} to {SECRET_BYTES_MAX} "
            "random ones, for example from: openssl rand -hex 32"
        )
    return secret
