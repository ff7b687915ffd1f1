"""The drills of servers that share a Redis, tiny, but for what is timed; see redis_drills.py."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent / "redis_drills.py"


@pytest.mark.slow
def test_two_servers_share_pages_and_lose_nothing_with_their_redis(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--json", "--pairs", "2", "--samples", "40"]
    done = subprocess.run(
        [*command, "--directory", str(tmp_path)], capture_output=True, text=True, timeout=110
    )
    assert done.stdout, done.stderr
    found = json.loads(done.stdout)
    assert found["pages_loaded"] == found["pages_stored"] == found["pages_after_restart"] > 0
    assert found["pages_through_redis"] > 0
    assert found["same_answer"] is not False
    assert found["wrong_hits"] == found["local_pages_missing"] == 0
    assert found["pages_meanwhile_lost_here"] == 0
