"""No client holds a thread for long by saying nothing: slow streams, half calls, lazy readers."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import grpc
import numpy as np
import pytest
from known_pages import PAGE_BYTES, SPEC, content, prompt
from raw_client import RawClient, wait_until
from raw_http2 import HalfClient, message

from kvstore import CacheSpec, call_pool
from kvstore import kvstore_pb2 as messages
from kvstore._version import __version__
from kvstore.call_pool import CallPool, client_has_spoken, said_by_client, waiting_for_client
from kvstore.server import Server
from kvstore.server_config import ServerConfig
from kvstore.wire import SERVICE

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class FakeEvent:
    """As grpc names a call in what it submits."""

    def __init__(self) -> None:
        self.call = self
        self.cancelled = threading.Event()

    def cancel(self) -> None:
        self.cancelled.set()


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_call_whose_client_says_nothing_is_cancelled_and_one_at_work_is_not() -> None:
    clock, silent, at_work = Clock(), FakeEvent(), FakeEvent()
    pool = CallPool(2, "t", clock=clock)
    working = threading.Event()

    def work(event: FakeEvent) -> None:
        client_has_spoken()
        working.set()
        event.cancelled.wait(10)

    pool.submit(silent.cancelled.wait, 10.0)  # names no call: never cancelled
    pool.submit(lambda event: event.cancelled.wait(10), silent)
    wait_until(lambda: len(pool._waits) == 1)
    assert pool.sweep() == 0
    clock.now += call_pool.CLIENT_S_MAX + 1
    assert pool.sweep() == 1
    assert silent.cancelled.is_set()
    wait_until(lambda: not pool._waits)
    pool.submit(work, at_work)
    assert working.wait(10)
    clock.now += call_pool.CLIENT_S_MAX + 1
    assert pool.sweep() == 0
    assert not at_work.cancelled.is_set()
    at_work.cancel()
    pool.shutdown()


def test_a_stream_is_waited_for_between_messages_and_not_while_they_are_worked_on() -> None:
    clock, event = Clock(), FakeEvent()
    pool = CallPool(1, "t", clock=clock)
    seen: list[int] = []

    def messages_of() -> Iterator[str]:
        for each in ("a", "b"):
            seen.append(len(pool._waits))
            yield each

    def work(event: FakeEvent) -> None:
        client_has_spoken()
        for _ in said_by_client(messages_of()):
            seen.append(len(pool._waits))
        with waiting_for_client():
            seen.append(len(pool._waits))

    pool.submit(work, event).result(10)
    assert seen == [1, 0, 1, 0, 1]
    assert not pool._waits
    pool.shutdown()


def test_spare_threads_work_while_clients_hold_all_others() -> None:
    spare = ThreadPoolExecutor(2, "spare")
    pool = CallPool(2, "t", spare)
    held = [FakeEvent(), FakeEvent()]
    for event in held:
        pool.submit(lambda event: event.cancelled.wait(10), event)
    wait_until(lambda: len(pool._waits) == 2)
    named = pool.submit(lambda: threading.current_thread().name).result(10)
    assert named.startswith("spare")
    for event in held:
        event.cancel()
    pool.shutdown()
    spare.shutdown()


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(call_pool, "CLIENT_S_MAX", 0.5)
    config = ServerConfig(
        directory=tmp_path / "s", host_bytes=64 << 20, disk_bytes=0, workers=4, waiting_workers=4
    )
    made = Server(config)
    made.store.wait_warm(10.0)
    made.start()
    thread = threading.Thread(target=made.run)
    thread.start()
    yield made
    made.request_stop()
    thread.join(20)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["Match", "Commit", "WritePages", "Heartbeat", "ReadPages"])
def test_half_calls_keep_nobody_out_and_are_ended(
    server: Server, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """T11: eight of them, which need no credential, took all threads of look-ups for ever."""
    monkeypatch.setattr(call_pool, "CLIENT_S_MAX", 60.0)
    pools, path = server._pools, server.config.socket_path
    assert path is not None
    attacker = HalfClient(path)
    streams = {attacker.begin(method, ("grpc-timeout", "50S")) for _ in range(40)}
    for stream in list(streams)[::2]:
        attacker.send(stream, message(b"x" * 100)[:20])
    wait_until(lambda: sum(len(pool._waits) for pool in pools) == len(streams))
    client = RawClient(server.config.address)
    client.open()
    client.save(prompt(1, 3))
    assert client.match(prompt(1, 3)).pages == 3
    monkeypatch.setattr(call_pool, "CLIENT_S_MAX", 0.2)
    attacker.wait_ended(streams)
    attacker.close()
    client.close()
    wait_until(lambda: not any(pool._waits for pool in pools))


@pytest.mark.slow
def test_an_upload_that_stops_half_way_is_ended_and_its_pages_are_free(server: Server) -> None:
    client, tokens = RawClient(server.config.address), prompt(2, 2)
    client.open(shared_memory=False)
    reserved = client.reserve(tokens)
    assert reserved.count == 2
    header = messages.WritePagesHeader(
        session=client.session, reservation=reserved.reservation, deadline_s=5.0
    ).SerializeToString()
    stuck = threading.Event()

    def pieces() -> Iterator[bytes]:
        yield header
        yield content(tokens, 0)[: PAGE_BYTES // 2]
        stuck.wait(30.0)

    write = client.channel.stream_unary(f"/{SERVICE}/WritePages")
    with pytest.raises(grpc.RpcError) as refused:
        write(pieces(), timeout=30.0)
    stuck.set()
    assert refused.value.code() == grpc.StatusCode.CANCELLED
    wait_until(lambda: client.reserve(tokens).count == 2)
    assert client.match(tokens).pages == 0
    client.close()


@pytest.mark.slow
def test_a_reader_that_takes_nothing_is_ended_and_keeps_no_lease(server: Server) -> None:
    """A slow reader's pages wait in the arena, not in buffers, and not for ever."""
    spec = CacheSpec.opaque("slow", page_tokens=4, page_bytes=4 << 20)
    client = RawClient(server.config.address, spec)
    request = messages.OpenRequest(client_version=__version__, spec_json=spec.to_json())
    client.session = client.call("Open", request).session
    tokens = np.arange(12, dtype=np.int32)
    for _ in range(3):
        client.write_stream(client.reserve(tokens).reservation, [bytes(1 << 20)] * 4)
    number = client.match(tokens).match
    header = messages.ReadPagesHeader(session=client.session, match=number, start=0, stop=3)
    read = client.channel.unary_stream(f"/{SERVICE}/ReadPages")
    stream = read(header.SerializeToString(), timeout=30.0)
    next(stream)
    client.call("Release", messages.ReleaseRequest(session=client.session, match=[number]))
    wait_until(lambda: server.store.stats().to_dict()["leases"] == 0)
    with pytest.raises(grpc.RpcError) as cut:
        list(stream)
    assert cut.value.code() == grpc.StatusCode.CANCELLED
    client.close()


@pytest.mark.slow
def test_silent_sessions_hold_streams_no_longer_than_a_while(server: Server) -> None:
    client = RawClient(server.config.address, SPEC)
    client.open()
    client.beat()
    wait_until(lambda: not len(server.registry))  # the stream was ended, and the session with it
    client.die()
