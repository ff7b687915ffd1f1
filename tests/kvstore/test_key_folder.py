"""Keys on disk: made once, durable, private, and named after nobody."""

from __future__ import annotations

import multiprocessing
import os
import shutil
from typing import TYPE_CHECKING

import pytest

from kvstore.errors import ConfigError, DirectoryError
from kvstore.key_folder import KeyFolder
from kvstore.tiers.tier import TierError

if TYPE_CHECKING:
    from pathlib import Path

SECRET = bytes(range(32))


@pytest.fixture
def folder(tmp_path: Path) -> KeyFolder:
    folder = KeyFolder(tmp_path / "keys", SECRET)
    folder.open(create=True)
    return folder


def key_files(folder: KeyFolder) -> list[Path]:
    return sorted(folder.folder.glob("*.key"))


def test_a_key_is_made_once_and_is_private(folder: KeyFolder) -> None:
    before = os.umask(0)
    try:
        key = folder.key_for("alice")
    finally:
        os.umask(before)
    assert folder.key_for("alice") == key
    assert folder.find("alice") == key
    assert folder.find("bob") is None
    [path] = key_files(folder)
    assert path.read_bytes() == key
    assert len(key) == 32
    assert path.stat().st_mode & 0o777 == 0o600
    assert folder.folder.stat().st_mode & 0o777 == 0o700
    assert folder.load() == [key]
    assert folder.key_for("bob") != key


def test_no_file_is_named_after_a_tenant(folder: KeyFolder) -> None:
    folder.key_for("alice")
    [path] = key_files(folder)
    other = KeyFolder(folder.folder.with_name("other"), SECRET[::-1])
    other.open(create=True)
    other.key_for("alice")
    assert "alice" not in path.name
    assert key_files(other)[0].name != path.name, "the names are keyed with the store's secret"


def test_erasing_leaves_nothing_of_a_key(folder: KeyFolder) -> None:
    key = folder.key_for("alice")
    kept = folder.key_for("bob")
    [path] = [path for path in key_files(folder) if path.read_bytes() == key]
    shutil.copy(path, f"{path}.123-abc.tmp")  # what a kill may leave while a key is made
    folder.erase("alice")
    folder.erase("alice")
    assert [item.read_bytes() for item in key_files(folder)] == [kept]
    assert not any(item.read_bytes() == key for item in folder.folder.iterdir())
    assert folder.key_for("alice") != key


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: os.truncate(path, 12), "12 bytes, must be 32: restore it"),
        (lambda path: os.truncate(path, 0), "0 bytes, must be 32: restore it"),
        (lambda path: path.write_bytes(b"k" * 33), "longer than 32 bytes"),
        (lambda path: path.chmod(0o640), "mode 0640 lets others read it; run: chmod 600"),
        (lambda path: (path.unlink(), path.mkdir()), "is not a regular file"),
    ],
    ids=["short", "empty", "long", "mode", "directory"],
)
def test_a_key_file_that_is_not_as_it_was_made_is_refused(
    folder: KeyFolder, damage: object, message: str
) -> None:
    key = folder.key_for("alice")
    [path] = key_files(folder)
    damage(path)  # type: ignore[operator]
    with pytest.raises(ConfigError, match=message) as caught:
        folder.load()
    assert key.hex() not in str(caught.value)
    for call in (folder.find, folder.key_for):
        with pytest.raises(TierError, match=message):
            call("alice")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_key_file_of_someone_else_is_refused(folder: KeyFolder) -> None:
    folder.key_for("alice")
    os.chown(key_files(folder)[0], 65534, 65534)
    with pytest.raises(ConfigError, match="belongs to uid 65534"):
        folder.load()


def test_a_folder_of_another_store_or_of_nobody_is_refused(folder: KeyFolder) -> None:
    with pytest.raises(DirectoryError, match="keys of a store with another secret"):
        KeyFolder(folder.folder, SECRET[::-1]).open(create=True)
    with pytest.raises(DirectoryError, match="holds no keys"):
        KeyFolder(folder.folder.with_name("mount"), SECRET).open(create=False)
    KeyFolder(folder.folder, SECRET).open(create=False)


def test_a_folder_in_which_others_can_write_is_refused(folder: KeyFolder) -> None:
    folder.folder.chmod(0o770)
    with pytest.raises(ConfigError, match="mode 0770 lets others write in it; run: chmod 700"):
        folder.open(create=False)
    folder.folder.chmod(0o750)
    folder.open(create=False)


def _make(folder: Path, start: object, answers: object) -> None:
    start.wait()  # type: ignore[attr-defined]
    mine = KeyFolder(folder, SECRET)
    mine.open(create=True)
    answers.put(mine.key_for("alice"))  # type: ignore[attr-defined]


@pytest.mark.slow
def test_processes_that_make_a_key_at_once_get_the_same(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    start, answers = context.Event(), context.Queue()
    arguments = (tmp_path / "keys", start, answers)
    makers = [context.Process(target=_make, args=arguments) for _ in range(4)]
    for maker in makers:
        maker.start()
    start.set()
    keys = {answers.get(timeout=60) for _ in makers}
    for maker in makers:
        maker.join(30)
        assert maker.exitcode == 0
    assert len(keys) == 1
    assert [path.read_bytes() for path in (tmp_path / "keys").glob("*.key")] == list(keys)
