"""Which models are served, what their spec says, and that a model is tried before it is trusted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch", reason="the engine adapters need torch")
transformers = pytest.importorskip("transformers", reason="the adapter under test needs it")

from kvstore.engine_adapter.layout import PageShape  # noqa: E402 - after the importorskip
from kvstore.engine_adapter.model_probe import probe_model  # noqa: E402
from kvstore.engine_adapter.model_spec import model_spec, tensors_digest  # noqa: E402
from kvstore.engine_adapter.transformers_adapter import TransformersAdapter  # noqa: E402
from kvstore.errors import SpecError  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path

WEIGHTS = "files:" + "ab" * 32
SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.4,
}


def build(kind: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SMALL | changes)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def small_llama(**changes: Any) -> Any:
    return build("Llama", **changes)


def probe(model: Any) -> None:
    shape = PageShape.of(model_spec(model, weights=WEIGHTS))
    probe_model(model, shape)


SERVED = {
    "Llama": {},
    "Qwen2": {"use_sliding_window": False, "sliding_window": 8},
    "Qwen3": {},
    "Mistral": {"sliding_window": None},
    "Olmo2": {},
    "Granite": {},
    "Mixtral": {"num_local_experts": 4, "sliding_window": None},
}


@pytest.mark.parametrize("kind", list(SERVED))
def test_full_attention_models_have_a_spec_and_pass_the_probe(kind: str) -> None:
    probe(build(kind, **SERVED[kind]))


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "sliding window": ("Mistral", {"sliding_window": 16}, "sliding window in layer 0"),
    "sliding window in some layers": (
        "Gemma2",
        {"sliding_window": 16, "query_pre_attn_scalar": 8},
        "sliding window in layer",
    ),
    "state in some layers": (
        "Lfm2",
        {"layer_types": ["conv", "full_attention"]},
        "keeps",
    ),
    "state space": ("Mamba", {"state_size": 4, "num_hidden_layers": 2}, "MambaForCausalLM"),
    "hybrid": (
        "Qwen3Next",
        {
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "layer_types": ["linear_attention", "full_attention"],
        },
        "keeps a state that is not keys and values",
    ),
    "latent attention": (
        "DeepseekV3",
        {
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "kv_lora_rank": 8,
            "q_lora_rank": 8,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 4,
            "v_head_dim": 8,
        },
        "latent attention",
    ),
    "dynamic RoPE": (
        "Llama",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
        "dynamic RoPE",
    ),
    "long RoPE": (
        "Phi3",
        {
            "sliding_window": None,
            "original_max_position_embeddings": 16,
            "max_position_embeddings": 64,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.0] * 4,
                "long_factor": [2.0] * 4,
                "original_max_position_embeddings": 16,
            },
        },
        "longrope RoPE",
    ),
}


@pytest.mark.parametrize("kind", list(REFUSED))
def test_models_whose_kv_cannot_be_stored_are_refused_with_a_sentence(kind: str) -> None:
    family, changes, sentence = REFUSED[kind]
    with pytest.raises(SpecError, match=sentence):
        model_spec(build(family, **changes), weights=WEIGHTS)


def test_encoder_decoders_are_refused() -> None:
    config = transformers.T5Config(
        vocab_size=64, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2
    )
    with pytest.raises(SpecError, match="encoder-decoder"):
        model_spec(transformers.T5ForConditionalGeneration(config), weights=WEIGHTS)


def test_models_that_ask_for_a_quantized_cache_are_refused() -> None:
    model = small_llama()
    model.generation_config.cache_implementation = "quantized"
    with pytest.raises(SpecError, match="asks for a quantized cache"):
        model_spec(model, weights=WEIGHTS)


def test_models_that_are_not_of_transformers_are_refused() -> None:
    class Own(transformers.LlamaForCausalLM):  # type: ignore[misc]
        """Could compute anything."""

    with pytest.raises(SpecError, match="not one of transformers' own"):
        model_spec(Own(transformers.LlamaConfig(**SMALL)), weights=WEIGHTS)


def test_adapters_need_a_digest() -> None:
    model = small_llama()
    model._hf_peft_config_loaded = True
    with pytest.raises(SpecError, match="adapter: missing"):
        model_spec(model, weights=WEIGHTS)
    assert model_spec(model, weights=WEIGHTS, adapter="ab" * 16).adapter == "ab" * 16


def test_dtypes_without_a_layout_are_refused() -> None:
    with pytest.raises(SpecError, match="kv_dtype: the model computes in float64"):
        model_spec(small_llama().double(), weights=WEIGHTS)


CHANGES: dict[str, dict[str, Any]] = {
    "RoPE base": {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    "attention implementation": {"attn_implementation": "eager"},
    "epsilon": {"rms_norm_eps": 1e-5},
    "heads": {"num_key_value_heads": 4},
    "layers": {"num_hidden_layers": 3},
    "activation": {"hidden_act": "gelu"},
}


@pytest.mark.parametrize("change", list(CHANGES))
def test_whatever_changes_kv_changes_the_namespace(change: str) -> None:
    plain = model_spec(small_llama(), weights=WEIGHTS)
    other = model_spec(small_llama(**CHANGES[change]), weights=WEIGHTS)
    assert plain.namespace != other.namespace


def test_dtype_and_page_tokens_change_the_namespace() -> None:
    model = small_llama()
    found = {
        model_spec(model, weights=WEIGHTS).namespace,
        model_spec(model, weights=WEIGHTS, page_tokens=48).namespace,
        model_spec(small_llama().to(torch.bfloat16), weights=WEIGHTS).namespace,
        model_spec(model, weights="files:" + "cd" * 32).namespace,
    }
    assert len(found) == 4


def test_a_model_moved_to_another_directory_keeps_its_namespace(tmp_path: Any) -> None:
    model = small_llama()
    found = set()
    for name in ("one", "two"):
        model.save_pretrained(tmp_path / name)
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name)
        found.add(model_spec(again, weights=WEIGHTS).namespace)
    found.add(model_spec(model, weights=WEIGHTS).namespace)
    assert len(found) == 1


def test_the_default_page_holds_a_mebibyte_in_a_multiple_of_16_tokens() -> None:
    spec = model_spec(small_llama(), weights=WEIGHTS)
    per_token = spec.page_bytes // spec.page_tokens
    assert per_token == 2 * 2 * 2 * 8 * 4
    assert spec.page_tokens % 16 == 0
    assert spec.page_bytes >= 1 << 20 > spec.page_bytes - 16 * per_token


def test_the_digest_of_tensors_sees_every_weight() -> None:
    model = small_llama()
    before = tensors_digest(model)
    assert tensors_digest(small_llama()) == before
    assert tensors_digest(small_llama().to(torch.bfloat16)) != before
    with torch.no_grad():
        model.lm_head.weight[-1, -1] += 1
    assert tensors_digest(model) != before


class LooksAhead(transformers.LlamaForCausalLM):  # type: ignore[misc]
    """Adds the mean of all tokens to each."""

    def forward(self, input_ids: Any = None, inputs_embeds: Any = None, **kwargs: Any) -> Any:
        embedded = self.model.embed_tokens(input_ids)
        return super().forward(
            inputs_embeds=embedded + embedded.mean(dim=1, keepdim=True), **kwargs
        )


class CountsPadding(transformers.LlamaForCausalLM):  # type: ignore[misc]
    """Counts positions from the first column, padding or not."""

    def forward(self, input_ids: Any = None, position_ids: Any = None, **kwargs: Any) -> Any:
        columns = torch.arange(input_ids.shape[1])[None]
        return super().forward(input_ids, position_ids=columns, **kwargs)


class Refuses(transformers.LlamaForCausalLM):  # type: ignore[misc]
    """Cannot run here."""

    def forward(self, input_ids: Any = None, **kwargs: Any) -> Any:
        raise RuntimeError("no such device")


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        (LooksAhead, "depends on tokens after them"),
        (CountsPadding, "depends on padding before them"),
        (Refuses, "could not be tried: RuntimeError: no such device"),
    ],
)
def test_the_probe_finds_models_that_no_config_tells_apart(kind: Any, sentence: str) -> None:
    torch.manual_seed(0)
    model = kind(transformers.LlamaConfig(**SMALL)).eval()
    shape = PageShape.of(model_spec(small_llama(), weights=WEIGHTS))
    with pytest.raises(SpecError, match=sentence):
        probe_model(model, shape)


def test_the_probe_finds_kv_of_another_shape_than_declared() -> None:
    shape = PageShape.of(model_spec(small_llama(num_key_value_heads=4), weights=WEIGHTS))
    with pytest.raises(SpecError, match="not what its config says"):
        probe_model(small_llama(), shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rounding_is_not_taken_for_a_difference(dtype: torch.dtype) -> None:
    probe(small_llama(num_hidden_layers=4).to(dtype))


@pytest.mark.parametrize("given", ["Linear", "LlamaModel", "str", "NoneType"])
def test_what_has_no_generate_is_refused_in_a_sentence(tmp_path: Path, given: str) -> None:
    """It was an AttributeError about something inside. Nothing is opened for it."""
    wrong = {
        "Linear": torch.nn.Linear(2, 2),
        "LlamaModel": transformers.LlamaModel(transformers.LlamaConfig(**SMALL)),
        "str": "gpt2",
        "NoneType": None,
    }[given]
    with pytest.raises(SpecError, match=f"model: a {given} given; a transformers model with gen"):
        TransformersAdapter(tmp_path / "store", wrong)
    assert not (tmp_path / "store").exists()
