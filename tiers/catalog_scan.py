"""Reads a whole catalog in a child process that may die of it; hands its records over as columns.

LMDB maps its file; a damaged one can end the process that reads it with SIGBUS, or loop for ever.
So nothing of a catalog is read in the server before a child has walked all of it (rule R2). The
child checks every record, and writes the good ones to a memfd, so the walk is also the load:

    memfd   | records, one after another | padding | length u32 a record | key 9 a record |

What the child says is believed only when it ends with status 0. It also decrypts: 100,000 records
would hold the server's interpreter for too long. It gets the keys by a pipe and hands on plain
records; a record whose key is missing, or whose tag does not hold, is named instead.
"""

from __future__ import annotations

import errno
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
from kvstore.tiers.catalog import RECORD, CatalogDenied, CatalogError
from kvstore.tiers.catalog_pages import PageError, check_pages
from kvstore.tiers.checksum import check64
from kvstore.tiers.cipher import Cipher
from kvstore.tiers.encrypted_page import decrypt_record, is_encrypted_record
from kvstore.tiers.process_limits import file_limit_said, is_denied, killed_from_outside
from kvstore.tiers.segment import FORMAT_VERSION, SegmentShape

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from kvstore.tiers.cipher import TenantKey

CHUNK_RECORDS = 1000
BAD_RECORDS_MAX = 100_000  # more than that, and the catalog is worth less than the headers
SCAN_BASE_S = 60.0
SCAN_BYTES_PER_S = 10e6  # a walk slower than this is taken for a loop
GATHER_BYTES = 4 << 20
UNSOUND, DENIED = 3, 4  # how the child ends; another status says that Python did not get so far
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
    locked_keys: list[bytes] = field(default_factory=list)  # encrypted, and their key is missing
    encrypted_pages: int = 0  # among the page records
    encrypted_names: set[int] = field(default_factory=set)  # of roots and writers
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
                own = prefix.lower() if number in self.encrypted_names else prefix
                keys.append(own + number.to_bytes(4, "big"))
                del names[number]
        return keys

    @property
    def locked_pages(self) -> int:
        """Encrypted pages whose key is missing."""
        return sum(key[:1] == b"P" for key in self.locked_keys)


def refuse_links(directory: Path) -> None:
    """LMDB follows links and writes where they point: raises CatalogError if there is one."""
    for path in (directory, directory / "data.mdb", directory / "lock.mdb"):
        if path.is_symlink():
            raise CatalogError(f"{path} is a symbolic link; a catalog is never behind one")


def scan_catalog(directory: Path, cipher: Cipher | None = None) -> Scan:
    """Walk and load the catalog in `directory` through a child. Raises CatalogError."""
    refuse_links(directory)
    data = directory / "data.mdb"
    size = data.stat().st_size if data.exists() else 0
    if size == 0:
        raise CatalogError("data.mdb is missing or empty")
    out = os.memfd_create("kvstore-catalog-scan", os.MFD_CLOEXEC)
    try:
        keys = cipher.export() if cipher is not None else b""
        answer = _run_child(directory, out, keys, SCAN_BASE_S + size / SCAN_BYTES_PER_S)
        return _load(json.loads(answer), out)
    except (ValueError, KeyError) as error:
        raise CatalogError(f"the scan's answer makes no sense: {error}") from error
    finally:
        os.close(out)


def _run_child(directory: Path, out: int, keys: bytes, timeout_s: float) -> bytes:
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
            input=keys,
            capture_output=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise CatalogError(f"its walk did not end within {timeout_s:.0f} s") from error
    if done.returncode != 0:
        raise _failure(done.returncode, done.stderr)
    return done.stdout


def _failure(status: int, stderr: bytes) -> CatalogError:
    """What the child's end says: of the catalog, or only of what the child was not allowed."""
    if status < 0:
        said = f"the process that walked it died of {signal.Signals(-status).name}"
        if not killed_from_outside(-status):
            return CatalogError(said)
        return CatalogDenied(f"{said}: killed from outside, or for want of memory; start again")
    lines = stderr.decode(errors="replace").strip().splitlines() or ["no reason given"]
    if status == UNSOUND:
        return CatalogError(lines[-1])
    return CatalogDenied(f"it could not be read: {lines[-1]}")


def _load(answer: dict[str, Any], out: int) -> Scan:
    scan = Scan(
        bad_keys=[bytes.fromhex(key) for key in answer["bad"]],
        locked_keys=[bytes.fromhex(key) for key in answer["locked"]],
        encrypted_pages=int(answer["encrypted"]),
    )
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
    number, kind = int.from_bytes(key[1:], "big"), key[:1].upper()
    if kind != key[:1]:
        scan.encrypted_names.add(number)
    if key == b"M":
        meta = catalog_module.decode_meta(value)
        if meta is not None:
            scan.store_uuid, scan.format_version = meta
    elif key[:1] == b"S" and (shape := catalog_module.decode_segment(key, value)) is not None:
        scan.segments[number] = shape
    elif kind == b"R" and (root := catalog_module.decode_root(key, value)) is not None:
        scan.roots[number] = root
    elif kind == b"W" and (writer := catalog_module.decode_writer(key, value)) is not None:
        scan.writers[number] = writer
    else:
        scan.bad_keys.append(key)


