"""The hostile drill: a writer of tenant A against a live server and against tenant B.

A does to the memory that it was given what a kernel lets it try, names B's session, match and
reservation in every call, and talks nonsense to the socket that hands out descriptors. Meanwhile
the server must live, published pages keep their bytes, and nothing of B come into A's hands.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import random
import socket
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
from known_pages import PAGE_BYTES, content, prompt
from raw_client import TIMEOUT_S, RawClient
from server_process import ServerProcess

from kvstore import kvstore_pb2 as pb
from kvstore import shared_memory
from kvstore._version import __version__
from kvstore.identity import Role
from kvstore.shared_memory import Kind
from kvstore.tenants import Quota, edit_tenants
from kvstore.tiers.tier import SLOT_INDEX_BITS

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

KEEP_SIZE, PUNCH_HOLE, ZERO_RANGE = 1, 2, 16
PAGES = 6
FD_MESSAGE_BYTES = 64 << 10


class TenantClient(RawClient):
    """A client of bare stubs that shows a token."""

    def __init__(self, address: str, token: str) -> None:
        super().__init__(address)
        self._who = (("authorization", f"Bearer {token}"),)

    def call(self, method: str, request: Any, timeout_s: float = TIMEOUT_S) -> Any:
        """The reply of a unary method."""
        return getattr(self.stub, method)(request, timeout=timeout_s, metadata=self._who)

    def handed_out(self) -> dict[tuple[int, int], tuple[int, int]]:
        """A fresh session's descriptors and sizes by kind and container, as they came."""
        request = pb.OpenRequest(
            client_version=__version__, spec_json=self.spec.to_json(), shared_memory=True
        )
        reply = self.call("Open", request)
        self.session = reply.session
        # Kept open: the session lives as long.
        self.handing = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.handing.connect(reply.attach_path)
        self.handing.send(shared_memory.REQUEST.pack(b"KVSM", 1, 0, reply.attach_token))
        message, fds, _, _ = socket.recv_fds(self.handing, FD_MESSAGE_BYTES, 64)
        records = shared_memory.RECORD.iter_unpack(message[shared_memory.REPLY.size :])
        return {(r[0], r[2]): (fd, r[3]) for fd, r in zip(fds, records, strict=True)}


