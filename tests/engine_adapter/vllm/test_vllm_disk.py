"""One engine above a disk that is slow, stands still, is full, or lies; then a lost memory.

The server is in this process, so that its files are ours. CPU time while an engine waits is that of
all its processes, less what an engine without a connector takes after one step: vLLM's own message
queue (SpinCondition) keeps workers busy for a second after every step.
"""

from __future__ import annotations

import errno
import os
import statistics
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
from vllm_engines import (
    BLOCK,
    ask,
    engine,
    lines_with,
    local,
    needs_vllm,
    prompts,
    same_answer,
    say,
    store_document,
    wait_store,
)

from kvstore.engine_adapter.demo_vllm_worker import cpu_seconds
from kvstore.server import Server
from kvstore.server_config import ServerConfig
from kvstore.tiers.file_layer import FileLayer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from kvstore.engine_adapter.demo_vllm_engine import VllmEngine

pytestmark = [pytest.mark.slow, pytest.mark.vllm, needs_vllm, pytest.mark.timeout(1800)]

DELAY_S = 2.0
WINDOW_S = 1.8  # of it, in which CPU time is counted
CPU_S_MAX = 0.2  # in DELAY_S
ROUNDS = 3
PAGES = 12
LONG = PAGES * BLOCK + 20
PAGE_READ_BYTES = 1 << 20  # reads below it are not of pages


