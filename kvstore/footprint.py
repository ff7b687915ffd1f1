"""What a server takes of its machine, refused where it cannot be had, and said when it begins.

Memory for pages is populated at once: a process that takes more than there is is ended by the
kernel later, without a word. /dev/shm binds nothing here, the arena is made of memfds.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Footprint:
    """One line of what is taken, and a warning, if it is more than there is."""

    taken: str
    warning: str

    def say(self) -> None:
        """Log it."""
        _log.info("%s", self.taken)
        if self.warning:
            _log.warning("%s", self.warning)


def footprint_of(config: ServerConfig, available_bytes: int | None = None) -> Footprint:
    """What a server with these settings takes of what there is now.

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
    taken, warning = f"takes {asked} of memory now (--host-bytes), {_disk(config)}", ""
    if config.host_bytes > available:
        warning = (
            f"host_bytes: {asked} of memory will be taken as writers come, {there}: the kernel may "
            "end this server; lower --host-bytes"
        )
    return Footprint(taken, warning)


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
