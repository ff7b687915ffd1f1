"""Threads for calls, none of which a client can hold for long by saying nothing.

A call has its thread from its first header on: a client that then sends no message, stops in the
middle of a stream, or reads no reply, would keep it. So each thread notes since when it waits for
its client; sweep() cancels calls that wait for longer than CLIENT_S_MAX, and as long as nearly all
threads of a pool wait so, spare ones do the work of other clients. Needs no credential to be
attacked, so it needs none to defend: this stands before the Guard.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

CLIENT_S_MAX = 15.0  # longer than the silence that ends a session


class _Wait:
    """One thread that works on one call."""

    __slots__ = ("cancel", "pool", "since_s")

    def __init__(self, pool: CallPool, cancel: Callable[[], object] | None) -> None:
        self.pool = pool
        self.cancel = cancel
        self.since_s = 0.0


_local = threading.local()


class CallPool(ThreadPoolExecutor):
    """What grpc runs calls in. `spare`: threads for when clients hold all of these."""

    def __init__(
        self,
        threads: int,
        name: str,
        spare: ThreadPoolExecutor | None = None,
        initializer: Callable[[], None] | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(threads, name, initializer)
        self._waits_max = max(1, threads - 1)
        self._spare = spare
        self._todo: deque[tuple[Future[Any], Callable[[], Any], _Wait]] = deque()
        self._clock = clock
        self._waits: set[_Wait] = set()  # adding and discarding are one step of the interpreter

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """As grpc calls it: one of the arguments is the event that names the call."""
        future: Future[Any] = Future()
        self._todo.append((future, partial(fn, *args, **kwargs), _Wait(self, _cancel_of(args))))
        if self._spare is not None and self._is_held():
            self._spare.submit(self._work)
        else:
            super().submit(self._work)
        return future

    def sweep(self) -> int:
        """Cancel the calls that have waited for their client for too long; how many.

        Those that came in before their pool was seen to be held go to spare threads.
        """
        if self._spare is not None and self._is_held():
            for _ in range(len(self._todo)):
                self._spare.submit(self._work)
        latest = self._clock() - CLIENT_S_MAX
        old = [wait for wait in self._waits.copy() if 0 < wait.since_s < latest]
        for wait in old:
            if wait.cancel is not None:
                wait.cancel()
        return len(old)

    def _is_held(self) -> bool:
        return len(self._waits) >= self._waits_max

    def _work(self) -> None:
        """The oldest call that nobody has begun, if there is one."""
        try:
            future, call, wait = self._todo.popleft()
        except IndexError:
            return
        if not future.set_running_or_notify_cancel():
            return
        _local.wait = wait
        if wait.cancel is not None:
            self._begin(wait)
        try:
            result = call()
        except BaseException as exc:
            future.set_exception(exc)
        else:
            future.set_result(result)
        finally:
            _local.wait = None
            self._waits.discard(wait)

    def _begin(self, wait: _Wait) -> None:
        wait.since_s = self._clock()
        self._waits.add(wait)


def client_has_spoken(cancel: Callable[[], object] | None = None) -> None:
    """This thread's call goes on with what its client sent. `cancel` ends the call."""
    wait = getattr(_local, "wait", None)
    if wait is not None:
        wait.pool._waits.discard(wait)
        wait.cancel = cancel or wait.cancel


@contextmanager
def waiting_for_client() -> Iterator[None]:
    """In the block this thread's call waits until its client sends, or reads."""
    wait = getattr(_local, "wait", None)
    if wait is None:
        yield
        return
    wait.pool._begin(wait)
    try:
        yield
    finally:
        wait.pool._waits.discard(wait)


def said_by_client(messages: Iterator[Any]) -> Iterator[Any]:
    """The messages of a stream, each of which the call waits for."""
    while True:
        with waiting_for_client():
            message = next(messages, None)
        if message is None:
            return
        yield message


def _cancel_of(args: tuple[Any, ...]) -> Callable[[], object] | None:
    """What ends the call that grpc submits; None where it is no call."""
    for each in args:
        cancel = getattr(getattr(each, "call", None), "cancel", None)
        if cancel is not None:
            found: Callable[[], object] = cancel
            return found
    return None
