"""Replays a trace through memory and disk: what would be hit at all, and what of it in memory.

As the store does it with write_policy = "through": new pages go to both tiers, what is hit on disk
is staged into memory, and each tier lets go of its own coldest leaves. With one policy for both, it
knows a page as long as one tier has it, as in the store; a policy for memory of its own knows what
is there, and no more. Invariant: what is in a tier is whole chains, so that what is hit is the
longer of two.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from kvstore.prefix_index.page_table import DISK, HOST
from kvstore.simulation import AHEAD_PAGES_MAX, PROGRESS_REQUESTS, Hits, Tally
from kvstore.tiers.eviction import Run, study_at_once
from kvstore.tiers.leaf_tree import NO_BLOCK, LeafTree
from kvstore.tiers.page_cost import EVEN_TOKENS

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.tiers.eviction import Ids, Keys, Policy
    from kvstore.trace import Trace


class TieredReplay:
    """A store of two tiers on its way through a trace."""

    def __init__(
        self,
        trace: Trace,
        policy: Policy,
        host_pages: int,
        disk_pages: int,
        host_policy: Policy | None = None,
        ahead_part: int = 0,
    ) -> None:
        self.trace = trace
        self._policies = {HOST: host_policy or policy, DISK: policy}
        self._shared = host_policy is None
        parent = trace.parent.tolist()
        self.trees = {tier: LeafTree(parent, self._policies[tier], tier) for tier in (HOST, DISK)}
        self._pages = {HOST: host_pages, DISK: disk_pages}
        self._ahead_part = ahead_part
        self._keys: Keys = np.arange(trace.unique, dtype=np.uint64)
        self._offset_s = 1.0 - float(trace.times_s[0])
        self.evicted = 0  # that left their last tier

    def step(self, request: int) -> tuple[int, int]:
        """The next request: how many of its blocks were hit, and how many of them in memory."""
        starts = self.trace.starts
        path = self.trace.blocks[starts[request] : starts[request + 1]]
        if not len(path):
            return 0, 0
        now = float(self.trace.times_s[request]) + self._offset_s
        found = {tier: tree.hit(path) for tier, tree in self.trees.items()}
        hit = max(found.values())
        self._touch(path, found, hit, now)
        for tier in (HOST, DISK):
            self._enter(tier, path, found[tier], now)
        for policy in {id(each): each for each in self._policies.values()}.values():
            study_at_once(policy, now)
        return hit, found[HOST]

    def check(self) -> None:
        """Recount; raises AssertionError with the numbers."""
        for tier, tree in self.trees.items():
            tree.check()
            assert tree.used <= self._pages[tier], f"tier {tier}: {tree.used} pages"

    def _touch(self, path: Ids, found: dict[int, int], hit: int, now: float) -> None:
        if self._shared:
            if hit:
                self._policies[DISK].touch(path[:hit], now)
        else:
            for tier, count in found.items():
                if count:
                    self._policies[tier].touch(path[:count], now)
        for tier, count in found.items():
            self.trees[tier].rescore(path[:count])

    def _enter(self, tier: int, path: Ids, there: int, now: float) -> None:
        """The rest of a request comes into a tier."""
        tree, policy = self.trees[tier], self._policies[tier]
        run = path[there : max(there, self._pages[tier])]
        parent = int(path[there - 1]) if there else NO_BLOCK
        missing = tree.used + len(run) - self._pages[tier]
        if missing > 0:
            if there:
                tree.hold(parent)
            self._evict(tier, missing, now)
            if there:
                tree.let_go(parent)
            run = run[: max(0, len(run) - max(0, tree.used + len(run) - self._pages[tier]))]
        if not len(run):
            return
        other = self.trees[DISK if tier == HOST else HOST].resident
        new = run[~other[run]] if self._shared else run
        if len(new):
            depth = there + len(run) - len(new)
            above = NO_BLOCK if not depth else int(path[depth - 1])
            come = Run.of(new, above, depth, self.trace.block_tokens)
            policy.insert(new, self._keys[new], come, now)
        tree.add(run, parent)

    def _evict(self, tier: int, count: int, now: float) -> None:
        tree, policy = self.trees[tier], self._policies[tier]
        if self._ahead_part:
            count = max(count, min(tree.used // self._ahead_part, AHEAD_PAGES_MAX))
        gone = np.array(tree.evict(count, now), np.int32)
        if not len(gone):
            return
        policy.left(gone, now, tier)
        nowhere = gone[~self.trees[DISK if tier == HOST else HOST].resident[gone]]
        self.evicted += len(nowhere)
        if not self._shared:
            nowhere = gone
        if len(nowhere):
            policy.remove(nowhere, self._keys[nowhere], now)


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
    run = TieredReplay(trace, policy, host_pages, disk_pages, host_policy, ahead_part)
    began = time.thread_time()
    for request in range(trace.requests):
        hit, in_host = run.step(request)
        both.add(request, hit)
        memory.add(request, min(hit, in_host))
        if progress is not None and request % PROGRESS_REQUESTS == 0:
            progress(request)
    seconds = time.thread_time() - began
    name = policy.name if host_policy is None else f"{host_policy.name} > {policy.name}"
    in_memory = memory.result(name, host_pages, 0, seconds)
    return both.result(name, disk_pages, run.evicted, seconds, host=in_memory)
