"""Our wheel goes into vLLM's environment without changing anything that is there."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from vllm_engines import PYTHON, ROOT, needs_vllm

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    *(pytest.mark.slow, pytest.mark.vllm, pytest.mark.vllm_quick),
    *(needs_vllm, pytest.mark.timeout(300)),
]

OURS = "kvstore-llm"


def pip(python: str, *arguments: str) -> Any:
    command = [python, "-m", "pip", "--disable-pip-version-check", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def build(folder: Path) -> Path:
    """The wheel of a copy: building leaves files beside the sources."""
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-z"], check=True, capture_output=True, text=True
    )
    for name in filter(None, listed.stdout.split("\0")):
        place = folder / "sources" / name
        place.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_symlink():
            place.symlink_to((ROOT / name).readlink())
        elif (ROOT / name).is_file():
            place.write_bytes((ROOT / name).read_bytes())
    wheels = ["--no-deps", "--no-build-isolation", "--wheel-dir", str(folder)]
    pip(sys.executable, "wheel", *wheels, str(folder / "sources"))
    [wheel] = folder.glob("*.whl")
    return wheel


def test_the_wheel_changes_no_package_of_vllms_environment(tmp_path: Path) -> None:
    wheel = build(tmp_path)
    there = {each["name"].lower() for each in json.loads(pip(PYTHON, "list", "--format=json"))}
    report = json.loads(pip(PYTHON, "install", "--dry-run", "--quiet", "--report=-", str(wheel)))
    new = {each["metadata"]["name"].lower() for each in report["install"]}
    assert OURS in new | there
    assert "vllm" in {name.split("-")[0] for name in there}
    assert not new & there - {OURS}, "packages that vLLM's environment has would change"
