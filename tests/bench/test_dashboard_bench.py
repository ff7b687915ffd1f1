"""bench/dashboard.py runs, tiny, so that it cannot rot."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from small_trace import records

ROOT = Path(__file__).resolve().parents[2]
CHROMIUM = any(map(shutil.which, ("chromium", "chromium-browser", "google-chrome")))
PICTURES = [
    f"dashboard-{size}-{scheme}.png"
    for size in ("desktop", "phone")
    for scheme in ("dark", "light")
]
PICTURE_BYTES_MAX = 300_000


@pytest.mark.slow
@pytest.mark.skipif(not CHROMIUM, reason="no pictures are taken: there is no Chromium")
def test_it_replays_a_trace_and_takes_four_pictures(tmp_path: Path) -> None:
    for package in ("playwright", "PIL"):
        pytest.importorskip(package, reason="no pictures are taken: pip install playwright pillow")
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(map(json.dumps, records(7, 60))))
    command = [sys.executable, str(ROOT / "bench" / "dashboard.py"), str(trace)]
    done = subprocess.run(
        [*command, "--seconds=1", "--disk-bytes=64MiB", "--pictures", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(file.name for file in tmp_path.glob("*.png")) == PICTURES
    assert done.stdout.count(" bytes\n") == 4


def test_the_pictures_of_the_docs_are_there_and_small() -> None:
    text = (ROOT / "docs" / "dashboard.md").read_text()
    for name in PICTURES:
        assert f"]({name})" in text
        picture = (ROOT / "docs" / name).read_bytes()
        assert picture.startswith(b"\x89PNG")
        assert len(picture) < PICTURE_BYTES_MAX, name
