"""The tenants' keys for encryption at rest: one file a tenant, 32 random bytes, 0600.

    KEYS_DIR/kvstore-keys          names the store secret that the files' names are keyed with
    KEYS_DIR/<32 hex>.key          the hex is a keyed hash of the tenant's name

A key is durable before anything is encrypted with it; deleting its file deletes what it encrypted.
Must not be here: what keys encrypt (tiers/cipher.py), tenants' names in any file.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstore.errors import ConfigError, DirectoryError
from kvstore.private_file import locked_folder, read_private, replace_private
from kvstore.remembered import FILE_NAME, Encryption, mark_of, remember, remembered_encryption
from kvstore.tiers.tier import TierError

if TYPE_CHECKING:
    from pathlib import Path

    from kvstore.config import StoreConfig
    from kvstore.tiers.cipher import Cipher

DEFAULT_FOLDER = "keys"
MARK_NAME = "kvstore-keys"
MARK_BYTES_MAX = 64
KEY_BYTES = 32

_KEY_NAME = re.compile(r"[0-9a-f]{32}\.key")


class KeyFolder:
    """The keys of all stores that share one secret; safe for several processes at once."""

    def __init__(self, folder: Path, secret: bytes) -> None:
        self.folder = folder
        self._secret = secret

    @property
    def exists(self) -> bool:
        """Whether this folder was ever one of keys, whosever."""
        return (self.folder / MARK_NAME).exists()

    def open(self, *, create: bool) -> None:
        """Check that the folder holds this secret's keys; with `create`, make it if it is missing.

        Raises DirectoryError or ConfigError.
        """
        if not self.exists and not create:
            raise DirectoryError(f"{self.folder} holds no keys (it has no file {MARK_NAME})")
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            mark = mark_of(self._secret).encode() + b"\n"
            with locked_folder(self.folder):
                if not self.exists:
                    replace_private(self.folder / MARK_NAME, mark)
                    _sync(self.folder.parent)
                _check_folder(self.folder)
                found = read_private("key folder", self.folder / MARK_NAME, MARK_BYTES_MAX)
        except OSError as exc:
            raise DirectoryError(f"{exc.filename}: {exc.strerror}: keys cannot be kept") from exc
        if found != mark:
            raise DirectoryError(
                f"{self.folder} holds the keys of a store with another secret: name a folder of "
                "this store's own with keys_dir"
            )

    def load(self) -> list[bytes]:
        """All keys. Raises ConfigError for a file that is damaged or open to others."""
        names = sorted(name for name in os.listdir(self.folder) if _KEY_NAME.fullmatch(name))
        return [_read(self.folder / name) for name in names]

    def find(self, tenant: str) -> bytes | None:
        """The key of a tenant, or None. Raises TierError."""
        path = self._path(tenant)
        try:
            return _read(path) if path.exists() else None
        except (ConfigError, OSError) as exc:
            raise TierError(str(exc)) from exc

    def key_for(self, tenant: str) -> bytes:
        """The key of a tenant, made if there is none: file and folder are synced. Or TierError."""
        path = self._path(tenant)
        try:
            with locked_folder(self.folder):
                if not path.exists():
                    replace_private(path, os.urandom(KEY_BYTES))
                return _read(path)
        except ConfigError as exc:
            raise TierError(str(exc)) from exc
        except OSError as exc:
            raise TierError(f"key file {path}: cannot be made ({exc.strerror})") from exc

    def erase(self, tenant: str) -> None:
        """Delete a tenant's key, with what a kill may have left of its making. Or TierError."""
        path = self._path(tenant)
        try:
            with locked_folder(self.folder):
                for name in os.listdir(self.folder):
                    if name.startswith(path.name):
                        os.unlink(self.folder / name)
                _sync(self.folder)
        except ConfigError as exc:
            raise TierError(str(exc)) from exc
        except OSError as exc:
            raise TierError(f"key file {path}: cannot be deleted ({exc.strerror})") from exc

    def _path(self, tenant: str) -> Path:
        text = b"kvstore key file " + tenant.encode()
        digest = hashlib.blake2b(text, key=self._secret, digest_size=16).hexdigest()
        return self.folder / f"{digest}.key"


@dataclass(frozen=True, slots=True)
class AtRest:
    """How one open store encrypts what it keeps on disk."""

    cipher: Cipher
    folder: KeyFolder
    noted: Encryption


def open_at_rest(config: StoreConfig, secret: bytes) -> AtRest | None:
    """Keys and cipher as settings and the directory's memory say; None where nothing is encrypted.

    A store that was encrypted once goes on so unless `encrypt` says otherwise; what is encrypted
    stays readable then. Raises DirectoryError or ConfigError: a folder of keys that is not there is
    a mistake, and no reason to give pages up.
    """
    assert config.directory is not None
    known = remembered_encryption(config.directory)
    place = config.keys_dir or (known.keys_dir if known else None)
    folder = KeyFolder(place or config.directory / DEFAULT_FOLDER, secret)
    wanted = config.encrypt
    if wanted is None:
        wanted = known.on if known is not None else folder.exists
        check_keys_wanted(config)
    if not wanted and known is None and not folder.exists:
        return None
    try:
        folder.open(create=known is None)
    except DirectoryError as exc:
        raise DirectoryError(
            f"{exc}: mount it, or name the folder with keys_dir. To give up all encrypted pages, "
            f"remove {config.directory / FILE_NAME} and open the store with encrypt"
        ) from exc
    from kvstore.tiers.cipher import Cipher  # and with it a library that others do not need

    try:
        cipher = Cipher(folder.load(), folder, writes=wanted)
    except (TierError, OSError) as exc:
        raise DirectoryError(f"{config.directory}: {exc}") from exc
    return AtRest(cipher, folder, Encryption(wanted, place))


def check_keys_wanted(config: StoreConfig) -> None:
    """ConfigError for a folder of keys where nothing is, or is to be, encrypted."""
    if config.directory is None or config.keys_dir is None or config.encrypt is not None:
        return
    known = remembered_encryption(config.directory)
    if known is None and not (config.keys_dir / MARK_NAME).exists():
        raise ConfigError("keys_dir: given, but nothing is encrypted here; set encrypt too")


def remember_opening(config: StoreConfig, secret: bytes, at_rest: AtRest | None) -> None:
    """Note how a store was opened; DirectoryError if it could forget that it is encrypted."""
    assert config.directory is not None, "a store with a disk has a directory"
    noted = at_rest.noted if at_rest is not None else None
    if not remember(config, secret, noted) and noted != remembered_encryption(config.directory):
        raise DirectoryError(
            f"{config.directory / FILE_NAME}: cannot be written, and a store must remember that "
            "it is encrypted: make room, or check who owns the directory"
        )


def _check_folder(folder: Path) -> None:
    """Who can write in a folder can delete its keys, and put others there."""
    found = folder.stat()
    if found.st_uid != os.geteuid():
        raise ConfigError(
            f"key folder {folder}: belongs to uid {found.st_uid}, this process is uid "
            f"{os.geteuid()}; use a folder of your own"
        )
    if found.st_mode & 0o022:
        raise ConfigError(
            f"key folder {folder}: mode {stat.S_IMODE(found.st_mode):04o} lets others write in it; "
            f"run: chmod 700 {folder}"
        )


def _read(path: Path) -> bytes:
    content = read_private("key file", path, KEY_BYTES)
    if len(content) != KEY_BYTES:
        raise ConfigError(
            f"key file {path}: {len(content)} bytes, must be {KEY_BYTES}: restore it; removing it "
            "gives up the pages that it encrypted"
        )
    return content


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
