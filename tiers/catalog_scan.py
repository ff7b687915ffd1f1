"""Reads a whole catalog in a child process that may die of it; hands its records over as columns.

LMDB maps its file; a damaged one can end the process that reads it with SIGBUS, or loop for ever.
So nothing of a catalog is read in the server before a child has walked all of it (rule R2). The
child checks every record, and writes the good ones to a memfd, so the walk is also the load:

    memfd   | records, one after another | padding | length u32 a record | key 9 a record |

What the child says is believed only when it ends with status 0.
"""

from __future__ import annotations

import itertools
import json
import mmap
import operator
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvstore.tiers import catalog as catalog_module
from kvstore.tiers.catalog import RECORD, CatalogError
from kvstore.tiers.catalog_pages import PageError, check_pages
from kvstore.tiers.checksum import check64
from kvstore.tiers.segment import FORMAT_VERSION, SegmentShape

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

CHUNK_RECORDS = 1000
BAD_RECORDS_MAX = 100_000  # more than that, and the catalog is worth less than the headers
SCAN_BASE_S = 60.0
SCAN_BYTES_PER_S = 10e6  # a walk slower than this is taken for a loop
GATHER_BYTES = 4 << 20
PAGE_KEY_BYTES = 9
_KEY_DTYPE = np.dtype([("prefix", "S1"), ("slot", ">i8")])

# The fixed part of a record as numpy sees it: catalog.RECORD field by field.
RECORD_DTYPE = np.dtype(
    [
        ("check", "S8"),
        ("slot", "<i8"),
        ("sequence", "<u8"),
        ("parent_sequence", "<u8"),
        ("key", "<u8", (2,)),
        ("checksum", "<u8", (2,)),
        ("root_id", "<u4"),
        ("writer_id", "<u4"),
        ("page_index", "<u4"),
        ("payload_bytes", "<u4"),
        ("created_s", "<u4"),
        ("codec", "<u2"),
        ("format", "<u2"),
        ("token_bytes", "<u4"),
        ("extras_bytes", "<u4"),
    ]
)
assert RECORD_DTYPE.itemsize == RECORD.size


@dataclass(slots=True)
class Scan:
    """A catalog's sound records. `blob` holds the page records, each at its offset."""

    store_uuid: bytes | None = None
    format_version: int | None = None
    segments: dict[int, SegmentShape] = field(default_factory=dict)
    roots: dict[int, tuple[bytes, str, bytes]] = field(default_factory=dict)
    writers: dict[int, str] = field(default_factory=dict)
    bad_keys: list[bytes] = field(default_factory=list)
    blob: npt.NDArray[np.uint8] = field(default_factory=lambda: np.empty(0, np.uint8))
    offsets: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    lengths: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    fixed: npt.NDArray[Any] = field(default_factory=lambda: np.empty(0, RECORD_DTYPE))

    def narrow(self, good: npt.NDArray[np.bool_]) -> None:
        """Forget the page records that are not good."""
        if not good.all():
            self.offsets = self.offsets[good]
            self.lengths = self.lengths[good]
            self.fixed = self.fixed[good]

    def unused_names(self) -> list[bytes]:
        """Keys of roots and writers that no page record names; they are forgotten here."""
        keys = []
        for prefix, names, column in (
            (b"R", self.roots, "root_id"),
            (b"W", self.writers, "writer_id"),
        ):
            used = set(np.unique(self.fixed[column]).tolist())
            for number in [number for number in names if number not in used]:
                keys.append(prefix + number.to_bytes(4, "big"))
                del names[number]
        return keys


def refuse_links(directory: Path) -> None:
    """LMDB follows links and writes where they point: raises CatalogError if there is one."""
    for path in (directory, directory / "data.mdb", directory / "lock.mdb"):
        if path.is_symlink():
            raise CatalogError(f"{path} is a symbolic link; a catalog is never behind one")