class TroubledFiles(FileLayer):
    """Real files. `delay_s`: reads of pages wait until then after the first of them."""

    def __init__(self) -> None:
        self.delay_s = 0.0
        self.reading = threading.Event()  # a page was asked for
        self.moving = threading.Event()  # cleared: a disk that stands still
        self.moving.set()
        self.is_full = self.lies = False
        self._until = 0.0

    def heal(self) -> None:
        """All is well from now on."""
        self.delay_s, self.is_full, self.lies = 0.0, False, False
        self.moving.set()
        self.reading.clear()

    def preadv(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        of_pages = sum(map(len, buffers)) >= PAGE_READ_BYTES
        if of_pages:
            if not self.reading.is_set():
                self._until = time.monotonic() + self.delay_s
                self.reading.set()
            time.sleep(max(0.0, self._until - time.monotonic()) if self.delay_s else 0.0)
        self.moving.wait()
        done = super().preadv(descriptor, buffers, offset)
        if of_pages and self.lies:
            page = max(buffers, key=len)  # the others are its header
            page[len(page) // 2] ^= 0x10
        return done

    def pwritev(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._check_room()
        return super().pwritev(descriptor, buffers, offset)

    def allocate(self, descriptor: int, size: int) -> None:
        self._check_room()
        super().allocate(descriptor, size)

    def fdatasync(self, descriptor: int) -> None:
        self.moving.wait()
        super().fdatasync(descriptor)

    def _check_room(self) -> None:
        self.moving.wait()
        if self.is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@dataclass
class Bed:
    """A server with troubled files, and one engine that is never restarted; one without both."""

    config: ServerConfig
    files: TroubledFiles
    server: Server
    engine: VllmEngine
    control: VllmEngine  # starts while the first test works
    log: Path

    @property
    def address(self) -> str:
        """Of the server."""
        return f"kvstore://unix:{self.config.directory}/kvstore.sock"

    def forget(self) -> None:
        """Another server, with nothing in memory; the engine finds it."""
        assert self.server.stop()
        self.server = Server(self.config, files=self.files)
        self.server.store.wait_warm(30.0)
        self.server.start()
        wait_store(self.address, lambda found: found["service"]["sessions"] >= 1)
        self.engine.run([ask([7, 7, 7], max_tokens=2)])  # its workers attach to it

    def keep(self, tokens: list[int]) -> dict[str, Any]:
        """Have it on disk only; vLLM's own answer to it."""
        before = store_document(self.address)["pages"]
        deadline = time.monotonic() + 60.0
        while store_document(self.address)["pages"] < before + PAGES:  # saving may be on hold
            assert time.monotonic() < deadline
            assert self.engine.reset()
            self.engine.run([ask(tokens)])
            time.sleep(1.0)
        wait_store(self.address, lambda found: not found["dirty_bytes"])
        [expected] = self.engine.run([local(tokens)])
        assert expected["cached_tokens"] == PAGES * BLOCK
        self.forget()
        assert self.engine.reset()
        return expected


@pytest.fixture(scope="module")
def engine_bed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bed]:
    folder = tmp_path_factory.mktemp("disk")
    files = TroubledFiles()
    config = ServerConfig(directory=folder / "store", host_bytes="512MiB", disk_bytes="1GiB")
    server = Server(config, files=files)
    server.start()
    log = folder / "engine.log"
    address, blocks = (
        f"kvstore://unix:{folder}/store/kvstore.sock",
        {"num_gpu_blocks_override": 160},
    )
    with (
        engine(address, log, **blocks) as running,
        engine(None, folder / "control.log", wait=False, **blocks) as control,
    ):
        bed = Bed(config, files, server, running, control, log)
        yield bed
        files.heal()
    bed.server.stop()


@pytest.fixture
def bed(engine_bed: Bed) -> Iterator[Bed]:
    yield engine_bed
    engine_bed.files.heal()


def wait_asleep(running: VllmEngine) -> None:
    """Until its workers have stopped spinning for their last step."""
    deadline = time.monotonic() + 30.0
    while True:
        before = cpu_seconds(running.pid)
        time.sleep(0.3)
        if cpu_seconds(running.pid) - before <= 0.02:
            return
        assert time.monotonic() < deadline, "it never sleeps"


def spent_s(running: VllmEngine, request: dict[str, Any], begun: threading.Event | None) -> float:
    """CPU seconds of all its processes from a request on, which is not answered here."""
    wait_asleep(running)
    before = cpu_seconds(running.pid)
    running.send("run", requests=[request])
    assert begun is None or begun.wait(20.0), "the store never read a page"
    time.sleep(WINDOW_S)
    return cpu_seconds(running.pid) - before


def test_an_engine_that_waits_for_a_slow_disk_uses_no_processor(
    bed: Bed, capsys: pytest.CaptureFixture[str]
) -> None:
    """Workers included: what it takes more than an engine without a store that made one step."""
    [tokens] = prompts(1, seed=9, tokens=LONG)
    expected = bed.keep(tokens)
    bed.control.wait_ready()
    ours, control, added = [], [], []
    for _ in range(ROUNDS):
        control.append(spent_s(bed.control, ask([7, 7, 7], max_tokens=1), None))
        bed.control.received()
        bed.files.delay_s = DELAY_S
        ours.append(spent_s(bed.engine, ask(tokens), bed.files.reading))
        [answer] = bed.engine.received()
        assert answer["cached_tokens"] == PAGES * BLOCK
        assert answer["tokens"] == expected["tokens"]
        assert answer["logprobs"] == expected["logprobs"]
        added.append(ours[-1] - control[-1])
        bed.files.heal()
        bed.forget()
        assert bed.engine.reset()
    say(
        capsys,
        f"CPU seconds in {WINDOW_S} s of a stage: {[round(each, 2) for each in ours]}, "
        f"without a connector {[round(each, 2) for each in control]}",
    )
    assert statistics.median(added) <= CPU_S_MAX * WINDOW_S / DELAY_S, added


def test_a_disk_that_stands_still_is_not_waited_for(bed: Bed) -> None:
    [tokens] = prompts(1, seed=10, tokens=LONG)
    expected = bed.keep(tokens)
    bed.files.moving.clear()
    [answer] = bed.engine.run([ask(tokens)])
    assert answer["reason"] == "length"
    assert answer["cached_tokens"] == 0
    assert same_answer(answer, expected)
    [more] = bed.engine.run([ask(prompts(1, seed=11)[0])])
    assert more["reason"] == "length", "nor is it by the next one, that nobody knows"
    bed.files.heal()
    wait_store(bed.address, lambda found: not found["dirty_bytes"])
    assert bed.engine.reset()
    [found] = bed.engine.run([ask(tokens)])
    assert found["cached_tokens"] == PAGES * BLOCK, "it moves again, and nobody restarted"
    assert found["logprobs"] == expected["logprobs"]
    assert len(lines_with(bed.log, "took too long")) == 1


def test_a_full_disk_costs_what_it_would_have_kept(bed: Bed) -> None:
    asked = prompts(3, seed=12, tokens=LONG)
    before = store_document(bed.address)["counters"]["disk_write_failures"]
    bed.files.is_full = True
    cold = [bed.engine.run([ask(tokens)])[0] for tokens in asked]
    expected = [bed.engine.run([local(tokens)])[0] for tokens in asked]
    assert all(each["reason"] == "length" for each in cold)
    assert bed.engine.reset()
    reused = 0
    for tokens, theirs in zip(asked, expected, strict=True):
        [mine] = bed.engine.run([ask(tokens)])
        assert same_answer(mine, theirs)
        reused += mine["cached_tokens"]
    assert reused >= PAGES // 2 * BLOCK, "what is in memory still hits"
    failed = store_document(bed.address)["counters"]["disk_write_failures"]
    assert failed > before, "the disk took it: nothing was shown"


def test_pages_that_a_disk_falsifies_are_computed_instead(
    bed: Bed, caplog: pytest.LogCaptureFixture
) -> None:
    [tokens] = prompts(1, seed=13, tokens=LONG)
    expected = bed.keep(tokens)
    before = store_document(bed.address)["counters"]["corrupt_pages"]
    bed.files.lies = True
    [answer] = bed.engine.run([ask(tokens)])
    assert answer["reason"] == "length"
    assert same_answer(answer, expected)
    said = answer["params"], caplog.text
    assert store_document(bed.address)["counters"]["corrupt_pages"] > before, said
