"""What names a vLLM engine's pages: its cache spec, and per request what tokens don't say.

All of it comes from vllm_config and the KV cache config, nothing from vLLM's own hashes. What can't
be named is refused with a line. Salt, adapter and what a reset left behind are extras of page 0,
so that everything below differs too; images are extras of the pages that they touch.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvstore.engine_adapter.plan_records import Chain
from kvstore.errors import SpecError
from kvstore.page_layout import AttentionKind, KvQuantization, LayerGroup, PageLayout, ShardGeometry
from kvstore.spec import CacheSpec, canonical_json, default_page_tokens, json_digest
from kvstore.weights import weights_digest

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvstore.engine_adapter.block_regions import RegionFacts

DIGEST_BYTES = 16
COMMIT = re.compile(r"[0-9a-f]{40}", re.ASCII)
# Speculation that keeps no KV of its own beside the model's.
TOKEN_SPECULATION = frozenset({"ngram", "ngram_gpu", "[ngram]", "suffix"})
# What a config says that can't change a key or a value.
_CONFIG_NOISE = ("_name_or_path", "transformers_version", "use_cache", "torch_dtype", "dtype")
_ROPE = ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor")
_ROPE_BLIND = frozenset({"default", "linear", "llama3", "mrope"})  # whatever the longest sequence
_KV_DTYPES = {
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
    "bfloat16": "bfloat16",
    "float16": "float16",
    "half": "float16",
    "float32": "float32",
    "float": "float32",
}


def why_unservable(vllm_config: Any) -> str:
    """Why this engine's KV can't be shared; "" if it can. Its layout is another question."""
    model = vllm_config.model_config
    if getattr(model, "is_encoder_decoder", False):
        return "an encoder-decoder model: its KV depends on more than its tokens"
    if getattr(model, "runner_type", "generate") not in ("generate", "auto"):
        return f"a {model.runner_type} model: its attention may look ahead"
    speculation = getattr(vllm_config, "speculative_config", None)
    method = getattr(speculation, "method", None)
    if speculation is not None and method not in TOKEN_SPECULATION:
        return f"speculation by {method}: it keeps a draft model's KV; use ngram, or none"
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        return "KV scales are calculated at run time (calculate_kv_scales): they differ each start"
    if str(getattr(vllm_config.load_config, "load_format", "")).endswith("dummy"):
        return "the weights are dummies"
    return ""


def why_uncacheable(request: Any) -> str:
    """Why a request passes by the store, by its own nature; "" if it need not."""
    if getattr(request, "prompt_embeds", None) is not None or not request.prompt_token_ids:
        return "prompt embeddings"
    if getattr(request, "pooling_params", None) is not None:
        return "a pooling request"
    return ""


def blocks_per_page(facts: RegionFacts, page_tokens: int | None) -> int:
    """How many of the engine's blocks a page covers. SpecError if `page_tokens` doesn't divide."""
    block = facts.block_tokens
    if page_tokens is None:
        page_tokens = default_page_tokens(-(-facts.block_bytes // block), block)
    if page_tokens % block:
        raise SpecError(f"page_tokens: {page_tokens} is not a multiple of the block size {block}")
    return page_tokens // block


def find_weights(vllm_config: Any, version: str | None, memory: Path | None) -> str:
    """The `weights` field: who answers for the weights' content. Reads all of it if need be.

    version: the user's word, which alone answers then. A hub snapshot is its commit, anything else
    the digest of its files. SpecError with a line.
    """
    model = vllm_config.model_config
    if version is not None:
        named = f"{model.model}\0{version}".encode()
        return f"tensors:{hashlib.blake2b(named, digest_size=32).hexdigest()}"
    path = Path(model.model)
    if not path.exists():
        path = _hub_snapshot(model)
    resolved = path.resolve()
    if COMMIT.fullmatch(resolved.name) and resolved.parent.name == "snapshots":
        return f"hub:{resolved.name}"
    return weights_digest(path, memory)


def weights_memory() -> Path | None:
    """Where digests of weights are remembered: this user's cache, not a store's directory."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    directory = cache / "kvstore-weights"
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        return None
    return directory


