"""The transformers adapter with a server instead of a store: unchanged, and unharmed by its end."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest
from server_process import ServerProcess

torch = pytest.importorskip("torch", reason="the adapter computes with torch")
transformers = pytest.importorskip("transformers", reason="the adapter is for its models")

from kvstore.connect import connect  # noqa: E402 # after the skips
from kvstore.engine_adapter.transformers_adapter import TransformersAdapter  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.slow, pytest.mark.model]

PAGE = 8
PROMPT = 3000  # tokens; its pages need more than a session's memory for writing


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    config = transformers.LlamaConfig(
        vocab_size=500,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        initializer_range=0.4,
        max_position_embeddings=4096,
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=2,
    )
    return transformers.LlamaForCausalLM(config).eval()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path / "store", "--host-bytes=16MiB", "--disk-bytes=256MiB") as server:
        yield server.start()


def prompt(tokens: int, seed: int) -> Any:
    return torch.randint(3, 500, (1, tokens), generator=torch.Generator().manual_seed(seed))


def ask(adapter: TransformersAdapter, ids: Any) -> tuple[list[int], int]:
    """The answer, and how many tokens were reused for it; saved durably."""
    cache = adapter.cache(ids)
    output = adapter.model.generate(ids, **cache.arguments(), max_new_tokens=12, do_sample=False)
    cache.save(output, durable=True)
    return output[0].tolist(), cache.reused_tokens[0]


@pytest.mark.parametrize("shared_memory", [True, False])
def test_the_adapter_reuses_survives_and_reuses_again(
    server: ServerProcess, model: Any, shared_memory: bool
) -> None:
    ids = prompt(PROMPT, 1)
    expected = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False
    )[0].tolist()
    settings = {"lookup_deadline_s": 5.0, "shared_memory": shared_memory}
    with connect(server.address, **settings) as store:
        adapter = TransformersAdapter(store, model, page_tokens=PAGE)
        assert ask(adapter, ids) == (expected, 0)
        with connect(server.address, **settings) as other:
            second = TransformersAdapter(other, model, page_tokens=PAGE)
            answer, reused = ask(second, ids)
            assert answer == expected
            assert reused == PROMPT - 1
        server.kill()
        assert ask(adapter, ids) == (expected, 0)
        server.start()
        deadline = time.monotonic() + 10
        while True:
            answer, reused = ask(adapter, ids)
            assert answer == expected
            if reused == PROMPT - 1:
                break
            assert time.monotonic() < deadline
        assert adapter.counters().loads_failed == 0
        assert adapter.counters().saves_failed == 0


def test_the_adapter_takes_an_address_in_place_of_a_store(
    server: ServerProcess, model: Any
) -> None:
    ids = prompt(40, 2)
    first = TransformersAdapter(server.address, model, page_tokens=PAGE)
    ask(first, ids)
    first.close()
    second = TransformersAdapter(server.directory, model, page_tokens=PAGE)
    assert ask(second, ids)[1] == 39
    second.close()


def test_a_directory_that_cannot_be_made_harms_no_answer_and_says_why(
    tmp_path: Path, model: Any
) -> None:
    (tmp_path / "file").write_text("x")
    adapter = TransformersAdapter(tmp_path / "file" / "kv", model, page_tokens=PAGE)
    ids = prompt(40, 3)
    cache = adapter.cache(ids)
    output = model.generate(ids, **cache.arguments(), max_new_tokens=4, do_sample=False)
    saved = cache.save(output)
    adapter.close()
    assert saved.pages == 0
    assert "file/kv cannot be made: " in saved.reason
    assert "Not a directory" in saved.reason


def test_pages_on_the_device_are_hit_through_a_server_and_forgotten_with_it(
    server: ServerProcess, model: Any
) -> None:
    """A restarted server names its pages anew, so that none is taken for one from before."""
    ids = prompt(200, 3)
    with connect(server.address, lookup_deadline_s=5.0) as store:
        adapter = TransformersAdapter(store, model, page_tokens=PAGE, device_bytes=64 << 20)
        expected = ask(adapter, ids)[0]
        for found in ("host", "host", "device", "device"):
            assert ask(adapter, ids) == (expected, 199)
            assert adapter.cache(prompt(2, 4)).tiers == {}
            pages = adapter.counters().pages_from_device
            assert (pages > 0) == (found == "device")
        server.kill()
        assert ask(adapter, ids) == (expected, 0)
        server.start()
        deadline = time.monotonic() + 10
        while (answer := ask(adapter, ids))[1] == 0:
            assert answer[0] == expected
            assert time.monotonic() < deadline
        assert answer == (expected, 199)
        assert adapter.counters().pages_from_device == pages
