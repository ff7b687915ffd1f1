"""What `kvstore serve` refuses, before it opens anything and when it does: in sentences."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest
from server_process import ServerProcess

from kvstore import CacheSpec, Store
from kvstore.connect import connect
from kvstore.errors import ConfigError
from kvstore.server_config import ServerConfig
from kvstore.settings_check import check_settings

if TYPE_CHECKING:
    from pathlib import Path

MEMORY = "--host-bytes=16MiB"


def refused(*arguments: str, **variables: str) -> str:
    command = [sys.executable, "-m", "kvstore.cli", "serve", *arguments]
    environment = os.environ | variables
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
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


@pytest.mark.slow
def test_a_refused_size_is_the_one_that_was_given(tmp_path: Path) -> None:
    """It said "57344 given" of 64 KiB, and "175.00 GiB asked" of 200: what staging leaves."""
    small = refused(str(tmp_path), "--host-bytes=64KiB")
    assert "host_bytes: 64 KiB given, of which 8 KiB are staging_bytes; at least 72 KiB" in small
    assert "5 MiB for pages as adapters make them" in small
    for more in ((), ("--check-config",)):
        large = refused(str(tmp_path / "store"), "--host-bytes=16TiB", *more)
        assert large.startswith("kvstore: host_bytes: 16 TiB given")
        assert "available; lower --host-bytes" in large


@pytest.mark.slow
def test_a_refused_setting_says_where_it_was_read(tmp_path: Path) -> None:
    file = tmp_path / "kvstore.toml"
    file.write_text('io_threads = "many"\npolicy = "best"')
    said = refused(
        *(str(tmp_path), f"--config={file}", "--drain-s=soon"),
        KVSTORE_HOST_BYTES="lots",
        KVSTORE_POLICY="worst",
    )
    assert sorted(said.splitlines()) == [
        "drain_s: 'soon' is not a duration; write like '90s', '10m' or '1h30m'",
        f"io_threads (in {file}): 'many' given; a whole number is needed",
        "kvstore: host_bytes (KVSTORE_HOST_BYTES): 'lots' is not a size; write like '8GiB' or "
        "'512MB'",
        "policy (KVSTORE_POLICY): 'worst' given; 'csl', 'lru', 'arc', 'gdsf' or 'auto' is needed",
    ]


@pytest.mark.slow
def test_an_arena_too_small_for_any_hit_is_warned_of(tmp_path: Path) -> None:
    """At 80 KiB a server started, stored pages of 1 MiB on disk, and answered all look-ups with
    none of them. At the size that it names now, they are hits."""
    spec = CacheSpec.opaque("large", page_tokens=4, page_bytes=1 << 20)
    tokens = np.arange(4, dtype=np.int32)

    def hits(directory: Path, size: str) -> tuple[int, list[str]]:
        with ServerProcess(directory, f"--host-bytes={size}", "--disk-bytes=64MiB") as server:
            server.start()
            with connect(server.address) as store, store.session(spec) as session:
                with session.reserve(tokens, deadline_s=10.0) as run:
                    run.views()[0][:] = bytes(1 << 20)
                    assert run.commit().pages == 1
                with session.match(tokens) as found:
                    pages = found.stage(10.0)
            server.terminate()
        lines = server.log.read_text().splitlines()
        return pages, [line for line in lines if " warning " in line]

    pages, warnings = hits(tmp_path / "small", "2MiB")
    assert pages == 0
    assert "host_bytes: 2 MiB given, of which a session may lease 448 KiB" in warnings[0]
    assert "at least 5 MiB are needed" in warnings[0]
    assert "with pages of 1 MiB will find nothing" in warnings[1]
    assert "at least --host-bytes 5MiB is needed" in warnings[1]
    assert hits(tmp_path / "enough", "5MiB") == (1, [])
