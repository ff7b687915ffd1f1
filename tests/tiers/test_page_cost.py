"""What pages are worth under each objective, and what policies make of it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvstore.tiers.eviction import NO_PARENT, Run
from kvstore.tiers.page_cost import OBJECTIVES, PageCost
from kvstore.tiers.policies import make_policy


def run(count=1, depth=0, tokens=512, size=0):
    return Run.of(np.arange(count, dtype=np.int32), NO_PARENT, depth, tokens, size)


def test_a_token_counts_alike_by_hits_more_with_its_position_by_compute():
    assert PageCost("hits").of(run(3)).tolist() == [1.0, 1.0, 1.0]
    work = PageCost("compute", even_tokens=1000.0).of(run(3, tokens=1000))
    assert work.tolist() == [1.5, 2.5, 3.5]
    assert PageCost("compute", 1000.0).work_until(3000) == pytest.approx(1000 * work.sum())


def test_for_ttft_the_pages_of_a_prompt_are_worth_the_same_in_all_be_it_long_or_short():
    cost = PageCost("ttft")
    short, long = cost.of(run(4)), cost.of(run(200))
    assert short.sum() == pytest.approx(long.sum())
    assert short[0] > 20 * long[0]


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_page_of_twice_the_bytes_for_the_same_tokens_is_worth_half(objective):
    cost = PageCost(objective)
    one, two = cost.of(run(size=4096)), cost.of(run(size=8192))
    assert two[0] == pytest.approx(one[0] / 2)


def test_compute_is_in_seconds_where_they_were_measured_and_alike_where_not():
    cost = PageCost("compute")
    first, slower = (cost.of(replace(run(3), token_s=each)) for each in (0.001, 0.004))
    assert slower.tolist() == pytest.approx((4 * first).tolist())
    assert first.tolist() == cost.of(run(3)).tolist() == PageCost("compute").of(run(3)).tolist()
    for objective in ("hits", "ttft"):
        cost = PageCost(objective)
        alike = [cost.of(replace(run(3), token_s=each)).tolist() for each in (0.001, 0.004)]
        assert alike[0] == alike[1]


@pytest.mark.parametrize("name", ["gdsf", "csl"])
def test_of_two_pages_alike_the_one_that_saves_less_for_its_bytes_leaves_first(name):
    policy = make_policy(name, 64, "compute", 1000.0)
    pages = np.arange(3, dtype=np.int32)
    keys = pages.astype(np.uint64)
    for page, (depth, size) in enumerate([(0, 4096), (40, 4096), (40, 4 * 4096)]):
        here = pages[page : page + 1]
        policy.insert(here, keys[here], Run.of(here, NO_PARENT, depth, 512, size), 10.0)
    for _ in range(60):
        policy.touch(pages, 12.0)
    study = policy.study(12.0)
    if study is not None:
        study.work()
        study.adopt()
    first, deep, large = policy.scores(pages, 12.0)
    assert deep > large > first or deep > first > large
    assert deep > 2 * large


def test_a_clock_that_began_long_ago_adds_nothing_to_what_gdsf_holds_a_page_for_worth():
    policy, now = make_policy("gdsf", 64), 1e9  # as in a store, whose clock is far from 0
    pages = np.arange(2, dtype=np.int32)
    policy.insert(pages, pages.astype(np.uint64), run(2), now)
    policy.touch(pages[:1], now + 60)
    often, once = policy.scores(pages, now + 60)
    assert often == pytest.approx(2 * once, rel=1e-6)


def test_an_unknown_objective_is_refused_by_name():
    with pytest.raises(ValueError, match="hits, ttft, compute"):
        PageCost("speed")
