"""`kvstore tenant`, through the real process."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from kvstore.identity import Role
from kvstore.tenants import Quota, load_tenants, load_token

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow


def run(*arguments: object, code: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "kvstore.cli", "tenant", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout if code == 0 else done.stderr


def test_a_tenant_is_added_rotated_listed_and_taken_out(tmp_path: Path) -> None:
    file = tmp_path / "tenants.json"
    first = run("add", file, "acme", "--host-bytes-max", "8GiB", "--expires", "90d").strip()
    found = load_tenants(file).find_token(first)
    assert found is not None
    assert found[0].quota == Quota(host_bytes_max=8 << 30)
    assert found[1].role is Role.WRITER

    token_file = tmp_path / "acme.token"
    assert run("rotate", file, "acme", "--grace", "0s", "--token-file", token_file) == ""
    assert token_file.stat().st_mode & 0o777 == 0o600
    second = load_token(token_file)
    assert load_tenants(file).find_token(second) is not None
    assert load_tenants(file).find_token(first) is None, "an expired one makes room"

    run("add", file, "acme", "--role", "metrics", "--host-bytes-max", "none")
    (tenant,) = json.loads(run("list", file, "--json"))["tenants"]
    assert [(each["role"], each["expired"]) for each in tenant["tokens"]] == [
        ("writer", False),
        ("metrics", False),
    ]
    assert tenant["quota"]["host_bytes_max"] is None
    shown = run("list", file)
    assert "acme" in shown
    assert "metrics" in shown
    for text in (shown, json.dumps(tenant), file.read_text()):
        assert second.rpartition(".")[2] not in text

    run("rm", file, "acme", "--token", tenant["tokens"][0]["id"])
    assert load_tenants(file).find_token(second) is None
    run("rm", file, "acme")
    assert not load_tenants(file).tenants


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("add", "FILE", "_acme"), 1, "tenant: '_acme' given"),
        (("add", "FILE", "a/b"), 1, "tenant: 'a/b' given"),
        (("add", "FILE", "acme", "--role", "root"), 2, "root"),
        (("add", "FILE", "acme", "--host-bytes-max", "8Gb!"), 1, "--host-bytes-max"),
        (("add", "FILE", "acme", "--sessions-max", "-1"), 1, "--sessions-max"),
        (("add", "FILE", "acme", "--expires", "soon"), 1, "not a duration"),
        (("add", "FILE", "acme", "--host-bytes-share", "2", "--host-bytes-max", "1"), 1, "share"),
        (("rotate", "FILE", "acme"), 1, "cannot be opened"),
        (("rm", "FILE", "acme"), 1, "cannot be opened"),
        (("list", "FILE"), 1, "cannot be opened"),
    ],
)
def test_what_makes_no_sense_is_refused_and_leaves_no_file(
    tmp_path: Path, arguments: tuple[str, ...], code: int, said: str
) -> None:
    given = [str(tmp_path / "t.json") if each == "FILE" else each for each in arguments]
    assert said in run(*given, code=code)
    assert not list(tmp_path.iterdir())
