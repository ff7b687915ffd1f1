"""bench/peers.py runs, tiny, with the peers of the test environment; a peer that lies is caught."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"
OURS = ((1.0, 1.0, 1.0), (1.0, 1.0, 1.0))
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


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Its modules by name; they import each other as scripts do."""
    monkeypatch.syspath_prepend(str(BENCH))
    return lambda name: importlib.import_module(name)


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
    readme = tmp_path / "README.md"
    readme.write_text((BENCH.parent / "README.md").read_text())
    command += ["--readme", str(readme)]
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
    assert "Mooncake over TCP: there is no Python at /nowhere/python" in readme.read_text()
    assert readme.read_text() != (BENCH.parent / "README.md").read_text()
    picture = (tmp_path / "peers.svg").read_text()
    assert "prefers-color-scheme:dark" in picture
    assert ElementTree.fromstring(picture).tag.endswith("svg")  # noqa: S314 # our own text


@pytest.mark.parametrize(("flip", "says"), [("0", "{'store'"), ("1", "page 1 of run 1 has other")])
def test_a_peer_that_gives_back_other_bytes_is_caught(flip: str, says: str) -> None:
    command = [sys.executable, "-c", LIAR, str(BENCH / "peers"), flip]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert says in done.stdout + done.stderr
    assert done.returncode == int(flip)


def figures(bench: Any, name: str, what: str, ratios: tuple[tuple[float, ...], ...]) -> list[Any]:
    """Results of one peer at growing sizes: (median, low, high) seconds where ours takes 1."""
    ratio = bench("paired").PairedRatio
    sizes = (8 << 10, 32 << 10) if what == "match" else (1 << 20, 2 << 20)
    return [
        bench("peers_report").Result(name, what, size, ratio(*each[:1] * 3, 5), ratio(*each, 5))
        for size, each in zip(sizes, ratios, strict=True)
    ]


@pytest.mark.parametrize(
    ("ratios", "says"),
    [
        (((2.0, 1.5, 2.5), (4.0, 3.0, 5.0)), "Loads: ahead of Redis/Valkey over TCP (2 to 4)."),
        (((0.5, 0.4, 0.6), (0.8, 0.7, 0.9)), "**behind** Redis/Valkey over TCP (0.5 to 0.8)."),
        (((0.5, 0.4, 0.6), (2.0, 1.5, 2.5)), "ahead or **behind**, by size: Redis"),
        (((0.5, 0.4, 0.6), (0.9, 0.7, 1.1)), "**behind**, or not told apart from, Redis"),
        (((1.0, 0.8, 1.2), (1.1, 0.9, 1.3)), "Loads: not told apart from Redis"),
    ],
)
def test_the_summary_says_ahead_only_of_whom_ours_is_ahead(
    bench: Any, ratios: tuple[tuple[float, ...], ...], says: str
) -> None:
    found = figures(bench, "redis-tcp", "load", ratios)
    found += figures(bench, "kvstore-attached", "load", OURS)
    said = bench("peers_summary").summary(found, {}, "here", "all sizes")
    assert says in " ".join(said.split())
    assert "Not measured" not in said


def test_the_summary_tells_slower_ways_to_ask_ours_and_who_is_missing(bench: Any) -> None:
    found = figures(bench, "sglang-tree", "match", ((4.0, 3.0, 5.0), (6.0, 5.0, 7.0)))
    found += figures(bench, "kvstore-array", "match", OURS)
    found += figures(bench, "kvstore-list", "match", ((3.0, 3.0, 3.0), (9.0, 9.0, 9.0)))
    said = bench("peers_summary").summary(found, {"mooncake-tcp": "no wheel"}, "here", "all sizes")
    said = " ".join(said.split())
    assert "array of tokens: ahead of SGLang's radix tree (4 to 6)." in said
    assert "ints is **behind** SGLang's radix tree given an array (0.67 at 32 Ki tokens)." in said
    assert "session.match" not in said, "it was not measured"
    assert "- Not measured: Mooncake over TCP: no wheel" in said


def test_the_readme_says_of_peers_what_their_page_says(bench: Any) -> None:
    block = bench("readme_block")
    said = block.block_of((BENCH.parent / "README.md").read_text(), "peers.md")
    assert said == block.short_of((BENCH.parent / "docs" / "peers.md").read_text())
    assert len(said) > 500


def test_a_run_replaces_what_stands_between_the_marks_and_nothing_else(
    bench: Any, tmp_path: Path
) -> None:
    block, page = bench("readme_block"), tmp_path / "README.md"
    other = f"{block.begin('other.md')}\nother\n{block.END}"
    page.write_text(f"before\n{other}\n{block.begin('a.md')}\nold\n{block.END}\nafter\n")
    block.put_into(page, "a.md", "new\nlines")
    wanted = f"before\n{other}\n{block.begin('a.md')}\nnew\nlines\n{block.END}\nafter\n"
    assert page.read_text() == wanted
    assert block.block_of(wanted, "a.md") == "new\nlines"
    page.write_text("no marks\n")
    block.put_into(page, "a.md", "new")
    assert page.read_text() == "no marks\n"
