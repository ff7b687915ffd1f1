"""Copies between pages and blocks that lie on a device: a kernel for all layers, on a side stream.

Pages that the device may read in place (pinned_arena.py) are read by the kernel itself, or by the
copy engine when they are many: kernels/gather.py says when. Others pass a ring of two pinned
buffers: the next is filled while the device drains the last. Invariants: nothing is queued on the
stream that computes; the side stream begins behind what mark() saw; a buffer is filled again, or
read, only after the event behind the copy that used it. One thread at a time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kvstore.engine_adapter.block_planes import copied_bytes
from kvstore.engine_adapter.pinned_arena import BounceRing
from kvstore.kernels.gather import gather
from kvstore.kernels.paged_kv import page_tensor
from kvstore.kernels.scatter import scatter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from kvstore.engine_adapter.block_planes import BlockPlanes, PageCopy, Stretch

BOUNCE_BYTES = 32 << 20  # of each of two buffers; one page at least
BUFFERS = 2
ROW_ALIGNMENT = 16  # pages begin so in a buffer: the widest access of a kernel


class DeviceBlocks:
    """The calls of HostBlocks. They queue; finish() waits.

    `accelerator` is torch.cuda, or what stands for it; `gather` and `scatter` queue on its current
    stream.
    """

    batch_bytes = 64 << 20  # in one launch; between two looks at the clock

    def __init__(
        self,
        planes: BlockPlanes,
        *,
        accelerator: Any = None,
        gather: Callable[..., None] = gather,
        scatter: Callable[..., None] = scatter,
    ) -> None:
        self.planes = planes
        self._accelerator = accelerator or getattr(torch, planes.device.type)
        self._gather, self._scatter = gather, scatter
        self._stream = self._accelerator.Stream(planes.device)
        self._ring: BounceRing | None = None
        self._buffer_bytes = max(BOUNCE_BYTES, _span(planes.shard.size_bytes))

    def mark(self) -> Any:
        """The work that the calling thread has given to the device until now."""
        event = self._accelerator.Event()
        event.record(self._accelerator.current_stream())
        return event

    def begin(self, mark: Any) -> None:
        """Later copies come after what `mark` saw."""
        if mark is not None:
            self._stream.wait_event(mark)

    def load(self, pages: Sequence[PageCopy], stretches: Sequence[Stretch] = ()) -> int:
        """Queue copies of pages into the engine's blocks; how many bytes.

        stretches: of the planes; all if none are given. The pages' memory is needed, and the bytes
        are not there, until finish().
        """
        planes = self.planes
        stretches = stretches or planes.whole
        ids = planes.check(pages)
        with self._accelerator.stream(self._stream):
            if all(page.in_place for page in pages):
                for stretch in stretches:
                    rows = [
                        page_tensor(planes.part(page.memory)[stretch.start : stretch.stop].data)
                        for page in pages
                    ]
                    self._scatter(stretch.kv, ids, rows, planes.shard.blocks)
            else:
                self._load_by_bounce(pages, ids, stretches)
        return copied_bytes(ids, stretches)

    def save(self, pages: Sequence[PageCopy]) -> int:
        """Copy the engine's blocks into writable pages; how many bytes. They are there then.

        The device fills one buffer while the other is copied into the pages.
        """
        planes = self.planes
        ids = planes.check(pages, whole=True)
        filled: list[tuple[Any, torch.Tensor, Sequence[PageCopy]]] = []
        with self._accelerator.stream(self._stream):
            for some, part_ids in self._chunks(pages, ids, planes.shard.size_bytes):
                if len(filled) == BUFFERS:
                    self._empty(*filled.pop(0))
                buffer = self._take()
                for stretch in planes.whole:
                    rows = _rows(buffer, len(some), planes.shard.size_bytes, stretch, 0)
                    self._gather(stretch.kv, part_ids, rows, planes.shard.blocks)
                filled.append((self._used(), buffer, some))
            for each in filled:
                self._empty(*each)
        return copied_bytes(ids, planes.whole)

    def ready(self) -> Any:
        """What wait() waits for: all that was queued until now."""
        event = self._accelerator.Event()
        event.record(self._stream)
        return event

    def wait(self, ready: Any) -> None:
        """What the calling thread gives to the device from now on comes after `ready`."""
        self._accelerator.current_stream().wait_event(ready)

    def finish(self) -> None:
        """Wait until all copies are done."""
        self._stream.synchronize()

    def _load_by_bounce(
        self, pages: Sequence[PageCopy], ids: NDArray[np.int64], stretches: Sequence[Stretch]
    ) -> None:
        start, stop = stretches[0].start, stretches[-1].stop
        for some, part_ids in self._chunks(pages, ids, stop - start):
            buffer = self._take()
            span = _span(stop - start)
            for number, page in enumerate(some):
                source = self.planes.part(page.memory)[start:stop]
                np.copyto(buffer.numpy()[number * span : number * span + source.size], source)
            for stretch in stretches:
                rows = _rows(buffer, len(some), stop - start, stretch, start)
                self._scatter(stretch.kv, part_ids, rows, self.planes.shard.blocks)
            self._used()

    def _chunks(
        self, pages: Sequence[PageCopy], ids: NDArray[np.int64], size_bytes: int
    ) -> Iterator[tuple[Sequence[PageCopy], NDArray[np.int64]]]:
        """As many pages at a time as `size_bytes` each of them go into a buffer."""
        step = self._buffer_bytes // _span(size_bytes)
        blocks = self.planes.shard.blocks
        for at in range(0, len(pages), step):
            yield pages[at : at + step], ids[at * blocks : (at + step) * blocks]

    def _take(self) -> torch.Tensor:
        if self._ring is None:  # on the side stream's device, and only if it is needed
            self._ring = BounceRing(self.planes.device, self._buffer_bytes, BUFFERS)
        return self._ring.take()

    def _used(self) -> Any:
        assert self._ring is not None
        event = self.ready()
        self._ring.used(event)
        return event

    def _empty(self, filled: Any, buffer: torch.Tensor, pages: Sequence[PageCopy]) -> None:
        """Copy a buffer into pages, once the device has filled it."""
        filled.synchronize()
        size = self.planes.shard.size_bytes
        for number, page in enumerate(pages):
            at = number * _span(size)
            np.copyto(self.planes.part(page.memory), buffer.numpy()[at : at + size])


def _span(size_bytes: int) -> int:
    """From one page to the next in a buffer."""
    return -(-size_bytes // ROW_ALIGNMENT) * ROW_ALIGNMENT


def _rows(
    buffer: torch.Tensor, pages: int, size_bytes: int, stretch: Stretch, start: int
) -> list[torch.Tensor]:
    """A stretch's bytes of each page in a buffer that holds [start, start + size_bytes) of each."""
    span = _span(size_bytes)
    return [
        buffer[number * span + stretch.start - start : number * span + stretch.stop - start]
        for number in range(pages)
    ]
