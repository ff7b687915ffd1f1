"""The transformers adapter with quantized pages: what is loaded is what the codec keeps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the engine adapters need torch")
transformers = pytest.importorskip("transformers", reason="the adapter under test needs it")

from tensor_bits import as_integers  # noqa: E402 - after the importorskip

from kvstore import Store  # noqa: E402 - after the importorskip
from kvstore.engine_adapter.transformers_adapter import TransformersAdapter  # noqa: E402
from kvstore.errors import SpecError  # noqa: E402
from kvstore.quantized_session import SCHEMES, codec_of  # noqa: E402

PAGE, WORDS = 16, 101


@pytest.fixture(scope="module")
def model() -> Any:
    torch.set_num_threads(1)
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=WORDS,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=2,
    )
    return transformers.LlamaForCausalLM(config).to(torch.bfloat16).eval()


def generated(model: Any, adapter: TransformersAdapter, ids: Any) -> tuple[Any, Any]:
    """The cache after generating 8 tokens, saved, and the output."""
    cache = adapter.cache(ids)
    output = model.generate(ids, **cache.arguments(), max_new_tokens=8, do_sample=False)
    cache.save(output)
    return cache, output


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_quantized_prefix_is_loaded_as_the_codec_keeps_it(model: Any, scheme: str) -> None:
    ids = torch.randint(3, WORDS, (1, 70), generator=torch.Generator().manual_seed(1))
    with Store.open(None, host_bytes="16MiB") as store:
        adapter = TransformersAdapter(store, model, page_tokens=PAGE, quantization=scheme)
        cold, _ = generated(model, adapter, ids)
        warm = adapter.cache(ids)
        assert (cold.reused_tokens, warm.reused_tokens) == ([0], [64])
        codec = codec_of(adapter.spec, scheme)
        out = bytearray(adapter.spec.page_bytes)
        for page in range(4):
            part = slice(page * PAGE, (page + 1) * PAGE)
            kinds = [
                as_integers(each[0, :, part].contiguous())
                for layer in cold.layers
                for each in (layer.keys, layer.values)
            ]
            codec.decode(codec.encode(np.stack(kinds).tobytes()), out)
            wanted = np.frombuffer(out, np.int16).reshape(3, 2, 2, PAGE, 16)
            for number, layer in enumerate(warm.layers):
                assert np.array_equal(as_integers(layer.keys[0, :, part]), wanted[number, 0])
                assert np.array_equal(as_integers(layer.values[0, :, part]), wanted[number, 1])


def test_an_adapter_that_wants_exact_pages_gets_none_of_them(model: Any) -> None:
    ids = torch.randint(3, WORDS, (1, 50), generator=torch.Generator().manual_seed(2))
    plain = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False
    )
    with Store.open(None, host_bytes="16MiB") as store:
        for scheme in SCHEMES:
            generated(
                model,
                TransformersAdapter(store, model, page_tokens=PAGE, quantization=scheme),
                ids,
            )
        exact = TransformersAdapter(store, model, page_tokens=PAGE)
        cold, output = generated(model, exact, ids)
        assert cold.reused_tokens == [0]
        assert torch.equal(output, plain)
        warm, output = generated(model, exact, ids)
        assert warm.reused_tokens == [48]
        assert torch.equal(output, plain)
        assert len({usage.namespace for usage in store.namespaces()}) == 1 + len(SCHEMES)


def test_an_unknown_scheme_is_refused_and_no_session_is_left(model: Any) -> None:
    with (
        Store.open(None, host_bytes="16MiB") as store,
        pytest.raises(SpecError, match="'int2' is not one of fp8, int8, int4"),
    ):
        TransformersAdapter(store, model, page_tokens=PAGE, quantization="int2")
