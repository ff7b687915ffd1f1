"""bench/service.py runs, tiny, so that it cannot rot; so does its steady load."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench" / "service.py"
KEYS = (
    *("match_rpc_ms_p50", "match_embedded_ms_p50", "match_rpc_128k_ms_p50"),
    *("match_busy_ms_p50", "match_busy_ms_p99"),
    *("host_load_ratio", "host_store_ratio", "stream_ratio"),
)


def run(directory: Path, *options: str) -> tuple[int, dict[str, Any], str]:
    """Exit status, the one line, and what was said on the way."""
    command = [sys.executable, str(BENCH), "--json", "--seed", "7", "--dir", str(directory)]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=100)
    lines = done.stdout.splitlines()
    assert len(lines) == 1, done.stderr
    return done.returncode, json.loads(lines[0]), done.stderr


@pytest.mark.slow
def test_service_bench_prints_one_line_with_its_rows(tmp_path: Path) -> None:
    status, results, said = run(tmp_path, "--tiny")
    assert status == 0, said
    assert results["seed"] == 7
    assert all(results[key] > 0 for key in KEYS)
    assert set(results["spread"]) == set(KEYS)
    assert {"machine", "date"} <= results.keys()
    assert list(tmp_path.iterdir()) == [], "it cleans up"


@pytest.mark.slow
def test_a_steady_load_has_no_errors_and_ends_with_the_descriptors_it_began_with(
    tmp_path: Path,
) -> None:
    _, results, said = run(tmp_path, "--load", "6", "--seconds", "3")
    assert results["errors"] == 0, said
    assert results["hit_pages"] > 0
    first, *_, last = results["descriptors"]
    assert last <= first
