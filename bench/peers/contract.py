"""What each store or index of the peers' bench does, and the parts that they share.

A peer lives in a process and an environment of its own, so nothing here imports kvstore, nor any
peer: the standard library and numpy only. Keys of one `run` are new to the store; pages are rows.
"""

from __future__ import annotations

import os
import socket
import subprocess
import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    Pages = NDArray[np.uint8]
    Tokens = NDArray[np.int32]

START_S_MAX = 60.0


class PagePeer(ABC):
    """A store of pages, as one client process sees it."""

    version = ""

    @abstractmethod
    def open(self, directory: Path, page_bytes: Sequence[int], run_bytes: int) -> None:
        """Start what it needs, with room for four runs; the directory is empty, its own."""

    def prepare(self, run: int, count: int, size: int) -> None:  # noqa: B027 # most need nothing
        """Before the clock runs: names, tokens."""

    def stage(self, pages: Pages) -> None:  # noqa: B027 # most need nothing
        """Before the clock runs: a peer whose callers have their pages in its own memory."""

    @abstractmethod
    def store(self, run: int, pages: Pages) -> None:
        """Store all rows from private memory; once it returns, others can load them."""

    def forget(self) -> None:  # noqa: B027 # most need nothing
        """Between store and load, not timed: a peer that loads to where it has stored from."""

    @abstractmethod
    def load(self, run: int, targets: Pages) -> Sequence[memoryview | bytes]:
        """All pages of a run in order, in private memory: in the rows of targets, or in its own."""

    def contents(
        self, loaded: Sequence[memoryview | bytes], count: int
    ) -> Sequence[memoryview | bytes]:
        """The pages as they were stored, not timed; most have them so already."""
        return loaded

    @abstractmethod
    def remove(self, run: int, count: int) -> None:
        """Make room; not timed."""

    @abstractmethod
    def close(self) -> None:
        """End what `open` has started."""


class IndexPeer(ABC):
    """What tells how long a prefix of a prompt is stored, in the process that owns it."""

    version = ""

    @abstractmethod
    def insert(self, tokens: Tokens) -> None:
        """Make a prompt known whole; not timed."""

    @abstractmethod
    def prepare(self, tokens: Tokens) -> object:
        """The prompt in the form that this index is given; not timed."""

    @abstractmethod
    def match(self, prompt: object) -> int:
        """How many tokens of it are stored. Nothing of an earlier call may be kept."""


class Process:
    """A server that belongs to a peer; ends with it."""

    def __init__(self, command: Sequence[str], log: Path, **environment: str) -> None:
        self.log = log
        with open(log, "wb") as file:
            self.process = subprocess.Popen(
                list(command),
                stdout=file,
                stderr=file,
                env={**os.environ, **environment},
            )

    def wait_for(self, path: Path | None = None, port: int = 0) -> None:
        """Until its Unix socket is there, or its port answers."""
        deadline = time.monotonic() + START_S_MAX
        while True:
            if self.process.poll() is not None or time.monotonic() > deadline:
                said = self.log.read_text(errors="replace")[-800:]
                raise RuntimeError(f"{self.process.args!r} did not start:\n{said}")
            if path is not None and path.exists():
                return
            if port and _answers(port):
                return
            time.sleep(0.02)

    def close(self) -> None:
        """SIGTERM, then SIGKILL."""
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(10)


def free_port() -> int:
    """A port of this machine that nobody has this moment."""
    with socket.socket() as line:
        line.bind(("127.0.0.1", 0))
        return int(line.getsockname()[1])


def _answers(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), 1.0):
            return True
    except OSError:
        return False
