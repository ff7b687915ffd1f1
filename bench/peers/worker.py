"""One peer in a process of its own: does what it is told by lines of JSON, and measures itself.

Run by bench/peers.py with the Python of the peer's environment. Contents are compared after each
load, outside the clock; a wrong byte ends the bench.

    python worker.py NAME DIRECTORY SEED RUN_BYTES PAGE_BYTES...
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np
from contract import IndexPeer, PagePeer

# Name: module and class. The module is in this folder and imports the peer.
PAGE_PEERS = {
    "kvstore-attached": ("kvstore_peer", "Attached"),
    "kvstore-embedded": ("kvstore_peer", "Embedded"),
    "mooncake-tcp": ("mooncake_peer", "OverTcp"),
    "mooncake-shm": ("mooncake_peer", "SharedMemory"),
    "mooncake-shm-in-place": ("mooncake_peer", "SharedMemoryInPlace"),
    "redis-tcp": ("redis_peer", "OverTcp"),
    "redis-unix": ("redis_peer", "OverUnixSocket"),
    "lmcache-server": ("lmcache_peer", "Server"),
}
INDEX_PEERS = {
    "kvstore-array": ("kvstore_peer", "IndexOfArray"),
    "kvstore-list": ("kvstore_peer", "IndexOfList"),
    "kvstore-session": ("kvstore_peer", "SessionLookUp"),
    "sglang-tree": ("sglang_peer", "Tree"),
    "sglang-rust-tree": ("sglang_peer", "RustTree"),
    "vllm-sha256": ("vllm_peer", "Sha256"),
    "vllm-xxhash": ("vllm_peer", "XxHash"),
}
CALLS_A_ROUND = 7


class Worker:
    """Answers orders with numbers."""

    def __init__(self, peer: PagePeer | IndexPeer, seed: int, run_bytes: int) -> None:
        self.peer = peer
        self.rng = np.random.default_rng(seed)
        self.run_bytes = run_bytes
        self.source = self.rng.integers(0, 256, run_bytes, np.uint8)
        self.target = np.ones(run_bytes, np.uint8)
        self.prompts: dict[int, Any] = {}

    def pages(self, run: int, size: int) -> dict[str, float]:
        """Seconds of storing one run and of loading it again."""
        assert isinstance(self.peer, PagePeer)
        count = self.run_bytes // size
        source = self.source[: count * size].reshape(count, size)
        target = self.target[: count * size].reshape(count, size)
        # Stamped, so that bytes of another run or page are seen.
        stamps = np.stack([np.full(count, run), np.arange(count)], axis=1).astype(np.int64)
        source[:, :16] = stamps.view(np.uint8)
        target[:] = 0
        self.peer.prepare(run, count, size)
        self.peer.stage(source)
        begun_s = time.perf_counter()
        self.peer.store(run, source)
        stored_s = time.perf_counter()
        self.peer.forget()
        again_s = time.perf_counter()
        loaded = self.peer.load(run, target)
        loaded_s = time.perf_counter()
        got = self.peer.contents(loaded, count)
        assert len(got) == count, f"{len(got)} of {count} pages came back"
        for page, body in enumerate(got):
            same = np.array_equal(np.frombuffer(body, np.uint8), source[page])
            assert same, f"page {page} of run {run} has other bytes"
        del got, loaded
        self.peer.remove(run, count)
        return {"store": stored_s - begun_s, "load": loaded_s - again_s}

    def memcpy(self, size: int) -> float:
        """Seconds of copying one run between private buffers, page by page."""
        count = self.run_bytes // size
        source = self.source[: count * size].reshape(count, size)
        target = self.target[: count * size].reshape(count, size)
        begun_s = time.perf_counter()
        for page in range(count):
            np.copyto(target[page], source[page])
        return time.perf_counter() - begun_s

    def insert(self, tokens: int) -> int:
        """Make a prompt of so many tokens known."""
        assert isinstance(self.peer, IndexPeer)
        prompt = self.rng.integers(0, 128_000, tokens, dtype=np.int32)
        self.peer.insert(prompt)
        self.prompts[tokens] = prompt
        return tokens

    def match(self, tokens: int) -> float:
        """Seconds of a look-up that hits whole: the median of a few."""
        assert isinstance(self.peer, IndexPeer)
        taken = []
        for _ in range(CALLS_A_ROUND):
            prompt = self.peer.prepare(self.prompts[tokens])
            begun_s = time.perf_counter()
            found = self.peer.match(prompt)
            taken.append(time.perf_counter() - begun_s)
            assert found == tokens, f"{found} of {tokens} tokens were found"
        return float(np.median(taken))


def opened(name: str, directory: Path, sizes: list[int], run_bytes: int) -> PagePeer | IndexPeer:
    """The peer of this name, ready."""
    module, kind = {**PAGE_PEERS, **INDEX_PEERS}[name]
    peer: PagePeer | IndexPeer = getattr(importlib.import_module(module), kind)()
    if isinstance(peer, PagePeer):
        peer.open(directory, sizes, run_bytes)
    return peer


def main() -> None:
    # What peers print goes to stderr; answers have a descriptor of their own.
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        name, directory, seed, run_bytes, *sizes = sys.argv[1:]

        def say(answer: object) -> None:
            answers.write(json.dumps(answer) + "\n")
            answers.flush()

        try:
            peer = opened(
                name, Path(directory).resolve(), [int(size) for size in sizes], int(run_bytes)
            )
        except Exception as exc:
            traceback.print_exc()
            say({"failed": f"{type(exc).__name__}: {str(exc).strip()[:300]}"})
            os._exit(1)
        worker = Worker(peer, int(seed), int(run_bytes))
        say({"ready": peer.version})
        for line in sys.stdin:
            order = json.loads(line)
            try:
                say({"answer": getattr(worker, order.pop("do"))(**order)})
            except Exception as exc:
                traceback.print_exc()
                say({"failed": f"{type(exc).__name__}: {str(exc).strip()[:300]}"})
        if isinstance(peer, PagePeer):
            peer.close()


if __name__ == "__main__":
    main()
