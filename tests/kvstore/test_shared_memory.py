"""Handing the arena to other processes: who gets in, what they get, what they cannot do to it."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import random
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvstore import extent_server, shared_memory
from kvstore.errors import CapacityError, DirectoryError
from kvstore.extent_server import ExtentServer
from kvstore.shared_memory import SharedMemoryError, attach
from kvstore.tiers.checksum import checksum, copy_and_checksum
from kvstore.tiers.extent import ExtentRecord, OwnedFd
from kvstore.tiers.host_tier import HostTier, Staging
from kvstore.tiers.tier import SLOT_INDEX_BITS, SLOT_INDEX_MASK

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MIB = 1 << 20
FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE, FALLOC_FL_ZERO_RANGE = 1, 2, 16


class Arena:
    """A host tier with an extent server; a session is a tenant's name."""

    def __init__(self, path: Path) -> None:
        self.tier = HostTier(2 * MIB, 128 << 10, boot_epoch=9)
        self.staging: dict[str, Staging] = {}
        self.ended: list[str] = []
        self.someone_left = threading.Event()
        self.server = ExtentServer(path, self.resolve, disconnected=self._disconnected)

    def resolve(self, session: str) -> list[ExtentRecord | Staging]:
        records: list[ExtentRecord | Staging] = list(self.tier.extents(session))
        if session in self.staging:
            records.append(self.staging[session])
        return records

    def put(self, tenant: str, payload: bytes) -> int:
        [slot] = self.tier.reserve(tenant, len(payload), 1)
        self.tier.view(slot, len(payload))[:] = payload
        self.tier.publish_many([slot])
        return slot

    def close(self) -> None:
        self.server.close()
        self.tier.check()
        self.tier.close()

    def _disconnected(self, session: str) -> None:
        self.ended.append(session)
        self.someone_left.set()


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[Arena]:
    arena = Arena(tmp_path / "extents.sock")
    yield arena
    arena.close()


