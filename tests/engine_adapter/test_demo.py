"""The demo from end to end with a tiny model: real processes, a real kill -9, real exit codes."""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import pytest
from rich.console import Console
from tiny_model import tiny_model

from kvstore.engine_adapter.demo import AFTER_KILL, AGAIN, COLD, Demo, conclude, main
from kvstore.engine_adapter.demo_report import Row, results_svg, results_table

if TYPE_CHECKING:
    from pathlib import Path

SVG = "{http://www.w3.org/2000/svg}"
ROWS = [
    Row(COLD, 8.0, 0, 3000, "", None),
    Row(AGAIN, 0.25, 2976, 3000, "host", True),
    Row(AFTER_KILL, 0.4, 2976, 3000, "disk", True),
]


def result(run: str, **changes: Any) -> dict[str, Any]:
    plain: dict[str, Any] = {
        "run": run,
        "ttft_s": 8.0 if run == COLD else 0.4,
        "reused_tokens": 0 if run == COLD else 2976,
        "prompt_tokens": 3000,
        "tiers": {COLD: {}, AGAIN: {"host": 93}, AFTER_KILL: {"disk": 93}}[run],
        "answer": [5, 6, 7],
    }
    return plain | changes


def finished(tmp_path: Path, **after_kill: Any) -> tuple[int, str]:
    """Exit code and output of a demo whose last run went like this."""
    options = argparse.Namespace(dir=tmp_path / "store", model=None, svg=tmp_path / "demo.svg")
    console = Console(record=True, width=120, file=io.StringIO())
    demo = Demo(console, options)
    demo.chain = "ab" * 16
    demo.results = [result(COLD), result(AGAIN), result(AFTER_KILL, **after_kill)]
    code = conclude(demo)
    return code, console.export_text()


def test_a_good_run_ends_with_the_gain_and_three_commands(tmp_path: Path) -> None:
    code, text = finished(tmp_path)
    assert code == 0
    assert "20.0 x faster, 7.6 s of prefill saved" in text
    for command in ("kvstore ls ", "kvstore inspect ", "kvstore explain "):
        assert command in text
    assert (tmp_path / "demo.svg").exists()


@pytest.mark.parametrize(
    ("after_kill", "problem"),
    [
        ({"answer": [5, 6, 8]}, "the answer differs"),
        ({"reused_tokens": 0, "tiers": {}}, "nothing was reused"),
        ({"tiers": {"host": 93}}, "pages came from host"),
    ],
)
def test_a_run_that_breaks_the_promise_fails_and_says_how(
    tmp_path: Path, after_kill: dict[str, Any], problem: str
) -> None:
    code, text = finished(tmp_path, **after_kill)
    assert code == 1
    assert f"FAILED {AFTER_KILL}: {problem}" in text
    assert not (tmp_path / "demo.svg").exists()


def test_the_table_has_a_line_a_run() -> None:
    console = Console(record=True, width=120, file=io.StringIO())
    console.print(results_table(ROWS))
    text = console.export_text()
    lines = [line for line in text.splitlines() if " s " in line]
    assert len(lines) == 3
    assert "disk" in lines[2]
    assert "24" in lines[2]
    assert "yes" in lines[2]


def test_the_picture_is_sound_svg_with_bars_in_proportion() -> None:
    root = ElementTree.fromstring(results_svg(ROWS, "a <model> & more"))  # noqa: S314 - our own
    bars = [float(bar.attrib["width"]) for bar in root.iter(f"{SVG}rect")]
    assert len(bars) == 3
    assert bars[1] / bars[0] == pytest.approx(0.25 / 8, rel=0.01)
    texts = [each.text or "" for each in root.iter(f"{SVG}text")]
    assert "Time to first token of a <model> & more, 3,000-token prompt" in texts
    assert any("32 x faster" in text for text in texts)
    style = root.find(f"{SVG}style")
    assert style is not None
    assert "prefers-color-scheme:dark" in (style.text or "")


def test_a_model_that_is_no_directory_of_a_model_is_wrong_usage(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--model", str(tmp_path)])
    assert ended.value.code == 2


def run_demo(directory: Path, *more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvstore.engine_adapter.demo", *more]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=directory, env=environment
    )


@pytest.mark.slow
@pytest.mark.model
def test_the_demo_runs_with_any_model_its_commands_work_and_again_begins_cold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_model(tmp_path / "tiny")
    done = run_demo(tmp_path, "--model", "tiny", "--dir", "kept", "--svg", "docs/demo.svg")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "kill -9" in done.stdout
    assert "x faster" in done.stdout
    assert ElementTree.parse(tmp_path / "docs/demo.svg")  # noqa: S314 - our own
    tokens = json.loads((tmp_path / "kept-question-2.json").read_text())
    assert 2900 < len(tokens) <= 3000
    advice = done.stdout.partition("Try next:")[2].split()
    starts = [number for number, word in enumerate(advice) if word.endswith("kvstore")]
    assert len(starts) == 3
    for start, stop in zip(starts, [*starts[1:], len(advice)], strict=True):
        command = [sys.executable, "-m", "kvstore.cli", *advice[start + 1 : stop]]
        tried = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
        assert tried.returncode == 0, tried.stderr
    assert second_start(tmp_path, monkeypatch, forget=False) > 2700
    assert second_start(tmp_path, monkeypatch, forget=True) == 0


def second_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, forget: bool) -> int:
    """Tokens that the first answer of one more worker on the same directory reuses."""
    from kvstore.engine_adapter.demo_worker import Task, work

    said: list[dict[str, Any]] = []
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    task = Task(
        model=str(tmp_path / "tiny"),
        name="tiny",
        directory=str(tmp_path / "kept"),
        dtype="float32",
        runs=[COLD],
        prompt_file=str(tmp_path / "prompt.json"),
        forget=forget,
    )
    work(task, lambda event, **values: said.append({"event": event} | values))
    return next(int(each["reused_tokens"]) for each in said if each["event"] == "done")


@pytest.mark.slow
@pytest.mark.model
def test_a_model_that_cannot_be_served_ends_the_demo_with_its_sentence(tmp_path: Path) -> None:
    tiny_model(tmp_path / "tiny")
    config = tmp_path / "tiny/config.json"
    changed = json.loads(config.read_text()) | {"rope_parameters": None}
    changed["rope_parameters"] = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    config.write_text(json.dumps(changed))
    done = run_demo(tmp_path, "--model", "tiny")
    assert done.returncode == 1
    assert "dynamic RoPE" in done.stdout
