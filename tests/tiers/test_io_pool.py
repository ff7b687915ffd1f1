"""The pool of I/O threads: order of results, bounds, and what a hung call does."""

from __future__ import annotations

import threading
import time

from kvstore.tiers.io_pool import IoPool


def fail() -> None:
    raise OSError(5, "broken")


def test_results_come_in_order_and_errors_in_place() -> None:
    pool = IoPool(3, 10, 1.0)
    answers = pool.run([lambda: 1, fail, lambda: 3])
    assert (answers[0], answers[2]) == (1, 3)
    assert isinstance(answers[1], OSError)
    assert pool.run([]) == []
    assert pool.run([lambda: 7]) == [7]
    assert pool.close(5.0)


def test_a_full_queue_refuses_after_its_wait() -> None:
    pool = IoPool(1, 2, 0.05)
    gate = threading.Event()
    first = pool.start([gate.wait, gate.wait])
    refused = pool.run([lambda: 1, lambda: 2])
    assert all(isinstance(answer, TimeoutError) for answer in refused)
    gate.set()
    assert first.wait() == [True, True]
    assert pool.run([lambda: 3]) == [3], "room came back"
    assert pool.close(5.0)


def test_a_call_that_hangs_is_seen_and_outlives_close() -> None:
    pool = IoPool(1, 4, 0.05)
    assert pool.stalled_s() == 0
    gate = threading.Event()
    batch = pool.start([gate.wait])
    while pool.stalled_s() == 0:
        time.sleep(0.001)
    assert pool.stalled_s(time.monotonic() + 9) >= 9
    assert not pool.close(0.01)
    gate.set()
    batch.wait()
    assert pool.close(5.0)


def test_many_callers_share_the_pool() -> None:
    pool = IoPool(2, 3, 10.0)
    answers: dict[int, list[int]] = {}

    def call(number: int) -> None:
        answers[number] = pool.run([lambda at=at: number * 100 + at for at in range(20)])

    threads = [threading.Thread(target=call, args=(number,)) for number in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {n: [n * 100 + at for at in range(20)] for n in range(5)}
    assert pool.close(5.0)
