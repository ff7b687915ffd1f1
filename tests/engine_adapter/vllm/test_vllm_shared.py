"""Two vLLM replicas and a transformers process share one server; other weights share nothing."""

from __future__ import annotations

import json
import shutil
import time
from typing import TYPE_CHECKING, Any

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
    same_answer,
    store_document,
    wait_store,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvstore.engine_adapter.demo_vllm_engine import VllmEngine

torch = pytest.importorskip("torch", reason="the transformers process computes with torch")
transformers = pytest.importorskip("transformers", reason="one process is transformers'")
numpy_tensors = pytest.importorskip("safetensors.numpy", reason="adapters are made with it")

from kvstore.engine_adapter.transformers_adapter import TransformersAdapter  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.vllm, needs_vllm, pytest.mark.timeout(3600)]

BACK_S_MAX = 60.0
HF_PAGE = 32  # tokens of the transformers process's pages
LORA = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
RANK, HIDDEN, KEYS = 8, 576, 192


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("shared") / "store", *SERVER_FLAGS) as server:
        yield server.start()


@pytest.fixture(scope="module")
def first(server: ServerProcess) -> Iterator[VllmEngine]:
    log = server.directory.with_name("first.log")
    with engine(server.address, log, num_gpu_blocks_override=100, **LORA) as made:
        yield made


@pytest.fixture(scope="module")
def second(server: ServerProcess, first: VllmEngine) -> Iterator[VllmEngine]:
    log = server.directory.with_name("second.log")
    with engine(server.address, log, wait=False, num_gpu_blocks_override=100, **LORA) as made:
        yield made


@pytest.fixture(scope="module")
def other(server: ServerProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmEngine]:
    """One of the same model, but for a bit of its weights; starts while others work."""
    weights = tmp_path_factory.mktemp("other") / "model"
    shutil.copytree(ready_model(), weights)
    with open(weights / "model.safetensors", "r+b") as file:
        file.seek(-1000, 2)
        byte = file.read(1)
        file.seek(-1000, 2)
        file.write(bytes([byte[0] ^ 1]))
    log = server.directory.with_name("other.log")
    with engine(server.address, log, wait=False, model=weights) as made:
        yield made


@pytest.fixture(scope="module")
def adapter(server: ServerProcess) -> Iterator[Any]:
    torch.set_num_threads(1)
    model = transformers.AutoModelForCausalLM.from_pretrained(ready_model(), dtype=torch.float32)
    made = TransformersAdapter(server.address, model.eval(), page_tokens=HF_PAGE)
    yield made
    made.close()


def make_lora(folder: Path, seed: int) -> str:
    """A random adapter of the first layer's values."""
    rng = np.random.default_rng(seed)
    folder.mkdir()
    name = "base_model.model.model.layers.0.self_attn.v_proj.lora_"
    parts = {
        f"{name}A.weight": rng.normal(0, 0.1, (RANK, HIDDEN)).astype(np.float32),
        f"{name}B.weight": rng.normal(0, 0.1, (KEYS, RANK)).astype(np.float32),
    }
    numpy_tensors.save_file(parts, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": 16, "target_modules": ["v_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(settings | {"bias": "none"}))
    return str(folder)


def save(running: VllmEngine, server: ServerProcess, request: dict[str, Any]) -> dict[str, Any]:
    """Ask until it is stored, which a new adapter is only once it was read; vLLM's own answer."""
    before = store_document(server.address)["pages"]

    def is_stored() -> bool:
        return bool(store_document(server.address)["pages"] >= before + 2)

    deadline = time.monotonic() + BACK_S_MAX
    while not is_stored():
        assert time.monotonic() < deadline
        assert running.reset()
        [new] = running.run([request])
        assert new["cached_tokens"] == 0, "another one's pages"
        until = time.monotonic() + 3.0
        while not is_stored() and time.monotonic() < until:
            time.sleep(0.1)
    [own] = running.run([request | local(request["tokens"])])
    assert own["cached_tokens"] == 2 * BLOCK
    return own


def until_found(running: VllmEngine, tokens: list[int]) -> dict[str, Any]:
    """The answer once all of the prompt comes from the store, as after a server's end."""
    deadline = time.monotonic() + BACK_S_MAX
    while True:
        assert running.reset()
        [answer] = running.run([ask(tokens)])
        if answer["cached_tokens"] == 2 * BLOCK:
            return answer
        assert time.monotonic() < deadline


