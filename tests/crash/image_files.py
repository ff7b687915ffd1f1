"""A file layer with a live and a durable image: after a cut only the durable one is left.

What is written goes to the live files. Of that, only what was synced is sure to reach the image;
of the rest, sectors of 512 bytes or blocks of 4 KiB go there or not as a seeded dice falls, at
once, so that the image is torn at any moment. Names are durable when their directory was synced.
The image is a directory of real files, kept up to date as the store runs: the process may be killed
at any time and the image is what a power cut would have left.

LMDB writes its file past this layer. The image gets a copy of it after each commit, so this variant
takes LMDB's own syncs on trust and proves the order of ours around its commits: a record can never
be in the image before its slot is, unless the store committed it too early. The loop-device
variants test the rest.

    image/tree    the directory as a power cut leaves it; names are links to ...
    image/blobs   ... contents, one file for each file that was ever made
"""

from __future__ import annotations

import os
import random
import shutil
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from crash_files import BLOCK_BYTES, SECTOR_BYTES, CrashFiles, Event

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


@dataclass(slots=True, eq=False)
class _Content:
    """One file: a buffered descriptor of the live one, and its durable content."""

    live: int
    durable: int
    blob: Path
    dirty: list[tuple[int, int]] = field(default_factory=list)  # offset, bytes
    lock: threading.Lock = field(default_factory=threading.Lock)


class ImageFiles(CrashFiles):
    """CrashFiles whose unsynced bytes and names are lost or torn when the process ends."""

    def __init__(
        self, live: Path, image: Path, seed: str, kill: Event | None, fault: Event | None
    ) -> None:
        super().__init__(kill, fault)
        self._root, self._tree, self._blobs = live, image / "tree", image / "blobs"
        self._rng = random.Random(seed)
        self._names: dict[Path, _Content] = {}
        self._open_files: dict[int, _Content] = {}
        self._made = 0
        self._names_lock = threading.RLock()
        for path in sorted(live.rglob("*")):
            if path.is_file() and path.parent == live:
                self._names[path] = self._adopt(path)

    @staticmethod
    def start_over(live: Path, image: Path) -> None:
        """After a cut: the live directory becomes what the image holds, and a new image of it."""
        tree = image / "tree"
        shutil.rmtree(live, ignore_errors=True)
        if tree.exists():
            shutil.copytree(tree, live)
        else:
            live.mkdir(parents=True)
        shutil.rmtree(image, ignore_errors=True)
        shutil.copytree(live, tree)
        (image / "blobs").mkdir()

    # -- names ------------------------------------------------------------------------------------

    def open(
        self, path: Path, *, create: bool = False, direct: bool = False, read_only: bool = False
    ) -> int:
        descriptor = super().open(path, create=create, direct=direct, read_only=read_only)
        with self._names_lock:
            if create:
                self._names[path] = self._adopt(path)
            self._open_files[descriptor] = self._names[path]
        return descriptor

    def close(self, descriptor: int) -> None:
        with self._names_lock:
            self._open_files.pop(descriptor, None)
        super().close(descriptor)

    def unlink(self, path: Path) -> None:
        super().unlink(path)
        with self._names_lock:
            self._names.pop(path, None)
            if self._rng.random() < 0.5:
                self._image(path).unlink(missing_ok=True)

    def remove_tree(self, path: Path) -> None:
        super().remove_tree(path)
        with self._names_lock:
            self._forget(path)
            if self._rng.random() < 0.5:
                shutil.rmtree(self._image(path), ignore_errors=True)

    def rename(self, old: Path, new: Path) -> None:
        with self._names_lock:
            if old.is_dir():
                self._rename_directory(old, new)
            else:
                os.rename(old, new)
                self._names[new] = self._names.pop(old)
        self.sync_directory(new.parent)
        self.step("identity-done")

    def sync_directory(self, path: Path) -> None:
        """The names in the image become those of the live directory."""
        with self._names_lock:
            image = self._image(path)
            image.mkdir(parents=True, exist_ok=True)
            for name, content in self._names.items():
                if name.parent == path:
                    self._link(content, self._image(name))
            for entry in image.iterdir():
                if not (path / entry.name).exists():
                    shutil.rmtree(entry) if entry.is_dir() else entry.unlink()

    def _rename_directory(self, old: Path, new: Path) -> None:
        os.rename(old, new)
        if self._image(old).exists():
            os.rename(self._image(old), self._image(new))
        self._forget(old)

    def _forget(self, path: Path) -> None:
        for name in [name for name in self._names if name == path or path in name.parents]:
            del self._names[name]

    def _link(self, content: _Content, name: Path) -> None:
        if name.exists() and name.samefile(content.blob):
            return
        aside = self._blobs / "name"
        aside.unlink(missing_ok=True)
        os.link(content.blob, aside)
        os.rename(aside, name)

    def _image(self, path: Path) -> Path:
        return self._tree / path.relative_to(self._root)

    def _adopt(self, path: Path) -> _Content:
        """Content of a live file; the image may know its name already."""
        self._made += 1
        blob = self._blobs / str(self._made)
        known = self._image(path)
        if known.exists():
            os.link(known, blob)
        durable = os.open(blob, os.O_RDWR | os.O_CREAT, 0o600)
        return _Content(os.open(path, os.O_RDWR), durable, blob)

    # -- bytes ------------------------------------------------------------------------------------

    def write(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        done = super().write(descriptor, buffers, offset)
        content = self._open_files[descriptor]
        with content.lock:
            content.dirty.append((offset, done))
        self._leak(content, offset, done)
        return done

    def fdatasync(self, descriptor: int) -> None:
        if descriptor not in self._segments:
            self.sync(descriptor)
            return
        super().fdatasync(descriptor)

    def sync(self, descriptor: int) -> None:
        content = self._open_files[descriptor]
        with content.lock:
            dirty, content.dirty = content.dirty, []
            for offset, size in dirty:
                self._copy(content, offset, size)
            size = os.fstat(content.live).st_size
            if os.fstat(content.durable).st_size < size:
                os.ftruncate(content.durable, size)

    def catalog_committed(self, directory: Path) -> None:
        with self._names_lock:
            image = self._image(directory)
            image.mkdir(parents=True, exist_ok=True)
            aside = self._blobs / "catalog"
            shutil.copyfile(directory / "data.mdb", aside)
            os.rename(aside, image / "data.mdb")
            self._copy_the_rest()
        super().catalog_committed(directory)

    def _copy_the_rest(self) -> None:
        """Small files that the store writes past this layer, each with its own sync."""
        for path in self._root.iterdir():
            if path.is_file() and path not in self._names and not self._image(path).exists():
                aside = self._blobs / "other"
                shutil.copy(path, aside)
                os.rename(aside, self._image(path))

    def _leak(self, content: _Content, offset: int, size: int) -> None:
        """Some of what was written reaches the disk before any sync, in any order."""
        with self._names_lock:
            dice, seed = self._rng.random(), self._rng.random()
        if dice < 0.4:
            return
        rng = random.Random(seed)
        grain = BLOCK_BYTES if dice < 0.7 else SECTOR_BYTES
        share = 1.0 if dice > 0.9 else rng.random()
        with content.lock:
            for at in range(offset, offset + size, grain):
                if rng.random() < share:
                    self._copy(content, at, min(grain, offset + size - at))

    def _copy(self, content: _Content, offset: int, size: int) -> None:
        os.pwrite(content.durable, os.pread(content.live, size, offset), offset)
