"""Starts a server for a directory that nobody serves: a process of its own, for all who come.

It outlives whoever started it and ends by itself some time after its last session. Two clients may
start one at the same time: the directory's lock lets only one of them serve, the other one ends,
and both clients find the first.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

from kvstore.config import ENVIRONMENT_PREFIX
from kvstore.remembered import is_served

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

IDLE_EXIT_S = 60
LOG_SUFFIX = "-server.log"  # beside the directory, which has to be empty when it is new
LOG_NAME_INSIDE = "kvstore.server.log"  # in it, where nothing can be made beside it
LOG_BYTES_MAX = 4 << 20
LAST_WORDS_BYTES = 1024
# Starts that failed are tried again after a pause that doubles.
RETRY_S_MIN, RETRY_S_MAX = 1.0, 30.0
SETTLED_S = 30.0  # a server that lived so long did not fail to start
COMING_UP_S = 15.0  # one that does not listen after so long is in trouble
LOST_RACE = " is in use by "  # in the words of a server that found another one there

_log = logging.getLogger("kvstore.client")
# Who started a server is its parent and has to notice its end, however long the starter lives.
_started: list[subprocess.Popen[bytes]] = []


class PrivateServer:
    """The starter for one directory. Thread-safe."""

    def __init__(
        self,
        directory: Path,
        settings: Mapping[str, object],
        *,
        idle_exit_s: float = IDLE_EXIT_S,
        even_if_served: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`settings`: fields of the store's configuration, for a server that has to be started.

        even_if_served: also for a directory that an operator's `kvstore serve` has served.
        """
        self.directory = directory
        self.log = directory.with_name(directory.name + LOG_SUFFIX)
        self.trouble = ""  # why the last one did not come up
        self._command = [sys.executable, "-m", "kvstore.cli", "serve", str(directory)]
        self._command += ["--idle-exit-s", f"{idle_exit_s:g}"]
        # Not every setting is a flag; a file would have to stay as long as the server.
        self._environment = {_variable(name): _text(value) for name, value in settings.items()}
        self._even_if_served = even_if_served
        self._clock = clock
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._started_s = 0.0
        self._retry_s = RETRY_S_MIN

    @property
    def pid(self) -> int | None:
        """Of the server that this object started, while it runs."""
        process = self._process
        return process.pid if process is not None and process.poll() is None else None

    @property
    def is_coming_up(self) -> bool:
        """Whether a server was started just now, and all is well with it as far as one knows."""
        young = self._clock() - self._started_s < COMING_UP_S
        return not self.trouble and young and self.pid is not None

    def answers(self) -> None:
        """A server of the directory answers, whoever started it: what was wrong is over."""
        with self._lock:
            self.trouble = ""

    def ensure(self) -> None:
        """Start a server unless one that this object started is running or has just failed."""
        with self._lock:
            now = self._clock()
            if self._process is not None:
                code = self._process.poll()
                if code is None:
                    return
                if code == 0 or now - self._started_s > SETTLED_S:
                    self.trouble, self._retry_s = "", RETRY_S_MIN
                elif not self._may_start_again(code, now):
                    return
            if not self._even_if_served and is_served(self.directory):
                self._process, self.trouble = None, _waits_for_operator(self.directory)
                return
            self._started_s = now
            self._process = self._start()

    def _may_start_again(self, code: int, now: float) -> bool:
        """Its server has failed: note why, at once unless another one will be found there soon."""
        words = self._last_words().removeprefix("kvstore: ")
        is_early = now - self._started_s < self._retry_s
        if not is_early or LOST_RACE not in words:
            self.trouble = f"its server ended with {code}: {words}"
        if not is_early:
            self._retry_s = min(2 * self._retry_s, RETRY_S_MAX)
        return not is_early

    def _start(self) -> subprocess.Popen[bytes] | None:
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as exc:
            self.trouble = f"{self.directory} cannot be made: {exc.filename}: {exc.strerror}"
            return None
        try:
            log = self._open_log()
        except OSError as exc:
            self.trouble = f"its server can have no log: {exc.filename}: {exc.strerror}"
            return None
        try:
            if os.fstat(log).st_size > LOG_BYTES_MAX:
                os.ftruncate(log, 0)
            process = subprocess.Popen(  # noqa: S603 - our own module
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | self._environment,
                start_new_session=True,
            )
        except OSError as exc:
            self.trouble = f"a server cannot be started: {exc.strerror}"
            return None
        finally:
            os.close(log)
        _started[:] = [each for each in _started if each.poll() is None] + [process]
        _log.info("started a server for %s, process %d", self.directory, process.pid)
        return process

    def _open_log(self) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            return os.open(self.log, flags, 0o600)
        except OSError:
            self.log = self.directory / LOG_NAME_INSIDE
            return os.open(self.log, flags, 0o600)

    def _last_words(self) -> str:
        try:
            with open(self.log, "rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - LAST_WORDS_BYTES))
                return file.read().decode(errors="replace").strip().rpartition("\n")[2]
        except OSError:
            return ""


def _waits_for_operator(directory: Path) -> str:
    return (
        f"{directory} is served by an operator's `kvstore serve`, which does not run now: start "
        f"`kvstore serve {directory}`, or connect with private_server=True to have a server of "
        "your own started"
    )


def _variable(setting: str) -> str:
    return ENVIRONMENT_PREFIX + setting.upper()


def _text(value: object) -> str:
    if isinstance(value, list | tuple):
        return os.pathsep.join(map(_text, value))
    return str(value)
