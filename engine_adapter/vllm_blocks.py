"""vLLM's block pool as the planner's BlockPort: pins are vLLM's own references.

Used by the engine's thread only. Must not be here: which blocks, and how many.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable


class VllmBlocks:
    """vLLM's block pool as the planner's BlockPort; without one nothing can be pinned."""

    def __init__(self) -> None:
        self.pool: Any = None

    def pin(self, blocks: Iterable[int]) -> None:
        """See BlockPort."""
        self.pool.touch([self.pool.blocks[block] for block in blocks])

    def unpin(self, blocks: Iterable[int]) -> None:
        """See BlockPort."""
        self.pool.free_blocks([self.pool.blocks[block] for block in blocks])

    def holds(self, blocks: Iterable[int]) -> list[object]:
        """See BlockPort. vLLM drops a block's hash when it gives the block away; the next one is
        another object, also when it is equal.
        """
        return [getattr(self.pool.blocks[block], "block_hash", None) for block in blocks]
