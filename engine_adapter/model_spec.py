"""The cache spec of a Hugging Face model, or one sentence why its KV cannot be stored.

What is served: decoder-only text models whose every layer keeps plain keys and values of all
tokens, and whose KV of a token depends on the tokens up to it and on nothing else. All else is
refused here, before a single page is looked up. Must not be here: the cache, the store.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer
from transformers.modeling_outputs import CausalLMOutputWithPast

from kvstore.engine_adapter.layout import TORCH_DTYPES
from kvstore.errors import SpecError
from kvstore.spec import (
    CacheSpec,
    KvQuantization,
    LayerGroup,
    PageLayout,
    ShardGeometry,
    canonical_json,
    default_page_tokens,
    json_digest,
)

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# A PreTrainedModel with generate(): transformers has no public type for that.
HfModel: TypeAlias = Any

# What generate() calls its cache, in this version of transformers and in earlier ones.
_OUTPUT_NAMES = {each.name for each in fields(CausalLMOutputWithPast)}
CACHE_ARGUMENT = "cache" if "cache" in _OUTPUT_NAMES else "past_key_values"

BLOCK_TOKENS = 16  # pages are a multiple of this, unless the caller says otherwise

# RoPE whose angles for early tokens change when a sequence grows: equal prefixes, different KV.
_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
# What a config says that cannot change a key or a value.
_CONFIG_NOISE = ("_name_or_path", "transformers_version", "use_cache", "dtype", "torch_dtype")


def refuse_unservable(model: HfModel) -> None:
    """Raise SpecError, with a sentence, if the KV of this model must not be reused by prefix."""
    name = type(model).__name__
    if not all(hasattr(model, each) for each in ("config", "generation_config", "generate")):
        raise SpecError(
            f"model: a {name} given; a transformers model with generate() is needed, as "
            "AutoModelForCausalLM.from_pretrained(...) returns one"
        )
    config = model.config
    if config.is_encoder_decoder:
        raise SpecError(f"{name} is an encoder-decoder: its KV depends on the encoder's input")
    chosen = getattr(model.generation_config, "cache_implementation", None)
    if chosen not in (None, "dynamic"):
        raise SpecError(f"{name} asks for a {chosen} cache, whose KV is not plain tensors")
    if config.get_text_config(decoder=True) is not config:
        raise SpecError(f"{name} is multimodal: token ids alone do not decide its KV")
    if not type(model).__module__.startswith("transformers.models."):
        raise SpecError(f"{name} is not one of transformers' own models: nobody vouches for its KV")
    if getattr(config, "kv_lora_rank", None):
        raise SpecError(
            f"{name} has latent attention (MLA), for which no page layout is known here"
        )
    if getattr(config, "use_bidirectional_attention", None):
        raise SpecError(f"{name} attends in both directions: its KV depends on later tokens")
    if getattr(config, "add_cross_attention", False):
        raise SpecError(f"{name} has cross-attention: its KV depends on more than its tokens")
    if getattr(model, "_is_stateful", False) or not model._supports_default_dynamic_cache():
        raise SpecError(f"{name} keeps a state that is not keys and values of each token")
    _refuse_layers(config, name)
    for kind in _rope_types(_rope(config)):
        if kind in _LENGTH_DEPENDENT_ROPE:
            raise SpecError(f"{name} has {kind} RoPE: keys of early tokens depend on the length")


def model_spec(
    model: HfModel,
    *,
    weights: str,
    name: str | None = None,
    page_tokens: int | None = None,
    adapter: str = "none",
) -> CacheSpec:
    """The spec of a model's pages; SpecError if it has none.

    weights: "hub:<commit>" or "files:<digest>". page_tokens: by default the smallest multiple of
    16 with at least 1 MiB of KV. adapter: digest of the active LoRA or other adapter.
    """
    refuse_unservable(model)
    if adapter == "none" and getattr(model, "_hf_peft_config_loaded", False):
        raise SpecError("adapter: missing; the model has an adapter loaded, give its digest")
    config = model.config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or (
        config.hidden_size // config.num_attention_heads
    )
    dtype = str(model.dtype).removeprefix("torch.")
    if dtype not in TORCH_DTYPES:
        raise SpecError(f"kv_dtype: the model computes in {dtype}, which no page layout holds")
    layers = config.num_hidden_layers
    if page_tokens is None:
        per_token = layers * 2 * heads * head_dim * model.dtype.itemsize
        page_tokens = default_page_tokens(per_token, BLOCK_TOKENS)
    return CacheSpec(
        model=name or type(model).__name__,
        weights=weights,
        config_digest=json_digest(_config(config)),
        backend=f"transformers:{config._attn_implementation or 'default'}",
        page_format="plain",
        kv_dtype=dtype,
        groups=(LayerGroup.uniform(layers, heads, head_dim),),
        rope=canonical_json(_rope(config)),
        page_tokens=page_tokens,
        layout=PageLayout.LAYER_KV_HEAD_TOKEN_DIM,
        quantization=KvQuantization.none(),
        adapter=adapter,
        geometry=ShardGeometry.single(),
    )


def tensors_digest(model: HfModel) -> str:
    """64 hex digits over every parameter and buffer of a model, as it is in memory now.

    About a second a GB. Sees what a digest of files cannot: merged adapters, edited weights.
    """
    total = hashlib.blake2b(digest_size=32, person=b"kvstore-tensors")
    for name, tensor in sorted(model.state_dict().items()):
        if tensor.is_meta:
            raise SpecError(f"weights: {name} is offloaded; name the directory of the weight files")
        plain = tensor.detach().to("cpu").contiguous().flatten()
        head = f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode()
        total.update(len(head).to_bytes(4, "little") + head)
        total.update(memoryview(plain.view(torch.uint8).numpy()))
    return total.hexdigest()


def _refuse_layers(config: PreTrainedConfig, name: str) -> None:
    layers = DynamicCache(config=config).layers
    if len(layers) != config.num_hidden_layers:
        raise SpecError(f"{name} does not keep KV once a layer: {len(layers)} caches")
    for number, layer in enumerate(layers):
        if getattr(layer, "is_sliding", False):
            raise SpecError(f"{name} has a sliding window in layer {number}: it forgets old KV")
        if type(layer) is not DynamicLayer:
            kind = type(layer).__name__
            raise SpecError(f"{name} keeps more than keys and values in layer {number} ({kind})")
    if getattr(config, "is_heterogeneous", False):
        raise SpecError(f"{name} has layers of different shapes")


def _config(config: PreTrainedConfig) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return {key: value for key, value in values.items() if key not in _CONFIG_NOISE}


def _rope(config: PreTrainedConfig) -> dict[str, Any]:
    """RoPE settings under their names of the installed version; {} for models without."""
    names = ["rope_parameters", "partial_rotary_factor"]
    if not hasattr(config, "rope_parameters"):  # transformers < 5
        names += ["rope_theta", "rope_scaling"]
    values = {name: getattr(config, name, None) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def _rope_types(rope: dict[str, Any]) -> set[str]:
    """Every rope_type (older: type) found in the settings, nested ones included."""
    found = set()
    for key, value in rope.items():
        if isinstance(value, dict):
            found |= _rope_types(value)
        elif key in ("rope_type", "type") and isinstance(value, str):
            found.add(value)
    return found
