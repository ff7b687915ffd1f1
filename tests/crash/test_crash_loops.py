"""A few cycles of the crash loops, and proof that they can see: see kill_loop.py, power_cut.py."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent


def run(script: str, *options: str) -> tuple[int, dict[str, Any], str]:
    """Exit status, the JSON summary, and what was said on the way."""
    command = [sys.executable, str(HERE / script), "--json", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    lines = done.stdout.splitlines()
    return done.returncode, json.loads(lines[-1]) if lines else {}, done.stderr


def expect_good(script: str, *options: str) -> dict[str, Any]:
    status, summary, errors = run(script, *options)
    assert status == 0, errors
    bad = {name: summary[name] for name in ("wrong", "lost", "unsound", "revived", "errors")}
    assert not any(bad.values()), errors
    assert summary["acked_pages"] > 0
    assert summary["verified_pages"] > 0
    assert summary["audited_slots"] > 0
    return summary


@pytest.mark.slow
def test_kept_pages_survive_kill_9_and_no_page_is_wrong(tmp_path: Path) -> None:
    expect_good("kill_loop.py", "--cycles", "12", "--directory", str(tmp_path))


@pytest.mark.slow
def test_kept_pages_of_an_encrypted_store_survive_kill_9(tmp_path: Path) -> None:
    expect_good("kill_loop.py", "--encrypt", "--cycles", "8", "--directory", str(tmp_path))


@pytest.mark.slow
def test_the_encryption_drill_finds_no_prompt_and_no_page_of_a_deleted_key(tmp_path: Path) -> None:
    status, facts, errors = run(
        "encryption_drill.py", "--cycles", "2", "--directory", str(tmp_path)
    )
    assert status == 0, errors
    assert facts["markers_found"] == 0
    assert facts["pages_readable_after_key_deletion"] == 0
    assert facts["other_tenant_readable"] == facts["other_tenant_before"] > 0


@pytest.mark.slow
def test_kept_pages_are_in_what_a_power_cut_leaves(tmp_path: Path) -> None:
    options = ("--variant", "layer", "--directory", str(tmp_path))
    summary = expect_good("power_cut.py", "--cycles", "8", *options)
    assert summary["cycles"] == 8


@pytest.mark.slow
@pytest.mark.root
@pytest.mark.parametrize("variant", ["direct", "buffered"])
def test_kept_pages_survive_a_power_cut_of_ext4(tmp_path: Path, variant: str) -> None:
    options = ("--variant", variant, "--directory", str(tmp_path))
    status, summary, errors = run("power_cut.py", "--cycles", "6", *options)
    if "NO POWER CUTS" in errors:
        pytest.skip(errors.splitlines()[0].strip("* "))
    assert status == 0, errors
    assert summary["cycles"] == 6
    assert summary["acked_pages"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "mutant", "options"),
    [
        ("kill_loop.py", "overwrite-in-place", ()),
        ("kill_loop.py", "no-verify", ()),
        ("kill_loop.py", "failed-write-visible", ()),
        ("power_cut.py", "no-fdatasync", ("--variant", "layer")),
    ],
)
def test_the_loops_catch_a_store_that_lies(
    tmp_path: Path, script: str, mutant: str, options: tuple[str, ...]
) -> None:
    status, summary, errors = run(
        script, "--cycles", "60", "--mutate", mutant, "--directory", str(tmp_path), *options
    )
    assert status == 0, errors
    assert all(variant["caught"] for variant in summary["variants"])


def test_a_missing_sync_needs_a_power_cut_and_the_kill_loop_says_so(tmp_path: Path) -> None:
    status, _, errors = run(
        "kill_loop.py", "--mutate", "no-fdatasync", "--directory", str(tmp_path)
    )
    assert status == 2
    assert "power_cut.py" in errors
