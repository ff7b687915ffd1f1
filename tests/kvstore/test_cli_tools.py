"""The operator's commands through the real process: what they print, and the shape of each JSON."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from command import run, run_json, shape
from known_pages import SPEC, prompt, save
from server_process import ServerProcess

from kvstore import Store
from kvstore.connect import connect
from kvstore.doctor import BAD, examine
from kvstore.errors import InvalidRequest
from kvstore.model_size import model_size

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import numpy as np

    from kvstore.tree_view import Branch

INT, STR, BOOL, FLOAT = "int", "str", "bool", "float"
CHAIN = {
    **dict.fromkeys(("chain_id", "namespace", "tenant", "model", "writer"), STR),
    **dict.fromkeys(("pages", "tokens", "payload_bytes", "host_pages", "disk_pages", "hits"), INT),
    "idle_s": FLOAT,
    "age_s": FLOAT,
    "leased": BOOL,
    "pinned": BOOL,
}
SPACE = {
    **dict.fromkeys(("namespace", "tenant", "root", "model"), STR),
    **dict.fromkeys(("page_tokens", "page_bytes", "chains", "pages", "payload_bytes"), INT),
    "host_pages": INT,
    "disk_pages": INT,
}
PAGE = {
    **dict.fromkeys(("key", "checksum", "writer"), STR),
    **dict.fromkeys(("page_index", "disk_slot", "payload_bytes", "hits", "created_s"), INT),
    "first_token": INT,
    "extras_bytes": INT,
    "leased": BOOL,
    "pinned": BOOL,
    "tiers": [STR],
    "host_slot": "NoneType",
}
BRANCH = {
    **dict.fromkeys(("depth", "first_page", "pages", "payload_bytes", "host_pages"), INT),
    **dict.fromkeys(("disk_pages", "hits", "forks", "folded_pages"), INT),
    "chain_id": STR,
    "tokens_head": [INT],
    "pinned": BOOL,
}
TREE = {
    "namespace": STR,
    "tenant": STR,
    "model": STR,
    "page_tokens": INT,
    "pages": INT,
    "branches": [BRANCH],
    "is_cut": BOOL,
}
EVICTION = {
    **dict.fromkeys(("chains", "pages", "payload_bytes", "kept_leased", "kept_pinned"), INT),
    "redis_pages": INT,
    "kept_above": INT,
    "dry_run": BOOL,
}
USAGE = {
    **dict.fromkeys(("pages", "host_bytes", "host_extent_bytes", "disk_bytes"), INT),
    "pinned_pages": INT,
    "tenant": STR,
    "quota": {},
    "host_share_bytes": "NoneType",
    "disk_share_bytes": "NoneType",
}
TIER = {
    **dict.fromkeys(("capacity_bytes", "allocated_bytes", "used_bytes", "pages"), INT),
    "free_slots": INT,
    "name": STR,
    "state": STR,
}


def forked() -> np.ndarray:
    tokens = prompt(0, 5).copy()
    tokens[13] = 7
    return tokens


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("tools") / "store"
    with Store.open(path, host_bytes="4MiB", disk_bytes="64MiB") as store:
        session = store.session(SPEC, writer="engine-1")
        save(session, prompt(0, 5), durable=True)
        save(session, forked(), durable=True)
        save(store.session(SPEC), prompt(1, 2), durable=True)
    return str(path)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("served") / "store") as server:
        server.start()
        with connect(server.address, lookup_deadline_s=5.0) as store:
            save(store.session(SPEC, writer="e"), prompt(0, 3), durable=True)  # type: ignore[arg-type]
        yield server


@pytest.mark.slow
def test_every_listing_has_the_shape_that_its_schema_says(folder: str) -> None:
    listing = run_json("ls", folder)
    assert shape(listing) == {"namespaces": [SPACE], "chains": [CHAIN], "chains_total": INT}
    chain = listing["chains"][0]["chain_id"]
    found = run_json("inspect", folder, chain)
    assert shape(found["chain"]) == CHAIN
    assert shape(found["pages"]) == [PAGE]
    assert set(found) == {"chain", "pages", "spec"}
    stats = run_json("status", folder)
    assert shape(stats["tiers"]) == [TIER]
    assert set(shape(stats["counters"]).values()) == {INT}
    assert set(stats) == {
        *("directory", "warm", "pages", "nodes", "index_bytes", "trees", "leases", "tiers"),
        *("pinned_pages", "dirty_bytes", "counters", "encryption", "service", "tenants"),
        "disk_bytes_per_hit",
        "policy",
    }
    assert shape(run_json("evict", folder, "--all")) == EVICTION
    assert shape(run_json("flush", folder)) == {"done": BOOL}
    assert shape(run_json("quota", folder)) == {"tenants": [USAGE]}
    tokens = ",".join(map(str, prompt(0, 5).tolist()))
    explained = run_json("explain", folder, "--tokens", tokens)
    assert set(explained) == {
        *("prompt_tokens", "prompt_pages", "matched_pages", "matched_tokens", "host_pages"),
        *("disk_pages", "verdict", "differs_at", "prompt_token", "stored_token", "departed"),
        *("other_namespaces", "extras_differ_at", "elsewhere"),
    }


@pytest.mark.slow
def test_tree_folds_what_prompts_share(folder: str) -> None:
    found = run_json("tree", folder)
    assert shape(found) == {"trees": [TREE]}
    (tree,) = found["trees"]
    rows = [(b["depth"], b["first_page"], b["pages"], b["forks"]) for b in tree["branches"]]
    assert rows == [(0, 0, 3, 2), (1, 3, 2, 0), (1, 3, 2, 0), (0, 0, 2, 0)]
    said = run("tree", folder, "--depth", "1")
    assert "pages 0-2, 12 tokens" in said
    assert "4 pages folded below" in said
    assert "1000000 1000001" in said
    assert "--limit" in run("tree", folder, "--limit", "1")


def test_a_tree_as_text_needs_a_tokenizer(folder: str, tmp_path: Path) -> None:
    assert "there is no" in run("tree", folder, "--tokenizer", str(tmp_path / "x"), code=1)


def test_a_tree_adds_up_at_every_depth_and_limit(folder: str) -> None:
    with Store.open(folder, host_bytes="1MiB") as store:
        for depth in (1, 2, None):
            (view,) = store.tree(depth=depth)
            shown: list[Branch] = list(view.branches)
            assert sum(each.pages + each.folded_pages for each in shown) == view.pages == 9
        (cut,) = store.tree(branches=2)
        assert (len(cut.branches), cut.is_cut) == (2, True)
        assert store.tree(tenant="nobody") == []
        with pytest.raises(InvalidRequest):
            store.tree(branches=0)


@pytest.mark.slow
def test_a_pin_keeps_a_chain_until_it_is_taken_back(served: ServerProcess, folder: str) -> None:
    where = str(served.directory)
    chain = run_json("ls", where)["chains"][0]["chain_id"]
    assert run_json("pin", where, chain[:10], "--ttl", "10m") == {"pages": 3, "ttl_s": 600.0}
    assert run_json("ls", where)["chains"][0]["pinned"] is True
    assert run_json("evict", where, "--all", "--yes")["kept_pinned"] == 3
    assert "may leave again" in run("unpin", served.address, chain)
    assert run_json("ls", where)["chains"][0]["pinned"] is False
    assert "no page's id begins" in run("pin", where, "f" * 32, code=1)
    assert "--ttl" in run("pin", where, chain, "--ttl", "0s", code=1)
    assert "no server holds" in run("pin", folder, chain[:4], code=1)


@pytest.mark.slow
def test_top_looks_as_often_as_it_is_told(served: ServerProcess) -> None:
    lines = run("top", served.address, "--count", "2", "--interval", "100ms", "--json")
    first, second = map(json.loads, lines.splitlines())
    assert first["rates"] == {}
    assert second["rates"]["lookups"] == 0.0
    assert set(second) == {"rates", "stats"}
    said = run("top", str(served.directory), "--count", "1")
    assert "wait for the disk" in said
    assert "\x1b" not in said


@pytest.mark.slow
def test_ctrl_c_ends_top_with_130_and_no_stack(served: ServerProcess) -> None:
    command = [sys.executable, "-m", "kvstore.cli", "top", served.address, "--interval", "50ms"]
    top = subprocess.Popen(
        [*command, "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert top.stdout is not None
    assert top.stdout.readline()
    top.send_signal(signal.SIGINT)
    _, said = top.communicate(timeout=20)
    assert top.returncode == 130, said
    assert "Traceback" not in said


@pytest.mark.slow
def test_quota_of_a_server_shows_its_tenants(served: ServerProcess) -> None:
    (found,) = run_json("quota", served.address)["tenants"]
    assert found["tenant"] == "default"
    assert "default" in run("quota", served.address)


def test_doctor_says_what_it_found_and_what_to_do(folder: str, tmp_path: Path) -> None:
    found = run_json("doctor", folder)
    finding = dict.fromkeys(("name", "state", "found", "advice"), STR)
    assert shape(found) == {"findings": [finding], "problems": INT, "warnings": INT}
    names = {each["name"] for each in found["findings"]}
    assert {"memory", "locked memory", "open files", "shared memory", "disk", "owner"} <= names
    assert {"versions", "huge pages", "file system", "direct I/O", "settings"} <= names
    bad = tmp_path / "bad.toml"
    bad.write_text('colour = "red"\n')
    said = subprocess.run(
        [sys.executable, "-m", "kvstore.cli", "doctor", folder, "--config", str(bad)],
        capture_output=True,
        text=True,
    )
    assert said.returncode == 1
    assert "colour" in said.stdout


def test_doctor_knows_trouble_when_it_sees_it(tmp_path: Path) -> None:
    path = tmp_path / "store"
    path.mkdir(mode=0o755)
    (path / "quarantine-1700000000000").mkdir()
    found = {each.name: each for each in examine(path)}
    assert found["owner"].state == "warning"
    assert "chmod 700" in found["owner"].advice
    assert "quarantine-1700000000000" in found["catalog"].found
    assert all(each.advice for each in found.values() if each.state == BAD)
    assert "settings" not in found


CONFIGS: list[tuple[dict[str, Any], int, str]] = [
    # Llama-3-8B: 32 layers of 8 KV heads of 128, two bytes: 128 KiB a token
    (
        {
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "hidden_size": 4096,
            "torch_dtype": "bfloat16",
        },
        131_072,
        "gqa",
    ),
    # DeepSeek-V3: 61 layers of one latent of 512 + 64
    (
        {
            "num_hidden_layers": 61,
            "num_attention_heads": 128,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "dtype": "bfloat16",
        },
        61 * 576 * 2,
        "mla",
    ),
    # GPT-2: 12 layers, 12 heads of 64, four bytes
    (
        {"n_layer": 12, "n_head": 12, "n_embd": 768, "torch_dtype": "float32"},
        12 * 2 * 768 * 4,
        "mha",
    ),
]


@pytest.mark.parametrize(("config", "size", "attention"), CONFIGS)
def test_the_size_of_known_models_is_right(
    config: dict[str, Any], size: int, attention: str
) -> None:
    found = model_size(config)
    assert (found.bytes_per_token, found.attention) == (size, attention)
    assert found.page_bytes == found.page_tokens * size
    assert found.page_bytes >= 1 << 20 or found.page_tokens >= 1024
    wrapped = model_size({"text_config": config, "model_type": "vision"})
    assert wrapped.bytes_per_token == size


def test_size_reads_a_folder_and_refuses_what_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[0][0]))
    found = run_json("size", str(tmp_path), "--memory", "1GiB")
    fit = dict.fromkeys(("bytes", "tokens", "pages", "prompts"), INT)
    assert shape(found["fits"]) == [fit]
    assert (found["tokens_per_gib"], found["fits"][0]["tokens"]) == (8192, 8192)
    assert "128 KiB a token" in run("size", str(tmp_path))
    (tmp_path / "config.json").write_text('{"n_head": 2}')
    assert "num_hidden_layers" in run("size", str(tmp_path), code=1)
    with pytest.raises(InvalidRequest, match="dtype"):
        model_size({**CONFIGS[0][0], "torch_dtype": "int1"})
    assert model_size(CONFIGS[0][0], kv_dtype="float8_e4m3fn").bytes_per_token == 65_536


@pytest.mark.slow
def test_pipes_and_no_color_get_plain_text_and_usage_is_2(folder: str) -> None:
    assert "\x1b" not in run("ls", folder, FORCE_COLOR="", NO_COLOR="1")
    assert "\x1b" not in run("tree", folder)
    assert "No such command" in run("nonsense", code=2)
    assert "Usage" in run("pin", folder, code=2)


@pytest.mark.slow
def test_every_command_has_help_that_says_what_it_does() -> None:
    from typer.main import get_command

    from kvstore.cli_commands import app

    commands = get_command(app).commands  # type: ignore[attr-defined]
    assert {"tree", "pin", "unpin", "verify", "export", "import", "doctor", "top"} <= set(commands)
    for name, command in commands.items():
        assert command.help, name
        assert command.help.strip().splitlines()[0].endswith((".", ":")) or name == "tenant", name
    assert "STORE" in run("verify", "--help")


@pytest.mark.slow
def test_an_output_that_is_full_is_one_sentence(folder: str) -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "kvstore.cli", "ls", folder],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    assert done.returncode == 1
    assert done.stderr.startswith("kvstore: ")
    assert "No space left on device" in done.stderr
    assert "Traceback" not in done.stderr
