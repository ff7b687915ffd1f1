"""The adapter with the demo's real model: SmolLM2-135M, grouped-query attention, 30 layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch", reason="the engine adapters need torch")
transformers = pytest.importorskip("transformers", reason="the adapter under test needs it")

from tensor_bits import as_integers  # noqa: E402 - after the importorskip

from kvstore import Store  # noqa: E402 - after the importorskip
from kvstore.engine_adapter.demo_model import convert, gguf_file  # noqa: E402
from kvstore.engine_adapter.transformers_adapter import TransformersAdapter  # noqa: E402
from kvstore.weights import weights_digest  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.model, pytest.mark.slow]

TEXT = "A dictionary maps keys to values. len(d) is the number of its items. " * 20
QUESTION = "Question: How many items are in a dictionary d?\nAnswer: it is"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        gguf_file()
    except FileNotFoundError as exc:
        pytest.skip(str(exc))
    made = tmp_path_factory.mktemp("smollm2") / "model"
    convert(made)
    return made


def load(directory: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    torch.set_num_threads(2)
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
    return model.eval(), tokenizer


def test_the_wheel_becomes_a_plain_model_that_is_whole(directory: Path) -> None:
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {
        each.name for each in directory.iterdir()
    }
    assert [each.name for each in directory.parent.iterdir()] == ["model"]
    model, _ = load(directory, torch.bfloat16)
    assert type(model) is transformers.LlamaForCausalLM
    assert model.dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_real_model_answers_from_the_store_what_it_answers_without(
    tmp_path: Path, directory: Path, dtype: torch.dtype
) -> None:
    model, tokenizer = load(directory, dtype)
    ids = tokenizer(TEXT + QUESTION, return_tensors="pt").input_ids
    weights = weights_digest(directory)
    with Store.open(tmp_path, host_bytes="256MiB", disk_bytes="1GiB") as store:
        adapter = TransformersAdapter(store, model, weights=weights)
        assert adapter.spec.page_tokens == (48 if dtype is torch.bfloat16 else 32)
        cold = adapter.cache(ids, torch.ones_like(ids))
        answer = model.generate(ids, **cold.arguments(), max_new_tokens=8, do_sample=False)
        assert cold.save(answer, durable=True).durable
    with Store.open(tmp_path, host_bytes="256MiB", disk_bytes="1GiB") as store:
        adapter = TransformersAdapter(store, model, weights=weights)
        warm = adapter.cache(ids, torch.ones_like(ids))
        columns = warm.get_seq_length()
        assert columns == ids.shape[1] // adapter.spec.page_tokens * adapter.spec.page_tokens
        assert set(warm.tiers) == {"disk"}
        for computed, loaded in zip(cold.layers, warm.layers, strict=True):
            kept = as_integers(computed.keys[:, :, :columns].contiguous())
            assert (kept == as_integers(loaded.keys)).all()
            kept = as_integers(computed.values[:, :, :columns].contiguous())
            assert (kept == as_integers(loaded.values)).all()
        again = model.generate(ids, **warm.arguments(), max_new_tokens=8, do_sample=False)
        if dtype is torch.float32:  # in bfloat16 rounding may change an answer, with or without us
            assert torch.equal(again, answer)


def test_the_real_model_answers_a_padded_batch_the_same(directory: Path) -> None:
    model, tokenizer = load(directory, torch.float32)
    tokenizer.padding_side = "left"
    texts = [TEXT + QUESTION, TEXT[: len(TEXT) // 3] + QUESTION]
    batch = tokenizer(texts, return_tensors="pt", padding=True)
    wanted = model.generate(**batch, max_new_tokens=8, do_sample=False)
    with Store.open(None, host_bytes="256MiB") as store:
        adapter = TransformersAdapter(store, model, weights=weights_digest(directory))
        for _ in range(2):
            found = adapter.generate(**batch, max_new_tokens=8, do_sample=False)
            assert torch.equal(found, wanted)
        assert adapter.counters().hits == 2
