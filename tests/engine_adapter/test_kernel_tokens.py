"""Tokens generated through the kernels are those of the plain path, by the real model SmolLM2.

The plain path is the model with its own DynamicCache, cut where the stored prefix ends: the same
columns were computed by the same calls, so tokens and log-probabilities must be equal bit for bit.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch", reason="the engine adapters need torch")
transformers = pytest.importorskip("transformers", reason="the adapter under test needs it")

from tensor_bits import as_integers  # noqa: E402 - after the importorskip

from kvstore import Store  # noqa: E402
from kvstore.engine_adapter.demo_model import convert, gguf_file  # noqa: E402
from kvstore.engine_adapter.transformers_adapter import TransformersAdapter  # noqa: E402
from kvstore.kernels.jit import INTERPRETED, interpreted  # noqa: E402
from kvstore.weights import weights_digest  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.model, pytest.mark.slow]

PAGE = 16  # few enough bytes for the interpreter
NEW_TOKENS = 6
PROMPTS = [
    "A dictionary maps keys to values, and len(d) is the number of its items. " * 4
    + "So len({}) is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1) +" * 2,
    "The capital of France is Paris. The capital of Italy is Rome. The capital of Spain is Madrid. "
    "The capital of Portugal is",
    "1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29",
]
WAYS = [
    "the CPU's copies",
    pytest.param(
        "the kernels",
        marks=pytest.mark.skipif(
            not INTERPRETED,
            reason="NOT TESTED: no kernel gave a token: Triton is missing, or TRITON_INTERPRET=0",
        ),
    ),
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        gguf_file()
    except FileNotFoundError as exc:
        pytest.skip(str(exc))
    made = tmp_path_factory.mktemp("smollm2") / "model"
    convert(made)
    return made


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def loaded(request: pytest.FixtureRequest, directory: Path) -> tuple[Any, Any, str]:
    torch.set_num_threads(1)
    dtype = getattr(torch, request.param)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    return model.eval(), tokenizer, weights_digest(directory)


def answer(model: Any, ids: torch.Tensor, arguments: dict[str, Any]) -> tuple[Any, torch.Tensor]:
    """The output and the log-probabilities of each new token's distribution."""
    output = model.generate(
        ids,
        **arguments,
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return output.sequences, torch.stack(output.logits).float().log_softmax(-1)


def plain(model: Any, ids: torch.Tensor, columns: int, name: str) -> tuple[Any, torch.Tensor]:
    """The model's own cache, computed from the whole prompt and cut after `columns`."""
    cache = transformers.DynamicCache(config=model.config)
    mask = torch.ones_like(ids)
    answer(model, ids, {name: cache, "attention_mask": mask})
    own = transformers.DynamicCache(config=model.config)
    for number, layer in enumerate(cache.layers):
        own.update(layer.keys[:, :, :columns], layer.values[:, :, :columns], number)
    return answer(model, ids, {name: own, "attention_mask": mask})


@pytest.mark.timeout(600)
@pytest.mark.parametrize("device_bytes", [0, 64 << 20], ids=["host", "device pool"])
@pytest.mark.parametrize("way", WAYS)
def test_tokens_and_log_probabilities_are_those_of_the_plain_path(
    loaded: tuple[Any, Any, str], way: str, device_bytes: int
) -> None:
    model, tokenizer, weights = loaded
    kernels = interpreted() if way == "the kernels" else contextlib.nullcontext()
    with Store.open(None, host_bytes="256MiB") as store, kernels:
        adapter = TransformersAdapter(
            store, model, weights=weights, page_tokens=PAGE, device_bytes=device_bytes
        )
        for text in PROMPTS[:1] if way == "the kernels" else PROMPTS:
            ids = tokenizer(text, return_tensors="pt").input_ids
            cold = adapter.cache(ids)
            cold.save(answer(model, ids, cold.arguments())[0])
            for _ in range(3 if device_bytes else 1):
                warm = adapter.cache(ids)
                [columns] = warm.reused_tokens
                assert columns >= max(PAGE, ids.shape[1] - PAGE)
                arguments = warm.arguments()
                tokens, chances = answer(model, ids, arguments)
                wanted, wanted_chances = plain(model, ids, columns, next(iter(arguments)))
                assert torch.equal(tokens, wanted)
                assert (as_integers(chances) == as_integers(wanted_chances)).all()
            assert set(warm.tiers) == {"device" if device_bytes else "host"}
