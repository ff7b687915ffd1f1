"""A real server in a process of its own, to be killed, paused and started again by a test."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

START_S_MAX = 20.0


def _limit(kind: int, size: int) -> None:
    resource.setrlimit(kind, (size, resource.getrlimit(kind)[1]))


class ServerProcess:
    """`kvstore serve` on one directory; use it in a `with` statement."""

    def __init__(self, directory: Path, *flags: str) -> None:
        self.directory = directory
        self.socket = directory / "kvstore.sock"
        self.address = f"kvstore://unix:{self.socket}"
        self.flags = flags or ("--host-bytes=32MiB", "--disk-bytes=256MiB")
        self.log = directory.with_name(directory.name + ".log")
        self.process: subprocess.Popen[bytes] | None = None

    def start(
        self, *, wait_warm: bool = True, limit: tuple[int, int] | None = None
    ) -> ServerProcess:
        """Start it and wait until it listens, and has read its catalog. limit: an RLIMIT of its
        process, and how much."""
        command = [sys.executable, "-m", "kvstore.cli", "serve", str(self.directory), *self.flags]
        with open(self.log, "ab") as log:
            begin = partial(_limit, *limit) if limit is not None else None
            self.process = subprocess.Popen(command, stdout=log, stderr=log, preexec_fn=begin)
        deadline = time.monotonic() + START_S_MAX
        wanted = " warm: " if wait_warm else f"serving {self.directory}"
        while wanted not in self._new_log():
            assert self.process.poll() is None, self._new_log()
            assert time.monotonic() < deadline, self._new_log()
            time.sleep(0.02)
        return self

    @property
    def pid(self) -> int:
        """Of the running process."""
        assert self.process is not None
        return self.process.pid

    def kill(self) -> None:
        """SIGKILL: no chance to say goodbye."""
        self.signal(signal.SIGKILL)
        self._wait()

    def terminate(self) -> int:
        """SIGTERM; its exit code."""
        self.signal(signal.SIGTERM)
        return self._wait()

    def pause(self) -> None:
        """SIGSTOP: its sockets stay, nobody answers."""
        self.signal(signal.SIGSTOP)
        while Path(f"/proc/{self.pid}/stat").read_text().rpartition(") ")[2][0] != "T":
            time.sleep(0.005)

    def resume(self) -> None:
        """SIGCONT."""
        self.signal(signal.SIGCONT)

    def signal(self, number: int) -> None:
        """Send it a signal."""
        os.kill(self.pid, number)

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *exc: object) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self._wait()

    def _wait(self) -> int:
        assert self.process is not None
        code = self.process.wait(20)
        self._seen = self.log.stat().st_size
        return code

    _seen = 0

    def _new_log(self) -> str:
        return self.log.read_bytes()[self._seen :].decode(errors="replace")
