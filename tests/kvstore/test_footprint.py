"""What a server says of its memory and disk, and what it refuses, before it takes any of it."""

from __future__ import annotations

import logging
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from server_process import ServerProcess

from kvstore.errors import CapacityError
from kvstore.footprint import footprint_of
from kvstore.server_config import ServerConfig
from kvstore.tiers.available_memory import available_memory_bytes

if TYPE_CHECKING:
    from pathlib import Path

GIB = 1 << 30


@pytest.fixture
def config(tmp_path: Path) -> ServerConfig:
    return ServerConfig(directory=tmp_path / "kv", host_bytes="8GiB", disk_bytes="64MiB")


def test_memory_that_fits_is_one_line_with_the_options(
    config: ServerConfig, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "kvstore.server"):
        footprint_of(config, 8 * GIB).say()
    [record] = caplog.records
    assert record.levelno == logging.INFO
    said = record.getMessage()
    assert "takes 8 GiB of memory now (--host-bytes)" in said
    assert f"up to 64 MiB of disk in {config.directory} (--disk-bytes; " in said


def test_memory_that_fits_without_staging_is_a_warning(
    config: ServerConfig, caplog: pytest.LogCaptureFixture
) -> None:
    footprint_of(config, 8 * GIB - 1).say()
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert "8 GiB of memory" in record.getMessage()
    assert "lower --host-bytes" in record.getMessage()


def test_memory_that_does_not_fit_is_refused(config: ServerConfig) -> None:
    footprint_of(config, config.arena_bytes)
    with pytest.raises(CapacityError, match=r"8 GiB given, .* has 7 GiB available; lower"):
        footprint_of(config, config.arena_bytes - 1)


@pytest.mark.slow
def test_more_than_the_machine_has_is_refused_by_the_real_server(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kvstore.cli", "serve", str(tmp_path / "kv")]
    command += [f"--host-bytes={2 * available_memory_bytes()}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("kvstore: host_bytes: ")
    assert "available; lower --host-bytes" in done.stderr
    assert not (tmp_path / "kv").exists()


@pytest.mark.slow
def test_a_server_says_it_before_it_serves_and_one_that_is_refused_takes_nothing(
    tmp_path: Path,
) -> None:
    with ServerProcess(tmp_path / "kv", "--host-bytes=16MiB", "--disk-bytes=64MiB") as server:
        server.start()
        first, *_ = server.log.read_text().splitlines()
        assert "takes 16 MiB of memory now (--host-bytes), and up to 64 MiB of disk in " in first
        command = [sys.executable, "-m", "kvstore.cli", "serve", str(tmp_path / "kv")]
        command += ["--host-bytes=16MiB"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 1
        assert "is in use by pid" in done.stderr
        assert "takes" not in done.stderr
