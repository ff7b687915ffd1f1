"""bench/verify.py runs, tiny, so that it cannot rot."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench" / "verify.py"


@pytest.mark.slow
def test_verify_bench_prints_one_line_with_its_row() -> None:
    done = subprocess.run(
        [sys.executable, str(BENCH), "--tiny", "--json"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    assert {"verify_ratio", "spread", "machine"} <= results.keys()
