"""A Cache for Hugging Face generate() that is born with a stored prefix and can be saved.

Made by TransformersAdapter.cache() for one generate() call; see transformers_adapter.py for how.
What it saves is right because it watches what the engine does to it: columns that were reordered,
cropped or filled out of turn are not saved. Must not be here: look-ups, how a page lies in memory.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers.cache_utils import DynamicCache

from kvstore.engine_adapter.layout import PageShape
from kvstore.engine_adapter.model_spec import CACHE_ARGUMENT
from kvstore.engine_adapter.page_copier import PageCopier
from kvstore.engine_adapter.prefix_load import StoredLayer
from kvstore.errors import InvalidRequest
from kvstore.kernels.paged_kv import page_tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from kvstore.engine_adapter.model_spec import HfModel
    from kvstore.engine_adapter.prefix_load import PrefixLoad
    from kvstore.hints import Hints
    from kvstore.interface import ReservationLike, SessionLike
    from kvstore.reservation import Commit

log = logging.getLogger("kvstore.engine_adapter")


@dataclass(frozen=True, slots=True)
class Saved:
    """What one save() did, over all rows of the batch."""

    pages: int = 0  # new in the store
    durable: bool = False  # they and all before them are on disk
    reason: str = ""  # why nothing, or less than asked


@dataclass(frozen=True, slots=True)
class AdapterCounters:
    """What an adapter did since it was made; each only grows."""

    hits: int = 0  # rows that started with stored tokens
    misses: int = 0
    tokens_reused: int = 0
    tokens_computed: int = 0  # prompt tokens that the engine had to compute
    pages_saved: int = 0
    loads_failed: int = 0  # the store failed; all rows became misses
    saves_failed: int = 0
    bypassed: int = 0  # calls that must not load, or not save
    load_s: float = 0.0
    pages_from_host: int = 0
    pages_from_device: int = 0  # of the pool that `device_bytes` makes: no copy from the host


@dataclass(frozen=True, slots=True)
class Row:
    """One prompt of a batch: its padding, then its tokens."""

    padding: int
    tokens: NDArray[np.int32]


class StoreLink:
    """What an adapter and its caches share: the model, the session, how the store behaves."""

    def __init__(self, model: HfModel, session: SessionLike) -> None:
        self.model = model
        self.session = session
        self.shape = PageShape.of(session.spec)
        self._lock = threading.Lock()
        self._counters = AdapterCounters()
        self._failing: set[str] = set()
        self._copiers = threading.local()
        self.abandoned: deque[Callable[[], None]] = deque()

    def copier(self, device: torch.device) -> PageCopier:
        """This thread's copier for a device."""
        made: dict[str, PageCopier] = self._copiers.__dict__
        name = str(device)
        if name not in made:
            made[name] = PageCopier(self.shape, device)
        return made[name]

    def load_failed(self, error: Exception) -> None:
        """Count and log it."""
        self.count(loads_failed=1)
        self.store_failed("loading", error)

    def release_abandoned(self) -> None:
        """Let go of the pages of caches that are gone and had not used them up."""
        while self.abandoned:
            self.abandoned.popleft()()

    def counters(self) -> AdapterCounters:
        """A snapshot."""
        with self._lock:
            return self._counters

    def count(self, **added: float) -> None:
        """Add to counters by name."""
        with self._lock:
            now = {name: getattr(self._counters, name) + value for name, value in added.items()}
            self._counters = replace(self._counters, **now)

    def store_failed(self, doing: str, error: Exception | None) -> None:
        """Note how `doing`, loading or saving, went this time; one log line a change."""
        with self._lock:
            changed = (doing in self._failing) != (error is not None)
            (self._failing.discard if error is None else self._failing.add)(doing)
        if changed and error is not None:
            log.warning("%s fails, going on without: %s: %s", doing, type(error).__name__, error)
        elif changed:
            log.warning("%s works again", doing)


