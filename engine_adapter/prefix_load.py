"""A stored prefix on its way into a cache, layer by layer: each is copied when its turn comes.

On a GPU the layers after the one that was asked for are copied already while it computes. The pages
stay leased until the last layer is in place. Invariant: what take() gives is right. Pages that
turn out to have moved under a copy are not used: the model then computes the prefix again, for
this layer and all later ones. Must not be here: look-ups, which pages, how bytes are moved.
"""

from __future__ import annotations

import threading
import time
import weakref
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import DynamicLayer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstore.engine_adapter.layout import LayerKv, PageShape
    from kvstore.engine_adapter.prefix_finder import HeldPages


class PagesMoved(Exception):
    """Pages were not those of the match any more when they had been copied."""


@dataclass(frozen=True, slots=True)
class RowPages:
    """Where a row of the batch begins, and the pages of its tokens from there on."""

    padding: int
    pages: Sequence[torch.Tensor]


@dataclass(slots=True)
class _Ready:
    both: torch.Tensor  # [2 (K, V), rows, heads, columns and more, dim]
    event: Any


class PrefixLoad:
    """Columns [0, columns) of every row of a batch, for one cache. Thread-safe."""

    def __init__(
        self,
        shape: PageShape,
        columns: int,
        rows: Sequence[RowPages],
        source: HeldPages,
        tiers: dict[str, int],
    ) -> None:
        self.columns = columns
        self.tiers = tiers  # how many pages were found where
        self.seconds = 0.0  # that the engine waited
        self.device = source.device
        self.rows = len(rows)
        self._shape = shape
        self._pages = rows
        self._paddings = [min(row.padding, columns) for row in rows]
        self._source = source
        self._ready: dict[int, _Ready] = {}
        self._begun = 0  # layers
        self._taken = 0
        self._again: Sequence[LayerKv] = ()
        self._lock = threading.Lock()  # the adapter may be closed by another thread than computes
        self._last: list[Any] = [None]  # the event behind all copies until now
        # Nobody knows in the middle of what the last reference is dropped: only note it then.
        let_go = partial(_let_go, source.release, self._last)
        self._open = weakref.finalize(self, source.abandoned, let_go)
        self._open.atexit = False

    def take(self, number: int, device: torch.device, more: int = 0) -> LayerKv:
        """Keys and values of a layer, [rows, heads, columns + more, dim], each layer once.

        The last `more` columns are the caller's to fill.
        """
        start = time.perf_counter()
        with self._lock:
            both = self._take(number, device, more)
        taken_s = time.perf_counter() - start
        self.seconds += taken_s
        self._source.took(taken_s)
        return both[0], both[1]

    def finish(self) -> None:
        """Copy what is missing, and let the pages go."""
        with self._lock:
            while self._begun < self._shape.layers and not self._again:
                self._begin_or_fail(self._begun, self.device, 0)
            self._close()

    def _take(self, number: int, device: torch.device, more: int) -> torch.Tensor:
        while number >= self._begun and not self._again:
            self._begin_or_fail(self._begun, device, more)
        if number not in self._ready:
            self._ready[number] = _Ready(self._recomputed(number, device), None)
        elif device.type == "cuda" and self._begun < self._shape.layers and not self._again:
            self._begin_or_fail(self._begun, device, more)
        ready = self._ready.pop(number)
        if ready.event is not None:
            computing = torch.cuda.current_stream(device)
            computing.wait_event(ready.event)
            ready.both.record_stream(computing)
        self._taken += 1
        if self._taken == self._shape.layers:
            self._close()
        return self._widened(ready.both, self.columns + more)

    def _close(self) -> None:
        self._pages = ()
        if self._open.detach() is not None:
            self._source.release(self._last[0])

    def _begin_or_fail(self, number: int, device: torch.device, more: int) -> None:
        try:
            self._begin(number, device, more)
        except Exception as error:  # whatever the store does, the engine's call goes on
            self._source.failed(error)
            self._again = self._source.recompute()
            self._close()

    def _begin(self, first: int, device: torch.device, more: int) -> None:
        """Copy some layers from `first` on, all of their columns."""
        shape, copier = self._shape, self._source.copier(device)
        if not self._open.alive:
            raise PagesMoved("the pages of this prefix were let go of")
        together = copier.layers_together(sum(len(row.pages) for row in self._pages))
        count = min(together, shape.layers - first)
        # The last page of a row may reach beyond the columns.
        ends = [row.padding + len(row.pages) * shape.page_tokens for row in self._pages]
        width = max(self.columns + more, *ends)
        size = (count, 2, self.rows, shape.kv_heads, width, shape.head_dim)
        with copier.stream():
            group = torch.empty(size, dtype=shape.dtype, device=device)
            for row, padding in enumerate(self._paddings):
                group[:, :, row, :, :padding] = 0
        for at, (pages, end) in enumerate(zip(self._pages, ends, strict=True)):
            if pages.pages:
                part = group[:, :, at, :, pages.padding : end]
                tokens = self.columns - pages.padding
                copier.load(first, [(k, v) for k, v in part], pages.pages, tokens)
        if not self._source.valid():
            raise PagesMoved("pages moved while they were copied: their server is gone")
        self._last[0] = copier.event()
        for number in range(count):
            self._ready[first + number] = _Ready(group[number], self._last[0])
        self._begun = first + count

    def _recomputed(self, number: int, device: torch.device) -> torch.Tensor:
        both = torch.stack(self._again[number]).to(device)
        for row, padding in enumerate(self._paddings):
            both[:, row, :, :padding] = 0
        return both

    def _widened(self, both: torch.Tensor, columns: int) -> torch.Tensor:
        if both.shape[3] >= columns:
            return both[:, :, :, :columns]
        wider = both.new_empty((*both.shape[:3], columns, both.shape[4]))
        wider[:, :, :, : self.columns] = both[:, :, :, : self.columns]
        return wider


