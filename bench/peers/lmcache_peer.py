"""LMCache's server without CUDA, by the client of its own benchmark (`lmcache bench server`).

Its pages are chunks of 256 tokens of an engine's paged KV in CPU memory: a store gathers them from
there and a load scatters them back, so that copy is in its times, as an engine would see it.
A load is a look-up and a retrieve, since LMCache takes its lease by the look-up.
"""

from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from contract import PagePeer, Process, free_port
from lmcache.cli.commands.bench.server_bench.client import ServerBenchClient
from lmcache.cli.commands.bench.server_bench.config import BenchConfig

if TYPE_CHECKING:
    from collections.abc import Sequence

    from contract import Pages

CHUNK_TOKENS, BLOCK_TOKENS = 256, 128
BLOCKS_A_CHUNK = CHUNK_TOKENS // BLOCK_TOKENS
HEAD_SIZE = 64
LAYER_BYTES = 2 * CHUNK_TOKENS * HEAD_SIZE * 2  # K and V of one head in float16


class Server(PagePeer):
    """`lmcache server` with memory only."""

    version = f"lmcache {version('lmcache')}"

    def open(self, directory: Path, page_bytes: Sequence[int], run_bytes: int) -> None:
        self.port, http = free_port(), free_port()
        command = [str(Path(sys.executable).parent / "lmcache"), "server"]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--http-port", str(http)]
        command += ["--http-host", "127.0.0.1", "--chunk-size", str(CHUNK_TOKENS)]
        command += ["--l1-size-gb", str(max(1, 12 * run_bytes >> 30)), "--eviction-policy", "LRU"]
        command += ["--disable-observability", "--supported-transfer-mode", "engine_driven"]
        command += ["--shm-name", f"lmcache-{self.port}", "--no-l1-use-lazy"]
        self.server = Process(command, directory / "server.log")
        self.server.wait_for(port=self.port)
        self.url, self.http = f"tcp://127.0.0.1:{self.port}", f"http://127.0.0.1:{http}"
        self.clients: dict[int, ServerBenchClient] = {}
        self.run_bytes = run_bytes

    def prepare(self, run: int, count: int, size: int) -> None:
        self.count, self.size = count, size
        if size not in self.clients:
            for client in self.clients.values():
                client.close()
            self.clients = {size: self._client(count, size)}
        self.client = self.clients[size]
        self.request = self.client.create_request(run, f"store-{run}", "cold")
        self.again = self.client.create_request(run, f"load-{run}", "warm")
        assert self.request is not None
        assert self.request.total_chunks == count
        [worker] = self.client._workers
        self.layers = [_bytes_of(tensor) for tensor in worker.kv_caches.values()]

    def _client(self, count: int, size: int) -> ServerBenchClient:
        heads = 2 if size % (2 * LAYER_BYTES) == 0 else 1
        layers = size // (heads * LAYER_BYTES)
        blocks = count * BLOCKS_A_CHUNK
        shape = f"(2,{blocks},{BLOCK_TOKENS},{heads},{HEAD_SIZE}):float16:{layers}"
        client = ServerBenchClient(
            BenchConfig(
                rpc_url=self.url,
                http_url=self.http,
                mode="cpu",
                transfer_mode="auto",
                tp_size=1,
                use_mla=False,
                num_tokens=count * CHUNK_TOKENS - 1,  # one more comes before them
                kvcache_shape_spec=shape,
                num_blocks=blocks,
                block_size=BLOCK_TOKENS,
            ),
            lambda line: print(line, file=sys.stderr),
        )
        client.start()
        return client

    def stage(self, pages: Pages) -> None:
        """The engine's paged KV gets the bytes of the pages."""
        parts = pages.reshape(self.count, len(self.layers), 2, BLOCKS_A_CHUNK, -1)
        for number, layer in enumerate(self.layers):
            view = layer.reshape(2, self.count, BLOCKS_A_CHUNK, -1)
            view[:] = parts[:, number].transpose(1, 0, 2, 3)

    def store(self, run: int, pages: Pages) -> None:
        assert self.request is not None
        result = self.client.store(self.request, 0, self.request.num_full_tokens)
        assert result is not None
        assert result.succeeded, result

    def forget(self) -> None:
        for layer in self.layers:
            layer[:] = 0

    def load(self, run: int, targets: Pages) -> Sequence[memoryview | bytes]:
        assert self.again is not None
        found = self.client.lookup(self.again)
        assert found.is_full_hit, f"{found.hit_chunks} of {found.total_chunks} chunks"
        result = self.client.retrieve(self.again, 0, self.again.num_full_tokens)
        assert result is not None
        assert result.succeeded, result
        return []

    def contents(
        self, loaded: Sequence[memoryview | bytes], count: int
    ) -> Sequence[memoryview | bytes]:
        views = [layer.reshape(2, count, BLOCKS_A_CHUNK, -1) for layer in self.layers]
        return [np.stack([view[:, page] for view in views]).tobytes() for page in range(count)]

    def remove(self, run: int, count: int) -> None:
        """Its LRU makes room."""

    def close(self) -> None:
        for client in self.clients.values():
            client.close()
        self.server.close()


def _bytes_of(tensor: Any) -> Any:
    """The memory of a contiguous CPU tensor."""
    assert tensor.is_contiguous()
    return tensor.view(torch.uint8).reshape(-1).numpy()
