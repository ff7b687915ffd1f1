"""Who may use a store's directories, and who they are: locks, owner, file system, identity.

Invariant: while a StoreHome is open, no other process (and no second one in this process) has any
of its directories, and its boot number was never used before. Identity is kept twice (`store.json`,
`store.bak.json`), each with a check, so that one damaged file loses nothing.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import stat
import time
import uuid
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kvstore.tiers.checksum import check64
from kvstore.tiers.disk_migration import MIGRATIONS
from kvstore.tiers.file_layer import DIRECTORY_MODE
from kvstore.tiers.lock_holder import LOCK_NAME, holder_of, note_holder
from kvstore.tiers.segment import FORMAT_VERSION, segment_id_of
from kvstore.tiers.tier import TierError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from kvstore.tiers.file_layer import FileLayer

log = logging.getLogger("kvstore.tiers.disk")

IDENTITY_NAMES = ("store.json", "store.bak.json")
UNPROVEN_STARTS_MAX = 3  # then the catalog is taken for what kills the server
LOCK_POLL_S = 0.05
# Waited for any holder, by those who wait at all: one that has just begun has not said who it is.
LOCK_GRACE_S = 0.3
BOOT_NUMBER_MAX = (1 << 24) - 1  # sequence = boot number << 40 | counter, in 64 bits

# Names that a directory may hold before it is ours: what a server puts beside the tier's own files.
OWN_NAMES = (
    *("secret", "keys", "settings.json", "catalog", "reserve", "lost+found", LOCK_NAME),
    *IDENTITY_NAMES,
)
OWN_PREFIXES = ("kvstore.", "segment-", "quarantine-", "catalog.", "catalog-")

# statfs magics (linux/magic.h) where flock, O_DIRECT or fsync do not mean what we need.
NETWORK_FILE_SYSTEMS = {
    0x6969: "NFS",
    0x517B: "SMB",
    0xFF534D42: "CIFS",
    0xFE534D42: "SMB2",
    0x01021997: "9p",
    0x5346414F: "AFS",
    0x00C36400: "Ceph",
    0x0BD00BD0: "Lustre",
    0x47504653: "GPFS",
}
DOUBTFUL_FILE_SYSTEMS = {
    0x65735546: "FUSE: durable only as far as the program behind it is",
    0x794C7630: "overlay: slower, and gone with the container",
    0x01021994: "tmpfs: in memory, nothing survives a reboot",
}


@dataclass(frozen=True, slots=True)
class Identity:
    """What a directory says of itself."""

    store_uuid: bytes
    format_version: int
    directory_index: int
    boot_number: int = 0
    # Starts in a row that died: before the catalog was read whole, and in a commit before one held.
    unproven_starts: int = 0
    unproven_commits: int = 0


class StoreHome:
    """The locked directories of one store. The first holds the catalog."""

    def __init__(
        self,
        paths: Sequence[Path],
        files: FileLayer,
        *,
        force: bool = False,
        for_a_look: bool = False,
        lock_wait_s: float = 0.0,
    ) -> None:
        """Lock, check and name all directories; create what is missing. Raises TierError.

        `force` accepts network file systems. The boot number is one more than ever before, and is
        on disk when this returns. How a start `for_a_look` ends says nothing about the catalog.
        Others who only look are waited for up to `lock_wait_s`.
        """
        if not paths:
            raise TierError("disk tier: no directory given")
        self.paths = [path.absolute() for path in paths]
        if len(set(self.paths)) != len(self.paths):
            raise TierError(f"disk tier: the same directory twice in {[str(p) for p in paths]}")
        self.read_only = False  # a directory is on a read-only file system
        self._counts = not for_a_look
        self._lock_wait_s = lock_wait_s
        self._read_failed = False
        self._died_reading = self._died_committing = 0  # starts in a row before this one
        self._files = files
        self._locks: list[int] = []
        try:
            for path in self.paths:
                self._enter(path, force)
            self.identity, self.is_new = self._identify()
        except OSError as error:
            self.close()
            raise TierError(_explain(error)) from error
        except TierError:
            self.close()
            raise

    @property
    def first(self) -> Path:
        """The directory of the catalog."""
        return self.paths[0]

    def write_identity(self, **changes: Any) -> None:
        """Change fields of the first directory's identity, durably and in both copies.

        In memory only when read-only: nothing that the change is for will be written either.
        """
        self.identity = replace(self.identity, **changes)
        if self.read_only:
            return
        for name in IDENTITY_NAMES:
            self._files.replace_file(self.first / name, _encode(self.identity))

    @property
    def suspicion(self) -> str:
        """Why the catalog is to be put aside although it looks sound; "" when there is nothing."""
        if self._died_reading >= UNPROVEN_STARTS_MAX:
            return f"{self._died_reading} starts in a row ended before it was read whole"
        if self._died_committing >= UNPROVEN_STARTS_MAX:
            return f"{self._died_committing} starts in a row ended while they wrote to it"
        return ""

    def excuse_start(self) -> None:
        """This start was refused before it touched the catalog: it is no sign of a bad one."""
        with contextlib.suppress(OSError):
            self.write_identity(unproven_starts=self._died_reading)

    def new_catalog(self) -> None:
        """The catalog was rebuilt: what is held against it starts from this start."""
        self._died_reading = self._died_committing = 0
        self.write_identity(unproven_starts=int(self._counts), unproven_commits=0)

    def prove_read(self, *, failed: bool = False) -> None:
        """All of the catalog was read and this process lives: it may be killed now.

        If that `failed`, this start counts against the catalog, whatever the process does later.
        """
        self._read_failed |= failed
        self._note(unproven_starts=0)

    @contextlib.contextmanager
    def risky_commit(self) -> Iterator[None]:
        """Counts against the catalog if this process dies in here; not if it lives on."""
        self._note(unproven_commits=self._died_committing + 1)
        try:
            yield
        finally:
            self._note(unproven_commits=self._died_committing)

    def prove_commit(self) -> None:
        """Pages were committed and this process lives: nothing is held against the catalog."""
        self._died_committing = 0
        self._note(unproven_starts=0, unproven_commits=0)

    def close(self) -> None:
        """Give the locks up."""
        for descriptor in self._locks:
            self._files.close(descriptor)
        self._locks.clear()

    # -- private --------------------------------------------------------------------------------

    def _note(self, **changes: Any) -> None:
        """Write what is new of the catalog's record. What the disk refuses costs only the guard."""
        if self._read_failed:
            changes.pop("unproven_starts", None)
        if not self._counts or replace(self.identity, **changes) == self.identity:
            return
        try:
            self.write_identity(**changes)
        except OSError as error:
            log.warning("%s: %s", self.first, error)

    def _enter(self, path: Path, force: bool) -> None:
        self._files.make_directory(path)
        owner = path.stat().st_uid
        if owner != os.geteuid():
            raise TierError(
                f"{path} belongs to uid {owner}, this process is uid {os.geteuid()}: name a "
                "directory of your own, or start as its owner"
            )
        self._check_file_system(path, force)
        strangers = [name for name in self._files.listdir(path) if not _is_ours(name)]
        if strangers and not any(name in IDENTITY_NAMES for name in self._files.listdir(path)):
            raise TierError(
                f"{path} is not a kvstore directory and not empty ({', '.join(strangers[:3])}): "
                "name an empty or new one"
            )
        self._lock(path)
        if stat.S_IMODE(path.stat().st_mode) != DIRECTORY_MODE and not self.read_only:
            path.chmod(DIRECTORY_MODE)

    def _check_file_system(self, path: Path, force: bool) -> None:
        magic = self._files.file_system_magic(path)
        network = NETWORK_FILE_SYSTEMS.get(magic)
        if network and not force:
            raise TierError(
                f"{path} is on a network file system ({network}), where locks and syncs cannot be "
                "relied on: name a directory on a local disk, or force it"
            )
        if network or magic in DOUBTFUL_FILE_SYSTEMS:
            log.warning("%s is on %s", path, network or DOUBTFUL_FILE_SYSTEMS[magic])

    def _lock(self, path: Path) -> None:
        lock_path = path / LOCK_NAME
        descriptor = self._open_lock(lock_path)
        if not self._wait_for(descriptor):
            holder = holder_of(descriptor)
            self._files.close(descriptor)
            raise TierError(
                f"{path} is in use by {holder.words}: "
                + (
                    "it only looks inside; try again when it has ended"
                    if holder.looks
                    else "stop it, or name another directory; if it is a server, "
                    "kvstore.connect.connect() reaches it"
                )
            )
        self._locks.append(descriptor)
        if self.read_only:
            return
        note_holder(descriptor, for_a_look=not self._counts)

    def _wait_for(self, descriptor: int) -> bool:
        """Whether the lock is ours now."""
        begin_s, waits = time.monotonic(), False
        while not self._files.lock(descriptor):
            holder = holder_of(descriptor)
            limit_s = self._lock_wait_s if holder.looks else min(self._lock_wait_s, LOCK_GRACE_S)
            if time.monotonic() - begin_s >= limit_s:
                return False
            if holder.looks and not waits:
                waits = True
                log.info("waiting up to %g s for %s to end", limit_s, holder.words)
            time.sleep(LOCK_POLL_S)
        return True

    def _open_lock(self, path: Path) -> int:
        try:
            return self._files.open(path, create=True)
        except FileExistsError:
            pass
        except OSError as error:
            if error.errno == errno.EROFS:
                raise TierError(
                    f"{path.parent} is on a read-only file system and holds no store"
                ) from error
            raise
        try:
            return self._files.open(path)
        except OSError as error:
            if error.errno != errno.EROFS:
                raise
        self.read_only = True
        return self._files.open(path, read_only=True)

    def _identify(self) -> tuple[Identity, bool]:
        found = [self._read_identity(path) for path in self.paths]
        first = found[0]
        for path, identity in zip(self.paths[1:], found[1:], strict=True):
            if identity is None:
                continue
            if identity.directory_index == 0:
                raise TierError(f"{path} holds a store's catalog: name it first, or leave it out")
            if first is None or identity.store_uuid != first.store_uuid:
                raise TierError(f"{path} belongs to another store than {self.first}")
        if first is not None and first.directory_index != 0:
            raise TierError(f"{self.first} is a further directory of a store, not its first")
        is_new = first is None
        if first is None:
            self._require_nothing_stored()
            first = Identity(uuid.uuid4().bytes, FORMAT_VERSION, 0)
        if first.boot_number >= BOOT_NUMBER_MAX:
            raise TierError(f"{self.first} was opened {first.boot_number} times, its limit")
        self.identity = first
        self._died_reading = first.unproven_starts
        self._died_committing = first.unproven_commits
        self.write_identity(
            boot_number=first.boot_number + 1,
            unproven_starts=first.unproven_starts + self._counts,
        )
        self._name_further_directories(found)
        return self.identity, is_new

    def _require_nothing_stored(self) -> None:
        """Pages of a store whose identity is damaged can't be told to be its own; nor are they
        thrown away: whoever only looks at a directory must not empty it.
        """
        names = [name for path in self.paths for name in self._files.listdir(path)]
        segments = sum(segment_id_of(name) is not None for name in names)
        if segments:
            raise TierError(
                f"{self.first}: {' and '.join(IDENTITY_NAMES)} are both damaged or gone, and say "
                f"whose the {segments} segments of pages here are: put one of them back from a "
                "copy, or empty the directory to begin anew"
            )

    def _name_further_directories(self, found: Sequence[Identity | None]) -> None:
        for index, path in enumerate(self.paths[1:], start=1):
            wanted = Identity(self.identity.store_uuid, self.identity.format_version, index)
            if found[index] != wanted and not self.read_only:
                self._files.replace_file(path / IDENTITY_NAMES[0], _encode(wanted))

    def _read_identity(self, path: Path) -> Identity | None:
        """The newest sound copy; None when there is none. A newer format is refused."""
        sound = []
        for name in IDENTITY_NAMES:
            try:
                content = self._files.read_file(path / name)
            except FileNotFoundError:
                continue
            identity = _decode(content)
            if identity is None:
                log.warning("%s is damaged", path / name)
                continue
            sound.append(identity)
        if not sound:
            return None
        newest = max(sound, key=lambda identity: identity.boot_number)
        if newest.format_version > FORMAT_VERSION:
            raise TierError(
                f"{path} was written in format {newest.format_version}, this kvstore knows formats "
                f"up to {FORMAT_VERSION}: install a newer kvstore, or name another directory"
            )
        if newest.format_version < FORMAT_VERSION and newest.format_version not in MIGRATIONS:
            raise TierError(
                f"{path} was written in format {newest.format_version}, this kvstore reads from "
                f"{min(MIGRATIONS, default=FORMAT_VERSION)} to {FORMAT_VERSION}: open it with an "
                "older kvstore, or name another directory"
            )
        return newest


