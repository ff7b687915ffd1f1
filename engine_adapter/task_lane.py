"""A thread that runs tasks one after the other; it starts with the first one."""

from __future__ import annotations

import logging
import queue
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_log = logging.getLogger("kvstore.vllm")


class TaskLane:
    """Tasks in the order of put(), which any thread may call; what a task raises is logged."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._closed = False

    def put(self, task: Callable[[], None]) -> bool:
        """Have a task run; False once the lane is closed: it will not."""
        with self._lock:
            if self._closed:
                return False
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._tasks.put(task)
            return True

    def close(self) -> None:
        """Take no more; what was put before still runs."""
        with self._lock:
            self._closed = True
            self._tasks.put(None)

    def join(self, until_s: float) -> bool:
        """After close(), wait for the rest, until time.monotonic() is there; whether it is done."""
        thread = self._thread
        if thread is None:
            return True
        thread.join(max(0.0, until_s - time.monotonic()))
        return not thread.is_alive()

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                task()
            except Exception:
                _log.exception("kvstore: a task of %s failed", self._name)
