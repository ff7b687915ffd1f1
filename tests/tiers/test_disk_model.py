"""The disk tier against a dict, in any order of calls, over restarts: a state machine."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
from disk_pages import Chains, Stored, found_slots, read, write
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore.tiers.disk_tier import DiskTier
from kvstore.tiers.file_layer import FileLayer
from kvstore.tiers.tier import ReadStatus

MIB = 1 << 20


class DiskTierMachine(RuleBasedStateMachine):
    """Against a dict: what was kept is read, what was freed is not, over restarts and rebuilds."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(prefix="kvstore-test-"))
        self.chains = Chains()
        self.stored: list[Stored] = []
        self.gone: list[Stored] = []
        self.reserved: list[int] = []
        self.tier = DiskTier.open([self.directory], 3 * MIB, io_threads=2, load=True)

    def teardown(self) -> None:
        self.tier.close()
        shutil.rmtree(self.directory)

    @rule(length=st.integers(1, 6), size=st.sampled_from([1, 4096, 5000, 40_000]))
    def write(self, length: int, size: int) -> None:
        group = self.chains.chain(length, size=size)
        if all(write(self.tier, group)):
            self.stored += group
        else:
            assert "full" in self.tier.last_refusal

    @rule(count=st.integers(1, 3))
    def reserve(self, count: int) -> None:
        self.reserved += self.tier.reserve("t", 4096, count)

    @precondition(lambda self: self.reserved)
    @rule()
    def give_up(self) -> None:
        self.tier.free_many(self.reserved)
        self.reserved = []

    @precondition(lambda self: self.stored)
    @rule(data=st.data(), erase=st.booleans())
    def free(self, data: st.DataObject, erase: bool) -> None:
        first = data.draw(st.sampled_from([i for i in self.stored if i.page.page_index == 0]))
        chain = self.chain_of(first)
        keep = data.draw(st.integers(0, len(chain) - 1))
        self.tier.free_many([item.slot for item in chain[keep:]], erase=erase)
        self.gone += chain[keep:]
        self.stored = [item for item in self.stored if item not in chain[keep:]]

    def chain_of(self, first: Stored) -> list[Stored]:
        chain = [first]
        for item in self.stored:
            if item.page.parent_sequence == chain[-1].page.sequence:
                chain.append(item)
        return chain

    @rule()
    def commit_frees(self) -> None:
        self.tier.commit_frees()

    @rule()
    def restart(self) -> None:
        self.tier.close()
        self.reserved = []
        self.tier = DiskTier.open([self.directory], 3 * MIB, io_threads=2, load=True)
        assert found_slots(self.tier) == {item.page.sequence: item.slot for item in self.stored}

    @invariant()
    def all_that_is_kept_is_read(self) -> None:
        self.tier.check()
        for item in self.stored[-20:]:
            assert read(self.tier, item) is ReadStatus.OK
        for item in self.gone[-5:]:
            assert read(self.tier, item) is not ReadStatus.OK
        usage = self.tier.usage()
        assert usage.used_slots >= len(self.stored) + len(self.reserved)
        assert (
            FileLayer().tree_bytes(self.directory) <= usage.allocated_bytes <= usage.capacity_bytes
        )


TestDiskTierMachine = pytest.mark.slow(DiskTierMachine.TestCase)
TestDiskTierMachine.settings = settings(max_examples=12, stateful_step_count=20, deadline=None)
