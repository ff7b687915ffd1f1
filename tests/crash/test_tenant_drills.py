"""The drills of tenants, tiny; their figures count when they run alone, see tenant_drills.py."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent / "tenant_drills.py"


@pytest.mark.slow
def test_a_flood_takes_no_page_of_a_neighbour_and_probes_hit_only_their_own(
    tmp_path: Path,
) -> None:
    command = [sys.executable, str(SCRIPT), "--seconds", "2", "--count", "300", "--json"]
    done = subprocess.run(
        [*command, "--directory", str(tmp_path)], capture_output=True, text=True, timeout=100
    )
    found = json.loads(done.stdout)
    assert found["hit_rate"] >= 0.95, found
    assert found["flood_times_memory"] >= 10, found
    assert found["reads_during_flood"] > 20
    assert (found["hits_of_others"], found["hits_own"]) == (0, 100)
    assert 0.5 <= found["auc_of_others"] <= 1
