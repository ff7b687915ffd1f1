"""A policy for memory of its own: it knows what is in memory, remembers what was, and no more."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore.tiers.eviction import LruPolicy, Run
from kvstore.tiers.eviction_csl import CslPolicy
from kvstore.tiers.eviction_gdsf import GdsfPolicy
from kvstore.tiers.eviction_split import SplitPolicy
from kvstore.tiers.page_cost import PageCost

MEMORY, DISK = 0, 1
PAGES = np.arange(4, dtype=np.int32)
KEYS = np.arange(100, 104, dtype=np.uint64)


def split(host):
    made = SplitPolicy(host, LruPolicy(), MEMORY)
    made.insert(PAGES, KEYS, Run.of(PAGES, -1, 0, 16, 4096), 10.0)
    made.entered(PAGES, KEYS, 10.0)
    return made


def test_each_tier_is_scored_by_its_own_policy():
    made, alone = split(GdsfPolicy(64)), GdsfPolicy(64)
    alone.insert(PAGES, KEYS, Run.of(PAGES, -1, 0, 16, 4096), 10.0)
    alone.touch(PAGES[:2], 20.0)
    made.touch(PAGES[:2], 20.0)
    assert made.scores(PAGES, 30.0, DISK).tolist() == [20.0, 20.0, 10.0, 10.0]
    assert made.scores(PAGES, 30.0, MEMORY).tolist() == alone.scores(PAGES, 30.0).tolist()


def test_uses_of_a_page_that_is_on_disk_only_are_not_told_to_memorys_policy():
    made = split(GdsfPolicy(64))
    made.exited(PAGES[3:], KEYS[3:], 15.0)
    made.touch(PAGES, 20.0)
    assert made.scores(PAGES, 30.0, DISK).tolist() == [20.0] * 4
    before = made.host.scores(PAGES[3:], 30.0).tolist()
    made.entered(PAGES[3:], KEYS[3:], 40.0)  # its ghost knew one use: this is the second
    assert made.scores(PAGES[3:], 50.0, MEMORY) > before
    assert made.scores(PAGES[3:], 50.0, MEMORY) == pytest.approx(
        made.scores(PAGES[:1], 50.0, MEMORY)
    )


def test_pages_of_two_sizes_may_enter_in_one_piece():
    made = split(GdsfPolicy(64))
    other, keys = np.arange(4, 6, dtype=np.int32), np.arange(7, 9, dtype=np.uint64)
    made.insert(other, keys, Run.of(other, -1, 0, 16, 8192), 10.0)
    made.exited(PAGES, KEYS, 11.0)
    made.entered(np.concatenate([PAGES, other]), np.concatenate([KEYS, keys]), 12.0)
    worth = made.scores(np.array([0, 4], np.int32), 13.0, MEMORY)
    assert worth[0] > 2 * worth[1]  # used twice, and half as large


def test_pages_of_a_slow_engine_and_a_fast_one_may_enter_in_one_piece():
    made = SplitPolicy(GdsfPolicy(64, PageCost("compute")), LruPolicy(), MEMORY)
    for pages, token_s in ((PAGES[:2], 0.001), (PAGES[2:], 0.008)):
        run = Run.of(pages, -1, 0, 16, 4096, token_s)
        made.insert(pages, KEYS[pages], run, 10.0)
    made.entered(PAGES, KEYS, 10.0)
    worth = made.scores(PAGES, 13.0, MEMORY)
    assert worth[2] == pytest.approx(8 * worth[0])


def test_what_left_by_choice_ages_the_policy_of_that_tier_alone():
    made = split(GdsfPolicy(64))
    made.touch(PAGES, 20.0)
    made.left(PAGES[3:], 21.0, DISK)
    new, key = np.array([9], np.int32), np.array([9], np.uint64)
    made.insert(new, key, Run.of(new, -1, 0, 16, 4096), 22.0)
    made.entered(new, key, 22.0)
    young = made.scores(new, 23.0, MEMORY)[0]
    made.exited(new, key, 24.0)
    made.left(PAGES[3:], 25.0, MEMORY)
    made.entered(new, key, 22.0)
    assert young < 1.5
    assert made.scores(new, 26.0, MEMORY)[0] > young + 1.5


def test_both_policies_think_in_one_study():
    host, store = CslPolicy(64), CslPolicy(64)
    made = SplitPolicy(host, store, MEMORY)
    made.insert(PAGES, KEYS, Run.of(PAGES, -1, 0, 16, 4096), 10.0)
    made.entered(PAGES, KEYS, 10.0)
    for number in range(60):
        made.touch(PAGES[:1], 11.0 + number)
    before = [each.scores(PAGES, 70.5).tolist() for each in (host, store)]
    study = made.study(70.2)
    assert study is not None
    study.work()
    study.adopt()
    assert all(
        each.scores(PAGES, 70.5).tolist() != old
        for each, old in zip((host, store), before, strict=True)
    )
    assert made.study(70.3) is None
