"""How much address space a server needs at its start, and whether its process may have it.

Running out of it (ulimit -v) ends gRPC in an abort and a thread's start in an error that names no
limit, some of it after the store was opened. So it is looked at before. A limit bounds what is
mapped, and not what is used: stacks, the catalog's map and heaps count in full.
"""

from __future__ import annotations

import resource
from pathlib import Path
from typing import TYPE_CHECKING

from kvstore.errors import CapacityError

if TYPE_CHECKING:
    from kvstore.server_config import ServerConfig

SETTINGS_BYTES = 192 << 20  # with less numpy's library ends the process itself
SETTINGS_DATA_BYTES = 80 << 20  # the same of what is no file's
LIBRARIES_BYTES = 48 << 20  # gRPC and what comes with it, which is not loaded yet
LIBRARIES_DATA_BYTES = 24 << 20  # of that, what is no file's, and the heap that is in use
HEAP_BYTES = 64 << 20  # that glibc reserves at a time, of which only what is used is data
PAGE_ROW_BYTES = 116  # of the page table and what goes with it, as measured
THREADS = 16  # of the process, the store and gRPC, beside those that read and write the disk
THREADS_OF_FIRST_CALLS = 8
STACK_BYTES_UNLIMITED = 2 << 20  # of a thread, by glibc, where `ulimit -s` sets none


def data_needed(config: ServerConfig) -> int:
    """Bytes of stacks, heaps and tables, from here on, of a server that has started and has one
    client."""
    from kvstore.tiers.tier import ALIGNMENT_BYTES

    stack_bytes, _ = resource.getrlimit(resource.RLIMIT_STACK)
    if stack_bytes == resource.RLIM_INFINITY:
        stack_bytes = STACK_BYTES_UNLIMITED
    threads = THREADS + THREADS_OF_FIRST_CALLS + config.io_threads
    table_bytes = config.pages_expected(ALIGNMENT_BYTES) * PAGE_ROW_BYTES
    return LIBRARIES_DATA_BYTES + threads * stack_bytes + table_bytes


def space_needed(config: ServerConfig) -> int:
    """The same with what is mapped of files and memory that is shared: its address space."""
    from kvstore.heap import HEAPS_MAX  # numpy, which cannot be loaded in too little space
    from kvstore.tiers.disk_space import catalog_map_bytes

    catalog_bytes = catalog_map_bytes(config.disk_bytes) if config.disk_bytes else 0
    more_bytes = LIBRARIES_BYTES - LIBRARIES_DATA_BYTES + (HEAPS_MAX - 1) * HEAP_BYTES
    return data_needed(config) + more_bytes + config.host_bytes + catalog_bytes


def refuse_small_address_space(config: ServerConfig | None = None) -> None:
    """CapacityError where this process may not map what `config` takes at the start; without one,
    not even what it takes to read settings."""
    statm = Path("/proc/self/statm").read_text().split()
    for name, field, least in (("AS", 0, SETTINGS_BYTES), ("DATA", 5, SETTINGS_DATA_BYTES)):
        allowed, _ = resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))
        if allowed == resource.RLIM_INFINITY:
            continue
        needed, what = least, "for any server"
        if config is not None:
            more = space_needed(config) if name == "AS" else data_needed(config)
            needed = int(statm[field]) * resource.getpagesize() + more
            what = "for these host_bytes, disk_bytes and threads"
        if allowed < needed:
            kind, letter = ("address space", "v") if name == "AS" else ("data", "d")
            raise CapacityError(
                f"{kind}: this process may have {allowed >> 10} KiB (ulimit -{letter}, "
                f"RLIMIT_{name}), {-(-needed >> 10)} KiB are needed {what}: set `ulimit -{letter} "
                f"unlimited`, or Limit{name}=infinity in its unit, and bound its memory by "
                "--host-bytes"
            )
