"""Help that a newcomer can use: sections, working examples, a word on every option, completion."""

from __future__ import annotations

import json
import os
import pty
import shlex
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from command import run
from known_pages import SPEC, prompt, save
from typer.main import get_command

from kvstore import Store
from kvstore.cli_commands import app
from kvstore.cli_help import EXAMPLES, SECTIONS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

COMMANDS: dict[str, Any] = get_command(app).commands  # type: ignore[attr-defined]
LINE_CHARS_MAX = 68  # what --help shows of a command in a terminal of 80 columns


def leaves() -> Iterator[tuple[str, Any]]:
    for name, command in COMMANDS.items():
        for inner, each in getattr(command, "commands", {}).items():
            yield f"{name} {inner}", each
        if not hasattr(command, "commands"):
            yield name, command


def test_every_command_stands_in_one_section_with_a_sentence_that_fits() -> None:
    placed = [name for names in SECTIONS.values() for name in names]
    assert sorted(placed) == sorted(COMMANDS)
    for name, command in COMMANDS.items():
        said = command.get_short_help_str(LINE_CHARS_MAX)
        assert not said.endswith("..."), f"{name}: {said}"


def test_every_option_says_what_it_is() -> None:
    silent = [
        f"{name} {option.opts[0]}"
        for name, command in leaves()
        for option in command.params
        if not option.help
    ]
    assert silent == []


def test_a_flag_is_one_in_every_command() -> None:
    """Save in `serve`, where --no-NAME takes back what the TOML file says."""
    kinds: dict[str, set[tuple[bool, tuple[str, ...]]]] = {}
    for name, command in leaves():
        for each in command.params:
            if each.param_type_name == "option" and name != "serve":
                kind = bool(each.is_flag), tuple(each.secondary_opts)
                kinds.setdefault(each.opts[0], set()).add(kind)
    assert {option: found for option, found in kinds.items() if len(found) > 1} == {}
    negated = [option for option, found in kinds.items() for _, second in found if second]
    assert negated == ["--jsonl", "--all-tenants"], "others are plain flags"


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_parses(name: str) -> None:
    first, command, *given = shlex.split(EXAMPLES[name])
    assert (first, command) == ("kvstore", name)
    context = COMMANDS[name].make_context(name, given, resilient_parsing=False)
    assert context.params is not None


@pytest.mark.slow
def test_help_shows_sections_exit_codes_and_an_example() -> None:
    said = run("--help")
    assert [line for line in said.splitlines() if line.rstrip(":") in SECTIONS] == [
        f"{title}:" for title in SECTIONS
    ]
    assert "Exit codes: 0 done; 1 refused or failed" in said
    assert "Example:\n    kvstore evict /var/cache/kv --older-than 7d --yes" in run(
        "evict", "--help"
    )


@pytest.mark.slow
def test_the_shell_learns_commands_and_options() -> None:
    """Through the script that --show-completion prints, as bash would ask."""
    script = run("--show-completion", "bash", _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    assert "complete -o default" in script

    def completed(*words: str) -> list[str]:
        done = subprocess.run(
            [
                sys.executable,
                "-c",
                "from kvstore.cli import main; main()",
            ],
            capture_output=True,
            text=True,
            timeout=60,
            env=os.environ
            | {
                "_KVSTORE_COMPLETE": "complete_bash",
                "COMP_WORDS": " ".join(["kvstore", *words]),
                "COMP_CWORD": str(len(words)),
            },
        )
        return done.stdout.split()

    assert completed("ex") == ["explain", "export"]
    assert "--older-than" in completed("evict", "--ol")


def seen_in_a_terminal(*arguments: str, **variables: str) -> bytes:
    """What the command writes to a terminal."""
    main, side = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "kvstore.cli", *arguments],
        stdout=side,
        stderr=side,
        env=os.environ | {"TERM": "xterm-256color"} | variables,
    ) as running:
        os.close(side)
        seen = b""
        while True:
            try:
                piece = os.read(main, 65536)
            except OSError:  # the other end is closed
                break
            if not piece:
                break
            seen += piece
    os.close(main)
    assert running.returncode == 0, seen
    return seen


@pytest.mark.slow
def test_colour_is_for_terminals_and_not_with_no_color(tmp_path: Path) -> None:
    with Store.open(tmp_path, host_bytes="4MiB", disk_bytes="64MiB") as store:
        save(store.session(SPEC), prompt(0, 2), durable=True)
    assert b"\x1b[1m" in seen_in_a_terminal("ls", str(tmp_path))
    plain = seen_in_a_terminal("ls", str(tmp_path), NO_COLOR="1")
    assert b"\x1b" not in plain, "bold neither"
    piped_table = run("ls", str(tmp_path))
    assert "\x1b" not in piped_table
    assert [line for line in piped_table.splitlines() if line.endswith(" ")] == []
    piped = seen_in_a_terminal("ls", str(tmp_path), "--json", NO_COLOR="1")
    assert json.loads(piped)["chains_total"] == 1


@pytest.mark.slow
def test_a_reader_that_goes_early_is_no_error(tmp_path: Path) -> None:
    """As `kvstore ls | head -1`: no stack, and no failure of a pipe's first part."""
    with Store.open(tmp_path, host_bytes="4MiB", disk_bytes="64MiB") as store:
        session = store.session(SPEC)
        for chain in range(400):
            save(session, prompt(chain, 1))
    command = [sys.executable, "-m", "kvstore.cli", "ls", str(tmp_path), "--limit", "400"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        running.stdout.read(1)
        running.stdout.close()
        said = running.stderr.read()
    assert b"Traceback" not in said
    assert running.returncode in (0, 1)


@pytest.mark.slow
def test_the_doctor_in_a_pipe_says_a_line_a_finding_and_no_spaces(tmp_path: Path) -> None:
    """Its lines were filled up to the longest advice, 250 columns."""
    done = subprocess.run(
        [sys.executable, "-m", "kvstore.cli", "doctor", str(tmp_path)], capture_output=True
    )
    lines = done.stdout.decode().splitlines()
    assert lines[0].split() == ["what", "found"]
    assert [line for line in lines if line != line.rstrip()] == []
    assert b"\x1b" not in done.stdout
