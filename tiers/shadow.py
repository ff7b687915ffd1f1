"""What policies would hit at other sizes, from a sample of pages: small trees of keys, no bytes.

Spatial sampling as in SHARDS (Waldspurger et al., FAST'15), and a policy on the sample as a small
cache of its own ("miniature simulations", the same, ATC'17): of all pages one in 2^bits is looked
at, chosen by a hash of its key, in a cache of as many parts of the size. Pages are chosen one by
one, not whole chains by their roots: most prompts of a service begin with the same pages, so one
root is in the sample or is not, and with it half of all hits. The tree stays: the parent of a page
is its nearest ancestor in the sample, and as chains are kept from their first page on, so is what
the leaf rule says of them. A page that is resident has all its ancestors resident, so it is a hit.

Invariant: a key has a row here as long as one of the caches has it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

from kvstore.tiers.eviction import Run, study_at_once
from kvstore.tiers.leaf_tree import NO_BLOCK, LeafTree

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from kvstore.tiers.eviction import Ids, Keys, Policy, Scores

HOT_PART = 0.05
HOT_REFERENCES_MIN = 200
_AHEAD_PART = 32  # as the store does: to make room for one is to make room for some


@dataclass(frozen=True, slots=True)
class Asked:
    """What was asked for in one go: the sampled pages of a chain, first page first."""

    now: float
    above: Keys  # sampled ancestors that are not asked for with it, the nearest last
    keys: Keys  # hashes, see mixed()
    depths: Ids
    end_depth: int  # pages of the chain until its end, sampled or not
    page_tokens: int
    page_bytes: int
    hot: npt.NDArray[np.bool_]  # asked for so often that somebody else counts them
    token_s: float = 0.0  # as a Run's

    def part(self, bits: int, left_out: set[int]) -> Asked:
        """Those that a smaller sample has."""
        mine = _looked_at(self.keys, bits, left_out)
        above = _looked_at(self.above, bits, left_out)
        if all(mine) and all(above):
            return self
        return Asked(
            self.now,
            self.above[above],
            self.keys[mine],
            self.depths[mine],
            self.end_depth,
            self.page_tokens,
            self.page_bytes,
            self.hot[mine],
            self.token_s,
        )


class Shadow:
    """One policy at one size, which is a number of sampled pages."""

    def __init__(self, policy: Policy, parent: list[int]) -> None:
        self.policy = policy
        self.tree = LeafTree(parent, policy)
        self.capacity = 1 << 62
        self.hits = 0.0  # by weight, since somebody set it to 0

    def ask(
        self, rows: Ids, above: int, keys: Keys, asked: Asked, worth_until: list[float]
    ) -> tuple[list[int], list[int]]:
        """Hit what is there from the first on, store the rest; rows that left for it, and came.

        keys: by row, of all. above: the row before the first one, NO_BLOCK if there is none.
        worth_until: of so many rows from the first on.
        """
        tree, policy, now = self.tree, self.policy, asked.now
        if above != NO_BLOCK and not tree.resident[above]:
            return [], []
        hit = tree.hit(rows)
        if hit:
            policy.touch(rows[:hit], now)
            tree.rescore(rows[:hit])
            self.hits += worth_until[hit]
            if hit == len(rows):
                return [], []
        parent = int(rows[hit - 1]) if hit else above
        run, gone = rows[hit:], list[int]()
        missing = tree.used + len(run) - self.capacity
        if missing > 0:
            ahead = min(tree.used, self.capacity) // _AHEAD_PART
            gone = self._evict(max(missing, ahead), parent, keys, now)
            run = run[: len(run) - max(0, missing - len(gone))]
        if len(run):
            # How many came with them: from the first that is missing, as far as the sample says.
            first = int(asked.depths[hit])
            before = int(asked.depths[hit - 1]) + 1 if hit else 0
            tokens = (asked.end_depth - (first + before) // 2) * asked.page_tokens
            depths = asked.depths[hit : hit + len(run)]
            parents = np.concatenate([[parent], run[:-1]]).astype(np.int32)
            size, token_s = asked.page_bytes, asked.token_s
            come = Run(depths, parents, asked.page_tokens, tokens, size, token_s)
            policy.insert(run, keys[run], come, now)
            tree.add(run, parent)
        return gone, run.tolist()

    def shrink(self, capacity: int, keys: Keys, now: float) -> list[int]:
        """Another size from now on; the rows that left for it."""
        self.capacity = capacity
        return self._evict(self.tree.used - capacity, NO_BLOCK, keys, now)

    def drop(self, rows: Ids, keys: Keys, now: float) -> None:
        """These are not in the sample any more; rebuild() of the tree must follow."""
        mine = rows[self.tree.resident[rows]]
        if len(mine):
            self.policy.remove(mine, keys[mine], now)

    def _evict(self, count: int, held: int, keys: Keys, now: float) -> list[int]:
        if count <= 0:
            return []
        if held != NO_BLOCK:
            self.tree.hold(held)
        gone = self.tree.evict(count, now)
        if gone:
            pages = np.array(gone, np.int32)
            self.policy.left(pages, now)
            self.policy.remove(pages, keys[pages], now)
        if held != NO_BLOCK:
            self.tree.let_go(held)
        return gone


class Sample:
    """Shadows of several policies and sizes on one sample of keys."""

    def __init__(
        self,
        make: Callable[[str], Policy],
        names: tuple[str, ...],
        factors: tuple[float, ...],
        rows: int,
        bits: int,
    ) -> None:
        """rows: room for so many pages, of all shadows together."""
        self.bits = bits
        self._parent = [NO_BLOCK] * rows
        self._keys = np.zeros(rows, np.uint64)
        self._asked_of = np.zeros(rows, np.int32)
        self.left_out: set[int] = set()  # hashes, see leave_out_hot()
        self._row_of: dict[int, int] = {}
        self._holders = [0] * rows
        self._free = list(range(rows - 1, -1, -1))
        self.shadows = {
            (name, factor): Shadow(make(name), self._parent) for name in names for factor in factors
        }
        self.references = 0.0  # by weight, since somebody set it to 0

    def __len__(self) -> int:
        """Pages known."""
        return len(self._row_of)

    def ask(self, asked: Asked, worth: Callable[[Asked], Scores] | None) -> None:
        """Let all shadows answer. Weights are the worth of a page times the pages it stands for."""
        asked = asked.part(self.bits, self.left_out)
        if not len(asked.keys):
            return
        each = float(1 << self.bits)
        weights = np.where(asked.hot, 0.0, each)
        if worth is not None:
            weights *= worth(asked)
        worth_until = [0.0, *accumulate(weights.tolist())]
        self.references += worth_until[-1]
        above = NO_BLOCK
        if len(asked.above):
            above = self._row_of.get(int(asked.above[-1]), NO_BLOCK)
            if above == NO_BLOCK:
                return  # nobody has what these hang below: misses that nobody can store
        rows = self._rows(asked.keys.tolist(), above)
        self._asked_of[rows] += 1
        holders, loose = self._holders, set(rows.tolist())
        for shadow in self.shadows.values():
            gone, stored = shadow.ask(rows, above, self._keys, asked, worth_until)
            for row in gone:
                holders[row] -= 1
            for row in stored:
                holders[row] += 1
            loose.update(gone)
        self._release(loose)

    def resize(self, capacity_pages: float, now: float) -> None:
        """Shadows are for so many pages, times their factors, from now on."""
        loose: set[int] = set()
        for (_, factor), shadow in self.shadows.items():
            size = max(1, round(capacity_pages * factor / (1 << self.bits)))
            for row in shadow.shrink(size, self._keys, now):
                self._holders[row] -= 1
                loose.add(row)
        self._release(loose)

    def thin(self, bits: int, now: float) -> None:
        """A smaller sample from now on: of those that are known, most are forgotten."""
        self.bits = bits
        rows = np.array(list(self._row_of.values()), np.int32)
        self._drop(rows, rows[~in_sample(self._keys[rows], bits)], now)

    def leave_out_hot(self, now: float) -> set[int]:
        """Look no longer at pages that were more than a HOT_PART of all that was asked for.

        They are hits for anybody, and a look-up that asks for nothing else of the sample is one
        that costs nothing. Returns all hashes that are left out; counts begin anew.
        """
        total = int(self._asked_of.sum())
        hot = np.flatnonzero(self._asked_of > HOT_PART * total).astype(np.int32)
        self._asked_of[:] = 0
        rows = np.array(list(self._row_of.values()), np.int32)
        hot = hot[np.isin(hot, rows)]
        if self.bits and total >= HOT_REFERENCES_MIN and len(hot):
            self.left_out.update(self._keys[hot].tolist())
            self._drop(rows, hot, now)
        return self.left_out

    def _drop(self, rows: Ids, going: Ids, now: float) -> None:
        """Of all rows, forget some; those that hang below them hang below the next above."""
        gone = set(going.tolist())
        for row in set(rows.tolist()) - gone:
            above = self._parent[row]
            while above in gone:
                above = self._parent[above]
            self._parent[row] = above
        for shadow in self.shadows.values():
            shadow.drop(going, self._keys, now)
            resident = shadow.tree.resident.copy()
            resident[going] = False
            shadow.tree.rebuild(resident)
        for row in going.tolist():
            self._forget(row)

    def study(self, now: float) -> None:
        """Let policies think that want to."""
        for shadow in self.shadows.values():
            study_at_once(shadow.policy, now)

    def check(self) -> None:
        """Recount; raises AssertionError with the numbers."""
        assert len(self._row_of) + len(self._free) == len(self._parent), "rows are lost"
        held = np.array([shadow.tree.resident for shadow in self.shadows.values()]).sum(axis=0)
        assert (held == np.array(self._holders)).all(), "holders are miscounted"
        known = np.zeros(len(self._parent), bool)
        known[list(self._row_of.values())] = True
        assert (known == (held > 0)).all(), "rows of nobody"
        for shadow in self.shadows.values():
            shadow.tree.check()
            assert shadow.tree.used <= shadow.capacity, f"{shadow.tree.used} pages"

    def _rows(self, keys: list[int], parent: int) -> Ids:
        """Rows of a chain's keys, new ones as far as there is room."""
        rows = []
        for key in keys:
            row = self._row_of.get(key, NO_BLOCK)
            if row == NO_BLOCK:
                if not self._free:
                    break
                row = self._free.pop()
                self._row_of[key] = row
                self._keys[row] = key
                self._parent[row] = parent
            rows.append(row)
            parent = row
        return np.array(rows, np.int32)

    def _release(self, rows: set[int]) -> None:
        for row in rows:
            if not self._holders[row]:
                self._forget(row)

    def _forget(self, row: int) -> None:
        del self._row_of[int(self._keys[row])]
        self._holders[row] = self._asked_of[row] = 0
        self._free.append(row)


def mixed(keys: Keys) -> Keys:
    """A hash of each key: its high bits choose the sample (splitmix64)."""
    found: Keys = keys + np.uint64(0x9E3779B97F4A7C15)
    found ^= found >> np.uint64(30)
    found *= np.uint64(0xBF58476D1CE4E5B9)
    found ^= found >> np.uint64(27)
    found *= np.uint64(0x94D049BB133111EB)
    found ^= found >> np.uint64(31)
    return found


def _looked_at(keys: Keys, bits: int, left_out: set[int]) -> list[bool]:
    """By key; they are few, and plain numbers are faster then."""
    shift = 64 - bits
    return [not key >> shift and key not in left_out for key in keys.tolist()]


def in_sample(hashes: Keys, bits: int) -> npt.NDArray[np.bool_]:
    """Which of them are in a sample of one in 2^bits."""
    if not bits:
        return np.ones(len(hashes), bool)
    found: npt.NDArray[np.bool_] = hashes >> np.uint64(64 - bits) == 0
    return found
