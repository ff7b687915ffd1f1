"""StoreConfig: one table of what is refused, and where each default comes from."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from kvstore.config import (
    StoreConfig,
    default_directory,
    default_disk_bytes,
    default_host_bytes,
    environment_values,
    load_config,
)
from kvstore.errors import ConfigError
from kvstore.tiers.available_memory import available_memory_bytes

BAD: list[tuple[dict[str, Any], str]] = [
    ({"hots_bytes": "1GiB"}, "hots_bytes: unknown setting; did you mean host_bytes?"),
    ({"Host_Bytes": "1GiB"}, "Host_Bytes: unknown setting"),
    ({"xyzzy": 1}, "xyzzy: unknown setting; known are dir,"),
    ({"host_bytes": "8GBi"}, "host_bytes: '8GBi' is not a size; did you mean '8GiB'?"),
    ({"host_bytes": "eight"}, "host_bytes: 'eight' is not a size"),
    ({"host_bytes": ""}, "host_bytes: '' is not a size"),
    ({"host_bytes": "-1GiB"}, "host_bytes: '-1GiB' is not a size"),
    ({"host_bytes": -1}, "host_bytes: -1 is out of bounds"),
    ({"host_bytes": 0}, "host_bytes: 0 given; at least 64 KiB is needed"),
    ({"host_bytes": "1KiB"}, "host_bytes: '1KiB' given"),
    ({"host_bytes": "900PiB"}, "host_bytes: '900PiB' given; at most 64 TiB is needed"),
    ({"host_bytes": 1 << 90}, "host_bytes: "),
    ({"host_bytes": 1.5}, "host_bytes: 1.5 is not a size"),
    ({"host_bytes": True}, "host_bytes: True is not a size"),
    ({"host_bytes": [1]}, "host_bytes: [1] is not a size"),
    ({"disk_bytes": "1.0001K"}, "disk_bytes: '1.0001K' is not a whole number of bytes"),
    ({"disk_bytes": "-5"}, "disk_bytes: '-5' is not a size"),
    ({"disk_bytes": "1EiB"}, "disk_bytes: '1EiB' is not a size"),
    ({"disk_bytes": "1000PiB"}, "disk_bytes: 1000 PiB asked, the file system of"),
    ({"directory": None, "disk_bytes": "1GiB"}, "disk_bytes: given, but there is no directory"),
    ({"directory": None, "disk_directories": ["/tmp/a"]}, "disk_directories: given, but"),  # noqa: S108
    ({"directory": ""}, "directory: '' is not a path"),
    ({"directory": 7}, "directory: 7 is not a path"),
    ({"directory": "a\0b"}, "directory: a path cannot hold a NUL"),
    ({"directory": "~no-such-user-here/x"}, "directory: "),
    ({"directory": __file__}, "test_config.py is not a directory"),
    ({"directory": "x", "dir": "x"}, "dir"),
    ({"disk_directories": 7}, "disk_directories: 7 is not a list of paths"),
    ({"disk_directories": ["a", "a"]}, "disk_directories: one directory is named twice"),
    ({"disk_directories": [""]}, "disk_directories: '' is not a path"),
    ({"disk_directories": "a::b"}, "disk_directories: '' is not a path"),
    ({"disk_directories": [__file__]}, "test_config.py is not a directory"),
    ({"huge_pages": "perhaps"}, "huge_pages: 'perhaps' given; true or false is needed"),
    ({"huge_pages": 2}, "huge_pages: 2 given"),
    ({"secret_file": ""}, "secret_file: '' is not a path"),
    ({"secret_file": b"/x"}, "secret_file: b'/x' is not a path"),
    ({"max_age_s": "10min"}, "max_age_s: '10min' is not a duration; did you mean '10m'?"),
    ({"max_age_s": -1}, "max_age_s: -1 is out of bounds"),
    ({"max_age_s": 0}, "max_age_s: 0 given; more than 0 s is needed"),
    ({"max_age_s": "99999w"}, "max_age_s: '99999w' is out of bounds"),
    ({"max_age_s": float("nan")}, "max_age_s: nan is out of bounds"),
    ({"dirty_bytes_max": 0}, "dirty_bytes_max: 0 given"),
    ({"dirty_bytes_max": "lots"}, "dirty_bytes_max: 'lots' is not a size"),
    ({"io_threads": 0}, "io_threads: 0 given; at least 1 is needed"),
    ({"io_threads": 65}, "io_threads: 65 given; at most 64 is needed"),
    ({"io_threads": True}, "io_threads: a whole number is wanted"),
    ({"io_threads": "four"}, "io_threads: 'four' given; a whole number is needed"),
    ({"io_threads": 1.5}, "io_threads: 1.5 given; a whole number is needed"),
    ({"stage_deadline_s": None}, "stage_deadline_s: None is not a duration"),
    ({"stage_deadline_s": "-2s"}, "stage_deadline_s: '-2s' is not a duration"),
]


@pytest.mark.parametrize(("values", "message"), BAD, ids=range(len(BAD)))
def test_bad_settings_are_refused_in_one_clear_line(
    values: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as refused:
        StoreConfig(**{"directory": tmp_path, "host_bytes": "1MiB"} | values)
    assert message in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1
    assert len(str(refused.value)) < 400


def test_all_problems_are_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        StoreConfig(directory=tmp_path, host_bytes="8GBi", io_threads=0, hots=1)
    lines = str(refused.value).splitlines()
    assert [line.split(":")[0] for line in lines] == ["host_bytes", "io_threads", "hots"]


def test_there_is_no_way_around_the_checks(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="io_threads: 0 given"):
        StoreConfig.model_validate({"directory": tmp_path, "io_threads": 0})
    settings = StoreConfig(directory=tmp_path)
    with pytest.raises(ValueError, match="frozen"):
        settings.io_threads = 5  # type: ignore[misc]


def test_sizes_and_durations_are_parsed(tmp_path: Path) -> None:
    settings = StoreConfig(
        dir=str(tmp_path), host_bytes="512MB", disk_bytes="1.5G", max_age_s="1h30m"
    )
    assert settings.directory == tmp_path
    assert settings.host_bytes == 512_000_000
    assert settings.disk_bytes == 3 << 29
    assert settings.max_age_s == 5400
    assert settings.segment_directories == (tmp_path,)


def test_a_store_in_memory_has_no_disk() -> None:
    settings = StoreConfig(directory=None)
    assert settings.directory is None
    assert settings.disk_bytes == 0
    assert settings.segment_directories == ()


def test_segments_can_live_on_more_drives(tmp_path: Path) -> None:
    drives = [tmp_path / "a", tmp_path / "b"]
    settings = StoreConfig(directory=tmp_path / "store", disk_directories=drives)
    assert settings.segment_directories == (tmp_path / "store", *drives)
    as_text = StoreConfig(directory=tmp_path, disk_directories=":".join(map(str, drives)))
    assert as_text.segment_directories == (tmp_path, *drives)


def test_relative_and_home_paths_become_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert StoreConfig(directory="~/x").directory == tmp_path / "x"
    assert StoreConfig(directory="x").directory == tmp_path / "x"


def test_default_directory_follows_the_xdg_standard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_directory() == tmp_path / "kvstore"
    assert StoreConfig().directory == tmp_path / "kvstore"
    for void in ("", "relative/cache"):
        monkeypatch.setenv("XDG_CACHE_HOME", void)
        assert default_directory() == Path("/home/someone/.cache/kvstore")
    assert not (tmp_path / "kvstore").exists(), "a config makes nothing"


def test_default_host_bytes_are_a_quarter_of_free_memory_at_most_8_gib() -> None:
    share = min(available_memory_bytes() // 4, 8 << 30)
    assert abs(default_host_bytes() - share) < 512 << 20
    assert default_host_bytes() % (1 << 20) == 0


@pytest.mark.parametrize(
    ("available", "host_bytes"),
    [(24 << 30, 6 << 30), (1 << 40, 8 << 30), (32 << 30, 8 << 30), (0, 64 << 10)],
)
def test_default_host_bytes_of_other_machines(available: int, host_bytes: int) -> None:
    assert default_host_bytes(available) == host_bytes


def test_default_disk_bytes_are_half_of_free_disk_at_most_64_gib(tmp_path: Path) -> None:
    system = os.statvfs(tmp_path)
    share = min(system.f_bavail * system.f_frsize // 2, 64 << 30)
    assert abs(default_disk_bytes([tmp_path / "not" / "yet"]) - share) < 512 << 20
    twice = default_disk_bytes([tmp_path / "a", tmp_path / "b"])
    assert abs(twice - share) < 512 << 20, "two directories of one file system are no more room"


def test_a_store_does_not_shrink_with_what_it_holds(tmp_path: Path) -> None:
    """Its own segments count as free: half of (free + own) is the same before and after."""
    empty = default_disk_bytes([tmp_path], free_bytes=100 << 20)
    (tmp_path / "segments").mkdir()
    (tmp_path / "segments" / "one").write_bytes(bytes(20 << 20))
    assert default_disk_bytes([tmp_path], free_bytes=80 << 20) == empty == 50 << 20
    assert default_disk_bytes([tmp_path], free_bytes=1 << 50) == 64 << 30


def test_flags_win_over_environment_over_file_over_defaults(tmp_path: Path) -> None:
    file = tmp_path / "kvstore.toml"
    file.write_text('dir = "/srv/a"\nhost_bytes = "1MiB"\nio_threads = 2\nstage_deadline_s = 7\n')
    environ = {"KVSTORE_HOST_BYTES": "2MiB", "KVSTORE_IO_THREADS": "3", "PATH": "/bin"}
    flags = {"dir": tmp_path, "host_bytes": "3MiB", "io_threads": None}
    settings = load_config(flags, file, environ)
    assert settings.directory == tmp_path
    assert settings.host_bytes == 3 << 20
    assert settings.io_threads == 3
    assert settings.stage_deadline_s == 7


def test_the_environment_is_read_only_when_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVSTORE_IO_THREADS", "9")
    assert StoreConfig(directory=tmp_path).io_threads == 4
    assert load_config({"dir": tmp_path}).io_threads == 9


def test_dir_and_directory_are_one_setting(tmp_path: Path) -> None:
    assert environment_values({"KVSTORE_DIR": "/a"}) == {"directory": "/a"}
    assert environment_values({"KVSTORE_DIRECTORY": "/a"}) == {"directory": "/a"}
    with pytest.raises(ConfigError, match="given twice"):
        environment_values({"KVSTORE_DIR": "/a", "KVSTORE_DIRECTORY": "/a"})
    settings = load_config({"directory": tmp_path}, None, {"KVSTORE_DIR": "/a"})
    assert settings.directory == tmp_path


def test_an_unknown_variable_is_refused_with_its_likely_name() -> None:
    with pytest.raises(ConfigError, match=r"KVSTORE_HOTS_BYTES: unknown.*KVSTORE_HOST_BYTES"):
        environment_values({"KVSTORE_HOTS_BYTES": "1GiB"})


def test_variables_that_kubernetes_sets_are_no_settings() -> None:
    """A service named kvstore puts these into every pod beside it; that must not stop a start."""
    injected = {
        "KVSTORE_SERVICE_HOST": "10.0.0.1",
        "KVSTORE_SERVICE_PORT": "50051",
        "KVSTORE_SERVICE_PORT_GRPC": "50051",
        "KVSTORE_PORT": "tcp://10.0.0.1:50051",
        "KVSTORE_PORT_50051_TCP": "tcp://10.0.0.1:50051",
        "KVSTORE_PORT_50051_TCP_ADDR": "10.0.0.1",
    }
    assert environment_values(injected) == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hots_bytes = 1", r"hots_bytes \(in .*toml\): unknown setting"),
        ("[disk]\nbytes = 1", r"disk \(in .*toml\): unknown setting"),
        ("host_bytes = ", "is not TOML"),
        ('dir = "/a"\ndirectory = "/a"', "given twice"),
        ("host_bytes = 1.5", r"host_bytes \(in .*toml\): 1.5 is not a size"),
    ],
)
def test_bad_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "kvstore.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_config({}, file, {})


def test_a_missing_or_binary_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load_config({}, tmp_path / "absent.toml", {})
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\0")
    with pytest.raises(ConfigError, match="is not TOML"):
        load_config({}, tmp_path / "binary.toml", {})
