"""Asks a model itself whether equal prefixes give equal KV, with two short forward passes.

A config can't tell all: a model may look ahead, or count positions from the padding. Both would
make stored KV wrong without any error, so the adapter tries before it trusts. Must not be here:
what a config can tell (model_spec.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers import GenerationConfig
from transformers.cache_utils import DynamicCache

from kvstore.engine_adapter.model_spec import CACHE_ARGUMENT
from kvstore.errors import SpecError

if TYPE_CHECKING:
    from kvstore.engine_adapter.layout import LayerKv, PageShape
    from kvstore.engine_adapter.model_spec import HfModel

SHARED_TOKENS = 8
LATER_TOKENS = 8
PADDING_TOKENS = 24
# The first layer shows positions, the second what the first attended to; deeper ones only add
# rounding. Relative error allowed in them: some units in the last place of the dtype.
LAYERS_COMPARED = 2
ERROR_ULPS = 8.0
ERROR_MIN = 1e-3


def probe_model(model: HfModel, shape: PageShape) -> None:
    """Raise SpecError if KV is not as `shape` says, or not decided by a token's own prefix.

    Computes SHARED_TOKENS alone, and again in a batch: once followed by other tokens, once behind
    left padding. Changes nothing. About the cost of generating two tokens.
    """
    name = type(model).__name__
    shared, later = SHARED_TOKENS, LATER_TOKENS + PADDING_TOKENS
    tokens = torch.arange(1, 1 + shared + later) * 7 % model.config.vocab_size
    alone = tokens[None, :shared]
    padding = torch.zeros(PADDING_TOKENS, dtype=torch.long)
    padded = torch.cat([padding, tokens[:shared], tokens[-LATER_TOKENS:]])
    batch = torch.stack([tokens, padded])
    mask = torch.ones_like(batch)
    mask[1, :PADDING_TOKENS] = 0
    try:
        one = _on_cpu(prefill(model, alone, torch.ones_like(alone)))
        two = _on_cpu(prefill(model, batch, mask))
    except Exception as exc:
        raise SpecError(f"{name} could not be tried: {type(exc).__name__}: {exc}") from exc
    if len(one) != shape.layers or not all(shape.holds(*layer) for layer in one):
        found = (
            f"{len(one)} layers of {one[0][0].dtype} {tuple(one[0][0].shape)}" if one else "none"
        )
        raise SpecError(f"{name}: its KV is not what its config says: {found}")
    for layer in range(min(LAYERS_COMPARED, shape.layers)):
        for kind in (0, 1):
            expected = one[layer][kind][0]
            followed = two[layer][kind][0, :, :shared]
            behind = two[layer][kind][1, :, PADDING_TOKENS : PADDING_TOKENS + shared]
            if not _close(expected, followed):
                raise SpecError(f"{name}: the KV of its tokens depends on tokens after them")
            if not _close(expected, behind):
                raise SpecError(f"{name}: the KV of its tokens depends on padding before them")


def prefill(model: HfModel, tokens: torch.Tensor, mask: torch.Tensor) -> list[LayerKv]:
    """Keys and values of each layer after the forward pass that generate() makes of `tokens`."""
    cache = DynamicCache(config=model.config)
    settings = GenerationConfig(  # type: ignore[no-untyped-call]  # transformers leaves it untyped
        max_new_tokens=1, do_sample=False, num_beams=1, num_return_sequences=1, pad_token_id=0
    )
    arguments = {"attention_mask": mask.to(model.device), CACHE_ARGUMENT: cache}
    model.generate(tokens.to(model.device), generation_config=settings, **arguments)
    width = tokens.shape[1]
    layers: list[Any] = list(cache.layers)
    return [(each.keys[:, :, :width], each.values[:, :, :width]) for each in layers]


def _on_cpu(layers: list[LayerKv]) -> list[LayerKv]:
    return [(keys.cpu(), values.cpu()) for keys, values in layers]


def _close(expected: torch.Tensor, found: torch.Tensor) -> bool:
    allowed = max(ERROR_MIN, ERROR_ULPS * torch.finfo(expected.dtype).eps)
    difference = torch.linalg.vector_norm(expected.double() - found.double())
    return bool(difference <= allowed * torch.linalg.vector_norm(expected.double()))
