"""The catalog: one LMDB record a published slot, so that a restart finds every page at once.

Invariant: a record exists only for a slot whose header and payload were synced before. Each record
carries an XXH3-64 over its key, value and format version; a bad one is deleted, never believed.
LMDB runs with writemap off and both syncs on; its map is read here only after a sacrificial child
has walked all of it (`catalog_scan.py`). The only module that imports lmdb.

    key                       value (integers little-endian; 8 bytes of check first)
    P + slot u64 big-endian   fixed record of 96 bytes | tokens | extras
    R + id u32 big-endian     root 32 | namespace 16 | tenant
    W + id u32 big-endian     writer
    r, w + id                 R and W of encrypted pages (encrypted_page.py), as their P records are
    S + id u32 big-endian     directory u32 | slots u32 | slot bytes u64 | header bytes u64
    M                         store uuid 16 | format u32

Roots and writers are interned, so that a page costs 96 bytes besides its tokens. Keys are
big-endian because LMDB sorts by memcmp: slot order is then key order, and writes of one segment
share pages. What belongs to a key (a tenant's root, its writers) is interned with the key's id, so
that nothing new ever hangs on a key that is gone.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import lmdb

from kvstore.tiers.checksum import check64
from kvstore.tiers.cipher import SEAL_BYTES
from kvstore.tiers.encrypted_page import (
    CHECK_BYTES,
    RECORD_BYTES,
    decrypt_name,
    encrypt_name,
    encrypt_record,
    name_key_id,
)
from kvstore.tiers.process_limits import file_bytes_allowed, file_limit_said, is_denied
from kvstore.tiers.segment import FORMAT_VERSION, SegmentShape
from kvstore.tiers.tier import PageRecord, TierError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from kvstore.tiers.cipher import Cipher, TenantKey
    from kvstore.tiers.file_layer import FileLayer

# check | slot | sequence | parent sequence | key | checksum | root id | writer id | page index
# | payload bytes | created | codec | format | token bytes | extras bytes
RECORD = struct.Struct("<8sQQQ16s16sIIIIIHHII")
assert RECORD.size == RECORD_BYTES
DB_PAGE_BYTES = 4096  # what LMDB takes on Linux; checked at open
RECORD_OVERHEAD_BYTES = 32  # LMDB's node header and pointer, key, and slack of a filled page
NAME_BYTES_BOUND = 448  # an R or W record with LMDB's overhead, encrypted or not
LOCK_FILE_BYTES = 8192  # of LMDB's lock.mdb
COMMIT_SLACK_PAGES = 24  # branches and free-list pages that one transaction may copy
FILE_MARGIN_BYTES = 4 << 20  # a write that fails so near the limit on files failed of it
READERS_MAX = 16
RECORDS_FOR_A_MEAN = 1000

_PAGE_KEY = struct.Struct(">cQ")
_SMALL_KEY = struct.Struct(">cI")
_SEGMENT = struct.Struct("<IIQQ")
_ROOT = struct.Struct("<32s16s")
_META = struct.Struct("<16sI")


def catalog_name(version: int) -> str:
    """Its folder in the first directory: each format has its own, so that old and new coexist."""
    return "catalog" if version == 1 else f"catalog-{version}"


class CatalogError(TierError):
    """LMDB failed; `full` tells a full map or disk from the rest. Close and reopen after it."""

    def __init__(self, message: str, *, full: bool = False) -> None:
        super().__init__(message)
        self.full = full


class CatalogDenied(CatalogError):
    """The process may not have, or did not live for, what using it takes: no word on its state."""


class Catalog:
    """The open LMDB environment. One a process; callers serialise writes."""

    def __init__(
        self, directory: Path, map_bytes: int, files: FileLayer, cipher: Cipher | None = None
    ) -> None:
        """Open, or create, the catalog in `directory`. Raises CatalogError.

        With a cipher that writes, new page records are encrypted.
        """
        self.directory = directory
        self.file_bytes = 0  # as of the last commit, or the opening
        self._files = files
        self._cipher = cipher
        # The last item is the id of the key that they are encrypted with; b"" where they are not.
        self._roots: dict[tuple[bytes, str, bytes, bytes], int] = {}
        self._writers: dict[tuple[str, bytes], int] = {}
        self._next_name_id = 1
        files.make_directory(directory)
        try:
            self._env: Any = lmdb.open(
                str(directory),
                map_size=map_bytes,
                mode=0o600,
                create=True,
                subdir=True,
                writemap=False,
                sync=True,
                metasync=True,
                map_async=False,
                readahead=False,
                max_readers=READERS_MAX,
                max_dbs=0,
            )
            self.reader_check()
            # LMDB syncs its file; that the file and its folder can be found is for us to sync.
            files.sync_directory(directory)
            files.sync_directory(directory.parent)
        except (lmdb.Error, OSError) as error:
            kind = CatalogDenied if is_denied(error) else CatalogError
            raise kind(f"catalog {directory}: {error}") from error
        self.map_bytes: int = self._env.info()["map_size"]
        try:
            self._load_names()
        except lmdb.Error as error:
            self._env.close()
            raise CatalogError(f"catalog {directory}: {error}") from error
        self._measure()

    # -- what is in it --------------------------------------------------------------------------

    @property
    def meta(self) -> tuple[bytes, int] | None:
        """(store uuid, format version), or None for a catalog without them: a new one."""
        with self._env.begin() as txn:
            return decode_meta(txn.get(b"M"))

    @property
    def entries(self) -> int:
        """Records of all kinds."""
        return int(self._env.stat()["entries"])

    def slots(self) -> Iterator[int]:
        """Slot numbers of all page records, ascending. For check(); a read transaction is open."""
        with self._env.begin() as txn:
            cursor = txn.cursor()
            if cursor.set_range(b"P"):
                for key in cursor.iternext(keys=True, values=False):
                    if key[:1] != b"P":
                        break
                    yield _PAGE_KEY.unpack(key)[1]

    def get(self, slot: int) -> bytes | None:
        """The raw record of a slot."""
        with self._env.begin() as txn:
            found: bytes | None = txn.get(_PAGE_KEY.pack(b"P", slot))
        return found

    def record_bytes_mean(self, guess: int) -> float:
        """Leaf bytes a record; `guess` while there are too few to tell."""
        stat = self._env.stat()
        few = stat["entries"] < RECORDS_FOR_A_MEAN
        return guess if few else float(stat["leaf_pages"] * DB_PAGE_BYTES / stat["entries"])

    def growth_bound(self, added: Sequence[PageRecord], removed: int) -> int:
        """Bytes by which one commit of these may lengthen the file, at most.

        Copy-on-write takes a new page for each leaf touched; a leaf split adds one that is at least
        half full; a value past a quarter of a page takes pages of its own.
        """
        more = SEAL_BYTES if self._encrypts(None) else 0
        size = sum(record_bytes(page) + more + self._name_bytes_bound(page) for page in added)
        touched = min(len(added) + removed, int(self._env.stat()["leaf_pages"]))
        pages = -(-2 * (size + len(added) * RECORD_OVERHEAD_BYTES) // DB_PAGE_BYTES)
        large = sum(record_bytes(page) + more > DB_PAGE_BYTES // 4 for page in added)
        return (touched + pages + large + COMMIT_SLACK_PAGES) * DB_PAGE_BYTES

    # -- changes --------------------------------------------------------------------------------

    def commit(
        self,
        removed: Sequence[int],
        added: Sequence[tuple[int, PageRecord]] = (),
        *,
        encrypted: bool | None = None,
    ) -> None:
        """Delete and add page records in one durable transaction. Raises CatalogError.

        `encrypted` says whether the pages are; None: as new pages are.
        """
        new_roots: dict[tuple[bytes, str, bytes, bytes], int] = {}
        new_writers: dict[tuple[str, bytes], int] = {}
        try:
            keys = self._keys({page.tenant for _, page in added}, encrypted)
            with self._env.begin(write=True) as txn:
                for slot in removed:
                    txn.delete(_PAGE_KEY.pack(b"P", slot))
                for slot, page in added:
                    key = keys.get(page.tenant)
                    key_id = key.key_id if key is not None else b""
                    root = (page.root, page.tenant, page.namespace, key_id)
                    root_id = self._intern(txn, self._roots, new_roots, root, key)
                    writer = (page.writer, key_id)
                    writer_id = self._intern(txn, self._writers, new_writers, writer, key)
                    record = encode_record(slot, page, root_id, writer_id)
                    if key is not None:
                        assert self._cipher is not None
                        record = encrypt_record(record, page.root, key, self._cipher.store_uuid)
                    txn.put(_PAGE_KEY.pack(b"P", slot), record)
        except (lmdb.Error, OSError, TierError) as error:
            raise self._failure(error) from error
        self._roots.update(new_roots)
        self._writers.update(new_writers)
        self._committed()

    def put_meta(self, store_uuid: bytes) -> None:
        """Name the store that this catalog belongs to."""
        self._change([(b"M", _sealed(b"M", _META.pack(store_uuid, FORMAT_VERSION)))], [])

    def put_segment(self, shape: SegmentShape) -> None:
        """Record a segment whose file is durable."""
        key = _SMALL_KEY.pack(b"S", shape.segment_id)
        body = _SEGMENT.pack(
            shape.directory_index, shape.slots, shape.slot_bytes, shape.header_bytes
        )
        self._change([(key, _sealed(key, body))], [])

    def remove_segment(self, segment_id: int) -> None:
        """Forget a segment; its page records must be gone. Do this before unlinking the file."""
        self._change([], [_SMALL_KEY.pack(b"S", segment_id)])

    def remove_keys(self, keys: Sequence[bytes]) -> None:
        """Delete raw records that a scan found bad or unused."""
        self._change([], keys)
        try:
            self._load_names()
        except lmdb.Error as error:
            raise self._failure(error) from error

    def reader_check(self) -> None:
        """Clear slots of readers that died, so that LMDB can use old pages again (rule R12)."""
        self._env.reader_check()

    def close(self) -> None:
        """Close the environment; everything committed is durable already."""
        self._env.close()

    # -- private --------------------------------------------------------------------------------

    def _change(self, put: Sequence[tuple[bytes, bytes]], removed: Sequence[bytes]) -> None:
        try:
            with self._env.begin(write=True) as txn:
                for key in removed:
                    txn.delete(key)
                for key, value in put:
                    txn.put(key, value)
        except (lmdb.Error, OSError) as error:
            raise self._failure(error) from error
        self._committed()

    def _committed(self) -> None:
        self._measure()
        self._files.catalog_committed(self.directory)

    def _measure(self) -> None:
        """Bytes that the catalog takes on disk; LMDB never gives them back."""
        last_page = int(self._env.info()["last_pgno"])
        self.file_bytes = (last_page + 1) * DB_PAGE_BYTES + LOCK_FILE_BYTES

    def _failure(self, error: Exception) -> CatalogError:
        space = self._files.space(self.directory)
        if is_denied(error) or self.file_bytes + FILE_MARGIN_BYTES > file_bytes_allowed():
            return CatalogDenied(f"catalog {self.directory}: {error}; {file_limit_said()}")
        full = isinstance(error, lmdb.MapFullError) or space.free_bytes < DB_PAGE_BYTES * 64
        return CatalogError(
            f"catalog {self.directory}: {error}; {space.free_bytes} of {space.total_bytes} bytes "
            "free on its file system",
            full=full,
        )

    def _name_bytes_bound(self, page: PageRecord) -> int:
        """Bytes of the names that a page's record adds, at most."""
        key_id: bytes | None = b""
        if self._encrypts(None):
            assert self._cipher is not None
            key_id = self._cipher.id_of(page.tenant)
        if key_id is None:
            return 2 * NAME_BYTES_BOUND
        has_root = (page.root, page.tenant, page.namespace, key_id) in self._roots
        has_writer = (page.writer, key_id) in self._writers
        return (2 - has_root - has_writer) * NAME_BYTES_BOUND

    def _encrypts(self, wanted: bool | None) -> bool:
        if wanted is None:
            return self._cipher is not None and self._cipher.writes
        return wanted

    def _keys(self, tenants: Iterable[str], encrypted: bool | None) -> dict[str, TenantKey]:
        """The key of each tenant; none where records are plain."""
        if not self._encrypts(encrypted):
            return {}
        assert self._cipher is not None, "encrypted pages need a cipher"
        return {tenant: self._cipher.key_of(tenant) for tenant in tenants}

    def _intern(
        self, txn: Any, known: dict[Any, int], new: dict[Any, int], name: Any, key: TenantKey | None
    ) -> int:
        found = known.get(name)
        if found is None:
            found = new.get(name)
        if found is not None:
            return found
        fresh = self._next_name_id
        self._next_name_id += 1
        if len(name) == 2:
            prefix, body = b"W", name[0].encode()
        else:
            prefix, body = b"R", _ROOT.pack(name[0], name[2]) + name[1].encode()
        if key is None:
            name_key = _SMALL_KEY.pack(prefix, fresh)
        else:
            assert self._cipher is not None
            name_key = _SMALL_KEY.pack(prefix.lower(), fresh)
            body = encrypt_name(name_key, body, key, self._cipher.store_uuid)
        txn.put(name_key, _sealed(name_key, body))
        new[name] = fresh
        return fresh

    def _load_names(self) -> None:
        self._roots.clear()
        self._writers.clear()
        with self._env.begin() as txn:
            cursor = txn.cursor()
            for prefix in (b"R", b"W", b"r", b"w"):
                if not cursor.set_range(prefix):
                    continue
                for key, value in cursor.iternext():
                    if key[:1] != prefix:
                        break
                    self._learn(key, value)
        self._next_name_id = 1 + self._highest_name_id()

    def _highest_name_id(self) -> int:
        """Names under a missing key count too: their ids are taken."""
        highest = 0
        with self._env.begin() as txn:
            cursor = txn.cursor()
            for prefix in (b"R", b"W", b"r", b"w"):
                beyond = prefix + b"\xff" * 5
                found = cursor.set_range(beyond)
                if (cursor.prev() if found else cursor.last()) and cursor.key()[:1] == prefix:
                    highest = max(highest, int.from_bytes(cursor.key()[1:5], "big"))
        return highest

    def _learn(self, key: bytes, value: bytes) -> None:
        key_id = b""
        plain: bytes | None = value
        if key[:1] in (b"r", b"w"):
            if self._cipher is None:
                return
            plain = decrypt_small(key, value, self._cipher)
            key_id = name_key_id(value[CHECK_BYTES:])
        if plain is None:
            return
        number = int.from_bytes(key[1:], "big")
        if key[:1] in (b"R", b"r"):
            root = decode_root(key, plain)
            if root is not None:
                self._roots[(*root, key_id)] = number
        else:
            writer = decode_writer(key, plain)
            if writer is not None:
                self._writers[(writer, key_id)] = number


