"""Moves layers between an engine's cache and pages of the store, through the gather kernels.

On a CPU the kernels' wrappers copy straight between the two. For a GPU, pages pass two pinned
buffers in turn, a run of pages at a time: while a kernel puts one run in place, the next is copied
into the other buffer. Kernels and copies have a stream of their own, never the one that computes.
Invariant: a buffer is filled again only after the event behind its last use. Must not be here:
which pages, and what becomes of them.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kvstore.engine_adapter.pinned_arena import BounceRing
from kvstore.kernels.gather import gather
from kvstore.kernels.scatter import scatter

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvstore.engine_adapter.layout import LayerKv, PageShape
    from kvstore.kernels.paged_kv import PagedKv

# One run. Measured on a CPU with 62 pages of 30 layers, 70 MB: in runs of 9 MiB 18 ms; of one
# layer, 2 MiB, 32 ms (the calls); of all layers 52 ms (memory that is new to the process).
RUN_BYTES = 8 << 20


class PageCopier:
    """For one device and one thread at a time.

    Pages are whole pages as uint8 tensors: of host memory (kernels.paged_kv.page_tensor), or on the
    device. Layers are keys and values [heads, tokens of whole pages, dim], in views that may have
    gaps, at most layers_together() in one call. `bounce`: by way of the buffers on a CPU too.
    """

    def __init__(self, shape: PageShape, device: torch.device, *, bounce: bool = False) -> None:
        self._shape = shape
        self._device = device
        self._run_bytes = max(RUN_BYTES, shape.layer_bytes)
        stream: Any = torch.cuda.Stream
        self._stream = stream(device) if device.type == "cuda" else None
        self._bounce = bounce or self._stream is not None
        self._ring: BounceRing | None = None
        # Of save(): rows of a buffer that are on their way, where they go, and their event.
        self._leaving: tuple[Sequence[torch.Tensor], Sequence[torch.Tensor], Any] | None = None

    def layers_together(self, pages: int, *, saving: bool = False) -> int:
        """How many layers of so many pages make one run, at least 1.

        What is saved straight from CPU to CPU needs no runs.
        """
        if saving and not self._bounce:
            return self._shape.layers
        return max(1, self._run_bytes // (self._shape.layer_bytes * max(1, pages)))

    def load(
        self,
        first_layer: int,
        layers: Sequence[LayerKv],
        pages: Sequence[torch.Tensor],
        tokens: int,
    ) -> None:
        """Fill layers from `first_layer` on with the first `tokens` tokens of the pages.

        All that lay in host memory has been read when it returns. On a GPU the layers are filled
        for whoever waits for event(); they are best made within stream().
        """
        size = self._shape.page_tokens
        with self.stream():
            for start, stop, rows in self._runs(first_layer, len(layers), pages):
                bounced = self._bounce and rows[0].device.type == "cpu"
                scatter(
                    self._paged(layers, start, stop),
                    np.arange(stop - start),
                    self._bounced(rows) if bounced else rows,
                    1,
                    order=self._shape.order,
                    tokens=max(0, min(tokens, stop * size) - start * size),
                )
                if bounced:
                    self._rung().used(self.event())

    def save(
        self, first_layer: int, layers: Sequence[LayerKv], pages: Sequence[torch.Tensor]
    ) -> None:
        """Fill these layers of pages in host memory; they are complete after finish()."""
        if len({each.stride() for layer in layers for each in layer}) > 1:
            layers = [(keys.contiguous(), values.contiguous()) for keys, values in layers]
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with self.stream():
            for start, stop, targets in self._runs(first_layer, len(layers), pages):
                rows = self._buffer(len(targets), targets[0].numel()) if self._bounce else targets
                kv = self._paged(layers, start, stop)
                gather(kv, np.arange(stop - start), rows, 1, order=self._shape.order)
                if self._bounce:
                    done = self.event()
                    self._rung().used(done)
                    self._drain()  # the run before, while this one is gathered
                    self._leaving = rows, targets, done

    def finish(self) -> None:
        """Wait until all that save() began is in its pages."""
        self._drain()

    def event(self) -> Any:
        """An event behind all that was begun; None on a CPU, where it has ended."""
        return None if self._stream is None else self._stream.record_event()

    def stream(self) -> Any:
        """The stream of the copies as the current one, for memory that they are to fill."""
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _runs(
        self, first_layer: int, layers: int, pages: Sequence[torch.Tensor]
    ) -> Iterator[tuple[int, int, Sequence[torch.Tensor]]]:
        """Runs [start, stop) of pages on one device, with these layers' part of each page."""
        begin = first_layer * self._shape.layer_bytes
        end = begin + layers * self._shape.layer_bytes
        longest = max(1, self._run_bytes // (end - begin)) if self._bounce else len(pages)
        start = 0
        while start < len(pages):
            stop, device = start + 1, pages[start].device
            while stop < min(len(pages), start + longest) and pages[stop].device == device:
                stop += 1
            yield start, stop, [page[begin:end] for page in pages[start:stop]]
            start = stop

    def _paged(self, layers: Sequence[LayerKv], start: int, stop: int) -> PagedKv:
        size = self._shape.page_tokens
        tokens = slice(start * size, stop * size)
        return self._shape.paged([(keys[:, tokens], values[:, tokens]) for keys, values in layers])

    def _bounced(self, rows: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        buffer = self._buffer(len(rows), rows[0].numel())
        for target, row in zip(buffer, rows, strict=True):
            np.copyto(target.numpy(), row.numpy())
        return buffer

    def _buffer(self, rows: int, row_bytes: int) -> Sequence[torch.Tensor]:
        return list(self._rung().take()[: rows * row_bytes].view(rows, row_bytes))

    def _rung(self) -> BounceRing:
        if self._ring is None:  # pinning costs: not before it is needed
            self._ring = BounceRing(self._device, self._run_bytes)
        return self._ring

    def _drain(self) -> None:
        if self._leaving is None:
            return
        rows, targets, done = self._leaving
        self._leaving = None
        if done is not None:
            done.synchronize()
        for row, target in zip(rows, targets, strict=True):
            np.copyto(target.numpy(), row.numpy())
