"""bench/encryption.py runs, tiny, so that it cannot rot."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench" / "encryption.py"


@pytest.mark.slow
def test_encryption_bench_prints_one_line_with_its_rows(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCH), "--tiny", "--json", "--dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    for key in ("encrypted_write_ratio", "encrypted_read_ratio", "encrypted_start_ratio"):
        assert results[key] > 0
    assert results["plain_start_pages"] == results["encrypted_start_pages"] > 0
    assert {"machine", "date", "spread"} <= results.keys()
    assert os.listdir(tmp_path) == [], "it cleans up"
