"""What callers know, over the wire down to what leaves first: each hint, each way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from known_pages import SPEC, load, prompt, save

from kvstore import Hints, Store
from kvstore.conversations import CONVERSATIONS_MAX, ENDS_MAX, Conversations
from kvstore.errors import InvalidRequest
from kvstore.prefix_index.index import PrefixIndex
from kvstore.prefix_index.page_table import NO_PAGE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from kvstore.interface import SessionLike

PAGES = 4
FEW = {"host_bytes": "512KiB", "disk_bytes": "0"}  # about 100 pages
WAYS = ["embedded", "shared memory", "stream"]


@pytest.fixture(params=WAYS)
def session(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SessionLike]:
    """One session of a store that holds about 100 pages, in memory only."""
    if request.param == "embedded":
        with Store.open(None, host_bytes=FEW["host_bytes"]) as store:
            yield store.session(SPEC)
        return
    pytest.importorskip("grpc", reason="the service needs grpcio")
    from server_process import ServerProcess

    from kvstore.connect import connect

    flags = [f"--{name.replace('_', '-')}={value}" for name, value in FEW.items()]
    with ServerProcess(tmp_path / "s", *flags, "--staging-bytes=64KiB") as server:
        server.start(wait_warm=False)
        shared = request.param == "shared memory"
        with connect(server.address, shared_memory=shared, lookup_deadline_s=5.0) as store:
            made = store.session(SPEC)
            assert made.wait_open(10.0)
            yield made


def fill(session: SessionLike, chains: int, first: int) -> None:
    for number in range(first, first + chains):
        save(session, prompt(number, PAGES))  # type: ignore[arg-type]


def stays(session: SessionLike, seed: int) -> bool:
    return load(session, prompt(seed, PAGES)) == PAGES  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize(
    "hints",
    [
        Hints(pin_ttl_s=600.0),
        Hints(priority=1),
        Hints(next_use_s=30.0),
        Hints(priority=2, next_use_s=5.0, conversation="c"),
    ],
)
def test_what_is_said_to_be_wanted_outlives_ten_times_the_memory(
    session: SessionLike, hints: Hints
) -> None:
    fill(session, 2, 0)
    assert hints.give(session, prompt(0, PAGES)) == PAGES
    fill(session, 250, 100)
    assert stays(session, 0)
    assert not stays(session, 1), "the same without a hint"


@pytest.mark.slow
@pytest.mark.parametrize("hints", [Hints(done=True), Hints(priority=-1)])
def test_what_is_said_not_to_be_wanted_leaves_before_what_is_older(
    session: SessionLike, hints: Hints
) -> None:
    seeds, newest = range(12), 11
    fill(session, len(seeds), 0)
    assert hints.give(session, prompt(newest, PAGES)) == PAGES
    number = 100
    while all(held(session, seed) for seed in seeds):
        fill(session, 1, number)
        number += 1
        assert number < 200, "nothing left"
    assert [seed for seed in seeds if not held(session, seed)] == [newest]


def held(session: SessionLike, seed: int) -> bool:
    """Whether a pin of no length finds all pages; unlike a look-up, it isn't a use."""
    return session.pin(prompt(seed, PAGES), 0.0) == PAGES


@pytest.mark.slow
def test_the_end_of_a_conversation_lets_go_of_its_own_pages_only(session: SessionLike) -> None:
    system = prompt(50, 2)
    turns = [np.concatenate([system, prompt(51, 2)]), np.concatenate([system, prompt(51, 4)])]
    other = np.concatenate([system, prompt(52, 3)])
    for tokens in (*turns, other):
        save(session, tokens)  # type: ignore[arg-type]
    for tokens in turns:
        assert Hints(pin_ttl_s=600.0, conversation="chat").give(session, tokens)
    assert Hints(pin_ttl_s=600.0, conversation="other").give(session, other) == 5
    assert session.end_conversation("nobody") == 0
    assert session.end_conversation("chat") == 4, "all but the two pages that others go on from"
    assert session.end_conversation("chat") == 0
    fill(session, 60, 100)
    assert load(session, turns[1]) == 2  # type: ignore[arg-type]
    assert load(session, other) == 5  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "wrong",
    [
        {"priority": 3},
        {"priority": True},
        {"next_use_s": -1.0},
        {"next_use_s": float("nan")},
        {"done": 1},
        {"conversation": "x" * 129},
        {"pin_ttl_s": -1.0},
    ],
)
def test_hints_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=next(iter(wrong)).split("_")[0] + "|seconds"):
        Hints(**wrong)


