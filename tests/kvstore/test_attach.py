"""Other processes of a client at its session's memory: what they map, what their end means."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from known_pages import PAGE_BYTES, PAGE_TOKENS, SPEC, content, load, prompt, save
from raw_client import RawClient, status_of, wait_until
from server_process import ServerProcess

from kvstore import kvstore_pb2 as messages
from kvstore.client import RemoteStore
from kvstore.connect import connect
from kvstore.errors import InvalidRequest
from kvstore.server import Server
from kvstore.server_config import ServerConfig
from kvstore.shared_memory import AttachGrant, Attachment, SharedMemoryError, attach
from kvstore.tiers.tier import SLOT_INDEX_BITS, SLOT_INDEX_MASK

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.slow

_seeds = itertools.count(1)
CHILD = """
import sys
from pathlib import Path
from kvstore.shared_memory import attach
attachment = attach(Path(sys.argv[1]), bytes.fromhex(sys.argv[2]))
attachment.staging.view(0, 5)[:] = b"child"
print("attached", flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("attach") / "store"
    made = Server(ServerConfig(directory=directory, host_bytes="16MiB", disk_bytes="64MiB"))
    made.store.wait_warm(10.0)
    made.start()
    yield made
    made.store.check()
    assert made.stop()


@pytest.fixture
def client(server: Server) -> Iterator[RawClient]:
    client = RawClient(server.config.address)
    client.open()
    yield client
    client.close()


def tokens_of(client: RawClient, count: int) -> messages.AttachReply:
    request = messages.AttachRequest(session=client.session, count=count)
    reply: messages.AttachReply = client.call("Attach", request)
    return reply


def guest_of(client: RawClient) -> Attachment:
    reply = tokens_of(client, 1)
    return attach(Path(reply.path), reply.attach_token[0])


def read(attachment: Attachment, slot: int, generation: int) -> bytes | None:
    """A page by its place, as a worker reads it."""
    if slot >> SLOT_INDEX_BITS not in attachment.extents:
        attachment.refresh()
    buffer = bytearray(PAGE_BYTES)
    extent = attachment.extents[slot >> SLOT_INDEX_BITS]
    there = extent.read_into(slot & SLOT_INDEX_MASK, generation, memoryview(buffer))
    return bytes(buffer) if there else None


def test_guests_map_what_the_session_maps_and_go_without_a_trace(
    server: Server, client: RawClient
) -> None:
    first, second = guest_of(client), guest_of(client)
    tokens = prompt(next(_seeds), 4)
    reserved = client.reserve(tokens)
    assert reserved.count == 4, reserved
    offsets = np.frombuffer(reserved.staging_offsets, "<u8").tolist()
    for page, offset in enumerate(offsets):
        guest = (first, second)[page % 2]
        assert guest.staging is not None
        guest.staging.view(offset, PAGE_BYTES)[:] = content(tokens, page)
    assert client.commit(reserved.reservation).pages == 4
    first.close()
    found = client.match(tokens)
    slots = np.frombuffer(found.places.host_slots, "<i8").tolist()
    generations = np.frombuffer(found.places.host_generations, "<u8").tolist()
    for page, place in enumerate(zip(slots, generations, strict=True)):
        assert read(second, *place) == content(tokens, page)
    second.close()
    wait_until(lambda: len(server._extents._connections) == 1)
    assert client.match(tokens).pages == 4, "the session lives on"


def test_a_guest_that_is_killed_takes_nothing_along(server: Server, client: RawClient) -> None:
    reply = tokens_of(client, 1)
    command = [sys.executable, "-c", CHILD, reply.path, reply.attach_token[0].hex()]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"attached\n"
        assert client.attachment is not None
        assert client.attachment.staging is not None
        assert bytes(client.attachment.staging.view(0, 5)) == b"child"
        os.kill(child.pid, signal.SIGKILL)
    wait_until(lambda: len(server._extents._connections) == 1)
    assert client.save(prompt(next(_seeds), 2)) == 2


@pytest.mark.parametrize("way", ["close", "attachment"])
def test_the_end_of_the_session_ends_its_guests_and_voids_their_tokens(
    server: Server, way: str
) -> None:
    client = RawClient(server.config.address)
    client.open()
    tokens = prompt(next(_seeds), 1)
    client.save(tokens)
    found = client.match(tokens)
    [slot] = np.frombuffer(found.places.host_slots, "<i8").tolist()
    [generation] = np.frombuffer(found.places.host_generations, "<u8").tolist()
    guest = guest_of(client)
    assert read(guest, slot, generation) == content(tokens, 0)
    unused = tokens_of(client, 1)
    if way == "close":
        client.call("Close", messages.CloseRequest(session=client.session))
    else:
        assert client.attachment is not None
        client.attachment.close()
    wait_until(lambda: not server._extents._connections)
    with pytest.raises(SharedMemoryError):
        guest.refresh()
    assert read(guest, slot, generation) == content(tokens, 0), "what is mapped stays mapped"
    with pytest.raises(SharedMemoryError, match="unknown, used or expired"):
        attach(Path(unused.path), unused.attach_token[0])
    guest.close()
    client.close()


def test_a_guests_token_works_once(client: RawClient) -> None:
    reply = tokens_of(client, 3)
    assert len(set(reply.attach_token)) == 3
    attach(Path(reply.path), reply.attach_token[0]).close()
    with pytest.raises(SharedMemoryError, match="unknown, used or expired"):
        attach(Path(reply.path), reply.attach_token[0])
    attach(Path(reply.path), reply.attach_token[1]).close()


def test_what_cannot_be_granted_is_refused_with_its_reason(
    server: Server, client: RawClient
) -> None:
    for count in (0, 257):
        assert status_of(tokens_of, client, count).name == "INVALID_ARGUMENT"
    without = RawClient(server.config.address)
    without.open(shared_memory=False)
    assert status_of(tokens_of, without, 1).name == "INVALID_ARGUMENT"
    without.close()
    client.call("Close", messages.CloseRequest(session=client.session))
    assert status_of(tokens_of, client, 1).name == "NOT_FOUND"


# Through the client


def opened(store: Any) -> Any:
    return store.session(SPEC, salt=f"{next(_seeds)}".encode())


def test_places_and_offsets_are_what_guests_need(tmp_path: Path) -> None:
    with (
        ServerProcess(tmp_path / "store") as own,
        connect(own.start().address, lookup_deadline_s=5.0) as store,
    ):
        session, tokens = opened(store), prompt(1, 6)
        grant = session.attach_tokens(2)
        assert isinstance(grant, AttachGrant)
        assert grant.epoch == session.epoch != 0
        guests = [attach(grant.path, token) for token in grant.tokens]
        run = session.reserve(tokens)
        assert len(run.offsets) == run.count == 6
        for page, offset in enumerate(run.offsets.tolist()):
            staging = guests[page % 2].staging
            assert staging is not None
            staging.view(offset, PAGE_BYTES)[:] = content(tokens, page)
        assert run.commit().pages == 6
        assert len(run.offsets) == 0
        with session.match(tokens) as hit:
            assert hit.stage(5.0) == 6
            slots, generations = hit.places(2, 6)
            pages = [read(guests[0], *place) for place in zip(slots, generations, strict=True)]
            assert pages == [content(tokens, page) for page in range(2, 6)]
            assert len(hit.places(3, 3)[0]) == 0
            with pytest.raises(InvalidRequest, match="6 shared pages"):
                hit.places(0, 7)
        with pytest.raises(InvalidRequest, match="0 shared pages"):
            hit.places(0, 1)
        for guest in guests:
            guest.close()


def test_without_shared_memory_there_are_no_tokens_and_no_places(tmp_path: Path) -> None:
    with (
        ServerProcess(tmp_path / "store") as own,
        connect(own.start().address, lookup_deadline_s=5.0, shared_memory=False) as store,
    ):
        session, tokens = opened(store), prompt(1, 2)
        assert session.attach_tokens(1) is None
        assert save(session, tokens) == 2
        with session.match(tokens) as hit:
            assert hit.stage(5.0) == 2
            with pytest.raises(InvalidRequest):
                hit.places(0, 2)


def test_another_server_process_is_another_epoch(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "store") as own:
        own.start()
        with connect(own.address, lookup_deadline_s=5.0) as store:
            assert isinstance(store, RemoteStore)
            session, tokens = opened(store), prompt(1, 2)
            assert opened(store).epoch != session.epoch, "two sessions of one server differ"
            assert save(session, tokens, durable=True) == 2
            first = session.attach_tokens(1)
            assert first is not None
            guest = attach(first.path, first.tokens[0])
            with session.match(tokens) as hit:
                assert hit.stage(5.0) == 2
                places = hit.places(0, 1)
            own.kill()
            wait_until(lambda: session.epoch == 0)
            assert session.attach_tokens(1) is None
            assert read(guest, int(places[0][0]), int(places[1][0])) == content(tokens, 0)
            own.start()
            wait_until(lambda: session.epoch not in (0, first.epoch))
            wait_until(lambda: load(session, tokens) == 2)
            second = session.attach_tokens(1)
            assert second is not None
            assert second.epoch == session.epoch
            guest.close()
            assert len(tokens) == 2 * PAGE_TOKENS
