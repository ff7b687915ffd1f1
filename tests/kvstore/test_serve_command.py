"""`kvstore serve` as a process: its start, its end, its settings, its log."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
import pytest
from known_pages import PAGE_BYTES, load, prompt
from raw_client import RawClient, wait_until

from kvstore import Store, kvstore_pb2
from kvstore.errors import ConfigError
from kvstore.server_config import ServerConfig

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.slow


class Serving:
    """A server process; its log is collected."""

    def __init__(self, directory: Path, *arguments: str, **environment: str) -> None:
        self.log: list[str] = []
        command = [sys.executable, "-m", "kvstore.cli", "serve", os.fspath(directory)]
        command += ["--host-bytes", "16MiB", "--disk-bytes", "64MiB", *arguments]
        self.process = subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, env=os.environ | environment
        )
        self.address = f"unix:{directory}/kvstore.sock"
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        self.log.extend(self.process.stderr)

    def ready(self) -> None:
        """Wait until it serves all that is on disk."""
        wait_until(lambda: self.said("warm: ") or self.process.poll() is not None, 20.0)
        assert self.process.poll() is None, self.log

    def said(self, words: str) -> bool:
        """Whether a line of the log has these words."""
        return any(words in line for line in self.log)

    def end(self, number: int = signal.SIGTERM, timeout_s: float = 20.0) -> int:
        """Signal it; its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        code = self.process.wait(timeout_s)
        self._reader.join()
        assert self.process.stderr is not None
        self.process.stderr.close()
        return code


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def serving(directory: Path) -> Iterator[Serving]:
    made = Serving(directory)
    made.ready()
    yield made
    made.end(signal.SIGKILL)


def test_sigterm_ends_it_well_and_nothing_is_lost(serving: Serving, directory: Path) -> None:
    client = RawClient(serving.address)
    client.open()
    client.beat()
    assert client.save(prompt(0, 4)) == 4  # not durable: the stop flushes
    client.match(prompt(0, 4))
    began = time.monotonic()
    assert serving.end() == 0
    assert time.monotonic() - began < 10.0
    assert serving.said("stopping")
    assert serving.said("stopped")
    client.close()
    assert not (directory / "kvstore.sock").exists()
    assert not (directory / "extents.sock").exists()
    with Store.open(directory, host_bytes="4MiB") as store:
        assert load(store.session(client.spec), prompt(0, 4)) == 4


def test_sigterm_under_load_keeps_what_it_promised(serving: Serving, directory: Path) -> None:
    """Calls fail when the server goes, and every durable one that was answered is there after."""
    promised: list[int] = []
    failures: list[str] = []

    def tokens_of(seed: int) -> np.ndarray:
        return np.arange(8, dtype=np.int32) + 8 * seed

    def work(first: int) -> None:
        client = RawClient(serving.address)
        try:
            client.open()
            for seed in range(first, first + 10_000):
                reserved = client.reserve(tokens_of(seed), 1.0)
                client.fill(tokens_of(seed), reserved)
                if client.commit(reserved.reservation, durable=True).durable:
                    promised.append(seed)
        except grpc.RpcError as exc:
            failures.append(str(exc))
        finally:
            client.close()

    threads = [threading.Thread(target=work, args=(number * 10_000,)) for number in range(4)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(promised) >= 8 or failures, 20.0)
    assert not failures
    assert serving.end() == 0
    for thread in threads:
        thread.join()
    with Store.open(directory, host_bytes="4MiB") as store:
        session = store.session(RawClient(serving.address).spec)
        for seed in promised:
            assert load(session, tokens_of(seed)) == 2, seed


def test_kill_leaves_nothing_that_stops_the_next_one(serving: Serving, directory: Path) -> None:
    client = RawClient(serving.address)
    client.open()
    assert client.save(prompt(0, 3), durable=True) == 3
    assert serving.end(signal.SIGKILL) == -signal.SIGKILL
    client.close()
    again = Serving(directory)
    again.ready()
    wait_until(lambda: again.said("warm: 3 pages"))
    client = RawClient(again.address)
    client.open()
    assert client.match(prompt(0, 3)).pages == 3
    client.close()
    assert again.end() == 0


