"""The arena in a client process: descriptors come over a Unix socket, pages through shared memory.

A session gets a one-time token over the control channel and shows it here; in return come read-only
descriptors of the extents that its server resolves for it, and its staging memory. The connection
stays open: it tells the server that the client lives. A client talks to no socket that another user
has put in the server's place. The other side is extent_server.py.

One message each way (SOCK_SEQPACKET), little-endian: the request names the last extent that the
client knows, the reply brings up to RECORDS_MAX newer ones and says whether there are more. So a
reply always fits in the socket's buffer, and a client that does not read holds nobody up.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import socket
import struct
import weakref
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np

from kvstore.errors import KVStoreError
from kvstore.tiers.extent import (
    EXTENT_MAGIC,
    EXTENT_VERSION,
    GENERATIONS_OFFSET,
    HEADER,
    MADV_POPULATE_READ,
    POPULATE_STEP_BYTES,
    ExtentState,
    header_bytes,
    prefault,
)
from kvstore.tiers.large_pages import map_shared
from kvstore.tiers.tier import SLOT_INDEX_BITS, SLOT_INDEX_MASK

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

WIRE_MAGIC = b"KVSM"
WIRE_VERSION = 1
TOKEN_BYTES = 32
RECORDS_MAX = 32  # extents a message; the kernel passes up to 253 descriptors
ATTACH_TIMEOUT_S = 2.0

REQUEST = struct.Struct(f"<4sIQ{TOKEN_BYTES}s")  # magic, version, last known container, token
REPLY = struct.Struct("<4sIIII")  # magic, version, status, records, whether there are more
RECORD = struct.Struct("<IQQQQQQ")  # kind, then the fields of ExtentRecord from boot_epoch on

FORKED = "shared memory attached by the parent process; attach again after a fork, or use spawn"
UCRED = struct.Struct("3i")  # pid, uid, gid


@dataclass(frozen=True, slots=True)
class AttachGrant:
    """With what other processes of a session's client attach to its memory, one token each.

    `epoch` names the session of that one server process; it is 0 for none.
    """

    epoch: int
    path: Path
    tokens: tuple[bytes, ...]


class SharedMemoryError(KVStoreError):
    """The arena of a server cannot be attached; the message says why."""


class Status(IntEnum):
    """How a server answers."""

    OK = 0
    REFUSED = 1  # the token is unknown, used, or too old
    FAILED = 2


class Kind(IntEnum):
    """What a record's descriptor is."""

    EXTENT = 0
    STAGING = 1


class MappedExtent:
    """An extent as a client sees it: read-only, checked to be what its record says.

    Pages are found by slot index. A page is what the server said it is as long as its generation
    is the one that the server named: read it before and after copying, or use `read_into`.
    """

    def __init__(
        self,
        fd: int,
        boot_epoch: int,
        container_id: int,
        total_bytes: int,
        slot_bytes: int,
        slots: int,
        data_offset: int,
    ) -> None:
        self.boot_epoch = boot_epoch
        self.container_id = container_id
        self.total_bytes = total_bytes
        self.slot_bytes = slot_bytes
        self.slots = slots
        self.data_offset = data_offset
        if data_offset < header_bytes(slots) or data_offset + slots * slot_bytes > total_bytes:
            raise SharedMemoryError("the server describes an extent that cannot be")
        self._pid = os.getpid()
        self._mapping = _map(fd, total_bytes, mmap.PROT_READ)
        self.generations: NDArray[np.uint64] = np.frombuffer(
            self._mapping, np.dtype("<u8"), slots, GENERATIONS_OFFSET
        )
        if HEADER.unpack_from(self._mapping, 0)[:2] != (EXTENT_MAGIC, EXTENT_VERSION):
            raise SharedMemoryError(f"extent {container_id} has no header of version 1")

    @property
    def is_live(self) -> bool:
        """False once the server has emptied this extent for good."""
        expected = (
            *(EXTENT_MAGIC, EXTENT_VERSION, ExtentState.LIVE, self.boot_epoch, self.container_id),
            *(self.slot_bytes, self.slots, self.data_offset),
        )
        return bool(HEADER.unpack_from(self._mapping, 0) == expected)

    @property
    def memory(self) -> memoryview:
        """The whole mapping, header and slots, read-only; it begins on a page of the CPU's."""
        return memoryview(self._mapping)

    def generation(self, index: int) -> int:
        """Even: a page is published there. It moves when that page is gone."""
        return int(self.generations[index])

    def view(self, index: int, size: int) -> memoryview:
        """The first `size` bytes of a slot, read-only. The server may free it at any time."""
        if self._pid != os.getpid():
            raise RuntimeError(FORKED)
        if not 0 <= index < self.slots or not 0 <= size <= self.slot_bytes:
            raise ValueError(f"slot {index} of {self.slots}, {size} of {self.slot_bytes} bytes")
        start = self.data_offset + index * self.slot_bytes
        return memoryview(self._mapping)[start : start + size]

    def read_into(self, index: int, generation: int, destination: memoryview) -> bool:
        """Fill `destination` from a slot; False, and junk in it, when the page is not there."""
        source = self.view(index, destination.nbytes)
        np.copyto(np.frombuffer(destination, np.uint8), np.frombuffer(source, np.uint8))
        return generation % 2 == 0 and self.generation(index) == generation and self.is_live

    def close(self) -> None:
        """Unmap; views that are still held keep the memory."""
        self.generations = np.zeros(0, np.uint64)
        with contextlib.suppress(BufferError):
            self._mapping.close()


