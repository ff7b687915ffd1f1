"""How the command begins and ends: little to import, Ctrl-C at any moment, errors as documents."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from command import run

from kvstore import Store, cli_simulate
from kvstore.cli_writes import WRITE_POLICIES
from kvstore.tiers.admission import ADMISSIONS
from kvstore.tiers.policies import EVEN_TOKENS, OBJECTIVES, POLICIES

if TYPE_CHECKING:
    from pathlib import Path

# Takes the place of a library: says that it is being imported, and goes on with that for long.
ENDLESS_IMPORT = """
import sys, time
sys.stdout.write("importing\\n")
sys.stdout.flush()
time.sleep(60)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("library", "command"),
    [("typer", "--version"), ("lmdb", "ls"), ("rich", "ls"), ("rich", "demo")],
)
def test_ctrl_c_while_it_imports_says_nothing(tmp_path: Path, library: str, command: str) -> None:
    """It was a stack of forty lines, of whatever was being imported just then."""
    libraries, directory = tmp_path / "libraries", tmp_path / "store"
    libraries.mkdir()
    (libraries / f"{library}.py").write_text(ENDLESS_IMPORT)
    with Store.open(directory, host_bytes="4MiB", disk_bytes="64MiB"):
        pass
    with subprocess.Popen(
        [sys.executable, "-m", "kvstore.cli", command, str(directory)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(libraries)},
        start_new_session=True,
    ) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        assert running.stdout.readline() == b"importing\n"
        os.killpg(running.pid, signal.SIGINT)  # as a terminal does: to its children too
        assert running.stderr.read().strip() == b""
    assert running.returncode == 130


@pytest.mark.slow
def test_help_loads_no_library_but_typer() -> None:
    """`kvstore --version` took a second on a busy machine, nearly all of it for what it had no use
    for."""
    script = "import sys, kvstore.cli_commands\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    loaded = {name.split(".")[0] for name in done.stdout.split()}
    assert "typer" in loaded, done.stderr
    assert not loaded & {"numpy", "pydantic", "rich", "lmdb", "xxhash", "grpc", "ssl", "torch"}
    script = "import sys, kvstore.cli\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "typer" not in done.stdout.split(), "Ctrl-C is settled before that"


def test_the_help_of_simulate_names_what_there_is() -> None:
    assert ", ".join(POLICIES) == cli_simulate.POLICIES
    assert ", ".join(OBJECTIVES) == cli_simulate.OBJECTIVES
    assert ", ".join(ADMISSIONS) == cli_simulate.ADMISSIONS
    assert ", ".join(WRITE_POLICIES) == cli_simulate.WRITE_POLICIES
    assert cli_simulate.EVEN_TOKENS == EVEN_TOKENS


@pytest.mark.slow
def test_with_json_a_failure_is_a_document_too(tmp_path: Path) -> None:
    """And the sentence stays on stderr."""
    missing = str(tmp_path / "missing")
    for given, code, why in (
        (["ls", missing], 1, f"{missing}: there is no such directory"),
        (["ls", missing, "--limit", "0"], 2, "Invalid value for '--limit'"),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "kvstore.cli", *given, "--json"], capture_output=True, text=True
        )
        document = json.loads(done.stdout)
        assert (done.returncode, document["exit_code"]) == (code, code)
        assert why in document["error"]
        assert why in done.stderr
    assert run("ls", missing, code=1) == f"kvstore: {missing}: there is no such directory\n"
