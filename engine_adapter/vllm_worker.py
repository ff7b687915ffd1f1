"""One rank's side of the vLLM plug-in: copies pages between the arena and the engine's blocks.

It does what a StepPlan says and answers every job once, whatever happens: no call here raises, asks
the server for a page, or waits for longer than a copy takes. A load that did not bring the right
bytes names its blocks, so that the engine computes them. Must not be here: which pages, when, why.

Saves begin after the forward, not in it: only then are a block's tokens confirmed, and nothing
waits for a save. So vLLM's save_kv_layer() has nothing to do.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from kvstore.engine_adapter.arena_view import ArenaPage, ArenaView, NotThere
from kvstore.engine_adapter.block_planes import BlockPlanes, HostBlocks, PageCopy
from kvstore.engine_adapter.block_regions import (
    LayoutProblem,
    PageShard,
    RegionFacts,
    difference,
    find_regions,
)
from kvstore.engine_adapter.layer_gate import LayerGate
from kvstore.engine_adapter.task_lane import TaskLane
from kvstore.engine_adapter.transfer_plan import (
    CANCELLED,
    SKIP_BLOCK,
    LoadDone,
    SaveDone,
    WorkerReport,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from kvstore.engine_adapter.transfer_plan import Grant, LoadJob, SaveJob, StepPlan

FENCE_S_MAX = 5.0
SHUTDOWN_S = 2.0

_log = logging.getLogger("kvstore.vllm")


@dataclass(slots=True, eq=False)
class _Load:
    """A load under way. `until_s`: when its answer is due. `gate`: of a load by layers."""

    job: LoadJob
    epoch: int
    until_s: float
    mark: Any
    cancelled: bool = False
    gate: LayerGate | None = None
    loaded: int = 0  # leading pages whose bytes are right
    copied: int = 0  # bytes
    seconds: float = 0.0
    reason: str = "failed"  # why it is not all of them


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

    def __init__(
        self,
        rank: int,
        world: int,
        *,
        server_uid: int | None = None,
        by_layer: bool | None = None,
        copier: Callable[[BlockPlanes], Any] | None = None,
    ) -> None:
        """`rank` of `world` tensor ranks; `server_uid` is whose server's memory to trust.

        by_layer: whether a forward may begin while the layers of its loads still come; None: where
        copies run beside the forward, on a device. `copier` makes what copies for one thread.
        """
        self.rank = rank
        self._world = world
        self._may_by_layer = by_layer
        self._copier = copier or _copier
        self._arena = ArenaView(server_uid)
        self._shard: PageShard | None = None
        # HostBlocks or DeviceBlocks, one a thread: for sync loads, loads, saves.
        self._sync_blocks: Any = None
        self._load_blocks: Any = None
        self._save_blocks: Any = None
        self._lock = threading.Lock()
        self._loads: dict[int, _Load] = {}
        self._saves: dict[int, _Save] = {}
        self._by_layer: list[_Load] = []  # of this step
        self._loads_done: list[tuple[LoadDone, bool]] = []  # and whether it was sync
        self._saves_done: list[SaveDone] = []
        self._polled: list[LoadDone] = []
        self._counters: dict[str, float] = {}
        self._told_epoch = 0
        names = ("attach", "sync-load", "load", "save")
        self._lanes = {name: TaskLane(f"kvstore-{name}") for name in names}

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
            problem = difference(declared, regions)
            blocks = declared.shard_bytes // declared.block_bytes
            shard = PageShard.of_rank(declared, blocks, self._world, self.rank)
            if not problem:
                self._take(BlockPlanes(regions, shard))
        except (LayoutProblem, RuntimeError, ValueError, IndexError) as exc:
            problem = str(exc)
        return replace(declared, problem=problem) if problem else declared

    def handle_fences(self, plan: StepPlan) -> None:
        """First call of a step: finish the saves whose blocks its forward will overwrite."""
        self._end_by_layer()
        if plan.grant is not None and self._shard is not None:
            self._lanes["attach"].put(partial(self._attach, plan.grant))
        until = time.monotonic() + FENCE_S_MAX
        for number in plan.fenced:
            with self._lock:
                save = self._saves.get(number)
            if save is not None and not save.done.wait(max(0.0, until - time.monotonic())):
                save.abandoned = True
                self._add(fences_missed=1)

    def start_loads(self, plan: StepPlan, *, hooks_run: bool = False) -> None:
        """Begin the loads, cancel what is cancelled. Sync loads are done when this returns.

        hooks_run: the forward that follows calls wait_layer() before it reads a layer. Then those
        may come while it computes, where the engine has more to do than to wait for them.
        """
        with self._lock:
            for number in plan.cancelled:
                if number in self._loads:
                    self._loads[number].cancelled = True
        for job in plan.loads:
            mark = self._sync_blocks.mark() if self._sync_blocks is not None else None
            load = _Load(job, plan.epoch, time.monotonic() + job.deadline_s, mark)
            with self._lock:
                self._loads[job.job] = load
            if job.sync and hooks_run and self._may_by_layer and self._shard is not None:
                steps = self._sync_blocks.planes.steps(len(job.pages))
                load.gate = LayerGate([each.layers for each in steps])
                if self._lanes["sync-load"].put(partial(self._run_load, load, self._sync_blocks)):
                    self._by_layer.append(load)
                    continue
                load.gate = None
            run = partial(self._run_load, load, self._load_blocks)
            if job.sync or self._shard is None or not self._lanes["load"].put(run):
                self._run_load(load, self._sync_blocks)

    def wait_layer(self, layer: str) -> None:
        """The forward is about to read this layer: wait for what this step loads of it."""
        for load in self._by_layer:
            assert load.gate is not None
            ready = load.gate.wait(layer)
            if ready is not None:
                self._sync_blocks.wait(ready)

    def submit_saves(self, plan: StepPlan) -> None:
        """After the forward: hand the saves to the save thread; their blocks stay as they are."""
        for job in plan.saves:
            mark = self._save_blocks.mark() if self._save_blocks is not None else None
            save = _Save(job, plan.epoch, mark)
            with self._lock:
                self._saves[job.job] = save
            run = partial(self._run_save, save)
            if self._shard is None or not self._lanes["save"].put(run):
                self._run_save(save)

    def poll(self, finished_requests: set[str]) -> tuple[set[str], set[int]]:
        """Requests whose async load has ended since the last call, and blocks without their bytes.

        A request is named once a load, also when it is among `finished_requests`: the engine keeps
        its blocks until then. After the forward: it waits for the loads by layers.
        """
        self._end_by_layer()
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
        until = time.monotonic() + SHUTDOWN_S
        for lane in self._lanes.values():
            lane.close()
        for lane in self._lanes.values():
            lane.join(until)
        self._arena.close()

    def _take(self, planes: BlockPlanes) -> None:
        """Copy for these planes from now on."""
        if planes.device.type != "cpu":
            from kvstore.engine_adapter.pinned_arena import PinnedArena

            pin_later = partial(self._lanes["attach"].put, self._arena.settle_pins)
            self._arena.use_pins(PinnedArena(planes.device), pin_later)
        if self._may_by_layer is None:
            self._may_by_layer = planes.device.type != "cpu"
        self._sync_blocks, self._load_blocks, self._save_blocks = (
            self._copier(planes) for _ in range(3)
        )
        self._shard = planes.shard

    def _attach(self, grant: Grant) -> None:
        attached = self._arena.attach(grant, self.rank)
        self._add(**{"attached" if attached else "attach_failed": 1})

    def _run_load(self, load: _Load, blocks: Any) -> None:
        start = time.monotonic()
        try:
            if blocks is None:
                load.reason = "no layout"
            else:
                load.reason = self._load(load, blocks)
        except Exception as exc:
            # Whatever it was, the engine goes on and computes these blocks itself.
            load.loaded, load.reason = 0, f"{type(exc).__name__}: {exc}"
            _log.exception("kvstore: a load of rank %d failed", self.rank)
        finally:
            load.seconds = time.monotonic() - start
            if load.gate is not None:
                load.gate.end()  # the engine's thread answers, after its forward
            else:
                self._end_load(load)

    def _load(self, load: _Load, blocks: Any) -> str:
        """Copy what can be had; why it is not all pages, of which the `loaded` first are right."""
        with self._arena.reading():
            held, missing = self._hold(load)
            wanted = [(number, page) for number, page in enumerate(held) if page is not None]
            copies = [
                PageCopy(page.memory, load.job.pages[number].blocks, page.in_place)
                for number, page in wanted
            ]
            blocks.begin(load.mark)
            try:
                if load.gate is None:
                    stopped = self._copy_pages(load, blocks, copies)
                else:
                    stopped = self._copy_layers(load, blocks, copies)
            finally:
                blocks.finish()
            whole = wanted[load.loaded][0] if stopped and wanted else len(held)
            for number, page in wanted:
                if number < whole and page.moved:
                    load.loaded = number
                    return "moved"
        load.loaded = whole
        return stopped or missing

    def _hold(self, load: _Load) -> tuple[list[ArenaPage | None], str]:
        """Leading pages that are there, None where nothing is wanted; why it is not all."""
        assert self._shard is not None
        held: list[ArenaPage | None] = []
        for page in load.job.pages:
            if all(block == SKIP_BLOCK for block in page.blocks):
                held.append(None)
                continue
            try:
                size = self._shard.page_bytes
                held.append(self._arena.page(load.epoch, page.slot, page.generation, size))
            except NotThere as exc:
                return held, str(exc)
        return held, ""

    def _copy_pages(self, load: _Load, blocks: Any, copies: Sequence[PageCopy]) -> str:
        """Page by page; why it stopped before the end, after `loaded` of them."""
        for batch in self._batches(copies, blocks):
            if stop := _why_stop(load):
                return stop
            load.copied += blocks.load(batch)
            load.loaded += len(batch)
        return ""

    def _copy_layers(self, load: _Load, blocks: Any, copies: Sequence[PageCopy]) -> str:
        """Layer by layer, all pages of each; no page is whole before the last one."""
        assert load.gate is not None
        for step in blocks.planes.steps(len(load.job.pages)):
            if stop := _why_stop(load):
                return stop
            load.copied += blocks.load(copies, (step,)) if copies else 0
            load.gate.open(blocks.ready())
        load.loaded = len(copies)
        return ""

    def _end_by_layer(self) -> None:
        """Answer the loads of this step that came by layers, once they are done."""
        ended, self._by_layer = self._by_layer, []
        for load in ended:
            assert load.gate is not None
            load.gate.ended.wait()
            if unasked := load.gate.unasked:
                self._may_by_layer = False
                load.loaded, load.reason = 0, "layers were read before they were there"
                _log.error(
                    "kvstore: %d layers, %s among them, are read without waiting for their load: "
                    "computed again, and loads are whole from now on",
                    len(unasked),
                    min(unasked),
                )
            self._end_load(load)

    def _end_load(self, load: _Load) -> None:
        job, reason = load.job, load.reason
        bad = {block for page in job.pages[load.loaded :] for block in page.blocks} - {SKIP_BLOCK}
        answer = (not reason, tuple(sorted(bad)), load.copied, load.seconds, reason)
        done = LoadDone(job.job, job.request, *answer)
        with self._lock:
            self._loads.pop(job.job, None)
            self._loads_done.append((done, job.sync))
        self._add(
            loads=1,
            load_bytes=load.copied,
            load_seconds=load.seconds,
            loads_failed=bool(reason),
            loads_by_layer=load.gate is not None,
        )

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
        pages = save.job.pages
        blocks = self._save_blocks
        blocks.begin(save.mark)
        try:
            for batch in self._batches(pages, blocks):
                if save.abandoned:
                    break
                staging = [
                    self._arena.staging(save.epoch, page.offset, shard.page_bytes) for page in batch
                ]
                copies = [
                    PageCopy(memory, page.blocks)
                    for memory, page in zip(staging, batch, strict=True)
                ]
                copied += blocks.save(copies)
        except NotThere as exc:
            return copied, str(exc)
        finally:
            blocks.finish()
        return copied, ""

    def _batches(self, pages: Sequence[Any], blocks: Any) -> Iterator[Sequence[Any]]:
        """As many pages at a time as are copied between two looks at the clock."""
        assert self._shard is not None
        step = max(1, blocks.batch_bytes // self._shard.size_bytes)
        for at in range(0, len(pages), step):
            yield pages[at : at + step]

    def _add(self, **amounts: float) -> None:
        with self._lock:
            for name, amount in amounts.items():
                if amount:
                    self._counters[name] = self._counters.get(name, 0) + amount


def _why_stop(load: _Load) -> str:
    if load.cancelled:
        return CANCELLED
    return "deadline" if time.monotonic() > load.until_s else ""


def _copier(planes: BlockPlanes) -> Any:
    """What copies for one thread."""
    if planes.device.type == "cpu":
        return HostBlocks(planes)
    from kvstore.engine_adapter.device_blocks import DeviceBlocks

    return DeviceBlocks(planes)
