"""Two fresh vLLM engines, one after the other: what the second one loads is what vLLM has itself.

The measure is vLLM's own prefix cache with a hit at the same boundary, in the first engine: equal
tokens and identical log-probabilities. What was computed cold is the measure of tokens only, where
the choice was clear: steps of other shapes round differently. Numbers are printed.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
from server_process import ServerProcess
from vllm_engines import (
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
    say,
    store_document,
    wait_store,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kvstore.engine_adapter.demo_vllm_engine import VllmEngine

pytestmark = [pytest.mark.slow, pytest.mark.vllm, needs_vllm, pytest.mark.timeout(1800)]

TOKENS, SHARED = 4 * SMALL_BLOCK + 20, 2 * SMALL_BLOCK
REUSED = 4 * SMALL_BLOCK
BATCH = 20  # asked at once when nobody has anything
# Hits are asked one by one, for steps of equal shapes; where a step takes long, some together.
HIT_BATCH = {"tp3": 10}
SAVED_S, ASKED_MAX = 5.0, 10
TRIES = 3  # to have the steps of a batch as they were when vLLM's own hits were measured

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
QUICK = {"one step": [pytest.mark.vllm_quick, pytest.mark.timeout(900)]}


@dataclass
class Equality:
    """What was compared in one mode, and how long it took."""

    mode: str
    begin_s: float = field(default_factory=time.monotonic)
    seconds: dict[str, float] = field(default_factory=dict)
    other_steps: int = 0  # batches that were asked again because their steps had other shapes
    counts: dict[str, int] = field(default_factory=dict)
    own_other: int = 0  # vLLM's own hits that don't answer as a cold run does, clear as that was

    def passed(self, phase: str) -> None:
        """A phase is over."""
        now = time.monotonic()
        self.seconds[phase], self.begin_s = now - self.begin_s, now

    def compare(
        self, loaded: list[dict[str, Any]], cold: list[dict[str, Any]], own: list[dict[str, Any]]
    ) -> None:
        """Count what differs; `own` is empty where vLLM has no hit at the same boundary."""
        self.counts["tokens"] = self.counts["log_probabilities"] = 0
        for mine, theirs in zip(loaded, own, strict=bool(own)):
            self.counts["tokens"] += mine["tokens"] != theirs["tokens"]
            self.counts["log_probabilities"] += mine["logprobs"] != theirs["logprobs"]
        differ = [not same_answer(*pair) for pair in zip(loaded, cold, strict=True)]
        if own:  # what vLLM's own hit does to an answer, a load may do
            by_itself = [not same_answer(*pair) for pair in zip(own, cold, strict=True)]
            self.own_other = sum(by_itself)
            differ = [mine and not own for mine, own in zip(differ, by_itself, strict=True)]
        self.counts["tokens_of_cold"] = sum(differ)

    def line(self, loaded: list[dict[str, Any]], cold: list[dict[str, Any]], own: int) -> str:
        """All of it for the log."""
        phases = ", ".join(f"{name} {each:.0f} s" for name, each in self.seconds.items())
        against = (
            f"against vLLM's own hit: {self.counts['tokens']} with other tokens, "
            f"{self.counts['log_probabilities']} with other log-probabilities; "
            if own
            else ""
        )
        return (
            f"{self.mode}: {len(loaded)} prompts; {against}against cold: "
            f"{self.counts['tokens_of_cold']} with other tokens "
            f"({sum(map(clear, cold))} with a clear first one; {self.own_other} of vLLM's own hits "
            f"have other tokens, too); {phases}; "
            f"{self.other_steps} batches asked again"
        )


def are_saved(address: str, pages: int) -> bool:
    """Whether so many pages are there and on disk, within a moment."""
    until = time.monotonic() + SAVED_S
    while time.monotonic() < until:
        found = store_document(address)
        if found and found["pages"] >= pages and not found["dirty_bytes"]:
            return True
        time.sleep(0.05)
    return False


def start_second(server: ServerProcess, folder: Path, settings: dict[str, Any]) -> Any:
    """A second engine, not ready yet."""
    return engine(server.address, folder / "second.log", wait=False, **settings)


def in_batches(
    running: VllmEngine,
    requests: list[dict[str, Any]],
    saved: Callable[[int], bool] = lambda done: True,
) -> list[dict[str, Any]]:
    """Answers to requests that come some at a time; `saved(n)`: are the first n's pages stored?

    A store that has no room for what comes at once drops it: that is asked for again.
    """
    answers: list[dict[str, Any]] = []
    for at in range(0, len(requests), BATCH):
        part = requests[at : at + BATCH]
        answers += running.run(part)
        for _ in range(ASKED_MAX):
            if saved(len(answers)):
                break
            running.run(part)
        else:
            raise AssertionError(f"of {len(answers)} prompts, some are never stored")
    return answers


def hits(running: VllmEngine, requests: list[dict[str, Any]], batch: int) -> list[dict[str, Any]]:
    """Answers to requests whose prefixes are there already: batches enter together."""
    parts = (requests[at : at + batch] for at in range(0, len(requests), batch))
    return [answer for part in parts for answer in running.run(part, together=batch > 1)]


def loads(
    running: VllmEngine,
    requests: list[dict[str, Any]],
    own: list[dict[str, Any]],
    batch: int,
    found: Equality,
) -> list[dict[str, Any]]:
    """As hits(), from the store; a batch whose steps had other shapes than `own` is asked again.

    Only steps of equal shapes round equally. What the answers are does not matter for that.
    """
    answers: list[dict[str, Any]] = []
    for at in range(0, len(requests), batch):
        wanted = [each["step"] for each in own[at : at + batch]]
        for tried in range(TRIES):
            if tried:
                found.other_steps += 1
                assert running.reset()
            part = running.run(requests[at : at + batch], together=batch > 1)
            if [each["step"] for each in part] == wanted:
                break
        answers += part
    return answers


def accepted(running: VllmEngine) -> float:
    """How many guesses of a speculating engine were right."""
    name = "vllm:spec_decode_num_accepted_tokens"
    return sum(value for each, value in running.metrics().items() if each.startswith(name))


@pytest.mark.parametrize("mode", [pytest.param(mode, marks=QUICK.get(mode, [])) for mode in MODES])
def test_a_fresh_engine_answers_as_vllms_own_prefix_cache(
    mode: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ngram = mode == "ngram"
    asked = prompts(
        PROMPTS, seed=len(mode), tokens=TOKENS, shared=SHARED, period=24 if ngram else None
    )
    max_tokens = 8 if ngram else 2
    each = 2 if mode == "chunked" else 1  # pages of what is shared, and as many of the rest
    settings = {"block_size": SMALL_BLOCK, **MODES[mode]}
    found, batch = Equality(mode), HIT_BATCH.get(mode, 1)
    with ServerProcess(tmp_path / "store", *SERVER_FLAGS) as server:
        server.start()
        log, wait = tmp_path / "first.log", mode == "tp3"
        with ExitStack() as second_ends:
            with engine(server.address, log, wait=False, **settings) as first:
                if not wait:  # it starts meanwhile; nobody asks it anything before the first ends
                    second = second_ends.enter_context(start_second(server, tmp_path, settings))
                first.wait_ready()
                found.passed("start")
                cold = in_batches(
                    first,
                    [ask(tokens, max_tokens) for tokens in asked],
                    lambda done: are_saved(server.address, each * (done + -(-done // 4))),
                )
                found.passed("cold")
                own = hits(first, [local(tokens, max_tokens) for tokens in asked], batch)
                found.passed("own")
            if wait:
                second = second_ends.enter_context(start_second(server, tmp_path, settings))
            second.wait_ready()
            second.run([ask([7, 7, 7], max_tokens=2)])  # its workers attach to the store
            found.passed("second start")
            wanted = [ask(tokens, max_tokens) for tokens in asked]
            loaded = loads(second, wanted, own, batch, found)
            found.passed("loaded")
            drafted = accepted(second)
    found.compare(loaded, cold, own)
    say(capsys, found.line(loaded, cold, len(own)))
    assert all(each["cached_tokens"] <= SHARED for each in cold), "the store was empty"
    assert all(each["cached_tokens"] == REUSED for each in own)
    for mine in loaded:
        assert mine["cached_tokens"] == REUSED
        assert mine["params"]["kvstore"]["reused_tokens"] >= REUSED - SHARED
    assert not any(found.counts.values()), found.counts
    assert sum(map(clear, cold)) >= PROMPTS / 4, "too few clear answers to compare with cold"
    assert not ngram or drafted > 0, "no guess was ever right: nothing was shown"


def test_preempted_requests_are_answered_right_from_a_tiny_pool(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nine blocks for requests that want five each, in the end: some are preempted, and reload."""
    asked = prompts(PROMPTS, seed=77, tokens=3 * SMALL_BLOCK + 10, shared=0)
    requests = [ask(tokens, max_tokens=30) for tokens in asked]
    settings = {"block_size": SMALL_BLOCK, "extra": {"page_tokens": SMALL_BLOCK}}
    tiny = {"num_gpu_blocks_override": 10, "max_model_len": 256, **settings}
    found = Equality("preemption")
    with ServerProcess(tmp_path / "store", *SERVER_FLAGS) as server:
        server.start()
        with ExitStack() as second_ends:
            with engine(server.address, tmp_path / "first.log", wait=False, **settings) as first:
                second = second_ends.enter_context(start_second(server, tmp_path, tiny))
                first.wait_ready()
                found.passed("start")
                cold = in_batches(first, requests, lambda done: are_saved(server.address, 3 * done))
                found.passed("cold")
            second.wait_ready()
            loaded = in_batches(second, requests)
            found.passed("loaded")
            metrics = second.metrics()
            assert second.reset(), "blocks are still held"
    preempted = sum(
        value for name, value in metrics.items() if name.startswith("vllm:num_preemptions")
    )
    found.compare(loaded, cold, [])
    say(capsys, f"{found.line(loaded, cold, 0)}; {preempted:.0f} preemptions")
    assert sum(each["cached_tokens"] > 0 for each in loaded) >= PROMPTS / 2, "too little was loaded"
    assert not any(found.counts.values()), found.counts
    assert preempted > 0, "the pool was large enough: nothing was shown"


