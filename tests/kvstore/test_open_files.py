"""`kvstore serve` under a limit on descriptors: refused with numbers, or served with that."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from known_pages import SPEC, prompt, save
from server_process import ServerProcess

from kvstore.connect import connect
from kvstore.open_files import files_needed
from kvstore.server_config import ServerConfig

pytestmark = pytest.mark.slow

SIZES = ("--host-bytes=32MiB", "--disk-bytes=64MiB")


@pytest.mark.parametrize("limit", [20, 32, 64])
def test_too_few_descriptors_are_a_sentence_with_the_number_needed(
    tmp_path: Path, limit: int
) -> None:
    """It was an abort of gRPC's, or a traceback."""
    script = f'ulimit -n {limit} && exec "$@"'
    command = ["bash", "-c", script, "bash", sys.executable, "-m", "kvstore.cli", "serve"]
    done = subprocess.run(
        [*command, str(tmp_path / "store"), *SIZES],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert f"may have {limit} at once" in done.stderr
    config = ServerConfig(directory=tmp_path / "store", host_bytes="32MiB", disk_bytes="64MiB")
    assert f"{files_needed(config)} are needed" in done.stderr
    assert re.search(r"ulimit -n \d+", done.stderr)
    assert not (tmp_path / "store").exists()


def open_files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def soft_limit(pid: int) -> int:
    [line] = re.findall(r"Max open files +(\d+)", Path(f"/proc/{pid}/limits").read_text())
    return int(line)


def test_a_server_with_just_the_number_needed_says_how_many_sessions_that_is(
    tmp_path: Path,
) -> None:
    config = ServerConfig(directory=tmp_path / "store", host_bytes="32MiB", disk_bytes="64MiB")
    limit = files_needed(config) + 4
    script = f'ulimit -n {limit} && exec "$@"'
    command = ["bash", "-c", script, "bash", sys.executable, "-m", "kvstore.cli", "serve"]
    done = subprocess.run(
        [*command, str(tmp_path / "store"), *SIZES, "--idle-exit-s=1"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert f"may have {limit} at once, about 2 sessions of sessions_max = 1024" in done.stderr
    assert "warm: 0 pages" in done.stderr


def test_the_soft_limit_is_raised_and_the_number_needed_is_no_guess(tmp_path: Path) -> None:
    """With its arena full, a server uses no more than it asks for."""
    config = ServerConfig(directory=tmp_path / "store", host_bytes="32MiB", disk_bytes="64MiB")
    needed = files_needed(config)
    with ServerProcess(config.directory or tmp_path, *SIZES) as server, ExitStack() as stack:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        try:
            server.start()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert soft_limit(server.pid) == needed + 4 * (config.sessions_max - 1)
        store = stack.enter_context(connect(server.address, open_wait_s=10.0))
        session = store.session(SPEC)
        for chain in range(40):
            save(session, prompt(chain, 100))
        assert open_files(server.pid) <= needed
        one = open_files(server.pid)
        for _ in range(4):
            store = stack.enter_context(connect(server.address, open_wait_s=10.0))
            assert save(store.session(SPEC), prompt(1, 3)) == 0, "they are there"
        assert open_files(server.pid) <= one + 4 * 5
