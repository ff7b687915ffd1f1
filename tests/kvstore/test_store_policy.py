"""The store under its policies: hints, write policies, a flood by another tenant, recording."""

from __future__ import annotations

import json

import numpy as np
import pytest

from kvstore.errors import DirectoryError, InvalidRequest
from kvstore.page_policy import PagePolicy
from kvstore.policy_words import sentences
from kvstore.simulation import replay
from kvstore.spec import CacheSpec
from kvstore.store import Store
from kvstore.tenants import Quota
from kvstore.tiers.admission import ADMISSIONS
from kvstore.tiers.eviction import LruPolicy
from kvstore.tiers.policies import POLICIES
from kvstore.tiers.shadow_set import SHADOW_PAGES, SHADOW_PAGES_MIN
from kvstore.trace import read_trace

PAGE_TOKENS = 4
SPEC = CacheSpec.opaque("policy", page_tokens=PAGE_TOKENS, page_bytes=4032)


def prompt(number: int, pages: int = 4) -> np.ndarray:
    return np.arange(number * 1000, number * 1000 + pages * PAGE_TOKENS, dtype=np.int32)


def put(session, tokens):
    with session.reserve(tokens, deadline_s=5.0) as run:
        for view in run.views():
            view[:4] = tokens[:1].tobytes()
        if run.count:
            run.commit()


def hits(session, tokens) -> int:
    with session.match(tokens) as found:
        return found.pages


@pytest.mark.parametrize("name", POLICIES)
def test_under_every_policy_what_is_used_stays_and_the_store_adds_up(name):
    with Store.open(None, host_bytes="512KiB", policy=name) as store:
        session = store.session(SPEC)
        put(session, prompt(0))
        for number in range(1, 80):
            put(session, prompt(number))
            assert hits(session, prompt(0)) == 4
        assert store.stats().counters["host_evictions"] > 100
        assert hits(session, prompt(3)) == 0
        store.check()


def test_a_chain_that_is_said_not_to_come_back_leaves_before_older_ones():
    with Store.open(None, host_bytes="512KiB", policy="lru") as store:
        session = store.session(SPEC)
        stored = [number for number in range(20) if put(session, prompt(number)) is None]
        assert session.hint(prompt(stored[-1]), done=True) == 4
        assert session.hint(prompt(0), next_use_s=30.0) == 4
        assert session.hint(prompt(1), priority=2) == 4
        for number in range(100, 160):
            put(session, prompt(number))
            if store.stats().counters["host_evictions"]:
                break
        assert hits(session, prompt(stored[-1])) < 4
        assert hits(session, prompt(5)) > 0
        for number in range(200, 260):
            put(session, prompt(number))
        assert hits(session, prompt(5)) == 0
        assert hits(session, prompt(0)) == hits(session, prompt(1)) == 4
        store.check()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "host_policy", "stays"),
    [("lru", "gdsf", True), ("gdsf", "lru", False), ("lru", "same", False), ("gdsf", "same", True)],
)
def test_memory_goes_by_its_own_policy_and_the_disk_by_the_other(
    tmp_path, policy, host_policy, stays
):
    words = {"policy": policy, "host_policy": host_policy}
    with Store.open(tmp_path / "s", host_bytes="512KiB", disk_bytes="64MiB", **words) as store:
        session = store.session(SPEC)
        put(session, prompt(0))
        for _ in range(40):  # used far more often than all that follow, and before them
            assert hits(session, prompt(0)) == 4
        for number in range(1, 61):
            put(session, prompt(number))
            session.flush()
        assert store.stats().counters["host_evictions"] > 100
        with session.match(prompt(0)) as found:
            assert found.pages == 4
            assert found.host_pages == (4 if stays else 0)
            if not stays:
                assert found.stage(10.0) == 4
        store.check()
        assert store.stats().policy["host_policy"] == host_policy


def test_hints_that_make_no_sense_are_refused():
    with Store.open(None, host_bytes="512KiB") as store:
        session = store.session(SPEC)
        assert session.hint(prompt(0), priority=1) == 0
        for wrong in ({"priority": 3}, {"priority": True}, {"next_use_s": -1.0}):
            with pytest.raises(InvalidRequest):
                session.hint(prompt(0), **wrong)


@pytest.mark.slow
@pytest.mark.parametrize("name", POLICIES)
def test_a_flood_ten_times_as_large_leaves_another_tenants_hot_set_alone(name):
    with Store.open(None, host_bytes="4MiB", policy=name) as store:
        store.set_quotas({"hot": Quota(), "flood": Quota()})
        hot, flood = store.session(SPEC, tenant="hot"), store.session(SPEC, tenant="flood")
        kept = [prompt(number, 8) for number in range(40)]
        for tokens in kept:
            put(hot, tokens)
        before = sum(hits(hot, tokens) for tokens in kept)
        for number in range(40 * 10):
            put(flood, prompt(10_000 + number, 8))
        after = sum(hits(hot, tokens) for tokens in kept)
        assert before == 320
        assert after >= 0.95 * before
        assert store.stats().counters["host_evictions"] > 1000
        store.check()


@pytest.mark.slow
@pytest.mark.parametrize("write_policy", ["through", "back", "selective"])
def test_write_policies_keep_what_they_say_and_write_no_more(tmp_path, write_policy):
    with Store.open(
        tmp_path / "s", host_bytes="512KiB", disk_bytes="64MiB", write_policy=write_policy
    ) as store:
        session = store.session(SPEC)
        for number in range(60):
            put(session, prompt(number))
            if number % 3 == 0:
                hits(session, prompt(number))
        written = store.stats().counters["disk_pages_written"]
        store.check()
    with Store.open(tmp_path / "s", host_bytes="512KiB") as store:
        session = store.session(SPEC)
        kept = [hits(session, prompt(number)) for number in range(60)]
    used, unused = sum(kept[0::3]), sum(kept) - sum(kept[0::3])
    assert used == 20 * 4
    if write_policy == "selective":
        assert unused == 0
        assert written <= used
    else:
        assert unused == 40 * 4


