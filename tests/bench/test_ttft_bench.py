"""bench/ttft.py: its rows come from where they say, and its page and drawing are whole."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"
MODELLESS = BENCH.parent / "tests" / "support" / "modelless_engine.py"
SAID = {"machine": "a machine & more", "date": "2026-11-30", "prompts": 5}
KINDS = ("cold", "disk", "host", "own")


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Its modules by name; they import each other as scripts do."""
    monkeypatch.syspath_prepend(str(BENCH))
    return lambda name: importlib.import_module(name)


def points(bench: Any) -> list[Any]:
    point = bench("ttft_report").Point
    return [
        point(256, dict(zip(KINDS, (0.4, 0.3, 0.2, 0.2), strict=True))),
        point(3000, dict(zip(KINDS, (4.0, 0.5, 0.4, 0.4), strict=True))),
    ]


def test_the_short_form_has_seconds_and_shares_of_computing(bench: Any) -> None:
    said = bench("ttft_report").short(points(bench), **SAID)
    assert "| | 256 tokens | 3,000 tokens |" in said
    assert "| computed | 0.40 | 4.00 |" in said
    assert "| kvstore, from disk after kill -9 | 0.30 (0.75) | 0.50 (0.12) |" in said
    assert "median of 5 prompts" in " ".join(said.split())


def test_the_drawing_is_well_formed_and_fits_light_and_dark_pages(bench: Any) -> None:
    text = bench("ttft_report").drawing(points(bench), **SAID)
    drawn = ET.fromstring(text)  # noqa: S314 - our own
    paths = [each for each in drawn.iter() if each.tag.endswith("path")]
    assert [each.attrib["class"] for each in paths] == [f"line {kind}" for kind in KINDS]
    assert len([each for each in drawn.iter() if each.tag.endswith("circle")]) == 4 + 2 * 4
    assert paths[0].attrib["d"].endswith("L700.0 74.0"), "the slowest is at the top right"
    assert "prefers-color-scheme:dark" in text
    assert "a machine &amp; more" in text
    assert "script" not in text


def test_the_readme_says_of_lengths_what_their_page_says(bench: Any) -> None:
    block, page = bench("readme_block"), BENCH.parent / "docs" / "ttft.md"
    said = block.block_of((BENCH.parent / "README.md").read_text(), "ttft.md")
    short = block.short_of(page.read_text()) if page.exists() else ""
    assert said == (f"{bench('ttft').PICTURE}\n\n{short}" if short else "")


def run(tmp_path: Path, python: str, model: Path) -> dict[str, Any]:
    """A tiny run's line, with its page in `tmp_path`."""
    stores = tmp_path / "stores"
    stores.mkdir()
    command = [sys.executable, str(BENCH / "ttft.py"), "--json", "--tiny", "--dir", str(stores)]
    command += ["--python", python, "--model", str(model), "--write", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert list(stores.iterdir()) == [], "it cleans up"
    found: dict[str, Any] = json.loads(done.stdout)["ttft_s"]
    assert ET.parse(tmp_path / "ttft.svg").getroot().tag.endswith("svg")  # noqa: S314 - our own
    assert "| computed | " in (tmp_path / "ttft.md").read_text()
    return found


@pytest.mark.slow
def test_pages_come_from_disk_memory_and_the_own_cache_without_any_model(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{MODELLESS}" "$@"\n')
    python.chmod(0o755)
    found = run(tmp_path, str(python), tmp_path)
    assert {length: set(each) for length, each in found.items()} == {
        "256": set(KINDS),
        "300": set(KINDS),
    }


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not os.environ.get("TEST_VLLM_PYTHON"), reason="NO VLLM: make test-vllm")
def test_real_engines_give_the_same_answer_from_each_place(tmp_path: Path) -> None:
    named = os.environ.get("TEST_VLLM_MODEL")
    model = Path(named) if named else BENCH.parent / ".demo" / "model"
    found = run(tmp_path, os.environ["TEST_VLLM_PYTHON"], model)
    assert all(seconds > 0 for each in found.values() for seconds in each.values())
