"""Pins on an engine's blocks, counted, so that they stay under their cap. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvstore.engine_adapter.plan_records import BlockPort


class BlockPins:
    """Used by SavePlanner, which knows who pinned what."""

    def __init__(self, pool: BlockPort, blocks_max: int) -> None:
        self.pool = pool
        self.blocks_max = blocks_max
        self.count = self.peak = 0

    @property
    def room(self) -> int:
        """How many more blocks may be pinned."""
        return self.blocks_max - self.count

    def pin(self, pages: Iterable[tuple[int, ...]]) -> None:
        """Pin the blocks of some pages."""
        blocks = [block for page in pages for block in page]
        self.pool.pin(blocks)
        self.count += len(blocks)
        self.peak = max(self.peak, self.count)

    def unpin(self, pinned: dict[int, tuple[int, ...]], pages: Iterable[int]) -> None:
        """Unpin some pages of those that are `pinned`, and forget them there."""
        blocks = [block for page in [*pages] for block in pinned.pop(page)]
        if blocks:
            self.count -= len(blocks)
            self.pool.unpin(blocks)
