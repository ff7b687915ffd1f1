"""The store with encryption at rest: remembered, told, and undone by deleting a key."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from known_pages import PAGE_TOKENS, SPEC, load, prompt, save
from raw_client import RawClient
from server_process import ServerProcess

from kvstore import Store
from kvstore import kvstore_pb2 as messages
from kvstore.connect import connect
from kvstore.errors import ConfigError, DirectoryError, InvalidRequest
from kvstore.removal import Selection

if TYPE_CHECKING:
    from pathlib import Path

PROMPTS = 6
PAGES = 4


def opened(path: Path, **settings: Any) -> Store:
    return Store.open(path / "store", host_bytes=1 << 20, disk_bytes=16 << 20, **settings)


def fill(store: Store, tenant: str) -> None:
    session = store.session(SPEC, tenant=tenant, writer=f"{tenant}-writer")
    for seed in range(PROMPTS):
        save(session, prompt(seed, PAGES), durable=True)


def hits(store: Store, tenant: str) -> int:
    session = store.session(SPEC, tenant=tenant)
    return sum(load(session, prompt(seed, PAGES)) for seed in range(PROMPTS))


def key_files(path: Path) -> list[Path]:
    return sorted((path / "store" / "keys").glob("*.key"))


@pytest.mark.slow
def test_an_encrypted_store_stays_so_until_told_otherwise(tmp_path: Path) -> None:
    with opened(tmp_path, encrypt=True) as store:
        fill(store, "a")
        assert store.stats().encryption == "on"
    with opened(tmp_path) as store:
        assert store.stats().encryption == "on"
        assert hits(store, "a") == PROMPTS * PAGES
    with opened(tmp_path, encrypt=False) as store:
        assert store.stats().encryption == "off"
        assert hits(store, "a") == PROMPTS * PAGES, "what is encrypted stays readable"
        fill(store, "b")
    assert len(key_files(tmp_path)) == 1, "plain pages need no key"
    with opened(tmp_path) as store:
        assert store.stats().encryption == "off"
    with opened(tmp_path, encrypt=True) as store:
        plain = PROMPTS * PAGES
        assert store.stats().encryption == f"on; {plain} pages from before were plain at the start"
        assert hits(store, "a") + hits(store, "b") == 2 * PROMPTS * PAGES
        store.check()


@pytest.mark.slow
def test_it_stays_so_without_its_settings_file(tmp_path: Path) -> None:
    with opened(tmp_path, encrypt=True) as store:
        fill(store, "a")
    (tmp_path / "store" / "settings.json").unlink()
    with opened(tmp_path) as store:
        assert store.stats().encryption == "on"
        assert hits(store, "a") == PROMPTS * PAGES


def test_a_plain_store_has_no_keys_and_says_off(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        assert store.stats().encryption == "off"
        with pytest.raises(InvalidRequest, match="nothing is encrypted here"):
            store.evict(Selection(tenant="a"), erase_key=True)
    assert not (tmp_path / "store" / "keys").exists()
    assert "encrypt" not in json.loads((tmp_path / "store" / "settings.json").read_bytes())


@pytest.mark.slow
def test_a_deleted_key_file_deletes_its_tenant_and_no_other(tmp_path: Path) -> None:
    with opened(tmp_path, encrypt=True) as store:
        fill(store, "a")
        [of_a] = key_files(tmp_path)
        fill(store, "b")
    of_a.unlink()
    with opened(tmp_path) as store:
        assert store.stats().counters["key_missing"] == PROMPTS * PAGES
        assert hits(store, "a") == 0
        assert hits(store, "b") == PROMPTS * PAGES
        assert store.state.disk is not None
        assert store.state.disk.usage().used_slots == PROMPTS * PAGES
        fill(store, "a")
        store.check()
    with opened(tmp_path) as store:
        assert hits(store, "a") == PROMPTS * PAGES
        assert store.stats().counters["key_missing"] == 0


@pytest.mark.slow
def test_a_running_store_erases_a_tenant_with_its_key(tmp_path: Path) -> None:
    with opened(tmp_path, encrypt=True) as store:
        fill(store, "a")
        [of_a] = key_files(tmp_path)
        fill(store, "b")
        session = store.session(SPEC, tenant="a")
        session.pin(prompt(0, PAGES), 60)
        plan = store.evict(Selection(tenant="a"), erase_key=True, dry_run=True)
        assert plan.pages == PROMPTS * PAGES
        assert of_a.exists()
        done = store.evict(Selection(tenant="a"), erase_key=True)
        assert done.pages == PROMPTS * PAGES
        assert done.kept_pinned == 0
        assert not of_a.exists()
        assert hits(store, "a") == 0
        assert hits(store, "b") == PROMPTS * PAGES
        fill(store, "a")
        store.check()
    with opened(tmp_path) as store:
        assert hits(store, "a") == PROMPTS * PAGES, "it may come back, under a new key"


@pytest.mark.parametrize(
    "selection",
    [
        Selection(everything=True),
        Selection(tenant="a", writer="w"),
        Selection(tenant="a", older_than_s=1),
        Selection(namespace=b"n"),
    ],
)
def test_a_key_is_erased_only_with_all_of_its_tenant(tmp_path: Path, selection: Selection) -> None:
    with opened(tmp_path, encrypt=True) as store:
        fill(store, "a")
        with pytest.raises(InvalidRequest, match="name a tenant only"):
            store.evict(selection, erase_key=True)
        assert hits(store, "a") == PROMPTS * PAGES
    assert len(key_files(tmp_path)) == 1


@pytest.mark.slow
def test_keys_can_live_elsewhere_and_a_missing_medium_is_no_reason_to_drop_pages(
    tmp_path: Path,
) -> None:
    keys = tmp_path / "stick" / "keys"
    with opened(tmp_path, encrypt=True, keys_dir=keys) as store:
        fill(store, "a")
    assert not (tmp_path / "store" / "keys").exists()
    with opened(tmp_path) as store:  # remembered
        assert hits(store, "a") == PROMPTS * PAGES
    keys.rename(tmp_path / "moved")
    keys.mkdir()  # an empty mount point
    for settings in ({}, {"encrypt": True}, {"encrypt": False}):
        with pytest.raises(DirectoryError, match=r"holds no keys .* mount it, or name the folder"):
            opened(tmp_path, **settings)
    with opened(tmp_path, keys_dir=tmp_path / "moved") as store:
        assert hits(store, "a") == PROMPTS * PAGES


@pytest.mark.slow
def test_pages_of_a_folder_that_is_gone_can_be_given_up_on_purpose(tmp_path: Path) -> None:
    with opened(tmp_path, encrypt=True, keys_dir=tmp_path / "keys") as store:
        fill(store, "a")
    (tmp_path / "keys").rename(tmp_path / "gone")
    (tmp_path / "store" / "settings.json").unlink()
    with pytest.raises(DirectoryError, match="pages here are encrypted and no keys were given"):
        opened(tmp_path)
    with opened(tmp_path, encrypt=True) as store:
        assert hits(store, "a") == 0
        assert store.stats().counters["key_missing"] == PROMPTS * PAGES


def test_keys_dir_alone_is_refused_and_so_is_encryption_in_memory(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="keys_dir: given, but nothing is encrypted here"):
        opened(tmp_path, keys_dir=tmp_path / "keys")
    with pytest.raises(ConfigError, match="encrypt: given, but there is no directory"):
        Store.open(None, host_bytes=1 << 20, encrypt=True)


@pytest.mark.slow
def test_a_damaged_key_file_is_named_before_anything_is_dropped(tmp_path: Path) -> None:
    with opened(tmp_path, encrypt=True) as store:
        fill(store, "a")
    [path] = key_files(tmp_path)
    content = path.read_bytes()
    path.write_bytes(content[:20])
    with pytest.raises(ConfigError, match="20 bytes, must be 32: restore it"):
        opened(tmp_path)
    path.write_bytes(content)
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="lets others read it; run: chmod 600"):
        opened(tmp_path)
    path.chmod(0o600)
    with opened(tmp_path) as store:
        assert hits(store, "a") == PROMPTS * PAGES


def test_the_library_is_needed_only_where_something_is_encrypted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path, encrypt=True) as store:
        fill(store, "a")
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers.aead", None)
    with pytest.raises(DirectoryError, match=r"pip install 'kvstore-llm\[secure\]'"):
        opened(tmp_path)
    with opened(tmp_path / "plain") as store:
        fill(store, "a")


@pytest.mark.slow
def test_the_command_erases_a_key_and_tells_of_encryption(tmp_path: Path) -> None:
    with opened(tmp_path, encrypt=True) as store:
        fill(store, "a")
        fill(store, "b")

    def command(*arguments: str) -> str:
        line = [sys.executable, "-m", "kvstore.cli", *arguments]
        done = subprocess.run(line, capture_output=True, text=True, timeout=60, check=True)
        return done.stdout

    place = str(tmp_path / "store")
    assert "encryption at rest: on" in command("stats", place)
    assert json.loads(command("stats", place, "--json"))["encryption"] == "on"
    command("evict", place, "--tenant", "a", "--erase-key")
    assert len(key_files(tmp_path)) == 2, "a dry run"
    command("evict", place, "--tenant", "a", "--erase-key", "--yes")
    assert len(key_files(tmp_path)) == 1
    with opened(tmp_path) as store:
        assert hits(store, "a") == 0
        assert hits(store, "b") == PROMPTS * PAGES


@pytest.mark.slow
def test_a_server_encrypts_and_erases_a_key_on_an_operators_word(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    flags = ("--host-bytes=32MiB", "--disk-bytes=64MiB", "--encrypt", f"--keys-dir={keys}")
    tokens, mark = prompt(0, PAGES), b"MARK-OF-A-PAGE"
    with ServerProcess(tmp_path / "store", *flags) as server:
        server.start()
        with connect(server.address) as store:
            session = store.session(SPEC)
            with session.reserve(tokens, deadline_s=10) as run:
                for view in run.views():
                    view[:] = (mark * (len(view) // len(mark) + 1))[: len(view)]
                assert run.commit(durable=True).durable
        server.kill()
        files = [path for path in tmp_path.rglob("*") if path.is_file()]
        [key] = [path.read_bytes() for path in keys.glob("*.key")]
        assert any(path.name == "data.mdb" for path in files)
        for path in files:
            content = path.read_bytes()
            assert mark not in content
            assert tokens[:PAGE_TOKENS].tobytes() not in content
            assert path.parent == keys or (key not in content and key.hex().encode() not in content)
        server.start()
        raw = RawClient(f"unix:{server.socket}")
        evict = messages.EvictRequest(tenant="default", erase_key=True)
        assert raw.call("Evict", evict).pages == PAGES
        raw.channel.close()
        assert list(keys.glob("*.key")) == []
