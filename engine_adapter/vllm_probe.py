"""What the installed vLLM offers, found by looking at it and never by its version number.

Names that some releases lack have stand-ins here, so that the connector is one class for all.
"""

from __future__ import annotations

import inspect
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1 import base

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Base: Any = base.KVConnectorBase_V1
Role: Any = base.KVConnectorRole
Metadata: Any = base.KVConnectorMetadata


class _NoMixin:
    """Where a release has no such class."""


class _Aggregated:
    """Stands in for KVConnectorWorkerMetadata."""


@dataclass
class _TransferResults:
    finished_sending: set[str]
    finished_recving: set[str]
    failed_recving: set[str]


SupportsHMA: Any = getattr(base, "SupportsHMA", _NoMixin)
WorkerMetadata: Any = getattr(base, "KVConnectorWorkerMetadata", _Aggregated)
TransferResults: Any = getattr(base, "KVConnectorTransferResults", _TransferResults)


def share_logging() -> None:
    """Have our lines appear where vLLM's do, unless somebody has arranged for them otherwise."""
    ours, theirs = logging.getLogger("kvstore"), logging.getLogger("vllm")
    if not ours.handlers and theirs.handlers:
        ours.handlers = list(theirs.handlers)
        ours.setLevel(theirs.getEffectiveLevel())
        ours.propagate = False


def vllm_version() -> str:
    """As installed; part of a page's identity, because pages are the engine's own format."""
    import vllm

    return str(getattr(vllm, "__version__", "unknown"))


def call_base_init(connector: Any, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
    """Base.__init__ with as many arguments as it takes."""
    count = len(inspect.signature(Base.__init__).parameters) - 1
    Base.__init__(connector, *(vllm_config, role, kv_cache_config)[:count])


def can_report_saves() -> bool:
    """Whether workers can tell the scheduler side that a save is done."""
    return hasattr(base, "KVConnectorWorkerMetadata")


def hit_sources(in_memory: int, on_disk: int) -> dict[Any, int]:
    """Tokens by source, in vLLM's words; {} where it has none."""
    try:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource
    except ImportError:
        return {}
    counts = {CacheHitSource.HOST: in_memory, CacheHitSource.DISK: on_disk}
    return {source: count for source, count in counts.items() if count}


def stored_event(
    request: Any, hashes: list[Any], parent: Any, tokens: list[int], block_tokens: int
) -> Any:
    """vLLM's event for blocks that lie in storage now, named as the engine names its own."""
    from vllm.distributed.kv_events import BlockStored
    from vllm.v1.core import kv_cache_utils

    convert = getattr(kv_cache_utils, "maybe_convert_block_hash", lambda each: each)
    adapter = getattr(request, "lora_request", None)
    told = {
        "block_hashes": [convert(each) for each in hashes],
        "parent_block_hash": None if parent is None else convert(parent),
        "token_ids": tokens,
        "block_size": block_tokens,
        "lora_id": getattr(adapter, "adapter_id", None),
        "lora_name": getattr(adapter, "name", None),
        "medium": "STORAGE",
        "group_idx": 0,
        "session_id": getattr(request, "session_id", None),
    }
    known = BlockStored.__struct_fields__
    return BlockStored(**{name: each for name, each in told.items() if name in known})


def block_ids(blocks: Any) -> list[int]:
    """The first group's table of a KVCacheBlocks or of what get_block_ids() gave."""
    ids = blocks.get_block_ids() if hasattr(blocks, "get_block_ids") else blocks
    return list(ids[0]) if ids and not isinstance(ids[0], int) else list(ids or ())


def computed(
    output: Any, known: Callable[..., list[int] | None]
) -> Iterator[tuple[str, list[int] | None, int]]:
    """Requests of a scheduler's step: name, block table, tokens computed before it.

    `known(name, blocks, whole=)` makes a table of parts, for releases that don't tell all of it.
    """
    state = getattr(output, "kv_connector_block_state", None)

    def table(name: str, given: Any, whole: bool) -> list[int] | None:
        current = state.get_block_ids(name) if state is not None else None
        if current is not None:
            return block_ids(current)
        return known(name, block_ids(given) if given else [], whole=whole)

    for new in output.scheduled_new_reqs:
        yield new.req_id, table(new.req_id, new.block_ids, True), int(new.num_computed_tokens)
    cached = output.scheduled_cached_reqs
    resumed = getattr(cached, "resumed_req_ids", ())
    for at, name in enumerate(cached.req_ids):
        before = int(cached.num_computed_tokens[at])
        yield name, table(name, cached.new_block_ids[at], name in resumed), before


def rank_and_world(vllm_config: Any) -> tuple[int, int]:
    """This worker's tensor rank, and how many there are."""
    world = int(vllm_config.parallel_config.tensor_parallel_size)
    if world == 1:
        return 0, 1
    from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

    return int(get_tensor_model_parallel_rank()), world


def runs_layer_hooks(forward_context: Any) -> bool:
    """Whether the forward of this context calls a connector's hooks at each layer.

    It does not in a full CUDA graph, nor without attention; nor do we know where it is not told.
    """
    mode = getattr(getattr(forward_context, "cudagraph_runtime_mode", None), "name", "")
    has_attention = bool(getattr(forward_context, "attn_metadata", None))
    return has_attention and mode in ("NONE", "PIECEWISE")
