"""What commands say of several tenants, of a Redis, and of files that are there already."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from known_pages import SPEC, prompt, save

from kvstore import Store
from kvstore.cli_output import show_stats
from kvstore.store_stats import Stats, TierStats

if TYPE_CHECKING:
    from pathlib import Path


def run(*arguments: object, code: int = 0) -> str:
    command = [sys.executable, "-m", "kvstore.cli", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout if code == 0 else done.stderr


@pytest.mark.slow
def test_ls_names_tenants_where_there_are_several(tmp_path: Path) -> None:
    sizes = {"host_bytes": "4MiB", "disk_bytes": "64MiB"}
    with Store.open(tmp_path, **sizes) as store:
        save(store.session(SPEC, tenant="acme"), prompt(0, 5))
    heads = [line for line in run("ls", tmp_path).splitlines() if line.startswith("chain ")]
    assert len(heads) == 1
    assert "tenant" not in heads[0]
    assert "5 pages (0 in memory" in run("explain", tmp_path, "--tokens", _ids(prompt(0, 5)))
    with Store.open(tmp_path, **sizes) as store:
        save(store.session(SPEC, tenant="zeta"), prompt(1, 3))
    lines = run("ls", tmp_path).splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("chain "))
    assert lines[at].split()[:3] == ["chain", "tenant", "model"]
    assert [line.split()[1] for line in lines[at + 1 : at + 3]] == ["acme", "zeta"]
    said = run("explain", tmp_path, "--tokens", _ids(prompt(0, 5)), code=1)
    assert "tenant default has no pages here; known here: acme, zeta" in said


def _ids(tokens: object) -> str:
    return ",".join(map(str, tokens))  # type: ignore[call-overload]


@pytest.mark.slow
def test_an_unknown_order_is_wrong_usage(tmp_path: Path) -> None:
    said = run("ls", tmp_path, "--sort", "bogus", code=2)
    assert "'bogus' given; one of size, age, idle, hits" in said


@pytest.mark.slow
def test_tenant_add_keeps_a_token_file_that_is_there(tmp_path: Path) -> None:
    file, token = tmp_path / "tenants.json", tmp_path / "token"
    run("tenant", "add", file, "acme", "--token-file", token)
    before, book = token.read_bytes(), file.read_bytes()
    said = run("tenant", "add", file, "zeta", "--token-file", token, code=1)
    assert "is there already" in said
    assert "--force" in said
    assert (token.read_bytes(), file.read_bytes()) == (before, book)
    run("tenant", "add", file, "zeta", "--token-file", token, "--force")
    assert token.read_bytes() != before


@pytest.mark.slow
@pytest.mark.parametrize(
    "wrong",
    [("--days", "0"), ("--host", "no host"), ("--client", "acme:boss"), ("--client", "a b:writer")],
)
def test_cert_leaves_nothing_when_it_refuses(tmp_path: Path, wrong: tuple[str, str]) -> None:
    run("cert", tmp_path / "certs", *wrong, code=1)
    assert os.listdir(tmp_path) == []


def test_the_redis_row_says_what_it_counts(capsys: pytest.CaptureFixture[str]) -> None:
    full = "full: Redis refused the last writes (OOM); raise its maxmemory"
    row = TierStats("redis", 1 << 30, 8 << 20, 8 << 20, 2, 0, full)
    found = Stats(
        directory="/d",
        warm=True,
        pages=2,
        nodes=1,
        index_bytes=1,
        trees=1,
        leases=0,
        pinned_pages=0,
        dirty_bytes=0,
        tiers=(row,),
        counters={"redis_pages_written": 7, "redis_dropped": 3, "redis_pages_read": 1},
    )
    show_stats(found, as_json=False)
    said = capsys.readouterr().out.replace("\n", " ")
    assert full in said
    assert "handles to pages there, not what Redis holds" in said
    assert "7 pages written, 0 there already, 3 not written, 1 read" in said
