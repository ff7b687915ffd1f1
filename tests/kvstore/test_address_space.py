"""`kvstore serve` under a limit on address space: refused with numbers, or it serves."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from known_pages import SPEC, load, prompt, save
from server_process import ServerProcess

from kvstore.connect import connect

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow

SIZES = ("--host-bytes=16MiB", "--disk-bytes=128MiB")


def served_with(limit_kib: int, directory: Path) -> subprocess.CompletedProcess[str]:
    """A server that is to be refused under `ulimit -v`."""
    command = [sys.executable, "-m", "kvstore.cli", "serve", str(directory), *SIZES]
    limit = (limit_kib << 10, resource.getrlimit(resource.RLIMIT_AS)[1])
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=60,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, limit),
    )


@pytest.mark.parametrize("limit_kib", [100_000, 150_000, 200_000, 300_000, 400_000, 500_000])
def test_too_little_address_space_is_a_sentence_that_names_the_limit(
    tmp_path: Path, limit_kib: int
) -> None:
    """It was a traceback of a thread's start, or after 12 s an abort of gRPC's, and no word."""
    done = served_with(limit_kib, tmp_path / "kv")
    assert done.returncode == 1, done.stderr
    [line] = done.stderr.splitlines()
    assert line.startswith("kvstore: ")
    assert f" {limit_kib} KiB" in line
    assert "RLIMIT_AS" in line
    assert "needed for any server" in line or "needed for these host_bytes, disk_bytes" in line
    assert not (tmp_path / "kv").exists(), "nothing was opened"


def test_as_much_as_the_sentence_says_is_enough_to_serve_a_client(tmp_path: Path) -> None:
    said = served_with(400_000, tmp_path / "kv").stderr
    needed = re.search(r"(\d+) KiB are needed", said)
    assert needed is not None, said
    with ServerProcess(tmp_path / "kv", *SIZES) as server:
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        server.start(address_space_bytes=(int(needed[1]) + 1024) << 10)
        assert os.path.exists(server.socket)
        assert resource.prlimit(server.pid, resource.RLIMIT_AS)[1] == hard
        assert resource.prlimit(server.pid, resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY
        with connect(server.address, lookup_deadline_s=5.0) as store:
            session = store.session(SPEC)
            assert save(session, prompt(1, 8), durable=True) == 8
            assert load(session, prompt(1, 8)) == 8
            assert session.flush()
        assert server.terminate() == 0
