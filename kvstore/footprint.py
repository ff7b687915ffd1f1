"""What a server takes of its machine, said before it takes it, and refused where it cannot be had.

Memory for pages is populated at once: a process that takes more than there is is ended by the
kernel later, without a word. /dev/shm binds nothing here, the arena is made of memfds.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from kvstore.config import free_disk_bytes
from kvstore.errors import CapacityError
from kvstore.quantity import format_bytes
from kvstore.tiers.available_memory import (
    available_memory_bytes,
    free_huge_pages_bytes,
    is_bound_by_group,
)

if TYPE_CHECKING:
    from kvstore.server_config import ServerConfig

_log = logging.getLogger("kvstore.server")


def say_footprint(config: ServerConfig, available_bytes: int | None = None) -> None:
    """One line of what is taken, a warning when it is more than there is.

    CapacityError when not even the memory is there that is taken at once. `available_bytes` is
    what the machine and its control groups say, unless given.
    """
    available, where = _memory(config)
    if available_bytes is not None:
        available = available_bytes
    asked = format_bytes(config.host_bytes)
    there = f"{where} has {format_bytes(available)} available"
    if config.arena_bytes > available and not config.huge_pages:  # of those the arena knows more
        raise CapacityError(f"host_bytes: {asked} given, {there}; lower --host-bytes")
    _log.info("takes %s of memory now (--host-bytes), %s", asked, _disk(config))
    if config.host_bytes > available:
        _log.warning(
            "host_bytes: %s of memory will be taken as writers come, %s: the kernel may end this "
            "server; lower --host-bytes",
            asked,
            there,
        )


def _memory(config: ServerConfig) -> tuple[int, str]:
    if config.huge_pages:
        return free_huge_pages_bytes(), "the pool of huge pages"
    where = "its control group" if is_bound_by_group() else "this machine"
    return available_memory_bytes(), where


def _disk(config: ServerConfig) -> str:
    places = config.segment_directories
    if not config.disk_bytes:
        return "and no disk (--disk-bytes)"
    free = format_bytes(free_disk_bytes(places))
    return (
        f"and up to {format_bytes(config.disk_bytes)} of disk in {', '.join(map(str, places))} "
        f"(--disk-bytes; {free} are free)"
    )
