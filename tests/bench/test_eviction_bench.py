"""The benches of eviction, tiny: every comparator runs, and none passes the bound."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from small_trace import records

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.fixture
def trace(tmp_path):
    file = tmp_path / "t.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in records(1, 300)))
    return file


def bench(name, *arguments):
    command = [sys.executable, str(BENCH / name), *map(str, arguments), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)
    return json.loads(done.stdout)


@pytest.mark.slow
def test_every_policy_lies_between_nothing_and_the_bound(trace):
    found = bench("eviction.py", trace, "--capacity", "60,200")["block"]
    assert len(found) == 14
    for name, ratios in found.items():
        assert 0.2 < ratios[0] <= found["belady"][0], name
        assert ratios[0] <= ratios[1] + 0.01, name


@pytest.mark.slow
def test_the_real_store_hits_what_the_simulator_says(trace):
    found = bench("eviction_store.py", trace, "--memory", "--capacity", "200", "--policy", "lru")[
        "results"
    ]["lru"]
    assert abs(found["off"]) <= 0.005
    assert found["evicted"] > 100
