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
LIBRARIES_BYTES = 48 << 20  # gRPC and what comes with it, which is not loaded yet
HEAP_BYTES = 64 << 20  # that glibc reserves at a time
PAGE_ROW_BYTES = 116  # of the page table and what goes with it, as measured
THREADS = 16  # of the process, the store and gRPC, beside those that read and write the disk
THREADS_OF_FIRST_CALLS = 8
STACK_BYTES_UNLIMITED = 2 << 20  # of a thread, by glibc, where `ulimit -s` sets none


def space_needed(config: ServerConfig) -> int:
    """Bytes of address space of a server, from here on, that has started and has one client."""
    from kvstore.heap import HEAPS_MAX  # numpy, which cannot be loaded in too little of it
    from kvstore.tiers.disk_space import catalog_map_bytes
    from kvstore.tiers.tier import ALIGNMENT_BYTES

    stack_bytes, _ = resource.getrlimit(resource.RLIMIT_STACK)
    if stack_bytes == resource.RLIM_INFINITY:
        stack_bytes = STACK_BYTES_UNLIMITED
    threads = THREADS + THREADS_OF_FIRST_CALLS + config.io_threads
    catalog_bytes = catalog_map_bytes(config.disk_bytes) if config.disk_bytes else 0
    heap_bytes = (HEAPS_MAX - 1) * HEAP_BYTES
    table_bytes = config.pages_expected(ALIGNMENT_BYTES) * PAGE_ROW_BYTES
    own_bytes = LIBRARIES_BYTES + heap_bytes + table_bytes + catalog_bytes
    return own_bytes + threads * stack_bytes + config.host_bytes


def refuse_small_address_space(config: ServerConfig | None = None) -> None:
    """CapacityError where this process may not map what `config` takes at the start; without one,
    not even what it takes to read settings."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_AS)
    if allowed == resource.RLIM_INFINITY:
        return
    needed, what = SETTINGS_BYTES, "for any server"
    if config is not None:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        needed = pages * resource.getpagesize() + space_needed(config)
        what = "for these host_bytes, disk_bytes and threads"
    if allowed < needed:
        raise CapacityError(
            f"address space: this process may have {allowed >> 10} KiB (ulimit -v, RLIMIT_AS), "
            f"{-(-needed >> 10)} KiB are needed {what}: set `ulimit -v unlimited`, or "
            "LimitAS=infinity in its unit, and bound its memory by --host-bytes"
        )
