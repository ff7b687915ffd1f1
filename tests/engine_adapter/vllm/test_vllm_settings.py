"""Real engines under other settings of vLLM's: they share, and each answers as it would alone.

What is loaded is measured against vLLM's own prefix cache with a hit at the same boundary, where
there is one: equal tokens and identical log-probabilities; else against a cold answer.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import time
from typing import TYPE_CHECKING, Any

import pytest
from server_process import ServerProcess
from vllm_engines import (
    PYTHON,
    ROOT,
    SERVER_FLAGS,
    SMALL_BLOCK,
    ask,
    engine,
    lines_with,
    local,
    needs_vllm,
    prompts,
    ready_model,
    same_answer,
    store_document,
    wait_store,
)

from kvstore.engine_adapter.demo_vllm_engine import CONNECTOR, shared_files
from kvstore.engine_adapter.demo_vllm_worker import ENVIRONMENT

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.slow, pytest.mark.vllm, needs_vllm, pytest.mark.timeout(1800)]

COUNT, PAGE = 3, 64
TOKENS, SHARED = 4 * SMALL_BLOCK + 20, 2 * SMALL_BLOCK
REUSED = 4 * SMALL_BLOCK
PAGES = COUNT * (REUSED // PAGE) - (COUNT - 1) * (SHARED // PAGE)
START_S_MAX, ANSWER_S_MAX = 300.0, 60.0

PRODUCER: dict[str, Any] = {
    "async_scheduling": False,
    "enable_chunked_prefill": False,
    "max_num_batched_tokens": 4096,  # without chunks a step takes the longest prompt
}
CONSUMER: dict[str, Any] = {
    "async_scheduling": False,
    "enable_prefix_caching": False,
    "max_num_seqs": 1,
}
BOTH: dict[str, Any] = {
    "async_scheduling": True,
    "enable_prefix_caching": False,
    "max_num_batched_tokens": 48,
    "max_num_seqs": 8,
}


def transfer(store: str, role: str = "kv_both") -> dict[str, Any]:
    """vLLM's kv_transfer_config."""
    extra = {"store": store, "load": "always", "page_tokens": PAGE}
    return CONNECTOR | {"kv_role": role, "kv_connector_extra_config": extra}


def running(server: ServerProcess, log: Path, role: str, settings: dict[str, Any]) -> Any:
    config = transfer(server.address, role)
    return engine(None, log, block_size=SMALL_BLOCK, kv_transfer_config=config, **settings)


