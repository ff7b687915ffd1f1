"""Measured prefill: what engines report becomes seconds a token, and those what pages are worth."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from kvstore.connect import connect
from kvstore.errors import InvalidRequest
from kvstore.prefill import STEPS_PER_OCTAVE, WORK_TOKENS_MAX, Prefill, PrefillRate
from kvstore.server import Server
from kvstore.server_config import ServerConfig
from kvstore.spec import CacheSpec
from kvstore.store import Store
from kvstore.tiers.policies import POLICIES

PAGE_TOKENS = 4
FAST = CacheSpec.opaque("fast", page_tokens=PAGE_TOKENS, page_bytes=4032)
SLOW = CacheSpec.opaque("slow", page_tokens=PAGE_TOKENS, page_bytes=4032)
STEP = 2.0 ** (0.51 / STEPS_PER_OCTAVE)  # rates are rounded by half a step at most


def chain(number: int, pages: int = 4) -> np.ndarray:
    return np.arange(number * 1000, number * 1000 + pages * PAGE_TOKENS, dtype=np.int32)


def put(session, number: int) -> None:
    with session.reserve(chain(number), deadline_s=5.0) as run:
        if run.count:
            run.commit()


def hits(session, number: int) -> int:
    with session.match(chain(number)) as found:
        return found.pages


def rate_of(*reports: Prefill, even_tokens: float = 1000.0) -> float:
    rate = PrefillRate(even_tokens)
    for each in reports:
        rate.add(each)
    return rate.token_s


def test_a_prompt_says_its_tokens_their_positions_and_its_seconds():
    assert Prefill.of(10, 100, 0.5) == Prefill(10.0, 1050.0, 0.5)
    assert Prefill.of(10, 0, 0.5) + Prefill.of(20, 10, 1.0) == Prefill.of(30, 0, 1.5)


@pytest.mark.parametrize(
    "wrong", [(0, 0, 1.0), (1.5, 0, 1.0), (8, -1, 1.0), (8, 0, 0.0), (8, 0, float("inf"))]
)
def test_what_cannot_be_measured_is_refused(wrong):
    with pytest.raises(InvalidRequest, match=r"tokens|seconds"):
        Prefill.of(*wrong)


def test_a_rate_is_of_a_token_at_the_beginning_however_long_prompts_were():
    """A token at position 1,000 costs twice as much, so 2,000 tokens cost as 4,000 at no depth."""
    short = rate_of(*[Prefill.of(20, 0, 0.0202)] * 100)
    assert short == rate_of(Prefill.of(2000, 0, 4.0))
    assert 0.001 / STEP < short < 0.001 * STEP


def test_too_little_says_nothing_and_nonsense_is_left_out():
    assert rate_of(Prefill.of(1000, 0, 1.0), even_tokens=1e9) == 0.0
    good = rate_of(Prefill.of(2000, 0, 4.0))
    wrong = (
        Prefill(float("nan"), 0.0, 1.0),
        Prefill(1e9, float("inf"), 1.0),
        Prefill(-5.0, 0.0, 1.0),
        Prefill(1e9, -1.0, 1.0),
        Prefill(1e9, 1.0, -1.0),
    )
    assert rate_of(Prefill.of(2000, 0, 4.0), *wrong) == good > 0


def test_an_engine_that_becomes_slower_is_believed():
    piece = int(WORK_TOKENS_MAX) // 8
    before = rate_of(*[Prefill.of(piece, 0, piece * 1e-3)] * 8, even_tokens=1e9)
    after = rate_of(
        *[Prefill.of(piece, 0, piece * 1e-3)] * 8,
        *[Prefill.of(piece, 0, piece * 4e-3)] * 32,
        even_tokens=1e9,
    )
    assert 3.5 * before < after < 4.5 * before


@pytest.mark.parametrize(("objective", "stays"), [("compute", True), ("hits", False)])
def test_for_compute_pages_of_a_slow_engine_stay_longer_than_those_of_a_fast_one(objective, stays):
    with Store.open(None, host_bytes="512KiB", policy="gdsf", objective=objective) as store:
        fast, slow = store.session(FAST), store.session(SLOW)
        fast.report_prefill(10_000, 0, 1.0)
        slow.report_prefill(10_000, 0, 20.0)
        put(slow, 0)
        for number in range(1, 60):
            put(fast, number)
        assert store.stats().counters["host_evictions"] > 50
        assert hits(fast, 1) == 0
        assert (hits(slow, 0) == 4) is stays
        store.check()


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_takes_rates_that_change(name):
    with Store.open(None, host_bytes="512KiB", policy=name, objective="compute") as store:
        sessions = [store.session(FAST), store.session(SLOW)]
        for number in range(120):
            session = sessions[number % 2]
            session.report_prefill(4000, 100 * number, 0.5 + number)
            put(session, number)
            assert hits(session, number) == 4
        assert store.stats().counters["host_evictions"] > 100
        store.check()


@pytest.mark.slow
def test_what_a_client_measures_reaches_its_session_in_the_server(tmp_path):
    server = Server(ServerConfig(directory=tmp_path / "s", host_bytes="16MiB", disk_bytes="64MiB"))
    server.start()
    with connect(f"kvstore://{server.config.address}", lookup_deadline_s=5.0) as store:
        session, other = store.session(SLOW), store.session(FAST)
        hits(session, 0)
        hits(other, 0)
        session.report_prefill(3000, 0, 1.0)
        session.report_prefill(3000, 3000, 1.4)
        even_tokens = server.store.config.even_tokens
        expected = {0.0, rate_of(Prefill.of(6000, 0, 2.4), even_tokens=even_tokens)}
        pause, tries, rates = threading.Event(), 0, {0.0}
        while rates != expected and tries < 400:  # a heartbeat is a second away
            tries += 1
            pause.wait(0.025)
            rates = {each.prefill.token_s for each in server.store._sessions}
    assert rates == expected
    server.stop()
