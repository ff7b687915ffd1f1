"""A rank's blocks as planes that gather and scatter move, and which bytes of a page a plane fills.

    the rank's part of a page | plane 0: block, block, ... | plane 1: block, block, ... | ...

A plane is one run of bytes of each block (block_regions.py); planes ascend by layer. Those that lie
alike make a Stretch: one launch a direction for all its layers and all pages of a call. Invariant:
stretches cover the rank's part of a page once, in order. Must not be here: streams, jobs.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kvstore.engine_adapter.transfer_plan import SKIP_BLOCK
from kvstore.kernels.paged_kv import PagedKv

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from kvstore.engine_adapter.block_regions import PageShard, Region

# What a step of a load by layers brings at least: less is not worth a launch, and a call a page.
STEP_BYTES_MIN = 4 << 20


class PageCopy(NamedTuple):
    """A page's memory, all ranks' parts of it, and the engine's blocks; SKIP_BLOCK leaves one.

    `in_place`: a device may read the memory itself.
    """

    memory: memoryview
    blocks: Sequence[int]
    in_place: bool = False


@dataclass(frozen=True, slots=True)
class Stretch:
    """Planes that lie alike: bytes [start, stop) of the rank's part; `layers`: of each plane."""

    kv: PagedKv
    start: int
    stop: int
    layers: tuple[str, ...]

    def part(self, first: int, last: int) -> Stretch:
        """Its planes [first, last)."""
        size = (self.stop - self.start) // len(self.layers)
        kv = PagedKv(self.kv.planes[first:last], 1)
        start, stop = self.start + first * size, self.start + last * size
        return Stretch(kv, start, stop, self.layers[first:last])


