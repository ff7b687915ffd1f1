"""What an engine process leaves in shared memory is found, so that its user can remove it."""

from __future__ import annotations

import subprocess
import sys
import uuid
from typing import TYPE_CHECKING

import pytest

from kvstore.engine_adapter.demo_vllm_engine import SHARED_MEMORY, shared_files

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MAP = """
import mmap, sys
maps = []
for name in sys.argv[1:]:
    with open(name, "w+b") as file:
        file.truncate(4096)
        maps.append(mmap.mmap(file.fileno(), 4096))
print("mapped", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def names() -> Iterator[list[Path]]:
    ident = uuid.uuid4().hex
    made = [f"psm_{ident}", f"sem.mp-{ident}", f"vllm_dist_{ident}-tp:0-[0-1-2]-cpushm_0", ident]
    paths = [SHARED_MEMORY / name for name in made]
    yield paths
    for path in paths:
        path.unlink(missing_ok=True)


@pytest.mark.slow
def test_files_that_an_engine_maps_are_its_own_and_others_are_not(names: list[Path]) -> None:
    command = [sys.executable, "-c", MAP, *map(str, names)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "mapped\n"
        found = shared_files(process.pid)
        assert found - {each for each in found if each.parent != SHARED_MEMORY} == set(names[:3])
        meeting = names[2].name.partition("-")[0]
        assert [each.name for each in found if each.parent != SHARED_MEMORY] == [meeting]
        assert not shared_files(1) & set(names), "another session"
        process.communicate("")
    assert not shared_files(process.pid)
