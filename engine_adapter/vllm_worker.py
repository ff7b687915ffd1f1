"""One rank's side of the vLLM plug-in: copies pages between the arena and the engine's blocks.

It does what a StepPlan says and answers every job once, whatever happens: no call here raises, asks
the server for a page, or waits for longer than a copy takes. A load that did not bring the right
bytes names its blocks, so that the engine computes them. Must not be here: which pages, when, why.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from kvstore.engine_adapter.arena_view import ArenaView, NotThere
from kvstore.engine_adapter.block_regions import (
    HostBlocks,
    LayoutProblem,
    PageShard,
    RegionFacts,
    difference,
    find_regions,
)
from kvstore.engine_adapter.transfer_plan import (
    CANCELLED,
    SKIP_BLOCK,
    LoadDone,
    SaveDone,
    WorkerReport,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvstore.engine_adapter.transfer_plan import Grant, LoadJob, PageLoad, SaveJob, StepPlan

FENCE_S_MAX = 5.0
SHUTDOWN_S = 2.0

_log = logging.getLogger("kvstore.vllm")


@dataclass(slots=True, eq=False)
class _Load:
    """A load under way. `until_s`: when its answer is due."""

    job: LoadJob
    epoch: int
    until_s: float
    mark: Any
    cancelled: bool = False


@dataclass(slots=True, eq=False)
class _Save:
    """A save under way. `abandoned`: its blocks are being reused, its copy is worth nothing."""

    job: SaveJob
    epoch: int
    mark: Any
    done: threading.Event = field(default_factory=threading.Event)
    abandoned: bool = False


class VllmWorker:
    """Made by the connector in each worker process. Hooks come from one thread; close it."""

    def __init__(self, rank: int, world: int, *, server_uid: int | None = None) -> None:
        """`rank` of `world` tensor ranks; `server_uid` is whose server's memory to trust."""
        self.rank = rank
        self._world = world
        self._arena = ArenaView(server_uid)
        self._shard: PageShard | None = None
        # HostBlocks or DeviceBlocks, one a thread: the caller's for sync loads, loads, saves.
        self._sync_blocks: Any = None
        self._load_blocks: Any = None
        self._save_blocks: Any = None
        self._lock = threading.Lock()
        self._loads: dict[int, _Load] = {}
        self._saves: dict[int, _Save] = {}
        self._loads_done: list[tuple[LoadDone, bool]] = []  # and whether it was sync
        self._saves_done: list[SaveDone] = []
        self._polled: list[LoadDone] = []
        self._counters: dict[str, float] = {}
        self._told_epoch = 0
        self._load_tasks: queue.SimpleQueue[_Load | None] = queue.SimpleQueue()
        self._save_tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._closing = False

    def register(
        self, kv_caches: Mapping[str, Any], kv_cache_config: Any, declared: RegionFacts
    ) -> RegionFacts:
        """Take the engine's KV tensors; the facts as declared, or with the problem that forbids.

        `declared` is what facts_from_config() says for pages of the chosen number of blocks.
        """
        if declared.problem:
            return declared
        try:
            regions = find_regions(kv_caches, kv_cache_config)
            problem = difference(declared, regions, kv_caches)
            blocks = declared.shard_bytes // declared.block_bytes
            shard = PageShard.of_rank(declared, blocks, self._world, self.rank)
            if not problem:
                self._sync_blocks = _copier(regions, shard)
                self._load_blocks = _copier(regions, shard)
                self._save_blocks = _copier(regions, shard)
                self._shard = shard
        except (LayoutProblem, RuntimeError, IndexError) as exc:
            problem = str(exc)
        if problem:
            return replace(declared, problem=problem)
        self._threads = [
            threading.Thread(target=self._load_forever, name="kvstore-load", daemon=True),
            threading.Thread(target=self._save_forever, name="kvstore-save", daemon=True),
        ]
        for thread in self._threads:
            thread.start()
        return declared

    def handle_fences(self, plan: StepPlan) -> None:
        """First call of a step: finish the saves whose blocks its forward will overwrite."""
        if plan.grant is not None and self._shard is not None:
            self._save_tasks.put(partial(self._attach, plan.grant))
        until = time.monotonic() + FENCE_S_MAX
        for number in plan.fenced:
            with self._lock:
                save = self._saves.get(number)
            if save is not None and not save.done.wait(max(0.0, until - time.monotonic())):
                save.abandoned = True
                self._add(fences_missed=1)

    def start_loads(self, plan: StepPlan) -> None:
        """Copy the sync loads now, hand the others to the load thread; cancel what is cancelled."""
        with self._lock:
            for number in plan.cancelled:
                if number in self._loads:
                    self._loads[number].cancelled = True
        for job in plan.loads:
            mark = self._sync_blocks.mark() if self._sync_blocks is not None else None
            load = _Load(job, plan.epoch, time.monotonic() + job.deadline_s, mark)
            with self._lock:
                self._loads[job.job] = load
            if job.sync or not self._threads or self._closing:
                self._run_load(load, self._sync_blocks)
            else:
                self._load_tasks.put(load)

    def submit_saves(self, plan: StepPlan) -> None:
        """After the forward: hand the saves to the save thread; their blocks stay as they are."""
        for job in plan.saves:
            mark = self._save_blocks.mark() if self._save_blocks is not None else None
            save = _Save(job, plan.epoch, mark)
            with self._lock:
                self._saves[job.job] = save
            if not self._threads or self._closing:
                self._run_save(save)
            else:
                self._save_tasks.put(partial(self._run_save, save))

    def poll(self, finished_requests: set[str]) -> tuple[set[str], set[int]]:
        """Requests whose async load has ended since the last call, and blocks without their bytes.

        A request is named once a load, also when it is among `finished_requests`: the engine keeps
        its blocks until then.
        """
        with self._lock:
            ended, self._loads_done = self._loads_done, []
        self._polled += [done for done, _ in ended]
        received = {done.request for done, sync in ended if not sync}
        return received, {block for done, _ in ended for block in done.bad_blocks}

    def report(self) -> WorkerReport | None:
        """What the scheduler side has to know since the last call; after poll()."""
        loads, self._polled = self._polled, []
        epoch = self._arena.epoch
        with self._lock:
            saves, self._saves_done = self._saves_done, []
            counters, self._counters = self._counters, {}
        if not loads and not saves and not counters and epoch == self._told_epoch:
            return None
        self._told_epoch = epoch
        return WorkerReport(tuple(loads), tuple(saves), {self.rank: epoch}, counters)

    def shutdown(self) -> None:
        """End the threads; what they are at is answered, for whoever still asks."""
        self._closing = True
        self._load_tasks.put(None)
        self._save_tasks.put(None)
        until = time.monotonic() + SHUTDOWN_S
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        self._arena.close()

    def _load_forever(self) -> None:
        while (load := self._load_tasks.get()) is not None:
            self._run_load(load, self._load_blocks)

    def _attach(self, grant: Grant) -> None:
        attached = self._arena.attach(grant, self.rank)
        self._add(**{"attached" if attached else "attach_failed": 1})

    def _save_forever(self) -> None:
        while (task := self._save_tasks.get()) is not None:
            try:
                task()
            except Exception:
                _log.exception("kvstore: a task of rank %d failed", self.rank)

    def _run_load(self, load: _Load, blocks: Any) -> None:
        start, loaded, copied, reason = time.monotonic(), 0, 0, "failed"
        try:
            if blocks is None:
                reason = "no layout"
            else:
                loaded, copied, reason = self._load(load, blocks)
        except Exception as exc:
            # Whatever it was, the engine goes on and computes these blocks itself.
            reason = f"{type(exc).__name__}: {exc}"
            _log.exception("kvstore: a load of rank %d failed", self.rank)
        finally:
            self._end_load(load, loaded, copied, time.monotonic() - start, reason)

    def _load(self, load: _Load, blocks: Any) -> tuple[int, int, str]:
        """Leading pages whose bytes are right, bytes copied, and why it is not all of them."""
        copied = 0
        blocks.begin(load.mark)
        try:
            for number, page in enumerate(load.job.pages):
                if load.cancelled:
                    return number, copied, CANCELLED
                if time.monotonic() > load.until_s:
                    return number, copied, "deadline"
                try:
                    copied += self._load_page(load.epoch, page, blocks)
                except NotThere as exc:
                    return number, copied, str(exc)
        finally:
            blocks.finish()
        return len(load.job.pages), copied, ""

    def _load_page(self, epoch: int, page: PageLoad, blocks: Any) -> int:
        assert self._shard is not None
        if all(block == SKIP_BLOCK for block in page.blocks):
            return 0
        with self._arena.page(epoch, page.slot, page.generation, self._shard.page_bytes) as view:
            return int(blocks.load(view, page.blocks))

    def _end_load(self, load: _Load, loaded: int, copied: int, seconds: float, reason: str) -> None:
        job = load.job
        bad = {block for page in job.pages[loaded:] for block in page.blocks} - {SKIP_BLOCK}
        done = LoadDone(
            job.job, job.request, not reason, tuple(sorted(bad)), copied, seconds, reason
        )
        with self._lock:
            self._loads.pop(job.job, None)
            self._loads_done.append((done, job.sync))
        self._add(loads=1, load_bytes=copied, load_seconds=seconds, loads_failed=bool(reason))

    def _run_save(self, save: _Save) -> None:
        start, copied, reason = time.monotonic(), 0, "failed"
        try:
            copied, reason = self._save(save)
        except Exception as exc:
            reason = f"{type(exc).__name__}: {exc}"
            _log.exception("kvstore: a save of rank %d failed", self.rank)
        finally:
            seconds = time.monotonic() - start
            with self._lock:
                if save.abandoned:
                    reason = "its blocks were reused"
                done = SaveDone(save.job.job, not reason, copied, seconds, reason)
                self._saves.pop(save.job.job, None)
                self._saves_done.append(done)
            self._add(saves=1, save_bytes=copied, save_seconds=seconds, saves_failed=bool(reason))
            save.done.set()

    def _save(self, save: _Save) -> tuple[int, str]:
        """Bytes copied to staging, and why it is not all of them."""
        shard = self._shard
        if shard is None:
            return 0, "no layout"
        if not shard.writes:  # another rank has the same bytes, and writes them
            return 0, ""
        copied = 0
        self._save_blocks.begin(save.mark)
        for page in save.job.pages:
            if save.abandoned:
                break
            try:
                with self._arena.staging(save.epoch, page.offset, shard.page_bytes) as view:
                    copied += self._save_blocks.save(page.blocks, view)
            except NotThere as exc:
                return copied, str(exc)
        return copied, ""

    def _add(self, **amounts: float) -> None:
        with self._lock:
            for name, amount in amounts.items():
                if amount:
                    self._counters[name] = self._counters.get(name, 0) + amount


def _copier(regions: Any, shard: PageShard) -> Any:
    """What copies for one thread."""
    if regions[0].tensor.device.type == "cpu":
        return HostBlocks(regions, shard)
    from kvstore.engine_adapter.device_blocks import DeviceBlocks

    return DeviceBlocks(regions, shard)