def told(answer: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = answer["params"]["kvstore"]
    return found


def total(metrics: dict[str, float], name: str) -> float:
    return sum(value for key, value in metrics.items() if key.startswith(f"vllm:kvstore_{name}"))


def test_engines_of_other_roles_and_settings_share_and_answer_alike(tmp_path: Path) -> None:
    asked = prompts(COUNT, seed=31, tokens=TOKENS, shared=SHARED)
    fresh = prompts(COUNT, seed=32, tokens=TOKENS, shared=SHARED)
    logs = {role: tmp_path / f"{role}.log" for role in ("kv_producer", "kv_consumer", "kv_both")}
    with ServerProcess(tmp_path / "store", *SERVER_FLAGS) as server:
        server.start()
        with running(server, logs["kv_producer"], "kv_producer", PRODUCER) as first:
            for tokens in asked:
                first.run([ask(tokens)])
            own = [first.run([local(tokens)])[0] for tokens in asked]
            wait_store(server.address, lambda found: found["pages"] >= PAGES)
            assert first.reset()
            [again] = first.run([ask(asked[0])])
            assert again["cached_tokens"] == told(again)["reused_tokens"] == 0
            assert "kv_role" in told(again)["reason"]
        with running(server, logs["kv_consumer"], "kv_consumer", CONSUMER) as second:
            loaded = [second.run([ask(tokens)])[0] for tokens in asked]
            waited = second.run([ask(tokens) for tokens in asked])
            second.run([ask(tokens) for tokens in fresh])
            counted = second.metrics()
        assert store_document(server.address)["pages"] == PAGES, "a consumer stores nothing"
        with running(server, logs["kv_both"], "kv_both", BOTH) as third:
            cold = [third.run([ask(tokens)])[0] for tokens in fresh]
            wait_store(server.address, lambda found: found["pages"] >= 2 * PAGES)
            warm = third.run([ask(tokens) for tokens in fresh])
    for mine, theirs in zip(loaded, own, strict=True):
        assert told(mine)["reused_tokens"] == REUSED
        assert mine["cached_tokens"] == theirs["cached_tokens"] == REUSED
        assert mine["tokens"] == theirs["tokens"]
        assert mine["logprobs"] == theirs["logprobs"]
    for mine, theirs in zip(waited, own, strict=True):
        assert told(mine)["reused_tokens"] == REUSED
        assert mine["tokens"] == theirs["tokens"]
    assert total(counted, "pages_saved") == total(counted, "loads_failed") == 0
    for mine, theirs in zip(warm, cold, strict=True):
        assert told(mine)["reused_tokens"] == REUSED
        assert same_answer(mine, theirs)
    for role, log in logs.items():
        assert lines_with(log, "caching"), role
        assert not lines_with(log, "off, the engine runs without it"), role


@contextlib.contextmanager
def serving(store: str, log: Path, *flags: str) -> Iterator[int]:
    """`vllm serve` with these flags; its port, once it answers."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    module = "vllm.entrypoints.openai.api_server"
    command = [PYTHON, "-m", module, "--model", str(ready_model()), "--port", str(port)]
    command += ["--host", "127.0.0.1", "--served-model-name", "tested", "--enforce-eager"]
    command += ["--max-model-len", "1024", "--block-size", str(SMALL_BLOCK)]
    command += ["--kv-transfer-config", json.dumps(transfer(store)), *flags]
    environment = ENVIRONMENT | dict(os.environ)
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment |= {"VLLM_CPU_KVCACHE_SPACE": "1"}
    with open(log, "a", encoding="utf-8") as written:
        process = subprocess.Popen(
            command, stdout=written, stderr=written, env=environment, start_new_session=True
        )
    left: set[Path] = set()
    try:
        deadline = time.monotonic() + START_S_MAX
        while True:
            assert process.poll() is None, log.read_text(errors="replace")[-3000:]
            assert time.monotonic() < deadline, log.read_text(errors="replace")[-3000:]
            with contextlib.suppress(OSError):
                reply(port, "GET", "/health")
                break
            time.sleep(0.5)
        left = shared_files(process.pid)
        yield port
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20.0)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for path in left:
            path.unlink(missing_ok=True)


def reply(port: int, method: str, path: str, body: Any = None, **headers: str) -> bytes:
    """What the server says."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWER_S_MAX)
    with contextlib.closing(connection):
        headers = {name.replace("_", "-"): each for name, each in headers.items()}
        connection.request(method, path, body and json.dumps(body), headers)
        answer = connection.getresponse()
        content = answer.read()
    assert answer.status == http.client.OK, content
    return content


def completion(port: int, tokens: list[int], rank: int, **more: Any) -> dict[str, Any]:
    """What a rank of a data-parallel server answers."""
    body = {"model": "tested", "prompt": tokens, "max_tokens": 4, "temperature": 0.0}
    body |= {"return_token_ids": True, "ignore_eos": True, **more}
    headers = {"Content_Type": "application/json", "X_data_parallel_rank": str(rank)}
    found: dict[str, Any] = json.loads(reply(port, "POST", "/v1/completions", body, **headers))
    return found


def test_what_one_data_parallel_rank_computed_the_other_loads(tmp_path: Path) -> None:
    asked = prompts(COUNT, seed=33, tokens=TOKENS, shared=SHARED)
    log = tmp_path / "serve.log"
    nothing = {"kv_transfer_params": {"kvstore": {"load": False, "store": False}}}
    with (
        ServerProcess(tmp_path / "store", *SERVER_FLAGS) as server,
        serving(server.start().address, log, "--data-parallel-size=2") as port,
    ):
        for tokens in asked:
            completion(port, tokens, 0)
        wait_store(server.address, lambda found: found["pages"] >= PAGES)
        own = [completion(port, tokens, 0, **nothing) for tokens in asked]
        loaded = [completion(port, tokens, 1) for tokens in asked]
    # The first one's load puts what all share into vLLM's own cache.
    reused = [each["kv_transfer_params"]["kvstore"]["reused_tokens"] for each in loaded]
    assert reused == [REUSED] + (COUNT - 1) * [REUSED - SHARED]
    for mine, theirs in zip(loaded, own, strict=True):
        assert mine["choices"][0]["token_ids"] == theirs["choices"][0]["token_ids"]
    assert len(lines_with(log, "caching")) >= 2, "both ranks"
