"""Who may take how much from whom: the rule by itself, and held by a real store."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from known_pages import PAGE_BYTES, SPEC, load, prompt, save

from kvstore import Store
from kvstore.errors import ConfigError, QuotaError
from kvstore.shares import Claims, Tenancy, TierShares, queue_room, room_beside
from kvstore.state import DISK, HOST, PIECE_PAGES
from kvstore.tenants import Quota

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MIB = 1 << 20


def test_what_nobody_asked_for_is_shared_by_those_who_said_nothing() -> None:
    quotas = {"a": Quota(host_bytes_share=50), "b": Quota(), "c": Quota(host_bytes_max=10)}
    shares = TierShares.of("host", quotas, 100)
    assert dict(shares.share_bytes) == {"a": 50, "b": 25, "c": 10}
    assert shares.share("nobody") == 0
    assert (shares.most("c"), shares.most("a")) == (10, None)


def test_more_promised_than_there_is_is_refused_with_the_numbers() -> None:
    quotas = {"a": Quota(disk_bytes_share=3 * MIB), "b": Quota(disk_bytes_share=2 * MIB)}
    with pytest.raises(ConfigError, match=r"disk_bytes_share: 5.*MiB are promised.*4.*MiB"):
        Tenancy.of(quotas, 100 * MIB, 4 * MIB)
    Tenancy.of(quotas, 0, 5 * MIB)


@given(
    st.integers(8, 1 << 20),
    st.integers(1, 64),
    st.dictionaries(st.sampled_from("abcdefgh"), st.integers(0, 1 << 20), min_size=1),
)
def test_whole_units_never_promise_more_than_there_are(
    capacity: int, parts: int, weights: dict[str, int]
) -> None:
    total = sum(weights.values()) or 1
    said = {name: Quota(host_bytes_share=capacity * w // total) for name, w in weights.items()}
    unit = max(1, capacity // parts)
    shares = TierShares.of("host", said, capacity)
    in_units = shares.in_units(unit)
    assert sum(in_units.values()) <= capacity
    for name, kept in in_units.items():
        assert kept > shares.share(name) - 2 * unit


@given(
    st.dictionaries(st.sampled_from("abcd"), st.integers(0, 30), min_size=1),
    st.dictionaries(st.sampled_from("abcdz"), st.integers(0, 60)),
    st.sampled_from("abcd"),
    st.integers(1, 10),
)
def test_donors_are_above_their_share_and_exist_whenever_a_claim_is_good(
    guaranteed: dict[str, int], used: dict[str, int], asker: str, more: int
) -> None:
    claims = Claims(guaranteed, used)
    donors = claims.donors(asker, more)
    assert all(used[each] > guaranteed.get(each, 0) for each in donors)
    assert asker not in donors
    overs = [claims.over(each) for each in donors]
    assert overs == sorted(overs, reverse=True)
    is_full = sum(used.values()) >= sum(guaranteed.values())
    if is_full and claims.is_within(asker, more):
        assert donors, "the tier is full, and somebody below its share finds nobody above"
    for each in claims.richer(asker):
        assert claims.over(each) > max(0, claims.over(asker))


def test_a_part_is_kept_for_whoever_comes_later() -> None:
    tenants = ["a", "b", "c", "d"]
    used: dict[str, int] = {}
    while room_beside("a", used, 160, tenants):
        used["a"] = used.get("a", 0) + 1
    assert used["a"] == 130
    for other in "bcd":
        assert room_beside(other, used, 160, tenants) == 10
    assert room_beside("", {}, 160, ()) == 160


@given(
    st.integers(0, 200),
    st.lists(st.tuples(st.sampled_from("abcz"), st.integers(1, 60)), max_size=30),
)
def test_a_queue_is_never_over_full_and_keeps_each_tenants_part_for_it(
    capacity: int, asked: list[tuple[str, int]]
) -> None:
    used: dict[str, int] = {}
    for tenant, size in asked:
        taken = min(size, queue_room(tenant, used, capacity, "abc"))
        used[tenant] = used.get(tenant, 0) + taken
        assert sum(used.values()) <= capacity
        for each in "abc":
            left = capacity // 2 // 3 - used.get(each, 0)
            assert queue_room(each, used, capacity, "abc") >= left
    assert queue_room("z", {}, capacity, ()) == capacity


# A real store


@pytest.fixture
def store() -> Iterator[Store]:
    made = Store.open(None, host_bytes=MIB)  # eight extents of some 30 pages
    assert made.state.host is not None
    made.state.host.wait_populated(10.0)
    yield made
    made.check()
    made.close()


def flood(store: Store, tenant: str, pages: int, first: int) -> None:
    session = store.session(SPEC, tenant=tenant)
    for number in range(first, first + pages // 4):
        save(session, prompt(number, 4), wait_s=5.0)
    session.close()


def hits(store: Store, tenant: str, first: int, chains: int) -> int:
    with store.session(SPEC, tenant=tenant) as session:
        return sum(load(session, prompt(each, 4)) for each in range(first, first + chains))


def extents(store: Store) -> dict[str, int]:
    assert store.state.host is not None
    found: dict[str, int] = {}
    for item in store.state.host.containers():
        if item.used_slots:
            found[item.tenant] = found.get(item.tenant, 0) + 1
    return found


def test_a_tenant_within_its_share_loses_nothing_to_a_flood(store: Store) -> None:
    store.set_quotas({"a": Quota(), "b": Quota()})
    flood(store, "b", 100, first=0)
    flood(store, "a", 2000, first=1000)
    assert hits(store, "b", 0, 25) == 100
    assert extents(store)["a"] >= 3


def test_what_was_lent_comes_back_and_no_more_than_that(store: Store) -> None:
    store.set_quotas({"a": Quota(), "b": Quota()})
    flood(store, "a", 2000, first=1000)
    assert extents(store) == {"a": 8}
    flood(store, "b", 2000, first=0)
    assert extents(store) == {"a": 4, "b": 4}
    flood(store, "a", 400, first=1600)
    assert extents(store) == {"a": 4, "b": 4}


def test_without_quotas_the_last_to_come_finds_room(store: Store) -> None:
    flood(store, "a", 2000, first=0)
    flood(store, "b", 20, first=0)
    assert hits(store, "b", 0, 5) == 20
    assert extents(store) == {"a": 7, "b": 1}


def test_of_more_tenants_than_extents_whoever_asks_gets_one(store: Store) -> None:
    names = [f"t{number}" for number in range(20)]
    store.set_quotas({name: Quota() for name in names})
    for name in names:
        flood(store, name, 4, first=0)
        assert hits(store, name, 0, 1) == 4
    assert len(extents(store)) <= 8


def test_a_tenant_at_its_most_gives_of_its_own_and_memory_stays_free(store: Store) -> None:
    store.set_quotas({"a": Quota(host_bytes_max=40 * PAGE_BYTES), "b": Quota()})
    flood(store, "b", 40, first=0)
    flood(store, "a", 400, first=1000)
    found = store.tenant_usage("a")
    assert found.host_bytes <= 40 * PAGE_BYTES
    assert hits(store, "a", 1000 + 95, 5) == 20, "the newest stay"
    assert hits(store, "b", 0, 10) == 40


def test_a_tenant_at_its_most_with_nothing_to_give_is_told_the_numbers(store: Store) -> None:
    store.set_quotas({"a": Quota(host_bytes_max=8 * PAGE_BYTES)})
    with store.session(SPEC, tenant="a") as session:
        save(session, prompt(1, 8))
        with session.match(prompt(1, 8)), session.reserve(prompt(2, 2), deadline_s=5.0) as run:
            assert run.count == 0
            assert run.reason.startswith("quota: ")
            assert "host_bytes_max = 32" in run.reason


def test_pins_are_counted_by_page_and_held_to_the_quota(store: Store) -> None:
    store.set_quotas({"a": Quota(pinned_pages_max=6), "b": Quota()})
    with store.session(SPEC, tenant="a") as session, store.session(SPEC, tenant="b") as other:
        for each in (session, other):
            save(each, prompt(1, 4))
            save(each, prompt(2, 4))
        assert session.pin(prompt(1, 4), 100.0) == 4
        assert session.pin(prompt(1, 2), 100.0) == 2, "held already"
        with pytest.raises(QuotaError, match=r"^quota: 4 pages are pinned, 8 would be .* is 6"):
            session.pin(prompt(2, 4), 100.0)
        assert session.pin(prompt(2, 2), 100.0) == 2
        assert other.pin(prompt(2, 4), 100.0) == 4
        session.unpin(prompt(1, 4))
        assert session.pin(prompt(2, 4), 100.0) == 4
    assert store.tenant_usage("a").pinned_pages == 4


def test_a_pin_does_not_hold_what_another_tenant_is_guaranteed(store: Store) -> None:
    store.set_quotas({"a": Quota(), "b": Quota()})
    with store.session(SPEC, tenant="a") as session:
        for each in range(60):
            save(session, prompt(each, 4), wait_s=5.0)
            session.pin(prompt(each, 4), 1000.0)
    assert extents(store) == {"a": 8}
    flood(store, "b", 40, first=0)
    assert hits(store, "b", 0, 10) == 40
    assert store.stats().counters["pins_broken"] > 0


def test_leases_above_the_share_are_asked_back(store: Store) -> None:
    store.set_quotas({"a": Quota(), "b": Quota()})
    with store.session(SPEC, tenant="a") as session:
        for each in range(60):
            save(session, prompt(each, 4), wait_s=5.0)
        held = [session.match(prompt(each, 4)) for each in range(60)]
        with store.session(SPEC, tenant="b") as other:
            with other.reserve(prompt(0, 4), deadline_s=0.0) as run:
                assert run.reason == "full"
            assert store.state.take_wanted_back() == {"a"}
            for each in held:
                each.release()
            assert save(other, prompt(0, 4)) == 4


@pytest.mark.slow
def test_the_disk_keeps_shares_and_bounds_too(tmp_path: Path) -> None:
    """Waits for the disk after each chain, as all that it did not take is lost with the arena."""
    with Store.open(tmp_path / "kv", host_bytes="256KiB", disk_bytes="8MiB") as store:
        store.set_quotas({"a": Quota(), "b": Quota(), "c": Quota(disk_bytes_max=80 << 10)})
        for tenant, chains in (("b", 40), ("a", 400), ("c", 20)):
            with store.session(SPEC, tenant=tenant) as session:
                for each in range(chains):
                    save(session, prompt(each, 4), wait_s=5.0)
                    store.flush(10.0)
        store.check()
        use = store.state.disk_use
        assert use["c"] <= 80 << 10
        assert use["a"] > store.state.tenancy.disk.share("a"), "what nobody uses is lent"
        assert hits(store, "b", 0, 40) == 160
        before = use["a"]
        with store.session(SPEC, tenant="b") as session:
            for each in range(40, 300):
                save(session, prompt(each, 4), wait_s=5.0)
                store.flush(10.0)
        store.check()
        assert use["a"] < before
        left = store.state.tenancy.disk.of_what_is_left(
            sum(item.slots * item.slot_bytes for item in store.state.disk.containers())  # type: ignore[union-attr]
        )
        assert use["a"] >= left["a"] - 8192
    with Store.open(tmp_path / "kv") as store:
        store.check()  # what was loaded is counted too
        assert np.isclose(sum(store.state.disk_use.values()), sum(use.values()))


def test_a_durable_commit_over_the_quota_of_the_disk_says_so(tmp_path: Path) -> None:
    most = 6 * 8192
    with Store.open(tmp_path / "kv", host_bytes=MIB, disk_bytes="64MiB") as store:
        store.set_quotas({"a": Quota(disk_bytes_max=most), "b": Quota()})
        for tenant in ("a", "b"):
            with store.session(SPEC, tenant=tenant) as session:
                with session.reserve(prompt(1, 12)) as run:
                    done = run.commit(durable=True)
                assert (done.pages, done.durable) == (12, tenant == "b")
                if tenant == "a":
                    assert done.reason.startswith("quota: ")
                    assert "of disk_bytes_max = 48" in done.reason


def test_much_at_once_is_done_in_pieces_so_that_look_ups_get_the_lock_between(
    tmp_path: Path,
) -> None:
    """What comes to the disk, comes back from it, and leaves for room; a hold of the lock each."""
    with Store.open(tmp_path / "kv", host_bytes="8MiB", disk_bytes="64MiB") as store:
        seen: list[tuple[int, bool, int]] = []
        store.state.index.observer = lambda pages, tier, comes: seen.append(
            (tier, comes, len(pages))
        )
        session = store.session(SPEC)
        assert save(session, prompt(1, 600)) == 600
        assert store.flush(10.0)
        assert save(session, prompt(2, 1500)) == 1500
        assert store.flush(10.0)
        with store.state.lock:
            root = store.root(SPEC.namespace)
            gone = store.state.index.match(root, prompt(1, 600).tobytes())
            store.state.leave_host(gone[::-1])
        begun = len(seen)
        assert load(session, prompt(1, 600)) == 600
        store.check()
        to_disk = [count for tier, comes, count in seen if (tier, comes) == (DISK, True)]
        assert (sum(to_disk), max(to_disk)) == (2100, PIECE_PAGES)
        staged = [count for tier, comes, count in seen[begun:] if (tier, comes) == (HOST, True)]
        assert (sum(staged), max(staged)) == (600, PIECE_PAGES)
        assert save(session, prompt(3, 1500)) == 1500
        left = [count for tier, comes, count in seen[begun:] if (tier, comes) == (HOST, False)]
        assert (sum(left) >= 1400, max(left)) == (True, PIECE_PAGES)


def test_what_was_used_since_a_sweep_ranked_it_stays(store: Store) -> None:
    """A sweep ranks more pages than leave at once; those touched before their turn are not cold."""
    session = store.session(SPEC)
    flood(store, "default", 4 * 100, 0)
    store.state.index.check()
    kept = [number for number in range(100) if load(session, prompt(number, 4))]
    oldest = kept[:20]
    save(session, prompt(500, 4))  # ranks, and takes the first
    for number in oldest[10:]:
        assert load(session, prompt(number, 4)) == 4
    flood(store, "default", 4 * 8, 600)
    assert [load(session, prompt(number, 4)) for number in oldest[10:]] == [4] * 10
