"""One vLLM engine through everything that may happen to its store; it is never restarted."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING, Any

import pytest
from server_process import ServerProcess
from vllm_engines import (
    ABORTS,
    BLOCK,
    SERVER_FLAGS,
    ask,
    engine,
    lines_with,
    local,
    needs_vllm,
    prompts,
    same_answer,
    store_document,
    wait_store,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore.engine_adapter.demo_vllm_engine import VllmEngine

pytestmark = [pytest.mark.slow, pytest.mark.vllm, needs_vllm, pytest.mark.timeout(1200)]

QUICK = pytest.mark.vllm_quick
LONG = 10 * BLOCK + 20


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("faults") / "store", *SERVER_FLAGS) as server:
        yield server.start()


@pytest.fixture(scope="module")
def running(server: ServerProcess) -> Iterator[VllmEngine]:
    """The engine of all tests here."""
    log = server.directory.with_name("engine.log")
    # A tenth may be pinned for saves: a whole long prompt, so that all of it is saved.
    with engine(server.address, log, num_gpu_blocks_override=160) as made:
        yield made


def stored(running: VllmEngine, server: ServerProcess, tokens: list[int]) -> dict[str, Any]:
    """What vLLM answers by itself to a prompt that is on disk now, and not in vLLM."""
    before = store_document(server.address)["pages"]
    running.run([ask(tokens)])
    pages = len(tokens) // BLOCK
    wait_store(
        server.address,
        lambda found: found["pages"] >= before + pages and not found["dirty_bytes"],
    )
    [expected] = running.run([local(tokens)])
    assert running.reset()
    return expected


def found_again(running: VllmEngine, tokens: list[int], within_s: float = 20.0) -> dict[str, Any]:
    """The answer once the store is used again."""
    deadline = time.monotonic() + within_s
    while True:
        assert running.reset()
        [answer] = running.run([ask(tokens)])
        if answer["cached_tokens"]:
            return answer
        assert time.monotonic() < deadline


@QUICK
def test_another_salt_finds_nothing(running: VllmEngine, server: ServerProcess) -> None:
    [tokens] = prompts(1, seed=1)
    stored(running, server, tokens)
    before = store_document(server.address)["pages"]
    [other] = running.run([ask(tokens, salt="other")])
    assert other["cached_tokens"] == 0
    wait_store(server.address, lambda found: found["pages"] == before + 2)
    assert running.reset()
    [mine] = running.run([ask(tokens)])
    assert mine["cached_tokens"] == 2 * BLOCK, "the control: without a salt it is there"
    assert running.reset()
    [salted] = running.run([ask(tokens, salt="other")])
    assert salted["cached_tokens"] == 2 * BLOCK, "its own pages were stored under its salt"


def test_what_was_reused_is_told_and_a_request_may_decline(
    running: VllmEngine, server: ServerProcess
) -> None:
    [tokens] = prompts(1, seed=2)
    stored(running, server, tokens)
    [declined] = running.run([local(tokens)])
    assert declined["cached_tokens"] == 0
    assert running.reset()
    [answer] = running.run([ask(tokens)])
    assert answer["params"]["kvstore"]["reused_tokens"] == 2 * BLOCK


@QUICK
def test_a_server_killed_during_a_load_costs_nothing_but_time(
    running: VllmEngine, server: ServerProcess
) -> None:
    [tokens] = prompts(1, seed=3, tokens=LONG)
    expected = stored(running, server, tokens)
    for pause_s in (0.0, 0.01, 0.03, 0.1):
        assert running.reset()
        running.send("run", requests=[ask(tokens)])
        time.sleep(pause_s)
        server.kill()
        [answer] = running.received()
        assert same_answer(answer, expected)
        assert answer["reason"] == "length"
        server.start()
        assert same_answer(found_again(running, tokens), expected)
    log = server.directory.with_name("engine.log")
    assert len(lines_with(log, "has gone: misses until one answers")) == 4, "once for each"


def test_a_corrupted_page_is_computed_instead(running: VllmEngine, server: ServerProcess) -> None:
    [tokens] = prompts(1, seed=4, tokens=LONG)
    expected = stored(running, server, tokens)
    server.kill()
    flipped = 0
    for file in server.directory.glob("segment-*"):
        with open(file, "r+b") as segment:
            for at in range(256 << 10, file.stat().st_size, 256 << 10):
                segment.seek(at)
                byte = segment.read(1)
                if byte != b"\0":  # else nothing was written there yet
                    segment.seek(at)
                    segment.write(bytes([byte[0] ^ 0x40]))
                    flipped += 1
    assert flipped > 50, "nothing was corrupted"
    server.start()
    deadline = time.monotonic() + 20
    corrupt = 0
    while not corrupt:
        assert running.reset()
        [answer] = running.run([ask(tokens)])
        assert same_answer(answer, expected)
        corrupt = store_document(server.address)["counters"]["corrupt_pages"]
        assert time.monotonic() < deadline, "the store never looked at the corrupted pages"


def test_requests_that_are_aborted_at_random_leave_nothing_behind(
    running: VllmEngine, server: ServerProcess
) -> None:
    rng = random.Random(5)
    asked = prompts(12, seed=5)
    done = 0
    while done < ABORTS:
        batch = []
        for _ in range(min(20, ABORTS - done)):
            request = ask(rng.choice(asked), max_tokens=rng.randint(1, 3))
            if rng.random() < 0.85:
                request["abort_after"] = rng.randint(0, 6)
            batch.append(request)
        answers = running.run(batch)
        for request, answer in zip(batch, answers, strict=True):
            assert answer["aborted"] or len(answer["tokens"]) == request["max_tokens"]
        done += len(batch)
        if rng.random() < 0.5:
            running.reset()
    assert running.reset(), "blocks are still held"
    found = wait_store(
        server.address,
        lambda found: found["leases"] == 0 and found["service"]["reservations"] == 0,
    )
    assert found["service"]["matches"] == 0
    peaks = [value for name, value in running.metrics().items() if "pinned_blocks_peak" in name]
    assert 0 < max(peaks) <= 16, "a tenth of 160 blocks"
