"""Joins a Hugging Face model and a store: generate() computes only what the store lacks.

    adapter = TransformersAdapter(store, model)
    output = adapter.generate(input_ids, attention_mask, max_new_tokens=100)

or, with the engine's call in sight:

    cache = adapter.cache(input_ids, attention_mask)
    output = model.generate(input_ids, **cache.arguments(), max_new_tokens=100)
    cache.save(output)

With left padding the columns of a batch are aligned at their right end, so the rows' hits end in
different columns. All rows share one cache length: the smallest of these columns is where
computing starts, and the padding before a row's first token is zeros that the mask hides.

        column   0   1   2   3   4   5   6   7
        row 0    t0  t1  t2  t3  t4  t5  t6  t7      4 tokens stored -> until column 4
        row 1    -   -   t0  t1  t2  t3  t4  t5      4 tokens stored -> until column 6
        loaded   |-------------|  = [0, 4), of row 1's page only the first two tokens

Whatever the store does, the engine's call goes on: a failing load is a miss, a failing save saves
nothing, both are counted. Must not be here: how a page lies in memory, which models can be served.
"""

from __future__ import annotations

import inspect
import logging
import time
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import transformers

from kvstore.connect import connect
from kvstore.device_pages import DevicePages
from kvstore.engine_adapter.layout import PageShape
from kvstore.engine_adapter.model_probe import probe_model
from kvstore.engine_adapter.model_spec import model_spec, refuse_unservable, tensors_digest
from kvstore.engine_adapter.prefix_finder import PrefixFinder
from kvstore.engine_adapter.transformers_cache import (
    AdapterCounters,
    Row,
    StoredPrefixCache,
    StoreLink,
    end_tokens,
)
from kvstore.errors import InvalidRequest
from kvstore.quantized_session import quantized_session

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstore.engine_adapter.model_spec import HfModel
    from kvstore.engine_adapter.prefix_load import PrefixLoad
    from kvstore.hints import Hints
    from kvstore.interface import SessionLike, StoreLike

log = logging.getLogger("kvstore.engine_adapter")

LOAD_DEADLINE_S = 2.0

# Arguments of generate(), or settings, with which it computes the whole prompt again behind a
# prefix that its cache has: they make it guess tokens ahead, or (before version 5) go in chunks.
_NO_PREFIX = [
    "assistant_model",
    "prompt_lookup_num_tokens",
    "assistant_early_exit",
    "speculation_type",
]
if int(transformers.__version__.split(".")[0]) < 5:
    _NO_PREFIX.append("prefill_chunk_size")
# Arguments of generate() that name another cache.
_CACHE_CHOICES = ("cache", "past_key_values", "cache_implementation", "cache_config")