def cache_spec(
    vllm_config: Any,
    kv_cache_config: Any,
    facts: RegionFacts,
    *,
    weights: str,
    vllm_version: str,
) -> CacheSpec:
    """The spec of this engine's pages; `facts` are those of whole pages. SpecError."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    tp = int(vllm_config.parallel_config.tensor_parallel_size)
    kv_dtype = _kv_dtype(str(cache.cache_dtype), str(model.dtype))
    quantized = str(cache.cache_dtype) not in ("auto", str(model.dtype).removeprefix("torch."))
    text_config = getattr(model, "hf_text_config", model.hf_config)
    page_tokens = facts.block_tokens * (facts.shard_bytes // facts.block_bytes)
    return CacheSpec(
        model=_short(str(getattr(model, "served_model_name", None) or model.model)),
        weights=weights,
        config_digest=json_digest(_settings_of(vllm_config)),
        backend=f"vllm-{vllm_version}",
        page_format=facts.page_format,
        kv_dtype=kv_dtype,
        groups=_groups(kv_cache_config, tp, facts.replicas),
        rope=canonical_json(_plain({name: getattr(text_config, name, None) for name in _ROPE})),
        page_tokens=page_tokens,
        layout=PageLayout.ENGINE,
        quantization=KvQuantization(str(cache.cache_dtype), "none")
        if quantized
        else KvQuantization.none(),
        adapter="none",  # of a request: an extra of its page 0
        geometry=ShardGeometry(1, 1, tp),
        shard_bytes=(facts.shard_bytes,) * (tp // facts.replicas),
    )


class VllmRequestView:
    """A vLLM Request as the planner sees it. `marks`: what else decides its KV, all of it."""

    def __init__(self, request: Any, page_tokens: int, marks: Mapping[str, str]) -> None:
        self.id: str = request.request_id
        self._request = request
        self._page_tokens = page_tokens
        # Prompt tokens stay; a streaming request's output is kept in part, and then others follow.
        self._prompt = np.array(request.prompt_token_ids or (), np.int32)
        salt = getattr(request, "cache_salt", None)
        named = {**marks, **({"salt": salt} if salt else {})}
        self._first = digest_of(named) if named else b""

    @property
    def length(self) -> int:
        """Tokens whose ids are known."""
        return int(self._request.num_tokens)

    def chain(self, pages: int) -> Chain:
        """The first `pages` whole pages with all that decides their KV."""
        end = pages * self._page_tokens
        tokens = self._prompt[:end]
        if len(tokens) < end:
            more = np.array(self._request.all_token_ids[len(tokens) : end], np.int32)
            tokens = np.concatenate([tokens, more])
        return Chain(tokens.astype("<i4", copy=False).tobytes(), self._extras(pages))

    def _extras(self, pages: int) -> dict[int, bytes]:
        extras: dict[int, list[Any]] = {}
        if self._first and pages:
            extras[0] = [self._first.hex()]
        size = self._page_tokens
        for feature in getattr(self._request, "mm_features", None) or ():
            at, length = int(feature.mm_position.offset), int(feature.mm_position.length)
            for page in range(at // size, min(-(-(at + length) // size), pages)):
                place = [str(feature.identifier), at - page * size, length]
                extras.setdefault(page, []).append(place)
        return {page: digest_of(what) for page, what in extras.items()}


def digest_of(value: object) -> bytes:
    """A digest of plain values, the same on every machine."""
    text = canonical_json(value).encode()
    return hashlib.blake2b(text, digest_size=DIGEST_BYTES, person=b"kvstore-extras").digest()


def adapter_digest(path: str, memory: Path | None) -> str:
    """The content of a LoRA: its weight files and its settings. SpecError. Reads all of it."""
    settings = Path(path) / "adapter_config.json"
    try:
        text = settings.read_bytes()
    except OSError as exc:
        raise SpecError(f"adapter: {settings} cannot be read ({exc.strerror})") from exc
    whole = weights_digest(path, memory).encode() + b"\0" + text
    return hashlib.blake2b(whole, digest_size=32).hexdigest()


def _hub_snapshot(model: Any) -> Path:
    try:
        from huggingface_hub import snapshot_download

        where = snapshot_download(
            model.model, revision=model.revision, local_files_only=True, allow_patterns=["*.json"]
        )
    except Exception as exc:
        raise SpecError(
            f"weights: {model.model} is neither a path nor in the hub's cache; give a "
            "weights_version that changes with them"
        ) from exc
    return Path(where)


def _groups(kv_cache_config: Any, tp: int, replicas: int) -> tuple[LayerGroup, ...]:
    """All layers as one group: block_regions has refused anything else."""
    (group,) = kv_cache_config.kv_cache_groups
    by_layer = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    each = next(iter(by_layer.values())) if by_layer else group.kv_cache_spec
    layers = tuple(range(len(by_layer or group.layer_names)))
    if "MLA" in type(each).__name__:
        return (LayerGroup(layers, AttentionKind.MLA, 1, int(each.head_size), 0),)
    heads = int(each.num_kv_heads) * tp // replicas
    value_dim = int(getattr(each, "head_size_v", None) or each.head_size)
    return (LayerGroup(layers, AttentionKind.FULL, heads, int(each.head_size), value_dim),)


def _kv_dtype(cache_dtype: str, model_dtype: str) -> str:
    name = model_dtype.removeprefix("torch.") if cache_dtype == "auto" else cache_dtype
    if name not in _KV_DTYPES:
        raise SpecError(f"kv_cache_dtype {cache_dtype}: no name for such pages here")
    return _KV_DTYPES[name]


def _settings_of(vllm_config: Any) -> dict[str, Any]:
    """Settings that may change a key or a value and are in no other field of the spec."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    config = {
        key: each for key, each in model.hf_config.to_dict().items() if key not in _CONFIG_NOISE
    }
    rope = [getattr(model.hf_config, name, None) for name in ("rope_scaling", "rope_parameters")]
    return {
        "config": _plain(config),
        "overrides": _plain(getattr(model, "hf_overrides", None)),
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "kv_skip_layers": _plain(getattr(cache, "kv_cache_dtype_skip_layers", None)),
        # Some RoPE scalings depend on the longest sequence that the engine was started for.
        "max_model_len": int(model.max_model_len) if any(map(_sees_length, rope)) else 0,
        "override_attention_dtype": str(getattr(model, "override_attention_dtype", None)),
    }


def _sees_length(rope: Any) -> bool:
    """Whether RoPE of these parameters (of all layers, or by kind of layer) may depend on it."""
    if not isinstance(rope, dict) or not rope:
        return False
    kind = rope.get("rope_type", rope.get("type"))
    if kind is None:
        by_layer = [each for each in rope.values() if isinstance(each, dict)]
        return any(map(_sees_length, by_layer)) if by_layer else "factor" in rope
    return kind not in _ROPE_BLIND


def _plain(value: Any) -> Any:
    """As JSON would have it; what JSON lacks by its text. None values are left out."""
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items() if each is not None}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, set | frozenset):
        return sorted(json.dumps(_plain(each), sort_keys=True) for each in value)
    if value is None or isinstance(value, bool | int | str):
        return value
    if callable(value):
        raise SpecError(f"config_digest: {value!r} is a function, whose effect has no name")
    return repr(value)


def _short(text: str) -> str:
    printable = "".join(each for each in text if each.isprintable())
    return printable[-200:] or "unnamed"
