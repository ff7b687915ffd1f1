"""Tokens generated through the kernels are those of the plain path, by the real model SmolLM2.

The plain path is the model with its own DynamicCache, cut where the stored prefix ends: the same
columns were computed by the same calls, so tokens and log-probabilities must be equal bit for bit.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch", reason="the engine adapters need torch")
transformers = pytest.importorskip("transformers", reason="the adapter under test needs it")

from tensor_bits import as_integers  # noqa: E402 - after the importorskip

from kvstore import Store  # noqa: E402
from kvstore.engine_adapter.demo_model import convert, gguf_file  # noqa: E402
from kvstore.engine_adapter.model_spec import CACHE_ARGUMENT  # noqa: E402
from kvstore.engine_adapter.transformers_adapter import TransformersAdapter  # noqa: E402
from kvstore.kernels.jit import INTERPRETED, interpreted  # noqa: E402
from kvstore.weights import weights_digest  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.model, pytest.mark.slow]

PAGE = 16  # few enough bytes for the interpreter
NEW_TOKENS = 4
PROMPTS = [
    "A dictionary maps keys to values, and len(d) is the number of its items. " * 2
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


@dataclass
class Plain:
    """A model by itself, and what it has answered already: the ways are compared to one answer."""

    model: Any
    tokenizer: Any
    weights: str
    caches: dict[str, Any] = field(default_factory=dict)
    answers: dict[tuple[str, int], tuple[Any, torch.Tensor]] = field(default_factory=dict)

    def ids(self, text: str) -> torch.Tensor:
        ids: torch.Tensor = self.tokenizer(text, return_tensors="pt").input_ids
        return ids

    def answer(self, text: str, columns: int) -> tuple[Any, torch.Tensor]:
        """With the model's own cache, computed from the whole prompt and cut after `columns`.

        With 0 columns, the answer from which that cache is.
        """
        if (text, columns) not in self.answers:
            own = transformers.DynamicCache(config=self.model.config)
            if not columns:
                self.caches[text] = own
            elif text not in self.caches:
                self.answer(text, 0)
            for number, layer in enumerate(self.caches[text].layers if columns else ()):
                own.update(layer.keys[:, :, :columns], layer.values[:, :, :columns], number)
            ids = self.ids(text)
            arguments = {CACHE_ARGUMENT: own, "attention_mask": torch.ones_like(ids)}
            self.answers[text, columns] = answer(self.model, ids, arguments)
        return self.answers[text, columns]


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def plain(request: pytest.FixtureRequest, directory: Path) -> Plain:
    torch.set_num_threads(1)
    dtype = getattr(torch, request.param)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    return Plain(model.eval(), tokenizer, weights_digest(directory))


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


def assert_equal(mine: tuple[Any, torch.Tensor], wanted: tuple[Any, torch.Tensor]) -> None:
    """To the bit."""
    assert torch.equal(mine[0], wanted[0])
    assert (as_integers(mine[1]) == as_integers(wanted[1])).all()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("device_bytes", [0, 64 << 20], ids=["host", "device pool"])
@pytest.mark.parametrize("way", WAYS)
def test_tokens_and_log_probabilities_are_those_of_the_plain_path(
    plain: Plain, way: str, device_bytes: int
) -> None:
    kernels = interpreted() if way == "the kernels" else contextlib.nullcontext()
    with Store.open(None, host_bytes="256MiB") as store, kernels:
        adapter = TransformersAdapter(
            store, plain.model, weights=plain.weights, page_tokens=PAGE, device_bytes=device_bytes
        )
        few = 1 if device_bytes else 2  # of the interpreter, which takes long
        for text in PROMPTS[:few] if way == "the kernels" else PROMPTS:
            ids = plain.ids(text)
            cold = adapter.cache(ids)
            computed = answer(plain.model, ids, cold.arguments())
            assert_equal(computed, plain.answer(text, 0))
            assert cold.save(computed[0]).pages == (ids.shape[1] + NEW_TOKENS - 1) // PAGE
            for _ in range(3 if device_bytes else 1):
                warm = adapter.cache(ids)
                [columns] = warm.reused_tokens
                assert columns >= max(PAGE, ids.shape[1] - PAGE)
                mine = answer(plain.model, ids, warm.arguments())
                assert_equal(mine, plain.answer(text, columns))
            assert set(warm.tiers) == {"device" if device_bytes else "host"}
