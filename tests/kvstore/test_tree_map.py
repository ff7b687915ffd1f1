"""The map of what is cached: its sums are those of the pages, and it stays small."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from known_pages import PAGE_BYTES, PAGE_TOKENS, SPEC, load, prompt, save

from kvstore import CacheSpec, Store
from kvstore.removal import Selection
from kvstore.tree_map import BELOW_MAX, BOXES_MAX, TreeMap

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def store() -> Iterator[Store]:
    with Store.open(None, host_bytes="32MiB") as made:
        yield made


def below(found: TreeMap, above: int) -> list[int]:
    return [number for number, box in enumerate(found.boxes) if box.above == above]


def check_sums(found: TreeMap, store: Store) -> None:
    """Each box has what it is itself and what the boxes below it have; all together, everything."""
    table = store.state.index.table
    live = table.live()
    assert found.total_pages == len(live)
    assert found.total_bytes == int(table.payload_bytes[live].sum())
    assert sum(box.own_pages for box in found.boxes) <= found.total_pages
    tops = below(found, -1)
    assert sum(found.boxes[top].total_bytes for top in tops) == found.total_bytes
    for number, box in enumerate(found.boxes):
        assert box.above < number
        under = [found.boxes[each] for each in below(found, number)]
        assert sum(each.total_pages for each in under) <= box.total_pages - box.own_pages
        if under:
            assert sum(each.total_pages for each in under) == box.total_pages - box.own_pages
            assert sum(each.host_pages for each in under) <= box.host_pages


def test_an_empty_store_has_no_boxes(store: Store) -> None:
    found = store.tree_map()
    assert (found.boxes, found.total_bytes, found.total_pages, found.runs) == ((), 0, 0, 0)
    assert found.hottest == ()


def test_a_fork_is_a_box_with_two_below_it(store: Store) -> None:
    session = store.session(SPEC, tenant="acme")
    common, left, right = prompt(0, 4), prompt(1, 2), prompt(2, 3)
    save(session, np.concatenate((common, left)))
    save(session, np.concatenate((common, right)))
    assert load(session, np.concatenate((common, right))) == 7
    assert load(session, common) == 4
    found = store.tree_map()
    check_sums(found, store)
    tree, run, longer, shorter = found.boxes
    assert (tree.tenant, tree.model, tree.runs, tree.own_pages) == ("acme", "unit", 0, 0)
    assert (run.own_pages, run.total_pages, run.own_hits, run.first_page) == (4, 9, 8, 0)
    assert run.total_bytes == 9 * PAGE_BYTES
    assert run.tokens_head == tuple(common[:PAGE_TOKENS].tolist())
    assert (longer.own_pages, longer.own_hits, longer.above, longer.first_page) == (3, 3, 1, 4)
    assert (shorter.own_pages, shorter.own_hits, shorter.above) == (2, 0, 1)
    assert store.find_chain(longer.chain_id)[0].chain.pages == 7
    assert found.runs == 3
    assert [(chain.pages, chain.hits) for chain in found.hottest] == [(4, 2), (7, 1)]
    assert found.hottest[1].chain_id == longer.chain_id


def test_only_pages_in_memory_count_as_such(tmp_path: object) -> None:
    with Store.open(str(tmp_path), host_bytes="8MiB", disk_bytes="64MiB") as store:
        save(store.session(SPEC), prompt(0, 4), durable=True)
    with Store.open(str(tmp_path), host_bytes="8MiB") as store:
        assert load(store.session(SPEC), prompt(0, 2)) == 2
        found = store.tree_map()
        check_sums(found, store)
        assert [box.host_pages for box in found.boxes] == [2, 2]


def test_many_forks_are_joined_and_none_is_lost(store: Store) -> None:
    session = store.session(SPEC)
    for seed in range(600):
        save(session, prompt(seed, 1 + seed % 3))
    found = store.tree_map()
    check_sums(found, store)
    assert len(found.boxes) <= BOXES_MAX
    under = [found.boxes[each] for each in below(found, 0)]
    assert len(under) == BELOW_MAX + 1
    *single, rest = under
    assert {box.runs for box in single} == {1}
    assert rest.runs == 600 - BELOW_MAX
    assert rest.chain_id == ""
    sizes = [box.total_bytes for box in single]
    assert sizes == sorted(sizes, reverse=True)


def test_many_trees_are_joined_too(store: Store) -> None:
    for number in range(2 * BELOW_MAX):
        spec = CacheSpec.opaque(f"model-{number}", page_tokens=PAGE_TOKENS, page_bytes=PAGE_BYTES)
        save(store.session(spec), prompt(number, 1))
    found = store.tree_map()
    check_sums(found, store)
    assert len(below(found, -1)) == BELOW_MAX + 1
    assert len(found.boxes) <= BOXES_MAX


def test_what_left_is_not_on_the_map(store: Store) -> None:
    session = store.session(SPEC)
    for seed in range(8):
        save(session, prompt(seed, 2))
    store.evict(Selection(namespace=SPEC.namespace, prefix=prompt(3, 1).tolist()))
    found = store.tree_map()
    check_sums(found, store)
    heads = {box.tokens_head[0] for box in found.boxes if box.tokens_head}
    assert heads == {int(prompt(seed, 2)[0]) for seed in range(8) if seed != 3}


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=25),
    st.lists(st.integers(0, 24), max_size=6),
)
def test_sums_hold_for_any_trees(paths: list[list[int]], gone: list[int]) -> None:
    with Store.open(None, host_bytes="8MiB") as store:
        session = store.session(SPEC)
        prompts = [np.repeat(np.array(path, np.int32), PAGE_TOKENS) for path in paths]
        for tokens in prompts:
            save(session, tokens)
        for number in gone:
            chosen = prompts[number % len(prompts)]
            store.evict(Selection(namespace=SPEC.namespace, prefix=chosen.tolist()))
        check_sums(store.tree_map(), store)
