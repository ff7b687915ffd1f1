"""Edges: where they split, grow and merge, and what a match makes of them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import xxhash

from kvstore.prefix_index.index import PrefixIndex
from kvstore.prefix_index.page_key import page_keys
from kvstore.prefix_index.page_table import HOST, NO_PAGE

ROOT, OTHER = b"r" * 32, b"o" * 32
PAGE_TOKENS = 2


def store(index, tokens, root=ROOT, extras=None, digest=xxhash.xxh3_128):
    """Insert what is missing of a prompt, as the store does; returns the ids of its whole chain."""
    tokens = np.asarray(tokens, np.int32)
    tokens = tokens[: len(tokens) // PAGE_TOKENS * PAGE_TOKENS]
    extras = extras or {}
    found = index.match(root, tokens, extras)
    start = len(found)
    missing = len(tokens) // PAGE_TOKENS - start
    if not missing:
        return found.tolist()
    ids = index.insert(
        root,
        PAGE_TOKENS,
        int(found[-1]) if start else NO_PAGE,
        tokens[start * PAGE_TOKENS :].tobytes(),
        {index - start: value for index, value in extras.items() if index >= start},
        page_keys(root, tokens, PAGE_TOKENS, extras, first=start, digest=digest),
        np.arange(missing, dtype=np.uint64),
        4096,
        np.zeros((missing, 2), np.uint64),
        1.0,
    )
    index.set_tier(ids, HOST, np.arange(missing))
    index.check()
    return [*found.tolist(), *ids.tolist()]


def forget(index, ids):
    index.clear_tier(ids, HOST)
    index.remove(ids)
    index.check()


def test_match_stops_at_the_last_page_that_agrees_wholly():
    index = PrefixIndex()
    ids = store(index, range(20))
    for agreed in range(21):
        prompt = [*range(agreed), *[777] * (30 - agreed)]
        assert index.match(ROOT, prompt).tolist() == ids[: agreed // PAGE_TOKENS]
        assert index.match(ROOT, prompt[:agreed]).tolist() == ids[: agreed // PAGE_TOKENS]


def test_match_finds_nothing_for_an_empty_prompt_or_an_unknown_root():
    index = PrefixIndex()
    store(index, range(4))
    for found in (index.match(ROOT, []), index.match(ROOT, [0]), index.match(OTHER, range(4))):
        assert found.dtype == np.int32
        assert not len(found)
    assert not index.trees()[1:]


def test_match_results_cannot_be_written():
    index = PrefixIndex()
    store(index, range(4))
    for found in (index.match(ROOT, range(4)), index.match(OTHER, range(4))):
        assert not found.flags.writeable


def test_match_needs_page_boundaries():
    """The same tokens one place further on are other pages."""
    index = PrefixIndex()
    store(index, [5, 6, 7, 8])
    assert not len(index.match(ROOT, [6, 7, 8, 9]))


def test_a_chain_that_grows_page_by_page_is_one_edge():
    index = PrefixIndex()
    for length in range(2, 40, 2):
        store(index, range(length))
    assert index.nodes == 2


def test_an_edge_splits_where_prompts_part_and_merges_when_one_is_left():
    index = PrefixIndex()
    long = store(index, range(20))
    fork = store(index, [*range(10), *[7] * 10])
    assert fork[:5] == long[:5]
    assert index.nodes == 1 + 3
    forget(index, fork[:4:-1])
    assert index.nodes == 1 + 1
    assert index.match(ROOT, range(20)).tolist() == long


def test_an_edge_that_is_cut_short_joins_the_one_above():
    """Edges that do not fit together stay apart, until they do."""
    index = PrefixIndex(edge_bytes_max=4 * PAGE_TOKENS * 4)
    ids = store(index, range(12))
    assert index.nodes == 1 + 2
    forget(index, ids[:3:-1])
    assert index.nodes == 1 + 1
    ids += store(index, range(20))[4:]
    fork = store(index, [*range(12), 5, 5])
    forget(index, fork[-1:])
    assert index.match(ROOT, range(20)).tolist() == ids[:4] + ids[6:]


def test_a_page_with_children_cannot_be_removed():
    index = PrefixIndex()
    ids = store(index, range(4))
    one, two = store(index, [*range(4), 5, 5])[-1:], store(index, [*range(4), 6, 6])[-1:]
    index.clear_tier([*ids, *one, *two], HOST)
    for pages in (ids[::-1], ids[1:], [*one, ids[1]], [*one, ids[0], ids[1], *two]):
        with pytest.raises(ValueError, match="children"):
            index.remove(pages)
    index.remove([*two, *one, *ids[::-1]])
    assert index.nodes == 0


def test_page_ids_stay_and_rows_are_used_again():
    index = PrefixIndex()
    one = store(index, range(10))
    two = store(index, [*range(4), *[7] * 6])
    forget(index, one[:1:-1])
    three = store(index, [8] * 6, OTHER)
    assert index.match(ROOT, [*range(4), *[7] * 6]).tolist() == two
    assert set(three) <= set(one)
    assert index.table.rows == len(index) == 8


def test_roots_share_nothing():
    index = PrefixIndex()
    store(index, range(10), ROOT)
    assert not len(index.match(OTHER, range(10)))
    other = store(index, range(10), OTHER)
    assert index.root_of(other[0]) == OTHER
    assert index.candidates(HOST, 0.0, [OTHER]).tolist() == other
    assert index.evictable(HOST, 0.0, [OTHER]).tolist() == other[-1:]
    assert not len(index.evictable(HOST, 0.0, [b"unknown"]))
    with pytest.raises(ValueError, match="not under this root"):
        index.insert(
            ROOT, PAGE_TOKENS, other[0], bytes(8), None, bytes(16),
            np.zeros(1, np.uint64), 1, np.zeros((1, 2), np.uint64), 1.0,
        )  # fmt: skip


@pytest.mark.parametrize("place", range(5))
def test_extras_tell_pages_with_equal_tokens_apart(place):
    index = PrefixIndex()
    plain = store(index, [1] * 10)
    image = store(index, [1] * 10, extras={place: b"image"})
    assert image[:place] == plain[:place]
    assert not set(image[place:]) & set(plain[place:])
    assert index.match(ROOT, [1] * 10).tolist() == plain
    assert index.match(ROOT, [1] * 10, {place: b"image"}).tolist() == image
    assert index.match(ROOT, [1] * 10, {place: b"other"}).tolist() == plain[:place]
    assert index.match(ROOT, [1] * 10, {place: b""}).tolist() == plain
    assert index.match(ROOT, [1] * 10, {99: b"beyond"}).tolist() == plain
    assert index.extras_of(image[place]) == b"image"
    forget(index, plain[: None if place == 0 else place - 1 : -1])
    assert index.match(ROOT, [1] * 10, {place: b"image"}).tolist() == image
    assert index.match(ROOT, [1] * 10).tolist() == plain[:place]


class EightBitDigest:
    """A page digest with 256 values."""

    def __init__(self, data):
        self._stream = xxhash.xxh3_128(data)
        self.update = self._stream.update

    def digest(self):
        return self._stream.digest()[:1] * 16


@pytest.mark.slow
def test_with_keys_of_eight_bits_collisions_give_no_wrong_page():
    """256 chains of 5 pages share 256 keys; each is found, and every other prompt misses."""
    index = PrefixIndex()
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, 1 << 20, (512, 5 * PAGE_TOKENS), dtype=np.int32)
    stored, absent = prompts[:256], prompts[256:]
    chains = [store(index, prompt, digest=EightBitDigest) for prompt in stored]
    keys = {index.table.key_of(page) for page in itertools.chain(*chains)}
    assert len(keys) <= 256
    for prompt, chain in zip(stored, chains, strict=True):
        assert index.match(ROOT, prompt).tolist() == chain
    stored_keys = {page_keys(ROOT, p, PAGE_TOKENS, digest=EightBitDigest) for p in stored}
    last_keys = {keys[-16:] for keys in stored_keys}
    collisions = 0
    for prompt in absent:
        asked = page_keys(ROOT, prompt, PAGE_TOKENS, digest=EightBitDigest)
        collisions += asked[-16:] in last_keys
        assert not len(index.match(ROOT, prompt))
    assert collisions > 100


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tokens": bytes(12)}, "agree"),
        ({"tokens": b""}, "agree"),
        ({"keys": bytes(15)}, "agree"),
        ({"sequences": np.zeros(2, np.uint64)}, "agree"),
        ({"checksums": np.zeros((1, 1), np.uint64)}, "agree"),
        ({"tokens": b"\xff" * 8}, "2\\^31"),
        ({"extras": {1: b"x"}}, "extras"),
        ({"extras": {-1: b"x"}}, "extras"),
        ({"parent": 5}, "live"),
        ({"page_tokens": 3, "tokens": bytes(12)}, "tokens"),
    ],
)
def test_a_run_that_does_not_add_up_is_refused_and_changes_nothing(change, reason):
    index = PrefixIndex()
    store(index, [1, 1])
    run = {
        "root": ROOT,
        "page_tokens": PAGE_TOKENS,
        "parent": NO_PAGE,
        "tokens": bytes(8),
        "extras": None,
        "keys": bytes(16),
        "sequences": np.zeros(1, np.uint64),
        "payload_bytes": 1,
        "checksums": np.zeros((1, 2), np.uint64),
        "now": 1.0,
    }
    with pytest.raises(ValueError, match=reason):
        index.insert(**(run | change))
    index.check()
    assert len(index) == 1


@pytest.mark.slow
def test_the_table_grows_and_keeps_what_it_holds():
    index = PrefixIndex(pages_expected=4)
    prompts = np.random.default_rng(0).integers(0, 1000, (200, 8), dtype=np.int32)
    chains = [store(index, prompt) for prompt in prompts[:20]]
    sequences = index.table.sequence[chains[0]].tolist()
    chains += [store(index, prompt) for prompt in prompts[20:]]
    assert index.table.rows == 800
    assert index.table.sequence[chains[0]].tolist() == sequences
    for prompt, chain in zip(prompts, chains, strict=True):
        assert index.match(ROOT, prompt).tolist() == chain


def test_two_trees_lose_pages_in_one_call():
    index = PrefixIndex()
    pages = [*store(index, range(6), ROOT)[::-1], *store(index, range(6), OTHER)[::-1]]
    index.clear_tier(pages, HOST)
    with pytest.raises(ValueError, match="children"):
        index.remove([*pages[:3], pages[4]])
    assert len(index) == 6
    with pytest.raises(ValueError, match="twice"):
        index.remove([*pages, pages[0]])
    index.remove(pages)
    assert index.nodes == 0


def test_check_notices_what_is_broken():
    def broken(change):
        index = PrefixIndex()
        change(index, store(index, range(6)))
        with pytest.raises(AssertionError):
            index.check()

    def parent_elsewhere(index, ids):
        index.table.parent[ids[1]] = ids[2]

    def no_tier(index, ids):
        index.clear_tier(ids[2:], HOST)

    def lost_count(index, ids):
        index.table.below[HOST][ids[0]] = 0

    def free_row_in_use(index, ids):
        index.table._free.append(ids[0])

    def lost_flag(index, ids):
        index.lease(ids[2])
        index.table.state[ids[2]] = 1

    def lost_slot(index, ids):
        index.table.slot[HOST][ids[0]] = -1

    def other_depth(index, ids):
        index.table.depth[ids] += 1

    for change in (
        parent_elsewhere, no_tier, lost_count, free_row_in_use, lost_flag, lost_slot, other_depth,
    ):  # fmt: skip
        broken(change)
