"""An engine whose only request waits for a slow disk: it sleeps, then answers from the store.

Worker processes are not counted: vLLM's own message queue (SpinCondition) keeps a worker busy for a
second after every step, whoever asked for the step, and a waiting engine has to step to ask again.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from vllm_engines import BLOCK, ask, engine, local, needs_vllm, prompts, wait_store

from kvstore.engine_adapter.demo_vllm_worker import cpu_seconds
from kvstore.server import Server
from kvstore.server_config import ServerConfig
from kvstore.tiers.file_layer import FileLayer

if TYPE_CHECKING:
    from collections.abc import Sequence

pytestmark = [pytest.mark.slow, pytest.mark.vllm, needs_vllm, pytest.mark.timeout(1800)]

DELAY_S = 2.0
LONG = 12 * BLOCK + 20


class SlowFiles(FileLayer):
    """Reads of pages wait until `delay_s` after the first of them."""

    def __init__(self) -> None:
        self.delay_s = 0.0
        self.reading = threading.Event()
        self._until = 0.0

    def preadv(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        if self.delay_s and sum(map(len, buffers)) > 1 << 20:
            if not self.reading.is_set():
                self._until = time.monotonic() + self.delay_s
                self.reading.set()
            time.sleep(max(0.0, self._until - time.monotonic()))
        return super().preadv(descriptor, buffers, offset)


def seconds_without_workers(pid: int) -> float:
    """Of the process that has the LLM, and of the engine core."""
    cores = children(pid)
    workers = [worker for core in cores for worker in children(core)]
    return cpu_seconds(pid) - sum(map(cpu_seconds, workers))


def children(pid: int) -> list[int]:
    listed = [task.read_text() for task in Path(f"/proc/{pid}/task").glob("*/children")]
    return [int(child) for line in listed for child in line.split()]


def test_an_engine_that_waits_for_a_slow_disk_uses_no_processor(tmp_path: Path) -> None:
    files = SlowFiles()
    config = ServerConfig(directory=tmp_path / "store", host_bytes="512MiB", disk_bytes="1GiB")
    address = f"kvstore://unix:{tmp_path}/store/kvstore.sock"
    [tokens] = prompts(1, seed=9, tokens=LONG)
    server = Server(config, files=files)
    server.start()
    try:
        with engine(address, tmp_path / "engine.log") as running:
            running.run([ask(tokens)])
            wait_store(address, lambda found: found["pages"] >= 12 and not found["dirty_bytes"])
            [expected] = running.run([local(tokens)])
            assert server.stop()
            server = Server(config, files=files)  # with nothing in memory
            server.store.wait_warm(30.0)
            server.start()
            time.sleep(2.0)  # the engine finds it within a second
            assert running.reset()
            files.delay_s = DELAY_S
            running.send("run", requests=[ask(tokens)])
            assert files.reading.wait(20.0), "the store never read a page"
            time.sleep(0.2)
            before = seconds_without_workers(running.pid)
            time.sleep(DELAY_S - 0.5)
            used_s = seconds_without_workers(running.pid) - before
            [answer] = running.received()
    finally:
        server.stop()
    assert used_s <= 0.2 * (DELAY_S - 0.5) / DELAY_S, f"{used_s} CPU seconds while it waited"
    assert answer["cached_tokens"] == 12 * BLOCK
    assert answer["tokens"] == expected["tokens"]
    assert answer["logprobs"] == expected["logprobs"]