@contextmanager
def descriptor_of(arena: Arena, tenant: str) -> Iterator[tuple[int, int]]:
    """What a hostile client holds: the descriptor as it came over the socket, and its size."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
        client.connect(str(arena.server.path))
        client.send(request(arena.server.issue_token(tenant)))
        message, fds, _, _ = socket.recv_fds(client, 4096, 8)
        _, _, _, size, *_ = shared_memory.RECORD.unpack_from(message, shared_memory.REPLY.size)
        yield fds[0], size
        for fd in fds:
            os.close(fd)


def request(token: bytes, known: int = 0, version: int = 1) -> bytes:
    return shared_memory.REQUEST.pack(b"KVSM", version, known, token)


def parts(slot: int) -> tuple[int, int]:
    return slot >> SLOT_INDEX_BITS, slot & SLOT_INDEX_MASK


# Attaching


def test_a_client_reads_what_the_server_published(arena: Arena) -> None:
    payload = random.Random(3).randbytes(10_000)
    slot = arena.put("a", payload)
    container, index = parts(slot)
    with attach(arena.server.path, arena.server.issue_token("a")) as client:
        extent = client.extents[container]
        assert (extent.boot_epoch, extent.slot_bytes) == (9, 12_288)
        assert extent.view(index, 10_000) == payload
        assert extent.generation(index) == arena.tier.generation(slot)
        assert client.staging is None
        with pytest.raises(TypeError):
            extent.view(index, 10)[0] = 1
        for wrong in ((extent.slots, 1), (-1, 1), (0, 12_289), (0, -1)):
            with pytest.raises(ValueError, match="slot"):
                extent.view(*wrong)


def test_read_into_notices_that_its_page_went_away(arena: Arena) -> None:
    payload, buffer = b"p" * 4096, memoryview(bytearray(4096))
    slot = arena.put("a", payload)
    container, index = parts(slot)
    generation = arena.tier.generation(slot)
    with attach(arena.server.path, arena.server.issue_token("a")) as client:
        extent = client.extents[container]
        assert extent.read_into(index, generation, buffer)
        assert buffer == payload
        assert not extent.read_into(index, generation - 1, buffer)  # as while it was written
        arena.tier.free_many([slot])
        assert not extent.read_into(index, generation, buffer)
        assert arena.put("a", b"q" * 4096) == slot
        assert not extent.read_into(index, generation, buffer)
        assert extent.read_into(index, arena.tier.generation(slot), buffer)


def test_an_extent_that_changed_its_slot_size_in_place_is_no_longer_live(arena: Arena) -> None:
    slots = arena.tier.reserve("a", 4096, 10_000)
    arena.tier.publish_many(slots)
    generations = {slot: arena.tier.generation(slot) for slot in slots}
    buffer = memoryview(bytearray(4096))
    with attach(arena.server.path, arena.server.issue_token("a")) as client:
        old = dict(client.extents)
        assert all(extent.is_live for extent in old.values())
        arena.tier.free_many(slots)
        new = arena.tier.reserve("a", 16_384, 10_000)
        arena.tier.publish_many(new)
        assert not any(extent.is_live for extent in old.values())
        for slot in slots:
            container, index = parts(slot)
            assert not old[container].read_into(index, generations[slot], buffer)
        client.refresh()
        assert set(client.extents) == {slot >> SLOT_INDEX_BITS for slot in new}


def test_refresh_maps_new_extents_and_drops_retired_ones(arena: Arena) -> None:
    first = arena.tier.reserve("a", 4096, 1)
    with attach(arena.server.path, arena.server.issue_token("a")) as client:
        assert len(client.extents) == 1
        more = arena.tier.reserve("a", 4096, 100)
        client.refresh()
        wanted = {slot >> SLOT_INDEX_BITS for slot in first + more}
        assert set(client.extents) == wanted
        arena.tier.free_many(more + first)
        arena.tier.reserve("b", 4096, 10_000)  # takes the memory of all
        client.refresh()
        assert client.extents == {}


def test_more_extents_than_fit_in_one_message_all_arrive(tmp_path: Path) -> None:
    tier = HostTier(80 * 16_384, 16_384)
    slots = tier.reserve("a", 4096, 10_000)
    server = ExtentServer(tmp_path / "s", tier.extents)
    try:
        with attach(server.path, server.issue_token("a")) as client:
            assert len(client.extents) == 80 > 2 * shared_memory.RECORDS_MAX
            assert {slot >> SLOT_INDEX_BITS for slot in slots} == set(client.extents)
    finally:
        server.close()
        tier.close()


def test_a_session_gets_only_its_own_tenants_extents(arena: Arena) -> None:
    mine, other = arena.put("a", b"mine"), arena.put("b", b"other")
    with attach(arena.server.path, arena.server.issue_token("a")) as client:
        assert set(client.extents) == {parts(mine)[0]}
        assert parts(other)[0] not in client.extents


def test_staging_is_written_by_the_client_and_copied_by_the_server(arena: Arena) -> None:
    staging = arena.tier.new_staging(64 << 10)
    assert staging is not None
    arena.staging["a"] = staging
    payload = random.Random(4).randbytes(9000)
    with attach(arena.server.path, arena.server.issue_token("a")) as client:
        assert client.staging is not None
        client.staging.view(8192, 9000)[:] = payload
        [slot] = arena.tier.reserve("a", 9000, 1)
        digest = copy_and_checksum(staging.view(8192, 9000), arena.tier.view(slot, 9000))
        arena.tier.publish_many([slot])
        assert digest == checksum(payload)
        # scribbling afterwards changes nothing that is published
        client.staging.view(8192, 9000)[:] = bytes(9000)
        assert arena.tier.readonly_view(slot, 9000) == payload
        with pytest.raises(ValueError, match="outside of 65536 bytes"):
            client.staging.view(65_536, 1)


@pytest.mark.parametrize("token", [bytes(32), b"x" * 32])
def test_an_unknown_token_is_refused(arena: Arena, token: bytes) -> None:
    arena.server.issue_token("a")
    with pytest.raises(SharedMemoryError, match="the token is unknown, used or expired"):
        attach(arena.server.path, token)


def test_a_token_works_once(arena: Arena) -> None:
    token = arena.server.issue_token("a")
    with (
        attach(arena.server.path, token),
        pytest.raises(SharedMemoryError, match="token is unknown, used or expired"),
    ):
        attach(arena.server.path, token)


def test_a_token_expires(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extent_server, "TOKEN_TTL_S", -1.0)
    token = arena.server.issue_token("a")
    with pytest.raises(SharedMemoryError, match="expired"):
        attach(arena.server.path, token)


def test_tokens_are_limited_in_number(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extent_server, "TOKENS_MAX", 2)
    tokens = {arena.server.issue_token("a") for _ in range(2)}
    assert len(tokens) == 2
    with pytest.raises(CapacityError, match="2 sessions"):
        arena.server.issue_token("a")


def test_a_token_of_the_wrong_length_is_not_even_sent(arena: Arena) -> None:
    with pytest.raises(SharedMemoryError, match="32 bytes, not 0"):
        attach(arena.server.path, b"")


@pytest.mark.parametrize(
    "message", [b"x", bytes(400), request(bytes(32), version=2), b"EVIL" + request(bytes(32))[4:]]
)
def test_junk_ends_the_connection_and_nobody_elses(arena: Arena, message: bytes) -> None:
    slot = arena.put("a", b"page")
    with (
        attach(arena.server.path, arena.server.issue_token("a")) as other,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client,
    ):
        client.connect(str(arena.server.path))
        client.settimeout(5)
        client.send(message)
        assert client.recv(100) == b""
        other.refresh()
        assert other.extents[parts(slot)[0]].view(parts(slot)[1], 4) == b"page"


def test_a_failing_resolver_is_an_answer_not_a_dead_server(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def resolve(session: str) -> list[ExtentRecord]:
        raise KeyError(session)

    server = ExtentServer(tmp_path / "s", resolve)
    try:
        for _ in range(2):
            with pytest.raises(SharedMemoryError, match="the server failed"):
                attach(server.path, server.issue_token("gone"))
    finally:
        server.close()
    assert "answering a client failed" in caplog.text


def test_a_silent_connection_is_closed(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extent_server, "HANDSHAKE_S", 0.0)
    monkeypatch.setattr(extent_server, "ACCEPT_PAUSE_S", 0.01)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
        client.connect(str(arena.server.path))
        client.settimeout(5)
        assert client.recv(1) == b""


def test_connections_are_limited_in_number(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extent_server, "CONNECTIONS_MAX", 1)
    with attach(arena.server.path, arena.server.issue_token("a")) as client:
        with pytest.raises(SharedMemoryError):
            attach(arena.server.path, arena.server.issue_token("a"))
        client.refresh()
    assert arena.someone_left.wait(5)
    attach(arena.server.path, arena.server.issue_token("a")).close()


def test_the_end_of_a_connection_is_reported_once(arena: Arena) -> None:
    attach(arena.server.path, arena.server.issue_token("a")).close()
    assert arena.someone_left.wait(5)
    assert arena.ended == ["a"]


def test_a_server_that_is_not_there_is_an_error_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(SharedMemoryError, match=r"nobody\.sock: No such file"):
        attach(tmp_path / "nobody.sock", bytes(32))


def test_a_socket_of_another_user_is_not_trusted(arena: Arena) -> None:
    with pytest.raises(SharedMemoryError, match="belongs to user"):
        attach(arena.server.path, arena.server.issue_token("a"), server_uid=os.geteuid() + 1)


# The socket's place


def test_the_socket_is_for_its_owner_only_under_any_umask(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        server = ExtentServer(tmp_path / "s", lambda session: [])
    finally:
        os.umask(old)
    assert stat.S_IMODE(os.lstat(tmp_path / "s").st_mode) == 0o600
    server.close()
    assert not (tmp_path / "s").exists()


def test_a_dead_servers_socket_is_replaced(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as dead:
        dead.bind(str(tmp_path / "s"))
    ExtentServer(tmp_path / "s", lambda session: []).close()


def test_a_live_servers_socket_is_not_taken_over(arena: Arena) -> None:
    with pytest.raises(DirectoryError, match="in use by another server"):
        ExtentServer(arena.server.path, lambda session: [])
    attach(arena.server.path, arena.server.issue_token("a")).close()


def test_something_else_in_the_sockets_place_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "s").write_text("precious")
    with pytest.raises(DirectoryError, match="not a socket of user"):
        ExtentServer(tmp_path / "s", lambda session: [])
    assert (tmp_path / "s").read_text() == "precious"


def test_a_path_too_long_for_a_socket_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DirectoryError, match="at most 107 bytes"):
        ExtentServer(tmp_path / ("x" * 120), lambda session: [])


# Hostile clients


def test_an_extent_cannot_be_changed_by_whoever_holds_its_descriptor(arena: Arena) -> None:
    """T8: all ways known to shrink, grow, write or punch an extent are refused by the kernel."""
    payload = random.Random(5).randbytes(4096)
    slot = arena.put("a", payload)
    with descriptor_of(arena, "a") as (fd, size):
        writable = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
        mapping = mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ)
        attacks: dict[str, Callable[[], Any]] = {
            "shrink": lambda: os.ftruncate(writable, 0),
            "shrink by one": lambda: os.ftruncate(writable, size - 1),
            "grow": lambda: os.ftruncate(writable, size + 4096),
            "truncate by path": lambda: os.truncate(f"/proc/self/fd/{fd}", 0),
            "open and truncate": lambda: os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_TRUNC),
            "write": lambda: os.pwrite(writable, b"x", 0),
            "write, read-only descriptor": lambda: os.pwrite(fd, b"x", 0),
            "map": lambda: mmap.mmap(writable, size, mmap.MAP_SHARED),
            "map, read-only descriptor": lambda: mmap.mmap(fd, size, mmap.MAP_SHARED),
            "make a mapping writable": lambda: _protect(mapping, size),
            "grow by allocating": lambda: os.posix_fallocate(writable, size, 4096),
            "punch a hole": lambda: _fallocate(writable, FALLOC_FL_PUNCH_HOLE, size),
            "write zeros": lambda: _fallocate(writable, FALLOC_FL_ZERO_RANGE, size),
            "drop the pages": lambda: mapping.madvise(mmap.MADV_REMOVE),
            "splice": lambda: _splice_into(writable),
            "unseal": lambda: fcntl.fcntl(writable, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE),
        }
        for name, attack in attacks.items():
            try:
                attack()
            except OSError:
                continue
            pytest.fail(f"{name}: was allowed")
        os.close(writable)
        mapping.close()
        assert arena.tier.readonly_view(slot, 4096) == payload
        arena.tier.check()


def test_the_servers_own_reads_and_writes_go_on_under_the_seals(
    arena: Arena, tmp_path: Path
) -> None:
    """Among them reads from a file straight into a slot, with O_DIRECT where there is any."""
    payload = random.Random(6).randbytes(8192)
    (tmp_path / "file").write_bytes(payload)
    try:
        fd = os.open(tmp_path / "file", os.O_RDONLY | os.O_DIRECT)
    except OSError:
        fd = os.open(tmp_path / "file", os.O_RDONLY)
    [slot] = arena.tier.reserve("a", 8192, 1)
    with descriptor_of(arena, "a"):
        assert os.preadv(fd, [arena.tier.view(slot, 8192)], 0) == 8192
        assert arena.tier.readonly_view(slot, 8192) == payload
    os.close(fd)


def test_staging_keeps_its_size_and_holes_in_it_kill_nobody(arena: Arena) -> None:
    """T8: sparse or shrunken staging cannot kill the server."""
    staging = arena.tier.new_staging(64 << 10)
    assert staging is not None
    arena.staging["a"] = staging
    with descriptor_of(arena, "a") as (fd, size):
        assert size == 64 << 10
        for attack in (
            lambda: os.ftruncate(fd, 0),
            lambda: os.ftruncate(fd, 1 << 20),
            lambda: os.posix_fallocate(fd, size, 4096),
        ):
            with pytest.raises(PermissionError):
                attack()
        os.pwrite(fd, b"s" * size, 0)
        _fallocate(fd, FALLOC_FL_PUNCH_HOLE, size)
        [slot] = arena.tier.reserve("a", size, 1)
        digest = copy_and_checksum(staging.view(0, size), arena.tier.view(slot, size))
        assert digest == checksum(bytes(size))


def test_scribbling_during_the_copy_harms_only_that_page(arena: Arena) -> None:
    """T8: the checksum is of what was published, whatever the staging said in between."""
    size = 1 << 18
    staging = arena.tier.new_staging(size)
    assert staging is not None
    arena.staging["a"] = staging
    other = arena.put("a", b"o" * 4096)
    stop = threading.Event()
    with attach(arena.server.path, arena.server.issue_token("a")) as client:
        assert client.staging is not None
        scratch = client.staging.view(0, size)

        def scribble() -> None:
            while not stop.is_set():
                scratch[:] = os.urandom(1) * size

        thread = threading.Thread(target=scribble)
        thread.start()
        for _ in range(30):
            [slot] = arena.tier.reserve("a", size, 1)
            digest = copy_and_checksum(staging.view(0, size), arena.tier.view(slot, size))
            arena.tier.publish_many([slot])
            assert checksum(arena.tier.readonly_view(slot, size)) == digest
            arena.tier.free_many([slot])
        stop.set()
        thread.join()
    assert arena.tier.readonly_view(other, 4096) == b"o" * 4096


def test_a_client_refuses_memory_that_could_shrink_under_it(tmp_path: Path) -> None:
    """The other direction: a client maps nothing whose size is not sealed (SIGBUS otherwise)."""
    fd = OwnedFd(os.memfd_create("loose", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
    os.ftruncate(fd.fileno(), 8192)
    server = ExtentServer(tmp_path / "s", lambda _: [ExtentRecord(fd, 1, 1, 8192, 4096, 1, 4096)])
    try:
        with pytest.raises(SharedMemoryError, match="not of a fixed size"):
            attach(server.path, server.issue_token("a"))
    finally:
        server.close()


@pytest.mark.parametrize(
    "fields",
    [(9, 1, 131_072, 4096, 1000, 8192), (9, 1, 131_072, 4096, 31, 0), (9, 1, 4096, 4096, 1, 4096)],
)
def test_a_client_refuses_a_record_that_does_not_describe_its_memory(
    arena: Arena, tmp_path: Path, fields: tuple[int, ...]
) -> None:
    arena.put("a", b"x")
    [record] = arena.tier.extents("a")
    server = ExtentServer(tmp_path / "s", lambda _: [ExtentRecord(record.fd, *fields)])
    try:
        with pytest.raises(SharedMemoryError, match=r"cannot be|not of a fixed size"):
            attach(server.path, server.issue_token("a"))
    finally:
        server.close()


# Processes


CLIENT = """
import hashlib, sys
from pathlib import Path
from kvstore.shared_memory import attach
client = attach(Path(sys.argv[1]), bytes.fromhex(sys.argv[2]))
[extent] = client.extents.values()
index, size = int(sys.argv[3]), int(sys.argv[4])
print(hashlib.sha256(extent.view(index, size)).hexdigest(), extent.generation(index), flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_another_process_reads_the_page_and_its_death_ends_the_session(arena: Arena) -> None:
    import hashlib

    payload = random.Random(7).randbytes(70_000)
    slot = arena.put("a", payload)
    token = arena.server.issue_token("a").hex()
    arguments = [str(arena.server.path), token, str(parts(slot)[1]), str(len(payload))]
    child = subprocess.Popen(
        [sys.executable, "-c", CLIENT, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdin is not None
    assert child.stdout is not None
    expected = f"{hashlib.sha256(payload).hexdigest()} {arena.tier.generation(slot)}\n"
    assert child.stdout.readline() == expected
    assert arena.ended == []
    child.send_signal(signal.SIGKILL)
    assert arena.someone_left.wait(10)
    assert arena.ended == ["a"]
    child.communicate()


@pytest.mark.slow
def test_a_forked_child_of_a_client_neither_reads_nor_keeps_the_session_alive(
    arena: Arena,
) -> None:
    slot = arena.put("a", b"f" * 4096)
    code = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from kvstore.shared_memory import attach\n"
        "client = attach(Path(sys.argv[1]), bytes.fromhex(sys.argv[2]))\n"
        "[extent] = client.extents.values()\n"
        "if os.fork() == 0:\n"
        "    for call in (client.refresh, lambda: extent.view(0, 1)):\n"
        "        try:\n"
        "            call()\n"
        "        except RuntimeError as exc:\n"
        "            print('told', flush=True)\n"
        "    sys.stdin.read()\n"  # outlives its parent
        "    os._exit(0)\n"
        "client.refresh()\n"
        "os._exit(0)\n"
    )
    token = arena.server.issue_token("a").hex()
    child = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", code, str(arena.server.path), token],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.wait(10) == 0
    assert arena.someone_left.wait(10), "the child's copy of the socket keeps the session"
    assert child.communicate("")[0] == "told\ntold\n"
    arena.tier.free_many([slot])


@pytest.mark.slow
@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
def test_another_users_process_is_turned_away_before_its_token_counts() -> None:
    """SO_PEERCRED counts even where file permissions were opened by mistake."""
    code = (
        "import os, socket, sys\n"
        "os.setgid(65534); os.setuid(65534)\n"
        "client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)\n"
        "client.settimeout(5)\n"
        "client.connect(sys.argv[1])\n"
        "try:\n"
        "    client.send(bytes.fromhex(sys.argv[2]))\n"
        "    print(client.recv(100))\n"
        "except (BrokenPipeError, ConnectionResetError):\n"
        "    print(b'')\n"
    )
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o711)  # noqa: S103 - the point of the test
        server = ExtentServer(Path(directory) / "s", lambda session: [])
        server.path.chmod(0o666)
        token = server.issue_token("a")
        arguments = [str(server.path), request(token).hex()]
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=30
        )
        assert done.stdout == "b''\n", done
        attach(server.path, token).close()  # the token is still good
        server.close()


