"""Load or recompute: what the measured speeds decide."""

from __future__ import annotations

import pytest

from kvstore.engine_adapter.load_choice import LoadChoice, LoadMode

PAGE_BYTES, PAGE_TOKENS = 2 << 20, 128


def choice(mode: LoadMode = LoadMode.AUTO) -> LoadChoice:
    return LoadChoice(mode, PAGE_BYTES, PAGE_TOKENS)


def test_everything_is_loaded_while_nothing_is_measured() -> None:
    assert choice().decide(4, 0).pages == 4


def test_nothing_is_loaded_when_the_engine_has_as_much() -> None:
    assert choice().decide(4, 4 * PAGE_TOKENS).pages == 0
    assert choice().decide(0, 0).reason == "miss"


def test_recomputing_wins_when_it_is_measured_to_be_faster() -> None:
    fast_engine = choice()
    fast_engine.prefilled(100_000, 0.1)
    fast_engine.copied(1 << 20, 1.0)
    assert fast_engine.decide(4, 0).reason == "recomputing is faster"
    always = choice(LoadMode.ALWAYS)
    always.prefilled(100_000, 0.1)
    always.copied(1 << 20, 1.0)
    assert always.decide(4, 0).pages == 4


def test_never_means_never() -> None:
    assert choice(LoadMode.NEVER).decide(4, 0).pages == 0
    assert not choice(LoadMode.NEVER).worth_staging(4)


def test_a_short_copy_is_sync_and_a_long_one_is_not() -> None:
    some = choice()
    some.copied(1 << 30, 1.0)  # 2 ms a page
    assert some.decide(10, 0).sync
    assert not some.decide(20, 0).sync


def test_a_disk_slower_than_prefill_is_not_asked() -> None:
    some = choice()
    some.prefilled(PAGE_TOKENS * 10, 1.0)
    some.staged(10, 2.0)
    assert not some.worth_staging(10)
    for _ in range(20):
        some.staged(10, 0.1)
    assert some.worth_staging(10)


def test_waiting_for_the_disk_ends_when_recomputing_would_have() -> None:
    some = choice()
    some.prefilled(PAGE_TOKENS * 10, 1.0)
    assert some.stage_deadline_s(5) == pytest.approx(0.5)
    assert some.stage_deadline_s(100_000) == 10.0


def test_small_steps_and_small_copies_say_nothing_about_speed() -> None:
    some = choice()
    some.prefilled(1, 10.0)
    some.copied(100, 10.0)
    assert some.prefill_tokens_a_second == some.copy_bytes_a_second == 0
