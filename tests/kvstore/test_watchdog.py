"""The watchdog: who stalls is found, said once, and ended in the end."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from kvstore.watchdog import (
    EXIT_CODE,
    EXIT_S,
    STALL_S,
    Pulse,
    Tick,
    Watchdog,
    lock_is_free,
    thread_is_alive,
)

if TYPE_CHECKING:
    import pytest


class Story:
    """A watchdog over one part, on a clock of its own."""

    def __init__(self) -> None:
        self.now = 0.0
        self.works = True
        self.ready: list[bool] = []
        self.ended: list[int] = []
        self.dog = Watchdog(
            {"steady": lambda: True, "part": lambda: self.works},
            self.ready.append,
            clock=lambda: self.now,
            end=self.ended.append,
        )

    def at(self, seconds: float) -> None:
        self.now = seconds
        self.dog.tick()


def test_a_part_that_stalls_makes_it_not_ready_and_ends_it(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    story = Story()
    story.at(1.0)
    story.works = False
    story.at(STALL_S)
    assert story.ready == []
    for seconds in (1.0 + STALL_S, 2.0 + STALL_S):
        story.at(seconds)
    assert story.ready == [False]
    assert "part: no progress for 10 s" in caplog.text
    assert "test_a_part_that_stalls" in capfd.readouterr().err  # its stack
    assert story.ended == []
    story.at(1.0 + EXIT_S)
    assert story.ended == [EXIT_CODE]


def test_progress_makes_it_ready_again() -> None:
    story = Story()
    story.works = False
    story.at(STALL_S)
    story.works = True
    story.at(STALL_S + 1.0)
    assert story.ready == [False, True]


def test_a_pulse_notices_threads_that_all_hang() -> None:
    hang = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        pulse = Pulse(pool.submit)
        assert pulse()
        pool.submit(lambda: None).result()
        assert pulse()
        pool.submit(lambda: None).result()
        pool.submit(hang.wait)
        assert pulse()
        assert not pulse()
        assert not pulse()
        hang.set()


def test_a_tick_notices_a_loop_that_stands() -> None:
    tick = Tick()
    tick.beat()
    assert tick()
    assert not tick()


def test_a_dead_thread_and_a_held_lock_are_no_progress() -> None:
    end = threading.Event()
    thread = threading.Thread(target=end.wait, name="kvstore-test-thread")
    thread.start()
    alive = thread_is_alive("kvstore-test-thread")
    assert alive()
    end.set()
    thread.join()
    assert not alive()
    assert thread_is_alive("kvstore-no-such-thread")()
    lock = threading.RLock()
    probe = lock_is_free(lock)
    assert probe()
    with ThreadPoolExecutor(1) as pool, lock:
        assert not pool.submit(probe).result()
