"""The copying half of the vLLM plug-in against a real server, on KV memory shaped like vLLM's."""

from __future__ import annotations

import itertools
import threading
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("torch", reason="KV memory is torch's")

from fake_kv_cache import make_cache
from raw_client import wait_until
from server_process import ServerProcess
from worker_engines import (
    Engine,
    bytes_of,
    evict_all,
    facts_of,
    load_job,
    make_engine,
    numbers,
    page_blocks,
    tokens_of,
)

from kvstore.engine_adapter.transfer_plan import (
    Grant,
    LoadJob,
    PageLoad,
    PageSave,
    SaveJob,
    StepPlan,
)
from kvstore.engine_adapter.vllm_worker import VllmWorker

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("worker") / "store") as server:
        yield server.start()


@pytest.fixture
def own(tmp_path: Path) -> Iterator[ServerProcess]:
    """A server for one test to maltreat."""
    with ServerProcess(tmp_path / "store") as server:
        yield server.start()


@pytest.fixture
def engines(server: ServerProcess) -> Iterator[Any]:
    """Makes engines, and ends them."""
    made: list[Engine] = []

    def make(address: str = server.address, **more: Any) -> Engine:
        made.append(make_engine(address, **more))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.mark.parametrize("sync", [True, False])
def test_what_one_engine_saves_another_loads_bit_exact(engines: Any, sync: bool) -> None:
    first, second = engines(salt=f"both {sync}").attach(), engines(salt=f"both {sync}").attach()
    tokens = tokens_of(3)
    assert first.save(tokens, [5, 6, 1, 9, 8, 7]) == 3
    with second.session.match(tokens) as hit:
        assert hit.stage(5.0) == 3
        job = second.load(hit, [2, 3, 10, 11, 4, 5], sync=sync)
    [done] = second.answers(job)
    assert done.ok
    assert done.bytes == 3 * facts_of(first.caches[0]).shard_bytes
    assert second.received == ([] if sync else [job.request])
    assert not second.bad_blocks
    loaded = bytes_of(second.caches[0], [2, 3, 10, 11, 4, 5])
    assert loaded == bytes_of(first.caches[0], [5, 6, 1, 9, 8, 7])
    assert second.counters["load_bytes"] == done.bytes


def test_pages_are_whole_when_all_ranks_have_written_their_part(engines: Any) -> None:
    first, second = engines(tp=3, salt="ranks").attach(), engines(tp=3, salt="ranks").attach()
    tokens = tokens_of(2)
    assert first.save(tokens, [1, 2, 3, 4]) == 2
    for cache in second.caches:
        cache.raw.zero_()
    with second.session.match(tokens) as hit:
        assert hit.stage(5.0) == 2
        job = second.load(hit, [7, 6, 5, 4])
    assert [done.ok for done in second.answers(job)] == [True] * 3
    assert second.received == [job.request] * 3
    for mine, theirs in zip(second.caches, first.caches, strict=True):
        assert bytes_of(mine, [7, 6, 5, 4]) == bytes_of(theirs, [1, 2, 3, 4])


def test_of_ranks_with_equal_bytes_one_writes_and_all_read(engines: Any) -> None:
    both = engines(tp=2, replicas=2).attach()
    tokens = tokens_of(1)
    assert both.save(tokens, [1, 2]) == 1
    assert both.counters["save_bytes"] == facts_of(both.caches[0]).shard_bytes
    with both.session.match(tokens) as hit:
        assert hit.stage(5.0) == 1
        both.load(hit, [5, 6])
    for cache in both.caches:
        assert bytes_of(cache, [5, 6]) == bytes_of(both.caches[0], [1, 2])


@pytest.mark.parametrize("sync", [True, False])
def test_a_page_that_moved_is_named_with_all_after_it(engines: Any, sync: bool) -> None:
    mine = engines().attach()
    tokens = tokens_of(3)
    mine.save(tokens, [1, 2, 3, 4, 5, 6])
    with mine.session.match(tokens) as hit:
        assert hit.stage(5.0) == 3
        job = load_job(hit, [7, 8, 9, 10, -1, 11], sync=sync)
        pages = list(job.pages)
        pages[1] = PageLoad(pages[1].slot, pages[1].generation + 2, pages[1].blocks)
        job = LoadJob(job.job, job.request, tuple(pages), sync, 5.0)
        mine.step(StepPlan(epoch=mine.session.epoch, loads=(job,)))
        mine.until(lambda: mine.answers(job))
    [done] = mine.answers(job)
    assert (done.ok, done.reason, done.bad_blocks) == (False, "moved", (9, 10, 11))
    assert mine.bad_blocks == {9, 10, 11}
    assert mine.received == ([] if sync else [job.request])
    assert bytes_of(mine.caches[0], [7, 8]) == bytes_of(mine.caches[0], [1, 2])


