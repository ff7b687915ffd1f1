"""Opens what a store stands on: its directory with the disk tier, its secret, its arena.

What the machine refuses comes out as DirectoryError or CapacityError, with the way out. Must not be
here: threads, trees.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.errors import CapacityError, DirectoryError
from kvstore.key_folder import AtRest, open_at_rest
from kvstore.remembered import FILE_NAME, mark_of, secret_mark, what_is_damaged
from kvstore.tenant import load_or_create_secret, load_secret
from kvstore.tiers.host_tier import HostTier
from kvstore.tiers.tier import TierError

if TYPE_CHECKING:
    from pathlib import Path

    from kvstore.config import StoreConfig
    from kvstore.tiers.disk_tier import DiskTier
    from kvstore.tiers.file_layer import FileLayer


def open_disk(
    config: StoreConfig,
    files: FileLayer | None,
    *,
    for_a_look: bool = False,
    lock_wait_s: float = 0.0,
) -> tuple[DiskTier | None, bytes | None, AtRest | None]:
    """The disk tier, the store secret, and encryption; None where all is in memory or plain."""
    if config.directory is None or config.disk_bytes == 0:
        secret = load_secret(config.secret_file) if config.secret_file else None
        return None, secret, None
    from kvstore.tiers.disk_tier import DiskTier  # a memory-only store needs no LMDB

    try:
        disk = DiskTier.open(
            list(config.segment_directories),
            config.disk_bytes,
            files,
            io_threads=config.io_threads,
            for_a_look=for_a_look,
            lock_wait_s=lock_wait_s,
            load=False,  # WarmStart does, in the background
        )
    except (TierError, OSError) as exc:
        said, place = str(exc), str(config.directory)
        raise DirectoryError(said if place in said else f"{place}: {said}") from exc
    try:
        _check_note(config.directory)
        secret = _secret(config)  # only now that the directory is known to be ours
        at_rest = open_at_rest(config, secret)
        if at_rest is not None:
            disk.use_cipher(at_rest.cipher)
        return disk, secret, at_rest
    except BaseException:
        disk.close()
        raise


def open_host(config: StoreConfig, disk: DiskTier | None) -> HostTier:
    """The arena, as large as `config` says; CapacityError."""
    boot = disk.boot_number if disk is not None else 1
    try:
        return HostTier(
            config.host_bytes,
            huge_pages=config.huge_pages,
            boot_epoch=boot,
            populate_wait_s=0.0,  # reserve() waits itself, without the lock
        )
    except TierError as exc:
        raise CapacityError(str(exc)) from exc


def _check_note(directory: Path) -> None:
    problem = what_is_damaged(directory)
    if problem:
        raise DirectoryError(problem)


def check_secret(config: StoreConfig) -> None:
    """Refuse what `open_disk` will of the secret, and make none."""
    if config.directory is not None and config.disk_bytes:
        place = config.secret_file or config.directory / "secret"
        if config.secret_file is not None or secret_mark(config.directory) or place.exists():
            _secret(config)
    elif config.secret_file is not None:
        load_secret(config.secret_file)


def _secret(config: StoreConfig) -> bytes:
    """The store secret; DirectoryError when the pages here belong to another one."""
    assert config.directory is not None
    place = config.secret_file or config.directory / "secret"
    noted = secret_mark(config.directory)
    if config.secret_file is not None or (noted and place.exists()):
        secret = load_secret(place)
    elif noted:
        raise DirectoryError(
            f"{place} is missing: without it no page here can be found; restore it, or remove "
            f"{config.directory / FILE_NAME} to start with a new one"
        )
    else:
        secret = load_or_create_secret(place)
    if noted and noted != mark_of(secret):
        raise DirectoryError(
            f"{place} is not the secret that the pages in {config.directory} belong to; restore "
            f"it, or remove {config.directory / FILE_NAME} to go on without those pages"
        )
    return secret
