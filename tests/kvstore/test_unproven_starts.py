"""Servers that are killed as they start: a sound catalog is kept, one that kills is put aside."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from known_pages import SPEC, load, prompt, save
from server_process import ServerProcess

from kvstore import Store

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow

SIZES: dict[str, Any] = {"host_bytes": "8MiB", "disk_bytes": "64MiB"}
CHAINS, PAGES = 8, 100
REBUILT = "rebuilding it from page headers"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A store of many pages, closed."""
    with Store.open(tmp_path / "store", **SIZES) as store:
        session = store.session(SPEC)
        for chain in range(CHAINS):
            save(session, prompt(chain, PAGES), durable=True)
    return tmp_path / "store"


def hits(directory: Path) -> int:
    with Store.open(directory, **SIZES) as store:
        session = store.session(SPEC)
        return sum(load(session, prompt(chain, PAGES)) for chain in range(CHAINS))


def identity(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((directory / "store.json").read_text())
    return found


def test_servers_killed_after_they_have_read_the_catalog_leave_it_trusted(directory: Path) -> None:
    """A server that only ever read was taken, after three kills, for one that its catalog kills."""
    before = identity(directory)["boot"]
    with ServerProcess(directory, "--host-bytes=16MiB", "--disk-bytes=64MiB") as server:
        for start in range(1, 5):
            server.start()
            server.kill()
            assert identity(directory)["boot"] == before + start
            assert identity(directory)["unproven_starts"] == 0
    said = server.log.read_text()
    assert REBUILT not in said
    assert said.count(f"warm: {CHAINS * PAGES} pages") == 4
    assert not list(directory.glob("quarantine-*"))
    assert hits(directory) == CHAINS * PAGES


LOOK = """
import os, signal, sys
from kvstore.cli_directory import Place
from kvstore.client_config import ClientConfig
with Place(sys.argv[1], ClientConfig()).opened() as store:
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_looks_that_are_killed_count_for_nothing(directory: Path) -> None:
    before = identity(directory)
    for _ in range(4):
        done = subprocess.run([sys.executable, "-c", LOOK, str(directory)], check=False)
        assert done.returncode == -signal.SIGKILL
    after = identity(directory)
    assert after["boot"] == before["boot"] + 4, "they did open it"
    assert after["unproven_starts"] == 0
    command = [sys.executable, "-m", "kvstore.cli", "status", str(directory)]
    said = subprocess.run(command, capture_output=True, text=True, check=True)
    assert REBUILT not in said.stderr
    assert hits(directory) == CHAINS * PAGES


# Dies by a real SIGSEGV where it opens, or first writes to, the one catalog that it is told of.
DEADLY = """
import ctypes, os, sys
from kvstore import Store
from kvstore.tiers import catalog, disk_recovery
from known_pages import SPEC, load, prompt, save
folder, inode, where = sys.argv[1], int(sys.argv[2]), sys.argv[3]
real = getattr(catalog.Catalog, where)
def deadly(self, *given, **named):
    first = given[0] if where == "__init__" else self.directory
    at = os.path.join(first, "data.mdb")
    if os.path.exists(at) and os.stat(at).st_ino == inode:
        ctypes.string_at(0)
    return real(self, *given, **named)
setattr(catalog.Catalog, where, deadly)
with Store.open(folder, host_bytes="8MiB", disk_bytes="64MiB") as store:
    session = store.session(SPEC)
    save(session, prompt(50, 3), durable=True)
    print(sum(load(session, prompt(chain, 100)) for chain in range(8)))
"""


@pytest.mark.parametrize("where", ["__init__", "commit"])
def test_a_catalog_that_kills_who_uses_it_is_put_aside_after_three(
    directory: Path, where: str
) -> None:
    """Also one that can be read to its end, and kills who first writes to it."""
    inode = (directory / "catalog" / "data.mdb").stat().st_ino
    support = os.path.dirname(sys.modules["known_pages"].__file__ or "")
    command = [sys.executable, "-c", DEADLY, str(directory), str(inode), where]
    environment = os.environ | {"PYTHONPATH": support}
    for _ in range(3):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == -signal.SIGSEGV, done.stderr
        assert REBUILT not in done.stderr
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "3 starts in a row ended" in done.stderr
    assert REBUILT in done.stderr
    assert int(done.stdout) == CHAINS * PAGES
    assert list(directory.glob("quarantine-*"))
    assert identity(directory)["unproven_starts"] == identity(directory)["unproven_commits"] == 0


def test_deaths_in_a_first_commit_count_only_in_a_row(directory: Path) -> None:
    """Two deaths long ago and one good commit since: the next death is the first."""
    inode = (directory / "catalog" / "data.mdb").stat().st_ino
    support = os.path.dirname(sys.modules["known_pages"].__file__ or "")
    command = [sys.executable, "-c", DEADLY, str(directory), str(inode), "commit"]
    environment = os.environ | {"PYTHONPATH": support}
    for _ in range(2):
        subprocess.run(command, env=environment, capture_output=True, check=False)
    assert identity(directory)["unproven_commits"] == 2
    with Store.open(directory, **SIZES) as store:
        save(store.session(SPEC), prompt(60, 3), durable=True)
        assert identity(directory)["unproven_commits"] == 0


FAILING = """
import sys
from known_pages import SPEC, prompt, save
from kvstore import Store, warm_start
warm_start.PIECE_PAGES = 0  # a range without a step: what a bug of ours would raise
with Store.open(sys.argv[1], wait_warm=False, host_bytes="8MiB", disk_bytes="64MiB") as store:
    with store.state.lock:
        assert store.state.changed.wait_for(lambda: store.state.warm, 20.0)
    assert save(store.session(SPEC), prompt(100, 3), durable=True) == 3
"""


def test_a_start_that_failed_to_read_its_catalog_is_not_proven_by_a_good_end(
    directory: Path,
) -> None:
    """Closing it, or a page that it committed, made a good start of it: three in a row did not put
    the catalog aside.
    """
    support = os.path.dirname(sys.modules["known_pages"].__file__ or "")
    command = [sys.executable, "-c", FAILING, str(directory)]
    for start in range(1, 4):
        subprocess.run(command, env=os.environ | {"PYTHONPATH": support}, check=True)
        assert identity(directory)["unproven_starts"] == start
    assert hits(directory) == CHAINS * PAGES
    assert list(directory.glob("quarantine-*"))
    assert identity(directory)["unproven_starts"] == 0
