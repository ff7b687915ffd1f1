"""The command, through the real process."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from known_pages import SPEC, load, prompt, save

from kvstore import Store
from kvstore.errors import InvalidRequest
from kvstore.removal import Selection

if TYPE_CHECKING:
    from pathlib import Path


def run(*arguments: str, code: int = 0, stdin: str = "") -> str:
    done = subprocess.run(
        [sys.executable, "-m", "kvstore.cli", *arguments],
        capture_output=True,
        text=True,
        input=stdin,
        timeout=60,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout if code == 0 else done.stderr


def run_json(*arguments: str) -> Any:
    return json.loads(run(*arguments, "--json"))


@pytest.fixture
def folder(tmp_path: Path) -> str:
    path = tmp_path / "store"
    with Store.open(path, host_bytes=1 << 20, disk_bytes="64MiB") as store:
        save(store.session(SPEC, writer="engine-1"), prompt(0, 5))
        save(store.session(SPEC, writer="engine-2"), prompt(1, 3))
    return str(path)


def test_ls_lists_namespaces_and_chains(folder: str) -> None:
    found = run_json("ls", folder)
    assert found["chains_total"] == 2
    (space,) = found["namespaces"]
    assert (space["model"], space["pages"], space["tenant"]) == ("unit", 8, "default")
    assert [(c["pages"], c["writer"]) for c in found["chains"]] == [
        (5, "engine-1"),
        (3, "engine-2"),
    ]
    table = run("ls", folder)
    assert "engine-1" in table
    assert "unit" in table
    assert "1 more chain;" in run("ls", folder, "--limit", "1")


def test_an_empty_prompt_does_not_mean_the_whole_store(folder: str, tmp_path: Path) -> None:
    empty, brackets = tmp_path / "empty", tmp_path / "brackets"
    empty.touch()
    brackets.write_text("[]")
    for given in (("--tokens", ""), ("--tokens", " , "), ("--tokens-file", str(empty))):
        assert "is empty; leave it out to mean any" in run("evict", folder, *given, "-y", code=1)
    for file in (str(brackets), "/dev/null", "-"):
        assert "is empty" in run("evict", folder, "--tokens-file", file, "-y", code=1)
    for given in (("--tokens", ""), ("--tokens-file", str(empty))):
        assert "holds no tokens, so there is nothing to explain" in run(
            "explain", folder, *given, code=1
        )
    with pytest.raises(InvalidRequest, match="prefix is empty"):
        Selection(prefix=b"", namespace=SPEC.namespace)
    assert len(run_json("ls", folder)["chains"]) == 2
    assert "--all" in run("evict", folder, code=1)


def test_inspect_shows_pages_and_spec(folder: str) -> None:
    chain = run_json("ls", folder)["chains"][0]["chain_id"]
    found = run_json("inspect", folder, chain[:12])
    assert [page["page_index"] for page in found["pages"]] == [0, 1, 2, 3, 4]
    assert {tuple(page["tiers"]) for page in found["pages"]} == {("disk",)}
    assert found["spec"]["page_tokens"] == 4
    assert "tenant default" in run("inspect", folder, chain)
    assert "hex digits" in run("inspect", folder, "xyz", code=1)
    assert "no page's id" in run("inspect", folder, "0" * 32, code=1)


def test_explain_gives_the_longest_match_and_the_first_differing_token(
    folder: str, tmp_path: Path
) -> None:
    tokens = prompt(0, 5).tolist()
    tokens[9] = 42
    listed = ",".join(map(str, tokens))
    found = run_json("explain", folder, "--tokens", listed)
    assert (found["matched_pages"], found["differs_at"], found["prompt_token"]) == (2, 9, 42)
    file = tmp_path / "prompt.json"
    file.write_text(json.dumps(tokens))
    assert "differs at token 9" in run("explain", folder, "--tokens-file", str(file))
    assert "differs at token 9" in run("explain", folder, "--tokens-file", "-", stdin=listed)
    assert "give a prompt" in run("explain", folder, code=1)
    assert "not a token id" in run("explain", folder, "--tokens", "1,x", code=1)
    assert "--tokenizer" in run("explain", folder, "--text", "hello", code=1)


def test_evict_is_a_dry_run_when_more_than_one_chain_goes_unless_yes(folder: str) -> None:
    dry = run_json("evict", folder, "--all")
    assert (dry["pages"], dry["chains"], dry["dry_run"]) == (8, 2, True)
    assert "Dry run: 8 pages" in run("evict", folder, "--all")
    assert run_json("evict", folder, "--writer", "engine-2", "--dry-run")["dry_run"] is True
    assert run_json("ls", folder)["chains_total"] == 2
    assert run_json("evict", folder, "--writer", "engine-2")["dry_run"] is False
    assert run_json("ls", folder)["chains_total"] == 1
    assert "name a prefix" in run("evict", folder, code=1)
    assert "empty" in run("evict", folder, "--namespace", "", "--yes", code=1)
    assert "empty" in run("evict", folder, "--tenant", "", "--yes", code=1)
    head = ",".join(map(str, prompt(0, 5)[:6].tolist()))
    assert run_json("evict", folder, "--tokens", head, "--dry-run")["pages"] == 4
    assert run_json("evict", folder, "--older-than", "1h")["pages"] == 0
    assert run_json("evict", folder, "--all", "--dry-run")["pages"] == 5
    assert "duration" in run("evict", folder, "--older-than", "soon", code=1)


def test_stats_counts_what_is_there_and_the_size_is_remembered(folder: str) -> None:
    found = run_json("stats", folder)
    disk = found["tiers"][1]
    assert (found["pages"], disk["pages"], disk["capacity_bytes"]) == (8, 8, 64 << 20)
    assert "disk" in run("stats", folder)


def test_looking_inside_loses_nothing(folder: str) -> None:
    for verb in ("ls", "stats"):
        run(verb, folder)
    with Store.open(folder, host_bytes=1 << 20) as store:
        assert load(store.session(SPEC), prompt(0, 5)) == 5


def test_a_directory_that_is_none_of_ours_is_refused_and_left_alone(tmp_path: Path) -> None:
    assert "no such directory" in run("ls", str(tmp_path / "none"), code=1)
    (tmp_path / "letter.txt").write_text("dear")
    assert "no store" in run("ls", str(tmp_path), code=1)
    assert [path.name for path in tmp_path.iterdir()] == ["letter.txt"]


def test_a_directory_in_use_is_refused_with_the_owner(folder: str) -> None:
    with Store.open(folder, host_bytes=1 << 20):
        assert "in use" in run("ls", folder, code=1)


def test_help_and_version_and_wrong_usage() -> None:
    assert "explain" in run("--help")
    assert run("--version").startswith("kvstore ")
    assert "No such command" in run("frobnicate", code=2)
