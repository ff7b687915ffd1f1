"""A real engine whose loads come by layers, and one whose copies go the way over a device.

The measure is vLLM's own prefix cache with a hit at the same boundary: equal tokens and identical
log-probabilities.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest
from server_process import ServerProcess
from vllm_engines import (
    PYTHON,
    ROOT,
    SERVER_FLAGS,
    SMALL_BLOCK,
    ask,
    lines_with,
    local,
    needs_vllm,
    prompts,
    ready_model,
    wait_store,
)

from kvstore.engine_adapter.demo_vllm_engine import CONNECTOR, VllmEngine

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.slow, pytest.mark.vllm, needs_vllm, pytest.mark.timeout(3600)]

COUNT = 4
TOKENS, SHARED = 8 * SMALL_BLOCK + 20, 2 * SMALL_BLOCK
REUSED = 8 * SMALL_BLOCK


def engine(store: str, log: Any, connector: dict[str, str], **extra: Any) -> VllmEngine:
    """One with that connector; it computes layer by layer, and so do its loads."""
    settings = {"store": store, "load": "always", "load_by_layer": True, "page_tokens": 64}
    transfer = CONNECTOR | connector | {"kv_connector_extra_config": settings | extra}
    return VllmEngine(
        ready_model(), log, python=PYTHON, block_size=SMALL_BLOCK, kv_transfer_config=transfer
    )


def total(metrics: dict[str, float], name: str) -> float:
    return sum(value for key, value in metrics.items() if key.startswith(f"vllm:kvstore_{name}"))


WAYS = {
    "host": {},
    "device": {"kv_connector_module_path": "late_connector"},
}


@pytest.mark.parametrize("way", WAYS)
def test_what_comes_by_layers_answers_as_vllms_own_prefix_cache(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "tests" / "support")]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    asked = prompts(COUNT, seed=11, tokens=TOKENS, shared=SHARED)
    log_file = tmp_path / "engine.log"
    with (
        ServerProcess(tmp_path / "store", *SERVER_FLAGS) as server,
        open(log_file, "a", encoding="utf-8") as log,
    ):
        server.start()
        with engine(server.address, log, WAYS[way]) as running:
            running.wait_ready()
            for tokens in asked:
                running.run([ask(tokens, 2)])
            own = [running.run([local(tokens, 2)])[0] for tokens in asked]
            pages = TOKENS // 64 * COUNT - (COUNT - 1) * (SHARED // 64)
            wait_store(server.address, lambda found: found["pages"] >= pages)
            assert running.reset()
            loaded = []
            for tokens in asked:
                loaded += running.run([ask(tokens, 2)])
                assert running.reset()  # all of each prompt is loaded
            metrics = running.metrics()
    for mine, theirs in zip(loaded, own, strict=True):
        assert mine["params"]["kvstore"]["reused_tokens"] == REUSED
        assert mine["cached_tokens"] == theirs["cached_tokens"] == REUSED
        assert mine["tokens"] == theirs["tokens"]
        assert mine["logprobs"] == theirs["logprobs"]
    assert total(metrics, "loads_by_layer") == COUNT
    assert total(metrics, "loads_failed") == 0
    assert not lines_with(log_file, "without waiting for their load")
