"""docs/examples/ does what it says, with a tiny model: hits across processes and replicas."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tiny_model import tiny_model

if TYPE_CHECKING:
    from collections.abc import Iterator

EXAMPLES = Path(__file__).resolve().parents[1] / "docs" / "examples"
LONG = "Once upon a time a page was kept. " * 50  # a token a letter, and 1,376 tokens a page


@pytest.fixture
def folder() -> Iterator[Path]:
    """Short, since sockets lie in it; with a model."""
    made = Path(tempfile.mkdtemp(prefix="examples-"))
    tiny_model(made / "model")
    yield made
    shutil.rmtree(made, ignore_errors=True)


def run(folder: Path, script: str, *arguments: str, typed: str = "") -> str:
    """What an example printed, run in this folder."""
    sizes = {"KVSTORE_HOST_BYTES": "64MiB", "KVSTORE_DISK_BYTES": "256MiB"}
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / script), *arguments],
        input=typed,
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, **sizes, "KVSTORE_IDLE_EXIT_S": "1s"},
        timeout=140,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def reused(printed: str) -> list[int]:
    """How many tokens each answer had not to compute."""
    return [int(number) for number in re.findall(r"(\d+) of \d+ tokens reused", printed)]


@pytest.fixture
def server(folder: Path) -> Iterator[None]:
    """`kvstore serve my-cache`."""
    command = [sys.executable, "-m", "kvstore.cli", "serve", "my-cache"]
    command += ["--host-bytes=64MiB", "--disk-bytes=256MiB"]
    log = folder / "server.log"
    with open(log, "wb") as file:
        process = subprocess.Popen(command, cwd=folder, stdout=file, stderr=file)
    until = time.monotonic() + 30
    while "serving " not in log.read_text():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < until, log.read_text()
        time.sleep(0.02)
    yield
    process.terminate()
    process.wait(30)


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.timeout(300)
def test_a_chat_reuses_what_an_earlier_process_has_computed(folder: Path, server: None) -> None:
    arguments = ("chat.py", "model", "--tokens", "2")
    assert reused(run(folder, *arguments, typed=LONG + "\n")) == [0]
    again = reused(run(folder, *arguments, typed="And then?\n"))
    assert len(again) == 1
    assert again[0] >= 1376
    history = json.loads((folder / "chat.json").read_text())
    assert [turn["role"] for turn in history] == ["user", "assistant"] * 2


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.timeout(300)
def test_a_second_replica_reuses_what_the_first_has_computed(folder: Path, server: None) -> None:
    first = run(folder, "replica.py", "model", LONG, "--name", "first", "--tokens", "2")
    second = run(folder, "replica.py", "model", LONG, "--name", "second", "--tokens", "2")
    assert reused(first) == [0]
    assert reused(second)[0] >= 1376
    assert first.splitlines()[0] == second.splitlines()[0]


def test_the_vllm_example_gives_vllm_settings_that_the_plug_in_takes(tmp_path: Path) -> None:
    """Whether vLLM then hits is tested with the engine: `make test-vllm`."""
    from kvstore.engine_adapter.vllm_settings import VllmSettings

    seen = tmp_path / "vllm"
    seen.write_text('#!/bin/sh\nfor word in "$@"; do printf "%s\\0" "$word"; done\n')
    seen.chmod(0o755)
    done = subprocess.run(
        ["sh", str(EXAMPLES / "vllm_serve.sh"), "a/model", "/var/cache/kv", "--port", "8001"],
        capture_output=True,
        check=True,
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
    )
    words = done.stdout.decode().split("\0")
    assert words[:3] == ["serve", "a/model", "--kv-transfer-config"]
    assert words[4:6] == ["--port", "8001"]
    config = json.loads(words[3])
    assert config["kv_connector"] == "KVStoreConnector"
    assert VllmSettings.model_validate(config["kv_connector_extra_config"]).store == "/var/cache/kv"
