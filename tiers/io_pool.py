"""A few threads that run blocking calls, and a bound on how many may wait.

Threads, because O_DIRECT calls release the interpreter lock and a disk wants several at once; few,
because each one more costs the server. The queue is bounded: callers past the bound wait for room,
for a while, and are then refused. A call that hangs in the kernel keeps its thread, and its caller,
until the disk answers: only then is the memory it works on free.
"""

from __future__ import annotations

import queue
import threading
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class IoPool:
    """Runs batches of calls; the caller of `run` waits for its own batch."""

    def __init__(self, threads: int, queue_calls_max: int, queue_wait_s: float) -> None:
        """Start `threads` daemon threads."""
        self._queue: queue.SimpleQueue[tuple[Batch, int] | None] = queue.SimpleQueue()
        self._room = threading.BoundedSemaphore(queue_calls_max)
        self._queue_wait_s = queue_wait_s
        self._started: dict[int, float] = {}  # thread number -> start of the call it is in
        self._threads = [
            threading.Thread(target=self._work, args=(number,), name=f"kv-io-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def run(self, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        """Run all calls; returns results in order, an exception in place of each that failed.

        Calls for which there was no room within `queue_wait_s` are not begun: TimeoutError.
        """
        return self.start(calls).wait()

    def start(self, calls: Sequence[Callable[[], Any]]) -> Batch:
        """Queue all calls, waiting for room, and return without waiting for their end."""
        batch = Batch(calls)
        deadline = time.monotonic() + self._queue_wait_s
        for position in range(len(calls)):
            if self._room.acquire(timeout=max(0.0, deadline - time.monotonic())):
                self._queue.put((batch, position))
            else:
                batch.done(position, TimeoutError("the disk queue is full"))
        return batch

    def stalled_s(self, now: float | None = None) -> float:
        """Seconds since the oldest call in progress began; 0 when idle."""
        begun = list(self._started.values())
        return max(0.0, (now or time.monotonic()) - min(begun)) if begun else 0.0

    def close(self, timeout_s: float) -> bool:
        """Stop after what is queued; False when threads still hang in the kernel after that."""
        for _ in self._threads:
            self._queue.put(None)
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self, number: int) -> None:
        while (item := self._queue.get()) is not None:
            batch, position = item
            del item
            self._started[number] = time.monotonic()
            try:
                result = batch.calls[position]()
            except Exception as error:  # handed to the caller of run, who decides
                result = error
            self._started.pop(number, None)
            self._room.release()
            batch.done(position, result)
            del batch, result


class Batch:
    """Calls that were queued together."""

    def __init__(self, calls: Sequence[Callable[[], Any]]) -> None:
        self.calls = calls
        self._results: list[Any] = [None] * len(calls)
        self._left = len(calls)
        self._lock = threading.Lock()
        self._all_done = threading.Event()
        if not calls:
            self._all_done.set()

    def done(self, position: int, result: Any) -> None:
        """Note the result of one call; the last one wakes the waiter."""
        self._results[position] = result
        with self._lock:
            self._left -= 1
            last = self._left == 0
        if last:
            self._all_done.set()

    def wait(self) -> list[Any]:
        """Results in order, an exception in place of each that failed, when all have ended."""
        self._all_done.wait()
        return self._results