# -- the child ----------------------------------------------------------------------------------


def child() -> None:
    """Entry point of the child process: walk, check, copy, and answer on stdout in JSON."""
    directory, out = Path(sys.argv[1]), int(sys.argv[2])
    try:
        entries = check_pages(directory / "data.mdb")
        decryption = _Decryption(directory, sys.stdin.buffer.read())
        answer = _walk(directory, decryption, lambda chunk: _write_all(out, chunk))
        found = answer["records"] + sum(len(answer[part]) for part in ("small", "bad", "locked"))
        if found != entries:
            raise CatalogError(f"{found} records found, {entries} expected")
    except Exception as error:
        denied = is_denied(error) or isinstance(error, CatalogDenied)
        said = str(error) if isinstance(error, CatalogError | PageError) else repr(error)
        if getattr(error, "errno", None) == errno.EFBIG:
            said = file_limit_said()
        sys.stderr.write(f"{said}\n")
        sys.exit(DENIED if denied else UNSOUND)
    sys.stdout.write(json.dumps(answer))


class _Decryption:
    """Makes plain records of encrypted ones; names those that it can't."""

    def __init__(self, directory: Path, keys: bytes) -> None:
        self.locked: list[str] = []
        self.pages = 0  # encrypted page records, locked ones included
        self._roots: dict[int, tuple[bytes, TenantKey]] = {}
        self._locked_roots: set[int] = set()
        self._cipher = Cipher.of_export(keys) if keys else None
        for key, value in catalog_module.iterate_read_only(directory, b"r"):
            if key[:1] == b"r":
                self._learn(key, value)

    def page(self, value: bytes) -> bytes | None:
        """The plain record; None when its root is not known or its tag does not hold."""
        root_id = int.from_bytes(value[64:68], "little")
        known = self._roots.get(root_id)
        if known is None or self._cipher is None:
            return None
        return decrypt_record(value, *known, self._cipher.store_uuid)

    def is_locked(self, value: bytes) -> bool:
        """Whether a page record's key is missing."""
        return int.from_bytes(value[64:68], "little") in self._locked_roots

    def small(self, key: bytes, value: bytes) -> bytes | None:
        """An r or w record in plain; None when it was named as locked, itself when unsound."""
        key_id = catalog_module.small_key_id(key, value)
        if key_id is None:
            return value
        if self._cipher is None or self._cipher.known(key_id) is None:
            self.locked.append(key.hex())
            return None
        return catalog_module.decrypt_small(key, value, self._cipher) or value

    def _learn(self, key: bytes, value: bytes) -> None:
        key_id = catalog_module.small_key_id(key, value)
        if key_id is None:
            return
        number = int.from_bytes(key[1:], "big")
        known = self._cipher.known(key_id) if self._cipher is not None else None
        if known is None or self._cipher is None:
            self._locked_roots.add(number)
            return
        plain = catalog_module.decrypt_small(key, value, self._cipher)
        root = None if plain is None else catalog_module.decode_root(key, plain)
        if root is not None:
            self._roots[number] = root[0], known


def _walk(
    directory: Path, decryption: _Decryption, write: Callable[[bytes], None]
) -> dict[str, Any]:
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
            keys, values = _sift(chunk, decryption, small, bad)
        if any(map(is_encrypted_record, values)):
            keys, values = _decrypt(keys, values, decryption, bad)
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
        "locked": decryption.locked,
        "encrypted": decryption.pages,
        "records": len(lengths),
        "blob_bytes": blob_bytes,
        "padding": padding,
    }


def _sift(
    chunk: list[tuple[bytes, bytes]],
    decryption: _Decryption,
    small: list[tuple[str, str]],
    bad: list[str],
) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
    """The sound page records of a chunk; the rest goes to `small` and `bad`, or is locked."""
    pages = []
    for key, value in chunk:
        if key[:1] in (b"r", b"w"):
            plain = decryption.small(key, value)
            if plain is not None:
                small.append((key.hex(), plain.hex()))
        elif key[:1] != b"P":
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


def _decrypt(
    keys: tuple[bytes, ...], values: tuple[bytes, ...], decryption: _Decryption, bad: list[str]
) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
    """The page records of a chunk in plain; those that can't be go to `bad`, or are locked."""
    pages = []
    for key, value in zip(keys, values, strict=True):
        if not is_encrypted_record(value):
            pages.append((key, value))
            continue
        decryption.pages += 1
        plain = decryption.page(value)
        if plain is not None:
            pages.append((key, plain))
        elif decryption.is_locked(value):
            decryption.locked.append(key.hex())
        else:
            bad.append(key.hex())
    return tuple(key for key, _ in pages), tuple(value for _, value in pages)


def _write_all(descriptor: int, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(descriptor, view) :]
