"""bench/kernels.py and bench/codecs.py run, tiny, so that they cannot rot."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"


def results_of(name: str) -> dict[str, object]:
    command = [sys.executable, str(BENCH / name), "--tiny", "--json", "--seed", "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    [line] = done.stdout.splitlines()
    results: dict[str, object] = json.loads(line)
    assert results["seed"] == 3
    assert {"machine", "date", "spread"} <= results.keys()
    return results


@pytest.mark.slow
def test_kernel_bench_prints_its_rows_and_says_whether_there_was_a_gpu() -> None:
    pytest.importorskip("torch", reason="the kernels move torch tensors")
    results = results_of("kernels.py")
    assert results["gather_cpu_ratio"] > 0  # type: ignore[operator]
    assert results["scatter_cpu_ratio"] > 0  # type: ignore[operator]
    assert (results["gpu"] == "none") == ("gather_gpu_ratio" not in results)


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.timeout(300)
def test_codec_bench_prints_a_row_for_each_codec() -> None:
    for module in ("torch", "transformers", "zstandard"):
        pytest.importorskip(module, reason="codecs are measured on a real model's KV")
    results = results_of("codecs.py")
    rows, nudged = results["codecs"], results["nudged"]
    assert isinstance(rows, dict)
    assert isinstance(nudged, dict)
    assert rows.keys() == {"raw", "lossless", "fp8", "int8", "int4"}
    for name in ("raw", "lossless"):
        assert rows[name]["bit_exact"]
        for dtype in ("float32", "bfloat16"):
            assert (rows[name][dtype]["kl_mean"], rows[name][dtype]["kl_added"]) == (0, 0)
            assert rows[name][dtype]["greedy_agreement"] == 1
    assert rows["int4"]["ratio"] > rows["int8"]["ratio"] > rows["lossless"]["ratio"] > 1.2
    small, large = (rows[name]["float32"]["kl_mean"] for name in ("int8", "int4"))
    assert 0 < nudged["float32"]["kl_mean"] < small < large < 0.2
    assert 0 < rows["int8"]["bfloat16"]["kl_mean"] < 0.2
    assert results["int8_kl"] == small
    assert results["int8_kl_bf16"] == rows["int8"]["bfloat16"]["kl_mean"]
    assert 0 < results["nudged_kl_bf16"] < 0.2  # type: ignore[operator]
    verdicts = results["verdicts"]
    assert isinstance(verdicts, list)
    assert len(verdicts) == 8
    words = (": kept", ": MISSED", ": not resolved, take more prompts")
    assert all(line.endswith(words) for line in verdicts)
