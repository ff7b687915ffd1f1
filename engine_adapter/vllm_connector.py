"""KVStoreConnector: the class that vLLM loads, in EngineCore, in each worker and in the frontend.

    --kv-transfer-config '{"kv_connector": "KVStoreConnector", "kv_role": "kv_both",
                           "kv_connector_extra_config": {"store": "/var/cache/kv"}}'

An exception in a hook would end the engine. So every hook is wrapped: what fails is logged once,
counted, and becomes a miss. Importing this module starts nothing and connects to nothing. Must not
be here: what the hooks do, which vllm_scheduler.py and vllm_worker.py say.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from kvstore.engine_adapter.block_regions import RegionFacts, facts_from_config
from kvstore.engine_adapter.transfer_plan import StepPlan, WorkerReport
from kvstore.engine_adapter.vllm_identity import blocks_per_page, why_unservable
from kvstore.engine_adapter.vllm_probe import (
    Base,
    Metadata,
    Role,
    SupportsHMA,
    TransferResults,
    WorkerMetadata,
    call_base_init,
    can_report_saves,
    rank_and_world,
    runs_layer_hooks,
    share_logging,
)
from kvstore.engine_adapter.vllm_scheduler import VllmScheduler
from kvstore.engine_adapter.vllm_settings import VllmSettings, read_settings
from kvstore.engine_adapter.vllm_stats import KVStorePromMetrics, KVStoreStats
from kvstore.engine_adapter.vllm_weights import NOWHERE, WeightsWatch
from kvstore.engine_adapter.vllm_worker import VllmWorker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["KVStoreConnector"]

_log = logging.getLogger("kvstore.vllm")
_Method = TypeVar("_Method", bound="Callable[..., Any]")


class StepMetadata(Metadata):  # type: ignore[misc]
    """A StepPlan on its way to the workers."""

    def __init__(self, plan: StepPlan) -> None:
        self.plan = plan
        self.is_vetted = False  # by the worker that has it


class ReportMetadata(WorkerMetadata):  # type: ignore[misc]
    """WorkerReports on their way back."""

    def __init__(self, report: WorkerReport) -> None:
        self.report = report

    def aggregate(self, other: Any) -> ReportMetadata:
        """Reports of several ranks as one."""
        return ReportMetadata(self.report.merged(other.report))


def guarded(otherwise: Callable[[], Any]) -> Callable[[_Method], _Method]:
    """A hook that answers `otherwise()` when it fails; the first failure of each is logged."""

    def wrap(method: _Method) -> _Method:
        @functools.wraps(method)
        def call(self: KVStoreConnector, *args: Any, **kwargs: Any) -> Any:
            try:
                return method(self, *args, **kwargs)
            except Exception as error:
                self.hook_failed(method.__name__, error)
                return otherwise()

        return call  # type: ignore[return-value]

    return wrap


class KVStoreConnector(Base, SupportsHMA):  # type: ignore[misc]
    """See KVConnectorBase_V1 for what each hook means."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        call_base_init(self, vllm_config, role, kv_cache_config)
        share_logging()
        self._failures: set[str] = set()
        self._bad_blocks: set[int] = set()
        self._scheduler: VllmScheduler | None = None
        self._worker: VllmWorker | None = None
        self._weights: WeightsWatch | None = None
        self._facts = RegionFacts()
        self._vllm_config_ours, self._kv_cache_config_ours = vllm_config, kv_cache_config
        is_scheduler = role == Role.SCHEDULER
        problem = ""
        try:
            settings = read_settings(dict(vllm_config.kv_transfer_config.kv_connector_extra_config))
            problem = self._find_problem(vllm_config, kv_cache_config, settings)
            if not problem and is_scheduler:
                self._set_failure_policy(vllm_config, settings)
                self._scheduler = VllmScheduler(settings, vllm_config, kv_cache_config, self._facts)
            elif not problem:
                rank, world = rank_and_world(vllm_config)
                self._worker = VllmWorker(
                    rank, world, server_uid=settings.server_uid, by_layer=settings.load_by_layer
                )
                named = settings.weights_version is not None
                self._weights = WeightsWatch(rank, are_named=named)
        except Exception as error:
            problem = str(error) or type(error).__name__
            _log.debug("construction failed", exc_info=True)
        if problem and is_scheduler:
            _log.error("off, the engine runs without it: %s", problem)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Any:
        """Counts that came from another process."""
        return KVStoreStats(data=dict(data or {}))

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> Any:
        """Counters in vLLM's /metrics."""
        return KVStorePromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache owes nothing to anybody."""
        return False

    # Scheduler role

    @guarded(lambda: None)
    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Pins go there."""
        if self._scheduler is not None:
            self._scheduler.bind_pool(gpu_block_pool)

    @guarded(lambda: None)
    def on_new_request(self, request: Any) -> None:
        """Starts the look-up."""
        if self._scheduler is not None:
            self._scheduler.on_new_request(request)

    @guarded(lambda: (0, False))
    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """What the store has beyond the engine's own hit."""
        if self._scheduler is None:
            return 0, False
        return self._scheduler.match(request, num_computed_tokens)

    @guarded(lambda: None)
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Turns a match into a load."""
        if self._scheduler is not None:
            self._scheduler.allocated(request, blocks, num_external_tokens)

    def get_external_cache_hit_sources(
        self, request: Any, num_external_tokens: int
    ) -> dict[Any, int]:
        """In memory or on disk; whatever else happens, it sums up to what was asked."""
        try:
            found = self._scheduler.hit_sources(request) if self._scheduler is not None else {}
        except Exception as error:
            self.hook_failed("get_external_cache_hit_sources", error)
            found = {}
        if sum(found.values()) == num_external_tokens:
            return found
        told: dict[Any, int] = super().get_external_cache_hit_sources(request, num_external_tokens)
        return told

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """What the workers do in this step."""
        return StepMetadata(self._plan(scheduler_output))

    @guarded(lambda: None)
    def update_connector_output(self, connector_output: Any) -> None:
        """What the workers did."""
        told = getattr(connector_output, "kv_connector_worker_meta", None)
        if self._scheduler is not None and isinstance(told, ReportMetadata):
            self._scheduler.report(told.report)

    @guarded(lambda: (False, None))
    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Blocks that are still being saved are pinned: never delays their release."""
        if self._scheduler is None:
            return False, None
        return False, self._scheduler.finished(request, list(block_ids))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As request_finished; there is one group, or no service."""
        answer: tuple[bool, dict[str, Any] | None] = self.request_finished(
            request, block_ids[0] if block_ids else []
        )
        return answer

    @guarded(lambda: False)
    def has_pending_push_work(self) -> bool:
        """Keeps an idle engine stepping while blocks are pinned."""
        return self._scheduler is not None and self._scheduler.needs_steps()

    @guarded(lambda: False)
    def has_pending_block_frees(self) -> bool:
        """Pinned blocks come back soon: wait rather than preempt."""
        return self._scheduler is not None and self._scheduler.frees_soon()

    @guarded(lambda: False)
    def reset_cache(self) -> bool | None:
        """Ignores what is stored from now on."""
        return self._scheduler.reset() if self._scheduler is not None else True

    @guarded(lambda: ())
    def take_events(self) -> Iterable[Any]:
        """Blocks that are stored since the last call."""
        return self._scheduler.take_events() if self._scheduler is not None else ()

    # Worker role

    @guarded(lambda: None)
    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """The KV tensors of this rank."""
        if self._worker is None:
            return
        found = self._worker.register(kv_caches, self._kv_cache_config_ours, self._facts)
        if found.problem:
            _log.error("this worker loads and saves nothing: %s", found.problem)
        elif self._weights is not None and not self._watch_weights(self._weights):
            _log.warning("other weights in this worker will not be noticed: restart for them")

    @guarded(lambda: None)
    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """The first call of a step."""
        if self._worker is not None and isinstance(kv_connector_metadata, StepMetadata):
            self._worker.handle_fences(self._vetted(kv_connector_metadata))

    @guarded(lambda: None)
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Sync loads are done when this returns, or layer by layer if the forward asks for each."""
        plan = self._step_plan()
        if self._worker is not None and plan is not None:
            self._worker.start_loads(plan, hooks_run=runs_layer_hooks(forward_context))

    @guarded(lambda: None)
    def wait_for_layer_load(self, layer_name: str) -> None:
        """Until this step's loads of one layer are there."""
        if self._worker is not None:
            self._worker.wait_layer(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kw: Any) -> None:
        """Not used: whole pages are saved after the forward, when their tokens are confirmed.

        Nobody waits for a save, and one launch moves all layers; to begin in the forward would
        cost a launch a layer, and forbid full CUDA graphs.
        """

    @guarded(lambda: None)
    def wait_for_save(self) -> None:
        """Hands saves to their thread."""
        plan = self._step_plan()
        if self._worker is not None and plan is not None:
            self._worker.submit_saves(plan)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Requests whose load has ended, well or not."""
        return None, self._poll(finished_req_ids) or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """As get_finished."""
        return TransferResults(set(), self._poll(finished_req_ids), set())

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks to compute after all, since the last call."""
        bad = set(self._bad_blocks)
        self._bad_blocks.clear()
        return bad

    @guarded(lambda: None)
    def build_connector_worker_meta(self) -> Any:
        """This rank's report, if there is something to report."""
        report = self._worker.report() if self._worker is not None else None
        report = self._weights.reported(report) if self._weights is not None else report
        return ReportMetadata(report) if report is not None else None

    @guarded(lambda: None)
    def get_kv_connector_stats(self) -> Any:
        """Counts of the scheduler role; workers report theirs to it."""
        return self._scheduler.stats() if self._scheduler is not None else None

    @guarded(lambda: None)
    def shutdown(self) -> None:
        """Both roles; may never be called."""
        if self._scheduler is not None:
            self._scheduler.shutdown()
        if self._worker is not None:
            self._worker.shutdown()

    def hook_failed(self, hook: str, error: Exception) -> None:
        """Count it; log the first of each hook."""
        if self._scheduler is not None:
            self._scheduler.count_error()
        if hook not in self._failures:
            self._failures.add(hook)
            _log.error("%s failed, taken for a miss, said once: %s", hook, error, exc_info=error)

    @guarded(lambda: False)
    def _watch_weights(self, weights: WeightsWatch) -> bool:
        return weights.follow(self._vllm_config_ours)

    @guarded(set)
    def _poll(self, finished_req_ids: set[str]) -> Any:
        if self._worker is None:
            return set()
        received, bad = self._worker.poll(finished_req_ids)
        self._bad_blocks |= bad
        return received

    def _plan(self, scheduler_output: Any) -> StepPlan:
        """The plan; when planning fails, at least what is under way already."""
        if self._scheduler is None:
            return StepPlan()
        try:
            return self._scheduler.build_plan(scheduler_output)
        except Exception as error:
            self.hook_failed("build_connector_meta", error)
            return self._scheduler.bare_plan()

    def _step_plan(self) -> StepPlan | None:
        bound = getattr(self, "_connector_metadata", None)
        return self._vetted(bound) if isinstance(bound, StepMetadata) else None

    def _vetted(self, metadata: StepMetadata) -> StepPlan:
        """The plan; one that moves no page if the weights are others, or nobody can tell."""
        if self._weights is not None and not metadata.is_vetted:
            metadata.is_vetted = True
            try:
                metadata.plan = self._weights.vetted(metadata.plan)
            except Exception as error:
                self.hook_failed("watching weights", error)
                metadata.plan = replace(metadata.plan, epoch=NOWHERE)
        return metadata.plan

    def _find_problem(self, vllm_config: Any, kv_cache_config: Any, settings: VllmSettings) -> str:
        """Why there is no service; sets the facts of a page otherwise."""
        if kv_cache_config is None or not can_report_saves():
            return "this vLLM is too old: it tells connectors nothing of its KV cache"
        problem = why_unservable(vllm_config)
        if problem:
            return problem
        facts = facts_from_config(vllm_config, kv_cache_config)
        if facts.problem:
            return facts.problem
        self._facts = facts.for_pages(blocks_per_page(facts, settings.page_tokens))
        return ""

    def _set_failure_policy(self, vllm_config: Any, settings: VllmSettings) -> None:
        """vLLM's default turns one lost block into an empty answer."""
        transfer = vllm_config.kv_transfer_config
        policy = getattr(transfer, "kv_load_failure_policy", "recompute")
        if policy == "recompute":
            return
        if settings.keep_failure_policy:
            _log.warning("kv_load_failure_policy stays %r: a lost page fails its request", policy)
            return
        transfer.kv_load_failure_policy = "recompute"
        _log.info("kv_load_failure_policy set to recompute (it was %r)", policy)
