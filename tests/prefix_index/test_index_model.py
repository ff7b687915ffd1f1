"""The prefix index against a dict of chains: every answer is compared, check() after every step.

The same machine runs with page keys that have only 8 bits: hundreds of collisions, and no answer
changes, since the index compares tokens and never keys.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import pytest
import xxhash
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore.prefix_index.index import PrefixIndex
from kvstore.prefix_index.page_key import page_keys
from kvstore.prefix_index.page_table import DISK, HOST, LOCAL_TIERS, NO_PAGE, REDIS, TIERS
from kvstore.prefix_index.piecewise_check import PieceSizes

PAGE_TOKENS = 2
ROOTS = [b"tenant one".ljust(32, b"."), b"tenant two".ljust(32, b".")]


class Page(NamedTuple):
    """A page as the model knows it: what makes it the page it is."""

    tokens: bytes
    extras: bytes


PAGES = [
    Page(np.array([1, number], "<i4").tobytes(), extras)
    for number, extras in itertools.product(range(2), [b"", b"x"])
]


class EightBitDigest:
    """A page digest with 256 values."""

    def __init__(self, data: bytes) -> None:
        self._stream = xxhash.xxh3_128(data)

    def update(self, data: bytes) -> None:
        self._stream.update(data)

    def digest(self) -> bytes:
        return self._stream.digest()[:1] * 16


@dataclass
class Known:
    """What the model remembers of a page; its chain is its key in the model."""

    page_id: int
    slots: dict[int, int]
    last_use: float
    payload_bytes: int
    hits: int = 0
    leases: int = 0
    pinned_until: float = field(default=float("-inf"))


class IndexMachine(RuleBasedStateMachine):
    digest = xxhash.xxh3_128

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(edge_bytes_max=5 * PAGE_TOKENS * 4)
        self.model: dict[tuple[bytes, tuple[Page, ...]], Known] = {}
        self.counter = itertools.count(1)
        self.now = 1000.0
        self.sizes = [
            PieceSizes(rows=2, nodes=1, children=1, items=1),
            PieceSizes(rows=3, nodes=4, edge_pages=2, children=2, items=2),
        ]
        self.walks = [self.index.check_in_pieces(each) for each in self.sizes]

    # What the model says

    def held(self, known: Known) -> bool:
        return known.leases > 0 or known.pinned_until > self.now

    def descendants(self, chain) -> list[Known]:
        root, pages = chain
        return [
            known
            for (other, longer), known in self.model.items()
            if other == root and len(longer) > len(pages) and longer[: len(pages)] == pages
        ]

    def may_leave(self, chain, tier: int) -> bool:
        known, below = self.model[chain], self.descendants(chain)
        if tier not in known.slots or self.held(known):
            return False
        if any(tier in other.slots for other in below):
            return False
        if tier < LOCAL_TIERS and any(self.held(other) for other in below):
            return False  # a lease keeps the whole chain, but not in what is not ours
        return len(known.slots) > 1 or not below

    def chain_of(self, page_id: int):
        (chain,) = [chain for chain, known in self.model.items() if known.page_id == page_id]
        return chain

    def prefix_ids(self, root: bytes, pages) -> list[int]:
        found = []
        for length in range(1, len(pages) + 1):
            known = self.model.get((root, tuple(pages[:length])))
            if known is None:
                break
            found.append(known.page_id)
        return found

    def leave(self, chain, tier: int) -> None:
        known = self.model[chain]
        slots = self.index.clear_tier([known.page_id], tier)
        assert slots.tolist() == [known.slots.pop(tier)]
        if not known.slots:
            self.index.remove([known.page_id])
            del self.model[chain]

    def pick(self, data, label="chain"):
        return data.draw(st.sampled_from(sorted(self.model)), label=label)

    # Steps

    @rule(
        data=st.data(),
        root=st.sampled_from(ROOTS),
        run=st.lists(st.sampled_from(PAGES), min_size=1, max_size=7),
        tiers=st.sampled_from([(HOST,), (DISK,), (REDIS,), (HOST, DISK), (HOST, DISK, REDIS)]),
    )
    def insert(self, data, root, run, tiers):
        bases = [pages for other, pages in sorted(self.model) if other == root]
        base = data.draw(st.sampled_from([(), *bases]), label="under")
        parent = self.model[root, base].page_id if base else NO_PAGE
        whole = [*base, *run]
        tokens = b"".join(page.tokens for page in whole)
        extras = {index: page.extras for index, page in enumerate(whole) if page.extras}
        keys = page_keys(root, tokens, PAGE_TOKENS, extras, first=len(base), digest=self.digest)
        count = len(run)
        sequences = np.array([next(self.counter) for _ in run], np.uint64)
        arguments = (
            root,
            PAGE_TOKENS,
            parent,
            b"".join(page.tokens for page in run),
            {index: page.extras for index, page in enumerate(run) if page.extras},
            keys,
            sequences,
            4096 * count,
            np.stack([sequences, sequences], axis=1),
            self.now,
            7,
        )
        if (root, (*base, run[0])) in self.model:
            with pytest.raises(ValueError, match="already"):
                self.index.insert(*arguments)
            return
        ids = self.index.insert(*arguments)
        slots = {tier: [next(self.counter) for _ in run] for tier in tiers}
        for tier in tiers:
            self.index.set_tier(ids, tier, slots[tier])
        for number, page_id in enumerate(ids.tolist()):
            places = {tier: slots[tier][number] for tier in tiers}
            known = Known(page_id, places, self.now, 4096 * count)
            self.model[root, tuple(whole[: len(base) + number + 1])] = known
            assert self.index.table.key_of(page_id) == keys[number * 16 : number * 16 + 16]
            assert self.index.table.sequence[page_id] == sequences[number]
            assert self.index.table.writer[page_id] == 7

    @rule(data=st.data(), root=st.sampled_from(ROOTS), tail=st.lists(st.sampled_from(PAGES)))
    def match(self, data, root, tail):
        bases = [pages for _, pages in sorted(self.model)]
        whole = [*data.draw(st.sampled_from([(), *bases]), label="begins with"), *tail]
        tokens = b"".join(page.tokens for page in whole) + bytes(4)
        extras = {index: page.extras for index, page in enumerate(whole)}
        expected = self.prefix_ids(root, whole)
        assert self.index.match(root, tokens, extras).tolist() == expected
        as_list = np.frombuffer(tokens, "<i4").tolist()
        assert self.index.match(root, as_list, extras).tolist() == expected

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def touch(self, data):
        root, pages = self.pick(data)
        self.index.touch(self.prefix_ids(root, pages), self.now)
        for length in range(1, len(pages) + 1):
            self.model[root, pages[:length]].last_use = self.now
            self.model[root, pages[:length]].hits += 1

    @precondition(lambda self: self.model)
    @rule(data=st.data(), tier=st.sampled_from([HOST, DISK, REDIS]))
    def leave_one_tier(self, data, tier):
        chain = self.pick(data)
        allowed = self.may_leave(chain, tier)
        assert self.index.may_leave(self.model[chain].page_id, tier, self.now) == allowed
        if allowed:
            self.leave(chain, tier)

    @precondition(lambda self: self.model)
    @rule(data=st.data(), tier=st.sampled_from([HOST, DISK, REDIS]))
    def enter_or_lose_a_tier(self, data, tier):
        """Promotion may be in any order, and a page found corrupt leaves a hole."""
        known = self.model[self.pick(data)]
        if tier not in known.slots:
            known.slots[tier] = next(self.counter)
            self.index.set_tier([known.page_id], tier, [known.slots[tier]])
        elif len(known.slots) > 1:
            slots = self.index.clear_tier([known.page_id], tier)
            assert slots.tolist() == [known.slots.pop(tier)]

    @precondition(lambda self: self.model)
    @rule(data=st.data(), tier=st.sampled_from([HOST, DISK, REDIS]))
    def whole_chain_enters_a_tier(self, data, tier):
        root, pages = self.pick(data)
        chain = [self.model[root, pages[: length + 1]] for length in range(len(pages))]
        missing = [known for known in chain if tier not in known.slots]
        for known in missing:
            known.slots[tier] = next(self.counter)
        slots = [known.slots[tier] for known in missing]
        self.index.set_tier([known.page_id for known in missing], tier, slots)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def lease(self, data):
        known = self.model[self.pick(data)]
        known.leases += 1
        self.index.lease(known.page_id)
        assert self.index.leases_of(known.page_id) == known.leases

    @precondition(lambda self: any(known.leases for known in self.model.values()))
    @rule(data=st.data())
    def unlease(self, data):
        leased = sorted(chain for chain, known in self.model.items() if known.leases)
        known = self.model[data.draw(st.sampled_from(leased))]
        known.leases -= 1
        self.index.unlease(known.page_id)

    @precondition(lambda self: self.model)
    @rule(data=st.data(), seconds=st.integers(1, 5))
    def pin(self, data, seconds):
        known = self.model[self.pick(data)]
        known.pinned_until = max(known.pinned_until, self.now + seconds)
        self.index.pin(known.page_id, self.now + seconds)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def unpin(self, data):
        known = self.model[self.pick(data)]
        assert self.index.unpin(known.page_id) == (known.pinned_until > self.now)
        known.pinned_until = float("-inf")

    @rule(seconds=st.integers(1, 4))
    def time_passes(self, seconds):
        before = self.now
        self.now += seconds
        ended = sum(before < known.pinned_until <= self.now for known in self.model.values())
        assert self.index.expire_pins(self.now) == ended

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def remove_a_subtree(self, data):
        """What an operator's evict does: all tiers, the page and everything below it."""
        chain = self.pick(data)
        root, pages = chain
        subtree = self.index.subtree(self.model[chain].page_id)
        below = self.descendants(chain)
        expected = {known.page_id for known in [self.model[chain], *below]}
        assert set(subtree.tolist()) == expected
        assert len(subtree) == len(expected)
        if any(self.held(known) for known in [self.model[chain], *below]):
            with pytest.raises(ValueError, match="leased or pinned"):
                self.index.remove(subtree[::-1])
            return
        for tier in range(TIERS):
            there = [page for page in subtree.tolist() if self.index.table.slot[tier][page] >= 0]
            self.index.clear_tier(there, tier)
        if below:
            with pytest.raises(ValueError, match="children"):
                self.index.remove(subtree[:1])
        self.index.remove(subtree[::-1])
        for other in list(self.model):
            if other[0] == root and other[1][: len(pages)] == pages:
                del self.model[other]

    @rule(
        data=st.data(),
        tier=st.sampled_from([HOST, DISK, REDIS]),
        count=st.integers(0, 8),
        payload_bytes=st.integers(1, 100_000),
        only=st.sampled_from([None, ROOTS[:1], ROOTS]),
    )
    def evict_the_coldest(self, data, tier, count, payload_bytes, only):
        chosen = self.index.coldest(
            tier, self.now, pages=count, payload_bytes=payload_bytes, roots=only
        )
        bytes_left = payload_bytes
        for number, page_id in enumerate(chosen.tolist()):
            assert number < count
            assert bytes_left > 0
            chain = self.chain_of(page_id)
            free = [other for other in self.model if self.may_leave(other, tier)]
            free = [other for other in free if only is None or other[0] in only]
            assert chain in free
            coldest = min(self.model[other].last_use for other in free)
            assert self.model[chain].last_use == coldest
            bytes_left -= self.model[chain].payload_bytes
            self.leave(chain, tier)
        if len(chosen) < count and bytes_left > 0:
            assert not any(
                self.may_leave(chain, tier)
                for chain in self.model
                if only is None or chain[0] in only
            )

    @rule(data=st.data(), tier=st.sampled_from([HOST, DISK, REDIS]), count=st.integers(0, 8))
    def evict_by_a_ranking(self, data, tier, count):
        candidates = self.index.candidates(tier, self.now).tolist()
        expected = [
            known.page_id
            for known in self.model.values()
            if tier in known.slots and not self.held(known)
        ]
        assert candidates == sorted(expected)
        order = data.draw(st.permutations(candidates), label="ranking")
        chosen = self.index.victims(tier, order, self.now, pages=count).tolist()
        for page_id in chosen:
            allowed = [
                other for other in order if self.may_leave_id(other, tier)
            ]  # the best ranked of those that may leave at this moment
            assert page_id == allowed[0]
            self.leave(self.chain_of(page_id), tier)
        if len(chosen) < count:
            assert not any(self.may_leave(chain, tier) for chain in self.model)

    def may_leave_id(self, page_id: int, tier: int) -> bool:
        known = [chain for chain, known in self.model.items() if known.page_id == page_id]
        return bool(known) and self.may_leave(known[0], tier)

    # After every step

    @invariant()
    def index_is_sound(self):
        self.index.check()
        assert len(self.index) == len(self.model)
        assert len(self.index.trees()) == len({root for root, _ in self.model})

    @invariant()
    def a_check_in_pieces_that_is_under_way_finds_no_fault(self):
        """A step of it after each step of the others: all of them are false alarms else."""
        for walk in range(2):
            if next(self.walks[walk], None) is None:
                self.walks[walk] = self.index.check_in_pieces(self.sizes[walk])

    @invariant()
    def pages_are_what_they_were(self):
        table = self.index.table
        for (root, pages), known in self.model.items():
            page_id = known.page_id
            assert self.index.root_of(page_id) == root
            assert self.index.tokens_of(page_id) == pages[-1].tokens
            assert self.index.extras_of(page_id) == pages[-1].extras
            assert self.index.chain(page_id).tolist() == self.prefix_ids(root, pages)
            assert table.hits[page_id] == known.hits
            assert table.last_use[page_id] == known.last_use
            for tier in range(TIERS):
                assert table.slot[tier][page_id] == known.slots.get(tier, -1)

    @invariant()
    def free_to_leave_is_what_the_model_says(self):
        for tier in range(TIERS):
            free = [
                known.page_id for chain, known in self.model.items() if self.may_leave(chain, tier)
            ]
            assert self.index.evictable(tier, self.now).tolist() == sorted(free)

    @invariant()
    def chains_end_where_the_model_says(self):
        rows = range(0, self.index.node_rows, 2)
        pieces = [self.index.ends(at, at + 2) for at in rows]
        by_piece = np.concatenate([*pieces, np.zeros(0, np.int32)])
        by_root = {root: ids.tolist() for root, ids in self.index.by_root(by_piece)}
        roots, places = self.index.by_tree(by_piece)
        assert [roots[place] for place in places] == list(
            map(self.index.root_of, by_piece.tolist())
        )
        assert len(set(roots)) == len(roots) == len(by_root)
        for root in ROOTS:
            ends = [
                known.page_id
                for chain, known in self.model.items()
                if chain[0] == root and not self.descendants(chain)
            ]
            assert sorted(by_root.get(root, [])) == sorted(ends)

    @invariant()
    def runs_go_to_the_next_fork(self):
        for known in self.model.values():
            run = [known.page_id]
            while len(below := self.index.children(run[-1])) == 1:
                run += below
            assert self.index.run(known.page_id).tolist() == run

    def teardown(self):
        """Removing everything leaves nothing."""
        for known in self.model.values():
            for _ in range(known.leases):
                self.index.unlease(known.page_id)
        self.index.expire_pins(float("inf"))
        for chain in sorted(self.model, key=lambda chain: -len(chain[1])):
            for tier in list(self.model[chain].slots):
                self.index.clear_tier([self.model[chain].page_id], tier)
            self.index.remove([self.model[chain].page_id])
            self.index.check()
        assert len(self.index) == self.index.nodes == 0
        assert not self.index.trees()


class EightBitMachine(IndexMachine):
    digest = EightBitDigest


MODEST = settings(
    max_examples=100, stateful_step_count=30, deadline=None, report_multiple_bugs=False
)


@pytest.mark.slow
class TestIndex(IndexMachine.TestCase):
    settings = MODEST


@pytest.mark.slow
class TestIndexWithEightBitKeys(EightBitMachine.TestCase):
    settings = MODEST
