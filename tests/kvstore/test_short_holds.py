"""What walks over a store does so in short holds of its lock: others come in between.

The answer is that of one long look where nothing changes meanwhile.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import pytest
from bare_pages import OpenLock, add_pages
from hypothesis import given, settings
from hypothesis import strategies as st
from known_pages import PAGE_BYTES, PAGE_TOKENS, SPEC, load, prompt, save
from plain_walks import plain_branches, plain_eviction

from kvstore import CacheSpec, Store
from kvstore.emptying import CLOSURE_PAGES, IDLE_S
from kvstore.inspection import find_chain
from kvstore.page_sweep import ROWS_A_HOLD, chain_ends
from kvstore.removal import STEP_PAGES, Selection
from kvstore.session import PIECES_AT_ONCE, ROUNDS_A_PIECE
from kvstore.state import HOST, PIECE_PAGES
from kvstore.tenants import Quota

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PIECES = 4
SHORT = 200  # pages of a prompt


@pytest.fixture
def store() -> Iterator[Store]:
    with Store.open(None, host_bytes="1MiB") as made:
        yield made


def short(seed: int, pages: int = SHORT) -> np.ndarray:
    """A prompt that no other seed shares; there are millions."""
    return np.arange(pages * PAGE_TOKENS, dtype=np.int32) + 1000 * seed


def fill(store: Store, pages: int, tenant: str = "default", each: int = SHORT) -> list[np.ndarray]:
    """Many prompts; ids of each one's pages."""
    return [
        add_pages(store, SPEC, short(seed, each), tenant=tenant)
        for seed in range(-(-pages // each))
    ]


WALKS: dict[str, Callable[[Store], object]] = {
    "tree": lambda store: store.tree(branches=10),
    "tree_map": lambda store: store.tree_map(),
    "namespaces": lambda store: store.namespaces(),
    "chains": lambda store: store.chains(limit=10),
    "find_chain": lambda store: find_chain(store.state, "00"),
    "export": lambda store: chain_ends(store.state, list(store.state.trees)),
    "all": lambda store: store.evict(Selection(everything=True), dry_run=True),
    "tier": lambda store: store.evict(Selection(tier="disk"), dry_run=True),
    "unused": lambda store: store.evict(Selection(unused_for_s=1e9), dry_run=True),
    "prefix": lambda store: store.evict(
        Selection(namespace=SPEC.namespace, prefix=short(3)[:2].tolist()), dry_run=True
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WALKS)
def test_others_come_in_between_any_two_pieces_of_a_walk(store: Store, name: str) -> None:
    """And their pages, new in each gap, do no harm to it."""
    fill(store, PIECES * ROWS_A_HOLD, each=SHORT if name != "chains" else 8)

    def between(times: int) -> None:
        add_pages(store, SPEC, short(10**6 + times))

    lock = OpenLock(store, between)
    WALKS[name](store)
    assert lock.times >= PIECES, "a piece looks at so many rows at most"
    store.state.index.check()


def test_pages_go_a_few_at_a_time_and_look_ups_hit_meanwhile(store: Store) -> None:
    """Of two tenants one is evicted; the other's pages are found in every gap."""
    fill(store, 3 * STEP_PAGES, "acme")
    (kept,) = fill(store, SHORT, "globex")
    root, seen = store.root(SPEC.namespace, "globex"), []

    def between(times: int) -> None:
        seen.append(len(store.state.index.match(root, short(0))))

    lock = OpenLock(store, between)
    done = store.evict(Selection(tenant="acme"))
    assert done.pages >= 3 * STEP_PAGES
    assert lock.times >= 3
    assert set(seen) == {SHORT}
    assert store.state.index.table.live().tolist() == kept.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("gap", range(2 * PIECES))
def test_an_id_that_becomes_another_tenants_between_two_pieces_is_not_evicted(
    store: Store, gap: int
) -> None:
    """A page leaves while a walk over the table is under way, and its row is used again at once,
    for another tenant and for a page below which the walk has seen others."""
    acme = fill(store, PIECES * ROWS_A_HOLD, "acme")
    state, new = store.state, short(0, 3 * SHORT)

    def between(times: int) -> None:
        if times == gap:
            for ids in (acme[0], acme[-1], acme[len(acme) // 2]):
                with state.lock:
                    state.remove_pages(ids[::-1])
            add_pages(store, SPEC, new, tenant="globex")

    lock = OpenLock(store, between)
    store.evict(Selection(tenant="acme"))
    assert lock.times > gap
    (left,) = store.namespaces()
    assert (left.tenant, left.pages, left.chains) == ("globex", 3 * SHORT, 1)
    state.index.check()


TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=6)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    paths=st.lists(TOKENS, min_size=1, max_size=14),
    in_memory=st.lists(st.integers(0, 13), max_size=4),
    leased=st.lists(st.tuples(st.integers(0, 13), st.integers(1, 6)), max_size=2),
    pinned=st.lists(st.tuples(st.integers(0, 13), st.integers(1, 6)), max_size=2),
    prefix=st.lists(st.integers(0, 1), min_size=1, max_size=4),
    cut=st.integers(0, PAGE_TOKENS - 1),
    depth=st.integers(1, 4),
)
def test_answers_are_those_of_one_plain_look(
    tmp_path_factory: pytest.TempPathFactory,
    paths: list[list[int]],
    in_memory: list[int],
    leased: list[tuple[int, int]],
    pinned: list[tuple[int, int]],
    prefix: list[int],
    cut: int,
    depth: int,
) -> None:
    folder = tmp_path_factory.mktemp("plain")
    prompts = [np.repeat(np.array(path, np.int32), PAGE_TOKENS) for path in paths]
    with Store.open(folder, host_bytes="8MiB", disk_bytes="32MiB") as store:
        for number, tokens in enumerate(prompts):
            tenant = "acme" if number % 3 else "globex"
            save(store.session(SPEC, tenant=tenant, writer=f"w{number % 2}"), tokens, durable=True)
    with Store.open(folder, host_bytes="8MiB") as store:
        sessions = {name: store.session(SPEC, tenant=name) for name in ("acme", "globex")}

        def of(number: int) -> tuple[str, np.ndarray]:
            number %= len(prompts)
            return "acme" if number % 3 else "globex", prompts[number]

        for number in in_memory:
            tenant, tokens = of(number)
            load(sessions[tenant], tokens)
        save(sessions["acme"], np.full(2 * PAGE_TOKENS, 9, np.int32))  # not durable
        for number, pages in pinned:
            tenant, tokens = of(number)
            sessions[tenant].pin(tokens[: pages * PAGE_TOKENS], ttl_s=600.0)
        held = []
        for number, pages in leased:
            tenant, tokens = of(number)
            held.append(sessions[tenant].match(tokens[: pages * PAGE_TOKENS]))
        store.flush(10.0)
        begins = np.repeat(np.array(prefix, np.int32), PAGE_TOKENS)[
            : len(prefix) * PAGE_TOKENS - cut
        ]
        root = store.root(SPEC.namespace, "acme")
        chosen = [
            Selection(everything=True),
            Selection(tenant="acme"),
            Selection(writer="w1"),
            Selection(tenant="globex", writer="w0"),
            Selection(namespace=SPEC.namespace[:3], tier="disk"),
            Selection(tier="host"),
            Selection(tier="disk", writer="w1"),
        ]
        if root in store.state.trees:
            chosen += [
                Selection(root=root, prefix=begins),
                Selection(root=root, prefix=begins, writer="w1"),
                Selection(root=root, prefix=begins, tier="disk"),
            ]
        for each in chosen:
            for include_pinned in (False, True) if each.tier is None else (False,):
                found = store.evict(each, dry_run=True, include_pinned=include_pinned)
                assert found == plain_eviction(store, each, include_pinned=include_pinned), each
        for view in store.tree(depth=depth):
            branches = [
                (b.depth, b.first_page, b.pages, b.chain_id, b.forks, b.folded_pages)
                for b in view.branches
            ]
            assert branches == plain_branches(
                store.state, store.root(SPEC.namespace, view.tenant), depth
            )
        for each in held:
            each.release()


def test_a_run_longer_than_an_edge_is_one_branch(store: Store) -> None:
    spec = CacheSpec.opaque("long", page_tokens=PAGE_TOKENS, page_bytes=PAGE_BYTES)
    pages = 3 * (512 << 10) // (4 * PAGE_TOKENS)
    ids = add_pages(store, spec, prompt(0, pages))
    add_pages(store, spec, prompt(1, 2), under=int(ids[-1]))
    add_pages(store, spec, prompt(2, 1), under=int(ids[-1]))
    (view,) = store.tree()
    assert [(b.depth, b.pages, b.forks) for b in view.branches] == [
        (0, pages, 2),
        (1, 2, 0),
        (1, 1, 0),
    ]
    assert view.branches[0].tokens_head == tuple(prompt(0, 8).tolist())
    assert view.branches[0].payload_bytes == pages * PAGE_BYTES
    assert store.state.index.nodes > 4


def test_a_branch_that_left_since_it_was_counted_is_not_shown(store: Store) -> None:
    first = add_pages(store, SPEC, prompt(0, 3))
    add_pages(store, SPEC, prompt(1, 2))
    gone: list[int] = []

    def between(times: int) -> None:
        if times == 1:  # the pages are counted, and not described yet
            with store.state.lock:
                store.state.remove_pages(first[::-1])
            gone.extend(first.tolist())

    OpenLock(store, between)
    (view,) = store.tree()
    assert gone
    assert (view.pages, [branch.pages for branch in view.branches]) == (5, [2])


def test_pins_of_a_tenant_count_each_page_once(store: Store) -> None:
    ids = add_pages(store, SPEC, prompt(0, 20), tenant="acme")
    other = add_pages(store, SPEC, prompt(0, 5), tenant="globex")
    state = store.state
    for page in (*ids[3 : 3 + PIECE_PAGES].tolist(), int(other[1])):
        state.index.pin(page, state.clock() + 600.0)
    found = {each.tenant: each for each in store.tenant_usages()}
    assert {name: each.pinned_pages for name, each in found.items()} == {
        "acme": 3 + PIECE_PAGES,
        "globex": 2,
    }
    assert {name: each.pages for name, each in found.items()} == {"acme": 20, "globex": 5}
    assert store.tenant_usage("acme") == found["acme"]
    assert store.tenant_usage("nobody").pages == 0


def test_bytes_of_the_index_are_back_where_they_were_once_all_is_gone(store: Store) -> None:
    state = store.state
    before, table = state.index.nbytes, state.index.table.nbytes
    ids = [add_pages(store, SPEC, prompt(seed, 3)) for seed in range(40)]
    fork = add_pages(store, SPEC, prompt(99, 2), under=int(ids[7][0]))
    grown = state.index.nbytes - state.index.table.nbytes
    tokens = 4 * PAGE_TOKENS * 122
    assert grown - (before - table) > tokens
    assert store.stats().index_bytes == state.index.nbytes
    state.index.check()
    with state.lock:
        for each in (fork, *ids):
            state.remove_pages(each[::-1])
    state.index.check()
    empty = state.index.nbytes - state.index.table.nbytes
    assert empty < grown - tokens, "what is left is room in columns"


def test_a_tenant_far_above_its_most_gives_in_many_holds_and_not_in_one(store: Store) -> None:
    """Its most fell to a fraction of what it has: the reservation that has to make room for that
    lets others in, gives up at its deadline, and those after it go on from there."""
    session, state = store.session(SPEC), store.state
    save(session, prompt(0, SHORT))
    save(session, prompt(1, 40))
    store.set_quotas({"default": Quota(host_bytes_max=8 * PAGE_BYTES)})
    left, gaps = [], 0

    def between(times: int) -> None:
        nonlocal gaps
        gaps += 1
        left.append(len(state.index))

    OpenLock(store, between)
    tries = 0
    while not (run := session.reserve(prompt(2, 4), deadline_s=0.0)).count:
        tries += 1
        assert run.reason.startswith("quota"), run.reason
        assert tries < 20
    assert run.count == 4
    assert gaps >= tries + 1
    most = ROUNDS_A_PIECE * PIECE_PAGES + PIECES_AT_ONCE * PIECE_PAGES
    steps = [before - after for before, after in pairwise([SHORT + 40, *left])]
    assert max(steps) <= most
    run.abort()
    store.check()


def test_pins_that_end_together_end_a_few_in_a_hold(store: Store) -> None:
    ids = add_pages(store, SPEC, prompt(0, 4 * PIECE_PAGES))
    state = store.state
    for page in ids.tolist():
        state.index.pin(page, state.clock() - 1.0)
    pinned: list[int] = []
    OpenLock(store, lambda times: pinned.append(len(state.index.pins)))
    state.end_pins()
    steps = [before - after for before, after in pairwise([len(ids), *pinned])]
    assert max(steps) == PIECE_PAGES
    assert pinned[-1] == 0
    store.check()


def test_an_extent_is_emptied_in_pieces_in_which_its_tenant_takes_no_slots(store: Store) -> None:
    """Between two pieces the tenant that gives goes on storing; the one that asks gets its extent
    all the same."""
    giver, state = store.session(SPEC, tenant="acme"), store.state
    host, evictor, seeds = state.host, store._evictor, iter(range(100, 10_000))
    assert host is not None
    assert host.wait_populated(60.0)
    now = state.clock()
    state.clock = lambda: now  # however slow this machine is, nobody is idle for long
    for _ in range(80):
        save(giver, prompt(next(seeds), 4))
    slots = max(item.slots for item in host.containers())
    assert slots > PIECE_PAGES, "an extent takes more than one piece"
    store.set_quotas({"acme": Quota(), "globex": Quota()})
    got: list[int] = []
    pieces = 0
    while not got:
        with state.lock:
            left = evictor.make_room_host("globex", PAGE_BYTES, 1)
            got = evictor.take_host("globex", PAGE_BYTES, 1)
        pieces += left > 0
        assert left <= CLOSURE_PAGES
        assert host.wait_populated(60.0)  # memory of another tenant comes anew
        host.check()
        if evictor._emptier.container((HOST, "globex", PAGE_BYTES)) is not None:
            save(giver, prompt(next(seeds), 2), wait_s=0.0)  # may find its coldest drained too
    assert 1 < pieces <= 2 * -(-slots // PIECE_PAGES), "asked again before its memory came"
    host.free_many(got)
    session = store.session(SPEC, tenant="globex")
    assert save(session, prompt(1, 4)) == load(session, prompt(1, 4)) == 4
    assert save(giver, prompt(next(seeds), 2)) == 2
    store.check()


def test_a_container_that_nobody_wants_emptied_any_more_takes_pages_again(store: Store) -> None:
    state, host = store.state, store.state.host
    assert host is not None
    assert host.wait_populated(60.0)
    giver = store.session(SPEC, tenant="acme")
    for seed in range(80):
        save(giver, prompt(seed, 4))
    store.set_quotas({"acme": Quota(), "globex": Quota()})
    with state.lock:
        assert store._evictor.make_room_host("globex", PAGE_BYTES, 1) == PIECE_PAGES
        free = host.usage().free_slots
        assert free >= PIECE_PAGES
        assert store._evictor.take_host("acme", PAGE_BYTES, 1) == []
        host.check()
        later_s = state.clock() + 2 * IDLE_S
        state.clock = lambda: later_s
        store._evictor._emptier.drop_idle()
        slots = store._evictor.take_host("acme", PAGE_BYTES, free)
        assert len(slots) == free
        host.free_many(slots)
    store.check()
