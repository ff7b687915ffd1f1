"""Weights that are reloaded, and engines that wake up, with a weights_version and without one."""

from __future__ import annotations

import shutil
from contextlib import ExitStack
from typing import TYPE_CHECKING

import numpy as np
import pytest
from server_process import ServerProcess
from vllm_engines import (
    BLOCK,
    SERVER_FLAGS,
    ask,
    engine,
    lines_with,
    local,
    needs_vllm,
    prompts,
    ready_model,
    store_document,
    wait_store,
)

if TYPE_CHECKING:
    from pathlib import Path

    from kvstore.engine_adapter.demo_vllm_engine import VllmEngine

pytestmark = [pytest.mark.slow, pytest.mark.vllm, needs_vllm, pytest.mark.timeout(3600)]

OFF = "off, the engine runs without it"
ANEW = "the weights are others"


def other_weights(folder: Path) -> Path:
    """The model with the last bit of every value turned."""
    weights = folder / "other"
    shutil.copytree(ready_model(), weights)
    path = weights / "model.safetensors"
    header = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    values = np.memmap(path, np.uint8, "r+", offset=header)
    values[::2] ^= 1
    values.flush()
    return weights


def save(running: VllmEngine, server: ServerProcess, tokens: list[int]) -> list[float]:
    """Asked for the first time; what it answers once both of its pages are stored."""
    before = store_document(server.address)["pages"]
    [new] = running.run([ask(tokens)])
    assert new["cached_tokens"] == 0
    wait_store(server.address, lambda found: found["pages"] >= before + 2)
    logprobs: list[float] = new["logprobs"]
    return logprobs


def found(running: VllmEngine, tokens: list[int]) -> int:
    """Tokens that come from the store, as vLLM's own cache is empty."""
    assert running.reset()
    [answer] = running.run([ask(tokens)])
    return int(answer["cached_tokens"])


def test_without_a_version_a_reload_and_a_wake_up_each_turn_it_off_with_one_line(
    tmp_path: Path,
) -> None:
    [tokens] = prompts(1, seed=41)
    logs = {name: tmp_path / f"{name}.log" for name in ("reload", "sleep")}
    with ServerProcess(tmp_path / "store", *SERVER_FLAGS) as server, ExitStack() as ends:
        server.start()
        reloads = ends.enter_context(engine(server.address, logs["reload"]))
        sleeps = ends.enter_context(engine(server.address, logs["sleep"], wait=False))
        save(reloads, server, tokens)
        assert found(reloads, tokens) == 2 * BLOCK
        reloads.call("collective_rpc", method="reload_weights")
        sleeps.wait_ready()
        assert found(sleeps, tokens) == 2 * BLOCK
        sleeps.call("sleep", level=1)
        sleeps.call("wake_up")
        for running in (reloads, sleeps):
            found(running, tokens)  # its first step tells
            pages = store_document(server.address)["pages"]
            assert found(running, tokens) == 0
            [other] = prompts(1, seed=42)
            running.run([ask(other)])
            assert store_document(server.address)["pages"] == pages, "nothing is saved"
    for name, word in (("reload", "reload_weights"), ("sleep", "wake_up")):
        [line] = lines_with(logs[name], OFF)
        assert word in line
        assert "weights_version" in line


def test_under_a_version_other_weights_find_nothing_of_the_old_ones(tmp_path: Path) -> None:
    [tokens] = prompts(1, seed=43)
    log, named = tmp_path / "engine.log", {"weights_version": "1"}
    with ServerProcess(tmp_path / "store", *SERVER_FLAGS) as server:
        server.start()
        with engine(server.address, log, extra=named) as running:
            old = save(running, server, tokens)
            running.call("collective_rpc", method="reload_weights")
            assert found(running, tokens) == 2 * BLOCK, "the same weights under their name"
            path = str(other_weights(tmp_path))
            arguments = {"weights_path": path}
            running.call("collective_rpc", method="reload_weights", kwargs=arguments)
            assert running.reset()
            [new] = running.run([local(tokens)])
            assert new["logprobs"] != old, "the weights are the same: nothing was shown"
            assert running.reset()
            [computed] = running.run([ask(tokens)])
            assert computed["cached_tokens"] == 0
            assert computed["logprobs"] == new["logprobs"]
            wait_store(server.address, lambda document: document["pages"] >= 4)
            assert found(running, tokens) == 2 * BLOCK, "its own"
    assert len(lines_with(log, ANEW)) == 1
    assert not lines_with(log, OFF)