def by_transformers(adapter: Any, tokens: list[int]) -> tuple[list[int], int]:
    """The answer and how much of the prompt was reused; saved."""
    ids = torch.tensor([tokens])
    cache = adapter.cache(ids)
    output = adapter.model.generate(ids, **cache.arguments(), max_new_tokens=4, do_sample=False)
    cache.save(output, durable=True)
    return output[0, len(tokens) :].tolist(), cache.reused_tokens[0]


def test_two_loras_and_none_do_not_hit_each_other(
    first: VllmEngine, second: VllmEngine, server: ServerProcess, tmp_path: Path
) -> None:
    [tokens] = prompts(1, seed=21)
    kinds = [
        ask(tokens),
        ask(tokens, lora=make_lora(tmp_path / "one", 1)),
        ask(tokens, lora=make_lora(tmp_path / "two", 2)),
    ]
    expected = [save(first, server, request) for request in kinds]
    assert len({each["logprobs"][0] for each in expected}) == 3, "the adapters change nothing"
    for request, theirs in zip(kinds, expected, strict=True):
        assert first.reset()
        [mine] = first.run([request])
        assert mine["cached_tokens"] == 2 * BLOCK
        assert mine["logprobs"] == theirs["logprobs"]


def test_replicas_and_transformers_share_a_server_that_is_killed_in_the_middle(
    first: VllmEngine, second: VllmEngine, other: VllmEngine, server: ServerProcess, adapter: Any
) -> None:
    asked = prompts(4, seed=22, shared=0)
    own = [save(first, server, ask(tokens)) for tokens in asked[:2]]
    answers, reused = zip(*(by_transformers(adapter, tokens) for tokens in asked), strict=True)
    assert reused[0] == 0
    reusable = len(asked[0]) // HF_PAGE * HF_PAGE
    assert by_transformers(adapter, asked[0]) == (answers[0], reusable)
    second.wait_ready()
    for tokens, theirs in zip(asked[:2], own, strict=True):
        [mine] = second.run([ask(tokens)])
        assert mine["cached_tokens"] == 2 * BLOCK, "the other replica's pages"
        assert mine["logprobs"] == theirs["logprobs"]
    own += [save(second, server, ask(tokens)) for tokens in asked[2:]]
    wait_store(server.address, lambda found: not found["dirty_bytes"])
    for running in (first, second):
        assert running.reset()
        running.send("run", requests=[ask(tokens) for tokens in asked])
    server.kill()
    assert by_transformers(adapter, asked[1])[0] == answers[1]
    for running in (first, second):
        for mine, theirs in zip(running.received(), own, strict=True):
            assert mine["reason"] == "length"
            assert same_answer(mine, theirs)
    server.start()
    for running in (first, second):
        for tokens, theirs in zip(asked, own, strict=True):
            mine = until_found(running, tokens)
            assert mine["logprobs"] == theirs["logprobs"]
    deadline = time.monotonic() + BACK_S_MAX
    while by_transformers(adapter, asked[2]) != (answers[2], reusable):
        assert time.monotonic() < deadline
    for name in ("first.log", "second.log"):
        log = server.directory.with_name(name)
        assert len(lines_with(log, "has gone: misses until one answers")) == 1
        assert len(lines_with(log, "answers now")) == 1


def test_weights_that_differ_in_a_bit_find_nothing(
    first: VllmEngine, other: VllmEngine, server: ServerProcess
) -> None:
    [tokens] = prompts(1, seed=23)
    save(first, server, ask(tokens))
    other.wait_ready()
    save(other, server, ask(tokens))  # which finds nothing before
    assert until_found(other, tokens)["cached_tokens"] == 2 * BLOCK, "it finds its own"


def test_the_same_weights_under_another_rope_theta_find_nothing(
    first: VllmEngine, server: ServerProcess, tmp_path: Path
) -> None:
    [tokens] = prompts(1, seed=24)
    model = tmp_path / "model"
    shutil.copytree(ready_model(), model)
    path = model / "config.json"
    config = json.loads(path.read_text())
    config["rope_parameters"]["rope_theta"] /= 2
    path.write_text(json.dumps(config))
    with engine(server.address, tmp_path / "log", wait=False, model=model) as turned:
        mine = save(first, server, ask(tokens))
        turned.wait_ready()
        theirs = save(turned, server, ask(tokens))  # which finds nothing before
        assert theirs["logprobs"] != mine["logprobs"], "the models are the same: nothing was shown"
        assert until_found(turned, tokens)["logprobs"] == theirs["logprobs"]
    assert until_found(first, tokens)["logprobs"] == mine["logprobs"]
