"""What commands say when they are given nothing, something that is not there, or a typo."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from command import run, run_json
from known_pages import SPEC, prompt, save
from server_process import ServerProcess

from kvstore import Store

if TYPE_CHECKING:
    from pathlib import Path

THREE_BLOCKS = """\
{"timestamp": 0, "input_length": 1024, "output_length": 1, "hash_ids": [1, 2]}
{"timestamp": 10, "input_length": 1024, "output_length": 1, "hash_ids": [1, 3]}
"""


@pytest.mark.slow
def test_simulate_has_sizes_for_a_trace_of_three_blocks(tmp_path: Path) -> None:
    """Its own default sizes, as 1 %, were refused as less than a block."""
    trace = tmp_path / "trace.jsonl"
    trace.write_text(THREE_BLOCKS)
    found = run_json("simulate", str(trace), "--policy", "lru")
    assert [each["capacity"] for each in found["results"]] == [1]
    said = run("simulate", str(trace), "--capacity", "2,1%", code=1)
    assert said == (
        "kvstore: --capacity: '1%' is less than one of the trace's 3 blocks; at least 34% is "
        "needed, or a number of blocks\n"
    )
    said = run("simulate", str(trace), "--disk", "3%", "--capacity", "1", code=1)
    assert "--disk: '3%' is less than one" in said


@pytest.mark.slow
def test_simulate_refuses_in_one_line(tmp_path: Path) -> None:
    """A blank line came first, from the bar that nobody sees."""
    said = run("simulate", str(tmp_path / "missing"), code=1)
    assert said == f"kvstore: trace {tmp_path}/missing: cannot be read: No such file or directory\n"
    empty = tmp_path / "empty"
    empty.touch()
    assert "no requests in it; `kvstore record`" in run("simulate", str(empty), code=1)


@pytest.mark.slow
def test_size_knows_what_is_missing_from_what_is_no_json(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing")
    said = run("size", missing, code=1)
    assert said.startswith(f"kvstore: {missing}: there is no such file or folder; give a model's")
    assert f"{tmp_path}: has no config.json" in run("size", str(tmp_path), code=1)
    (tmp_path / "config.json").write_text("{")
    assert "config.json: not JSON" in run("size", str(tmp_path), code=1)
    (tmp_path / "config.json").write_bytes(b"\xff\xfe")
    assert "config.json: is no text" in run("size", str(tmp_path), code=1)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    path = tmp_path / "store"
    with Store.open(path, host_bytes="4MiB", disk_bytes="64MiB") as store:
        save(store.session(SPEC, writer="engine-1", tenant="acme"), prompt(0, 5))
        save(store.session(SPEC, writer="engine-2", tenant="zeta"), prompt(1, 3))
    return str(path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("evict --tenant acem -y", "tenant acem has no pages here; did you mean acme?"),
        ("evict --tenant zz99 -y", "tenant zz99 has no pages here; known here: acme, zeta"),
        ("evict --namespace 123 -y", "no namespace begins with 123; `kvstore ls` shows them"),
        ("evict --writer engine-7", "has stored nothing that is here; did you mean engine-"),
        ("evict --erase-key --yes", "--erase-key: whose key? It needs --tenant, and no other"),
        ("evict --tenant acme --tokens 7,8", "no prompt here begins with these 2 tokens"),
        ("tree --tenant acem", "tenant acem has no pages here; did you mean acme?"),
        ("explain --tenant acem --tokens 1", "tenant acem has no pages here"),
        ("export --tenant acem FILE", "tenant acem has no pages here"),
        ("export --chain 123 FILE", "export: no page's id begins with 123; `kvstore ls`"),
    ],
)
def test_what_is_not_here_is_refused_by_its_name(
    folder: str, tmp_path: Path, given: str, why: str
) -> None:
    """A typo in a tenant's name was an eviction of 0 pages, and a success."""
    file = tmp_path / "file"
    command, *more = given.replace("FILE", str(file)).split()
    assert why in run(command, folder, *more, code=1)
    assert not file.exists()
    assert run_json("ls", folder)["chains_total"] == 2


