"""Every policy: scores in bounds, hints over statistics, no memory of a page that another has."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore.tiers.eviction import NO_PARENT, SCORE_MAX, SCORE_MIN, Run, study_at_once
from kvstore.tiers.eviction_csl import CslPolicy
from kvstore.tiers.eviction_hints import HintedPolicy
from kvstore.tiers.ghost_table import GhostTable
from kvstore.tiers.policies import POLICIES, make_policy
from kvstore.tiers.survival import AGE_FIRST_S, SurvivalTable


def ids(*pages: int) -> np.ndarray:
    return np.array(pages, np.int32)


def keys(*values: int) -> np.ndarray:
    return np.array(values, np.uint64)


def put(policy, pages, of, depth, tokens, now):
    policy.insert(pages, of, Run.of(pages, NO_PARENT, depth, tokens), now)


@pytest.mark.parametrize("name", POLICIES)
def test_the_page_used_longest_ago_is_worth_least_when_all_else_is_equal(name):
    policy = make_policy(name, 64, "hits")
    for page in range(5):
        put(policy, ids(page), keys(page), 0, 16, 10.0 + page)
    scores = policy.scores(ids(0, 1, 2, 3, 4), 20.0)
    assert (np.diff(scores) > 0).all()
    assert ((scores >= SCORE_MIN) & (scores <= SCORE_MAX)).all()


@pytest.mark.parametrize("name", POLICIES)
def test_pages_far_beyond_the_first_rows_and_old_times_are_taken(name):
    policy = make_policy(name, 64)
    run = Run.of(ids(70_000), NO_PARENT, 0, 16)
    policy.restore(ids(70_000), keys(9), run, np.array([3.0]))
    put(policy, ids(5_000, 5_001), keys(1, 2), 3, 16, 50.0)
    policy.touch(ids(70_000), 60.0)
    scores = policy.scores(ids(5_000, 5_001, 70_000), 61.0)
    assert np.isfinite(scores).all()
    assert scores[2] > scores[0]


@pytest.mark.parametrize("name", POLICIES)
def test_a_row_that_another_page_takes_starts_anew(name):
    policy = make_policy(name, 64)
    put(policy, ids(0), keys(1), 0, 16, 1.0)
    for now in range(2, 9):
        policy.touch(ids(0), float(now))
    policy.left(ids(0), 9.0)
    policy.remove(ids(0), keys(1), 9.0)
    put(policy, ids(0, 1), keys(7, 8), 0, 16, 10.0)
    first, second = policy.scores(ids(0, 1), 11.0)
    assert first == pytest.approx(second)


def test_hints_put_pages_into_bands_and_keep_the_order_within():
    policy = HintedPolicy(make_policy("lru", 64))
    for page in range(6):
        put(policy, ids(page), keys(page), 0, 16, 10.0 + page)
    policy.dismiss(ids(5))
    policy.prefer(ids(4), -1)
    policy.prefer(ids(0), 2)
    policy.expect(ids(1, 2), np.array([30.0, 25.0]))
    order = np.argsort(policy.scores(ids(*range(6)), 20.0)).tolist()
    assert order == [5, 4, 3, 0, 1, 2]


def test_a_touch_ends_what_was_said_of_a_page_and_a_next_use_that_passed_is_forgotten():
    policy = HintedPolicy(make_policy("lru", 64))
    put(policy, ids(0, 1), keys(0, 1), 0, 16, 1.0)
    plain = policy.scores(ids(0, 1), 2.0)
    policy.dismiss(ids(0))
    policy.expect(ids(1), 5.0)
    assert policy.scores(ids(0, 1), 2.0).tolist() != plain.tolist()
    assert policy.scores(ids(1), 1000.0).tolist() == plain[1:].tolist()
    policy.touch(ids(0), 1.0)
    assert policy.scores(ids(0), 2.0).tolist() == plain[:1].tolist()


def test_survival_learns_which_class_returns_and_weighs_those_that_never_did():
    table = SurvivalTable(2)
    many = np.zeros(400, np.int64)
    table.close(many, np.full(400, 10.0))
    gone = np.ones(400, np.int64)
    table.lose(gone, np.full(400, 500.0))
    table.refit(np.zeros_like(table.histogram(gone, np.ones(400))))
    worth = table.worth(np.array([0, 1]), np.array([1.0, 1.0]))
    assert worth[0] > 10 * worth[1]
    old = table.worth(np.array([0]), np.array([5_000.0]))
    assert old[0] < worth[0] / 10


def test_the_worth_is_the_best_odds_that_a_brute_force_search_finds():
    """Gittins' index of a curve known at its edges, by trying every time to stop at."""
    table = SurvivalTable(1)
    ages = np.random.default_rng(5).exponential(60.0, 500)
    table.close(np.zeros(500, np.int64), ages)
    table.refit(np.zeros_like(table.histogram(np.zeros(1, np.int64), np.ones(1))))
    found = float(table.worth(np.zeros(1, np.int64), np.array([AGE_FIRST_S]))[0])
    edges = [0.0] + [AGE_FIRST_S * 1.45**k for k in range(1, 41)]
    closed = np.histogram(np.maximum(ages, AGE_FIRST_S), [AGE_FIRST_S, *edges[1:]])[0]
    left, alive, held, best = 500.0, 1.0, 0.0, 0.0
    for k, used in enumerate(closed):
        pooled = used / max(left, 1.0)
        after = alive * (1 - (used + 20 * pooled) / (left + 20))
        held += (alive + after) / 2 * (edges[k + 1] - edges[k])
        best = max(best, (1 - after) / held)
        alive, left = after, left - used
    assert found == pytest.approx(best, rel=1e-6)


def test_csl_keeps_what_returns_over_what_was_used_last():
    policy = CslPolicy(64)
    now = 1.0
    for turn in range(300):  # pages of key 1..8 return every 9 s; the others never do
        now += 9.0
        back = keys(*range(1, 9))
        if turn:
            policy.touch(ids(*range(8)), now)
        else:
            put(policy, ids(*range(8)), back, 0, 512, now)
        put(policy, ids(20), keys(1000 + turn), 0, 512, now + 1)
        policy.left(ids(20), now + 2)
        policy.remove(ids(20), keys(1000 + turn), now + 2)
        study_at_once(policy, now + 2)
    put(policy, ids(20), keys(9999), 0, 512, now + 3)
    scores = policy.scores(ids(0, 20), now + 4)
    assert scores[0] > 3 * scores[1]


def test_a_ghost_is_found_until_a_newer_one_takes_its_row():
    ghosts = GhostTable(1024)
    many = np.arange(600, dtype=np.uint64)
    ghosts.put(many, np.arange(600.0), np.ones(600, np.uint8), np.zeros(600, np.uint8))
    rows, known = ghosts.find(many)
    assert known.sum() > 400
    assert ghosts.time[rows[known]].tolist() == many[known].astype(float).tolist()
    assert not ghosts.find(np.arange(10_000, 10_100, dtype=np.uint64))[1].any()
    ghosts.forget(rows[known])
    assert not ghosts.find(many)[1].any()