def test_loads_beside_evictions_are_right_or_named(own: ServerProcess, engines: Any) -> None:
    """The lease is given back while the copy runs: the generation alone tells."""
    mine = engines(own.address).attach()
    tokens = tokens_of(2)
    stop, staged, seen = threading.Event(), threading.Event(), set()

    def evict() -> None:
        while staged.wait() and not stop.is_set():
            staged.clear()
            evict_all(mine)

    evictor = threading.Thread(target=evict)
    evictor.start()
    try:
        for _ in range(60):
            mine.save(tokens, [1, 2, 3, 4])
            hit = mine.session.match(tokens)
            if hit.pages != 2 or hit.stage(5.0) != 2:
                continue
            job = load_job(hit, [7, 8, 9, 10])
            hit.release()
            staged.set()
            mine.bad_blocks.clear()
            mine.step(StepPlan(epoch=mine.session.epoch, loads=(job,)))
            mine.until(lambda job=job: mine.answers(job))
            [done] = mine.answers(job)
            seen.add(done.ok)
            good = [block for block in (7, 8, 9, 10) if block not in done.bad_blocks]
            was = [block - 6 for block in good]
            assert bytes_of(mine.caches[0], good) == bytes_of(mine.caches[0], was)
    finally:
        stop.set()
        staged.set()
        evictor.join()
    assert seen, "no load was made at all"


def test_a_server_that_is_killed_leaves_what_is_mapped_and_nothing_hangs(
    own: ServerProcess, engines: Any
) -> None:
    mine = engines(own.address).attach()
    tokens = tokens_of(2)
    mine.save(tokens, [1, 2, 3, 4])
    hit = mine.session.match(tokens)
    assert hit.stage(5.0) == 2
    mapped, epoch = load_job(hit, [5, 6, 7, 8]), mine.session.epoch
    mine.step(StepPlan(epoch=epoch, loads=(mapped,)))
    mine.until(lambda: mine.answers(mapped))
    unknown = PageLoad(mapped.pages[0].slot + (999 << 24), 2, (9, 10))
    run = mine.session.reserve(tokens_of(1))
    save = SaveJob(next(numbers), (PageSave(int(run.offsets[0]), (1, 2)),))
    own.kill()
    again = LoadJob(next(numbers), "again", mapped.pages, sync=True, deadline_s=5.0)
    lost = LoadJob(next(numbers), "lost", (unknown,), sync=False, deadline_s=5.0)
    mine.step(StepPlan(epoch=epoch, loads=(again, lost), saves=(save,)))
    mine.until(lambda: mine.answers(lost) and mine.answers(save))
    assert mine.answers(again)[0].ok, "what is mapped stays as it was"
    [done] = mine.answers(lost)
    assert (done.ok, done.reason, done.bad_blocks) == (False, "no such extent", (9, 10))
    assert run.commit(deadline_s=1.0).pages == 0
    mine.until(lambda: mine.epochs == {0: 0})
    own.start()
    wait_until(lambda: mine.session.epoch not in (0, epoch))
    mine.attach()
    wait_until(lambda: mine.save(tokens, [1, 2, 3, 4]) in (0, 2))
    with mine.session.match(tokens) as found:
        assert found.stage(5.0) == 2
        assert mine.answers(mine.load(found, [9, 10, 5, 6]))[0].ok


def test_every_job_is_answered_once_whatever_is_wrong_with_it(engines: Any) -> None:
    mine = engines().attach()
    tokens = tokens_of(1)
    mine.save(tokens, [1, 2])
    with mine.session.match(tokens) as hit:
        assert hit.stage(5.0) == 1
        good = load_job(hit, [5, 6]).pages[0]
        wrong = {
            "not attached": (12345, good),
            "no such slot": (0, PageLoad(good.slot | 0xFFFFFF, 2, (5, 6))),
            "no such extent": (0, PageLoad(good.slot + (77 << 24), 2, (5, 6))),
            "moved": (0, PageLoad(good.slot, good.generation + 1, (5, 6))),
            "ValueError: block 99": (0, PageLoad(good.slot, good.generation, (5, 99))),
            "ValueError: 1 blocks": (0, PageLoad(good.slot, good.generation, (5,))),
        }
        jobs = {}
        for sync, (reason, (epoch, page)) in itertools.product([True, False], wrong.items()):
            job = LoadJob(next(numbers), reason, (page,), sync, 5.0)
            jobs[job.job] = reason
            mine.step(StepPlan(epoch=epoch or mine.session.epoch, loads=(job,)))
        late = LoadJob(next(numbers), "late", (good,), sync=True, deadline_s=0.0)
        jobs[late.job] = "deadline"
        mine.step(StepPlan(epoch=mine.session.epoch, loads=(late,)))
        mine.until(lambda: {done.job for done in mine.loads} >= set(jobs))
    assert sorted(done.job for done in mine.loads) == sorted(jobs), "each once"
    for done in mine.loads:
        assert not done.ok
        assert done.reason.startswith(jobs[done.job])
        assert done.bad_blocks
    staging = [(0, 1 << 40, "no such staging"), (12345, 0, "not attached")]
    for epoch, offset, reason in staging:
        save = SaveJob(next(numbers), (PageSave(offset, (1, 2)),))
        mine.step(StepPlan(epoch=epoch or mine.session.epoch, saves=(save,)))
        mine.until(lambda save=save: mine.answers(save))
        assert [(done.ok, done.reason) for done in mine.answers(save)] == [(False, reason)]


