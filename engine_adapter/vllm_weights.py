"""Whether a worker's weights are still those that its engine named when it started.

Two senses, in each worker. Calls that reload the weights or wake them up are noted as they come.
And a sample of the parameters' bytes is compared before each step that loads or saves pages, which
sees whatever way they were written. Invariant: a step whose plan does not know of a change moves no
page: its jobs fail, and the engine computes. Only reads. Must not be here: what follows from it.
"""

from __future__ import annotations

import functools
import sys
import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvstore.engine_adapter.transfer_plan import StepPlan, WorkerReport

if TYPE_CHECKING:
    from collections.abc import Callable

# Methods of vLLM's workers after which the weights may be others.
RELOADS = (
    *("load_model", "reload_weights", "reset_weights"),
    *("start_weight_update", "update_weights", "finish_weight_update"),
)
WAKE_UP = "wake_up"
SAMPLES_A_CHECK = 16  # parameters; the next check looks at others
SAMPLE_VALUES = 32  # of each: training changes few of the rounded values in a step, but some
NOWHERE = 0  # an epoch that no session has: copies to or from it fail


class WeightsWatch:
    """One worker's; used by its main thread."""

    def __init__(self, rank: int, *, are_named: bool) -> None:
        """`are_named`: a weights_version answers for the content, so that only content counts."""
        self.rank = rank
        self.changes = 0  # since the start
        self.why = ""
        self._are_named = are_named
        self._called = ""
        self._told = 0
        self._sample: ParameterSample | None = None

    def follow(self, vllm_config: Any) -> bool:
        """Watch the worker that is calling; False if there is none that is known."""
        worker = calling_worker()
        if worker is None:
            return False
        for name in (*RELOADS, WAKE_UP):
            method = getattr(worker, name, None)
            if callable(method):
                setattr(worker, name, self._noting(name, method))
        self._sample = ParameterSample(worker.get_model(), vllm_config)
        return True

    def vetted(self, plan: StepPlan) -> StepPlan:
        """The plan of a step that begins; one that cannot succeed if it is of other weights."""
        self._look(moves_pages=bool(plan.loads or plan.saves))
        if plan.weights.get(self.rank, 0) == self.changes:
            return plan
        return replace(plan, epoch=NOWHERE)

    def reported(self, report: WorkerReport | None) -> WorkerReport | None:
        """A rank's report with what is new here."""
        if self.changes == self._told:
            return report
        self._told = self.changes
        news = {self.rank: self.changes}
        return replace(report or WorkerReport(), weights=news, weights_why=self.why)

    def _look(self, *, moves_pages: bool) -> None:
        called, self._called = self._called, ""
        sample = self._sample
        is_other = bool(sample and (called or moves_pages) and sample.differs(whole=bool(called)))
        if is_other or (called and not self._are_named):
            self.changes += 1
            self.why = f"{called} was called" if called else "parameters have other values"
        if sample and is_other:
            sample.take()

    def _noting(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            tags = kwargs.get("tags", args[0] if args else None)
            if name != WAKE_UP or not tags or "weights" in tags:
                self._called = name
            return method(*args, **kwargs)

        return call


class ParameterSample:
    """A few values of each parameter of a model, group by group; no parameter is kept alive."""

    def __init__(self, model: Any, vllm_config: Any) -> None:
        """Empty for weights that move by themselves: offloaded ones, and balanced experts."""
        self._groups: list[list[weakref.ref[Any]]] = []
        self._bytes: list[bytes] = []
        self._next = 0
        if _are_offloaded(vllm_config):
            return
        balanced = bool(getattr(vllm_config.parallel_config, "enable_eplb", False))
        found = [
            each
            for name, each in model.named_parameters()
            if _is_plain(each) and not (balanced and "expert" in name)
        ]
        found = [each for each in found if each.device == found[0].device]
        count = -(-len(found) // SAMPLES_A_CHECK)
        self._groups = [[weakref.ref(each) for each in found[at::count]] for at in range(count)]
        self.take()

    def take(self) -> None:
        """What is there now is what is right."""
        alive = [[each for each in group if each() is not None] for group in self._groups]
        self._groups = [group for group in alive if group]
        self._bytes = [_values([each() for each in group]) for group in self._groups]
        self._next = 0

    def differs(self, *, whole: bool) -> bool:
        """Whether a group of parameters, another one each time, is not as it was or is gone.

        whole: look at all groups.
        """
        if whole:
            return any(map(self._differs, range(len(self._groups))))
        if not self._groups:
            return False
        at, self._next = self._next, (self._next + 1) % len(self._groups)
        return self._differs(at)

    def _differs(self, at: int) -> bool:
        parameters = [each() for each in self._groups[at]]
        if any(each is None or not _is_plain(each) for each in parameters):
            return True
        return _values(parameters) != self._bytes[at]


def calling_worker() -> Any:
    """vLLM's worker among the callers: what hooks are given does not lead to the model."""
    frame = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if hasattr(owner, "model_runner") and callable(getattr(owner, "get_model", None)):
            return owner
        frame = frame.f_back  # type: ignore[assignment]
    return None


def _are_offloaded(vllm_config: Any) -> bool:
    offload = getattr(vllm_config, "offload_config", None)
    return bool(
        getattr(getattr(offload, "uva", None), "cpu_offload_gb", 0)
        or getattr(getattr(offload, "prefetch", None), "offload_group_size", 0)
        or getattr(vllm_config.cache_config, "cpu_offload_gb", 0)
    )


def _is_plain(parameter: Any) -> bool:
    """Whether its values lie one after the other, in whatever order."""
    count = parameter.numel()
    stored = parameter.untyped_storage().nbytes() // parameter.element_size()
    is_there = parameter.device.type != "meta"
    return bool(count and is_there and parameter.storage_offset() + count <= stored)


def _values(parameters: list[Any]) -> bytes:
    """Bytes from the middle of each."""
    import torch

    def read() -> bytes:
        pieces = []
        for each in parameters:
            count = each.numel()
            taken = min(count, SAMPLE_VALUES)
            at = each.storage_offset() + (count - taken) // 2
            pieces.append(torch.as_strided(each.data, (taken,), (1,), at).view(torch.uint8))
        return bytes(torch.cat(pieces).cpu().numpy().tobytes())

    if parameters[0].device.type != "cuda":
        return read()
    # Beside the stream of the forward: whoever waits here must not wait for that.
    with torch.cuda.stream(_side_stream(parameters[0].device)):
        return read()


@functools.cache
def _side_stream(device: Any) -> Any:
    import torch

    stream: Any = torch.cuda.Stream
    return stream(device)