class Attack:
    """One server with two tenants, and a list of what went wrong."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.problems: list[str] = []
        self.tried = 0
        self.random = random.Random(seed)
        tenants, tokens = directory.with_name("tenants.json"), {}
        for number, name in enumerate(("a", "b")):
            made: list[str] = []

            def edit(book: Any, name: str = name, made: list[str] = made) -> Any:
                book = book.with_tenant(name, Quota())
                book, token = book.with_token(name, Role.WRITER, 0.0, None)
                made.append(token)
                return book

            edit_tenants(tenants, edit, create=number == 0)
            tokens[name] = made[0]
        flags = ("--host-bytes=64MiB", "--disk-bytes=0", f"--tenants-file={tenants}")
        self.server = ServerProcess(directory, *flags).start()
        address = f"unix:{self.server.socket}"
        self.a, self.b = (TenantClient(address, tokens[name]) for name in ("a", "b"))
        self.reader = TenantClient(address, tokens["a"])  # an honest one of the same tenant
        self.prompts = {"a": prompt(1, PAGES), "b": prompt(2, PAGES)}
        for client, name in ((self.reader, "a"), (self.b, "b")):
            client.open()
            client.save(self.prompts[name])

    def refused(self, name: str, attempt: Callable[[], Any]) -> None:
        """Try it; the kernel must say no."""
        self.tried += 1
        with suppress(OSError):
            attempt()
            self.problems.append(f"{name}: was allowed")

    def check(self, after: str) -> None:
        """The server is there, and both tenants read what they stored."""
        if self.server.process is None or self.server.process.poll() is not None:
            self.problems.append(f"the server died after {after}")
            return
        for client, name in ((self.reader, "a"), (self.b, "b")):
            tokens = self.prompts[name]
            reply = client.match(tokens)
            wanted = [content(tokens, page) for page in range(PAGES)]
            if list(client.pages(reply.places)) != wanted:
                self.problems.append(f"pages of tenant {name} differ after {after}")
            client.call("Release", pb.ReleaseRequest(session=client.session, match=[reply.match]))

    def attack_extents(self) -> None:
        """All ways known to shrink, grow, write, punch or unseal an extent."""
        given = self.a.handed_out()
        extents = {key: each for key, each in given.items() if key[0] == Kind.EXTENT}
        for (_, number), (fd, size) in extents.items():
            writable = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
            mapping = mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ)
            for name, attempt in attempts(fd, writable, mapping, size).items():
                self.refused(f"extent {number}: {name}", attempt)
            mapping.close()
            os.close(writable)
        self.check("attacks on extents")
        if not extents:
            self.problems.append("no extent was handed out")
        for fd, _ in given.values():
            os.close(fd)

    def attack_server_descriptors(self) -> None:
        """The server's own descriptors of extents, by way of /proc: no writing either."""
        folder, before = f"/proc/{self.server.pid}/fd", self.tried
        with suppress(PermissionError):  # as it is for any other user
            for name in os.listdir(folder):
                try:
                    fd = os.open(f"{folder}/{name}", os.O_RDWR)
                except OSError:
                    continue
                try:
                    seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
                except OSError:  # no memory
                    seals = 0
                if seals & shared_memory_write_seal():
                    self.refused("write by /proc", lambda fd=fd: os.pwrite(fd, b"x", 0))
                    self.refused("cut by /proc", lambda fd=fd: os.ftruncate(fd, 0))
                os.close(fd)
            if self.tried == before:
                self.problems.append("no memory was found by /proc")
        self.check("attacks by /proc")

    def attack_staging(self, rounds: int) -> None:
        """Resize it, make holes, scribble while the server copies."""
        given = self.a.handed_out()
        fd, size = next(each for key, each in given.items() if key[0] == Kind.STAGING)
        for name, attempt in {
            "shrink": lambda: os.ftruncate(fd, 0),
            "grow": lambda: os.ftruncate(fd, 2 * size),
            "grow by allocating": lambda: os.posix_fallocate(fd, size, 4096),
        }.items():
            self.refused(f"staging: {name}", attempt)
        mapping = mmap.mmap(fd, size)
        stop = threading.Event()

        def scribble() -> None:
            while not stop.is_set():
                mapping[:] = os.urandom(1) * size

        thread = threading.Thread(target=scribble)
        thread.start()
        for number in range(rounds):
            _fallocate(fd, PUNCH_HOLE, size)
            tokens = prompt(100 + number, 3)
            reserved = self.a.reserve(tokens)
            _fallocate(fd, PUNCH_HOLE, size)
            if reserved.count:
                self.a.commit(reserved.reservation)
            self.stays_as_published(tokens)
        stop.set()
        thread.join()
        mapping.close()
        self.check("attacks on staging")
        for each, _ in given.values():
            os.close(each)

    def stays_as_published(self, tokens: np.ndarray) -> None:
        """What was committed reads the same twice, however its writer goes on scribbling."""
        self.tried += 1
        reads = []
        for _ in range(2):
            reply = self.reader.match(tokens)
            reads.append(list(self.reader.pages(reply.places)))
            number = [reply.match]
            self.reader.call(
                "Release", pb.ReleaseRequest(session=self.reader.session, match=number)
            )
        if reads[0] != reads[1] or len(reads[0]) != 3:
            self.problems.append("a published page changed, or was not published")

    def reach_for_the_neighbour(self) -> None:
        """B's extents are not handed to A, and B's names mean nothing in A's mouth."""
        mine, theirs = self.a.handed_out(), self.b.handed_out()
        both = {n for k, n in mine if k == Kind.EXTENT} & {n for k, n in theirs if k == Kind.EXTENT}
        if both:
            self.problems.append(f"extents {both} are handed to both tenants")
        for fd, _ in [*mine.values(), *theirs.values()]:
            os.close(fd)
        held = self.b.match(self.prompts["b"])
        slots = np.frombuffer(held.places.host_slots, "<i8") >> SLOT_INDEX_BITS
        if set(slots.tolist()) & {number for _, number in mine}:
            self.problems.append("tenant A can map pages of tenant B")
        open_one = self.b.reserve(prompt(3, 2))
        name = self.b.session
        requests = {
            "Match": pb.MatchRequest(session=name, tokens=self.prompts["b"].tobytes()),
            "Stage": pb.StageRequest(session=name, match=held.match, deadline_s=1),
            "Release": pb.ReleaseRequest(session=name, match=[held.match]),
            "Reserve": pb.ReserveRequest(session=name, tokens=prompt(4, 2).tobytes()),
            "Commit": pb.CommitRequest(session=name, reservation=open_one.reservation),
            "Abort": pb.AbortRequest(session=name, reservation=open_one.reservation),
            "Flush": pb.FlushRequest(session=name, deadline_s=1),
            "Pin": pb.PinRequest(session=name, tokens=self.prompts["b"].tobytes(), ttl_s=9),
            "Unpin": pb.UnpinRequest(session=name, tokens=self.prompts["b"].tobytes()),
            "Hint": pb.HintRequest(session=name, tokens=self.prompts["b"].tobytes(), done=True),
            "Close": pb.CloseRequest(session=name),
        }
        for method, request in requests.items():
            self.tried += 1
            try:
                self.a.call(method, request)
                self.problems.append(f"{method} with another tenant's session was answered")
            except grpc.RpcError as exc:
                if exc.code() != grpc.StatusCode.NOT_FOUND:
                    self.problems.append(f"{method}: {exc.code().name}")
        if self.a.match(self.prompts["b"]).pages:
            self.problems.append("tenant A has a hit on tenant B's prompt")
        if self.b.commit(open_one.reservation).pages != open_one.count:
            self.problems.append("tenant B's reservation did not survive")
        self.check("reaching for the neighbour")

    def talk_nonsense(self, rounds: int) -> None:
        """Junk, half messages and stolen tokens at the socket that hands out descriptors."""
        path = str(self.server.directory / "extents.sock")
        for _ in range(rounds):
            self.tried += 1
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
                client.settimeout(5)
                client.connect(path)
                message = self.random.randbytes(self.random.randint(0, 300))
                if self.random.random() < 0.3:
                    message = shared_memory.REQUEST.pack(b"KVSM", 1, 0, self.random.randbytes(32))
                with suppress(OSError):
                    client.send(message)
                    if self.random.random() < 0.7 and message:
                        _, fds, _, _ = socket.recv_fds(client, 4096, 8)
                        if fds:
                            self.problems.append("descriptors for nonsense")
        self.check("nonsense")