@pytest.mark.slow
def test_a_prompt_longer_than_a_message_is_hinted_in_full(tmp_path: Path) -> None:
    pytest.importorskip("grpc", reason="the service needs grpcio")
    from server_process import ServerProcess

    from kvstore.connect import connect
    from kvstore.spec import CacheSpec
    from kvstore.wire import CONTROL_BYTES_MAX

    size, pages = 65_536, CONTROL_BYTES_MAX // (4 * 65_536) + 3
    spec = CacheSpec.opaque("long", page_tokens=size, page_bytes=4096)
    tokens = np.arange(pages * size, dtype=np.int32)
    flags = ("--host-bytes=256MiB", "--disk-bytes=0")
    with ServerProcess(tmp_path / "s", *flags) as server:
        server.start(wait_warm=False)
        with connect(server.address, lookup_deadline_s=20.0) as store:
            session = store.session(spec)
            assert session.wait_open(10.0)
            while (run := session.reserve(tokens, deadline_s=20.0)).count:
                assert run.commit().pages
            assert session.hint(tokens, priority=1) == pages


def tree_of(chains: list[list[int]]) -> tuple[PrefixIndex, Callable[[list[int]], Any]]:
    """An index of pages of one token each."""
    index = PrefixIndex()
    sequence = 1
    for chain in chains:
        values = np.array(chain, "<i4")
        found = index.match(bytes(32), values)
        run = values[len(found) :]
        count = len(run)
        keys = np.zeros((count, 2), np.uint64)
        keys[:, 0] = range(sequence, sequence + count)
        index.insert(
            bytes(32),
            1,
            int(found[-1]) if len(found) else NO_PAGE,
            run.tobytes(),
            None,
            keys.tobytes(),
            keys[:, 0],
            1,
            np.zeros((count, 2), np.uint64),
            0.0,
        )
        sequence += count
    return index, lambda chain: index.match(bytes(32), np.array(chain, "<i4"))


def test_a_conversation_owns_what_no_other_chain_goes_on_from() -> None:
    index, pages = tree_of([[1, 2, 3, 4], [1, 2, 9], [7]])
    names = Conversations()
    names.note(index, b"r", "a", pages([1, 2, 3]))
    names.note(index, b"r", "a", pages([1, 2, 3, 4]))
    names.note(index, b"r", "b", pages([1, 2, 9]))
    names.note(index, b"r", "a", pages([7]))
    own = names.end(index, b"r", "a").tolist()
    assert own == [*pages([1, 2, 3, 4])[:1:-1].tolist(), *pages([7]).tolist()]
    assert names.end(index, b"r", "b").tolist() == pages([1, 2, 9])[2:].tolist()
    assert len(names) == 0


def test_what_a_conversation_remembers_is_bounded_and_ends_with_its_pages() -> None:
    index, pages = tree_of([[number] for number in range(ENDS_MAX + 5)])
    names = Conversations()
    for number in range(ENDS_MAX + 5):
        names.note(index, b"r", "a", pages([number]))
    index.remove(pages([ENDS_MAX]))
    assert len(names.end(index, b"r", "a")) == ENDS_MAX - 1
    for number in range(CONVERSATIONS_MAX + 1):
        names.note(index, b"r", str(number), pages([1]))
    assert len(names) == CONVERSATIONS_MAX
    assert not len(names.end(index, b"r", "0"))
    assert names.end(index, b"r", "1").tolist() == [], "another conversation ends there too"
