"""Drill `frames`: malformed, mutated and poisoned messages at every door of a server.

Messages are made from the descriptor, so that a new method is attacked from its first day: filled
at random with real handles, junk, and pickles that would leave a mark if anybody loaded them; then
mutated byte by byte. Also junk for HTTP/2 itself and for the socket that hands out descriptors.
Wanted: only statuses that say whose fault it is, no stack in the log, a server that goes on.
"""

from __future__ import annotations

import random
import socket
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import grpc
from known_pages import PAGE_BYTES, SPEC, content, prompt
from raw_client import RawClient
from raw_http2 import DATA, GOAWAY, HEADERS, PREFACE, frame, header_block
from server_process import ServerProcess

from kvstore import shared_memory
from kvstore.kvstore_pb2 import DESCRIPTOR
from kvstore.wire import RAW_REQUESTS, SERVICE

if TYPE_CHECKING:
    from pathlib import Path

METHODS = DESCRIPTOR.services_by_name["KVStore"].methods
TIMEOUT_S = 2.0
STREAM_TIMEOUT_S = 0.1  # of those that only end when their client does
HONEST_EACH = 250  # frames
SOCKET_EACH = 20
FAIR = frozenset(
    {"OK", "INVALID_ARGUMENT", "NOT_FOUND", "FAILED_PRECONDITION", "RESOURCE_EXHAUSTED"}
    | {"DEADLINE_EXCEEDED", "CANCELLED", "PERMISSION_DENIED"}
)
ENDLESS_SHARE = 0.1  # of the calls of streams that wait for more
FLAGS = ("--host-bytes=32MiB", "--disk-bytes=64MiB")


