"""bench/index.py runs, tiny, so that it cannot rot."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench" / "index.py"
ROWS = {"match_array_ms", "match_list_ms", "hash_ms", "index_bytes_per_page"}


@pytest.mark.slow
def test_index_bench_prints_one_line_with_its_rows() -> None:
    command = [sys.executable, str(BENCH), "--tiny", "--json", "--seed", "7"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    [line] = done.stdout.splitlines()
    results = json.loads(line)
    assert results["seed"] == 7
    assert all(results[key] > 0 for key in ROWS)
    assert {"machine", "date", "spread"} <= results.keys()


@pytest.mark.slow
def test_index_bench_speaks_to_people_too() -> None:
    done = subprocess.run(
        [sys.executable, str(BENCH), "--tiny"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert all(key in done.stdout for key in ROWS)
