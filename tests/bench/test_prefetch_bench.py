"""bench/prefetch.py runs, tiny, so that it cannot rot."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.mark.slow
def test_reading_ahead_is_measured_where_it_helps_and_where_it_cannot() -> None:
    command = [sys.executable, str(BENCH / "prefetch.py"), "--json"]
    tiny = ["--chains", "20", "--requests", "8", "--pairs", "1"]
    done = subprocess.run([*command, *tiny], check=True, capture_output=True, timeout=300)
    found = json.loads(done.stdout)
    assert {"machine", "date", "steps", "whole"} <= found.keys()
    assert found["steps"]["used"] > 0.5 * found["steps"]["read_ahead"] > 0
    assert found["whole"]["in_memory_ahead"] > 0
