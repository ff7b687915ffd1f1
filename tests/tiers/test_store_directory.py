"""Who may open a store's directory: refusals that say what to do, and an identity that lasts."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from kvstore.tiers import store_directory
from kvstore.tiers.disk_tier import DiskTier
from kvstore.tiers.file_layer import FileLayer
from kvstore.tiers.segment import FORMAT_VERSION
from kvstore.tiers.store_directory import IDENTITY_NAMES, StoreHome
from kvstore.tiers.tier import TierError

if TYPE_CHECKING:
    from pathlib import Path


class OnFileSystem(FileLayer):
    """Says that all lies on one kind of file system."""

    def __init__(self, magic: int) -> None:
        self.magic = magic

    def file_system_magic(self, path: Path) -> int:
        return self.magic


def open_home(*paths: Path, files: FileLayer | None = None, force: bool = False) -> StoreHome:
    return StoreHome(list(paths), files or FileLayer(), force=force)


def test_boot_numbers_rise_and_the_uuid_stays(tmp_path: Path) -> None:
    seen = []
    for _ in range(3):
        home = open_home(tmp_path / "d")
        seen.append((home.identity.boot_number, home.identity.store_uuid))
        home.close()
    assert [number for number, _ in seen] == [1, 2, 3]
    assert len({uuid for _, uuid in seen}) == 1


@pytest.mark.parametrize("name", IDENTITY_NAMES)
@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "gone"])
def test_one_damaged_identity_file_loses_nothing(tmp_path: Path, name: str, damage: str) -> None:
    home = open_home(tmp_path / "d")
    uuid = home.identity.store_uuid
    home.close()
    path = tmp_path / "d" / name
    content = bytearray(path.read_bytes())
    if damage == "flip":
        content[len(content) // 2] ^= 2
        path.write_bytes(content)
    elif damage == "gone":
        path.unlink()
    else:
        path.write_bytes(content[: len(content) // 2 if damage == "cut" else 0])
    home = open_home(tmp_path / "d")
    assert (home.identity.store_uuid, home.identity.boot_number) == (uuid, 2)
    assert not home.is_new
    home.close()


def test_a_second_opener_is_told_who_has_it(tmp_path: Path) -> None:
    home = open_home(tmp_path)
    with pytest.raises(TierError, match=rf"in use by pid {os.getpid()} since 20"):
        open_home(tmp_path)
    home.close()
    open_home(tmp_path).close()


def test_another_process_is_refused_until_the_first_is_killed(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path;"
        "from kvstore.tiers.store_directory import StoreHome;"
        "from kvstore.tiers.file_layer import FileLayer;"
        "h = StoreHome([Path(sys.argv[1])], FileLayer()); print('locked', flush=True);"
        "time.sleep(60)"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    with holder:
        assert holder.stdout.readline() == "locked\n"
        with pytest.raises(TierError, match=rf"in use by pid {holder.pid} "):
            open_home(tmp_path)
        holder.kill()
    open_home(tmp_path).close()


@pytest.mark.parametrize("magic", store_directory.NETWORK_FILE_SYSTEMS)
def test_network_file_systems_are_refused_unless_forced(tmp_path: Path, magic: int) -> None:
    name = store_directory.NETWORK_FILE_SYSTEMS[magic]
    with pytest.raises(TierError, match=rf"network file system \({name}\).*local disk"):
        open_home(tmp_path / "d", files=OnFileSystem(magic))
    home = open_home(tmp_path / "d", files=OnFileSystem(magic), force=True)
    home.close()


@pytest.mark.parametrize("magic", store_directory.DOUBTFUL_FILE_SYSTEMS)
def test_doubtful_file_systems_are_named_in_the_log(
    tmp_path: Path, magic: int, caplog: pytest.LogCaptureFixture
) -> None:
    open_home(tmp_path / "d", files=OnFileSystem(magic)).close()
    assert store_directory.DOUBTFUL_FILE_SYSTEMS[magic] in caplog.text


def test_the_real_magic_is_found(tmp_path: Path) -> None:
    magic = FileLayer().file_system_magic(tmp_path)
    kind = subprocess.run(
        ["stat", "-f", "-c", "%t", str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert magic == int(kind.stdout, 16)
    with pytest.raises(FileNotFoundError):
        FileLayer().file_system_magic(tmp_path / "nothing")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_a_directory_of_another_owner_is_refused(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    os.chown(tmp_path / "d", 12345, -1)
    with pytest.raises(TierError, match="belongs to uid 12345, this process is uid 0"):
        open_home(tmp_path / "d")


def test_a_directory_with_other_files_is_left_alone(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(TierError, match=r"not a kvstore directory and not empty \(thesis.tex\)"):
        open_home(tmp_path)
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755
    assert sorted(os.listdir(tmp_path)) == ["thesis.tex"]


@pytest.mark.parametrize("is_gone", [False, True])
def test_pages_whose_identity_is_lost_are_left_alone_with_a_way_out(
    tmp_path: Path, is_gone: bool
) -> None:
    open_home(tmp_path).close()
    (tmp_path / "segment-00000001").write_bytes(b"pages")
    copy = (tmp_path / IDENTITY_NAMES[1]).read_bytes()
    for name in IDENTITY_NAMES:
        (tmp_path / name).write_bytes(b"")
        if is_gone:
            (tmp_path / name).unlink()
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(TierError, match="the 1 segments of pages here are: put one of them back"):
        open_home(tmp_path)
    assert sorted(os.listdir(tmp_path)) == before
    (tmp_path / IDENTITY_NAMES[1]).write_bytes(copy)
    open_home(tmp_path).close()


def test_pages_in_a_further_directory_are_not_dropped_for_a_lost_identity(tmp_path: Path) -> None:
    first, further = tmp_path / "a", tmp_path / "b"
    open_home(first, further).close()
    (further / "segment-00000001").write_bytes(b"pages")
    for name in IDENTITY_NAMES:
        for path in (first / name, further / name):
            path.unlink(missing_ok=True)
    with pytest.raises(TierError, match="whose the 1 segments of pages here are"):
        open_home(first, further)
    assert (further / "segment-00000001").read_bytes() == b"pages"


def rewrite_identity(path: Path, **changes: object) -> None:
    for name in IDENTITY_NAMES:
        if (path / name).exists():
            body = json.loads((path / name).read_bytes())
            body.pop("check")
            body |= changes
            body["check"] = store_directory._check_of(body)
            (path / name).write_text(json.dumps(body))


def test_a_newer_format_is_refused_with_both_versions(tmp_path: Path) -> None:
    open_home(tmp_path).close()
    rewrite_identity(tmp_path, format=FORMAT_VERSION + 1)
    with pytest.raises(
        TierError, match=rf"format {FORMAT_VERSION + 1}, .*up to {FORMAT_VERSION}: install a newer"
    ):
        open_home(tmp_path)


def test_a_boot_number_at_its_end_is_refused(tmp_path: Path) -> None:
    open_home(tmp_path).close()
    rewrite_identity(tmp_path, boot=store_directory.BOOT_NUMBER_MAX)
    with pytest.raises(TierError, match="its limit"):
        open_home(tmp_path)


def test_directories_of_two_stores_do_not_mix(tmp_path: Path) -> None:
    a, b, c, d = (tmp_path / name for name in "abcd")
    open_home(a, b).close()
    open_home(c, d).close()
    with pytest.raises(TierError, match="belongs to another store"):
        open_home(a, d)
    with pytest.raises(TierError, match="holds a store's catalog: name it first"):
        open_home(b, a)
    with pytest.raises(TierError, match="further directory of a store, not its first"):
        open_home(b)
    with pytest.raises(TierError, match="the same directory twice"):
        open_home(a, a)
    with pytest.raises(TierError, match="no directory given"):
        open_home()
    open_home(a, b).close()


def test_a_path_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("x")
    with pytest.raises(TierError, match="needs a writable local directory"):
        open_home(tmp_path / "f")


@pytest.mark.parametrize("mask", [0, 0o077, 0o777 & ~0o700])
def test_nothing_is_readable_by_others_under_any_umask(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        tier = DiskTier.open([tmp_path / "a" / "d", tmp_path / "e"], 64 << 20, load=True)
        assert len(tier.reserve("t", 4096, 3)) == 3
        tier.close()
    finally:
        os.umask(before)
    for top in (tmp_path / "a" / "d", tmp_path / "e"):
        for folder, _, names in os.walk(top):
            assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
            for name in names:
                assert stat.S_IMODE(os.stat(os.path.join(folder, name)).st_mode) == 0o600, name