class MappedStaging:
    """Memory that this client writes and its server copies from."""

    def __init__(self, fd: int, size: int) -> None:
        self.size = size
        self._mapping = _map(fd, size, mmap.PROT_READ | mmap.PROT_WRITE)

    def view(self, start: int, size: int) -> memoryview:
        """Bytes [start, start + size), writable."""
        if start < 0 or size < 0 or start + size > self.size:
            raise ValueError(f"[{start}, {start + size}) is outside of {self.size} bytes")
        return memoryview(self._mapping)[start : start + size]

    def close(self) -> None:
        """Unmap; views that are still held keep the memory."""
        with contextlib.suppress(BufferError):
            self._mapping.close()


class Attachment:
    """A client's side of one session: its extents by container id, and its staging if it has one.

    The server takes the session for dead when this is closed or its process ends.
    """

    def __init__(self, connection: socket.socket, token: bytes) -> None:
        self.extents: dict[int, MappedExtent] = {}
        self.staging: MappedStaging | None = None
        self._connection = connection
        self._token = token
        self._known = 0
        self._pid = os.getpid()
        self.refresh()
        self._token = bytes(TOKEN_BYTES)
        _LIVE_ATTACHMENTS.add(self)

    def __enter__(self) -> Attachment:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def set_timeout(self, timeout_s: float) -> None:
        """How long refresh() waits for the server."""
        self._connection.settimeout(timeout_s)

    def refresh(self) -> None:
        """Map the extents that are new and unmap those that the server has given up."""
        if self._pid != os.getpid():
            raise RuntimeError(FORKED)
        for extent in [e for e in self.extents.values() if not e.is_live]:
            self.extents.pop(extent.container_id).close()
        while self._ask():
            pass

    def close(self) -> None:
        """End the session and unmap all."""
        self._connection.close()
        for extent in self.extents.values():
            extent.close()
        self.extents.clear()
        if self.staging is not None:
            self.staging.close()

    def abandon(self) -> None:
        """Let go of the parent's connection in a forked child, which would outlive the parent."""
        self._connection.close()

    def _ask(self) -> bool:
        request = REQUEST.pack(WIRE_MAGIC, WIRE_VERSION, self._known, self._token)
        size_max = REPLY.size + (RECORDS_MAX + 1) * RECORD.size
        try:
            self._connection.send(request)
            message, fds, flags, _ = socket.recv_fds(
                self._connection, size_max, RECORDS_MAX + 1, socket.MSG_CMSG_CLOEXEC
            )
        except OSError as exc:
            raise SharedMemoryError(f"the server does not answer: {exc}") from exc
        try:
            if flags & socket.MSG_CTRUNC:
                raise SharedMemoryError("too few file descriptors; raise ulimit -n")
            records, more = _unpack_reply(message, len(fds))
            for fd, (kind, *fields) in zip(fds, records, strict=True):
                self._map_record(fd, kind, fields)
        finally:
            for fd in fds:
                os.close(fd)
        return more

    def _map_record(self, fd: int, kind: int, fields: list[int]) -> None:
        _, container_id, total_bytes, *_ = fields
        if kind == Kind.STAGING:
            self.staging = MappedStaging(fd, total_bytes)
            return
        self._known = max(self._known, container_id)
        extent = MappedExtent(fd, *fields)
        if extent.is_live:
            self.extents[container_id] = extent
        else:  # emptied since the server answered: nobody will ask for it
            extent.close()