class TransformersAdapter:
    """Joins one model and one open store. Keeps no tokens and no KV of its own; thread-safe.

    store: an open one, in this process or in a server; or where one is (a directory, a kvstore://
    address), which is then connected to, and left at close().
    weights: None reads the model's tensors (about a second a GB, right in every case); a string is
    taken as the answer ("hub:<commit>", "files:<digest>"), also about edits made in memory. Weights
    that change later need a new adapter.
    quantization: "fp8", "int8" or "int4" keep pages smaller, and change tokens; such pages are only
    found by adapters that name the same.
    device_bytes: memory on the model's device for pages that are asked for again and again: from
    there a hit needs no copy from the host. 0, the default, is none: on a CPU it is a second copy
    in the same memory, and on a GPU only you know what batch and context leave free.
    Raises SpecError, with a sentence, for models whose KV cannot be stored.
    """

    def __init__(
        self,
        store: StoreLike | str | Path,
        model: HfModel,
        *,
        weights: str | None = None,
        name: str | None = None,
        tenant: str = "default",
        salt: bytes = b"",
        writer: str = "transformers",
        page_tokens: int | None = None,
        adapter_digest: str = "none",
        quantization: str = "none",
        load_deadline_s: float = LOAD_DEADLINE_S,
        device_bytes: int = 0,
    ) -> None:
        refuse_unservable(model)  # before its weights are read
        self.model = model
        self.spec = model_spec(
            model,
            weights=weights or f"tensors:{tensors_digest(model)}",
            name=name,
            page_tokens=page_tokens,
            adapter=adapter_digest,
        )
        shape = PageShape.of(self.spec)
        probe_model(model, shape)
        self.device_pages: DevicePages | None = None
        if device_bytes:
            devices = {parameter.device for parameter in model.parameters()}
            if len(devices) > 1:
                raise InvalidRequest(f"device_bytes: the model lies on {len(devices)} devices")
            self.device_pages = DevicePages(device_bytes, model.device, shape.page_bytes)
        opened = connect(store) if isinstance(store, str | Path) else store
        self._own_store = opened if opened is not store else None
        try:
            chosen: dict[str, Any] = {"tenant": tenant, "salt": salt, "writer": writer}
            self.session: SessionLike = (
                opened.session(self.spec, **chosen)
                if quantization == "none"
                else quantized_session(opened, self.spec, quantization, **chosen)
            )
        except BaseException:
            if self._own_store is not None:
                self._own_store.close()
            raise
        self.load_deadline_s = load_deadline_s
        self._link = StoreLink(model, self.session)
        self._loads: weakref.WeakSet[PrefixLoad] = weakref.WeakSet()

    def cache(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        load: bool = True,
    ) -> StoredPrefixCache:
        """A cache that holds the longest stored prefix, for one generate() call on these inputs.

        input_ids: [batch, tokens]. attention_mask: the same shape, left padding only; without one,
        it is inferred from the padding token as generate() does. At least one column is left for
        the engine to compute. What cannot be served (other masks) gets an empty cache that saves
        nothing. Without `load` it starts empty, for assisted decoding, which cannot go on from a
        prefix (it computes the whole prompt again). Raises InvalidRequest only for shapes that
        generate() would not take either.
        """
        if input_ids.ndim != 2 or input_ids.shape[1] == 0:
            raise InvalidRequest(f"input_ids: shape {tuple(input_ids.shape)}; [batch, tokens >= 1]")
        mask = self._inferred_mask(input_ids) if attention_mask is None else attention_mask
        reason = self._why_bypass(input_ids, mask)
        rows = [] if reason else _rows(input_ids, mask)
        self._link.release_abandoned()
        start_s = time.perf_counter()
        found = self._find(rows, input_ids, mask) if load else None
        cache = StoredPrefixCache(self._link, input_ids, mask, rows, found, reason)
        cache.find_s = time.perf_counter() - start_s
        reused = sum(cache.reused_tokens)
        hits = sum(tokens > 0 for tokens in cache.reused_tokens)
        self._link.count(
            hits=hits,
            misses=len(rows) - hits,
            tokens_reused=reused,
            tokens_computed=sum(len(row.tokens) for row in rows) - reused,
            bypassed=int(bool(reason)),
            load_s=cache.find_s,
        )
        return cache

    def generate(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        durable: bool = False,
        hints: Hints | None = None,
        **arguments: Any,
    ) -> Any:
        """model.generate() between a load and a save; returns what it returns.

        hints: what is known of prompt and answer, once they are stored: kvstore.Hints.
        Arguments that reach the model's forward pass and may change KV (position ids, embeddings,
        images) make it a plain generate() call. Raises InvalidRequest if a cache is given.
        """
        for name in _CACHE_CHOICES:
            if arguments.get(name) is not None:
                raise InvalidRequest(f"{name}: the adapter makes the cache; use model.generate()")
        unknown = sorted(set(arguments) - _harmless_arguments(self.model))
        if unknown or arguments.get("use_cache") is False:
            self._link.count(bypassed=1)
            log.info("not cached: %s may change the KV", ", ".join(unknown) or "use_cache=False")
            return self.model.generate(input_ids, attention_mask=attention_mask, **arguments)
        cache = self.cache(input_ids, attention_mask, load=takes_prefix(self.model, arguments))
        output = self.model.generate(input_ids, **cache.arguments(), **arguments)
        cache.save(
            output if isinstance(output, torch.Tensor) else output.sequences,
            durable=durable,
            hints=hints,
        )
        return output

    def hint(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        hints: Hints,
    ) -> int:
        """Tell the store what is known of these prompts, say from a queue; how many pages it has.

        0, and counted, where the store fails.
        """
        mask = self._inferred_mask(input_ids) if attention_mask is None else attention_mask
        return self._tell(
            lambda: sum(hints.give(self.session, row.tokens) for row in _rows(input_ids, mask))
        )

    def end_conversation(self, name: str) -> int:
        """The pages that are only this conversation's leave the store first; how many they are."""
        return self._tell(lambda: self.session.end_conversation(name))

    def _tell(self, tell: Callable[[], int]) -> int:
        try:
            return tell()
        except InvalidRequest:
            raise
        except Exception as error:  # a hint is never the engine's problem
            self._link.store_failed("hinting", error)
            return 0

    def counters(self) -> AdapterCounters:
        """A snapshot."""
        return self._link.counters()

    def close(self) -> None:
        """End the session; caches made before go on working, without saving."""
        for load in list(self._loads):
            load.finish()
        self._link.release_abandoned()
        if self.device_pages is not None:
            self.device_pages.close()
        self.session.close()
        if self._own_store is not None:
            self._own_store.close()

    def _inferred_mask(self, input_ids: torch.Tensor) -> torch.Tensor:
        """The mask that generate() makes up when it is given none."""
        settings = self.model.generation_config
        padding = settings.pad_token_id
        ends = end_tokens(self.model)
        if padding is None or padding in ends or not bool((input_ids == padding).any()):
            return torch.ones_like(input_ids)
        return input_ids.ne(padding).long()

    def _why_bypass(self, input_ids: torch.Tensor, mask: torch.Tensor) -> str:
        if self.model.training:
            return "the model is in training mode"
        if mask.shape != input_ids.shape:
            return f"an attention mask of shape {tuple(mask.shape)} is not understood"
        flags = mask != 0
        if not bool((flags[:, 1:] >= flags[:, :-1]).all()):
            return "the attention mask has gaps or padding on the right"
        if bool((input_ids < 0).any()):
            return "token ids below 0"
        return ""

    def _find(
        self, rows: Sequence[Row], input_ids: torch.Tensor, mask: torch.Tensor
    ) -> PrefixLoad | None:
        """The stored prefix of all rows; None when nothing is stored or the store fails."""
        if not rows:
            return None
        finder = PrefixFinder(
            self._link, rows, input_ids, mask, self.device_pages, self.load_deadline_s
        )
        try:
            load = finder.find()
        except Exception as error:  # a store that fails is a miss, never the engine's problem
            self._link.load_failed(error)
            return None
        self._link.store_failed("loading", None)
        if load is not None:
            self._loads.add(load)
        return load


def _harmless_arguments(model: HfModel) -> set[str]:
    """Arguments of generate() that decide which tokens come, and not what their KV is."""
    own = set(inspect.signature(model.generate).parameters) | set(vars(model.generation_config))
    return own - {"inputs", "kwargs", "custom_generate", "negative_prompt_ids"}


def takes_prefix(model: HfModel, arguments: dict[str, Any]) -> bool:
    """Whether generate() goes on from a prefix in its cache, called like this."""
    settings = arguments.get("generation_config") or model.generation_config
    return all(
        arguments.get(name) is None and getattr(settings, name, None) is None for name in _NO_PREFIX
    )


def _rows(input_ids: torch.Tensor, mask: torch.Tensor) -> list[Row]:
    ids = input_ids.to("cpu").numpy().astype(np.int32)
    paddings = (mask == 0).sum(dim=1).tolist()
    return [Row(padding, row[padding:]) for padding, row in zip(paddings, ids, strict=True)]
