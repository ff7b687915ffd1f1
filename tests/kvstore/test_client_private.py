"""A directory instead of an address: its server is joined, or started, once, and ends by itself."""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from known_pages import SPEC, load, prompt, save
from server_process import ServerProcess

from kvstore import Store
from kvstore.client import RemoteStore
from kvstore.client_config import ClientConfig
from kvstore.connect import connect
from kvstore.errors import ServerUnavailable
from kvstore.private_server import PrivateServer
from kvstore.server_address import parse_address

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.slow

SIZES = {"host_bytes": "32MiB", "disk_bytes": "256MiB"}


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    """A place for a store; whatever serves it is ended after the test."""
    directory = tmp_path / "store"
    yield directory
    for pid in serving(directory):
        os.kill(pid, signal.SIGKILL)


def joined(directory: Path, idle_exit_s: float = 60.0) -> RemoteStore:
    config = ClientConfig(lookup_deadline_s=5.0, open_wait_s=15.0)
    starter = PrivateServer(directory, SIZES, idle_exit_s=idle_exit_s)
    return RemoteStore(parse_address(directory), config, starter)


def serving(directory: Path) -> list[int]:
    """Processes that run a server for this directory, whoever started them."""
    found = []
    for name in os.listdir("/proc"):
        try:
            with open(f"/proc/{name}/cmdline", "rb") as file:
                words = file.read().split(b"\0")
        except OSError:
            continue
        if b"serve" in words and os.fsencode(directory) in words:
            found.append(int(name))
    return found


def test_a_directory_without_a_server_gets_one_and_others_join_it(directory: Path) -> None:
    with joined(directory) as first:
        assert save(first.session(SPEC), prompt(1, 3)) == 3
        with connect(directory, lookup_deadline_s=5.0, **SIZES) as second:
            assert isinstance(second, RemoteStore)
            assert load(second.session(SPEC), prompt(1, 3)) == 3
            assert second.private_pid is None
        assert serving(directory) == [first.private_pid]


def test_clients_that_come_at_once_start_one_server(directory: Path) -> None:
    stores: list[RemoteStore] = []
    opened: list[bool] = []

    def come() -> None:
        store = joined(directory)
        stores.append(store)
        session = store.session(SPEC)
        opened.append(session.wait_open(15.0))

    threads = [threading.Thread(target=come) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert opened == [True] * 3
    deadline = time.monotonic() + 10
    while len(serving(directory)) > 1 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(serving(directory)) == 1
    for store in stores:
        store.close()


def test_a_private_server_ends_some_time_after_its_last_session(directory: Path) -> None:
    with joined(directory, idle_exit_s=1.0) as store:
        session = store.session(SPEC)
        save(session, prompt(1, 3), durable=True)
        time.sleep(2.0)
        assert store.private_pid is not None, "it has a session"
    deadline = time.monotonic() + 15
    while serving(directory):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    with Store.open(directory) as store_here:
        assert load(store_here.session(SPEC), prompt(1, 3)) == 3


def test_a_killed_private_server_is_started_again(directory: Path) -> None:
    with joined(directory) as store:
        session = store.session(SPEC)
        save(session, prompt(1, 3), durable=True)
        first = store.private_pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        deadline = time.monotonic() + 15
        while load(session, prompt(1, 3)) != 3:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert store.private_pid not in (None, first)


ENGINE = """
import os, sys
from known_pages import SPEC, prompt, save
from kvstore.connect import connect
store = connect(sys.argv[1], host_bytes="32MiB", disk_bytes="256MiB", open_wait_s=15.0)
session = store.session(SPEC)
assert save(session, prompt(1, 3)) == 3
os.kill(os.getpid(), 9)
"""


def test_a_private_server_outlives_the_engine_that_started_it(directory: Path) -> None:
    support = os.path.dirname(sys.modules["known_pages"].__file__ or "")
    engine = [sys.executable, "-c", ENGINE, str(directory)]
    done = subprocess.run(engine, env=os.environ | {"PYTHONPATH": support}, check=False)
    assert done.returncode == -signal.SIGKILL
    with joined(directory) as store:
        assert load(store.session(SPEC), prompt(1, 3)) == 3
        assert store.private_pid is None, "the first one's server was joined"


def test_a_directory_that_cannot_be_served_is_all_misses(directory: Path) -> None:
    with Store.open(directory, **SIZES), joined(directory) as store:
        session = store.session(SPEC)  # waits in vain: the library holds the directory
        assert load(session, prompt(1, 3)) == 0
        reason = session.reserve(prompt(1, 3)).reason
        assert reason.startswith("unreachable: its server ended with 1: ")
        assert f"{directory} is in use by pid {os.getpid()} " in reason


def test_a_normal_first_start_warns_of_nothing(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It was "not reached: no such file", although all went as it should."""
    with caplog.at_level(logging.INFO, "kvstore"), joined(directory) as store:
        assert store.session(SPEC).is_open
    said = [record.getMessage() for record in caplog.records if record.levelno > logging.INFO]
    assert said == []
    assert "started a server" in caplog.text
    assert "connected" in caplog.text


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]


@pytest.mark.parametrize("kind", ["below a file", "in proc", "not a store", "not ours"])
def test_an_unusable_directory_says_why_once_and_is_all_misses(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    place, words = tmp_path / "store", ""
    if kind == "below a file":
        (tmp_path / "file").write_text("x")
        place, words = tmp_path / "file" / "kv", "Not a directory"
    elif kind == "in proc":
        place, words = Path("/proc/nope/kv"), "/proc/nope: No such file or directory"
    elif kind == "not a store":
        place.mkdir()
        (place / "letter.txt").write_text("x")
        words = "is not a kvstore directory and not empty (letter.txt)"
    elif os.geteuid() != 0:
        pytest.skip("giving a directory away needs root")
    else:
        place.mkdir()
        os.chown(place, 65534, -1)
        words = "belongs to uid 65534"
    with connect(place, open_wait_s=15.0) as store:
        session = store.session(SPEC)
        assert load(session, prompt(1, 3)) == 0
        for reason in (session.match(prompt(1, 3)).reason, session.reserve(prompt(1, 3)).reason):
            assert reason.startswith("unreachable: ")
            assert words in reason
            assert os.fspath(place) in reason
        with pytest.raises(ServerUnavailable, match=re.escape(words)):
            store.stats()
        time.sleep(2.5)  # it is tried again meanwhile, and nothing more is said
        [said] = warnings_of(caplog)
        assert words in said
        assert os.fspath(place) in said


def test_a_place_without_room_for_a_log_beside_it_has_its_log_inside(directory: Path) -> None:
    directory.with_name(directory.name + "-server.log").mkdir()  # as if it could not be written
    with joined(directory) as store:
        assert store.session(SPEC).is_open
    assert (directory / "kvstore.server.log").read_text().count("serving") == 1


def test_the_server_of_a_directory_is_joined_if_there_is_one(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "store") as server:
        server.start()
        with joined(server.directory) as store:
            assert save(store.session(SPEC), prompt(1, 3)) == 3
            assert store.private_pid is None
