"""Who may lose which pages, where they leave some at a time, whole extents among them."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest
from bare_pages import add_pages
from known_pages import PAGE_BYTES, SPEC, prompt, save

from kvstore import Store
from kvstore.state import DISK, HOST, PIECE_PAGES
from kvstore.tenants import Quota
from kvstore.tiers.tier import SLOT_INDEX_BITS

if TYPE_CHECKING:
    from collections.abc import Iterator

HOST_BYTES = 1 << 20
ASKER = (HOST, "globex", PAGE_BYTES)


@pytest.fixture
def store() -> Iterator[Store]:
    """Its arena is full of acme's pages; hardly any time passes."""
    with Store.open(None, host_bytes=HOST_BYTES, policy="lru") as made:
        assert made.state.host is not None
        assert made.state.host.wait_populated(60.0)
        ticks = itertools.count()
        made.state.clock = lambda: next(ticks) * 1e-6
        giver = made.session(SPEC, tenant="acme")
        for seed in range(100, 180):
            save(giver, prompt(seed, 4))
        yield made


def make_room(store: Store, payload_bytes: int = PAGE_BYTES) -> int:
    with store.state.lock:
        return store._evictor.make_room_host("globex", payload_bytes, 1)


def test_two_who_ask_a_tenant_at_once_take_no_more_than_it_has_borrowed(store: Store) -> None:
    host = store.state.host
    assert host is not None
    extents = host.containers()
    kept_bytes = (len(extents) - 1) * host.extent_bytes
    store.set_quotas(
        {
            "acme": Quota(host_bytes_share=kept_bytes),
            "globex": Quota(host_bytes_share=HOST_BYTES - kept_bytes),
        }
    )
    before = store.state.index.count_in(HOST)
    assert store._evictor._host_claims().over("acme") == host.extent_bytes
    sizes, slots = {PAGE_BYTES, 2 * PAGE_BYTES}, []
    for _ in range(len(extents) * max(item.slots for item in extents)):
        for size in sorted(sizes):
            make_room(store, size)
            with store.state.lock:
                if got := store._evictor.take_host("globex", size, 1):
                    slots += got
                    sizes.remove(size)
        assert host.wait_populated(60.0)
    assert len(sizes) == 1
    lost = before - store.state.index.count_in(HOST)
    assert 0 < lost <= max(item.slots for item in extents)
    host.free_many(slots)
    store.check()


def test_a_tenant_that_has_come_to_its_most_has_no_more_pages_of_others_leave(
    store: Store,
) -> None:
    store.set_quotas({"acme": Quota(), "globex": Quota()})
    assert make_room(store) == PIECE_PAGES
    assert store._evictor._emptier.container(ASKER) is not None
    store.set_quotas({"acme": Quota(), "globex": Quota(host_bytes_max=0)})
    left = store.state.index.count_in(HOST)
    assert make_room(store) == 0
    assert store.state.index.count_in(HOST) == left
    assert store._evictor._emptier.container(ASKER) is None
    store.check()


def test_extents_that_cannot_be_emptied_do_not_hide_one_that_can(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coldest ones hold pages above a leased one; more than are tried in one hold."""
    monkeypatch.setattr("kvstore.emptying.TRIED_MAX", 2)
    state, host = store.state, store.state.host
    assert host is not None
    giver = store.session(SPEC, tenant="acme")
    slots = max(item.slots for item in host.containers())
    save(giver, prompt(0, 5 * slots))
    chain = state.index.match(giver.root, prompt(0, 5 * slots).tobytes(), {})
    for seed in range(200, 260):
        save(giver, prompt(seed, 1))
    with state.lock:
        state.index.lease(int(chain[-1]))
    store.set_quotas({"acme": Quota(), "globex": Quota()})
    found = [make_room(store) for _ in range(4)]
    assert any(found)
    with state.lock:
        state.index.unlease(int(chain[-1]))
    store.check()


def test_each_of_two_who_ask_in_turn_is_offered_all_its_pages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where so many may leave that a sweep looks at a part of them."""
    monkeypatch.setattr("kvstore.prefix_index.residency.WINDOW_ROWS", 8)
    monkeypatch.setattr("kvstore.evictor.LEAVES_ENOUGH", 4)
    with Store.open(None, host_bytes=HOST_BYTES) as store:
        tenants = ("acme", "globex")
        mine: dict[str, set[int]] = {tenant: set() for tenant in tenants}
        for seed in range(64):
            for tenant in tenants:
                mine[tenant] |= set(add_pages(store, SPEC, prompt(seed, 1), tenant=tenant).tolist())
        offered: dict[str, set[int]] = {tenant: set() for tenant in tenants}
        with store.state.lock:
            for _ in range(16):
                for tenant in tenants:
                    roots = store._evictor._roots(tenant)
                    offered[tenant] |= set(store._evictor._rank(DISK, roots, 8).tolist())
        assert offered == mine


def test_the_coldest_extent_is_found_among_many_pages_that_are_only_on_disk(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How warm extents are is told by a sample: one of all pages has none of some extents."""
    monkeypatch.setattr("kvstore.emptying.SAMPLE_ROWS", 32)
    for seed in range(1000, 1050):
        add_pages(store, SPEC, prompt(seed, 40))
    state, host = store.state, store.state.host
    assert host is not None
    giver = store.session(SPEC, tenant="acme")
    coldest = host.containers()[2]
    for seed in range(100, 180):
        pages = state.index.match(giver.root, prompt(seed, 4).tobytes(), {})
        homes = state.index.table.slot[HOST][pages] >> SLOT_INDEX_BITS
        if not (homes == coldest.container_id).any():
            giver.match(prompt(seed, 4)).release()
    store.set_quotas({"acme": Quota(), "globex": Quota()})
    make_room(store)
    begun = store._evictor._emptier.container(ASKER)
    assert begun is not None
    assert begun.container_id == coldest.container_id
