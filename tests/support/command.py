"""The command `kvstore` as a process of its own, and the shapes of what it prints."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any


def run(*arguments: str, code: int = 0, stdin: bytes = b"", **variables: str) -> str:
    """Its stdout; its stderr where another exit code is expected."""
    done = subprocess.run(
        [sys.executable, "-m", "kvstore.cli", *arguments],
        capture_output=True,
        input=stdin,
        timeout=90,
        env=os.environ | variables,
    )
    said = done.stdout.decode(errors="replace") + done.stderr.decode(errors="replace")
    assert done.returncode == code, said
    return (done.stdout if code == 0 else done.stderr).decode(errors="replace")


def run_json(*arguments: str, code: int = 0) -> Any:
    """The one document that --json prints on stdout, whatever the exit code."""
    done = subprocess.run(
        [sys.executable, "-m", "kvstore.cli", *arguments, "--json"],
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode == code, done.stdout + done.stderr
    [line] = done.stdout.splitlines()
    return json.loads(line)


def shape(document: Any) -> Any:
    """Types instead of values; of a list, its first item's: to be compared with a schema."""
    if isinstance(document, dict):
        return {key: shape(value) for key, value in document.items()}
    if isinstance(document, list):
        return [shape(document[0])] if document else []
    return type(document).__name__
