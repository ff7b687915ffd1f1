"""Two fresh vLLM engines, one after the other: what the second one loads is what vLLM has itself.

The measure is vLLM's own prefix cache with a hit at the same boundary, in the first engine: equal
tokens and identical log-probabilities.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from server_process import ServerProcess
from vllm_engines import (
    BLOCK,
    PROMPTS,
    SERVER_FLAGS,
    ask,
    engine,
    local,
    needs_vllm,
    prompts,
    same_answer,
    wait_store,
)

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.slow, pytest.mark.vllm, needs_vllm, pytest.mark.timeout(7200)]

MODES: dict[str, dict[str, Any]] = {
    "one step": {},
    "chunked": {"max_num_batched_tokens": 128, "max_num_seqs": 8},
    "ngram": {
        "speculative_config": {
            "method": "ngram",
            "num_speculative_tokens": 3,
            "prompt_lookup_max": 4,
            "prompt_lookup_min": 2,
        }
    },
    "tp3": {"tensor_parallel_size": 3},
}


def wait_saved(address: str, pages: int) -> None:
    """Until so many pages are there and on disk."""
    wait_store(address, lambda found: found["pages"] >= pages and not found["dirty_bytes"])


@pytest.mark.parametrize("mode", MODES)
def test_a_fresh_engine_answers_as_vllms_own_prefix_cache(mode: str, tmp_path: Path) -> None:
    count = PROMPTS if mode == "one step" else max(4, PROMPTS // 5)
    asked = prompts(count, seed=len(mode), period=24 if mode == "ngram" else None)
    max_tokens = 16 if mode == "ngram" else 4
    # A page is two blocks where ranks have small parts of it, and then none is shared.
    pages = count if mode == "tp3" else count + -(-count // 4)
    expected_cached = 2 * BLOCK
    with ServerProcess(tmp_path / "store", *SERVER_FLAGS) as server:
        server.start()
        log = tmp_path / "engines.log"
        with engine(server.address, log, **MODES[mode]) as first:
            cold = [first.run([ask(tokens, max_tokens)])[0] for tokens in asked]
            own = [first.run([local(tokens, max_tokens)])[0] for tokens in asked]
            assert all(each["cached_tokens"] == expected_cached for each in own), own
            wait_saved(server.address, pages)
        with engine(server.address, log, **MODES[mode]) as second:
            loaded = [second.run([ask(tokens, max_tokens)])[0] for tokens in asked]
    assert not any(each["cached_tokens"] > BLOCK for each in cold), "the store was empty"
    for mine, theirs in zip(loaded, own, strict=True):
        assert mine["cached_tokens"] == expected_cached
        assert mine["tokens"] == theirs["tokens"]
        assert mine["logprobs"] == theirs["logprobs"]
    assert all(same_answer(mine, theirs) for mine, theirs in zip(loaded, cold, strict=True))


def test_preempted_requests_are_answered_right_from_a_tiny_pool(tmp_path: Path) -> None:
    """Nine blocks for requests that want five each, in the end: some are preempted, and reload."""
    asked = prompts(4, seed=77, tokens=3 * BLOCK + 60)
    requests = [ask(tokens, max_tokens=90) for tokens in asked]
    with ServerProcess(tmp_path / "store", *SERVER_FLAGS) as server:
        server.start()
        log = tmp_path / "engines.log"
        with engine(server.address, log) as first:
            expected = [first.run([request])[0] for request in requests]
            wait_saved(server.address, 9)
        with engine(server.address, log, num_gpu_blocks_override=10, max_model_len=768) as second:
            for _ in range(2):
                answers = second.run(requests)
                for mine, theirs in zip(answers, expected, strict=True):
                    assert same_answer(mine, theirs), (mine["tokens"], theirs["tokens"])
            metrics = second.metrics()
            assert second.reset(), "blocks are still held"
    preempted = sum(
        value for name, value in metrics.items() if name.startswith("vllm:num_preemptions")
    )
    assert preempted > 0, "the pool was large enough: nothing was shown"
