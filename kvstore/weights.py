"""One digest over the whole content of a model's weight files, remembered between runs.

Equal names, shapes and headers are not equal weights, so every byte counts. Reading them costs
about a second a GB, paid once: the answer is remembered by path, device, inode, size and both
times (of content and of inode). Must not be here: parsing of any weight format.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvstore.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["WEIGHT_SUFFIXES", "weights_digest"]

WEIGHT_SUFFIXES = (".safetensors", ".gguf", ".bin", ".pt", ".pth", ".npz", ".h5", ".msgpack")
MEMORY_NAME = "weights.json"
MEMORY_VERSION = 1
MEMORY_FILES_MAX = 4096
MEMORY_BYTES_MAX = 8 << 20
READ_BYTES = 4 << 20
DIGEST_BYTES = 32
# A file changed this recently may change again within one tick of its clock: not remembered.
SETTLED_NS = 2_000_000_000

_DIGEST = re.compile(r"[0-9a-f]{64}", re.ASCII)


@dataclass(frozen=True, slots=True)
class _WeightFile:
    """A file as it stood when we looked; equal records mean equal content."""

    path: str
    device: int
    inode: int
    size_bytes: int
    changed_ns: int
    inode_changed_ns: int

    @classmethod
    def look(cls, path: str) -> _WeightFile:
        found = os.stat(path)
        times = (found.st_mtime_ns, found.st_ctime_ns)
        return cls(path, found.st_dev, found.st_ino, found.st_size, *times)

    @property
    def key(self) -> str:
        numbers = (self.device, self.inode, self.size_bytes, self.changed_ns, self.inode_changed_ns)
        return " ".join(map(str, numbers))


def weights_digest(
    path: Path | str,
    memory_directory: Path | None = None,
    progress: Callable[[int, int], None] | None = None,
    *,
    clock_ns: Callable[[], int] = time.time_ns,
) -> str:
    """The `weights` field of a spec, "files:<64 hex digits>", for a file or a model directory.

    Of a directory all weight files count, not those of its subdirectories; their names do not.
    Digests are remembered in `memory_directory`/weights.json, 0600, if a directory is given (the
    store's; it must exist); a memory that is damaged or cannot be written costs time, never a
    wrong answer. `progress` is told (bytes read, bytes in all). SpecError if there are no weight
    files, or they cannot be read, or they change meanwhile.
    """
    memory_file = None if memory_directory is None else memory_directory / MEMORY_NAME
    memory = {} if memory_file is None else _recall(memory_file)
    learned: dict[str, list[str]] = {}
    digests = []
    try:
        files = [_WeightFile.look(name) for name in _weight_files(Path(path))]
        meter = _Meter(sum(file.size_bytes for file in files), progress)
        for file in files:
            key, digest = memory.get(file.path, ["", ""])
            if key != file.key:
                digest = _file_digest(file, meter)
                if clock_ns() - max(file.changed_ns, file.inode_changed_ns) > SETTLED_NS:
                    learned[file.path] = [file.key, digest]
            digests.append(digest)
    except OSError as exc:
        name = exc.filename or path
        raise SpecError(f"weights: {name} cannot be read ({exc.strerror})") from exc
    if memory_file is not None and learned:
        _remember(memory_file, learned)
    whole = hashlib.blake2b("\n".join(sorted(digests)).encode(), digest_size=DIGEST_BYTES)
    return f"files:{whole.hexdigest()}"


class _Meter:
    """Counts bytes and tells whoever wants to know."""

    def __init__(self, total: int, progress: Callable[[int, int], None] | None) -> None:
        self._done = 0
        self._total = total
        self._progress = progress

    def add(self, count: int) -> None:
        self._done += count
        if self._progress is not None:
            self._progress(self._done, self._total)


def _weight_files(path: Path) -> list[str]:
    """Absolute names, links resolved, so that a hub snapshot and its blob are one file."""
    if path.is_file():
        return [os.path.realpath(path)]
    names = [
        os.path.realpath(entry.path)
        for entry in os.scandir(path)
        if entry.name.endswith(WEIGHT_SUFFIXES) and entry.is_file()
    ]
    if not names:
        raise SpecError(f"weights: no weight files ({', '.join(WEIGHT_SUFFIXES)}) in {path}")
    return sorted(names)


def _file_digest(file: _WeightFile, meter: _Meter) -> str:
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    buffer = memoryview(bytearray(READ_BYTES))
    with open(file.path, "rb", buffering=0) as stream:
        while count := stream.readinto(buffer):
            digest.update(buffer[:count])
            meter.add(count)
    if _WeightFile.look(file.path) != file:
        raise SpecError(f"weights: {file.path} changed while it was read; try again")
    return digest.hexdigest()


def _recall(memory_file: Path) -> dict[str, list[str]]:
    """What is remembered: path -> [key, digest]; nothing if any of it looks wrong."""
    try:
        with open(memory_file, "rb") as stream:
            text = stream.read(MEMORY_BYTES_MAX + 1)
        saved = json.loads(text)
        files, version, checksum = saved["files"], saved["version"], saved["checksum"]
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return {}
    if version != MEMORY_VERSION or not isinstance(files, dict) or checksum != _checksum(files):
        return {}
    return files if all(_is_entry(entry) for entry in files.values()) else {}


def _is_entry(entry: object) -> bool:
    return (
        isinstance(entry, list)
        and len(entry) == 2
        and all(isinstance(part, str) for part in entry)
        and _DIGEST.fullmatch(entry[1]) is not None
    )


def _remember(memory_file: Path, learned: dict[str, list[str]]) -> None:
    """Write aside and rename; of two processes at once one forgets, and reads again some day."""
    files = {name: entry for name, entry in _recall(memory_file).items() if name not in learned}
    files |= learned
    while len(files) > MEMORY_FILES_MAX:
        files.pop(next(iter(files)))
    saved = {"version": MEMORY_VERSION, "checksum": _checksum(files), "files": files}
    aside = f"{memory_file}.{os.getpid()}-{secrets.token_hex(8)}.tmp"
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with os.fdopen(os.open(aside, flags, 0o600), "w", encoding="ascii") as stream:
            json.dump(saved, stream)
        os.replace(aside, memory_file)
    except OSError:
        # The store works without this memory: the next start reads the weights again.
        Path(aside).unlink(missing_ok=True)


def _checksum(files: dict[str, list[str]]) -> str:
    return hashlib.blake2b(json.dumps(files).encode(), digest_size=16).hexdigest()