def test_a_cancelled_load_is_still_answered(engines: Any) -> None:
    """The engine keeps the blocks of an aborted request until its load has ended."""
    mine = engines().attach()
    tokens = tokens_of(2)
    mine.save(tokens, [1, 2, 3, 4])
    with mine.session.match(tokens) as hit:
        assert hit.stage(5.0) == 2
        jobs = [load_job(hit, [5, 6, 7, 8]) for _ in range(50)]
        epoch = mine.session.epoch
        mine.step(StepPlan(epoch=epoch, loads=tuple(jobs)))
        mine.step(StepPlan(epoch=epoch, cancelled=(*(job.job for job in jobs), 10**9)))
        mine.until(lambda: len(mine.received) == 50)
    assert sorted(mine.received) == sorted(job.request for job in jobs)
    assert {done.reason for done in mine.loads} <= {"", "cancelled"}


def test_blocks_are_copied_before_a_fence_lets_them_be_reused(engines: Any) -> None:
    mine = engines().attach()
    blocks = [1, 2, 3, 4, 5, 6, 7, 8]
    for _ in range(20):
        tokens = tokens_of(4)
        run = mine.session.reserve(tokens, deadline_s=5.0)
        pages = [
            PageSave(offset, page_blocks(blocks, page))
            for page, offset in enumerate(run.offsets.tolist())
        ]
        job, before = SaveJob(next(numbers), tuple(pages)), bytes_of(mine.caches[0], blocks)
        mine.step(StepPlan(epoch=mine.session.epoch, saves=(job,)))
        [worker] = mine.workers
        worker.handle_fences(StepPlan(fenced=(job.job, 10**9)))
        mine.caches[0].raw.random_(-128, 127)
        mine.until(lambda job=job: mine.answers(job))
        assert run.commit().pages == 4
        with mine.session.match(tokens) as hit:
            assert hit.stage(5.0) == 4
            mine.load(hit, blocks)
        assert bytes_of(mine.caches[0], blocks) == before


def test_a_rank_without_a_token_says_that_it_is_not_attached(engines: Any) -> None:
    mine = engines(tp=2)
    grant = mine.grant()
    mine.step(StepPlan(grant=Grant(grant.epoch, grant.path, grant.tokens[:1])))
    mine.until(lambda: mine.counters.get("attach_failed") == 1 and mine.epochs.get(0))
    assert mine.epochs == {0: grant.epoch, 1: 0}


def test_tensors_that_differ_from_what_was_declared_are_refused_and_jobs_answered() -> None:
    cache = make_cache()
    worker = VllmWorker(0, 1)
    facts = facts_of(make_cache(layers=4))
    assert "were declared" in worker.register(cache.kv_caches, cache.config, facts).problem
    load = LoadJob(1, "r", (PageLoad(0, 2, (3, 4)),), sync=False, deadline_s=5.0)
    save = SaveJob(2, (PageSave(0, (1, 2)),))
    plan = StepPlan(epoch=7, loads=(load,), saves=(save,), grant=Grant(7, "/nowhere", (b"",)))
    worker.handle_fences(plan)
    worker.start_loads(plan)
    worker.submit_saves(plan)
    assert worker.poll(set()) == ({"r"}, {3, 4})
    report = worker.report()
    assert report is not None
    assert [(done.ok, done.reason) for done in report.loads] == [(False, "no layout")]
    assert [(done.ok, done.reason) for done in report.saves] == [(False, "no layout")]
    assert worker.report() is None
    worker.shutdown()


def test_after_shutdown_jobs_are_answered_still(engines: Any) -> None:
    mine = engines().attach()
    tokens = tokens_of(1)
    mine.save(tokens, [1, 2])
    with mine.session.match(tokens) as hit:
        assert hit.stage(5.0) == 1
        job = load_job(hit, [5, 6])
    [worker] = mine.workers
    worker.shutdown()
    mine.step(StepPlan(epoch=mine.session.epoch, loads=(job,)))
    assert [done.reason for done in mine.answers(job)] == ["not attached"]
