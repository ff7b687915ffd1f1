"""What commands say when they are given nothing, something that is not there, or a typo."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from command import run, run_json

if TYPE_CHECKING:
    from pathlib import Path

THREE_BLOCKS = """\
{"timestamp": 0, "input_length": 1024, "output_length": 1, "hash_ids": [1, 2]}
{"timestamp": 10, "input_length": 1024, "output_length": 1, "hash_ids": [1, 3]}
"""


@pytest.mark.slow
def test_simulate_has_sizes_for_a_trace_of_three_blocks(tmp_path: Path) -> None:
    """Its own default sizes, as 1 %, were refused as less than a block."""
    trace = tmp_path / "trace.jsonl"
    trace.write_text(THREE_BLOCKS)
    found = run_json("simulate", str(trace), "--policy", "lru")
    assert [each["capacity"] for each in found["results"]] == [1]
    said = run("simulate", str(trace), "--capacity", "2,1%", code=1)
    assert said == (
        "kvstore: --capacity: '1%' is less than one of the trace's 3 blocks; at least 34% is "
        "needed, or a number of blocks\n"
    )
    said = run("simulate", str(trace), "--disk", "3%", "--capacity", "1", code=1)
    assert "--disk: '3%' is less than one" in said


@pytest.mark.slow
def test_simulate_refuses_in_one_line(tmp_path: Path) -> None:
    """A blank line came first, from the bar that nobody sees."""
    said = run("simulate", str(tmp_path / "missing"), code=1)
    assert said == f"kvstore: trace {tmp_path}/missing: cannot be read: No such file or directory\n"
    empty = tmp_path / "empty"
    empty.touch()
    assert "no requests in it; `kvstore record`" in run("simulate", str(empty), code=1)


@pytest.mark.slow
def test_size_knows_what_is_missing_from_what_is_no_json(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing")
    said = run("size", missing, code=1)
    assert said.startswith(f"kvstore: {missing}: there is no such file or folder; give a model's")
    assert f"{tmp_path}: has no config.json" in run("size", str(tmp_path), code=1)
    (tmp_path / "config.json").write_text("{")
    assert "config.json: not JSON" in run("size", str(tmp_path), code=1)
    (tmp_path / "config.json").write_bytes(b"\xff\xfe")
    assert "config.json: is no text" in run("size", str(tmp_path), code=1)
