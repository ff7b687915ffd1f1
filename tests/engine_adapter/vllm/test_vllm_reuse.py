"""Two fresh vLLM engines, one after the other: what the second one loads is what vLLM has itself.

The measure is vLLM's own prefix cache with a hit at the same boundary, in the first engine: equal
tokens and identical log-probabilities.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest
from server_process import ServerProcess
from vllm_engines import (
    BLOCK,
    PROMPTS,
    SERVER_FLAGS,
    SMALL_BLOCK,
    ask,
    clear,
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

TOKENS, SHARED = 4 * SMALL_BLOCK + 20, 2 * SMALL_BLOCK
REUSED = 4 * SMALL_BLOCK
BATCH = 20  # asked at once when nobody has anything; later one by one, for steps of equal shapes

# Pages: of two blocks as the connector chooses them, of one, and of one part per rank.
MODES: dict[str, dict[str, Any]] = {
    "one step": {},
    "chunked": {"max_num_batched_tokens": 48, "max_num_seqs": 8, "extra": {"page_tokens": 32}},
    "ngram": {
        "speculative_config": {
            "method": "ngram",
            "num_speculative_tokens": 3,
            "prompt_lookup_max": 4,
            "prompt_lookup_min": 2,
        }
    },
    "tp3": {"tensor_parallel_size": 3, "extra": {"page_tokens": 64}},
}


def wait_saved(address: str, pages: int) -> None:
    """Until so many pages are there and on disk."""
    wait_store(address, lambda found: found["pages"] >= pages and not found["dirty_bytes"])


def start_second(server: ServerProcess, folder: Path, settings: dict[str, Any]) -> Any:
    """A second engine, not ready yet."""
    return engine(server.address, folder / "second.log", wait=False, **settings)


@pytest.mark.parametrize("mode", MODES)
def test_a_fresh_engine_answers_as_vllms_own_prefix_cache(mode: str, tmp_path: Path) -> None:
    ngram = mode == "ngram"
    asked = prompts(
        PROMPTS, seed=len(mode), tokens=TOKENS, shared=SHARED, period=24 if ngram else None
    )
    max_tokens = 8 if ngram else 2
    pages = (PROMPTS + -(-PROMPTS // 4)) * (2 if mode == "chunked" else 1)
    settings = {"block_size": SMALL_BLOCK, **MODES[mode]}
    with ServerProcess(tmp_path / "store", *SERVER_FLAGS) as server:
        server.start()
        log, wait = tmp_path / "first.log", mode == "tp3"
        with ExitStack() as second_ends:
            with engine(server.address, log, **settings) as first:
                if not wait:  # it starts meanwhile; nobody asks it anything before the first ends
                    second = second_ends.enter_context(start_second(server, tmp_path, settings))
                cold = [
                    answer
                    for at in range(0, PROMPTS, BATCH)
                    for answer in first.run(
                        [ask(tokens, max_tokens) for tokens in asked[at : at + BATCH]]
                    )
                ]
                own = [first.run([local(tokens, max_tokens)])[0] for tokens in asked]
                wait_saved(server.address, pages)
            if wait:
                second = second_ends.enter_context(start_second(server, tmp_path, settings))
            second.wait_ready()
            loaded = [second.run([ask(tokens, max_tokens)])[0] for tokens in asked]
            drafted = sum(
                value
                for name, value in second.metrics().items()
                if name.startswith("vllm:spec_decode_num_accepted_tokens")
            )
    assert all(each["cached_tokens"] <= SHARED for each in cold), "the store was empty"
    assert all(each["cached_tokens"] == REUSED for each in own)
    for mine, theirs in zip(loaded, own, strict=True):
        assert mine["cached_tokens"] == REUSED
        assert mine["params"]["kvstore"]["reused_tokens"] >= REUSED - SHARED
        assert mine["tokens"] == theirs["tokens"]
        assert mine["logprobs"] == theirs["logprobs"]
    assert all(same_answer(mine, theirs) for mine, theirs in zip(loaded, cold, strict=True))
    assert sum(map(clear, cold)) >= PROMPTS / 4, "too few clear answers to compare with cold"
    assert not ngram or drafted > 0, "no guess was ever right: nothing was shown"


def test_preempted_requests_are_answered_right_from_a_tiny_pool(tmp_path: Path) -> None:
    """Nine blocks for requests that want five each, in the end: some are preempted, and reload."""
    asked = prompts(4, seed=77, tokens=3 * BLOCK + 60, shared=0)
    requests = [ask(tokens, max_tokens=90) for tokens in asked]
    with ServerProcess(tmp_path / "store", *SERVER_FLAGS) as server:
        server.start()
        tiny = {"num_gpu_blocks_override": 10, "max_model_len": 768}
        with ExitStack() as second_ends:
            with engine(server.address, tmp_path / "first.log") as first:
                second = second_ends.enter_context(start_second(server, tmp_path, tiny))
                expected = [first.run([request])[0] for request in requests]
                wait_saved(server.address, 12)
            second.wait_ready()
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
