"""How many descriptors a server needs, and whether its process may have them.

Running out of them ends gRPC's start in an abort, and a store's growth in refusals that name the
disk. So it is looked at before anything is opened, and the soft limit raised as far as allowed.
"""

from __future__ import annotations

import logging
import resource
from typing import TYPE_CHECKING

from kvstore.errors import CapacityError
from kvstore.tiers.arena_size import default_extent_bytes
from kvstore.tiers.disk_space import segment_bytes_most

if TYPE_CHECKING:
    from kvstore.server_config import ServerConfig

OWN_FILES = 40  # the process, gRPC, sockets, the catalog and the child that walks it
FILES_AN_EXTENT = 2  # to write and to hand out
FILES_A_SESSION = 4  # connection, extents' socket, staging
SMALL_SEGMENTS = 8  # by which shapes of pages begin

_log = logging.getLogger("kvstore.server")


def files_needed(config: ServerConfig) -> int:
    """Descriptors of a server with all its memory and disk in use, and one session."""
    extents = -(-config.arena_bytes // default_extent_bytes(config.arena_bytes, config.huge_pages))
    segments = 0
    if config.disk_bytes:
        aimed = -(-config.disk_bytes // segment_bytes_most(config.disk_bytes)) + SMALL_SEGMENTS
        segments = max(aimed, sum(len([*p.glob("segment-*")]) for p in config.segment_directories))
    return OWN_FILES + FILES_AN_EXTENT * extents + segments + FILES_A_SESSION


def allow_open_files(config: ServerConfig) -> None:
    """Raise this process's soft limit to what `config` can use; CapacityError if it can't run."""
    needed = files_needed(config)
    wanted = needed + FILES_A_SESSION * (config.sessions_max - 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < needed:
        raise CapacityError(
            f"open files: this process may have {hard} at once, {needed} are needed for these "
            f"host_bytes and disk_bytes and {wanted} for all of sessions_max = "
            f"{config.sessions_max}: set `ulimit -n {wanted}`, or LimitNOFILE={wanted} in its unit"
        )
    if allowed < wanted:
        _log.warning(
            "open files: this process may have %d at once, about %d sessions of sessions_max = %d; "
            "for all of them set `ulimit -n %d`, or LimitNOFILE=%d in its unit",
            hard,
            1 + (allowed - needed) // FILES_A_SESSION,
            config.sessions_max,
            wanted,
            wanted,
        )
