"""What `serve --check-config` can see without opening the store: files that settings name, sizes.

The opening itself refuses the same; here nothing is made or locked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.errors import ConfigError, DirectoryError
from kvstore.key_folder import check_keys_wanted
from kvstore.quantity import format_bytes
from kvstore.redis_share import redis_password
from kvstore.remembered import what_is_damaged
from kvstore.store_opening import check_secret
from kvstore.tiers.available_memory import available_memory_bytes
from kvstore.tiers.disk_space import CAPACITY_BYTES_MIN

if TYPE_CHECKING:
    from kvstore.config import StoreConfig


def check_settings(config: StoreConfig) -> None:
    """ConfigError or DirectoryError with a line for each problem."""
    problems = []
    for check in (
        _check_memory,
        _check_size,
        _check_note,
        check_secret,
        check_keys_wanted,
        redis_password,
    ):
        try:
            check(config)
        except (ConfigError, DirectoryError) as exc:
            problems.append(str(exc))
    if problems:
        raise ConfigError("\n".join(problems))


def _check_memory(config: StoreConfig) -> None:
    there = available_memory_bytes()
    arena = getattr(config, "arena_bytes", config.host_bytes)  # a server's staging comes as needed
    if arena > there and not config.huge_pages:
        raise ConfigError(
            f"host_bytes: {format_bytes(config.host_bytes)} given, {format_bytes(there)} available;"
            " lower --host-bytes"
        )


def _check_size(config: StoreConfig) -> None:
    if 0 < config.disk_bytes < CAPACITY_BYTES_MIN:
        raise ConfigError(
            f"disk_bytes: {format_bytes(config.disk_bytes)} given; at least "
            f"{format_bytes(CAPACITY_BYTES_MIN)}, or 0 for a store in memory only"
        )


def _check_note(config: StoreConfig) -> None:
    problem = what_is_damaged(config.directory) if config.directory is not None else ""
    if problem:
        raise DirectoryError(problem)
