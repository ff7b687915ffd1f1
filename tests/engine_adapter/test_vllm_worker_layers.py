"""Loads whose layers come while the forward computes, and workers that copy as over a device."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("torch", reason="KV memory is torch's")

from late_streams import LateDevice
from raw_client import wait_until
from server_process import ServerProcess
from worker_engines import Engine, bytes_of, evict_all, load_job, make_engine, tokens_of

from kvstore.engine_adapter.arena_view import NotThere
from kvstore.engine_adapter.block_planes import BlockPlanes, HostBlocks, PageCopy, Stretch
from kvstore.engine_adapter.device_blocks import DeviceBlocks
from kvstore.engine_adapter.transfer_plan import LoadJob, PageLoad, StepPlan
from kvstore.kernels.jit import INTERPRETED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

pytestmark = pytest.mark.slow

SAVED, THERE = [1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11, 6]


def over_device(planes: BlockPlanes) -> DeviceBlocks:
    """The forward of these tests reads at once, when it has been told that it may."""
    device = LateDevice(compute_at_once=True)
    return DeviceBlocks(planes, accelerator=device, gather=device.gather, scatter=device.scatter)


COPIERS: dict[str, Callable[[BlockPlanes], Any]] = {"host": HostBlocks, "device": over_device}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("layers") / "store") as server:
        yield server.start()


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer a step."""
    monkeypatch.setattr("kvstore.engine_adapter.block_planes.STEP_BYTES_MIN", 1)


@pytest.fixture(params=COPIERS)
def mine(server: ServerProcess, request: pytest.FixtureRequest) -> Iterator[Engine]:
    if request.param == "device" and not INTERPRETED:
        pytest.skip("kernels are not interpreted: Triton is missing, or TRITON_INTERPRET=0")
    made = make_engine(server.address, by_layer=True, copier=COPIERS[request.param]).attach()
    yield made
    made.close()


def forward(mine: Engine, job: LoadJob, skip: str = "") -> dict[str, bytes]:
    """A step with that load: what the forward finds in each layer when it may read it."""
    [worker], [cache] = mine.workers, mine.caches
    plan = StepPlan(epoch=mine.session.epoch, loads=(job,))
    worker.handle_fences(plan)
    worker.start_loads(plan, hooks_run=True)
    found = {}
    blocks = [block for page in job.pages for block in page.blocks]
    for layer, tensor in cache.kv_caches.items():
        if layer != skip:
            worker.wait_layer(layer)
            found[layer] = b"".join(tensor.numpy()[block].tobytes() for block in blocks)
    worker.submit_saves(plan)
    received, bad = worker.poll(set())
    assert not received, "a sync load is nobody's to wait for"
    mine.bad_blocks |= bad
    report = worker.report()
    assert report is not None
    mine.loads += report.loads
    for name, amount in report.counters.items():
        mine.counters[name] = mine.counters.get(name, 0) + amount
    return found


def stored_job(mine: Engine, **more: Any) -> LoadJob:
    tokens = tokens_of(3)
    assert mine.save(tokens, SAVED) == 3
    with mine.session.match(tokens) as hit:
        assert hit.stage(5.0) == 3
        return load_job(hit, THERE, sync=True, **more)


def test_each_layer_is_there_when_the_forward_reads_it(mine: Engine) -> None:
    job = stored_job(mine)
    [cache] = mine.caches
    expected = {
        layer: b"".join(tensor.numpy()[block].tobytes() for block in SAVED)
        for layer, tensor in cache.kv_caches.items()
    }
    assert forward(mine, job) == expected
    [done] = mine.answers(job)
    assert (done.ok, done.bytes) == (True, sum(map(len, expected.values())))
    assert not mine.bad_blocks
    assert mine.counters["loads_by_layer"] == 1


def test_async_loads_and_saves_go_the_same_way(mine: Engine) -> None:
    tokens = tokens_of(3)
    assert mine.save(tokens, SAVED) == 3
    before = bytes_of(mine.caches[0], SAVED)
    mine.caches[0].raw.zero_()
    with mine.session.match(tokens) as hit:
        assert hit.stage(5.0) == 3
        job = mine.load(hit, THERE)
    assert [done.ok for done in mine.answers(job)] == [True]
    assert bytes_of(mine.caches[0], THERE) == before
    assert "loads_by_layer" not in mine.counters