@pytest.mark.slow
def test_an_age_that_nothing_has_is_no_failure(folder: str) -> None:
    """As of a job that runs every night."""
    assert "Nothing to evict" in run("evict", folder, "--older-than", "9d", "--yes")
    assert run_json("evict", folder, "--older-than", "9d", "--tenant", "acme")["pages"] == 0
    assert run_json("evict", folder, "--tenant", "acme", "--yes")["pages"] == 5
    document = run_json("evict", folder, "--tenant", "acme", "--yes", code=1)
    assert document["error"] == "tenant acme has no pages here; known here: zeta"
    assert run_json("evict", folder, "--all", "--yes")["pages"] == 3
    assert "the store is empty" in run("evict", folder, "--tenant", "acme", code=1)
    assert "Nothing to evict" in run("evict", folder, "--all")


@pytest.mark.slow
def test_import_says_how_there_comes_to_be_a_store(folder: str, tmp_path: Path) -> None:
    file, new = tmp_path / "chains.kvx", tmp_path / "new"
    run("export", folder, str(file))
    assert f"`kvstore serve {new}` makes a store" in run("import", str(new), str(file), code=1)
    assert "kvstore import STORE FILE" in run("import", str(file), str(new), code=1)
    new.mkdir()
    assert f"`kvstore serve {new}` makes it one" in run("import", str(new), str(file), code=1)
    empty = tmp_path / "empty"
    empty.touch()
    said = run("import", folder, str(empty), code=1)
    assert said == f"kvstore: {empty}: byte 0: this is no export of kvstore\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("evict STORE --older-than soon", "--older-than: 'soon' is not a duration"),
        ("flush STORE --deadline soon", "--deadline: 'soon' is not a duration"),
        ("record STORE start --max-bytes lots", "--max-bytes: 'lots' is not a size"),
        ("size STORE --memory lots", "--memory: 'lots' is not a size"),
        ("tenant rotate STORE acme --grace soon", "--grace: 'soon' is not a duration"),
        ("explain STORE --tokens 1 --spec BAD", "BAD: spec: is not JSON"),
        ("export STORE STORE", "this is a folder; name a file in it"),
        ("export STORE STORE/no/file", "there is no folder STORE/no; make it first"),
        ("dashboard STORE/no", "there is no such directory"),
        ("cert BAD", "BAD: this is a file; a folder for several is needed"),
        ("warm http://localhost:1 BAD", "no engine answers there: Connection refused"),
    ],
)
def test_a_mistake_is_named_by_its_option_or_file(
    folder: str, tmp_path: Path, given: str, why: str
) -> None:
    bad = tmp_path / "bad"
    bad.write_text("neither JSON nor a folder")

    def real(text: str) -> str:
        return text.replace("STORE", folder).replace("BAD", str(bad))

    said = run(*real(given).split(), code=1)
    assert real(why) in said
    assert said.count("\n") == 1


@pytest.mark.slow
def test_where_nobody_has_a_writers_name_none_is_proposed(tmp_path: Path) -> None:
    """It ended with "known here: " and nothing."""
    with Store.open(tmp_path / "store", host_bytes="4MiB", disk_bytes="64MiB") as store:
        save(store.session(SPEC), prompt(0, 2))
    said = run("evict", str(tmp_path / "store"), "--writer", "nobody", code=1)
    assert said.endswith("has stored nothing that is here; no page here has a writer's name\n")


@pytest.mark.slow
def test_who_may_not_do_that_is_told_whose_token_it_takes(tmp_path: Path) -> None:
    tenants, token = tmp_path / "tenants.json", tmp_path / "token"
    run("tenant", "add", str(tenants), "acme", "--token-file", str(token))
    said = run("tenant", "quota", f"{tenants}.", "acme", code=1)
    assert f"{tenants}.: " in said
    assert "nothing to change" not in said
    assert "quota: nothing to change" in run("tenant", "quota", str(tenants), "acme", code=1)
    said = run("tenant", "rm", str(tenants), "acm", code=1)
    assert said == "kvstore: there is no tenant acm; did you mean acme?\n"
    flags = ("--host-bytes=32MiB", "--disk-bytes=64MiB", f"--tenants-file={tenants}")
    with ServerProcess(tmp_path / "store", *flags) as server:
        server.start()
        for credential in ((), ("--token-file", str(token))):
            said = run("ls", server.address, *credential, code=1)
            assert "it takes the token or certificate of an admin (--token-file" in said
        server.terminate()
    said = run("ls", server.address, code=1)
    assert "is it running? `kvstore serve DIR` starts one" in said