class BlockPlanes:
    """All planes of a rank."""

    def __init__(self, regions: Sequence[Region], shard: PageShard) -> None:
        self.shard = shard
        self.blocks = regions[0].blocks
        self.device = regions[0].tensor.device
        self.whole = tuple(_stretches(regions, shard.blocks))
        assert self.whole[-1].stop == shard.size_bytes
        self._steps: dict[int, tuple[Stretch, ...]] = {}

    def steps(self, pages: int) -> tuple[Stretch, ...]:
        """The same in pieces of whole layers, as small as is worth a launch for so many pages."""
        size = self.shard.size_bytes * pages // sum(len(each.layers) for each in self.whole)
        planes = -(-STEP_BYTES_MIN // max(1, size))
        if planes not in self._steps:
            self._steps[planes] = tuple(
                each.part(first, last)
                for each in self.whole
                for first, last in pairwise(_layer_bounds(each.layers, planes))
            )
        return self._steps[planes]

    def check(self, pages: Sequence[PageCopy], *, whole: bool = False) -> NDArray[np.int64]:
        """The block ids of all pages in one list; ValueError, the null block 0 is nobody's.

        whole: none may be left out, as of a page that is saved.
        """
        for page in pages:
            if len(page.blocks) != self.shard.blocks:
                raise ValueError(f"{len(page.blocks)} blocks for a page of {self.shard.blocks}")
        ids = np.array([page.blocks for page in pages], np.int64).reshape(-1)
        wrong = ids[((ids < 1) & (whole | (ids != SKIP_BLOCK))) | (ids >= self.blocks)]
        if wrong.size:
            raise ValueError(f"block {wrong[0]} is not in [1, {self.blocks})")
        return ids

    def part(self, memory: memoryview) -> NDArray[np.uint8]:
        """The rank's part of a page's memory; no copy."""
        first = self.shard.offset
        part = np.frombuffer(memory, np.uint8)[first : first + self.shard.size_bytes]
        if part.size != self.shard.size_bytes:
            raise ValueError(f"a page of {memory.nbytes} bytes; {self.shard.page_bytes} are needed")
        return part


class HostBlocks:
    """Copies between pages and blocks that lie in this process's own memory, by numpy.

    The calls of DeviceBlocks, with its contracts; here a copy is done when its call returns. Not by
    the kernels' wrappers for CPU tensors: blocks are moved whole, so a call a page and a run of
    neighbouring blocks is all there is to do. The same copies through gather and scatter took 1.05
    times as long for all pages of a job at once, 1.2 times a page at a time, 1.5 times by layers
    (SmolLM2's and Llama-3-8B's pages, one run, medians of 15 pairs).
    """

    batch_bytes = 8 << 20  # between two looks at the clock

    def __init__(self, planes: BlockPlanes) -> None:
        self.planes = planes

    def mark(self) -> Any:
        """Nothing runs behind the calling thread's back."""

    def begin(self, mark: Any) -> None:
        """There is nothing to wait for."""

    def load(self, pages: Sequence[PageCopy], stretches: Sequence[Stretch] = ()) -> int:
        """Copy pages' bytes into the engine's blocks; how many bytes."""
        self.planes.check(pages)
        return sum(self._copy(page, stretches, to_page=False) for page in pages)

    def save(self, pages: Sequence[PageCopy]) -> int:
        """Copy the engine's blocks into writable pages; how many bytes."""
        self.planes.check(pages, whole=True)
        return sum(self._copy(page, (), to_page=True) for page in pages)

    def ready(self) -> Any:
        """What was loaded is there."""

    def wait(self, ready: Any) -> None:
        """There is nothing to wait for."""

    def finish(self) -> None:
        """Everything is done already."""

    def _copy(self, page: PageCopy, stretches: Sequence[Stretch], *, to_page: bool) -> int:
        part, done = self.planes.part(page.memory), 0
        for stretch in stretches or self.planes.whole:
            at = stretch.start
            for array in stretch.kv.stacked(1):
                count, size = array.shape[0], array.shape[-1]
                room = count * self.planes.shard.blocks * size
                shape = (count, self.planes.shard.blocks, 1, 1, size)
                theirs = part[at : at + room].view(array.dtype).reshape(shape)
                for position, block, neighbours in runs(page.blocks):
                    mine = array[:, block : block + neighbours]
                    there = theirs[:, position : position + neighbours]
                    np.copyto(*((there, mine) if to_page else (mine, there)))
                    done += mine.size
                at += room
        return done


def copied_bytes(ids: NDArray[np.int64], stretches: Sequence[Stretch]) -> int:
    """Bytes of those blocks in those stretches."""
    return int((ids != SKIP_BLOCK).sum()) * sum(each.kv.block_bytes for each in stretches)


def runs(blocks: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Runs of neighbours as (position in the page, first block, count), without SKIP_BLOCK."""
    start = 0
    while start < len(blocks):
        stop = start + 1
        while stop < len(blocks) and blocks[stop] == blocks[start] + (stop - start):
            stop += 1
        if blocks[start] == SKIP_BLOCK:  # what follows -1 is 0, which is never asked for
            stop = start + 1
        else:
            yield start, blocks[start], stop - start
        start = stop


def _stretches(regions: Sequence[Region], blocks_a_page: int) -> Iterator[Stretch]:
    """A block as one token of one head: what lies inside stays as it is."""
    planes = [
        (layer, run.unsqueeze(1).unsqueeze(1))
        for region in regions
        for layer, layer_runs in zip(region.layers, region.tensor, strict=True)
        for run in layer_runs
    ]
    at = 0
    for _, alike in groupby(planes, key=lambda each: (each[1].shape, each[1].stride())):
        layers, tensors = zip(*alike, strict=True)
        kv = PagedKv(tuple(tensors), 1)
        stop = at + kv.block_bytes * blocks_a_page
        yield Stretch(kv, at, stop, tuple(layers))
        at = stop


def _layer_bounds(layers: Sequence[str], planes: int) -> list[int]:
    """Where to cut: after at least so many planes, between two layers, and at both ends."""
    bounds = [0]
    for at in range(1, len(layers)):
        if layers[at] != layers[at - 1] and at - bounds[-1] >= planes:
            bounds.append(at)
    return [*bounds, len(layers)]
