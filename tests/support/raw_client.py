"""A client of the service made of bare stubs, so that tests see every answer as it is."""

from __future__ import annotations

import contextlib
import queue
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
from known_pages import PAGE_BYTES, SPEC, content

from kvstore import kvstore_pb2 as messages
from kvstore._version import __version__
from kvstore.kvstore_pb2_grpc import KVStoreStub
from kvstore.shared_memory import Attachment, attach
from kvstore.tiers.tier import SLOT_INDEX_BITS, SLOT_INDEX_MASK
from kvstore.wire import SERVICE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore import CacheSpec

TIMEOUT_S = 20.0


class RawClient:
    """One channel. `call` is a method by name; the others do what nearly every test needs."""

    def __init__(self, address: str, spec: CacheSpec = SPEC) -> None:
        self.channel = grpc.insecure_channel(
            address,
            options=[
                ("grpc.use_local_subchannel_pool", 1),
                ("grpc.initial_reconnect_backoff_ms", 50),
                ("grpc.max_reconnect_backoff_ms", 200),
            ],
        )
        self.stub = KVStoreStub(self.channel)
        self.spec = spec
        self.session = b""
        self.attachment: Attachment | None = None
        self._beats: queue.SimpleQueue[messages.Beat | None] = queue.SimpleQueue()
        self._stream: Any = None

    def call(self, method: str, request: Any, timeout_s: float = TIMEOUT_S) -> Any:
        """The reply of a unary method."""
        return getattr(self.stub, method)(request, timeout=timeout_s)

    def open(self, *, shared_memory: bool = True, **more: Any) -> messages.OpenReply:
        """Open a session, and attach to it."""
        request = messages.OpenRequest(
            client_version=__version__,
            spec_json=self.spec.to_json(),
            shared_memory=shared_memory,
            **more,
        )
        reply: messages.OpenReply = self.call("Open", request)
        self.session = reply.session
        if shared_memory:
            self.attachment = attach(Path(reply.attach_path), reply.attach_token)
        return reply

    def beat(self) -> messages.Beat:
        """One beat and its answer; opens the stream if there is none."""
        if self._stream is None:
            self._stream = self.stub.Heartbeat(iter(self._beats.get, None))
        self._beats.put(messages.Beat(session=self.session))
        beat: messages.Beat = next(self._stream)
        return beat

    def match(self, tokens: np.ndarray, **more: Any) -> messages.MatchReply:
        """Match in this session."""
        request = messages.MatchRequest(session=self.session, tokens=tokens.tobytes(), **more)
        reply: messages.MatchReply = self.call("Match", request)
        return reply

    def reserve(self, tokens: np.ndarray, deadline_s: float = 5.0) -> messages.ReserveReply:
        """Reserve in this session."""
        request = messages.ReserveRequest(
            session=self.session, tokens=tokens.tobytes(), deadline_s=deadline_s
        )
        reply: messages.ReserveReply = self.call("Reserve", request)
        return reply

    def fill(self, tokens: np.ndarray, reserved: messages.ReserveReply) -> None:
        """Write a reservation's pages into staging."""
        assert self.attachment is not None
        assert self.attachment.staging is not None
        offsets = np.frombuffer(reserved.staging_offsets, "<u8").tolist()
        assert len(offsets) == reserved.count
        for position, offset in enumerate(offsets):
            view = self.attachment.staging.view(offset, PAGE_BYTES)
            view[:] = content(tokens, reserved.start + position)
            view.release()

    def commit(self, reservation: int, *, durable: bool = False) -> messages.CommitReply:
        """Commit in this session."""
        request = messages.CommitRequest(
            session=self.session, reservation=reservation, durable=durable, deadline_s=10.0
        )
        reply: messages.CommitReply = self.call("Commit", request)
        return reply

    def save(self, tokens: np.ndarray, *, durable: bool = False) -> int:
        """Store what is missing of a prompt; how many pages."""
        saved = 0
        while (reserved := self.reserve(tokens)).count:
            self.fill(tokens, reserved)
            saved += self.commit(reserved.reservation, durable=durable).pages
        return saved

    def pages(self, places: messages.Places) -> Iterator[bytes]:
        """The bytes of pages in the arena, as long as they come."""
        assert self.attachment is not None
        self.attachment.refresh()
        slots = np.frombuffer(places.host_slots, "<i8").tolist()
        generations = np.frombuffer(places.host_generations, "<u8").tolist()
        for slot, generation in zip(slots, generations, strict=True):
            if slot < 0:
                return
            buffer = bytearray(PAGE_BYTES)
            extent = self.attachment.extents[slot >> SLOT_INDEX_BITS]
            if not extent.read_into(slot & SLOT_INDEX_MASK, generation, memoryview(buffer)):
                return
            yield bytes(buffer)

    def read_stream(self, match: int, start: int, stop: int) -> bytes:
        """Pages without shared memory."""
        header = messages.ReadPagesHeader(
            session=self.session, match=match, start=start, stop=stop
        ).SerializeToString()
        read = self.channel.unary_stream(f"/{SERVICE}/ReadPages")
        return b"".join(read(header, timeout=TIMEOUT_S))

    def write_stream(self, reservation: int, pieces: list[bytes]) -> messages.CommitReply:
        """Fill and commit a reservation without shared memory."""
        header = messages.WritePagesHeader(
            session=self.session, reservation=reservation, deadline_s=5.0
        ).SerializeToString()
        write = self.channel.stream_unary(f"/{SERVICE}/WritePages")
        return messages.CommitReply.FromString(write(iter([header, *pieces]), timeout=TIMEOUT_S))

    def close(self) -> None:
        """End the session and let go of everything."""
        with contextlib.suppress(grpc.RpcError):
            self.call("Close", messages.CloseRequest(session=self.session), 5.0)
        self.die()

    def die(self) -> None:
        """Let go of everything without a word, as the kernel does for a process that is killed."""
        self._beats.put(None)
        if self._stream is not None:
            self._stream.cancel()
        if self.attachment is not None:
            self.attachment.close()
        self.channel.close()


def status_of(action: Any, *arguments: Any, **named: Any) -> grpc.StatusCode:
    """The status with which a call fails."""
    try:
        action(*arguments, **named)
    except grpc.RpcError as exc:
        code: grpc.StatusCode = exc.code()
        return code
    return grpc.StatusCode.OK


def wait_until(condition: Any, timeout_s: float = 10.0) -> None:
    """Come back when it holds; AssertionError when it does not within that time."""
    pause = threading.Event()
    for _ in range(int(timeout_s / 0.01)):
        if condition():
            return
        pause.wait(0.01)
    raise AssertionError(f"still not so after {timeout_s} s")
