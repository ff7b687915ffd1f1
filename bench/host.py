"""The host tier from other processes: loading from the arena, and storing into it.

host_load_ratio   a client process attaches by fd passing and copies 2 MiB pages out of the arena,
                  generations checked before and after; budget >= 0.8
host_store_ratio  a client process writes pages from its private memory to staging; the server
                  copies, checksums and publishes them; the clock stops when a second client
                  process has seen all of them published; budget >= 0.4

Both are rates over a one-thread memcpy of the same pages in the same order between private
buffers, measured by the same client process in interleaved pairs.

    python bench/host.py [--json] [--tiny] [--pairs 15] [--pages 256] [--seed 0]
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from paired import PairedRatio, json_line, machine, paired_ratio

from kvstore.extent_server import ExtentServer
from kvstore.shared_memory import attach
from kvstore.tiers.host_tier import HostTier, Staging, copy_and_checksum
from kvstore.tiers.tier import SLOT_INDEX_BITS, SLOT_INDEX_MASK

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvstore.shared_memory import Attachment
    from kvstore.tiers.extent import ExtentRecord

PAGE_BYTES = 2 << 20
TINY_PAGE_BYTES = 64 << 10

# Few pages of staging stay in the last-level cache between the client's copy and the server's.
STAGING_PAGES = 4

# The second client is told of pages in groups, so that waking it costs little.
NOTIFY_PAGES = 16

BUDGETS = {"host_load_ratio": 0.8, "host_store_ratio": 0.4}
NUMBER = struct.Struct("<q")


def main() -> None:
    """Measure and print; or, with --client, be one of the two client processes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    parser.add_argument(
        "--tiny", action="store_true", help="a few small pages: a test of the bench"
    )
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--pages", type=int, default=256, help="2 MiB pages a run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--client", nargs=3, metavar=("SOCKET", "TOKEN", "FD"), help=argparse.SUPPRESS
    )
    options = parser.parse_args()
    if options.tiny:
        options.pairs, options.pages = 3, 8
    options.page_bytes = TINY_PAGE_BYTES if options.tiny else PAGE_BYTES
    if options.client:
        Client(options).run()
        return
    with tempfile.TemporaryDirectory() as directory:
        results, rate = Bench(options, Path(directory)).run()
    if options.json:
        print(json_line(results, options.seed, memcpy_gib_s=round(rate, 2)))
        return
    print(f"{machine()}; seed {options.seed}; memcpy {rate:.1f} GiB/s")
    for key, ratio in results.items():
        print(
            f"{key:17} {ratio.median:.3f}  90 % [{ratio.low:.3f}, {ratio.high:.3f}], "
            f"{ratio.pairs} pairs, budget >= {BUDGETS[key]}: "
            + ratio.verdict(BUDGETS[key], at_least=True)
        )


class Bench:
    """The server's process: the arena, two clients, and a channel to each."""

    def __init__(self, options: argparse.Namespace, directory: Path) -> None:
        self.options = options
        size = options.page_bytes
        self.tier = HostTier((options.pages + 2 * STAGING_PAGES) * (size + 4096) + (64 << 20))
        self.tier.wait_populated(60)
        self.tier.wait_large_pages(60)
        staging = self.tier.new_staging(STAGING_PAGES * size)
        assert staging is not None
        self.staging = staging
        self.server = ExtentServer(directory / "extents.sock", self.resolve)
        self.slots = self.tier.reserve("bench", size, options.pages)
        assert len(self.slots) == options.pages
        rng = np.random.default_rng(options.seed)
        for slot in self.slots:
            self.tier.view(slot, size)[:] = rng.bytes(size)
        self.tier.publish_many(self.slots)
        self.writer, self.reader = self.start_client("writer"), self.start_client("reader")

    def resolve(self, session: str) -> list[ExtentRecord | Staging]:
        records: list[ExtentRecord | Staging] = list(self.tier.extents("bench"))
        return [*records, self.staging] if session == "writer" else records

    def start_client(self, session: str) -> Channel:
        ours, theirs = socket.socketpair()
        token = self.server.issue_token(session).hex()
        command = [sys.executable, __file__, "--pages", str(self.options.pages)]
        command += ["--seed", str(self.options.seed)] + ["--tiny"] * self.options.tiny
        command += ["--client", str(self.server.path), token, str(theirs.fileno())]
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        theirs.close()
        return Channel(ours, process)

    def run(self) -> tuple[dict[str, PairedRatio], float]:
        """Both rows, and the rate of memcpy that they stand beside, in GiB/s."""
        private: dict[str, list[float]] = {key: [] for key in BUDGETS}
        shared: dict[str, list[float]] = {key: [] for key in BUDGETS}
        for pair in range(-1, self.options.pairs):
            for key, measure, client in (
                ("host_load_ratio", self.load_s, self.reader),
                ("host_store_ratio", self.store_s, self.writer),
            ):
                if pair % 2:
                    seconds, copied = measure(), client.ask({"do": "memcpy"})
                else:
                    copied, seconds = client.ask({"do": "memcpy"}), measure()
                if pair >= 0:  # the first pair warms up
                    private[key].append(copied)
                    shared[key].append(seconds)
        self.close()
        results = {key: paired_ratio(private[key], shared[key]) for key in BUDGETS}
        bytes_moved = self.options.pages * self.options.page_bytes
        rate = bytes_moved / statistics.median(private["host_load_ratio"]) / 2**30
        return results, rate

    def load_s(self) -> float:
        """Seconds in which the reader copies all pages out of the arena."""
        generations = [self.tier.generation(slot) for slot in self.slots]
        return self.reader.ask({"do": "load", "pages": self.places(), "generations": generations})

    def store_s(self) -> float:
        """Seconds from the writer's first copy until the reader has seen the last page."""
        size, pages = self.options.page_bytes, self.options.pages
        self.tier.free_many(self.slots)
        self.slots = self.tier.reserve("bench", size, pages)
        self.reader.send({"do": "watch", "pages": self.places()})
        self.writer.send({"do": "store"})
        for page, slot in enumerate(self.slots):
            self.writer.receive_number()
            start = page % STAGING_PAGES * size
            copy_and_checksum(self.staging.view(start, size), self.tier.view(slot, size))
            self.tier.publish_many([slot])
            self.writer.send_number(page)
            if (page + 1) % NOTIFY_PAGES == 0 or page + 1 == pages:
                self.reader.send_number(page)
        seen_s, begun_s = self.reader.receive(), self.writer.receive()
        return seen_s - begun_s

    def places(self) -> list[tuple[int, int]]:
        return [(slot >> SLOT_INDEX_BITS, slot & SLOT_INDEX_MASK) for slot in self.slots]

    def close(self) -> None:
        for client in (self.writer, self.reader):
            client.close()
        self.server.close()
        self.tier.check()
        self.tier.close()


