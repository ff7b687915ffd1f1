"""Limits of the process and kills from outside: never a reason to give a sound catalog up."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from known_pages import SPEC, load, prompt, save

from kvstore import Store
from kvstore.errors import CapacityError, DirectoryError
from kvstore.tiers import process_limits

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.slow

PAGES = 50


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    with Store.open(tmp_path / "store", host_bytes="8MiB", disk_bytes="64MiB") as store:
        save(store.session(SPEC), prompt(0, PAGES), durable=True)
    return tmp_path / "store"


def content(directory: Path) -> dict[str, str]:
    """A digest of every file."""
    files = [path for path in sorted(directory.rglob("*")) if path.is_file()]
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def limited(limit: str, *command: str) -> subprocess.CompletedProcess[str]:
    """The kvstore command in a shell with one limit set."""
    script = f'ulimit {limit} && exec "$@"'
    arguments = ["bash", "-c", script, "bash", sys.executable, "-m", "kvstore.cli", *command]
    return subprocess.run(arguments, capture_output=True, text=True, timeout=60, check=False)


def kept(directory: Path) -> bool:
    """All pages are hits, by the catalog that was there."""
    with Store.open(directory, host_bytes="8MiB") as store:
        hits = load(store.session(SPEC), prompt(0, PAGES))
    return hits == PAGES and not list(directory.glob("quarantine-*"))


@pytest.mark.parametrize("command", [["status"], ["ls"], ["serve", "--host-bytes=16MiB"]])
@pytest.mark.parametrize("kilobytes", [8, 1000])
def test_a_limit_on_files_is_named_and_nothing_is_touched(
    directory: Path, command: list[str], kilobytes: int
) -> None:
    """It was taken for a damaged catalog, which then could not be rebuilt either."""
    before = content(directory)
    done = limited(f"-f {kilobytes}", command[0], str(directory), *command[1:])
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert f"files of at most {1024 * kilobytes} bytes" in done.stderr
    assert "RLIMIT_FSIZE" in done.stderr
    assert content(directory) == before
    assert kept(directory)


def test_an_arena_whose_extents_are_too_large_for_files_is_refused() -> None:
    script = (
        "import resource\n"
        "from kvstore import Store\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n"
        "try:\n    Store.open(None, host_bytes='64MiB')\n"
        "except Exception as error:\n    print(type(error).__name__, error)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.startswith(CapacityError.__name__), done
    assert "at most 1048576 bytes" in done.stdout


def test_too_little_address_space_for_the_catalog_leaves_it_alone(tmp_path: Path) -> None:
    """Its map takes a quarter of the capacity of addresses, which `ulimit -v` may not give."""
    place = tmp_path / "store"
    with Store.open(place, host_bytes="8MiB", disk_bytes="8GiB") as store:
        save(store.session(SPEC), prompt(0, PAGES), durable=True)
    done = limited(f"-v {1 << 20}", "status", str(place))
    assert done.returncode == 1, done
    assert "Cannot allocate memory" in done.stderr
    assert kept(place)


def walkers() -> Iterator[int]:
    """Children of this process that walk a catalog."""
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            words = Path(f"/proc/{name}/cmdline").read_bytes()
            parent = Path(f"/proc/{name}/stat").read_text().rpartition(") ")[2].split()[1]
        except OSError:
            continue
        if b"catalog_scan" in words and int(parent) == os.getpid():
            yield int(name)


def test_a_walk_that_is_killed_from_outside_costs_one_start(directory: Path) -> None:
    """As an OOM killer does; four times, which is once more than a bad catalog would get."""
    for _ in range(4):
        killed = threading.Event()

        def kill(killed: threading.Event = killed) -> None:
            deadline = time.monotonic() + 30
            while not killed.is_set() and time.monotonic() < deadline:
                for pid in walkers():
                    os.kill(pid, signal.SIGKILL)
                    killed.set()

        thread = threading.Thread(target=kill)
        thread.start()
        with pytest.raises(DirectoryError, match="died of SIGKILL"):
            Store.open(directory, host_bytes="8MiB")
        thread.join()
        assert killed.is_set()
    assert kept(directory)


@pytest.mark.parametrize("number", [signal.SIGBUS, signal.SIGSEGV, signal.SIGABRT])
def test_a_walk_that_dies_of_itself_is_the_catalogs_doing(number: signal.Signals) -> None:
    assert not process_limits.killed_from_outside(number)
    assert process_limits.killed_from_outside(signal.SIGKILL)
    assert process_limits.killed_from_outside(signal.SIGXCPU)
