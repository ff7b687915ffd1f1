"""As much of vLLM as the connector imports, and the order in which it calls: no engine, no model.

Where vLLM is installed the real one is tested (tests/engine_adapter/vllm). Here the hooks meet a
real server and real workers; only vLLM's classes are stand-ins, with the names they have there.
"""

from __future__ import annotations

import enum
import importlib
import itertools
import sys
import time
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from fake_kv_cache import FullAttentionSpec, make_cache

if TYPE_CHECKING:
    import pytest

V1 = "vllm.distributed.kv_transfer.kv_connector.v1"
OURS = ("vllm_connector", "vllm_scheduler", "vllm_probe", "vllm_stats", "vllm_events")


class KVConnectorRole(enum.Enum):
    SCHEDULER = 0
    WORKER = 1


class KVConnectorMetadata:
    pass


class KVConnectorWorkerMetadata:
    pass


class SupportsHMA:
    pass


@dataclass
class KVConnectorTransferResults:
    finished_sending: set[str]
    finished_recving: set[str]
    failed_recving: set[str]


class KVConnectorBase_V1:
    """Keeps what it is given."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        self._connector_metadata: Any = None

    def bind_connector_metadata(self, metadata: Any) -> None:
        self._connector_metadata = metadata

    def clear_connector_metadata(self) -> None:
        self._connector_metadata = None

    def get_external_cache_hit_sources(self, request: Any, tokens: int) -> dict[str, int]:
        return {"unspecified": tokens} if tokens else {}


@dataclass
class KVConnectorStats:
    data: dict[str, Any] = field(default_factory=dict)


class KVConnectorPromMetrics:
    pass


class BlockStored:
    """Whatever it is told."""

    __struct_fields__ = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "medium")

    def __init__(self, **told: Any) -> None:
        self.told = told


def install(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The connector's class, among stand-ins."""
    base = {
        each.__name__: each
        for each in (
            *(KVConnectorRole, KVConnectorMetadata, KVConnectorWorkerMetadata, SupportsHMA),
            *(KVConnectorTransferResults, KVConnectorBase_V1),
        )
    }
    metrics = {
        "KVConnectorStats": KVConnectorStats,
        "KVConnectorPromMetrics": KVConnectorPromMetrics,
    }
    modules = {
        "vllm": {"__version__": "0.0.standin"},
        f"{V1}.base": base,
        f"{V1}.metrics": metrics,
        "vllm.distributed.kv_events": {"BlockStored": BlockStored},
        "vllm.v1.core.kv_cache_utils": {"maybe_convert_block_hash": lambda each: ("int", each)},
    }
    names = dict.fromkeys(part for name in modules for part in _with_parents(name))
    for name in names:
        module = ModuleType(name)
        module.__path__ = []
        vars(module).update(modules.get(name, {}))
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
    for name in OURS:
        monkeypatch.delitem(sys.modules, f"kvstore.engine_adapter.{name}", raising=False)
    return importlib.import_module("kvstore.engine_adapter.vllm_connector")


def _with_parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[: end + 1]) for end in range(len(parts))]


@dataclass
class Block:
    block_id: int
    refs: int = 0
    block_hash: object = None


class BlockPool:
    """Counts references, as vLLM's does."""

    def __init__(self, count: int) -> None:
        self.blocks = [Block(number) for number in range(count)]

    def touch(self, blocks: list[Block]) -> None:
        for block in blocks:
            block.refs += 1

    def free_blocks(self, blocks: list[Block]) -> None:
        for block in blocks:
            assert block.refs > 0, "given back twice"
            block.refs -= 1

    @property
    def pinned(self) -> int:
        return sum(block.refs for block in self.blocks)


class Worker:
    """vLLM's worker around a model, as far as its weights go."""

    def __init__(self) -> None:
        self.model = torch.nn.Sequential(*(torch.nn.Linear(6, 6) for _ in range(12)))
        self.model_runner = SimpleNamespace(model=self.model)

    def get_model(self) -> torch.nn.Module:
        return self.model

    def initialize(self, connector: Any, kv_caches: dict[str, Any]) -> None:
        connector.register_kv_caches(kv_caches)

    def reload_weights(self, change: float = 0.0) -> None:
        self.write_weights(change)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """What it slept on is there again."""

    def write_weights(self, change: float) -> None:
        """In place and past all hooks, as extensions of workers do."""
        for each in self.model.parameters():
            each.data.add_(change)


