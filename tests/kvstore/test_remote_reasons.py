"""What a remote session says when it gives nothing: the reason of that call and of no other."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import pytest
from known_pages import SPEC, prompt, save
from server_process import ServerProcess

from kvstore import CacheSpec, Store
from kvstore.connect import connect
from kvstore.errors import CapacityError, InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvstore.interface import StoreLike

pytestmark = pytest.mark.slow

GIANT = CacheSpec.opaque("giant", page_tokens=16, page_bytes=256 << 20)
TOO_LARGE = "a page of 256 MiB does not fit in"
PATIENT = {"lookup_deadline_s": 5.0}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("reasons") / "store") as server:
        yield server.start()


@pytest.fixture(params=["library", "shared memory", "stream"])
def store(request: pytest.FixtureRequest, server: ServerProcess) -> Iterator[StoreLike]:
    if request.param == "library":
        with Store.open(None, host_bytes="32MiB") as store:
            yield store
        return
    shared = request.param == "shared memory"
    with connect(server.address, shared_memory=shared, **PATIENT) as store:
        yield store


def test_a_page_that_never_fits_is_refused_with_the_way_out_and_is_no_busy(
    server: ServerProcess,
) -> None:
    with Store.open(None, host_bytes="32MiB") as library, pytest.raises(CapacityError) as caught:
        library.session(GIANT)
    assert TOO_LARGE in str(caught.value)
    assert "raise host_bytes" in str(caught.value)
    with connect(server.address, **PATIENT) as store:
        session = store.session(GIANT)
        for reason in (session.reserve(prompt(1, 2)).reason, session.match(prompt(1, 2)).reason):
            assert reason.startswith("refused: "), reason
            assert f"{TOO_LARGE} the 28 MiB that the server has" in reason
            assert "raise its host_bytes" in reason


def test_what_one_session_was_refused_is_no_reason_of_another(server: ServerProcess) -> None:
    """After one page that was too large, every session of its connection said "busy: a page"."""
    with connect(server.address, **PATIENT) as store:
        good, closed, giant = store.session(SPEC), store.session(SPEC), store.session(GIANT)
        assert TOO_LARGE in giant.reserve(prompt(2, 2)).reason
        assert save(good, prompt(2, 2)) == 2
        present = good.reserve(prompt(2, 2))
        assert present.reason == "present"
        for _ in range(3):
            done = present.commit()
            assert (done.pages, done.reason) == (0, "")
        closed.close()
        assert closed.reserve(prompt(2, 2)).reason == "closed"
        assert closed.match(prompt(2, 2)).reason == "closed"
        assert TOO_LARGE in giant.reserve(prompt(2, 2)).reason, "as before"


def test_a_reservation_that_is_gone_says_so_and_one_of_a_closed_session_too(
    server: ServerProcess,
) -> None:
    with connect(server.address, **PATIENT) as store, connect(server.address, **PATIENT) as other:
        session, gone = store.session(SPEC, salt=b"gone"), other.session(SPEC, salt=b"gone")
        run, open_run = session.reserve(prompt(3, 2)), gone.reserve(prompt(4, 2))
        assert (run.count, open_run.count) == (2, 2)
        session.give_back.abort(session._live, run._id)  # as the server's sweep of old ones does
        deadline = time.monotonic() + 10
        while not gone.reserve(prompt(3, 2)).count:  # until then it is "in progress"
            assert time.monotonic() < deadline
        assert run.commit().reason == "lost: no such reservation: committed, given up or too old"
        gone.close()
        assert open_run.commit().reason == "closed"


def test_a_present_reservation_may_be_committed_twice(store: StoreLike) -> None:
    session = store.session(SPEC, salt=b"twice")
    save(session, prompt(5, 2))
    run = session.reserve(prompt(5, 2))
    assert (run.count, run.reason) == (0, "present")
    assert [(done.pages, done.reason) for done in (run.commit(), run.commit())] == [(0, "")] * 2


def test_salts_have_one_limit_and_text_is_refused_as_text(store: StoreLike) -> None:
    assert save(store.session(SPEC, salt=os.urandom(4096)), prompt(6, 1)) == 1
    with pytest.raises(InvalidRequest, match="salt: 4097 bytes given; at most 4096"):
        store.session(SPEC, salt=b"s" * 4097)
    with pytest.raises(InvalidRequest, match="salt: a str given; bytes are needed"):
        store.session(SPEC, salt="text")  # type: ignore[arg-type]


@pytest.mark.parametrize("shared", [True, False])
def test_a_commit_waits_for_a_server_that_hangs_as_long_as_it_is_told(
    tmp_path: Path, shared: bool
) -> None:
    """It waited for 12 s whatever was asked of it. Each wait is bounded by the next longer one, so
    that a slow machine changes nothing."""
    with ServerProcess(tmp_path / "store") as own:
        own.start()
        with connect(own.address, shared_memory=shared, **PATIENT) as store:
            session = store.session(SPEC)
            short, usual = session.reserve(prompt(7, 2)), session.reserve(prompt(8, 2))
            assert (short.count, usual.count) == (2, 2)
            own.pause()
            begun_s = time.monotonic()
            done = short.commit(deadline_s=0.2)
            assert (done.pages, done.reason) == (0, "unreachable")
            assert time.monotonic() - begun_s < 2.0
            begun_s = time.monotonic()
            assert usual.commit().reason == "unreachable"
            assert time.monotonic() - begun_s < 8.0
            own.resume()
