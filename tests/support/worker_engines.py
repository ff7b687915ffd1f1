"""What the scheduler side of the vLLM plug-in does as far as workers see it, with real workers.

On KV memory shaped like vLLM's, and against a real server.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from fake_kv_cache import FakeCache, make_cache
from raw_client import wait_until

from kvstore import CacheSpec
from kvstore import kvstore_pb2 as pb
from kvstore.connect import connect
from kvstore.engine_adapter.block_regions import PageShard, RegionFacts, facts_from_config
from kvstore.engine_adapter.transfer_plan import (
    Grant,
    LoadDone,
    LoadJob,
    PageLoad,
    PageSave,
    SaveDone,
    SaveJob,
    StepPlan,
    WorkerReport,
)
from kvstore.engine_adapter.vllm_worker import VllmWorker

if TYPE_CHECKING:
    from kvstore.remote_match import RemoteMatch
    from kvstore.remote_session import RemoteSession

BLOCKS_PER_PAGE = 2
PAGE_TOKENS = 16
numbers = itertools.count(1)


def facts_of(cache: FakeCache) -> RegionFacts:
    return facts_from_config(
        cache.vllm_config, cache.config, BLOCKS_PER_PAGE, inside=lambda config, spec: "FAKE"
    )


@dataclass
class Engine:
    """What the scheduler side does, as far as workers see it, and a worker for each rank."""

    store: Any
    session: RemoteSession
    caches: list[FakeCache]
    workers: list[VllmWorker]
    loads: list[LoadDone] = field(default_factory=list)
    saves: list[SaveDone] = field(default_factory=list)
    epochs: dict[int, int] = field(default_factory=dict)
    counters: dict[str, float] = field(default_factory=dict)
    received: list[str] = field(default_factory=list)
    bad_blocks: set[int] = field(default_factory=set)

    def step(self, plan: StepPlan) -> None:
        """One engine step on all ranks, in the order of the engine's hooks."""
        merged = WorkerReport()
        for worker in self.workers:
            worker.handle_fences(plan)
            worker.start_loads(plan)
            worker.submit_saves(plan)
            received, bad = worker.poll(set())
            self.received += sorted(received)
            self.bad_blocks |= bad
            report = worker.report()
            if report is not None:
                merged = merged.merged(report)
        self.loads += merged.loads
        self.saves += merged.saves
        self.epochs |= merged.attached_epoch
        for name, amount in merged.counters.items():
            self.counters[name] = self.counters.get(name, 0) + amount

    def until(self, condition: Any) -> None:
        """Empty steps until it holds."""
        wait_until(lambda: (self.step(StepPlan()), condition())[1])

    def grant(self) -> Grant:
        made = self.session.attach_tokens(len(self.workers))
        assert made is not None
        return Grant(made.epoch, str(made.path), made.tokens)

    def attach(self) -> Engine:
        self.step(StepPlan(grant=self.grant()))
        ranks = range(len(self.workers))
        self.until(lambda: self.epochs == dict.fromkeys(ranks, self.session.epoch))
        return self

    def save(self, tokens: np.ndarray, blocks: list[int]) -> int:
        """Store a prompt whose pages lie in `blocks`, two each; pages that were new."""
        run = self.session.reserve(tokens, deadline_s=5.0)
        pages = [
            PageSave(offset, page_blocks(blocks, run.start + number))
            for number, offset in enumerate(run.offsets.tolist())
        ]
        job = SaveJob(next(numbers), tuple(pages))
        self.step(StepPlan(epoch=self.session.epoch, saves=(job,)))
        self.until(lambda: len(self.answers(job)) == len(self.workers))
        assert all(done.ok for done in self.answers(job)), self.saves
        return run.commit().pages

    def close(self) -> None:
        for worker in self.workers:
            worker.shutdown()
        self.store.close()

    def answers(self, job: LoadJob | SaveJob) -> list[Any]:
        return [done for done in [*self.loads, *self.saves] if done.job == job.job]

    def load(self, hit: RemoteMatch, blocks: list[int], **more: Any) -> LoadJob:
        """Plan a load of all of a match into `blocks`, and wait for its end."""
        job = load_job(hit, blocks, **more)
        self.step(StepPlan(epoch=self.session.epoch, loads=(job,)))
        self.until(lambda: len(self.answers(job)) == len(self.workers))
        return job


def page_blocks(blocks: list[int], page: int) -> tuple[int, ...]:
    return tuple(blocks[page * BLOCKS_PER_PAGE : (page + 1) * BLOCKS_PER_PAGE])


def load_job(
    hit: RemoteMatch, blocks: list[int], *, sync: bool = False, deadline_s: float = 5.0
) -> LoadJob:
    places = zip(*hit.places(0, hit.host_pages), strict=True)
    pages = tuple(
        PageLoad(int(slot), int(generation), page_blocks(blocks, page))
        for page, (slot, generation) in enumerate(places)
    )
    number = next(numbers)
    return LoadJob(number, f"request {number}", pages, sync, deadline_s)


def make_engine(
    address: str, *, tp: int = 1, replicas: int = 1, salt: str = "", **worker: Any
) -> Engine:
    """A fresh engine with noise in its KV memory; one of equal `salt` shares its pages.

    `worker` are more arguments of VllmWorker.
    """
    caches = [make_cache(tp=tp, replicas=replicas, seed=rank) for rank in range(tp)]
    facts = facts_of(caches[0])
    page_bytes = PageShard.of_rank(facts, BLOCKS_PER_PAGE, tp, 0).page_bytes
    spec = CacheSpec.opaque("worker", page_tokens=PAGE_TOKENS, page_bytes=page_bytes)
    store: Any = connect(address, lookup_deadline_s=5.0)
    session = store.session(spec, salt=(salt or f"own {next(numbers)}").encode())
    workers = [VllmWorker(rank, tp, **worker) for rank in range(tp)]
    for worker, cache in zip(workers, caches, strict=True):
        assert worker.register(cache.kv_caches, cache.config, facts).problem == ""
    return Engine(store, session, caches, workers)


def tokens_of(pages: int) -> np.ndarray:
    return np.arange(pages * PAGE_TOKENS, dtype=np.int32) + 1000 * next(numbers)


def bytes_of(cache: FakeCache, blocks: list[int]) -> bytes:
    """All layers of those blocks."""
    return b"".join(
        tensor.numpy()[block].tobytes() for tensor in cache.kv_caches.values() for block in blocks
    )


def evict_all(engine: Engine) -> None:
    """Of the whole store."""
    engine.store._link.channel.call("Evict", pb.EvictRequest(everything=True), 5)
