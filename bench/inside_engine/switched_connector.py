"""The connector in an engine that can put it away between two batches, and take it out again.

For bench/miss_pairs.py; imported by vLLM in all processes of the engine. Away means what an engine
without kv_transfer_config does: no scheduler hook, no worker hook, no aggregator, blocks freed at
once. What stays, and no difference shows: threads that wait for work, and the memory they have.
Must not be here: what is measured.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from kvstore.engine_adapter.vllm_connector import KVStoreConnector

SWITCH = "switch_connector"
# What Scheduler.__init__ sets otherwise where there is a connector, and what it is without one.
WITHOUT: dict[str, Any] = {
    "connector": None,
    "connector_prefix_cache_stats": None,
    "recompute_kv_load_failures": True,
    "defer_block_free": False,
    "requires_kv_delivery": False,
    "_kv_fetch_stages": None,
}


class SwitchedConnector(KVStoreConnector):
    """Our connector; in the engine core, collective_rpc(SWITCH) switches its scheduler as well."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if role == KVConnectorRole.SCHEDULER:
            _hear_in_core()


class WorkerSwitch:
    """What a worker gets as worker_extension_cls."""

    _kvstore_put_away: Any = None

    def switch_connector(self, on: bool) -> None:
        """Called by collective_rpc."""
        if hasattr(getattr(self, "model_runner", None), "kv_connector"):
            raise RuntimeError("this model runner (V2) keeps the connector itself: not switched")
        now = kv_transfer_state._KV_CONNECTOR_AGENT
        if (now is not None) != on:
            kv_transfer_state._KV_CONNECTOR_AGENT = self._kvstore_put_away
            self._kvstore_put_away = now
        if kv_transfer_state.has_kv_transfer_group() != on:
            raise RuntimeError(f"this worker's connector could not be switched to {on}")


def _hear_in_core() -> None:
    from vllm.v1.engine.core import EngineCore

    to_workers = EngineCore.collective_rpc

    # vLLM looks at how many parameters there are.
    def collective_rpc(
        core: Any,
        method: Any,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if method == SWITCH:
            _switch_core(core, **(kwargs or {}))
        return to_workers(core, method, timeout, args, kwargs)

    EngineCore.collective_rpc = collective_rpc


def _switch_core(core: Any, on: bool) -> None:
    scheduler, executor = core.scheduler, core.model_executor
    if scheduler.has_requests() or scheduler.deferred_frees or core.batch_queue:
        raise RuntimeError("the connector is switched between batches only: this one goes on")
    if (scheduler.connector is not None) == on:
        return
    if not on:
        missing = [name for name in WITHOUT if not hasattr(scheduler, name)]
        if missing:
            raise RuntimeError(f"this vLLM's scheduler has no {missing}: what is off there?")
        scheduler.kvstore_put_away = {name: getattr(scheduler, name) for name in WITHOUT}
        scheduler.kvstore_put_away_aggregator = executor.kv_output_aggregator
    for name, value in (scheduler.kvstore_put_away if on else WITHOUT).items():
        setattr(scheduler, name, value)
    executor.kv_output_aggregator = scheduler.kvstore_put_away_aggregator if on else None
