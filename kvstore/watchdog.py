"""Notices when a part of the server makes no progress, says where it hangs, and at last ends it.

A probe asks for a sign of progress, in bounded time. A part without one for STALL_S makes the
server not ready, and all stacks go to stderr; for EXIT_S, it ends the process, so that a supervisor
starts a new one. A disk that hangs is no such part: what is in memory is still served.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

STALL_S = 10.0
EXIT_S = 30.0
PERIOD_S = 1.0
EXIT_CODE = 70  # of a server that ended itself

_log = logging.getLogger("kvstore.server")


class Watchdog:
    """Asks its probes once a second, from a thread of its own.

    probes: by the name of a part, whether it made progress lately; called one after the other, each
    must return within a second. `ready` is called when that changes.
    """

    def __init__(
        self,
        probes: Mapping[str, Callable[[], bool]],
        ready: Callable[[bool], None],
        *,
        clock: Callable[[], float] = time.monotonic,
        end: Callable[[int], None] = os._exit,
    ) -> None:
        self._probes = probes
        self._ready = ready
        self._clock = clock
        self._end = end
        self._good_s = dict.fromkeys(probes, clock())
        self._is_ready = True
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvstore-watchdog", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def stop(self) -> None:
        """Watch no more."""
        self._stop.set()

    def tick(self) -> None:
        """One round over all probes."""
        for name, probe in self._probes.items():
            if probe():
                self._good_s[name] = self._clock()
        name, since = min(self._good_s.items(), key=lambda item: item[1])
        stalled_s = self._clock() - since
        if stalled_s >= EXIT_S:
            _log.critical("%s: no progress for %.0f s; the server ends itself", name, stalled_s)
            self._end(EXIT_CODE)
        elif stalled_s >= STALL_S and self._is_ready:
            _log.error("%s: no progress for %.0f s; not ready", name, stalled_s)
            faulthandler.dump_traceback(file=sys.stderr)
            self._set_ready(False)
        elif stalled_s < STALL_S and not self._is_ready:
            _log.warning("progress again; ready")
            self._set_ready(True)

    def _set_ready(self, is_ready: bool) -> None:
        self._is_ready = is_ready
        self._ready(is_ready)

    def _run(self) -> None:
        while not self._stop.wait(PERIOD_S):
            self.tick()


class Pulse:
    """A probe for something that is asked to do a small job: progress is that it was done."""

    def __init__(self, submit: Callable[[Callable[[], None]], object]) -> None:
        self._submit = submit
        self._done = threading.Event()
        self._done.set()

    def __call__(self) -> bool:
        """Whether the job given at the last call was done; gives the next one."""
        if not self._done.is_set():
            return False
        self._done.clear()
        self._submit(self._done.set)
        return True


class Tick:
    """A probe for a loop that calls beat() in each round."""

    def __init__(self) -> None:
        self._beats = self._seen = 0

    def beat(self) -> None:
        """The loop has come round."""
        self._beats += 1

    def __call__(self) -> bool:
        """Whether it has since the last call."""
        seen, self._seen = self._seen, self._beats
        return self._seen != seen


def thread_is_alive(name: str) -> Callable[[], bool]:
    """A probe for a thread of that name that runs now; always true when there is none."""
    threads = [thread for thread in threading.enumerate() if thread.name == name]
    return lambda: all(thread.is_alive() for thread in threads)


def lock_is_free(lock: threading.RLock) -> Callable[[], bool]:
    """A probe for a lock that nobody may hold for long."""

    def probe() -> bool:
        taken = lock.acquire(timeout=PERIOD_S / 2)
        if taken:
            lock.release()
        return taken

    return probe