def scan_catalog(directory: Path) -> Scan:
    """Walk and load the catalog in `directory` through a child. Raises CatalogError."""
    refuse_links(directory)
    data = directory / "data.mdb"
    size = data.stat().st_size if data.exists() else 0
    if size == 0:
        raise CatalogError("data.mdb is missing or empty")
    out = os.memfd_create("kvstore-catalog-scan", os.MFD_CLOEXEC)
    try:
        answer = _run_child(directory, out, SCAN_BASE_S + size / SCAN_BYTES_PER_S)
        return _load(json.loads(answer), out)
    except (ValueError, KeyError) as error:
        raise CatalogError(f"the scan's answer makes no sense: {error}") from error
    finally:
        os.close(out)


def _run_child(directory: Path, out: int, timeout_s: float) -> bytes:
    package_root = Path(catalog_module.__file__).parents[2]
    search = os.pathsep.join([str(package_root), *filter(None, sys.path)])
    command = [
        sys.executable,
        "-c",
        "from kvstore.tiers.catalog_scan import child; child()",
        str(directory.absolute()),
        str(out),
    ]
    try:
        done = subprocess.run(  # noqa: S603 (our own interpreter and module)
            command,
            env={**os.environ, "PYTHONPATH": search},
            pass_fds=(out,),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise CatalogError(f"its walk did not end within {timeout_s:.0f} s") from error
    if done.returncode < 0:
        name = signal.Signals(-done.returncode).name
        raise CatalogError(f"the process that walked it died of {name}")
    if done.returncode != 0:
        lines = done.stderr.decode(errors="replace").strip().splitlines() or ["no reason given"]
        raise CatalogError(lines[-1])
    return done.stdout


def _load(answer: dict[str, Any], out: int) -> Scan:
    scan = Scan(bad_keys=[bytes.fromhex(key) for key in answer["bad"]])
    for key, value in ((bytes.fromhex(k), bytes.fromhex(v)) for k, v in answer["small"]):
        _take_small(scan, key, value)
    count, blob_bytes = int(answer["records"]), int(answer["blob_bytes"])
    if count == 0:
        return scan
    content = np.frombuffer(mmap.mmap(out, 0, prot=mmap.PROT_READ), np.uint8)
    start = blob_bytes + int(answer["padding"])
    lengths = content[start : start + 4 * count].view("<u4").astype(np.int64)
    keys = content[start + 4 * count : start + (4 + PAGE_KEY_BYTES) * count].view(_KEY_DTYPE)
    ends = np.cumsum(lengths)
    if len(keys) != count or int(ends[-1]) != blob_bytes or int(lengths.min()) < RECORD.size:
        raise ValueError(f"{count} records of {blob_bytes} bytes")
    scan.blob = content[:blob_bytes]
    scan.offsets = ends - lengths
    scan.lengths = lengths
    scan.fixed = gather(scan.blob, scan.offsets, lengths, RECORD.size).view(RECORD_DTYPE)[:, 0]
    fixed = scan.fixed
    sound = fixed["slot"] == keys["slot"]
    sound &= fixed["format"] == FORMAT_VERSION
    parts = fixed["token_bytes"].astype(np.int64) + fixed["extras_bytes"] + RECORD.size
    sound &= parts == lengths
    scan.bad_keys += [key.tobytes() for key in keys[~sound]]
    scan.narrow(sound)
    return scan


def gather(
    blob: npt.NDArray[np.uint8],
    starts: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int64],
    size: int,
) -> npt.NDArray[np.uint8]:
    """`size` bytes of `blob` from each start on, as rows of one array.

    Fast when the records, of the given lengths, lie one after another and are equally long, as they
    are for one page size without extras.
    """
    count = len(starts)
    if count == 0 or size == 0:
        return np.empty((count, size), np.uint8)
    first, length = int(starts[0]), int(lengths[0])
    if int(starts[-1]) - first == (count - 1) * length and (lengths == length).all():
        reach = blob[first : first + (count - 1) * length + size]
        return np.array(np.lib.stride_tricks.as_strided(reach, (count, size), (length, 1)))
    out = np.empty((count, size), np.uint8)
    columns = np.arange(size)
    step = max(1, GATHER_BYTES // size)
    for begin in range(0, count, step):
        out[begin : begin + step] = blob[starts[begin : begin + step, None] + columns]
    return out


def _take_small(scan: Scan, key: bytes, value: bytes) -> None:
    number = int.from_bytes(key[1:], "big")
    if key == b"M":
        meta = catalog_module.decode_meta(value)
        if meta is not None:
            scan.store_uuid, scan.format_version = meta
    elif key[:1] == b"S" and (shape := catalog_module.decode_segment(key, value)) is not None:
        scan.segments[number] = shape
    elif key[:1] == b"R" and (root := catalog_module.decode_root(key, value)) is not None:
        scan.roots[number] = root
    elif key[:1] == b"W" and (writer := catalog_module.decode_writer(key, value)) is not None:
        scan.writers[number] = writer
    else:
        scan.bad_keys.append(key)


# -- the child ----------------------------------------------------------------------------------


def child() -> None:
    """Entry point of the child process: walk, check, copy, and answer on stdout in JSON."""
    directory, out = Path(sys.argv[1]), int(sys.argv[2])
    try:
        entries = check_pages(directory / "data.mdb")
        answer = _walk(directory, lambda chunk: _write_all(out, chunk))
        found = answer["records"] + len(answer["small"]) + len(answer["bad"])
        if found != entries:
            raise CatalogError(f"{found} records found, {entries} expected")
    except (CatalogError, PageError, OSError) as error:
        sys.exit(str(error))
    sys.stdout.write(json.dumps(answer))


def _walk(directory: Path, write: Callable[[bytes], None]) -> dict[str, Any]:
    small: list[tuple[str, str]] = []
    bad: list[str] = []
    page_keys: list[bytes] = []
    lengths: list[int] = []
    previous = b""
    records = catalog_module.iterate_read_only(directory)
    while chunk := list(itertools.islice(records, CHUNK_RECORDS)):
        keys, values = zip(*chunk, strict=True)
        if keys[0] <= previous or not all(map(operator.lt, keys, keys[1:])):
            raise CatalogError("keys out of order")
        previous = keys[-1]
        wrong = [at for at, value in enumerate(values) if value[:8] != check64(value[8:])]
        if wrong or keys[0][:1] != b"P" or keys[-1][:1] != b"P" or min(map(len, keys)) < 9:
            keys, values = _sift(chunk, small, bad)
        if len(bad) > BAD_RECORDS_MAX:
            raise CatalogError(f"more than {BAD_RECORDS_MAX} bad records")
        page_keys.append(b"".join(keys))
        lengths.extend(map(len, values))
        write(b"".join(values))
    blob_bytes = sum(lengths)
    padding = -blob_bytes % 8
    write(bytes(padding) + np.array(lengths, "<u4").tobytes() + b"".join(page_keys))
    return {
        "small": small,
        "bad": bad,
        "records": len(lengths),
        "blob_bytes": blob_bytes,
        "padding": padding,
    }


def _sift(
    chunk: list[tuple[bytes, bytes]], small: list[tuple[str, str]], bad: list[str]
) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
    """The sound page records of a chunk; the rest goes to `small` and `bad`."""
    pages = []
    for key, value in chunk:
        if key[:1] != b"P":
            small.append((key.hex(), value.hex()))
        elif (
            len(key) == PAGE_KEY_BYTES
            and len(value) >= RECORD.size
            and value[:8] == check64(value[8:])
        ):
            pages.append((key, value))
        else:
            bad.append(key.hex())
    return tuple(key for key, _ in pages), tuple(value for _, value in pages)


def _write_all(descriptor: int, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(descriptor, view) :]
