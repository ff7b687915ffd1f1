"""Replays a trace through memory and disk: what would be hit, where, and what is written for it.

As the store does it: new pages go to memory first, what is hit on disk is staged into memory, and
each tier lets go of its own coldest leaves. When a page goes to disk, and whether, is said by write
policy and admission; its ancestors go with it. With one policy for both tiers, it knows a page as
long as one tier has it; a policy for memory of its own knows what is there, and no more. Invariant:
what is in a tier is whole chains, so that what is hit is the longer of two.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvstore.prefix_index.page_table import DISK, HOST
from kvstore.simulation import AHEAD_PAGES_MAX, PROGRESS_REQUESTS, Hits, Tally
from kvstore.tiers.admission import make_admission
from kvstore.tiers.eviction import Run, study_at_once
from kvstore.tiers.eviction_split import SplitPolicy
from kvstore.tiers.leaf_tree import NO_BLOCK, LeafTree
from kvstore.tiers.page_cost import EVEN_TOKENS

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.tiers.eviction import Ids, Keys, Policy
    from kvstore.trace import Trace


@dataclass(frozen=True, slots=True)
class Writes:
    """What memory and disk together hit, and what it took."""

    policy: str
    write_policy: str
    admission: str
    capacity: int
    disk: int
    references: int
    hit_blocks: int
    hit_blocks_disk: int  # of them, those that only the disk had
    written_blocks: int
    block_ratio: float
    written_per_hit: float  # blocks, so the same in bytes over the bytes of a block

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


class TieredReplay:
    """A store of two tiers on its way through a trace."""

    def __init__(
        self,
        trace: Trace,
        policy: Policy,
        host_pages: int,
        disk_pages: int,
        *,
        host_policy: Policy | None = None,
        write_policy: str = "through",
        admission: str = "always",
        ahead_part: int = 0,
    ) -> None:
        """host_policy: memory's own. ahead_part: as in simulation.replay, in both tiers."""
        if write_policy == "selective" and admission == "always":
            admission = "second-touch"
        self.trace = trace
        self._split = SplitPolicy(host_policy, policy, HOST) if host_policy else None
        self._policy: Policy = self._split or policy
        parent = trace.parent.tolist()
        of_tier = {HOST: host_policy or policy, DISK: policy}
        self.trees = {tier: LeafTree(parent, each, tier) for tier, each in of_tier.items()}
        self._pages = {HOST: host_pages, DISK: disk_pages}
        self._ahead_part = ahead_part
        self._is_through = write_policy == "through"
        self._admission = make_admission(admission, disk_pages)
        self._selects = admission != "always"
        self._uses = np.zeros(trace.unique, np.int64)
        self._moving = np.zeros(trace.unique, bool)  # from memory to disk, if that has room
        self._keys: Keys = np.arange(trace.unique, dtype=np.uint64)
        self._offset_s = 1.0 - float(trace.times_s[0])
        self.hits = self.hits_disk = self.written = 0
        self.evicted = 0  # that left their last tier

    def step(self, request: int) -> tuple[int, int]:
        """The next request: how many of its blocks were hit, and how many of them in memory."""
        starts = self.trace.starts
        path = self.trace.blocks[starts[request] : starts[request + 1]]
        if not len(path):
            return 0, 0
        now = float(self.trace.times_s[request]) + self._offset_s
        found = {tier: tree.hit(path) for tier, tree in self.trees.items()}
        hit, there = max(found.values()), found[HOST]
        self.hits += hit
        self.hits_disk += hit - there
        if hit:
            self._touch(path[:hit], found, now)
        last = int(path[found[DISK] - 1]) if found[DISK] else NO_BLOCK
        if last != NO_BLOCK:  # what is staged stays on disk, whatever memory pushes there
            self.trees[DISK].hold(last)
        end = self._to_host(path, there, hit, now)
        if last != NO_BLOCK:
            self.trees[DISK].let_go(last)
        if self._is_through:
            self._write(self._admitted(path[hit:end]), now)
        study_at_once(self._policy, now)
        return hit, there

    def check(self) -> None:
        """Recount; raises AssertionError with the numbers."""
        for tier, tree in self.trees.items():
            tree.check()
            assert tree.used <= self._pages[tier], f"tier {tier}: {tree.used} pages"

    def _touch(self, used: Ids, found: dict[int, int], now: float) -> None:
        self._uses[used] += 1
        self._policy.touch(used, now)
        self._admission.seen(self._keys[used])
        for tier, count in found.items():
            self.trees[tier].rescore(used[:count])
        if self._is_through and self._selects:
            self._write(self._admitted(used), now)

    def _to_host(self, path: Ids, there: int, hit: int, now: float) -> int:
        """What memory lacks of a request comes there, `hit` blocks of it from disk, new ones as far
        as there is room; how much of the request memory has then."""
        run = self._fit(HOST, path[there : max(there, self._pages[HOST])], now)
        if not len(run):
            return there
        end = there + len(run)
        new = path[hit:end]
        if len(new):
            above = int(path[hit - 1]) if hit else NO_BLOCK
            self._uses[new] = 0
            come = Run.of(new, above, hit, self.trace.block_tokens)
            self._policy.insert(new, self._keys[new], come, now)
            self._admission.seen(self._keys[new])
        if self._split is not None:
            self._split.entered(run, self._keys[run], now)
        self.trees[HOST].add(run, self._above(run))
        return end

    def _write(self, blocks: Ids, now: float) -> None:
        """To disk, parents first, with the ancestors that it lacks."""
        run: list[int] = []
        for block in blocks.tolist():
            if run and self.trace.parent[block] == run[-1]:
                run.append(block)
            else:
                self._to_disk(run, now)
                run = self._lacking(block)
        self._to_disk(run, now)

    def _lacking(self, block: int) -> list[int]:
        """A block and its ancestors, those that the disk has not, first block first."""
        line: list[int] = []
        while block != NO_BLOCK and not self.trees[DISK].resident[block]:
            line.append(block)
            block = int(self.trace.parent[block])
        return line[::-1]

    def _to_disk(self, line: list[int], now: float) -> None:
        run = self._fit(DISK, np.array(line, np.int32), now)
        if len(run):
            self.trees[DISK].add(run, self._above(run))
            self.written += len(run)

    def _fit(self, tier: int, run: Ids, now: float) -> Ids:
        """Make room for a run; as much of it as has room then."""
        tree, size = self.trees[tier], self._pages[tier]
        above = self._above(run)
        if above != NO_BLOCK and not tree.resident[above]:
            return run[:0]
        missing = tree.used + len(run) - size
        if missing <= 0:
            return run
        if above != NO_BLOCK:
            tree.hold(above)
        if self._ahead_part:
            missing = max(missing, min(tree.used // self._ahead_part, AHEAD_PAGES_MAX))
        self._leave(tier, np.array(tree.evict(missing, now), np.int32), now)
        if above != NO_BLOCK:
            tree.let_go(above)
        return run[: max(0, min(len(run), size - tree.used))]

    def _leave(self, tier: int, gone: Ids, now: float) -> None:
        """Blocks have left a tier for others."""
        if not len(gone):
            return
        keys = self._keys[gone]
        self._policy.left(gone, now, tier)
        if tier == DISK:
            self._admission.evicted(keys)
        elif self._split is not None:
            self._split.exited(gone, keys, now)
        if tier == HOST and not self._is_through:
            self._moving[gone] = True
            self._write(self._admitted(gone)[::-1], now)
            self._moving[gone] = False
        columns = (self._moving, self.trees[HOST].resident, self.trees[DISK].resident)
        lost = gone[~np.any([column[gone] for column in columns], axis=0)]
        if len(lost):
            self.evicted += len(lost)
            self._admission.gone(self._keys[lost])
            self._policy.remove(lost, self._keys[lost], now)

    def _admitted(self, blocks: Ids) -> Ids:
        """Of these blocks, those that the disk lacks and is to have."""
        blocks = blocks[~self.trees[DISK].resident[blocks]]
        return blocks[self._admission.admits(self._keys[blocks], self._uses[blocks])]

    def _above(self, run: Ids) -> int:
        return int(self.trace.parent[run[0]]) if len(run) else NO_BLOCK


def replay_tiers(
    trace: Trace,
    policy: Policy,
    host_pages: int,
    disk_pages: int,
    *,
    host_policy: Policy | None = None,
    warmup_s: float = 0.0,
    even_tokens: float = EVEN_TOKENS,
    ahead_part: int = 0,
    progress: Callable[[int], None] | None = None,
) -> Hits:
    """What simulation.replay does, with two tiers; capacities in blocks of the trace."""
    both, memory = Tally(trace, warmup_s, even_tokens), Tally(trace, warmup_s, even_tokens)
    run = TieredReplay(
        trace, policy, host_pages, disk_pages, host_policy=host_policy, ahead_part=ahead_part
    )
    began = time.thread_time()
    for request in range(trace.requests):
        hit, in_host = run.step(request)
        both.add(request, hit)
        memory.add(request, in_host)
        if progress is not None and request % PROGRESS_REQUESTS == 0:
            progress(request)
    seconds = time.thread_time() - began
    name = policy.name if host_policy is None else f"{host_policy.name} > {policy.name}"
    in_memory = memory.result(name, host_pages, 0, seconds)
    return both.result(name, disk_pages, run.evicted, seconds, host=in_memory)


def replay_writes(
    trace: Trace,
    policy: Policy,
    host_pages: int,
    disk_pages: int,
    *,
    write_policy: str = "through",
    admission: str = "always",
    progress: Callable[[int], None] | None = None,
) -> Writes:
    """What is written: one policy, write policy and admission at one size of each tier."""
    run = TieredReplay(
        trace, policy, host_pages, disk_pages, write_policy=write_policy, admission=admission
    )
    for request in range(trace.requests):
        run.step(request)
        if progress is not None and request % PROGRESS_REQUESTS == 0:
            progress(request)
    return Writes(
        policy=policy.name,
        write_policy=write_policy,
        admission=admission,
        capacity=host_pages,
        disk=disk_pages,
        references=trace.references,
        hit_blocks=run.hits,
        hit_blocks_disk=run.hits_disk,
        written_blocks=run.written,
        block_ratio=run.hits / max(1, trace.references),
        written_per_hit=run.written / max(1, run.hits),
    )
