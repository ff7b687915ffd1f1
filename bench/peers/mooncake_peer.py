"""Mooncake Store (the wheel without CUDA): over TCP, and its shared-memory client.

Over TCP the pages lie in the segment of a second process, and the client's buffers are registered:
its batch calls then copy nothing in Python. The shared-memory ("dummy") client can only give pages
that lie in a pool it shares with its real client; from private memory they are copied there first
and from there afterwards. In place, that copy is left out: what an engine would see that has its
staging buffers in Mooncake's pool.
"""

from __future__ import annotations

import ctypes
import sys
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from contract import PagePeer, Process, free_port
from mooncake.store import MooncakeDistributedStore

if TYPE_CHECKING:
    from collections.abc import Sequence

    from contract import Pages

BIN = Path(sys.executable).parent
BATCH_PAGES = 32
LOCAL_BUFFER_BYTES = 64 << 20

SEGMENT = """
import sys, threading
from mooncake.store import MooncakeDistributedStore
master, size, ready = sys.argv[1:]
store = MooncakeDistributedStore()
failed = store.setup("127.0.0.1", "P2PHANDSHAKE", int(size), 16 << 20, "tcp", "", master)
if failed:
    sys.exit(f"setup returned {failed}")
open(ready, "w").close()
threading.Event().wait()
"""


class OverTcp(PagePeer):
    """Another process holds the segment; batches of zero-copy calls."""

    version = f"mooncake {version('mooncake-transfer-engine-non-cuda')}"

    def open(self, directory: Path, page_bytes: Sequence[int], run_bytes: int) -> None:
        self.servers: list[Process] = []
        self.registered: set[int] = set()
        self.keys: list[str] = []
        port, metrics = free_port(), free_port()
        self.master = f"127.0.0.1:{port}"
        command = [str(BIN / "mooncake_master"), f"--rpc_port={port}", f"--metrics_port={metrics}"]
        command += ["--eviction_high_watermark_ratio=0.98"]
        self._start(command, directory / "master.log").wait_for(port=port)
        self._connect(directory, run_bytes)

    def _start(self, command: Sequence[str], log: Path) -> Process:
        self.servers.append(Process(command, log))
        return self.servers[-1]

    def _connect(self, directory: Path, run_bytes: int) -> None:
        command = [sys.executable, "-c", SEGMENT, self.master, str(8 * run_bytes)]
        command.append(str(directory / "ready"))
        self._start(command, directory / "segment.log").wait_for(path=directory / "ready")
        self.client = MooncakeDistributedStore()
        failed = self.client.setup(
            "127.0.0.1", "P2PHANDSHAKE", 0, LOCAL_BUFFER_BYTES, "tcp", "", self.master
        )
        if failed:
            raise RuntimeError(f"Mooncake's client: setup returned {failed}")

    def prepare(self, run: int, count: int, size: int) -> None:
        self.keys = [f"{run}-{number}" for number in range(count)]

    def store(self, run: int, pages: Pages) -> None:
        self._register(pages)
        self._put(self._addresses(pages), pages.shape[1])

    def load(self, run: int, targets: Pages) -> Sequence[memoryview | bytes]:
        self._register(targets)
        self._get(self._addresses(targets), targets.shape[1])
        return [target.data for target in targets]

    def remove(self, run: int, count: int) -> None:
        self.client.batch_remove(self.keys, True)

    def close(self) -> None:
        self.client.close()
        for server in reversed(self.servers):
            server.close()

    def _register(self, pages: Pages) -> None:
        """Once for the buffer that all runs use: the first run, which warms up, pays."""
        base = pages if pages.base is None else pages.base
        assert isinstance(base, np.ndarray)
        address = base.ctypes.data
        if address not in self.registered:
            self._expect_zero([self.client.register_buffer(address, base.nbytes)])
            self.registered.add(address)

    def _addresses(self, pages: Pages) -> list[int]:
        first, step = pages.ctypes.data, pages.shape[1]
        return [first + step * number for number in range(len(pages))]

    def _put(self, addresses: list[int], size: int) -> None:
        for at in range(0, len(addresses), BATCH_PAGES):
            part = addresses[at : at + BATCH_PAGES]
            keys = self.keys[at : at + BATCH_PAGES]
            self._expect_zero(self.client.batch_put_from(keys, part, [size] * len(part)))

    def _get(self, addresses: list[int], size: int) -> None:
        for at in range(0, len(addresses), BATCH_PAGES):
            part = addresses[at : at + BATCH_PAGES]
            keys = self.keys[at : at + BATCH_PAGES]
            got = self.client.batch_get_into(keys, part, [size] * len(part))
            assert all(number == size for number in got), f"batch_get_into returned {got}"

    def _expect_zero(self, results: Sequence[int]) -> None:
        assert not any(results), f"Mooncake returned {results}"


class SharedMemory(OverTcp):
    """Its shared-memory client, from and to private memory."""

    def _connect(self, directory: Path, run_bytes: int) -> None:
        port = free_port()
        command = [str(BIN / "mooncake_client"), f"--master_server_address={self.master}"]
        command += ["--metadata_server=P2PHANDSHAKE", "--host=127.0.0.1", f"--port={port}"]
        command += [f"--global_segment_size={8 * run_bytes >> 20} MB", "--protocol=tcp"]
        self._start(command, directory / "client.log").wait_for(port=port)
        self.client = MooncakeDistributedStore()
        pool = 2 * run_bytes + (16 << 20)
        failed = self.client.setup_dummy(pool, LOCAL_BUFFER_BYTES, f"127.0.0.1:{port}")
        if failed:
            raise RuntimeError(f"Mooncake's shared-memory client: setup_dummy returned {failed}")
        self.pool = [self._pool(run_bytes) for _ in range(2)]

    def _pool(self, size: int) -> Pages:
        address = self.client.alloc_from_mem_pool(size)
        if not address:
            raise RuntimeError(f"Mooncake's pool has no {size} bytes")
        self._expect_zero([self.client.register_buffer(address, size)])
        buffer = (ctypes.c_uint8 * size).from_address(address)
        return np.frombuffer(buffer, np.uint8)

    def _register(self, pages: Pages) -> None:
        """The pool is known already."""

    def prepare(self, run: int, count: int, size: int) -> None:
        super().prepare(run, count, size)
        self.rows = [part[: count * size].reshape(count, size) for part in self.pool]

    def store(self, run: int, pages: Pages) -> None:
        self.fill(pages)
        self._put(self._addresses(self.rows[0]), pages.shape[1])

    def load(self, run: int, targets: Pages) -> Sequence[memoryview | bytes]:
        self._get(self._addresses(self.rows[1]), targets.shape[1])
        for row, target in zip(self.rows[1], targets, strict=True):
            np.copyto(target, row)
        return [target.data for target in targets]

    def fill(self, pages: Pages) -> None:
        """Private memory to the pool."""
        for row, page in zip(self.rows[0], pages, strict=True):
            np.copyto(row, page)


class SharedMemoryInPlace(SharedMemory):
    """The same for callers whose pages lie in Mooncake's pool before and after."""

    def stage(self, pages: Pages) -> None:
        """Before the clock runs."""
        super().fill(pages)

    def fill(self, pages: Pages) -> None:
        """They are there already."""

    def load(self, run: int, targets: Pages) -> Sequence[memoryview | bytes]:
        self._get(self._addresses(self.rows[1]), targets.shape[1])
        return [row.data for row in self.rows[1]]
