"""What the benches with vLLM engines have in common: its Python, stores that have settled."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstore.client import ServerUnavailable
from kvstore.connect import connect

if TYPE_CHECKING:
    import argparse

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / ".demo" / "model"
SETTLE_S_MAX = 120.0
STILL_S = 0.5
SPIN_S = 1.3  # an engine's workers keep a core busy for so long after a step


def without_store() -> dict[str, Any]:
    """A request that neither loads nor saves."""
    return {"kvstore": {"load": False, "store": False}}


def settle(store: Path | str) -> int:
    """Until all that was saved is on disk, and for a moment nothing more has come: its pages."""
    deadline, seen = time.monotonic() + SETTLE_S_MAX, (-1, 0.0)
    with connect(store, open_wait_s=0.0) as client:
        while time.monotonic() < deadline:
            with contextlib.suppress(ServerUnavailable):
                found = client.stats().to_dict()
                now = time.monotonic()
                if found["pages"] != seen[0] or found["dirty_bytes"] or not found["warm"]:
                    seen = found["pages"], now
                elif now - seen[1] > STILL_S and found["pages"]:
                    return int(found["pages"])
            time.sleep(0.1)
    return max(0, seen[0])


def find_python(options: argparse.Namespace) -> str:
    """The Python that has vLLM, made if need be; "" in a tiny run without one."""
    named = options.python or os.environ.get("TEST_VLLM_PYTHON", "")
    own = ROOT / ".venv-vllm" / "bin" / "python"
    if named or own.exists():
        return named or str(own)
    if options.tiny:
        return ""
    subprocess.run(["make", "-C", str(ROOT), "venv-vllm"], check=True, stdout=sys.stderr)
    return str(own)