def attempts(fd: int, writable: int, mapping: mmap.mmap, size: int) -> dict[str, Callable[[], Any]]:
    """What the kernel must refuse for an extent."""
    path = f"/proc/self/fd/{fd}"
    return {
        "shrink": lambda: os.ftruncate(writable, 0),
        "shrink by one": lambda: os.ftruncate(writable, size - 1),
        "grow": lambda: os.ftruncate(writable, size + 4096),
        "truncate by path": lambda: os.truncate(path, 0),
        "open and truncate": lambda: os.open(path, os.O_RDWR | os.O_TRUNC),
        "write": lambda: os.pwrite(writable, b"x", 0),
        "write, read-only descriptor": lambda: os.pwrite(fd, b"x", 0),
        "map": lambda: mmap.mmap(writable, size, mmap.MAP_SHARED),
        "map, read-only descriptor": lambda: mmap.mmap(fd, size, mmap.MAP_SHARED),
        "make a mapping writable": lambda: _protect(mapping, size),
        "grow by allocating": lambda: os.posix_fallocate(writable, size, 4096),
        "punch a hole": lambda: _fallocate(writable, PUNCH_HOLE, size),
        "write zeros": lambda: _fallocate(writable, ZERO_RANGE, size),
        "drop the pages": lambda: mapping.madvise(mmap.MADV_REMOVE),
        "splice": lambda: _splice_into(writable),
        "unseal": lambda: fcntl.fcntl(writable, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE),
    }


def hostile(directory: Path, count: int, seed: int) -> tuple[list[str], str]:
    """All attacks, `count` rounds of those that race; what succeeded of them."""
    attack = Attack(directory, seed)
    with attack.server:
        attack.check("nothing")
        attack.attack_extents()
        attack.attack_server_descriptors()
        attack.attack_staging(count)
        attack.reach_for_the_neighbour()
        attack.talk_nonsense(count)
        code = attack.server.terminate()
        if code:
            attack.problems.append(f"exit code {code}")
    return attack.problems, f"{attack.tried} attacks, {len(attack.problems)} had an effect"


def shared_memory_write_seal() -> int:
    """The seal that extents have and staging has not."""
    return int(getattr(fcntl, "F_SEAL_FUTURE_WRITE", 0x10))


_libc = ctypes.CDLL(None, use_errno=True)


def _fallocate(fd: int, mode: int, size: int) -> None:
    arguments = fd, mode | KEEP_SIZE, ctypes.c_long(0), ctypes.c_long(size)
    if _libc.fallocate(*arguments):
        raise OSError(ctypes.get_errno(), "fallocate")


def _protect(mapping: mmap.mmap, size: int) -> None:
    address = np.frombuffer(mapping, np.uint8).ctypes.data
    if _libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(size), 3):
        raise OSError(ctypes.get_errno(), "mprotect")


def _splice_into(fd: int) -> None:
    reading, writing = os.pipe()
    try:
        os.write(writing, b"x" * PAGE_BYTES)
        os.splice(reading, fd, PAGE_BYTES, offset_dst=0)
    finally:
        os.close(reading)
        os.close(writing)
