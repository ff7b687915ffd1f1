"""What `kvstore serve` refuses, before it opens anything and when it does: in sentences."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from kvstore import Store
from kvstore.errors import ConfigError
from kvstore.server_config import ServerConfig
from kvstore.settings_check import check_settings

if TYPE_CHECKING:
    from pathlib import Path

MEMORY = "--host-bytes=16MiB"


def refused(*arguments: str) -> str:
    command = [sys.executable, "-m", "kvstore.cli", "serve", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return done.stderr


@pytest.fixture
def short(tmp_path: Path) -> Path:
    path = tmp_path / "short"
    path.write_text("abc")
    path.chmod(0o600)
    return path


@pytest.mark.slow
def test_check_config_says_all_that_serve_would_refuse(tmp_path: Path, short: Path) -> None:
    directory, missing = tmp_path / "store", tmp_path / "missing"
    flags = ("--disk-bytes=1MiB", f"--secret-file={short}", f"--keys-dir={missing}")
    flags += ("--redis-url=redis://localhost:1", f"--redis-password-file={missing}")
    said = refused(str(directory), MEMORY, *flags, "--check-config")
    for words in ("disk_bytes: 1 MiB given; at least", f"secret file {short}: 3 bytes"):
        assert words in said
    for words in ("keys_dir: given, but nothing is encrypted", f"redis_password_file {missing}"):
        assert words in said
    assert not directory.exists()


def test_the_check_knows_the_stores_own_secret_and_note(tmp_path: Path, short: Path) -> None:
    directory = tmp_path / "store"
    with Store.open(directory, host_bytes="4MiB", disk_bytes="64MiB"):
        pass
    check_settings(ServerConfig(directory=directory, host_bytes="4MiB"))
    other = tmp_path / "other"
    other.write_text("0123456789abcdef" * 2)
    other.chmod(0o600)
    with pytest.raises(ConfigError, match="is not the secret that the pages"):
        check_settings(ServerConfig(directory=directory, host_bytes="4MiB", secret_file=other))
    with pytest.raises(ConfigError, match=r"secret file .*missing: cannot be opened"):
        check_settings(ServerConfig(directory=tmp_path / "new", secret_file=tmp_path / "missing"))
    (directory / "settings.json").write_bytes(b"{")
    with pytest.raises(ConfigError, match="is damaged"):
        check_settings(ServerConfig(directory=directory, host_bytes="4MiB"))


@pytest.mark.slow
def test_a_place_that_cannot_hold_a_directory_is_a_sentence() -> None:
    assert "/proc/kv: cannot be made" in refused("/proc/kv", MEMORY)


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_read_only_mount_of_a_store_is_a_sentence(tmp_path: Path) -> None:
    directory, mount = tmp_path / "store", tmp_path / "mount"
    with Store.open(directory, host_bytes="4MiB", disk_bytes="24MiB"):
        mount.mkdir()
    script = (
        'mount -t tmpfs none "$2" && cp -a "$1" "$2"/kv && mount -o remount,ro "$2" || exit 99; '
        'exec "$3" -m kvstore.cli serve "$2"/kv --host-bytes 16MiB'
    )
    command = ["unshare", "-m", "bash", "-c", script, "bash"]
    command += [str(directory), str(mount), sys.executable]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode == 99 or "unshare" in done.stderr:
        pytest.skip(f"no mounts here: {done.stderr[:200]}")
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert "Read-only file system" in done.stderr.splitlines()[-1]
