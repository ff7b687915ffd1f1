"""What a directory keeps of how it was served: its size, and that it is an operator's."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from known_pages import SPEC, load, prompt, save
from raw_client import wait_until
from server_process import ServerProcess

from kvstore import Store
from kvstore.connect import connect
from kvstore.errors import DirectoryError
from kvstore.remembered import is_served

if TYPE_CHECKING:
    from pathlib import Path

MEMORY = "--host-bytes=16MiB"


def checked_settings(*arguments: str) -> Any:
    command = [sys.executable, "-m", "kvstore.cli", "serve", *arguments, "--check-config"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    return json.loads(done.stdout)


@pytest.mark.slow
def test_serve_keeps_a_stores_size_and_places_unless_they_are_given(tmp_path: Path) -> None:
    directory, more = tmp_path / "store", tmp_path / "more"
    sizes = {"host_bytes": "4MiB", "disk_bytes": "96MiB", "disk_directories": [str(more)]}
    with Store.open(directory, **sizes) as store:
        assert save(store.session(SPEC), prompt(1, 3), durable=True) == 3
    with ServerProcess(directory, MEMORY) as server:
        server.start()
        with connect(server.address, lookup_deadline_s=5.0) as client:
            assert load(client.session(SPEC), prompt(1, 3)) == 3
    noted = json.loads((directory / "settings.json").read_bytes())
    assert (noted["disk_bytes"], noted["disk_directories"]) == (96 << 20, [str(more)])
    assert checked_settings(str(directory))["disk_bytes"] == 96 << 20
    given = checked_settings(str(directory), "--disk-bytes", "80MiB")
    assert (given["disk_bytes"], given["disk_directories"]) == (80 << 20, [str(more)])


@pytest.mark.slow
def test_after_a_kill_an_engine_waits_for_the_operators_server(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with ServerProcess(tmp_path / "store") as server:
        server.start()
        server.kill()
        caplog.set_level(logging.WARNING, "kvstore.client")
        with connect(server.directory, lookup_deadline_s=5.0) as store:
            session = store.session(SPEC)
            assert load(session, prompt(1, 3)) == 0
            assert session.wait_open(1.0) is False  # several attempts later
            assert store.private_pid is None
            said = [each for each in caplog.messages if "private_server=True" in each]
            assert len(said) == 1
            assert f"kvstore serve {server.directory}" in said[0]
            server.start()
            assert session.wait_open(15.0)
            assert save(session, prompt(1, 3)) == 3


@pytest.mark.slow
def test_a_server_of_ones_own_is_there_for_who_asks_and_leaves_no_mark(tmp_path: Path) -> None:
    directory = tmp_path / "store"
    with ServerProcess(directory, MEMORY, "--disk-bytes=64MiB", "--idle-exit-s=60") as private:
        private.start()
        private.terminate()
        private.log.unlink()
    assert not is_served(directory)
    with ServerProcess(directory, MEMORY) as operators:
        operators.start()
        assert is_served(directory)
        operators.terminate()
        operators.log.unlink()
    with Store.open(directory):
        assert is_served(directory), "a look inside changes nothing"
    with ServerProcess(directory, MEMORY, "--idle-exit-s=1") as private:
        private.start()
        with connect(directory, private_server=True, lookup_deadline_s=5.0) as store:
            assert save(store.session(SPEC), prompt(1, 3)) == 3
        assert private.process is not None
        assert private.process.wait(20.0) == 0
    with connect(directory, private_server=True, open_wait_s=15.0, host_bytes="16MiB") as store:
        store.session(SPEC)
        assert store.private_pid is not None
        os.kill(store.private_pid, signal.SIGTERM)
        wait_until(lambda: store.private_pid is None, 20.0)
    with Store.open(directory) as opened:
        assert opened.config.disk_bytes == 64 << 20


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b'{"format": 9}', b'{"format": 1, "encrypt": "yes"}'],
)
def test_a_damaged_note_is_refused_with_the_way_out(tmp_path: Path, content: bytes) -> None:
    with Store.open(tmp_path, host_bytes="4MiB", disk_bytes="64MiB") as store:
        assert save(store.session(SPEC), prompt(1, 3), durable=True) == 3
    note = tmp_path / "settings.json"
    note.write_bytes(content)
    with pytest.raises(DirectoryError, match=r"settings\.json is damaged.*remove it.*encrypt"):
        Store.open(tmp_path, host_bytes="4MiB", disk_bytes="64MiB")
    assert note.read_bytes() == content
    note.unlink()
    with Store.open(tmp_path, host_bytes="4MiB", disk_bytes="64MiB") as store:
        assert load(store.session(SPEC), prompt(1, 3)) == 3
