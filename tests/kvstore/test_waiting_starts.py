"""A server and a command that come to one directory at the same moment: one waits for the other."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest
from command import run, run_json
from known_pages import SPEC, prompt, save
from server_process import ServerProcess

from kvstore import Store
from kvstore.errors import DirectoryError
from kvstore.tiers.lock_holder import find_holder

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.slow

SIZES: dict[str, Any] = {"host_bytes": "8MiB", "disk_bytes": "64MiB"}

LOOK = """
import sys
from kvstore.cli_directory import Place
from kvstore.client_config import ClientConfig
with Place(sys.argv[2], ClientConfig()).opened() as store:
    print("looks", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    with Store.open(tmp_path / "s", **SIZES) as store:
        save(store.session(SPEC), prompt(0, 5), durable=True)
    return tmp_path / "s"


@pytest.fixture
def look(directory: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A command that has the directory open, until its stdin is closed."""
    command = [sys.executable, "-c", LOOK, "ls", str(directory)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"looks\n"
        yield process
        process.kill()


def wait_for(what: str, server: ServerProcess) -> None:
    deadline = time.monotonic() + 20.0
    while what not in server.log.read_text():
        assert time.monotonic() < deadline, server.log.read_text()
        time.sleep(0.01)


def test_a_server_waits_for_a_command_that_looks_into_its_directory(
    directory: Path, look: subprocess.Popen[bytes]
) -> None:
    """It ended at once with 1, and so did the private servers of engines."""
    with ServerProcess(directory, "--host-bytes=16MiB") as server:
        server.log.touch()
        flags = ["serve", str(directory), *server.flags]
        with server.log.open("ab") as log:
            server.process = subprocess.Popen(
                [sys.executable, "-m", "kvstore.cli", *flags], stdout=log, stderr=log
            )
        wait_for(f"waiting up to 10 s for pid {look.pid} since ", server)
        assert f"({sys.executable} -c)" in server.log.read_text()
        assert look.stdin is not None
        look.stdin.close()
        wait_for(" warm: 5 pages", server)
        assert server.terminate() == 0


def test_what_is_waited_for_in_vain_is_named_with_its_command(
    directory: Path, look: subprocess.Popen[bytes]
) -> None:
    with pytest.raises(DirectoryError, match=rf"in use by pid {look.pid} .* -c\): it only looks"):
        Store.open(directory, lock_wait_s=0.2, **SIZES)
    assert look.poll() is None


def test_a_command_that_meets_another_says_which_and_what_to_do(
    directory: Path, look: subprocess.Popen[bytes]
) -> None:
    said = run("ls", str(directory), code=1)
    assert f"in use by pid {look.pid} since 2" in said
    assert "try again when it has ended" in said
    assert "stop it" not in said


def test_a_command_waits_for_a_server_that_does_not_listen_yet(directory: Path) -> None:
    with stopped_as_it_starts(directory) as server:
        holder = find_holder(directory)
        assert holder is not None
        assert (holder.pid, holder.serves, holder.looks) == (server.pid, True, False)
        assert holder.command == f"kvstore serve {directory}"
        said = run("ls", str(directory), code=1)
        assert f"kvstore serve (pid {server.pid}) is starting: try again" in said
        command = [sys.executable, "-m", "kvstore.cli", "stats", str(directory), "--json"]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            server.resume()
            assert process.wait(30) == 0
        assert run_json("ls", str(directory))["chains_total"] == 1


def stopped_as_it_starts(directory: Path) -> ServerProcess:
    """A server with SIGSTOP between its lock and its socket."""
    for _ in range(10):
        server = ServerProcess(directory, "--host-bytes=16MiB")
        command = [sys.executable, "-m", "kvstore.cli", "serve", str(directory), *server.flags]
        with server.log.open("ab") as log:
            server.process = subprocess.Popen(command, stdout=log, stderr=log)
        lock, wanted = directory / "LOCK", f"pid {server.pid} "
        while not lock.read_text().startswith(wanted):
            assert server.process.poll() is None, server.log.read_text()
        os.kill(server.pid, signal.SIGSTOP)
        server.pause()
        if not server.socket.exists():
            return server
        server.kill()
        server.socket.unlink(missing_ok=True)
    raise AssertionError("no server was stopped before it listened")