class StoredPrefixCache(DynamicCache):
    """A DynamicCache for one generate() call, born with a stored prefix. Made by the adapter.

    Pass `arguments()` to generate(): the cache is only right together with the mask in it.
    """

    def __init__(
        self,
        link: StoreLink,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        rows: Sequence[Row],
        load: PrefixLoad | None = None,
        bypass_reason: str = "",
    ) -> None:
        super().__init__(config=link.model.config)
        self.find_s = 0.0
        # Pages reused, by the tier they were found in.
        self.tiers: dict[str, int] = {} if load is None else load.tiers
        self.bypass_reason = bypass_reason
        self._link = link
        self._load = load
        self._prompt = input_ids
        self._mask = attention_mask
        self._rows = rows
        self._loaded_columns = load.columns if load is not None else 0
        # Columns before this one belong to the tokens of the output, for all we saw happen.
        self._sound_columns: int | None = None
        self._saved = bool(bypass_reason)
        self.reused_tokens = [max(0, self._loaded_columns - row.padding) for row in rows]
        if load is not None:
            self.layers = [StoredLayer(load, number) for number in range(link.shape.layers)]

    @property
    def load_s(self) -> float:
        """Seconds spent until now: layers are fetched when the model comes to them."""
        return self.find_s + (0.0 if self._load is None else self._load.seconds)

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments for generate(): this cache, under its name there, and its mask."""
        return {CACHE_ARGUMENT: self, "attention_mask": self._mask}

    def save(
        self, output_ids: torch.Tensor, *, durable: bool = False, hints: Hints | None = None
    ) -> Saved:
        """Store the whole pages of prompt and generated tokens that the store lacks.

        output_ids: what generate() returned, [batch, prompt + new tokens]. With `durable`, returns
        when all of them are on disk, or says why not. `hints`: what is known of them, for what
        leaves the store first. Never raises for what the store does; does nothing the second time.
        """
        if self._saved:
            return Saved(reason=self.bypass_reason or "saved already")
        self._saved = True
        link = self._link
        reason = self._why_unsound(output_ids)
        if reason:
            link.count(bypassed=1)
            log.info("not saved: %s", reason)
            return Saved(reason=reason)
        try:
            saved = self._save_rows(output_ids, durable, hints)
        except Exception as error:  # a store that fails saves nothing, and the engine goes on
            link.count(saves_failed=1)
            link.store_failed("saving", error)
            return Saved(reason=f"the store failed: {type(error).__name__}: {error}")
        link.store_failed("saving", None)
        link.count(pages_saved=saved.pages)
        return saved

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As DynamicCache; repeats the loaded rows when generate() has expanded the batch.

        Raises InvalidRequest when more of the prompt comes than is missing after the loaded part.
        """
        before, more = self.get_seq_length(layer_idx), key_states.shape[2]
        width = self._prompt.shape[1]
        if self._loaded_columns and before < width < before + more:
            raise InvalidRequest(
                "the whole prompt is computed again after its loaded prefix, as assisted decoding "
                "does; make the cache with load=False for it"
            )
        if before and not self._fetches(layer_idx, key_states):
            layer = self._layer(layer_idx)
            rows, wanted = layer.keys.shape[0], key_states.shape[0]
            if rows != wanted and rows == len(self._rows) and wanted % rows == 0:
                layer.batch_repeat_interleave(wanted // rows)
            if layer.keys.device != key_states.device:
                layer.keys = layer.keys.to(key_states.device)
                layer.values = layer.values.to(key_states.device)
        if more > 1 and before + more > width:
            self._sound_until(max(before, width))  # guesses of an assistant, or a second turn
        both: tuple[torch.Tensor, torch.Tensor] = super().update(
            key_states, value_states, layer_idx, *args, **kwargs
        )
        return both

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """As DynamicCache; only the prompt's columns can be saved afterwards."""
        groups = torch.arange(len(beam_idx)) // max(1, len(beam_idx) // max(1, len(self._rows)))
        moved = groups[beam_idx.to("cpu")] != groups
        self._sound_until(0 if bool(moved.any()) else self._prompt.shape[1])
        super().reorder_cache(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """As DynamicCache; nothing can be saved afterwards."""
        self._sound_until(0)
        super().batch_select_indices(indices)

    def crop(self, *args: Any, **kwargs: Any) -> None:
        """As DynamicCache; only columns that were never cropped can be saved afterwards."""
        super().crop(*args, **kwargs)
        self._sound_until(self.get_seq_length())

    def reset(self) -> None:
        """As DynamicCache; nothing can be saved afterwards."""
        self._sound_until(0)
        super().reset()  # type: ignore[no-untyped-call]  # transformers leaves it untyped

    def _fetches(self, number: int, key_states: torch.Tensor) -> bool:
        """Whether this update gets a layer from the store as it is to be."""
        layer = self._layer(number)
        pending = isinstance(layer, StoredLayer) and layer.is_pending
        return pending and key_states.shape[0] == len(self._rows)

    def _layer(self, number: int) -> Any:
        # Always a DynamicLayer: model_spec refuses models with others. Its types say less.
        return self.layers[number]

    def _sound_until(self, columns: int) -> None:
        known = self._sound_columns
        self._sound_columns = columns if known is None else min(known, columns)

    def _why_unsound(self, output_ids: torch.Tensor) -> str:
        """Why the KV in here must not be stored as that of these tokens; "" if it may."""
        batch, width = self._prompt.shape
        if output_ids.ndim != 2 or output_ids.shape[1] < width or output_ids.shape[0] % batch:
            return f"output ids of shape {tuple(output_ids.shape)} for a prompt of {batch, width}"
        prompt = self._prompt.repeat_interleave(output_ids.shape[0] // batch, dim=0)
        if not torch.equal(output_ids[:, :width].to(prompt.device), prompt):
            return "the output does not begin with the prompt that the cache was made for"
        if len(self.layers) != self._link.shape.layers:
            return f"{len(self.layers)} layers, the spec says {self._link.shape.layers}"
        columns = self.get_seq_length()
        for number in range(len(self.layers)):
            layer = self._layer(number)
            if self.get_seq_length(number) != columns or not columns:
                return "no tokens were computed, or not in every layer"
            if not self._link.shape.holds(layer.keys, layer.values):
                shape = tuple(layer.keys.shape)
                return f"KV of layer {number} is {layer.keys.dtype} {shape}, not as in the spec"
            if layer.keys.shape[0] % batch:
                return f"{layer.keys.shape[0]} rows of KV for a batch of {batch}"
        return ""

    def _save_rows(self, output_ids: torch.Tensor, durable: bool, hints: Hints | None) -> Saved:
        columns = min(self.get_seq_length(), output_ids.shape[1])
        kept, returned = self._layer(0).keys.shape[0], output_ids.shape[0]
        sound = columns if self._sound_columns is None else min(columns, self._sound_columns)
        if kept != returned:  # beams: rows of the output are not rows of the cache
            sound = min(sound, self._prompt.shape[1])
        outputs = output_ids.to("cpu").numpy().astype(np.int32)
        each = kept // len(self._rows)
        results = []
        for number in range(kept):
            row = self._rows[number // each]
            tokens = outputs[number * returned // kept, row.padding : sound]
            whole = self._whole_pages(tokens, len(row.tokens))
            if len(whole):
                results.append(self._save_row(number, row.padding, whole, durable))
                if hints is not None:
                    hints.give(self._link.session, whole)
        return Saved(
            sum(each.pages for each in results),
            durable and bool(results) and all(each.durable for each in results),
            "; ".join(dict.fromkeys(each.reason for each in results if each.reason)),
        )

    def _save_row(
        self, number: int, padding: int, tokens: NDArray[np.int32], durable: bool
    ) -> Saved:
        """In one run; in several where a server's memory for writing holds only part of it."""
        pages = 0
        while True:
            with self._link.session.reserve(tokens) as run:
                if not run.count and run.reason != "present":
                    return Saved(pages, reason=run.reason)
                done = self._save_run(number, padding, run, durable)
                pages += done.pages
                if run.reason != "limit" or not done.pages:
                    reason = "" if run.reason == "present" else run.reason
                    return Saved(pages, done.durable, done.reason or reason)

    def _save_run(self, number: int, padding: int, run: ReservationLike, durable: bool) -> Commit:
        shape = self._link.shape
        start = padding + run.start * shape.page_tokens
        stop = start + run.count * shape.page_tokens
        pages = [page_tensor(view) for view in run.views()]
        columns = slice(start, stop)
        copiers = []
        for first, layers in self._layers_together(len(pages)):
            copiers.append(self._link.copier(layers[0].keys.device))
            both = [(each.keys[number], each.values[number]) for each in layers]
            copiers[-1].save(
                first, [(k[:, columns].detach(), v[:, columns].detach()) for k, v in both], pages
            )
        for copier in copiers:
            copier.finish()
        return run.commit(durable=durable)

    def _layers_together(self, pages: int) -> Iterator[tuple[int, list[Any]]]:
        """Neighbouring layers on one device, as many as are worth copying at once."""
        first, count = 0, len(self.layers)
        while first < count:
            device = self._layer(first).keys.device
            most = self._link.copier(device).layers_together(pages, saving=True)
            stop = first + 1
            while stop < min(count, first + most) and self._layer(stop).keys.device == device:
                stop += 1
            yield first, [self._layer(number) for number in range(first, stop)]
            first = stop

    def _whole_pages(self, tokens: NDArray[np.int32], prompt: int) -> NDArray[np.int32]:
        """Whole pages of a row, up to its first end token after the prompt: the rest is filling."""
        ends = np.isin(tokens[prompt:], end_tokens(self._link.model))
        if ends.any():
            tokens = tokens[: prompt + int(ends.argmax()) + 1]
        size = self._link.shape.page_tokens
        return tokens[: len(tokens) // size * size]


def end_tokens(model: HfModel) -> list[int]:
    """The model's end-of-sequence tokens."""
    ends = model.generation_config.eos_token_id
    return [] if ends is None else ends if isinstance(ends, list) else [int(ends)]