def _is_ours(name: str) -> bool:
    return name in OWN_NAMES or name.startswith(OWN_PREFIXES) or name.endswith(".tmp")


def _encode(identity: Identity) -> bytes:
    body = {
        "kvstore": "store directory; do not edit",
        "format": identity.format_version,
        "uuid": identity.store_uuid.hex(),
        "directory": identity.directory_index,
        "boot": identity.boot_number,
        "unproven_starts": identity.unproven_starts,
        "unproven_commits": identity.unproven_commits,
    }
    return json.dumps(body | {"check": _check_of(body)}, indent=1).encode() + b"\n"


def _decode(content: bytes) -> Identity | None:
    try:
        body = json.loads(content)
        if body.pop("check") != _check_of(body):
            return None
        return Identity(
            bytes.fromhex(body["uuid"]),
            int(body["format"]),
            int(body["directory"]),
            int(body["boot"]),
            int(body["unproven_starts"]),
            int(body.get("unproven_commits", 0)),  # older versions did not count them
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _check_of(body: dict[str, Any]) -> str:
    return check64(json.dumps(body, sort_keys=True).encode()).hex()


def _explain(error: OSError) -> str:
    where = error.filename or "disk tier"
    return f"{where}: {error.strerror or error}; the disk tier needs a writable local directory"