def iterate_read_only(directory: Path, start: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
    """All records of a closed catalog in key order, without touching a lock file. For the scan.

    From the key `start` on, if it is given.

    A damaged file may raise anything that LMDB can, kill the process, or never end.
    """
    env = lmdb.open(str(directory), readonly=True, lock=False, create=False, subdir=True, max_dbs=0)
    try:
        if int(env.stat()["psize"]) != DB_PAGE_BYTES:
            raise CatalogError(f"data.mdb has pages of {env.stat()['psize']} bytes")
        with env.begin() as txn:
            cursor = txn.cursor()
            if not start or cursor.set_range(start):
                yield from cursor.iternext()
    except lmdb.Error as error:
        raise (CatalogDenied if is_denied(error) else CatalogError)(str(error)) from error
    finally:
        env.close()


# -- records: each carries a check over its key and value ---------------------------------------


def encode_record(slot: int, page: PageRecord, root_id: int, writer_id: int) -> bytes:
    """The value of a page's record. The slot, which is its key, is in it and checked with it."""
    body = RECORD.pack(
        b"",
        slot,
        page.sequence,
        page.parent_sequence,
        page.key,
        page.checksum,
        root_id,
        writer_id,
        page.page_index,
        page.payload_bytes,
        min(max(page.created_s, 0), 0xFFFFFFFF),
        page.codec,
        FORMAT_VERSION,
        len(page.tokens),
        len(page.extras),
    )
    body = b"".join((body[CHECK_BYTES:], page.tokens, page.extras))
    return check64(body) + body


def record_bytes(page: PageRecord) -> int:
    """Length of the value of a page's record."""
    return RECORD.size + len(page.tokens) + len(page.extras)


def decode_segment(key: bytes, value: bytes) -> SegmentShape | None:
    """The segment of an S record, or None when it is not sound."""
    body = _opened(key, value)
    if body is None or len(body) != _SEGMENT.size or len(key) != _SMALL_KEY.size:
        return None
    directory, slots, slot_bytes, header_bytes = _SEGMENT.unpack(body)
    shape = SegmentShape(_SMALL_KEY.unpack(key)[1], directory, slots, slot_bytes, header_bytes)
    return shape if shape.sound else None


def decode_root(key: bytes, value: bytes) -> tuple[bytes, str, bytes] | None:
    """(root, tenant, namespace) of an R record, or None when it is not sound."""
    body = _opened(key, value)
    if body is None or len(body) < _ROOT.size or len(key) != _SMALL_KEY.size:
        return None
    root, namespace = _ROOT.unpack_from(body)
    try:
        return root, body[_ROOT.size :].decode(), namespace
    except UnicodeDecodeError:
        return None


def decode_writer(key: bytes, value: bytes) -> str | None:
    """The name of a W record, or None when it is not sound."""
    body = _opened(key, value)
    try:
        return None if body is None or len(key) != _SMALL_KEY.size else body.decode()
    except UnicodeDecodeError:
        return None


def decrypt_small(key: bytes, value: bytes, cipher: Cipher) -> bytes | None:
    """An r or w record as `decode_root` and `decode_writer` read it; None when it can't be."""
    body = _opened(key, value)
    plain = None if body is None else decrypt_name(key, body, cipher)
    return None if plain is None else _sealed(key, plain)


def small_key_id(key: bytes, value: bytes) -> bytes | None:
    """The id of the key that an r or w record is encrypted with; None when it is not sound."""
    body = _opened(key, value)
    return None if body is None else name_key_id(body)


def decode_meta(value: bytes | None) -> tuple[bytes, int] | None:
    """(store uuid, format version) of the M record, or None when it is not sound."""
    body = None if value is None else _opened(b"M", value)
    if body is None or len(body) != _META.size:
        return None
    uuid, version = _META.unpack(body)
    return uuid, version


def _sealed(key: bytes, body: bytes) -> bytes:
    return check64(key + body) + body


def _opened(key: bytes, value: bytes) -> bytes | None:
    body = value[CHECK_BYTES:]
    return body if check64(key + body) == value[:CHECK_BYTES] else None