@pytest.mark.slow
def test_running_out_of_descriptors_keeps_the_clients_at_hand_served(tmp_path: Path) -> None:
    """F32: no spinning, and new clients get in again when descriptors come back."""
    code = (
        "import os, resource, socket, sys, time\n"
        "from pathlib import Path\n"
        "from kvstore import extent_server\n"
        "from kvstore.extent_server import ExtentServer\n"
        "from kvstore.shared_memory import SharedMemoryError, attach\n"
        "extent_server.ACCEPT_PAUSE_S = 0.02\n"
        "server = ExtentServer(Path(sys.argv[1]), lambda session: [])\n"
        "first = attach(server.path, server.issue_token('a'))\n"
        "token = server.issue_token('b')\n"
        "waiting = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)\n"
        "used = max(map(int, os.listdir('/proc/self/fd')))\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (used + 1, 4096))\n"
        "filler = [os.dup(0) for _ in range(used + 1 - len(os.listdir('/proc/self/fd')) + 1)]\n"
        "waiting.connect(str(server.path))\n"
        "begin = time.monotonic()\n"
        "for _ in range(5):\n"
        "    first.refresh()\n"
        "    time.sleep(0.02)\n"
        "elapsed = time.monotonic() - begin\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))\n"
        "attach(server.path, token).close()\n"
        "first.close()\n"
        "server.close()\n"
        "print(elapsed)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "s")],
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 0, done
    tries = done.stderr.count("cannot accept a client: Too many open files")
    assert 1 <= tries <= float(done.stdout) / 0.02 + 3  # it does not spin


def _protect(mapping: mmap.mmap, size: int) -> None:
    import numpy as np

    address = np.frombuffer(mapping, np.uint8).ctypes.data
    _check(_LIBC.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(size), 3))


def _fallocate(fd: int, mode: int, size: int) -> None:
    offset, length = ctypes.c_long(0), ctypes.c_long(size)
    _check(_LIBC.fallocate(fd, mode | FALLOC_FL_KEEP_SIZE, offset, length))


def _splice_into(fd: int) -> None:
    reader, writer = os.pipe()
    try:
        os.write(writer, b"x" * 100)
        os.splice(reader, fd, 100, offset_dst=0)
    finally:
        os.close(reader)
        os.close(writer)


def _check(result: int) -> None:
    if result:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


_LIBC = ctypes.CDLL(None, use_errno=True)