def test_a_second_signal_ends_it_at_once(directory: Path) -> None:
    serving = Serving(directory, "--drain-s", "60")
    serving.ready()
    client = RawClient(serving.address)
    client.open(shared_memory=False)
    reserved = client.reserve(prompt(0, 1))

    def stuck() -> Iterator[bytes]:
        yield kvstore_pb2.WritePagesHeader(
            session=client.session, reservation=reserved.reservation, deadline_s=1.0
        ).SerializeToString()
        wait_until(lambda: serving.process.poll() is not None, 30.0)

    write = client.channel.stream_unary("/kvstore.v1.KVStore/WritePages")
    call = write.future(stuck(), timeout=50.0)
    serving.process.send_signal(signal.SIGTERM)
    wait_until(lambda: serving.said("stopping"))
    assert serving.end() == 128 + signal.SIGTERM
    assert call.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
    client.close()


def test_a_private_server_ends_after_its_last_session(directory: Path) -> None:
    serving = Serving(directory, "--idle-exit-s", "1s")
    serving.ready()
    client = RawClient(serving.address)
    client.open()
    pause = threading.Event()
    for _ in range(8):
        client.beat()
        pause.wait(0.25)
    assert serving.process.poll() is None
    client.close()
    assert serving.process.wait(10.0) == 0
    assert serving.end() == 0


def test_the_loser_of_a_race_ends_with_a_sentence(serving: Serving, directory: Path) -> None:
    second = Serving(directory)
    assert second.process.wait(20.0) == 1
    second.end()
    assert second.said("in use")
    assert serving.process.poll() is None


def test_the_log_can_be_json(directory: Path) -> None:
    serving = Serving(directory, KVSTORE_LOG_JSON="1")
    serving.ready()
    assert serving.end() == 0
    lines = [json.loads(line) for line in serving.log]
    assert lines[1]["message"].startswith(f"serving {directory}")
    assert {line["level"] for line in lines} == {"info"}


def test_prompts_stand_in_no_log_line_and_no_core(serving: Serving) -> None:
    client = RawClient(serving.address)
    client.open()
    client.save(prompt(7, 2))
    with pytest.raises(grpc.RpcError):
        client.call("Pin", kvstore_pb2.PinRequest(session=client.session, tokens=b"canary!"))
    limits = Path(f"/proc/{serving.process.pid}/limits").read_text()
    core = next(line for line in limits.splitlines() if line.startswith("Max core"))
    assert core.split()[4:6] == ["0", "0"]
    client.close()
    assert serving.end() == 0
    assert not any("canary" in line or "8000000" in line for line in serving.log)


def test_check_config_prints_and_serves_nothing(directory: Path) -> None:
    command = [sys.executable, "-m", "kvstore.cli", "serve", os.fspath(directory)]
    done = subprocess.run(
        [*command, "--check-config", "--host-bytes", "16MiB", "--idle-exit-s", "1m"],
        capture_output=True,
        text=True,
        check=True,
    )
    settings = json.loads(done.stdout)
    assert (settings["host_bytes"], settings["idle_exit_s"]) == (16 << 20, 60.0)
    assert not directory.exists()
    bad = subprocess.run([*command, "--max-rpcs", "0"], capture_output=True, text=True, check=False)
    assert bad.returncode == 1
    assert "max_rpcs: 0 given" in bad.stderr


def test_only_the_server_command_loads_grpc() -> None:
    script = "import sys, kvstore, kvstore.store, kvstore.cli\nassert 'grpc' not in sys.modules"
    subprocess.run([sys.executable, "-I", "-c", script], check=True)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"listen": "nonsense"}, "listen"),
        ({"listen": "unix:/" + "x" * 120}, "107"),
        ({"staging_bytes": "15MiB"}, "at most half"),
        ({"directory": None, "disk_bytes": 0}, "directory"),
        ({"workers": True}, "workers"),
        ({"sessions": 3}, "did you mean sessions_max"),
    ],
)
def test_settings_that_cannot_work_are_refused(
    tmp_path: Path, settings: dict[str, Any], problem: str
) -> None:
    good = {"directory": tmp_path, "host_bytes": "16MiB", "disk_bytes": "64MiB"}
    with pytest.raises(ConfigError, match=problem):
        ServerConfig(**good | settings)


def test_staging_is_part_of_the_hosts_bytes(tmp_path: Path) -> None:
    config = ServerConfig(directory=tmp_path, host_bytes="16MiB", disk_bytes="64MiB")
    assert config.staging_bytes == 2 << 20
    assert config.store_config().host_bytes == 14 << 20
    assert config.staging_bytes % PAGE_BYTES == 0
