"""HTTP/2 by hand, so that a test can say half of what a client says, or nonsense."""

from __future__ import annotations

import socket
import struct
from typing import TYPE_CHECKING

from kvstore.wire import SERVICE

if TYPE_CHECKING:
    from pathlib import Path

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY = 0, 1, 3, 4, 6, 7
END_STREAM, ACK, END_HEADERS = 1, 1, 4
FRAME_HEADER_BYTES = 9


def frame(kind: int, flags: int, stream: int, content: bytes = b"") -> bytes:
    """One frame."""
    head = struct.pack(">I", len(content))[1:] + bytes([kind, flags])
    return head + struct.pack(">I", stream) + content


def header_block(method: str, *more: tuple[str, str]) -> bytes:
    """The headers of a call, each a literal: no table, no Huffman code."""
    fields = [(":method", "POST"), (":scheme", "http"), (":path", f"/{SERVICE}/{method}")]
    fields += [(":authority", "localhost"), ("content-type", "application/grpc")]
    fields += [("te", "trailers"), *more]
    return b"".join(b"\x00" + b"".join(_text(part) for part in each) for each in fields)


def message(content: bytes) -> bytes:
    """A message as gRPC frames it."""
    return struct.pack(">BI", 0, len(content)) + content


class HalfClient:
    """A connection on which calls are begun and not ended."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(30.0)
        self.socket.connect(str(path))
        self.socket.sendall(PREFACE + frame(SETTINGS, 0, 0))
        self._stream = -1
        self._rest = b""

    def begin(self, method: str, *more: tuple[str, str]) -> int:
        """Send a call's headers and nothing else; the number of its stream."""
        self._stream += 2
        block = header_block(method, *more)
        self.socket.sendall(frame(HEADERS, END_HEADERS, self._stream, block))
        return self._stream

    def send(self, stream: int, content: bytes) -> None:
        """Some bytes of a message."""
        self.socket.sendall(frame(DATA, 0, stream, content))

    def next_frame(self) -> tuple[int, int, int]:
        """Kind, flags and stream of the next frame of the server's; it is answered as need be."""
        head = self._take(FRAME_HEADER_BYTES)
        kind, flags = head[3], head[4]
        stream = struct.unpack(">I", head[5:])[0]
        content = self._take(int.from_bytes(head[:3], "big"))
        if kind == SETTINGS and not flags & ACK:
            self.socket.sendall(frame(SETTINGS, ACK, 0))
        if kind == PING and not flags & ACK:
            self.socket.sendall(frame(PING, ACK, 0, content))
        return kind, flags, stream

    def wait_ended(self, streams: set[int]) -> None:
        """Until the server has ended all of those."""
        left = set(streams)
        while left:
            kind, flags, stream = self.next_frame()
            if kind == RST_STREAM or (kind == HEADERS and flags & END_STREAM):
                left.discard(stream)

    def close(self) -> None:
        """Hang up."""
        self.socket.close()

    def _take(self, count: int) -> bytes:
        while len(self._rest) < count:
            piece = self.socket.recv(65536)
            if not piece:
                raise ConnectionError("the server hung up")
            self._rest += piece
        taken, self._rest = self._rest[:count], self._rest[count:]
        return taken


def _text(value: str) -> bytes:
    raw = value.encode()
    assert len(raw) < 127
    return bytes([len(raw)]) + raw
