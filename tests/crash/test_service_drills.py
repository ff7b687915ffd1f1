"""Each drill of the service, tiny; see service_drills.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent / "service_drills.py"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "count", "said"),
    [
        ("sigterm", 2, "2 SIGTERMs under load"),
        ("deaths", 6, "6 clients killed with -9 (6 reservations at once)"),
        ("herd", 8, "8 clients, 24 pages: 1 writes and 1 disk reads a page"),
        ("hostile", 3, "0 had an effect"),
        ("frames", 10_000, "0 did harm"),
        ("cuts", 20, "0 faults"),
        ("crowd", 1000, "0 faults"),
    ],
)
def test_a_drill_holds(tmp_path: Path, name: str, count: int, said: str) -> None:
    if name == "hostile":
        pytest.importorskip("cryptography")
    command = [sys.executable, str(SCRIPT), name, "--count", str(count)]
    command += ["--directory", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    [line] = done.stdout.splitlines()
    assert said in line
    assert line.endswith(": ok")
