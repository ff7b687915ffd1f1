"""Every kernel compiles for sm_80, sm_90, sm_100 and gfx942, on a machine without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("compile_ahead.py")
TARGETS = ["cuda 80", "cuda 90", "cuda 100", "hip gfx942"]
KERNELS = 32  # with their variants
LIMIT_S = 1200  # of one target: about 14 s of CPU, and minutes where many others want it
REGISTERS_MAX = {"cuda": 255, "hip": 512}
SHARED_BYTES_MAX = 48 << 10


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize("target", TARGETS)
def test_every_kernel_compiles_for_every_target(tmp_path: Path, target: str) -> None:
    """Prints registers and shared memory (see them with -s)."""
    pytest.importorskip("triton", reason="the extra `triton` is not installed")
    done = subprocess.run(
        [sys.executable, str(SCRIPT), target],
        capture_output=True,
        text=True,
        env=os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)},
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    sys.stdout.write(done.stdout)
    assert {line["target"] for line in lines} == {target}
    assert len(lines) == KERNELS
    failed = [line for line in lines if "error" in line]
    assert not failed, "\n".join(f"{x['target']}: {x['kernel']}: {x['error']}" for x in failed)
    for line in lines:
        assert 0 < line["registers"] <= REGISTERS_MAX[line["target"].split()[0]], line
        assert line["shared_bytes"] <= SHARED_BYTES_MAX, line
        if line["kernel"].startswith(("gather h", "gather n", "gather w", "scatter")):
            assert line["wide"], f"no 16-byte accesses: {line}"
