"""Page keys: golden vectors, the stream they are defined by, and independence of the process."""

from __future__ import annotations

import os
import struct
import subprocess
import sys

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvstore.prefix_index.page_key import EXTRAS_BYTES_MAX, page_keys, token_bytes

ROOT = bytes(range(32))

# Written down once; a change of any of these makes every store on disk unreadable.
GOLDEN = [
    (b"", [0], 1, {}, "2a33816ed7e0c373dbe563c737220b65"),
    (ROOT, [1, 2, 3, 4], 2, {}, "58a9704ed3fdbe4e17279181f631a7188cc3ee592e53d47b32925275e3d753f8"),
    (
        ROOT,
        [2**31 - 1, 0, 128000, 7, 9],
        2,
        {1: b"image"},
        "22f42289ad18a00b31692ebc1ea35718de2440bf644cc80a1a48174bf8814525",
    ),
    (
        ROOT,
        list(range(32)),
        16,
        {0: b"\x00", 1: bytes(32)},
        "7d9a0ff343320805271ab09127d717384f74c520396269a0ce782b9ab76f9988",
    ),
]


@pytest.mark.parametrize(("root", "tokens", "page_tokens", "extras", "expected"), GOLDEN)
def test_keys_equal_the_golden_vectors(root, tokens, page_tokens, extras, expected):
    assert page_keys(root, tokens, page_tokens, extras).hex() == expected


chains = st.tuples(
    st.integers(1, 4),
    st.lists(st.integers(0, 2**31 - 1), max_size=40),
    st.dictionaries(st.integers(0, 12), st.binary(max_size=40), max_size=4),
)


@pytest.mark.slow
@given(chain=chains, first=st.integers(0, 12))
def test_keys_are_digests_of_the_documented_stream(chain, first):
    page_tokens, tokens, extras = chain
    data, expected = ROOT, []
    for index in range(len(tokens) // page_tokens):
        page = tokens[index * page_tokens : (index + 1) * page_tokens]
        data += struct.pack(f"<{page_tokens}i", *page)
        if extras.get(index):
            data += struct.pack("<ii", -1, len(extras[index])) + extras[index]
        expected.append(xxhash.xxh3_128_digest(data))
    assert page_keys(ROOT, tokens, page_tokens, extras) == b"".join(expected)
    assert page_keys(ROOT, tokens, page_tokens, extras, first=first) == b"".join(expected[first:])


@pytest.mark.slow
@given(tokens=st.lists(st.integers(0, 2**31 - 1), max_size=20))
def test_keys_do_not_depend_on_how_tokens_are_given(tokens):
    packed = struct.pack(f"<{len(tokens)}i", *tokens)
    forms = [tokens, tuple(tokens), packed, bytearray(packed), memoryview(packed)]
    forms += [np.array(tokens, kind) for kind in ("<i4", ">i4", "<i8", "<u4", "<u8")]
    forms.append(np.repeat(np.array(tokens, "<i4"), 2)[::2])
    for form in forms:
        assert token_bytes(form) == packed
    assert len({page_keys(ROOT, form, 2) for form in forms}) == 1


@pytest.mark.slow
@given(one=chains, two=chains)
def test_chains_that_differ_have_different_keys(one, two):
    def pages(chain):
        page_tokens, tokens, extras = chain
        count = len(tokens) // page_tokens
        kept = {index: value for index, value in extras.items() if value and index < count}
        return tokens[: count * page_tokens], kept

    keys = [page_keys(ROOT, *chain[1::-1], chain[2])[-16:] for chain in (one, two)]
    if pages(one) != pages(two):
        assert keys[0] != keys[1] or keys == [b"", b""]


def test_a_page_with_extras_and_the_tokens_of_their_bytes_differ():
    """Extras are framed by -1, which no token can be."""
    with_extras = page_keys(ROOT, [1], 1, {0: struct.pack("<i", 5)})
    assert with_extras not in {page_keys(ROOT, [1], 1), page_keys(ROOT, [1, 5], 1)[-16:]}


def test_another_root_gives_other_keys():
    assert page_keys(ROOT, [1, 2], 1) != page_keys(ROOT[::-1], [1, 2], 1)


@pytest.mark.slow
def test_keys_are_equal_in_every_process_and_for_every_hash_seed():
    script = (
        "from kvstore.prefix_index.page_key import page_keys\n"
        "import sys\n"
        "keys = page_keys(bytes(range(32)), list(range(64)), 16, {1: b'image', 3: b'more'})\n"
        "sys.stdout.write(keys.hex())\n"
    )
    outputs = set()
    for seed in ("0", "1", "4294967295", "random"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        run = [sys.executable, "-c", script]
        outputs.add(subprocess.run(run, env=environment, capture_output=True, check=True).stdout)
    here = page_keys(ROOT, list(range(64)), 16, {3: b"more", 1: b"image"})
    assert outputs == {here.hex().encode()}


@pytest.mark.parametrize(
    "tokens",
    [
        [-1],
        [2**31],
        [1.5],
        ["a"],
        np.array([-1], np.int32),
        np.array([2**31], np.int64),
        np.array([2**32], np.uint64),
        np.array([1.0]),
        np.array([[1]], np.int32),
        b"abc",
    ],
)
def test_tokens_out_of_range_are_refused(tokens):
    with pytest.raises(ValueError, match="tokens"):
        token_bytes(tokens)


def test_nothing_gives_no_keys():
    assert page_keys(ROOT, [], 16) == page_keys(ROOT, [1] * 15, 16) == b""
    assert page_keys(ROOT, [1] * 16, 16, first=1) == b""


@pytest.mark.parametrize("extras", [{-1: b"x"}, {0: bytes(EXTRAS_BYTES_MAX + 1)}])
def test_extras_out_of_bounds_are_refused(extras):
    with pytest.raises(ValueError, match="extras of page"):
        page_keys(ROOT, [1], 1, extras)


@pytest.mark.parametrize(("page_tokens", "first"), [(0, 0), (-1, 0), (1, -1)])
def test_sizes_out_of_bounds_are_refused(page_tokens, first):
    with pytest.raises(ValueError, match="page_tokens"):
        page_keys(ROOT, [1], page_tokens, first=first)
