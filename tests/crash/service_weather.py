"""Drills `cuts` and `crowd`: networks that break anywhere, and more connections than anybody needs.

cuts: pages cross a proxy that breaks the connection after any number of bytes, one way or the
other, closes or resets or just falls silent. A call ends within its deadline, a page is never
published in part, no wrong byte arrives, and nothing stays leased or reserved.

crowd: idle connections to both sockets; then a server with few descriptors and many who want in.
Who was there before goes on being served, and who was refused gets in later.
"""

from __future__ import annotations

import json
import os
import random
import resource
import socket
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from chaos_proxy import ChaosProxy, Rules
from known_pages import SPEC, content, load, prompt, save
from raw_client import RawClient
from server_process import ServerProcess

from kvstore.connect import connect
from kvstore.kvstore_pb2 import StatsRequest
from kvstore.wire import EXTENTS_NAME

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import numpy as np

    from kvstore.interface import SessionLike

OPEN_S, LOOKUP_S, STAGE_S, STORE_S = 0.5, 0.5, 1.0, 1.0
SLACK_S = 1.5  # of a machine with other work to do
KNOWN = prompt(1, 12)
NEW_PAGES = 8
CUT_BYTES_MAX = 14 * 4096
ENDLESS = float("inf")
LEAK_S_MAX = 30.0
FLAGS = ("--host-bytes=64MiB", "--disk-bytes=0")
FEW_DESCRIPTORS = 64
MANY = 200


def cuts(directory: Path, count: int, seed: int) -> tuple[list[str], str]:
    """Break `count` connections while pages are stored and loaded through them."""
    rng = random.Random(seed)
    done = Crossings()
    with ServerProcess(directory, *FLAGS).start() as server:
        with connect(server.address) as store, store.session(SPEC) as session:
            save(session, KNOWN)
        with ChaosProxy(server.socket, directory.with_name("proxy")) as proxy:
            for number in range(count):
                # Any byte, or a multiple of 4 KiB, of one direction or the other.
                at = rng.choice((rng.randrange(CUT_BYTES_MAX), rng.randrange(15) * 4096))
                up, down = rng.choice(((at, ENDLESS), (ENDLESS, at)))
                proxy.rules = Rules(up, down, half_open=rng.random() < 0.2)
                done.cross(proxy.address, prompt(10 + number, NEW_PAGES), f"round {number}, {at} B")
            broken = proxy.broken
        with connect(server.address) as store, store.session(SPEC) as session:
            for number in range(count):
                done.whole_or_absent(session, prompt(10 + number, NEW_PAGES))
        done.problems += leaks(server)
        if server.terminate():
            done.problems.append("it did not stop well")
    if not broken or not done.read or not done.stored:
        done.problems.append("nothing was tried")
    summary = (
        f"{count} rounds, {broken} connections cut, {done.read} pages read and {done.stored} "
        f"stored through them, slowest call {done.slowest_s:.2f} s, {len(done.problems)} faults"
    )
    return done.problems, summary