def test_a_page_that_moved_is_named_in_the_step_that_read_it(mine: Engine) -> None:
    job = stored_job(mine)
    pages = list(job.pages)
    pages[1] = PageLoad(pages[1].slot, pages[1].generation + 2, pages[1].blocks)
    job = LoadJob(job.job, job.request, tuple(pages), sync=True, deadline_s=5.0)
    forward(mine, job)
    [done] = mine.answers(job)
    assert (done.ok, done.reason, done.bad_blocks) == (False, "moved", (6, 9, 10, 11))
    assert mine.bad_blocks == {6, 9, 10, 11}
    assert bytes_of(mine.caches[0], [7, 8]) == bytes_of(mine.caches[0], [1, 2])


def test_a_load_that_is_late_or_cannot_be_names_all_its_blocks(mine: Engine) -> None:
    late = stored_job(mine, deadline_s=0.0)
    forward(mine, late)
    lost = LoadJob(10**6, "lost", (PageLoad(77 << 40, 2, (3, 4)),), sync=True, deadline_s=5.0)
    forward(mine, lost)
    first, second, _ = stored_job(mine).pages
    short = PageLoad(second.slot, second.generation, (9,))
    wrong = LoadJob(10**7, "wrong", (first, short), sync=True, deadline_s=5.0)
    forward(mine, wrong)
    assert [done.bad_blocks for done in mine.loads] == [tuple(sorted(THERE)), (3, 4), (7, 8, 9)]
    reasons = ["deadline", "no such extent", "ValueError: 1 blocks for a page of 2"]
    assert [done.reason for done in mine.loads] == reasons


def test_layers_that_nobody_waits_for_are_computed_again_and_loads_are_whole_from_then_on(
    mine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    """An engine whose forward does not ask, as one in a CUDA graph: it may have read too early."""
    job = stored_job(mine)
    with caplog.at_level(logging.ERROR, "kvstore.vllm"):
        forward(mine, job, skip=next(iter(mine.caches[0].kv_caches)))
    assert mine.bad_blocks == set(THERE)
    assert "1 layers, model.layers.0.0.attn among them" in caplog.text
    again = stored_job(mine)
    forward(mine, again)
    [done] = mine.answers(again)
    assert done.ok
    assert mine.counters["loads_by_layer"] == 1, "the second was whole"


class SlotsMove(HostBlocks):
    """What is loaded is evicted before the copy is done."""

    evict: Callable[[], None]

    def load(self, pages: Sequence[PageCopy], stretches: Sequence[Stretch] = ()) -> int:
        copied = super().load(pages, stretches)
        SlotsMove.evict()
        return copied


@pytest.mark.parametrize("by_layer", [True, False])
def test_pages_that_move_during_the_copy_are_not_taken_for_right(
    server: ServerProcess, by_layer: bool
) -> None:
    mine = make_engine(server.address, by_layer=by_layer, copier=SlotsMove).attach()
    try:
        job = stored_job(mine)
        first = job.pages[0]

        def is_gone() -> bool:  # the lease may end a moment after it was given back
            evict_all(mine)
            try:
                mine.workers[0]._arena.page(mine.session.epoch, first.slot, first.generation, 1)
            except NotThere:
                return True
            return False

        SlotsMove.evict = lambda: wait_until(is_gone)
        forward(mine, job)
        [done] = mine.answers(job)
        assert (done.ok, done.reason) == (False, "moved")
        assert mine.bad_blocks == set(THERE)
    finally:
        mine.close()


class BreaksAtThird(HostBlocks):
    """A device that fails in the middle."""

    loads = 0

    def load(self, pages: Sequence[PageCopy], stretches: Sequence[Stretch] = ()) -> int:
        self.loads += 1
        if self.loads == 3:
            raise RuntimeError("an illegal access was found")
        return super().load(pages, stretches)


def test_a_copy_that_fails_in_the_middle_lets_the_forward_go_on(server: ServerProcess) -> None:
    mine = make_engine(server.address, by_layer=True, copier=BreaksAtThird).attach()
    try:
        job = stored_job(mine)
        forward(mine, job)
        [done] = mine.answers(job)
        assert done.reason == "RuntimeError: an illegal access was found"
        assert mine.bad_blocks == set(THERE)
    finally:
        mine.close()


@pytest.mark.parametrize("hooks_run", [True, False])
def test_on_a_cpu_loads_are_whole_unless_asked_for(server: ServerProcess, hooks_run: bool) -> None:
    mine = make_engine(server.address).attach()
    try:
        job = stored_job(mine)
        [worker], [cache] = mine.workers, mine.caches
        plan = StepPlan(epoch=mine.session.epoch, loads=(job,))
        worker.start_loads(plan, hooks_run=hooks_run)
        assert bytes_of(cache, THERE[:5]) == bytes_of(cache, SAVED[:5])
        assert worker.poll(set()) == (set(), set())
    finally:
        mine.close()
