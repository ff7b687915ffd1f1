"""Recording look-ups of a store in use, through the command, and what a recorded file is worth."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from small_trace import records, small_trace

from kvstore.errors import DirectoryError, InvalidRequest
from kvstore.private_file import replace_private
from kvstore.recorder import PIECE_BYTES, Recorder
from kvstore.recording import FOLDER, NOTE, Wish, default_name
from kvstore.spec import CacheSpec
from kvstore.store import Store
from kvstore.trace import read_trace

if TYPE_CHECKING:
    from pathlib import Path

    from kvstore.interface import SessionLike

SPEC = CacheSpec.opaque("recorded", page_tokens=1, page_bytes=4032)
REQUESTS = 120


def kvstore(*arguments: str, code: int = 0) -> Any:
    """The real command in a process of its own; what it printed, from JSON."""
    command = [sys.executable, "-m", "kvstore.cli", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout) if code == 0 else done.stderr


def ask_all(session: SessionLike) -> None:
    """Every request of a small trace: a page a block, looked up, then stored."""
    trace = small_trace(3, REQUESTS)
    for request in range(trace.requests):
        path = trace.blocks[trace.starts[request] : trace.starts[request + 1]]
        session.match(path).release()
        with session.reserve(path, deadline_s=5.0) as run:
            if run.count:
                run.commit()


def simulated(file: Path | str) -> list[tuple[str, int, int, float]]:
    """What `kvstore simulate` says of a trace."""
    policies = [part for name in ("lru", "belady") for part in ("--policy", name)]
    found = kvstore("simulate", str(file), *policies, "--capacity", "20,60,200", "--json")
    return [
        (each["policy"], each["capacity"], each["hit_blocks"], each["block_ratio"])
        for each in found["results"]
    ]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, int, int, float]]:
    file = tmp_path_factory.mktemp("plain") / "trace.jsonl"
    file.write_text("".join(json.dumps(each) + "\n" for each in records(3, REQUESTS)))
    return simulated(file)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_what_a_server_records_simulates_to_the_ratios_of_the_plain_trace(
    tmp_path: Path, plain: list[tuple[str, int, int, float]], name: str
) -> None:
    pytest.importorskip("grpc", reason="the service needs grpcio")
    from server_process import ServerProcess

    from kvstore.connect import connect

    with ServerProcess(tmp_path / "s") as server:
        server.start()
        where = str(server.directory)
        assert not kvstore("record", where, "status", "--json")["is_recording"]
        begun = kvstore("record", where, "start", "--name", name, "--json")
        assert (begun["is_recording"], begun["requests"]) == (True, 0)
        assert "stop it first" in kvstore("record", where, "start", code=1)
        with connect(server.address, lookup_deadline_s=5.0) as store:
            session = store.session(SPEC)
            assert session.wait_open(10.0)
            ask_all(session)
        ended = kvstore("record", where, "stop", "--json")
        assert (ended["is_recording"], ended["requests"], ended["dropped"]) == (False, REQUESTS, 0)
        with connect(server.address, lookup_deadline_s=5.0) as store:
            session = store.session(SPEC)
            assert session.wait_open(10.0)
            session.match(np.arange(9, dtype=np.int32))
        assert kvstore("record", where, "--json") == ended
    assert ended["file_bytes"] == os.path.getsize(ended["file"])
    assert os.stat(ended["file"]).st_mode & 0o777 == 0o600
    assert simulated(ended["file"]) == plain


@pytest.mark.slow
def test_a_process_that_holds_the_directory_itself_follows_the_note(
    tmp_path: Path, plain: list[tuple[str, int, int, float]]
) -> None:
    where = str(tmp_path / "s")
    settings = {"host_bytes": "8MiB", "disk_bytes": "64MiB"}
    with Store.open(where, **settings) as store:
        left = kvstore("record", where, "start", "--name", "a.jsonl.gz", "--json")
        assert not left["is_recording"]
        assert "already" in kvstore("record", where, "start", code=1)
        store._housekeeper.tick(1)
        assert kvstore("record", where, "--json")["is_recording"]
        ask_all(store.session(SPEC))
        kvstore("record", where, "stop", "--json")
        store._housekeeper.tick(1)
        ended = kvstore("record", where, "--json")
        assert (ended["is_recording"], ended["requests"]) == (False, REQUESTS)
    assert ended["file"] == left["file"]
    assert simulated(ended["file"]) == plain


@pytest.mark.slow
def test_a_note_outlives_its_process_and_makes_a_file_for_each(tmp_path: Path) -> None:
    where, settings = tmp_path / "s", {"host_bytes": "8MiB", "disk_bytes": "64MiB"}
    Store.open(where, **settings).close()
    kvstore("record", str(where), "start", "--name", "a.jsonl", "--json")
    for _ in range(2):
        with Store.open(where, **settings) as store:
            store._housekeeper.tick(1)
            ask_all(store.session(SPEC))
    files = sorted(each.name for each in (where / FOLDER).glob("*.jsonl"))
    assert files == ["a-2.jsonl", "a.jsonl"]
    first, second = (read_trace(where / FOLDER / each) for each in reversed(files))
    assert first.unique == second.unique > 100
    assert (first.blocks == second.blocks).all()
    ids = [
        json.loads((where / FOLDER / each).read_text().split("\n")[0])["hash_ids"] for each in files
    ]
    assert not set(ids[0]) & set(ids[1]), "the same pages have other names in each file"
    replace_private(where / NOTE, b"[]")
    with Store.open(where, **settings) as store:
        store._housekeeper.tick(1)
        assert "makes no sense" in kvstore("record", str(where), "--json")["note"]
        assert store.session(SPEC).match([1]).pages == 0


def look_ups(made: Recorder, count: int, tokens: int = 64) -> None:
    for number in range(count):
        values = np.arange(number, number + tokens, dtype="<i4")
        while True:  # as fast as it takes them
            before = made.dropped
            made.add(float(number), bytes(32), values.tobytes(), 1, {})
            if made.dropped == before:
                break


def test_a_file_stays_within_its_bytes_and_what_is_left_out_is_said(tmp_path: Path) -> None:
    made = Recorder(tmp_path / "a.jsonl", bytes_max=2 * PIECE_BYTES)
    look_ups(made, 800)
    made.close()
    found = made.status()
    assert PIECE_BYTES <= found.file_bytes == (tmp_path / "a.jsonl").stat().st_size
    assert found.file_bytes <= found.bytes_max == 2 * PIECE_BYTES
    assert found.requests == read_trace(tmp_path / "a.jsonl").requests < 800
    assert "all the bytes" in found.note


def test_a_zipped_file_can_be_read_while_it_grows(tmp_path: Path) -> None:
    """A killed process leaves whole members behind."""
    made = Recorder(tmp_path / "a.jsonl.gz")
    look_ups(made, 400)
    while not made.status().requests:
        made._thread.join(0.01)
    copy = gzip.decompress((tmp_path / "a.jsonl.gz").read_bytes()).decode()
    assert copy.endswith("}\n")
    assert 0 < len(copy.splitlines()) <= 400
    made.close()
    trace = read_trace(tmp_path / "a.jsonl.gz")
    assert trace.requests == 400
    assert made.status().file_bytes < len(copy)


def test_ids_are_whole_numbers_as_mooncakes_are(tmp_path: Path) -> None:
    made = Recorder(tmp_path / "a.jsonl")
    look_ups(made, 1, tokens=3)
    made.close()
    (line,) = (tmp_path / "a.jsonl").read_text().splitlines()
    record = json.loads(line)
    assert set(record) >= {"timestamp", "input_length", "output_length", "hash_ids"}
    assert all(type(each) is int and 0 <= each < 1 << 63 for each in record["hash_ids"])
    assert (record["input_length"], len(record["hash_ids"])) == (3, 3)


@pytest.mark.parametrize(
    "name", ["", "a", ".jsonl", "../a.jsonl", "/a.jsonl", "a\0.jsonl", ".a.jsonl", "a.jsonl.xz"]
)
def test_names_that_lead_elsewhere_are_refused(name: str) -> None:
    with pytest.raises(InvalidRequest, match="without a folder"):
        Wish(name)


def test_bounds_and_places_that_cannot_be_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="bytes given"):
        Wish("a.jsonl", 10)
    assert Wish(default_name())
    with Store.open(None, host_bytes="2MiB") as store:
        with pytest.raises(InvalidRequest, match="no directory"):
            store.start_recording("a.jsonl")
        assert not store.stop_recording().file
    with Store.open(tmp_path / "s", host_bytes="2MiB", disk_bytes="64MiB") as store:
        assert store.start_recording("a.jsonl").is_recording
        assert store.stop_recording().file.endswith("records/a.jsonl")
        with pytest.raises(DirectoryError, match="does not exist yet"):
            store.start_recording("a.jsonl")