class Fuzzer:
    """One server, an honest client, and one that talks nonsense."""

    def __init__(self, server: ServerProcess, mark: Path, seed: int) -> None:
        self.server = server
        self.mark = mark
        self.random = random.Random(seed)
        self.problems: list[str] = []
        self.statuses: dict[str, int] = {}
        self.address = f"unix:{server.socket}"
        self.client = RawClient(self.address)
        # What a loader of pickles would do: make a directory that shows it.
        self.pickle = f"cos\nmkdir\n(S'{mark}'\ntR.".encode()
        self.tokens = prompt(1, 3)

    def run(self, count: int) -> None:
        """So many frames."""
        for number in range(count):
            if number % HONEST_EACH == 0:
                self.be_honest()
            self.send(self.random.choice(METHODS))
            if number % SOCKET_EACH == 0:
                self.junk_for_http2()
                self.junk_for_descriptors()
            if self.problems:
                return
        self.be_honest()

    def be_honest(self) -> None:
        """Store and read in a session of its own; the next nonsense comes from a fresh one."""
        honest = RawClient(self.address)
        honest.open()
        tokens = prompt(7, 4)
        honest.save(tokens)
        reply = honest.match(tokens)
        if list(honest.pages(reply.places)) != [content(tokens, page) for page in range(4)]:
            self.problems.append("an honest client reads something else than it stored")
        honest.close()
        self.client.close()
        self.client = RawClient(self.address)
        self.client.open(shared_memory=False)
        self.match = self.client.match(tokens).match

    def send(self, method: Any) -> None:
        """One call with a message that may be anything."""
        name = method.name
        endless = (method.client_streaming and method.server_streaming) or name == "Watch"
        if endless and self.random.random() > ENDLESS_SHARE:
            return
        pieces = [self.mutated(self.filled(method.input_type))]
        if name in RAW_REQUESTS:
            pieces += [self.junk(PAGE_BYTES) for _ in range(self.random.randint(0, 3))]
        kind = {False: "unary", True: "stream"}
        kinds = f"{kind[method.client_streaming]}_{kind[method.server_streaming]}"
        call = getattr(self.client.channel, kinds)(f"/{SERVICE}/{name}")
        sent = iter(pieces) if method.client_streaming else pieces[0]
        try:
            got = call(sent, timeout=STREAM_TIMEOUT_S if endless else TIMEOUT_S)
            if method.server_streaming:
                for _ in got:
                    pass
            status = "OK"
        except grpc.RpcError as exc:
            status = exc.code().name
        self.statuses[status] = self.statuses.get(status, 0) + 1
        if status not in FAIR:
            self.problems.append(f"{name}: {status} for {pieces[0][:200]!r}")

    def filled(self, kind: Any) -> bytes:
        """A message of that type with something in each field, encoded."""
        made = kind._concrete_class()
        for field in kind.fields:
            if self.random.random() < 0.2:
                continue
            count = self.random.randint(0, 3) if field.label == field.LABEL_REPEATED else 1
            values = [self.value_of(field) for _ in range(count)]
            with suppress(ValueError, TypeError):  # a negative number where none can be
                if field.message_type is not None:
                    if field.label != field.LABEL_REPEATED:
                        inner = getattr(made, field.name)
                        inner.MergeFromString(self.filled(field.message_type))
                elif field.label == field.LABEL_REPEATED:
                    getattr(made, field.name).extend(values)
                else:
                    setattr(made, field.name, values[0])
        return bytes(made.SerializeToString())

    def value_of(self, field: Any) -> Any:
        """Right, wrong or poisoned."""
        pick = self.random.choice
        if field.type == field.TYPE_BYTES:
            real = self.client.session if field.name == "session" else self.tokens.tobytes()
            return real if self.random.random() < 0.5 else pick((self.pickle, self.junk(64), b""))
        if field.type == field.TYPE_STRING:
            poisoned = self.pickle.decode(), "x" * self.random.randint(0, 3000), "\0", "../../etc"
            return pick((SPEC.to_json(), "0.1.0", *poisoned))
        if field.type == field.TYPE_BOOL:
            return pick((False, True))
        if field.type in (field.TYPE_DOUBLE, field.TYPE_FLOAT):
            return pick((0.0, 0.01, -1.0, 1e308, float("nan"), float("inf")))
        return pick((0, 1, 2, self.match, 2**31, 2**32 - 1, 2**63))

    def mutated(self, message: bytes) -> bytes:
        """The message itself in a third of all cases; else with bytes changed, cut, added."""
        if self.random.random() < 0.33:
            return message
        raw = bytearray(message)
        for _ in range(self.random.randint(1, 4)):
            at = self.random.randint(0, len(raw))
            what = self.random.randint(0, 4)
            if what == 0 and at < len(raw):
                raw[at] ^= 1 << self.random.randint(0, 7)
            elif what == 1:
                del raw[at:]
            elif what == 2:
                raw[at:at] = self.junk(16)
            elif what == 3:
                del raw[at : at + self.random.randint(1, 16)]
            else:
                raw[at:at] = raw[: self.random.randint(0, len(raw))][:4096]
        return bytes(raw)

    def junk(self, most: int) -> bytes:
        return self.random.randbytes(self.random.randint(0, most))

    def junk_for_http2(self) -> None:
        """No HTTP/2 at all, or frames that make no sense."""
        with socket.socket(socket.AF_UNIX) as connection, suppress(OSError):
            connection.settimeout(TIMEOUT_S)
            connection.connect(str(self.server.socket))
            if self.random.random() < 0.3:
                connection.sendall(self.junk(2000))
                return
            connection.sendall(PREFACE)
            for _ in range(self.random.randint(1, 6)):
                kind = self.random.choice((DATA, HEADERS, GOAWAY, self.random.randint(0, 255)))
                body = self.junk(200)
                if kind == HEADERS and self.random.random() < 0.7:
                    body = self.mutated(header_block(self.random.choice(METHODS).name))
                flags, stream = self.random.randint(0, 255), self.random.choice((0, 1, 3, 2**31))
                connection.sendall(frame(kind, flags, stream & 0xFFFFFFFF, body))

    def junk_for_descriptors(self) -> None:
        """Requests that are none, and one with a pickle for a token."""
        request = shared_memory.REQUEST.pack(b"KVSM", 1, 0, self.pickle[:32].ljust(32))
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.settimeout(TIMEOUT_S)
            with suppress(OSError):
                connection.connect(str(self.server.directory / "extents.sock"))
                connection.send(self.random.choice((self.mutated(request), request, b"x")))
                _, fds, _, _ = socket.recv_fds(connection, 4096, 8)
                if fds:
                    self.problems.append("descriptors for nonsense")


def frames(directory: Path, count: int, seed: int) -> tuple[list[str], str]:
    """Send `count` of them; what was wrong."""
    mark = directory.with_name("somebody-loaded-a-pickle")
    server = ServerProcess(directory, *FLAGS).start()
    with server:
        fuzzer = Fuzzer(server, mark, seed)
        fuzzer.run(count)
        problems = fuzzer.problems
        if server.process is None or server.process.poll() is not None:
            problems.append("the server died")
        elif server.terminate():
            problems.append("it did not stop well")
    if mark.exists():
        problems.append("a pickle was loaded")
    log = server.log.read_text(errors="replace")
    if "Traceback" in log:
        problems.append("a stack in the log: " + log[log.index("Traceback") :][-600:])
    said = ", ".join(f"{name} {number}" for name, number in sorted(fuzzer.statuses.items()))
    return problems, f"{count} frames ({said}), {len(problems)} did harm"
