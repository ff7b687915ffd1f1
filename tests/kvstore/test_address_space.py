"""`kvstore serve` under a limit on address space: refused with numbers, or it serves."""

from __future__ import annotations

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


def served_with(
    limit_kib: int, directory: Path, kind: int = resource.RLIMIT_AS
) -> subprocess.CompletedProcess[str]:
    """A server that is to be refused under `ulimit -v`."""
    command = [sys.executable, "-m", "kvstore.cli", "serve", str(directory), *SIZES]
    limit = (limit_kib << 10, resource.getrlimit(kind)[1])
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=60,
        preexec_fn=lambda: resource.setrlimit(kind, limit),
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


@pytest.mark.parametrize("limit_kib", [60_000, 120_000, 200_000])
def test_a_limit_on_data_is_named_too(tmp_path: Path, limit_kib: int) -> None:
    done = served_with(limit_kib, tmp_path / "kv", resource.RLIMIT_DATA)
    assert done.returncode == 1, done.stderr
    [line] = done.stderr.splitlines()
    assert line.startswith(f"kvstore: data: this process may have {limit_kib} KiB (ulimit -d, ")


def test_a_thread_that_cannot_be_started_later_names_the_limit(tmp_path: Path) -> None:
    """Also where nothing was added up before, as for a client's commands."""
    code = (
        "import resource, sys, threading; from kvstore import cli_commands\n"
        "@cli_commands.app.command()\n"
        "def run_out():\n"
        "    kept = []\n"
        "    resource.setrlimit(resource.RLIMIT_AS, (200 << 20, resource.RLIM_INFINITY))\n"
        "    while True:\n"
        "        kept.append(threading.Thread(target=threading.Event().wait, daemon=True))\n"
        "        kept[-1].start()\n"
        "sys.exit(cli_commands.run(['run-out']))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1, done.stderr
    assert done.stderr.startswith("kvstore: this process may map 204800 KiB of memory (ulimit -v,")


@pytest.mark.parametrize("kind", [resource.RLIMIT_AS, resource.RLIMIT_DATA])
def test_as_much_as_the_sentence_says_is_enough_to_serve_a_client(
    tmp_path: Path, kind: int
) -> None:
    said = served_with(250_000, tmp_path / "kv", kind).stderr
    needed = re.search(r"(\d+) KiB are needed", said)
    assert needed is not None, said
    with ServerProcess(tmp_path / "kv", *SIZES) as server:
        limit = (int(needed[1]) + 1024) << 10
        server.start(limit=(kind, limit))
        assert resource.prlimit(server.pid, kind)[0] == limit
        with connect(server.address, lookup_deadline_s=5.0) as store:
            session = store.session(SPEC)
            assert save(session, prompt(1, 8), durable=True) == 8
            assert load(session, prompt(1, 8)) == 8
            assert session.flush()
        assert server.terminate() == 0
