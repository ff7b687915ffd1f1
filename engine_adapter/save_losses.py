"""Why full pages were not saved, in words that name what an operator can change."""

from __future__ import annotations

from kvstore.engine_adapter.save_planner import (
    NOT_COPIED,
    NOT_PUBLISHED,
    PINNED_SHARE_MAX,
    REUSED,
    TOO_LATE,
    TOO_MANY,
)
from kvstore.engine_adapter.save_waits import OTHERS_S_MAX
from kvstore.engine_adapter.store_refusals import IN_PROGRESS, LIMIT

_MORE_BLOCKS = (
    f"at most {PINNED_SHARE_MAX:.0%} of the KV blocks are pinned for saves at a time; more KV "
    "memory (gpu_memory_utilization, VLLM_CPU_KVCACHE_SPACE) or a smaller max_num_seqs helps"
)
_WORDS = {
    REUSED: f"blocks of ended requests were reused before their turn: {_MORE_BLOCKS}",
    TOO_LATE: f"their turn did not come in time: {_MORE_BLOCKS}",
    TOO_MANY: f"too many requests had ended before their pages were saved: {_MORE_BLOCKS}",
    LIMIT: "the memory for writers is full: raise the server's staging_bytes, or host_bytes, of "
    "which it is a part",
    IN_PROGRESS: f"another engine has been writing them for {OTHERS_S_MAX:.0f} s: it is very slow, "
    "or hangs; once it ends, they can be stored again",
    NOT_COPIED: "a worker could not copy them",
    NOT_PUBLISHED: "the store did not publish them",
    "full": "the store has no room: all of its memory is in use; raise the server's host_bytes",
    "disk behind": "the disk is slower than what is stored: raise the server's dirty_bytes_max for "
    "bursts, or give it a faster disk",
}


def why_lost(reason: str) -> str:
    """A line for the log."""
    words = _WORDS.get(reason) or f"the store has no room: {reason}"
    return f"full pages are not saved: {words}"
