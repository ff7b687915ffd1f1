"""Replays a trace through memory and a disk: what would hit, and how much is written for it.

Two tiers under one policy, as in the store: a request hits its blocks from the first on, up to the
first that is in neither; what only the disk has comes to memory; the rest is stored there. When a
block goes to disk, and whether, is said by write policy and admission; its ancestors go with it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvstore.simulation import PROGRESS_REQUESTS
from kvstore.tiers.admission import make_admission
from kvstore.tiers.eviction import Run, study_at_once
from kvstore.tiers.leaf_tree import LeafTree
from kvstore.trace import NO_BLOCK

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.tiers.eviction import Ids, Keys, Policy
    from kvstore.trace import Trace

HOST, DISK = 0, 1


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


class WritesReplay:
    """Both tiers on their way through a trace."""

    def __init__(
        self,
        trace: Trace,
        policy: Policy,
        capacity: int,
        disk: int,
        *,
        write_policy: str = "through",
        admission: str = "always",
    ) -> None:
        """capacity and disk: blocks of the trace that memory and disk hold."""
        if write_policy == "selective" and admission == "always":
            admission = "second-touch"
        self.trace = trace
        self.policy = policy
        parent = trace.parent.tolist()
        self.trees = LeafTree(parent, policy, HOST), LeafTree(parent, policy, DISK)
        self.sizes = capacity, disk
        self.hits = self.hits_disk = self.written = 0
        self._write_policy = write_policy
        self._admission = make_admission(admission, disk)
        self._selects = admission != "always"
        self._uses = np.zeros(trace.unique, np.int64)
        self._keys: Keys = np.arange(trace.unique, dtype=np.uint64)
        self._offset_s = 1.0 - float(trace.times_s[0])

    def step(self, request: int) -> int:
        """The next request; how many of its blocks were hit."""
        starts = self.trace.starts
        path = self.trace.blocks[starts[request] : starts[request + 1]]
        now = float(self.trace.times_s[request]) + self._offset_s
        host, disk = self.trees
        there = host.resident[path] | disk.resident[path]
        hit = len(path) if there.all() else int(there.argmin())
        found, missing = path[:hit], path[hit : max(hit, self.sizes[HOST])]
        in_host = host.hit(found)
        self.hits += hit
        self.hits_disk += hit - in_host
        if hit:
            self._uses[found] += 1
            self.policy.touch(found, now)
            self._admission.seen(self._keys[found])
            for tree in self.trees:
                tree.rescore(found[: tree.hit(found)])
        self._enter(HOST, found[in_host:], now)
        if self._write_policy == "through" and self._selects and hit:
            self._write(self._admitted(found), now)
        if len(missing):
            self._uses[missing] = 0
            above = int(path[hit - 1]) if hit else NO_BLOCK
            run = Run.of(missing, above, hit, self.trace.block_tokens)
            self.policy.insert(missing, self._keys[missing], run, now)
            self._admission.seen(self._keys[missing])
            came = self._enter(HOST, missing, now)
            self._forget(missing[came:], now)
            if self._write_policy == "through":
                self._write(self._admitted(missing[:came]), now)
        study_at_once(self.policy, now)
        return hit

    def _admitted(self, blocks: Ids) -> Ids:
        blocks = blocks[~self.trees[DISK].resident[blocks]]
        return blocks[self._admission.admits(self._keys[blocks], self._uses[blocks])]

    def _enter(self, tier: int, run: Ids, now: float) -> int:
        """A run comes into a tier; how many of its blocks found room."""
        tree, size = self.trees[tier], self.sizes[tier]
        parent = int(self.trace.parent[run[0]]) if len(run) else NO_BLOCK
        if not len(run) or (parent != NO_BLOCK and not tree.resident[parent]):
            return 0
        missing = tree.used + len(run) - size
        if missing > 0:
            if parent != NO_BLOCK:
                tree.hold(parent)
            gone = np.array(tree.evict(missing, now), np.int32)
            self._left(tier, gone, now)
            if parent != NO_BLOCK:
                tree.let_go(parent)
            missing = tree.used + len(run) - size
            run = run[: len(run) - max(0, missing)]
        if len(run):
            tree.add(run, parent)
        return len(run)

    def _left(self, tier: int, gone: Ids, now: float) -> None:
        if not len(gone):
            return
        self.policy.left(gone, now, tier)
        if tier == DISK:
            self._admission.evicted(self._keys[gone])
        elif self._write_policy != "through":
            self._write(self._admitted(gone)[::-1], now)
        self._forget(gone, now)

    def _forget(self, blocks: Ids, now: float) -> None:
        """Of these blocks, those that are in no tier."""
        lost = blocks[~(self.trees[HOST].resident[blocks] | self.trees[DISK].resident[blocks])]
        if len(lost):
            self._admission.gone(self._keys[lost])
            self.policy.remove(lost, self._keys[lost], now)

    def _write(self, blocks: Ids, now: float) -> None:
        """To disk, parents first, with the ancestors that it lacks."""
        tree = self.trees[DISK]
        for block in blocks.tolist():
            line: list[int] = []
            while block != NO_BLOCK and not tree.resident[block]:
                line.append(block)
                block = int(self.trace.parent[block])
            if line:
                run = np.array(line[::-1], np.int32)
                self.written += self._enter(DISK, run, now)


def replay_writes(
    trace: Trace,
    policy: Policy,
    capacity: int,
    disk: int,
    *,
    write_policy: str = "through",
    admission: str = "always",
    progress: Callable[[int], None] | None = None,
) -> Writes:
    """Run one policy, write policy and admission at one size of each tier."""
    run = WritesReplay(
        trace, policy, capacity, disk, write_policy=write_policy, admission=admission
    )
    for request in range(trace.requests):
        run.step(request)
        if progress is not None and request % PROGRESS_REQUESTS == 0:
            progress(request)
    return Writes(
        policy=policy.name,
        write_policy=write_policy,
        admission=admission,
        capacity=capacity,
        disk=disk,
        references=trace.references,
        hit_blocks=run.hits,
        hit_blocks_disk=run.hits_disk,
        written_blocks=run.written,
        block_ratio=run.hits / max(1, trace.references),
        written_per_hit=run.written / max(1, run.hits),
    )