class Client:
    """A client process: private buffers, the mapped arena, and orders from the bench."""

    def __init__(self, options: argparse.Namespace) -> None:
        path, token, fd = options.client
        self.arena: Attachment = attach(Path(path), bytes.fromhex(token))
        self.channel = Channel(socket.socket(fileno=int(fd)))
        self.page_bytes, self.pages = options.page_bytes, options.pages
        rng = np.random.default_rng(options.seed)
        self.order = rng.permutation(self.pages).tolist()
        shape = (self.pages, self.page_bytes)
        self.source = rng.integers(0, 256, shape, np.uint8)
        self.target = np.ones(shape, np.uint8)

    def run(self) -> None:
        while True:
            order = self.channel.receive()
            if order["do"] == "end":
                self.arena.close()
                return
            answer = getattr(self, order.pop("do"))(**order)
            self.channel.send(answer)

    def memcpy(self) -> float:
        """Seconds of the limit: the same pages in the same order between private buffers."""
        begin_s = time.perf_counter()
        for page in self.order:
            np.copyto(self.target[page], self.source[page])
        return time.perf_counter() - begin_s

    def load(self, pages: list[tuple[int, int]], generations: list[int]) -> float:
        """Seconds to copy all pages out of the arena; each must be there before and after."""
        begin_s = time.perf_counter()
        for page in self.order:
            container, index = pages[page]
            extent = self.arena.extents[container]
            assert extent.read_into(index, generations[page], self.target[page].data)
        return time.perf_counter() - begin_s

    def store(self) -> float:
        """When the first copy began; staging is a ring that the server empties in order."""
        assert self.arena.staging is not None
        size, freed = self.page_bytes, -1
        ring: NDArray[np.uint8] = np.frombuffer(
            self.arena.staging.view(0, STAGING_PAGES * size), np.uint8
        ).reshape(STAGING_PAGES, size)
        begin_s = time.perf_counter()
        for number, page in enumerate(self.order):
            while number - freed > STAGING_PAGES:
                freed = self.channel.receive_number()
            np.copyto(ring[number % STAGING_PAGES], self.source[page])
            self.channel.send_number(number)
        while freed < self.pages - 1:
            freed = self.channel.receive_number()
        return begin_s

    def watch(self, pages: list[tuple[int, int]]) -> float:
        """When the last page was seen to be published."""
        seen = 0
        while seen < self.pages:
            last = self.channel.receive_number()
            for container, index in pages[seen : last + 1]:
                assert self.arena.extents[container].generation(index) % 2 == 0
            seen = last + 1
        return time.perf_counter()


class Channel:
    """Orders and answers as JSON, and bare numbers during a store; both length-known."""

    def __init__(
        self, connection: socket.socket, process: subprocess.Popen[bytes] | None = None
    ) -> None:
        self.connection = connection
        self.process = process

    def send(self, message: object) -> None:
        body = json.dumps(message).encode()
        self.connection.sendall(NUMBER.pack(len(body)) + body)

    def receive(self) -> object:
        return json.loads(self._receive_exactly(self.receive_number()))

    def ask(self, order: dict[str, object]) -> float:
        self.send(order)
        return float(self.receive())

    def send_number(self, number: int) -> None:
        self.connection.sendall(NUMBER.pack(number))

    def receive_number(self) -> int:
        return int(NUMBER.unpack(self._receive_exactly(NUMBER.size))[0])

    def close(self) -> None:
        self.send({"do": "end"})
        self.connection.close()
        if self.process is not None and self.process.wait(timeout=30) != 0:
            raise SystemExit("a client process of the bench failed")

    def _receive_exactly(self, size: int) -> bytes:
        body = b""
        while len(body) < size:
            piece = self.connection.recv(size - len(body))
            if not piece:
                raise SystemExit("the other process of the bench has ended")
            body += piece
        return body


if __name__ == "__main__":
    main()
