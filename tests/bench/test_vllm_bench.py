"""bench/vllm.py runs, tiny, where there is a vLLM; elsewhere it says so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench" / "vllm.py"
KEYS = (
    *("vllm_warm_over_cold", "vllm_warm_over_apc"),
    *("vllm_miss_throughput_ratio", "vllm_miss_cpu_ratio", "vllm_chat_over_none"),
    *("vllm_miss_two_engines_throughput_ratio", "vllm_miss_two_engines_cpu_ratio"),
)


def run(directory: Path, environment: dict[str, str], *options: str) -> tuple[str, str]:
    """The one line and what was said beside it."""
    command = [sys.executable, str(BENCH), "--json", "--tiny", "--dir", str(directory), *options]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


@pytest.mark.slow
@pytest.mark.skipif((BENCH.parents[1] / ".venv-vllm").exists(), reason="there is a vLLM")
def test_without_vllm_the_bench_says_so_and_gives_no_number(tmp_path: Path) -> None:
    without = {name: v for name, v in os.environ.items() if name != "TEST_VLLM_PYTHON"}
    line, said = run(tmp_path, without)
    assert "NO VLLM" in said
    assert json.loads(line)["skipped"] == "no vLLM"
    assert not set(KEYS) & set(json.loads(line))


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not os.environ.get("TEST_VLLM_PYTHON"), reason="NO VLLM: make test-vllm")
def test_vllm_bench_prints_one_line_with_its_rows(tmp_path: Path) -> None:
    more = ["--model", os.environ["TEST_VLLM_MODEL"]] if "TEST_VLLM_MODEL" in os.environ else []
    line, _ = run(tmp_path, dict(os.environ), *more)
    results = json.loads(line)
    assert all(results[key] > 0 for key in KEYS)
    assert set(KEYS) <= set(results["spread"])
    assert list(tmp_path.iterdir()) == [], "it cleans up"
