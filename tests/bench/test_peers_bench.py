"""bench/peers.py runs, tiny, with the peers of the test environment; a peer that lies is caught."""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"
LIAR = """
import sys
sys.path.insert(0, sys.argv[1])
from contract import PagePeer
from worker import Worker

class Liar(PagePeer):
    def open(self, *arguments): pass
    def store(self, run, pages): self.kept = pages.copy()
    def load(self, run, targets):
        targets[:] = self.kept
        targets[1, 77] ^= int(sys.argv[2])
        return [row.data for row in targets]
    def remove(self, run, count): pass
    def close(self): pass

print(Worker(Liar(), 0, 1 << 16).pages(1, 1 << 14))
"""


@pytest.mark.slow
def test_peers_bench_measures_who_is_here_and_says_who_is_not(tmp_path: Path) -> None:
    command = [
        sys.executable,
        str(BENCH / "peers.py"),
        "--tiny",
        "--json",
        "--write",
        str(tmp_path),
    ]
    command += ["--only", "redis,mooncake", "--python", f"redis={sys.executable}"]
    command += ["--python", "mooncake=/nowhere/python"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    [line] = done.stdout.splitlines()
    found = json.loads(line)
    measured = {(row["peer"], row["what"]) for row in found["results"]}
    for name in ("kvstore-attached", "kvstore-embedded", "redis-tcp", "redis-unix"):
        assert {(name, "store"), (name, "load")} <= measured
    assert ("kvstore-session", "match") in measured
    assert all(row["seconds"] > 0 for row in found["results"])
    assert found["skipped"]["mooncake-tcp"] == "there is no Python at /nowhere/python"
    assert "SKIPPED mooncake-tcp: there is no Python at /nowhere/python" in done.stderr
    page = (tmp_path / "peers.md").read_text()
    assert "SKIPPED Mooncake, TCP (mooncake-tcp): there is no Python" in page
    picture = (tmp_path / "peers.svg").read_text()
    assert "prefers-color-scheme:dark" in picture
    assert ElementTree.fromstring(picture).tag.endswith("svg")  # noqa: S314 # our own text


@pytest.mark.parametrize(("flip", "says"), [("0", "{'store'"), ("1", "page 1 of run 1 has other")])
def test_a_peer_that_gives_back_other_bytes_is_caught(flip: str, says: str) -> None:
    command = [sys.executable, "-c", LIAR, str(BENCH / "peers"), flip]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert says in done.stdout + done.stderr
    assert done.returncode == int(flip)
