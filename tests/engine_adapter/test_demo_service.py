"""The service demo with a tiny model: three real engines, a real server, a real kill -9."""

from __future__ import annotations

import argparse
import io
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console
from tiny_model import tiny_model

from kvstore.engine_adapter.demo_service import Demo, main

if TYPE_CHECKING:
    from pathlib import Path


def finished(**changes: Any) -> list[str]:
    """What a demo says whose last answer went like this."""
    demo = Demo(Console(file=io.StringIO()), argparse.Namespace())
    plain: dict[str, Any] = {
        "engine": "engine 1",
        "run": "server is back",
        "ttft_s": 0.1,
        "tiers": {"disk": 3},
        "answer": [1, 2],
        "reused_tokens": 48,
        "wants_reuse": True,
        "failed": 0,
    }
    demo.results = [plain, plain | changes]
    assert demo.table().row_count == 2
    return demo.problems()


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"answer": [1, 3]}, "the answer differs"),
        ({"reused_tokens": 0}, "nothing was reused"),
        ({"wants_reuse": False}, "reused what nobody can have had"),
        ({"failed": 1}, "an exception reached the adapter"),
    ],
)
def test_an_answer_that_breaks_the_promise_fails(changes: dict[str, Any], problem: str) -> None:
    assert finished(**changes) == [f"engine 1, server is back: {problem}"]
    assert finished() == []


def test_a_model_that_is_none_is_wrong_usage(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--model", str(tmp_path)])
    assert ended.value.code == 2


@pytest.mark.slow
@pytest.mark.model
def test_three_engines_share_a_server_that_is_late_and_gets_killed(tmp_path: Path) -> None:
    tiny_model(tmp_path / "tiny")
    command = [sys.executable, "-m", "kvstore.engine_adapter.demo_service", "--model", "tiny"]
    done = subprocess.run(
        [*command, "--server-after", "0", "--prompt-tokens", "3000"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "kill -9" in done.stdout
    assert "no engine restarted" in done.stdout
    assert not list(tmp_path.glob("kvstore-demo-*")), "it leaves nothing behind"
