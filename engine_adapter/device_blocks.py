"""Copies between pages and blocks that lie on a device, by torch, through a pinned bounce buffer.

The store's memory belongs to another process and is pageable; a device copies fast only from pinned
memory. So a page is copied into the bounce buffer first, and is not needed any more when load()
returns. All device copies run on a stream of their own, behind the work that mark() saw. One thread
at a time.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kvstore.engine_adapter.block_regions import check_blocks, runs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from kvstore.engine_adapter.block_regions import PageShard, Region

BOUNCE_PAGES = 4


class DeviceBlocks:
    """The same calls as HostBlocks. Without a device ("cpu") the stream is the caller's thread."""

    def __init__(self, regions: Sequence[Region], shard: PageShard) -> None:
        self._tensors = [region.tensor for region in regions]
        self._shard = shard
        self.blocks = int(self._tensors[0].shape[1])
        device = self._tensors[0].device
        self._accelerator: Any = getattr(torch, device.type) if device.type != "cpu" else None
        pinned = self._accelerator is not None
        self._bounce = [
            torch.empty(shard.size_bytes, dtype=torch.uint8, pin_memory=pinned)
            for _ in range(BOUNCE_PAGES)
        ]
        self._in_use: list[Any] = [None] * BOUNCE_PAGES  # events: copies out of the buffer
        self._next = 0
        self._stream = self._accelerator.Stream(device) if self._accelerator else None

    def mark(self) -> Any:
        """The work that was given to the device until now, by the calling thread."""
        if self._accelerator is None:
            return None
        event = self._accelerator.Event()
        event.record(self._accelerator.current_stream())
        return event

    def begin(self, mark: Any) -> None:
        """Later copies come after what `mark` saw."""
        if self._stream is not None and mark is not None:
            self._stream.wait_event(mark)

    def load(self, page: memoryview, blocks: Sequence[int]) -> int:
        """Copy a page's bytes into the engine's blocks, but for SKIP_BLOCK; how many bytes.

        They are in the blocks after finish().
        """
        check_blocks(blocks, self._shard.blocks, self.blocks)
        number, bounce = self._take_bounce()
        bounce.numpy()[:] = self._part(page)
        with self._on_stream():
            done = self._copy(bounce, blocks, to_page=False)
            self._in_use[number] = self._event()
        return done

    def save(self, blocks: Sequence[int], page: memoryview) -> int:
        """Copy the engine's blocks into a writable page; how many bytes. It waits for them."""
        check_blocks(blocks, self._shard.blocks, self.blocks)
        _, bounce = self._take_bounce()
        with self._on_stream():
            done = self._copy(bounce, blocks, to_page=True)
        self.finish()
        self._part(page)[:] = bounce.numpy()
        return done

    def finish(self) -> None:
        """Wait until all copies are done."""
        if self._stream is not None:
            self._stream.synchronize()

    def _take_bounce(self) -> tuple[int, Any]:
        number = self._next
        self._next = (number + 1) % BOUNCE_PAGES
        if self._in_use[number] is not None:
            self._in_use[number].synchronize()
        return number, self._bounce[number]

    def _part(self, page: memoryview) -> NDArray[np.uint8]:
        shard = self._shard
        return np.frombuffer(page, np.uint8)[shard.offset : shard.offset + shard.size_bytes]

    def _on_stream(self) -> Any:
        if self._stream is None:
            return contextlib.nullcontext()
        return self._accelerator.stream(self._stream)

    def _event(self) -> Any:
        if self._stream is None:
            return None
        event = self._accelerator.Event()
        event.record(self._stream)
        return event

    def _copy(self, bounce: Any, blocks: Sequence[int], *, to_page: bool) -> int:
        at, done = 0, 0
        for tensor in self._tensors:
            layers, _, size = tensor.shape
            part = bounce[at : at + layers * self._shard.blocks * size]
            part = part.view(layers, self._shard.blocks, size)
            for position, block, count in runs(blocks):
                ours = tensor[:, block : block + count]
                theirs = part[:, position : position + count]
                if to_page:
                    theirs.copy_(ours, non_blocking=True)
                else:
                    ours.copy_(theirs, non_blocking=True)
                done += ours.numel()
            at += part.numel()
        return done
