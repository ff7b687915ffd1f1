"""The code in docs/ runs as it stands there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run_block(page: str, tmp_path: Path) -> str:
    """The page's first Python block, in a process and a directory of its own."""
    text = (ROOT / page).read_text()
    code = re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0]
    code = code.replace("/tmp/my-kv-store", str(tmp_path / "store"))  # noqa: S108 # what the page says
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    return done.stdout


def test_the_library_page_runs_and_hits_again_in_a_second_process(tmp_path: Path) -> None:
    first = run_block("docs/library.md", tmp_path)
    assert "Commit(pages=6, durable=True, reason='')" in first
    assert "96 tokens, 6 pages, [65536, 65536, 65536, 65536, 65536, 65536]" in first
    second = run_block("docs/library.md", tmp_path)
    assert "Commit" not in second
    assert "96 tokens, 6 pages" in second


def test_the_ten_lines_of_the_readme_run(tmp_path: Path) -> None:
    assert "Commit(pages=6, durable=True, reason='')" in run_block("README.md", tmp_path)
    assert "all there\n6 pages in memory" in run_block("README.md", tmp_path)