class StoredLayer(DynamicLayer):
    """A DynamicLayer that begins with its part of a load, and fetches it when it is needed."""

    def __init__(self, load: PrefixLoad, number: int) -> None:
        self._load: PrefixLoad | None = None
        super().__init__()  # type: ignore[no-untyped-call]  # transformers leaves it untyped
        self._load, self._number = load, number
        self.is_initialized = True

    @property
    def is_pending(self) -> bool:
        """Whether it is still with the store."""
        return self._load is not None

    @property
    def keys(self) -> Any:
        """[rows, heads, columns, dim]."""
        self._fetch()
        return self._keys

    @keys.setter
    def keys(self, keys: Any) -> None:
        self._load, self._keys = None, keys

    @property
    def values(self) -> Any:
        """As keys."""
        self._fetch()
        return self._values

    @values.setter
    def values(self, values: Any) -> None:
        self._load, self._values = None, values

    def get_seq_length(self) -> int:
        """Columns, without fetching them."""
        if self._load is not None:
            return self._load.columns
        return int(super().get_seq_length())

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> LayerKv:
        """As DynamicLayer; the first one puts what was stored and what is new in one place."""
        load = self._load
        if load is None or key_states.shape[0] != load.rows:
            both: LayerKv = super().update(key_states, value_states, *args, **kwargs)
            return both
        self._fetch(key_states.device, key_states.shape[2])
        self._keys[:, :, load.columns :] = key_states
        self._values[:, :, load.columns :] = value_states
        return self._keys, self._values

    def _fetch(self, device: torch.device | None = None, more: int = 0) -> None:
        if self._load is None:
            return
        where = device or self._load.device
        keys, values = self._load.take(self._number, where, more)
        self.keys, self.values = keys, values
        self.dtype, self.device = keys.dtype, keys.device


def _let_go(release: Callable[[Any], None], last: list[Any]) -> None:
    release(last[0])
