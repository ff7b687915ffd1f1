"""How large the KV of a model is, from its config.json: bytes a token, page sizes, what fits.

Pure. Follows what transformers and vLLM store: two vectors a KV head, layer and token; for MLA one
latent and the rotary part of the key; layers with a sliding window keep no more than the window.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from kvstore.errors import InvalidRequest
from kvstore.page_layout import KV_DTYPE_BYTES
from kvstore.spec import default_page_tokens

if TYPE_CHECKING:
    from collections.abc import Mapping

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Sizes of one model's KV."""

    model: str
    attention: str  # "mha", "gqa", "mqa", "mla"
    layers: int
    kv_heads: int
    head_dim: int
    kv_dtype: str
    sliding_layers: int
    sliding_window: int | None
    bytes_per_token: int
    tokens_per_gib: int
    page_tokens: int
    page_bytes: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def model_size(
    config: Mapping[str, Any], *, kv_dtype: str | None = None, block_tokens: int = 16
) -> ModelSize:
    """The sizes of a model with this config.json; InvalidRequest names what it lacks.

    block_tokens: of the engine, of which a page has a whole number.
    """
    text = config.get("text_config")
    inner: Mapping[str, Any] = text if isinstance(text, dict) else config
    dtype = kv_dtype or str(_first(inner, config, "dtype", "torch_dtype") or "bfloat16")
    dtype = dtype.removeprefix("torch.")
    if dtype not in KV_DTYPE_BYTES or dtype == "none":
        known = ", ".join(name for name in KV_DTYPE_BYTES if name != "none")
        raise InvalidRequest(f"dtype {dtype!r}: one of {known} is needed; say --kv-dtype")
    layers = _count(inner, "num_hidden_layers", "n_layer", "num_layers")
    heads = _count(inner, "num_attention_heads", "n_head", "num_heads")
    latent = inner.get("kv_lora_rank")
    if latent:
        dim = int(latent) + int(inner.get("qk_rope_head_dim") or 0)
        kv_heads, per_layer, attention = 1, dim, "mla"
    else:
        kv_heads = int(_first(inner, {}, "num_key_value_heads", "num_kv_heads") or heads)
        hidden_dim = inner.get("head_dim")
        if not hidden_dim:
            hidden_dim = _count(inner, "hidden_size", "n_embd", "d_model") // heads
        dim = int(hidden_dim)
        per_layer = 2 * kv_heads * dim
        attention = "mha" if kv_heads == heads else "mqa" if kv_heads == 1 else "gqa"
    size = layers * per_layer * KV_DTYPE_BYTES[dtype]
    page_tokens = default_page_tokens(size, block_tokens)
    sliding, window = _sliding(inner, layers)
    return ModelSize(
        model=str(config.get("_name_or_path") or config.get("model_type") or "?"),
        attention=attention,
        layers=layers,
        kv_heads=kv_heads,
        head_dim=dim,
        kv_dtype=dtype,
        sliding_layers=sliding,
        sliding_window=window,
        bytes_per_token=size,
        tokens_per_gib=GIB // size,
        page_tokens=page_tokens,
        page_bytes=page_tokens * size,
    )


def _sliding(config: Mapping[str, Any], layers: int) -> tuple[int, int | None]:
    window = config.get("sliding_window")
    if not window or config.get("use_sliding_window") is False:
        return 0, None
    kinds = config.get("layer_types")
    if isinstance(kinds, list):
        return sum(kind == "sliding_attention" for kind in kinds), int(window)
    return layers, int(window)


def _first(config: Mapping[str, Any], other: Mapping[str, Any], *names: str) -> Any:
    for name in names:
        for each in (config, other):
            if each.get(name) is not None:
                return each[name]
    return None


def _count(config: Mapping[str, Any], *names: str) -> int:
    found = _first(config, {}, *names)
    if not isinstance(found, int) or isinstance(found, bool) or found < 1:
        raise InvalidRequest(f"config.json: {' or '.join(names)} is missing or no whole number")
    return found
