"""The command on a directory, on the server that holds it, and at its address: one answer."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from known_pages import SPEC, prompt, save
from server_process import ServerProcess

from kvstore import Store
from kvstore.cli_commands import app
from kvstore.connect import connect
from kvstore.errors import KVStoreError
from kvstore.identity import Role
from kvstore.tenants import Quota, edit_tenants

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.slow

# What differs from one process to the next, and from one second to the next.
CHANGING = re.compile(r'(?<="age_s": )[0-9.e-]+|(?<="idle_s": )[0-9.e-]+|\b\d+[smhd]\b')
SPACES = re.compile(r"[ -]+")  # tables are as wide as what is in them


def settled(text: str) -> str:
    return SPACES.sub(" ", CHANGING.sub("0", text))


def run(*arguments: str, code: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "kvstore.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout if code == 0 else done.stderr


def run_json(*arguments: str) -> Any:
    return json.loads(run(*arguments, "--json"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "store"
    with Store.open(path, host_bytes=1 << 20, disk_bytes="64MiB") as store:
        save(store.session(SPEC, writer="engine-1"), prompt(0, 5))
        with store.session(SPEC, writer="engine-2").reserve(prompt(1, 3), {2: b"\xa1"}) as made:
            made.commit()
    return path


@pytest.fixture
def server(folder: Path) -> Iterator[ServerProcess]:
    with ServerProcess(folder) as server:
        yield server


def questions(store: str, chain: str) -> list[tuple[str, ...]]:
    tokens = ",".join(map(str, prompt(0, 5)[:6].tolist()))
    whole = ",".join(map(str, prompt(1, 3).tolist()))
    return [
        ("ls", store),
        ("ls", store, "--limit", "1", "--sort", "hits"),
        ("inspect", store, chain),
        ("explain", store, "--tokens", tokens),
        ("explain", store, "--tokens", whole, "--extras", '{"2": "a1"}'),
        ("explain", store, "--tokens", whole, "--tenant", "nobody"),
        ("evict", store, "--writer", "engine-2", "--dry-run"),
        ("evict", store, "--tokens", whole, "--extras", '{"2": "a1"}', "--dry-run"),
        ("evict", store, "--tokens", whole, "--extras", '{"2": "b1"}', "--dry-run"),
        ("evict", store),
        ("evict", store, "--tokens", "1,2", "--namespace", "ff"),
        ("inspect", store, "0" * 32),
        ("flush", store),
    ]


def answers(store: str, chain: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What each command prints, or is refused with; in this process, since they are many."""
    found = []
    for question in questions(store, chain):
        for more in ((), ("--json",)):
            refused = ""
            try:
                app([*question, *more], standalone_mode=False)
            except KVStoreError as exc:
                refused = f"kvstore: {exc}"
            found.append(settled(f"{question[0]} {capsys.readouterr().out}{refused}"))
    return found


def test_a_server_and_its_directory_give_the_same_answers(
    folder: Path, server: ServerProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    chain = run_json("ls", str(folder))["chains"][0]["chain_id"]
    alone = answers(str(folder), chain, capsys)
    server.start()
    assert answers(str(folder), chain, capsys) == alone
    assert answers(server.address, chain, capsys) == alone
    assert sum("kvstore: " in each for each in alone) == 10, "refusals were compared as well"


def test_an_eviction_by_the_command_is_one_in_the_server(
    folder: Path, server: ServerProcess
) -> None:
    server.start()
    with connect(server.address, lookup_deadline_s=5.0) as store:
        session = store.session(SPEC)
        session.pin(prompt(0, 5), 60.0)
        done = run_json("evict", str(folder), "--all", "--yes")
        assert (done["pages"], done["kept_pinned"]) == (3, 5)
        assert session.match(prompt(0, 5)).pages == 5
        done = run_json("evict", server.address, "--all", "--include-pinned", "--yes")
        assert done["pages"] + done["kept_leased"] == 5
    stats = run_json("stats", str(folder))
    assert "sessions" in stats["service"]
    assert "A server holds it: " in run("stats", str(folder))


def test_a_directory_that_another_process_holds_is_named_with_its_holder(folder: Path) -> None:
    with Store.open(folder, host_bytes=1 << 20):
        said = run("ls", str(folder), code=1)
    assert f"in use by pid {os.getpid()} since 2" in said
    assert "stop it" in said
    assert "kvstore.sock" in said


def test_a_stale_socket_is_no_server(folder: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(folder / "kvstore.sock"))
    assert run_json("ls", str(folder))["chains_total"] == 2


def test_an_address_without_a_server_is_refused_with_a_sentence(tmp_path: Path) -> None:
    said = run("ls", f"kvstore://unix:{tmp_path}/none.sock", code=1)
    assert "is it running?" in said
    assert "kvstore://" in run("ls", "kvstore://nonsense", code=1)


def test_a_network_address_takes_a_token_file(tmp_path: Path) -> None:
    tokens: dict[Role, str] = {}

    def edit(book: Any) -> Any:
        book = book.with_tenant("acme", Quota())
        for role in (Role.ADMIN, Role.READER):
            book, tokens[role] = book.with_token("acme", role, 0.0, None)
        return book

    edit_tenants(tmp_path / "tenants.json", edit, create=True)
    for role, token in tokens.items():
        (tmp_path / role.value).write_text(token)
        (tmp_path / role.value).chmod(0o600)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = ("--host-bytes=8MiB", "--disk-bytes=64MiB", f"--listen=127.0.0.1:{port}")
    tenants = f"--tenants-file={tmp_path / 'tenants.json'}"
    address = (f"kvstore://127.0.0.1:{port}", "--insecure-network")
    with ServerProcess(tmp_path / "store", *flags, tenants, "--insecure-network") as server:
        server.start()
        admin = f"--token-file={tmp_path / 'admin'}"
        assert run_json("ls", *address, admin)["chains_total"] == 0
        assert "warning: " in run("stats", *address, admin)
        reader = f"--token-file={tmp_path / 'reader'}"
        assert "role reader" in run("ls", *address, reader, code=1)
        assert "no credential" in run("ls", *address, code=1)
        held = run("ls", str(tmp_path / "store"), code=1)
        assert "kvstore://HOST:PORT" in held
