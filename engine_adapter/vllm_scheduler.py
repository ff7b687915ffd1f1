"""The scheduler role of the vLLM plug-in: vLLM's hooks in, planner's answers out.

Lives in EngineCore and owns the one session with the store. Nothing here waits for the store longer
than an idle engine may: what is slow (weights' digest, connecting, look-ups) has its own threads.
Until all of it is there, answers are misses and nothing is saved.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from typing import TYPE_CHECKING, Any

from kvstore.connect import connect
from kvstore.engine_adapter.load_choice import PREFILL_TOKENS_MIN, LoadChoice, LoadMode
from kvstore.engine_adapter.load_planner import (
    LOST_LEASE,
    TOO_SLOW_DISK,
    TOO_SLOW_LOOKUP,
    Sizes,
)
from kvstore.engine_adapter.lookups import UNREACHABLE, Lookups
from kvstore.engine_adapter.plan_records import Policy
from kvstore.engine_adapter.planner import PAUSE, Planner
from kvstore.engine_adapter.save_losses import why_lost
from kvstore.engine_adapter.save_planner import PINNED_SHARE_MAX
from kvstore.engine_adapter.store_refusals import CUT
from kvstore.engine_adapter.transfer_plan import CANCELLED, StepPlan
from kvstore.engine_adapter.vllm_blocks import VllmBlocks
from kvstore.engine_adapter.vllm_events import PageEvents
from kvstore.engine_adapter.vllm_identity import (
    VllmRequestView,
    adapter_digest,
    cache_spec,
    find_weights,
    weights_memory,
    why_uncacheable,
)
from kvstore.engine_adapter.vllm_idle import WAIT_S, IdleWait
from kvstore.engine_adapter.vllm_probe import block_ids, computed, hit_sources, vllm_version
from kvstore.engine_adapter.vllm_stats import KVStoreStats, changes
from kvstore.engine_adapter.vllm_wishes import policy_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvstore.engine_adapter.block_regions import RegionFacts
    from kvstore.engine_adapter.planner import Jobs
    from kvstore.engine_adapter.transfer_plan import Grant, WorkerReport
    from kvstore.engine_adapter.vllm_settings import VllmSettings

LOADING_WAIT_S = 0.002  # workers tell only in a step that their load is done
ATTACH_WAIT_S = 1.0  # a request waits so long for the workers to attach, when they are about to
ATTACH_S_MAX = 5.0
ATTACH_POLL_S = 0.005
# Requests wait for so many attempts to attach; later ones get rarer.
GRANTS_HOPED, GRANT_PAUSE_S, GRANT_PAUSE_S_MAX = 3, 0.25, 60.0
SAY_AGAIN_S, LINES_MAX = 600.0, 99
# Reasons not to load that an operator wants to know of.
TROUBLE = frozenset({TOO_SLOW_DISK, TOO_SLOW_LOOKUP, LOST_LEASE, PAUSE})

_log = logging.getLogger("kvstore.vllm")


class VllmScheduler:
    """Used by the connector in EngineCore, by its one thread. Close it with shutdown()."""

    def __init__(
        self,
        settings: VllmSettings,
        vllm_config: Any,
        kv_cache_config: Any,
        facts: RegionFacts,
    ) -> None:
        """`facts` are those of whole pages."""
        self.settings = settings
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._facts = facts
        self._ranks = int(vllm_config.parallel_config.tensor_parallel_size)
        page_blocks = facts.shard_bytes // facts.block_bytes
        self.page_tokens = page_blocks * facts.block_tokens
        page_bytes = facts.shard_bytes  # ranks copy at the same time
        self.choice = LoadChoice(settings.load, page_bytes, self.page_tokens)
        self.lookups = Lookups(self.choice)
        self.blocks = VllmBlocks()
        role = str(getattr(vllm_config.kv_transfer_config, "kv_role", "kv_both"))
        self._may_load = settings.load is not LoadMode.NEVER and role != "kv_producer"
        self._may_save = settings.save and role != "kv_consumer"
        sizes = Sizes(self.page_tokens, facts.block_tokens, self._ranks)
        self._events = PageEvents(vllm_config, sizes)
        self.planner = Planner(
            sizes,
            self.lookups,
            self.blocks,
            self.choice,
            pinned_blocks_max=max(page_blocks, int(kv_cache_config.num_blocks * PINNED_SHARE_MAX)),
        )
        self._epoch = 0  # of the session that plans are made for
        self._epoch_s = self._ask_grant_s = 0.0  # since when, and when to ask the next time
        self._grants_sent = 0  # to the workers, in this epoch
        self._attached: dict[int, int] = {}  # rank -> epoch
        self._weights: dict[int, int] = {}  # rank -> changes of its weights
        self._marks: dict[str, str] = {}
        self._adapters: dict[str, str] = {}  # path -> digest; "" while it is read
        self._off = ""
        self._was_lost = False
        self._spec_known = threading.Event()
        self._store: Any = None
        steps_alone = getattr(vllm_config.parallel_config, "data_parallel_size", 1) == 1
        self._idle = IdleWait(steps_alone=steps_alone)
        self._requests: dict[str, Any] = {}
        self._prefills: dict[str, tuple[float, int, int]] = {}
        self._admitted: set[str] = set()  # since the last step: what was preempted came back
        self._counts: dict[str, float] = {}
        self._told: dict[str, float] = {}
        self._warned_s: dict[str, float] = {}
        self._waiting_s: dict[str, float] = {}
        self._starter = threading.Thread(target=self._start, name="kvstore-start", daemon=True)
        self._starter.start()
        self._spec_known.wait(settings.start_wait_s)

    # What vLLM tells

    def bind_pool(self, pool: Any) -> None:
        """vLLM's block pool, with which saved blocks are pinned."""
        if not hasattr(pool, "touch") or not hasattr(pool, "free_blocks"):
            self._may_save = False
            _log.warning("this vLLM's block pool can't pin blocks: nothing is saved")
            return
        self.blocks.pool = pool

    def on_new_request(self, request: Any) -> None:
        """A request was added: look it up while it waits."""
        self._idle.arrived()
        self._follow()
        self._arrive(request)

    def match(self, request: Any, local_tokens: int) -> tuple[int | None, bool]:
        """Tokens beyond the engine's own; None: ask again next step. Waits only if it is idle."""
        self._follow()
        name = request.request_id
        if not self.planner.knows(name):
            self._arrive(request)
        answer = self._answer(name, local_tokens)
        if answer[0] is None and self._idle.begin():
            now = time.monotonic()
            waited_s = now - self._waiting_s.setdefault(name, now)

            def ask() -> tuple[int | None, bool]:
                self._follow()
                return self._answer(name, local_tokens)

            answer = self._idle.wait(self.lookups.wait, ask, self._needs_no_step, waited_s)
        return answer

    def allocated(self, request: Any, blocks: Any, external: int) -> None:
        """The scheduler took the request."""
        name = request.request_id
        self._waiting_s.pop(name, None)
        if external:
            self._add(hit_tokens=external)
        self._admitted.add(name)
        self.planner.allocated(name, block_ids(blocks), external)
        if external:
            self._add(hit_disk_tokens=self.planner.sources(name)[1])

    def hit_sources(self, request: Any) -> dict[Any, int]:
        """Where the tokens of the last allocation come from."""
        return hit_sources(*self.planner.sources(request.request_id))

    def build_plan(self, output: Any) -> StepPlan:
        """What the workers do in this step; everything that waits for one goes along."""
        scheduled = int(output.total_num_scheduled_tokens)
        if not scheduled and self._waiting_s:
            self.lookups.wait(ATTACH_POLL_S)
        elif not scheduled and self.planner.waits:
            # Nothing to compute: don't spin for the store, nor much for the workers.
            self.lookups.wait(LOADING_WAIT_S if self.planner.is_loading else WAIT_S)
        self._follow()
        now = time.monotonic()
        self._measure([*self._prefills], now)
        self._idle.stepped(scheduled)
        for name in set(getattr(output, "preempted_req_ids", None) or ()) - self._admitted:
            self._prefills.pop(name, None)
            self.planner.preempted(name)
        self._admitted.clear()
        for name, blocks, before in computed(output, self.planner.table):
            count = output.num_scheduled_tokens.get(name, 0)
            self._prefilling(name, before, now)
            self.planner.step(name, blocks, before, count, now)
        jobs = self.planner.take(now)
        grant = self.lookups.take_grant()
        if grant is not None:
            pause_s = min(GRANT_PAUSE_S * 2 ** min(self._grants_sent, 10), GRANT_PAUSE_S_MAX)
            self._ask_grant_s, self._grants_sent = now + pause_s, self._grants_sent + 1
        return self._step_plan(jobs, grant)

    def bare_plan(self) -> StepPlan:
        """What was planned already: an engine that waits for a load must get an answer."""
        return self._step_plan(self.planner.take(time.monotonic()), None)

    def report(self, report: WorkerReport) -> None:
        """What the workers did."""
        self._follow()
        self._attached.update(report.attached_epoch)
        if report.weights:
            self._weights.update(report.weights)
            self._weights_changed(report.weights_why)
        for load in report.loads if not self._off and not report.weights else ():
            if not load.ok and load.reason != CANCELLED:
                self._warn(f"a load failed, its tokens are computed instead: {load.reason}")
        # A rank's failures are its jobs', which the planner counts once for all ranks.
        own = {"loads_failed", "saves_failed"}
        self._add(**{name: each for name, each in report.counters.items() if name not in own})
        self.planner.report(report, time.monotonic())

    def finished(self, request: Any, blocks: list[int]) -> dict[str, Any] | None:
        """A request leaves; what it got from the store, for the client."""
        self._follow()
        name = request.request_id
        self._waiting_s.pop(name, None)
        if name in self._prefills:
            self._measure([name], time.monotonic())
            self._prefills.pop(name, None)
        self._requests.pop(name, None)
        self._events.leave(request)
        if not self.planner.knows(name):
            return None
        status = getattr(request.status, "name", str(request.status))
        reuse = self.planner.finished(
            name,
            blocks,
            int(request.num_computed_tokens),
            well=status in ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED"),
            now=time.monotonic(),
        )
        saved_s = self.choice.recompute_s(reuse.tokens)
        if saved_s:
            self.lookups.saved(saved_s)
        if reuse.reason in TROUBLE and self._epoch:
            self._warn(f"a prompt was computed that is stored: {reuse.reason}")
        if reuse.reason in CUT:
            self._warn(
                f"a prompt, or part of one, was computed that is stored: {CUT[reuse.reason]}"
            )
        answer = {
            "reused_tokens": reuse.tokens,
            "reused_disk_tokens": reuse.disk_tokens,
            "reason": reuse.reason,
        }
        return {"kvstore": answer}

    def needs_steps(self) -> bool:
        """Whether an idle engine must go on stepping."""
        return self.planner.needs_steps or self._is_attaching(time.monotonic())

    def frees_soon(self) -> bool:
        """Whether pinned blocks come back within a moment."""
        return self.planner.frees_soon

    def reset(self) -> bool:
        """Ignore from now on what is stored; delete nothing, others share it."""
        self._forget_stored()
        _log.info("the prefix cache was reset: pages stored before are not used any more")
        return True

    def stats(self) -> KVStoreStats | None:
        """Counts since the last call."""
        now = {**self._counts}
        for counter in (self.planner.counters(), self.lookups.counters):
            for name, amount in counter.items():
                now[name] = now.get(name, 0) + amount
        grown, self._told = changes(now, self._told), now
        return KVStoreStats(data=grown) if grown else None

    def take_events(self) -> list[Any]:
        """What was stored, for vLLM's KV events; none if these are off."""
        return self._events.take()

    def count_error(self) -> None:
        """A hook failed and was degraded."""
        self._add(hook_errors=1)

    def shutdown(self) -> None:
        """Give everything back."""
        self._off = self._off or "closed"
        self.lookups.close()
        if self._store is not None:
            self._store.close()

    # What happens behind it

    def _start(self) -> None:
        """Find the weights' name, connect, open the session. In a thread of its own."""
        try:
            begin_s = time.monotonic()
            weights = find_weights(
                self._vllm_config, self.settings.weights_version, weights_memory()
            )
            spec = cache_spec(
                self._vllm_config,
                self._kv_cache_config,
                self._facts,
                weights=weights,
                vllm_version=vllm_version(),
            )
            self._store = connect(self.settings.store, **self.settings.connect_arguments)
            session = self._store.session(spec, writer="vllm")
            if self._off:
                session.close()
                return
            self._was_lost = not session.is_open
            self.lookups.use(session)
            self.lookups.ask_grant(self._ranks)
            _log.info(
                "caching %s in %s: pages of %d tokens, %.2f MiB, identity %s, ready after %.1f s%s",
                spec.model,
                self.settings.store,
                spec.page_tokens,
                spec.page_bytes / (1 << 20),
                spec.namespace.hex()[:12],
                time.monotonic() - begin_s,
                "" if session.is_open else _no_server(session.match(()).reason),
            )
        except Exception as error:  # the engine goes on without
            self._off = f"{type(error).__name__}: {error}"
            _log.error("off, the engine runs without it: %s", self._off)
        finally:
            self._spec_known.set()

    def _follow(self) -> None:
        """Take what the store said, and notice when another server answers."""
        epoch = self.lookups.epoch
        now = time.monotonic()
        if epoch != self._epoch:
            if self._epoch:
                self.planner.lost_store(now)
            self._say_who_answers(epoch)
            self._epoch, self._epoch_s, self._ask_grant_s, self._grants_sent = epoch, now, now, 0
        if epoch and now >= self._ask_grant_s and not self._is_attached():
            self._ask_grant_s = now + ATTACH_WAIT_S
            self.lookups.ask_grant(self._ranks)
        for event in self.lookups.drain(epoch):
            self.planner.event(event, now)
        for reason, pages in self.planner.take_lost().items():
            self._add(pages_lost=pages)
            if not reason.startswith(UNREACHABLE):  # said already
                self._warn(why_lost(reason))
        self._events.note(self.planner.published, self._requests)
        self.planner.published.clear()
        if not self.planner.saves_left:
            self._events.forget_gone()

    def _say_who_answers(self, epoch: int) -> None:
        """One line when the server goes, one when it is there that was not."""
        if self._epoch and not self._off:
            _log.warning("the server of %s has gone: misses until one answers", self.settings.store)
            self._was_lost = True
        if epoch and self._was_lost:
            _log.info("the server of %s answers now", self.settings.store)
            self._was_lost = False

    def _forget_stored(self) -> None:
        """From here on this engine shares only with itself."""
        self._marks["since_reset"] = secrets.token_hex(16)
        self.planner.reset(time.monotonic())

    def _weights_changed(self, why: str) -> None:
        """A worker has other weights than those that name the pages."""
        if self._off:
            return
        self._forget_stored()
        if self.settings.weights_version is None:
            self._off = f"the weights may be others ({why}); restart, or name a weights_version"
            _log.error("off, the engine runs without it: %s", self._off)
        else:
            self._warn(
                f"the weights are others ({why}): pages stored before are not used any more; "
                "restart with their weights_version to share again"
            )

    def _step_plan(self, jobs: Jobs, grant: Grant | None) -> StepPlan:
        known = dict(self._weights)
        return StepPlan(self._epoch, grant, jobs.loads, jobs.saves, jobs.cancelled, weights=known)

    def _is_attaching(self, now: float) -> bool:
        """Whether the workers are about to attach to the memory of a session that has begun."""
        return bool(self._epoch) and not self._is_attached() and now - self._epoch_s < ATTACH_S_MAX

    def _is_attached(self) -> bool:
        return bool(self._epoch) and all(
            self._attached.get(rank) == self._epoch for rank in range(self._ranks)
        )

    def _answer(self, name: str, local_tokens: int) -> tuple[int | None, bool]:
        now = time.monotonic()
        if self._off or not self._epoch:
            return 0, False
        if not self._is_attached():
            begin_s = self._waiting_s.setdefault(name, now)
            hopeful = self._grants_sent < GRANTS_HOPED and now - begin_s < ATTACH_WAIT_S
            return (None if hopeful else 0), False
        answer = self.planner.match(name, local_tokens, now)
        return answer.tokens, answer.is_async

    def _needs_no_step(self) -> bool:
        """Whether all there is is one request, which waits for the store."""
        return len(self._requests) == 1 and self._is_attached() and not self.planner.needs_steps

    def _arrive(self, request: Any) -> None:
        policy, marks = self._policy(request)
        if policy.load:
            self._add(lookups=1, asked_tokens=int(request.num_tokens))
        self._requests[request.request_id] = request
        self.planner.arrive(VllmRequestView(request, self.page_tokens, marks), policy)

    def _policy(self, request: Any) -> tuple[Policy, dict[str, str]]:
        """What this request may do, and what besides its tokens decides its KV."""
        marks = dict(self._marks)
        note = self._off or why_uncacheable(request)
        adapter = getattr(request, "lora_request", None)
        if adapter is not None:
            path = str(getattr(adapter, "lora_path", "") or "")
            digest = self._adapters.get(path)
            if digest is None:
                self._adapters[path] = ""
                threading.Thread(target=self._read_adapter, args=(path,), daemon=True).start()
            if not digest:
                note = "its adapter is not known yet"
            marks["adapter"] = f"{getattr(adapter, 'lora_name', '')}\0{path}\0{digest}"
        if note:
            return Policy(load=False, store=False, note=note), marks
        return self._wishes(request), marks

    def _wishes(self, request: Any) -> Policy:
        """kv_transfer_params["kvstore"] of a request."""
        params = getattr(request, "kv_transfer_params", None) or {}
        wishes = params.get("kvstore") if isinstance(params, dict) else None
        wishes = wishes if isinstance(wishes, dict) else {}
        return policy_of(
            wishes,
            self.settings,
            self._warn,
            may_load=self._may_load,
            may_store=self._may_save and self.blocks.pool is not None,
        )

    def _read_adapter(self, path: str) -> None:
        try:
            self._adapters[path] = adapter_digest(path, weights_memory())
        except Exception as error:  # such requests are served without the store
            _log.warning("requests with the adapter %s are not cached: %s", path, error)

    def _prefilling(self, name: str, computed: int, now: float) -> None:
        """Remember when a request began to compute its prompt."""
        request = self._requests.get(name)
        if request is not None and name not in self._prefills:
            tokens = int(request.num_tokens)
            if tokens - computed > 1:
                self._prefills[name] = (now, tokens, tokens - computed)

    def _measure(self, names: Iterable[str], now: float) -> None:
        """How fast prompts are computed: from the first step to the first token, all included."""
        for name in names:
            begin_s, length, tokens = self._prefills[name]
            request = self._requests.get(name)
            if request is None or int(request.num_tokens) > length:
                del self._prefills[name]
                if request is not None:
                    self.choice.prefilled(tokens, now - begin_s)
                    if tokens >= PREFILL_TOKENS_MIN:
                        self.lookups.prefilled(tokens, length - tokens, now - begin_s)

    def _add(self, **amounts: float) -> None:
        for name, amount in amounts.items():
            self._counts[name] = self._counts.get(name, 0) + amount

    def _warn(self, line: str) -> None:
        now = time.monotonic()
        if len(self._warned_s) >= LINES_MAX:  # lines that name numbers; old ones may be said again
            kept = {each: at for each, at in self._warned_s.items() if now - at < SAY_AGAIN_S}
            self._warned_s = kept
        is_due = now - self._warned_s.get(line, -SAY_AGAIN_S) >= SAY_AGAIN_S
        if is_due and len(self._warned_s) < LINES_MAX:
            self._warned_s[line] = now
            _log.warning("%s (said once in %d minutes)", line, SAY_AGAIN_S / 60)


def _no_server(reason: str) -> str:
    """The end of the line that says where pages are kept, while nobody keeps them."""
    why = reason.removeprefix(UNREACHABLE).removeprefix(": ")
    return f"; no server answers yet, misses until one does{f' ({why})' if why else ''}"