def test_all_of_a_prompt_longer_than_may_be_pinned_is_saved_after_its_end(tmp_path: Path) -> None:
    """Sixty blocks: six may be pinned. One step computes 24 of them, and the request ends."""
    [tokens] = prompts(1, seed=78, tokens=24 * SMALL_BLOCK + 10, shared=0)
    tiny = {"num_gpu_blocks_override": 60, "block_size": SMALL_BLOCK, "max_model_len": 1024}
    with (
        ServerProcess(tmp_path / "store", *SERVER_FLAGS) as server,
        engine(server.start().address, tmp_path / "log", **tiny) as running,
    ):
        [cold] = running.run([ask(tokens, max_tokens=1)])
        wait_store(server.address, lambda found: found["pages"] >= 12)
        assert running.reset(), "blocks are still held"
        [loaded] = running.run([ask(tokens, max_tokens=1)])
        metrics = running.metrics()
    assert cold["cached_tokens"] == 0
    assert loaded["cached_tokens"] == 24 * SMALL_BLOCK
    assert same_answer(loaded, cold)
    [peak] = [
        value for name, value in metrics.items() if name.startswith("vllm:kvstore_pinned_blocks")
    ]
    assert 0 < peak <= 6
    over = [value for name, value in metrics.items() if "kvstore_saves_over_pin_cap" in name]
    assert sum(over) > 0, "everything could be pinned: nothing was shown"