@pytest.mark.slow
@pytest.mark.parametrize("admission", ADMISSIONS)
@pytest.mark.parametrize("write_policy", ["through", "back", "selective"])
def test_admission_keeps_pages_off_the_disk_but_no_durable_one(tmp_path, write_policy, admission):
    settings = {"write_policy": write_policy, "admission": admission, "disk_bytes": "64MiB"}
    with Store.open(tmp_path / "s", host_bytes="512KiB", **settings) as store:
        session = store.session(SPEC)
        for number in range(60):
            put(session, prompt(number))
            if number % 3 == 0:
                hits(session, prompt(number))
        with session.reserve(prompt(99), deadline_s=5.0) as run:
            assert run.commit(durable=True, deadline_s=20.0).durable
        assert session.flush(20.0)
        counters = store.stats().counters
        store.check()
    with Store.open(tmp_path / "s", host_bytes="512KiB") as store:
        session = store.session(SPEC)
        kept = [hits(session, prompt(number)) for number in range(60)]
        assert hits(session, prompt(99)) == 4, "durable, whatever the filter says"
    assert sum(kept[0::3]) == 20 * 4, "used again"
    unused = sum(kept) - sum(kept[0::3])
    filters = admission in ("second-touch", "ghost") or write_policy == "selective"
    if admission == "frequency" or not filters:
        assert unused == 40 * 4, "with room on the disk"
    else:
        assert unused == 0
        assert counters["disk_pages_written"] <= 20 * 4 + 4
        assert counters["pages_not_admitted"] > 0


@pytest.mark.slow
def test_through_a_second_use_writes_at_once_and_a_ghost_writes_at_its_return(tmp_path):
    settings = {"admission": "ghost", "disk_bytes": "64MiB"}
    with Store.open(tmp_path / "s", host_bytes="512KiB", **settings) as store:
        session = store.session(SPEC)
        put(session, prompt(0))
        assert session.flush(20.0)
        assert store.stats().counters["disk_pages_written"] == 0
        assert hits(session, prompt(0)) == 4
        assert session.flush(20.0)
        assert store.stats().counters["disk_pages_written"] == 4
        put(session, prompt(1))
        for number in range(2, 60):
            put(session, prompt(number))
        assert hits(session, prompt(1)) == 0
        put(session, prompt(1))
        assert session.flush(20.0)
        found = store.stats()
        # What is remembered is a hash table without chains: now and then a page is forgotten.
        assert 4 < found.counters["disk_pages_written"] <= 8
        assert found.counters["hit_pages"] == 4
        assert found.disk_bytes_per_hit == found.counters["disk_bytes_written"] / 4 >= 2 * 4096
        store.check()


def test_what_is_recorded_replays_and_tells_nothing(tmp_path):
    file = tmp_path / "lookups.jsonl"
    with Store.open(None, host_bytes="2MiB", record_file=file) as store:
        session = store.session(SPEC)
        for number in (0, 1, 0, 0):
            hits(session, prompt(number))
            put(session, prompt(number))
        hits(session, np.concatenate([prompt(0), prompt(7, 1), np.array([5], np.int32)]))
    trace = read_trace(file)
    assert (trace.requests, trace.unique, trace.references) == (5, 9, 21)
    assert replay(trace, LruPolicy(), 100).hit_blocks == 12
    assert file.stat().st_mode & 0o777 == 0o600
    first, second = (json.loads(line)["hash_ids"] for line in file.read_text().splitlines()[:2])
    assert not set(first) & set(second)
    assert not set(first) & {int(key) >> 1 for key in store.state.index.table.key[:20].ravel()}
    with pytest.raises(DirectoryError, match="does not exist yet"):
        Store.open(None, host_bytes="2MiB", record_file=file)


@pytest.mark.slow
def test_auto_tells_in_stats_what_other_sizes_would_hit():
    with Store.open(None, host_bytes="512KiB", policy="auto") as store:
        session = store.session(SPEC)
        for number in range(1200):
            tokens = prompt(number % 45)
            hits(session, tokens)
            put(session, tokens)
            if number % 100 == 99:
                store._housekeeper.tick()
        store._housekeeper.tick()
        policy = store.stats().policy
        store.check()
    auto = store.state.policy._auto
    assert auto is not None
    auto.shadows.check()
    assert policy["name"] == "auto"
    assert policy["capacity_pages"] > 50
    ratios = {each["factor"]: each["hit_ratio"] for each in policy["curves"]["lru"]}
    assert ratios[0.5] < 0.1  # a loop of 180 pages, in less than 128
    assert ratios[2.0] > 0.75  # all of it fits; some hundred of few pages are sampled
    said = sentences(policy, "memory")
    assert any("With twice the memory you would hit" in each for each in said)
    assert json.dumps(policy)


def test_a_study_that_takes_too_much_of_a_core_gets_less_to_look_at():
    now = [0.0]
    policy = PagePolicy("auto", 5000, lambda: now[0])
    shadows = policy._auto.shadows
    for _ in range(200):
        now[0] += 1.0
        policy.studied(0.001)
    assert shadows._pages_most == SHADOW_PAGES
    for _ in range(200):
        now[0] += 1.0
        policy.studied(0.5)
    assert shadows._pages_most == SHADOW_PAGES_MIN
    assert policy.report()["study_share"] > 0.0
