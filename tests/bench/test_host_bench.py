"""bench/host.py runs, tiny, so that it cannot rot; the statistics of paired.py are right."""

from __future__ import annotations

import importlib.util
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.mark.slow
def test_host_bench_prints_one_line_with_its_rows() -> None:
    command = [sys.executable, str(BENCH / "host.py"), "--tiny", "--json", "--seed", "7"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    [line] = done.stdout.splitlines()
    results = json.loads(line)
    assert results["seed"] == 7
    assert results["host_load_ratio"] > 0
    assert results["host_store_ratio"] > 0
    assert {"machine", "date", "spread"} <= results.keys()


@pytest.fixture(scope="module")
def paired() -> Any:
    spec = importlib.util.spec_from_file_location("bench_paired", BENCH / "paired.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_paired_ratio_is_the_median_of_ratios_with_ranks_of_the_binomial(paired: Any) -> None:
    """For 10 samples the 90 % interval of a median is from the 2nd to the 9th; from any table."""
    ratio = paired.paired_ratio([float(i) for i in range(1, 11)], [1.0] * 10)
    assert (ratio.median, ratio.low, ratio.high, ratio.pairs) == (5.5, 2.0, 9.0, 10)
    ratio = paired.paired_ratio([float(i) for i in range(1, 16)], [2.0] * 15)
    assert (ratio.median, ratio.low, ratio.high) == (4.0, 2.0, 6.0)


def test_paired_interval_covers_the_true_median_at_least_nine_times_in_ten(paired: Any) -> None:
    rng, covered = random.Random(1), 0
    for _ in range(1000):
        ratio = paired.paired_ratio([rng.lognormvariate(0, 1) for _ in range(12)], [1.0] * 12)
        covered += ratio.low <= 1.0 <= ratio.high
    assert covered >= 900


def test_verdict_says_when_the_interval_spans_the_budget(paired: Any) -> None:
    ratio = paired.PairedRatio(median=0.85, low=0.7, high=0.9, pairs=10)
    assert ratio.verdict(0.8, at_least=True).startswith("not resolved")
    assert ratio.verdict(0.6, at_least=True) == "kept"
    assert ratio.verdict(0.95, at_least=True) == "MISSED"
    assert ratio.verdict(0.95, at_least=False) == "kept"
