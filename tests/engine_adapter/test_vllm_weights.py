"""Whether a worker's weights are those of its start: calls are noted, bytes are compared."""

from __future__ import annotations

import gc
from types import SimpleNamespace as Plain
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch", reason="weights are tensors")

from fake_kv_cache import make_config  # noqa: E402
from fake_vllm import Worker  # noqa: E402

from kvstore.engine_adapter.transfer_plan import PageSave, SaveJob, StepPlan, WorkerReport  # noqa: E402
from kvstore.engine_adapter.vllm_weights import NOWHERE, ParameterSample, WeightsWatch  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable

EPOCH = 7
SAVES = (SaveJob(1, (PageSave(0, (1,)),)),)


class Watched(Worker):
    """A worker whose connector is a watch alone."""

    def __init__(self, *, are_named: bool = False, config: Any = None) -> None:
        super().__init__()
        self.watch = WeightsWatch(0, are_named=are_named)
        self.known = 0

        class Connector:
            def register_kv_caches(connector, kv_caches: Any) -> None:
                assert self.watch.follow(config or make_config())

        self.initialize(Connector(), {})

    def step(self, saves: tuple[SaveJob, ...] = SAVES) -> bool:
        """Whether a step moves its pages; the scheduler hears of changes after it."""
        vetted = self.watch.vetted(StepPlan(EPOCH, saves=saves, weights={0: self.known}))
        report = self.watch.reported(None)
        if report is not None:
            self.known = report.weights[0]
        return vetted.epoch == EPOCH


def test_weights_that_stay_move_every_page_and_say_nothing() -> None:
    worker = Watched()
    assert all(worker.step() for _ in range(10))
    assert worker.watch.reported(None) is None
    report = WorkerReport(counters={"loads": 1.0})
    assert worker.watch.reported(report) is report


@pytest.mark.parametrize(
    ("happens", "why"),
    [
        (lambda worker: worker.reload_weights(), "reload_weights was called"),
        (lambda worker: worker.reload_weights(1.0), "reload_weights was called"),
        (lambda worker: worker.wake_up(), "wake_up was called"),
        (lambda worker: worker.wake_up(tags=["weights"]), "wake_up was called"),
        (lambda worker: worker.write_weights(1e-3), "parameters have other values"),
    ],
)
def test_what_may_have_changed_them_fails_the_next_step_and_is_told(
    happens: Callable[[Any], None], why: str
) -> None:
    worker = Watched()
    assert worker.step()
    happens(worker)
    assert not worker.step()
    assert (worker.watch.changes, worker.watch.why) == (1, why)
    assert worker.step(), "its scheduler knows"


def test_a_call_is_told_by_a_step_that_moves_nothing() -> None:
    worker = Watched()
    worker.reload_weights()
    worker.step(saves=())
    assert worker.known == 1


def test_memory_for_the_cache_alone_wakes_no_weights() -> None:
    worker = Watched()
    worker.wake_up(tags=["kv_cache"])
    assert worker.step()


def test_with_a_version_a_call_is_nothing_but_other_values_are() -> None:
    worker = Watched(are_named=True)
    worker.wake_up()
    worker.reload_weights()
    assert worker.step()
    worker.reload_weights(1.0)
    assert not worker.step()
    assert worker.step(), "these are the weights now"
    worker.write_weights(1.0)
    assert not worker.step()
    assert worker.watch.changes == 2


def test_one_parameter_of_many_is_found_within_a_round() -> None:
    worker = Watched()
    worker.model[5].weight.data[3, 3] += 1
    groups = -(-len([*worker.model.parameters()]) // 16)
    assert groups > 1
    assert sum(not worker.step() for _ in range(groups)) == 1


def test_a_plan_of_before_the_change_moves_nothing_whenever_it_comes() -> None:
    """A scheduler that is a step ahead has planned on the old weights."""
    worker = Watched(are_named=True)
    worker.write_weights(1.0)
    ahead = StepPlan(EPOCH, saves=SAVES)
    assert [worker.watch.vetted(ahead).epoch for _ in range(3)] == [NOWHERE] * 3
    assert worker.watch.vetted(StepPlan(EPOCH, saves=SAVES, weights={0: 1})).epoch == EPOCH


def test_a_parameter_that_is_another_tensor_now_is_a_change_and_the_old_one_is_free() -> None:
    worker = Watched()
    for layer in worker.model:
        layer.weight = torch.nn.Parameter(layer.weight.detach().clone())
    gc.collect()
    assert not worker.step()


@pytest.mark.parametrize(
    "change",
    [
        {"offload_config": Plain(uva=Plain(cpu_offload_gb=4), prefetch=None)},
        {"offload_config": Plain(uva=None, prefetch=Plain(offload_group_size=8))},
    ],
)
def test_weights_that_move_by_themselves_are_not_compared(change: dict[str, Any]) -> None:
    config = make_config()
    vars(config).update(change)
    worker = Watched(config=config)
    worker.write_weights(1.0)
    assert worker.step()
    worker.reload_weights()
    assert not worker.step(), "calls are noted all the same"


def test_experts_that_are_balanced_are_not_compared() -> None:
    model = torch.nn.ModuleDict({"experts": torch.nn.Linear(4, 4), "norm": torch.nn.Linear(4, 4)})
    config = make_config()
    config.parallel_config.enable_eplb = True
    sample = ParameterSample(model, config)
    model["experts"].weight.data.add_(1)
    assert not sample.differs(whole=True)
    model["norm"].weight.data.add_(1)
    assert sample.differs(whole=True)


def test_tensors_of_any_type_and_order_are_sampled_and_empty_ones_left_out() -> None:
    model = torch.nn.Module()
    made = {
        "turned": torch.randn(6, 4).t(),
        "bytes": torch.arange(100, dtype=torch.uint8),
        "small": torch.tensor(1.5, dtype=torch.bfloat16),
        "empty": torch.empty(0),
    }
    for name, each in made.items():
        setattr(model, name, torch.nn.Parameter(each, requires_grad=False))
    sample = ParameterSample(model, make_config())
    assert not sample.differs(whole=True)
    for name in ("turned", "bytes", "small"):
        getattr(model, name).data.add_(1)
        assert sample.differs(whole=True)
        sample.take()
    assert not sample.differs(whole=True)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="NO GPU: weights on a GPU are not read")
def test_weights_on_a_gpu_are_compared_beside_the_stream_of_the_forward() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(20))).cuda().bfloat16()
    sample = ParameterSample(model, make_config())
    assert not sample.differs(whole=True)
    model[3].weight.data.add_(1)
    torch.cuda.synchronize()
    assert sample.differs(whole=True)


def test_without_a_worker_among_the_callers_nothing_is_watched() -> None:
    watch = WeightsWatch(0, are_named=False)
    assert not watch.follow(make_config())
    assert watch.vetted(StepPlan(EPOCH, saves=SAVES)).epoch == EPOCH
