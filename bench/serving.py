"""A server process of its own for benches of the service: start, watch, stop."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

START_S_MAX = 60.0
WARM = " warm: "


class Serving:
    """`kvstore serve` on one directory; use it in a `with` statement."""

    def __init__(self, directory: Path, *flags: str) -> None:
        """Starts it and returns once it listens."""
        self.directory = directory.resolve()
        self.address = f"kvstore://unix:{directory / 'kvstore.sock'}"
        self.log = directory.with_name(directory.name + ".log")
        command = [sys.executable, "-m", "kvstore.cli", "serve", str(directory), *flags]
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        self.wait_said(f"serving {directory}")

    @property
    def is_warm(self) -> bool:
        """Whether it has said that all that is on disk can be hit."""
        return WARM in self.log.read_text()

    def wait_said(self, wanted: str = WARM, within_s: float = START_S_MAX) -> None:
        """Wait until its log has this."""
        deadline = time.monotonic() + within_s
        while wanted not in self.log.read_text():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the server did not start:\n{self.log.read_text()}")
            time.sleep(0.01)

    def private_bytes(self) -> int:
        """Resident memory besides the arena."""
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
        raise SystemExit("this system does not tell a process's private memory")

    def descriptors(self) -> int:
        """How many it has open besides its store's files, of which there are more with time."""
        count = 0
        for name in os.listdir(f"/proc/{self.process.pid}/fd"):
            try:
                target = os.readlink(f"/proc/{self.process.pid}/fd/{name}")
            except FileNotFoundError:  # closed meanwhile
                continue
            count += not target.startswith(str(self.directory))
        return count

    def __enter__(self) -> Serving:
        return self

    def __exit__(self, *exc: object) -> None:
        self.process.terminate()
        self.process.wait(60)
