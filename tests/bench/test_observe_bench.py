"""bench/observe.py runs, tiny, so that it cannot rot."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench" / "observe.py"


@pytest.mark.slow
def test_observe_bench_prints_one_line_with_its_rows() -> None:
    done = subprocess.run(
        [sys.executable, str(BENCH), "--tiny", "--json"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    assert {"observe_load_share", "observe_store_share", "spread", "machine"} <= results.keys()
