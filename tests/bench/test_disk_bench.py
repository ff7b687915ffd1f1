"""bench/disk.py runs, tiny, with and without fio, so that it cannot rot."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench" / "disk.py"


def run(directory: Path, **environment: str) -> tuple[dict[str, Any], str]:
    command = [
        sys.executable,
        str(BENCH),
        "--tiny",
        "--json",
        "--seed",
        "7",
        "--dir",
        str(directory),
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=100, env=os.environ | environment
    )
    assert done.returncode == 0, done.stderr
    [line] = done.stdout.splitlines()
    return json.loads(line), done.stderr


@pytest.mark.slow
def test_disk_bench_prints_one_line_with_its_rows(tmp_path: Path) -> None:
    results, _ = run(tmp_path)
    assert results["seed"] == 7
    for key in ("disk_read_ratio", "disk_write_ratio"):
        assert results[key] > 0
    assert results["checksum_share"] < 1
    assert {"machine", "date", "spread", "peer"} <= results.keys()
    assert os.listdir(tmp_path) == [], "it cleans up"


@pytest.mark.slow
def test_disk_bench_without_fio_says_so_loudly(tmp_path: Path) -> None:
    results, said = run(tmp_path, PATH="/nonexistent")
    assert results["peer"].startswith("NO FIO")
    assert "NOT INSTALLED" in said
    assert results["disk_read_ratio"] > 0