def make_request(tokens: list[int], **more: Any) -> Any:
    """A request as the scheduler holds it."""
    made = {
        "request_id": f"r{next(_numbers)}",
        "prompt_token_ids": tokens,
        "all_token_ids": list(tokens),
        "num_tokens": len(tokens),
        "num_computed_tokens": 0,
        "prompt_embeds": None,
        "lora_request": None,
        "cache_salt": None,
        "mm_features": [],
        "kv_transfer_params": None,
        "status": SimpleNamespace(name="FINISHED_STOPPED"),
        "block_hashes": [bytes([number]) for number in range(len(tokens) // 8)],
    }
    return SimpleNamespace(**made | more)


_numbers = itertools.count(1)


class StepLoop:
    """One engine with one worker: what EngineCore does around the two connectors."""

    def __init__(
        self,
        module: Any,
        extra: dict[str, Any],
        *,
        blocks: int = 40,
        events: bool = False,
        model: str = "standin",
        by_layer: bool = False,
    ) -> None:
        """`by_layer`: the forward asks the connector for each layer before it reads it."""
        self.by_layer = by_layer
        self.read: dict[str, bytes] = {}  # what the last forward found in each layer
        self.cache = make_cache(blocks=blocks, specs=(FullAttentionSpec(),))
        self.config = self.cache.vllm_config
        self.config.kv_transfer_config = SimpleNamespace(
            kv_connector_extra_config=extra, kv_role="kv_both", kv_load_failure_policy="fail"
        )
        self.config.kv_events_config = SimpleNamespace(enable_kv_cache_events=events)
        self.config.speculative_config = None
        self.config.cache_config.calculate_kv_scales = False
        self.config.load_config = SimpleNamespace(load_format="auto")
        for name, each in {
            "model": model,
            "quantization": None,
            "hf_config": SimpleNamespace(to_dict=lambda: {"layers": 5}),
            "max_model_len": 1024,
        }.items():
            setattr(self.config.model_config, name, each)
        self.module = module
        self.worker = module.KVStoreConnector(
            self.config, KVConnectorRole.WORKER, self.cache.config
        )
        self.engine_worker = Worker()
        self.engine_worker.initialize(self.worker, self.cache.kv_caches)
        self.scheduler = module.KVStoreConnector(
            self.config, KVConnectorRole.SCHEDULER, self.cache.config
        )
        self.pool = BlockPool(blocks)
        self.scheduler.bind_gpu_block_pool(self.pool)
        self.bad_blocks: set[int] = set()

    def match(self, request: Any, local: int = 0, steps: int = 400) -> tuple[int, bool]:
        """The scheduler's answer, asked once a step until there is one."""
        for _ in range(steps):
            tokens, is_async = self.scheduler.get_num_new_matched_tokens(request, local)
            if tokens is not None:
                return tokens, is_async
            self.step()
        raise AssertionError("asked again for ever")

    def step(self, scheduled: dict[str, int] | None = None, new: tuple[Any, ...] = ()) -> set[str]:
        """One step; `new`: (request, blocks, computed tokens). Requests whose load has ended."""
        output = SimpleNamespace(
            total_num_scheduled_tokens=sum((scheduled or {}).values()),
            num_scheduled_tokens=scheduled or {},
            preempted_req_ids=set(),
            scheduled_new_reqs=[
                SimpleNamespace(
                    req_id=request.request_id, block_ids=(blocks,), num_computed_tokens=computed
                )
                for request, blocks, computed in new
            ],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=set()
            ),
        )
        metadata = self.scheduler.build_connector_meta(output)
        self.worker.handle_preemptions(metadata)
        self.worker.bind_connector_metadata(metadata)
        self.forward()
        self.worker.wait_for_save()
        received: set[str] = self.worker.get_transfer_results(set()).finished_recving
        self.bad_blocks |= self.worker.get_block_ids_with_load_errors()
        report = self.worker.build_connector_worker_meta()
        self.worker.clear_connector_metadata()
        if report is not None:
            self.scheduler.update_connector_output(SimpleNamespace(kv_connector_worker_meta=report))
        return received

    def forward(self) -> None:
        """What the worker's side of the connector sees of it: a hook, or one more a layer."""
        if not self.by_layer:
            self.worker.start_load_kv(None)
            return
        mode = SimpleNamespace(name="PIECEWISE")
        self.worker.start_load_kv(
            SimpleNamespace(cudagraph_runtime_mode=mode, attn_metadata={0: 0})
        )
        for layer, tensor in self.cache.kv_caches.items():
            self.worker.wait_for_layer_load(layer)
            self.read[layer] = tensor.numpy().tobytes()

    def compute(self, request: Any, blocks: list[int], *, external: int = 0) -> None:
        """All of a request in one step, and its end."""
        self.scheduler.update_state_after_alloc(request, (blocks,), external)
        for block in blocks[: request.num_tokens // 8]:
            self.pool.blocks[block].block_hash = object()
        count = request.num_tokens - external
        self.step({request.request_id: count}, ((request, blocks, external),))
        request.num_computed_tokens = request.num_tokens

    def idle(self, wait_s: float = 30.0) -> None:
        """Steps until nothing needs them, and until what was saved is published."""
        deadline = time.monotonic() + wait_s
        planner = self.scheduler._scheduler.planner if self.scheduler._scheduler else None
        while self.scheduler.has_pending_push_work() or (planner and planner.saves_left):
            self.step()
            assert time.monotonic() < deadline, "it steps for ever"

    def close(self) -> None:
        self.worker.shutdown()
        self.scheduler.shutdown()
