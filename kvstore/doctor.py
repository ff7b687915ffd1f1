"""One look at the machine, the process's limits and a store directory: what is wrong, what to do.

Reads only, opens no store and asks no server. Each finding says what was found and, if it is not
well, what to do about it.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import shutil
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstore._version import __version__
from kvstore.errors import KVStoreError
from kvstore.quantity import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SHM = "/dev/shm"  # noqa: S108  # to look at, not to write to
GOOD, WARN, BAD = "ok", "warning", "problem"
FILES_MIN = 4096
DISK_FREE_MIN = 1 << 30
MEMORY_FREE_MIN = 1 << 30
MEMLOCK_MIN = 1 << 30
NETWORK_TYPES = {"nfs", "nfs4", "cifs", "smb3", "9p", "afs", "ceph", "fuse.sshfs", "glusterfs"}
PACKAGES = ("numpy", "lmdb", "xxhash", "grpcio", "protobuf", "pydantic", "prometheus-client")
OPTIONAL = ("cryptography", "redis", "torch", "transformers", "pyzmq", "msgspec")


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    name: str
    state: str  # GOOD, WARN or BAD
    found: str
    advice: str = ""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def examine(directory: Path | None, config: Callable[[], str] | None = None) -> list[Finding]:
    """Look at everything. config: says what the settings come to, or raises KVStoreError."""
    found = [
        *_python(),
        *_packages(),
        _memory(),
        _memlock(),
        _files(),
        _shm(),
        _huge_pages(),
    ]
    if directory is not None:
        found += _directory(directory)
    if config is not None:
        found.append(_config(config))
    return found


def _python() -> Iterator[Finding]:
    version = platform.python_version()
    good = sys.version_info >= (3, 11)
    yield Finding(
        "python", GOOD if good else BAD, version, "" if good else "Python 3.11 or newer is needed"
    )
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    linux = platform.system() == "Linux" and hasattr(os, "memfd_create")
    advice = "" if linux else "only Linux has what the arena is made of (memfd, sealed)"
    yield Finding("system", GOOD if linux else BAD, system, advice)


def _packages() -> Iterator[Finding]:
    versions, missing = [f"kvstore {__version__}"], []
    for name in (*PACKAGES, *OPTIONAL):
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    needed = [name for name in missing if name in PACKAGES]
    advice = f"pip install {' '.join(needed)}" if needed else ""
    yield Finding("versions", BAD if needed else GOOD, ", ".join(versions), advice)
    if missing and not needed:
        extras = "kvstore-llm[secure,redis,transformers,events]"
        yield Finding("optional", GOOD, f"not installed: {', '.join(missing)}", f"in {extras}")


def _memory() -> Finding:
    free = _meminfo("MemAvailable")
    limit = _cgroup_limit()
    said = f"{format_bytes(free)} available of {format_bytes(_meminfo('MemTotal'))}"
    if limit is not None:
        said += f"; this control group may have {format_bytes(limit)}"
        free = min(free, limit)
    if free >= MEMORY_FREE_MIN:
        return Finding("memory", GOOD, said)
    return Finding("memory", WARN, said, "host_bytes must fit: the arena is populated at start")


def _memlock() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    said = f"{_limit(soft)}, at most {_limit(hard)}"
    if soft == resource.RLIM_INFINITY or soft >= MEMLOCK_MIN or os.geteuid() == 0:
        return Finding("locked memory", GOOD, said)
    return Finding(
        "locked memory",
        WARN,
        said,
        "only engines that pin the arena for a GPU need it, in their own process: ulimit -l "
        "unlimited, or LimitMEMLOCK=infinity in their unit; without it they copy through a "
        "smaller pinned buffer",
    )


def _files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    said = f"{_limit(soft)}, at most {_limit(hard)}"
    if soft >= FILES_MIN:
        return Finding("open files", GOOD, said)
    return Finding(
        "open files",
        WARN,
        said,
        f"ulimit -n {min(65_536, hard)}, or LimitNOFILE=65536 in the server's unit: clients, "
        "segments and extents take one each",
    )


def _shm() -> Finding:
    try:
        use = shutil.disk_usage(SHM)
    except OSError:
        return Finding("shared memory", GOOD, f"no {SHM}; the arena does not need it")
    said = f"{format_bytes(use.total)} in {SHM}; the arena is memfd, which is not bound by it"
    return Finding("shared memory", GOOD, said)


def _huge_pages() -> Finding:
    total, free = _meminfo("HugePages_Total", 1), _meminfo("HugePages_Free", 1)
    try:
        mode = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
        mode = mode[mode.index("[") + 1 : mode.index("]")]
    except (OSError, ValueError):
        mode = "unknown"
    said = f"{free} of {total} pages of 2 MiB free in the pool; transparent ones: {mode}"
    advice = "" if total else "only --huge-pages needs a pool: sysctl vm.nr_hugepages=N"
    return Finding("huge pages", GOOD, said, advice)


def _directory(directory: Path) -> Iterator[Finding]:
    if directory.exists() and not directory.is_dir():
        yield Finding("directory", BAD, f"{directory}: this is a file", "a store is a directory")
        return
    there = directory
    while not there.exists() and there != there.parent:
        there = there.parent
    kind = _file_system(there)
    if kind in NETWORK_TYPES:
        yield Finding(
            "file system",
            BAD,
            f"{there}: {kind}",
            "a store needs a local disk (ext4, xfs): locks and syncs mean nothing over a network",
        )
    else:
        state = WARN if kind in ("overlay", "tmpfs") else GOOD
        advice = "pages are gone with the container or the machine" if state == WARN else ""
        yield Finding("file system", state, f"{there}: {kind}", advice)
    use = shutil.disk_usage(there)
    full = use.free < DISK_FREE_MIN
    yield Finding(
        "disk",
        WARN if full else GOOD,
        f"{format_bytes(use.free)} free of {format_bytes(use.total)}",
        "make room, or lower --disk-bytes: a full disk means that nothing new is kept"
        if full
        else "",
    )
    yield _direct_io(there)
    if there == directory:
        yield from _owner(directory)


def _direct_io(folder: Path) -> Finding:
    """Whether files there can be read past the page cache; makes a nameless file to try."""
    try:
        descriptor = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_DIRECT, 0o600)
    except OSError as exc:
        writable = os.access(folder, os.W_OK)
        said = f"not there: {exc.strerror}"
        if not writable:
            return Finding("direct I/O", BAD, said, f"{folder}: this user may not write there")
        return Finding(
            "direct I/O", WARN, said, "pages go through the page cache then: slower, and right"
        )
    os.close(descriptor)
    return Finding("direct I/O", GOOD, "works")


def _owner(directory: Path) -> Iterator[Finding]:
    found = directory.stat()
    mine, mode = found.st_uid == os.geteuid(), found.st_mode & 0o777
    if not mine:
        yield Finding(
            "owner",
            BAD,
            f"{directory} belongs to uid {found.st_uid}, this is uid {os.geteuid()}",
            f"run as that user, or: chown -R {os.geteuid()} {directory}",
        )
    elif mode & 0o077:
        yield Finding(
            "owner", WARN, f"mode {mode:04o}", f"pages are prompts: chmod 700 {directory}"
        )
    else:
        yield Finding("owner", GOOD, f"uid {found.st_uid}, mode {mode:04o}")
    aside = sorted(each.name for each in directory.glob("quarantine-*"))
    if aside:
        yield Finding(
            "catalog",
            WARN,
            f"{aside[-1]}: a damaged catalog was put aside",
            "its pages were found again from their headers; `kvstore verify` reads them all, then "
            "it can be deleted",
        )


def _config(config: Callable[[], str]) -> Finding:
    try:
        return Finding("settings", GOOD, config())
    except KVStoreError as exc:
        return Finding("settings", BAD, str(exc), "see `kvstore serve --help`")


def _file_system(path: Path) -> str:
    """The type of the mount that a path is on."""
    device = path.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    kind = "unknown"
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return kind
    for line in lines:
        before, _, after = line.partition(" - ")
        if before.split()[2] == wanted:
            kind = after.split()[0]
    return kind


def _meminfo(name: str, unit: int = 1024) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0]) * unit
    return 0


def _cgroup_limit() -> int | None:
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            text = Path("/sys/fs/cgroup", name).read_text().strip()
        except OSError:
            continue
        if text.isdecimal() and int(text) < 1 << 60:
            return int(text)
    return None


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)
