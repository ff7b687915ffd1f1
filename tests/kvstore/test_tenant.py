"""Secrets and roots: who has no secret has no key, and a bad secret file is refused."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvstore.errors import ConfigError, InvalidRequest
from kvstore.tenant import (
    check_name,
    load_or_create_secret,
    load_secret,
    tenant_secret,
    tree_root,
)

if TYPE_CHECKING:
    from pathlib import Path

SECRET = bytes(range(32))
NAMESPACE = bytes(16)

names = st.from_regex(r"[A-Za-z0-9.-][A-Za-z0-9._-]{0,63}", fullmatch=True).filter(
    lambda name: name not in (".", "..")
)
identities = st.tuples(
    st.binary(min_size=32, max_size=32).filter(lambda secret: len(set(secret)) > 16),
    names,
    st.binary(min_size=16, max_size=16),
    st.binary(max_size=40),
)


def root_of(identity: tuple[bytes, str, bytes, bytes]) -> bytes:
    """The tree of (store secret, tenant, namespace, salt)."""
    secret, tenant, namespace, salt = identity
    return tree_root(tenant_secret(secret, tenant), namespace, salt)


@pytest.mark.slow
@given(identities, identities, st.integers(0, 3))
def test_any_difference_gives_another_root(one: Any, other: Any, place: int) -> None:
    mixed = (*one[:place], other[place], *one[place + 1 :])
    assert (root_of(one) == root_of(other)) == (one == other)
    assert (root_of(one) == root_of(mixed)) == (one == mixed)


def test_namespace_and_salt_do_not_run_together() -> None:
    secret = tenant_secret(SECRET, "default")
    assert tree_root(secret, b"n" * 16, b"nx") != tree_root(secret, b"n" * 15 + b"x", b"nn")
    with pytest.raises(InvalidRequest, match="namespace"):
        tree_root(secret, b"n" * 18)


def test_roots_are_what_the_format_says() -> None:
    """Golden values, and the recipe by which another program finds the same root."""
    secret = hashlib.blake2b(b"default", key=SECRET, digest_size=32).digest()
    root = hashlib.blake2b(NAMESPACE + b"salt", key=secret, digest_size=32).digest()
    assert tenant_secret(SECRET, "default") == secret
    assert tree_root(secret, NAMESPACE, b"salt") == root
    assert secret.hex() == "a4d3fa7556570ba4f1c446387796324ce5994a04ab77312e41900cd542300460"
    assert root.hex() == "2fa44e18c0e744069bad672a9cd978047789f822498acebcd35a83dccef807c7"


def test_a_salt_has_a_limit() -> None:
    secret = tenant_secret(SECRET, "default")
    tree_root(secret, NAMESPACE, bytes(4096))
    with pytest.raises(InvalidRequest, match="salt: 4097 bytes"):
        tree_root(secret, NAMESPACE, bytes(4097))


@given(names)
def test_good_names_pass_unchanged(name: str) -> None:
    assert check_name("tenant", name) == name


@given(st.text(max_size=80) | st.sampled_from(["../x", "a/../b", "\0", "x" * 65]))
@example("..")
@example(".")
@example("_private")
@example("name\n")
@example("\u0661")
def test_names_are_plain_or_refused(name: str) -> None:
    allowed = set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-")
    plain = 1 <= len(name) <= 64 and set(name) <= allowed and name not in (".", "..")
    if plain and not name.startswith("_"):
        assert check_name("tenant", name) == name
    else:
        with pytest.raises(InvalidRequest, match=r"^tenant: ") as refused:
            check_name("tenant", name)
        assert len(str(refused.value)) < 300


@pytest.mark.parametrize("name", [None, b"default", 7, ["default"]])
def test_only_text_is_a_name(name: object) -> None:
    with pytest.raises(InvalidRequest):
        check_name("tenant", name)


@pytest.mark.parametrize("secret", [b"", b"x", b" " * 32, b"short-secret", bytes(32), b"y" * 65])
def test_weak_secrets_key_nothing(secret: bytes) -> None:
    with pytest.raises(ConfigError, match="secret"):
        tenant_secret(secret, "default")
    with pytest.raises(ConfigError, match="secret"):
        tree_root(secret, NAMESPACE)


def test_secret_is_made_once_and_for_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    before = os.umask(0)
    try:
        made = load_or_create_secret(path)
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o7777 == 0o600
    assert len(made) == 32
    assert load_or_create_secret(path) == made == load_secret(path)
    assert os.listdir(tmp_path) == ["secret"]


def test_secret_is_for_its_owner_only_under_a_strict_umask(tmp_path: Path) -> None:
    before = os.umask(0o777)
    try:
        load_or_create_secret(tmp_path / "secret")
    finally:
        os.umask(before)
    assert (tmp_path / "secret").stat().st_mode & 0o7777 == 0o600


def test_many_that_start_at_once_get_one_secret(tmp_path: Path) -> None:
    barrier = threading.Barrier(8)
    found: list[bytes] = []

    def start() -> None:
        barrier.wait()
        found.append(load_or_create_secret(tmp_path / "secret"))

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(found)) == 1
    assert os.listdir(tmp_path) == ["secret"]


def write(path: Path, content: bytes, mode: int = 0o600) -> Path:
    """A secret file as a person would have made it."""
    path.write_bytes(content)
    path.chmod(mode)
    return path


@pytest.mark.parametrize(
    "content",
    [b"", b"\n", b"    ", b"\r\n\r\n", b"8 bytes!", b"fifteen bytes..", b" " * 32, b"0" * 64],
    ids=range(8),
)
def test_empty_and_short_secrets_are_refused(tmp_path: Path, content: bytes) -> None:
    path = write(tmp_path / "secret", content)
    with pytest.raises(ConfigError, match=r"secret.*openssl rand") as refused:
        load_or_create_secret(path)
    assert content.decode() not in str(refused.value) or not content.strip()
    assert path.read_bytes() == content, "a bad secret is never replaced behind the owner's back"


def test_too_long_secrets_are_refused_not_cut(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="16 to 64"):
        load_secret(write(tmp_path / "secret", os.urandom(65)))


def test_a_text_secret_counts_without_its_newline(tmp_path: Path) -> None:
    text = b"0123456789abcdef" * 4
    assert load_secret(write(tmp_path / "one", text + b"\n")) == text
    assert load_secret(write(tmp_path / "two", text + b"\r\n")) == text


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644, 0o620, 0o666])
def test_a_secret_open_to_others_is_refused(tmp_path: Path, mode: int) -> None:
    path = write(tmp_path / "secret", SECRET, mode)
    with pytest.raises(ConfigError, match=f"{mode:04o}.*chmod 600"):
        load_secret(path)


def test_a_secret_must_be_a_file_and_there(tmp_path: Path) -> None:
    write(tmp_path / "secret", SECRET)
    (tmp_path / "link").symlink_to(tmp_path / "secret")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe", 0o600)
    for name in ("link", "dangling", "folder", "pipe"):
        with pytest.raises(ConfigError, match=name):
            load_or_create_secret(tmp_path / name)
    for name in ("absent", "no/such/folder"):
        with pytest.raises(ConfigError, match="No such file"):
            load_secret(tmp_path / name)
    with pytest.raises(ConfigError, match="cannot be made"):
        load_or_create_secret(tmp_path / "no" / "secret")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to someone else")
@pytest.mark.slow
def test_a_secret_of_someone_else_is_refused(tmp_path: Path) -> None:
    """Root meets a stranger's file, and a stranger meets root's."""
    foreign = write(tmp_path / "foreign", SECRET)
    os.chown(foreign, 65534, 65534)
    with pytest.raises(ConfigError, match="belongs to uid 65534, this process is uid 0"):
        load_secret(foreign)
    mine = write(tmp_path / "mine", SECRET)
    script = (
        "import os, pathlib, sys\n"
        "from kvstore.tenant import load_secret\n"
        "os.seteuid(65534)\n"
        "load_secret(pathlib.Path(sys.argv[1]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(mine)], capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert "ConfigError" in done.stderr