def attach(
    path: Path, token: bytes, *, server_uid: int | None = None, timeout_s: float = ATTACH_TIMEOUT_S
) -> Attachment:
    """Map what the session of that token may map. Raises SharedMemoryError.

    The server must run as `server_uid` (default: this process's own user).
    """
    if len(token) != TOKEN_BYTES:
        raise SharedMemoryError(f"a token has {TOKEN_BYTES} bytes, not {len(token)}")
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.settimeout(timeout_s)
        connection.connect(str(path))
        uid, wanted = peer_uid(connection), os.geteuid() if server_uid is None else server_uid
        if uid != wanted:
            raise SharedMemoryError(f"{path} belongs to user {uid}, not to {wanted}: not attached")
        return Attachment(connection, token)
    except OSError as exc:
        connection.close()
        raise SharedMemoryError(f"{path}: {exc.strerror or exc}") from exc
    except BaseException:
        connection.close()
        raise


def place_of(slot: int) -> tuple[int, int]:
    """The extent of a slot, by its container id, and the index in it."""
    return slot >> SLOT_INDEX_BITS, slot & SLOT_INDEX_MASK


def peer_uid(connection: socket.socket) -> int:
    """The user that the other end ran as when it connected, or listened; from the kernel."""
    _, uid, _ = struct.unpack(
        "3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    )
    return int(uid)


def _unpack_reply(message: bytes, fds: int) -> tuple[list[tuple[int, ...]], bool]:
    """The records of a reply, and whether there are more; SharedMemoryError for a refusal."""
    if len(message) < REPLY.size:
        raise SharedMemoryError("the server closed the connection")
    magic, version, status, count, more = REPLY.unpack_from(message)
    if (magic, version) != (WIRE_MAGIC, WIRE_VERSION):
        raise SharedMemoryError("the server speaks another version of the protocol")
    if status != Status.OK:
        raise SharedMemoryError(_REFUSALS.get(status, "the server failed"))
    if len(message) != REPLY.size + count * RECORD.size or count != fds:
        raise SharedMemoryError("the server's answer is malformed")
    return list(RECORD.iter_unpack(message[REPLY.size :])), bool(more)


_REFUSALS = {Status.REFUSED: "the token is unknown, used or expired; open a new session"}


def _map(fd: int, size: int, protection: int) -> mmap.mmap:
    # The size must be sealed: a shorter file would mean SIGBUS at some later access.
    sized = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
    if os.fstat(fd).st_size != size or fcntl.fcntl(fd, fcntl.F_GET_SEALS) & sized != sized:
        raise SharedMemoryError("the server handed out memory that is not of a fixed size")
    mapping = map_shared(fd, size, protection)
    mapping.madvise(mmap.MADV_DONTDUMP)
    mapping.madvise(mmap.MADV_DONTFORK)
    address = np.frombuffer(mapping, np.uint8).ctypes.data
    for start in range(0, size, POPULATE_STEP_BYTES):
        prefault(address + start, min(POPULATE_STEP_BYTES, size - start), MADV_POPULATE_READ)
    return mapping


def _abandon_in_child() -> None:
    for attachment in list(_LIVE_ATTACHMENTS):
        attachment.abandon()


_LIVE_ATTACHMENTS: weakref.WeakSet[Attachment] = weakref.WeakSet()
os.register_at_fork(after_in_child=_abandon_in_child)