class Crossings:
    """What came of all rounds."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.read = self.stored = 0
        self.slowest_s = 0.0

    def cross(self, address: str, fresh: np.ndarray, name: str) -> None:
        """One client by way of the proxy: read what is known, store something new."""
        settings = {"lookup_deadline_s": LOOKUP_S, "stage_deadline_s": STAGE_S}
        store = connect(f"kvstore://{address}", shared_memory=False, open_wait_s=OPEN_S, **settings)
        session = store.session(SPEC)
        try:
            with self.timed(LOOKUP_S):
                hit = session.match(KNOWN)
            with self.timed(STAGE_S):
                pages = hit.stage()
            for page, view in enumerate(hit.views(0, pages)):
                if bytes(view) != content(KNOWN, page):
                    self.problems.append(f"{name}: wrong bytes")
            hit.release()
            self.read += pages
            with self.timed(STORE_S + 0.5):
                run = session.reserve(fresh, deadline_s=STORE_S)
            for offset, view in enumerate(run.views()):
                view[:] = content(fresh, run.start + offset)
            if run.count:
                with self.timed(STORE_S + 3.0):
                    self.stored += run.commit(deadline_s=STORE_S).pages
        except Exception as exc:
            self.problems.append(f"{name}: {exc!r}")
        finally:
            store.close()

    @contextmanager
    def timed(self, limit_s: float) -> Iterator[None]:
        """A call has to be over by then."""
        begun = time.monotonic()
        yield
        taken_s = time.monotonic() - begun
        self.slowest_s = max(self.slowest_s, taken_s)
        if taken_s > limit_s + SLACK_S:
            self.problems.append(f"a call of {limit_s:g} s took {taken_s:.2f} s")

    def whole_or_absent(self, session: SessionLike, tokens: np.ndarray) -> None:
        """What is visible of a prompt has the right bytes; it can be stored to its end."""
        try:
            load(session, tokens)
            save(session, tokens)
        except AssertionError:
            self.problems.append("a page is visible with bytes that nobody stored")
        if load(session, tokens) != NEW_PAGES:
            self.problems.append("a prompt can't be stored: something of it is still reserved")


def leaks(server: ServerProcess) -> list[str]:
    """What is held after all have gone."""
    deadline = time.monotonic() + LEAK_S_MAX
    while time.monotonic() < deadline:
        stats = stats_of(RawClient(f"unix:{server.socket}"))
        held = {name: stats["service"][name] for name in ("sessions", "matches", "reservations")}
        held["leases"] = stats["leases"]
        if not any(held.values()):
            return []
        time.sleep(0.1)
    return [f"left: {held}"]


def stats_of(client: RawClient) -> dict[str, Any]:
    """What the server counts; the client is closed."""
    document: dict[str, Any] = json.loads(client.call("Stats", StatsRequest()).json)
    client.channel.close()
    return document


def crowd(directory: Path, count: int, seed: int) -> tuple[list[str], str]:
    """Idle connections by the thousand, then a server with FEW descriptors and MANY who want in."""
    problems: list[str] = []
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
    tokens = prompt(1, 4)
    with ServerProcess(directory, *FLAGS).start() as server:
        client = RawClient(f"unix:{server.socket}")
        client.open()
        client.save(tokens)
        idle = [idle_at(server.socket) for _ in range(count)]
        idle += [idle_at(server.directory / EXTENTS_NAME, socket.SOCK_SEQPACKET) for _ in range(99)]
        if client.match(tokens).pages != 4:
            problems.append("idle connections kept a client from being served")
        late = RawClient(f"unix:{server.socket}")
        late.open()
        if late.match(tokens).pages != 4:
            problems.append("idle connections kept a new client out")
        for each in (client, late):
            each.close()
        for connection in idle:
            connection.close()
        problems += leaks(server)
    refused, spun_s = few_descriptors(directory.with_name("few"), problems)
    summary = (
        f"{count} idle connections; {MANY} clients for {FEW_DESCRIPTORS} more descriptors: "
        f"{refused} not served at once, {spun_s:.2f} s of CPU in 2 s, {len(problems)} faults"
    )
    return problems, summary


def few_descriptors(directory: Path, problems: list[str]) -> tuple[int, float]:
    """More connections than descriptors; how many had no place, and CPU seconds meanwhile."""
    tokens = prompt(2, 4)
    with ServerProcess(directory, "--host-bytes=64MiB", "--disk-bytes=256MiB").start() as server:
        client = RawClient(f"unix:{server.socket}")
        client.open()
        client.beat()
        client.save(tokens, durable=True)
        used = len(os.listdir(f"/proc/{server.pid}/fd"))
        soft = used + FEW_DESCRIPTORS
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (soft, soft))
        many = [idle_at(server.socket) for _ in range(MANY)]
        time.sleep(0.5)
        open_ones = len(os.listdir(f"/proc/{server.pid}/fd")) - used
        begun_s = cpu_s(server.pid)
        for number in range(20):
            if client.match(tokens).pages != 4:
                problems.append("who was there before is not served")
            client.beat()
            fresh = prompt(100 + number, 2)
            client.fill(fresh, reserved := client.reserve(fresh))
            if not client.commit(reserved.reservation, durable=True).durable:
                problems.append("the store had no descriptors left for the disk")
            time.sleep(0.1)
        spun_s = cpu_s(server.pid) - begun_s
        if spun_s > 1.5:
            problems.append(f"{spun_s:.1f} s of CPU in 2 s: it spins")
        if open_ones > soft - used:
            problems.append(f"{open_ones} descriptors where {soft - used} were left")
        for connection in many:
            connection.close()
        late = RawClient(f"unix:{server.socket}")
        late.open()
        if late.match(tokens).pages != 4:
            problems.append("a client that came later is not served")
        for each in (late, client):
            each.close()
        if server.terminate():
            problems.append("it did not stop well")
    return max(0, MANY - open_ones), spun_s


def idle_at(path: Path, kind: int = socket.SOCK_STREAM) -> socket.socket:
    """A connection on which nothing is said; it may be waiting to be accepted."""
    connection = socket.socket(socket.AF_UNIX, kind)
    connection.setblocking(False)
    for _ in range(1000):
        with suppress(BlockingIOError):
            connection.connect(str(path))
            break
        time.sleep(0.002)  # the queue of those who wait is full
    return connection


def cpu_s(pid: int) -> float:
    """CPU seconds of a process."""
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
