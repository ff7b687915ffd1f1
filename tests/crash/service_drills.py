"""Drills of the service with real processes: what stops, dies, crowds or attacks, and what is left.

    sigterm --count 200    SIGTERM under load: exit 0 within 10 s, no durable acknowledgement lost
    deaths --count 1000    clients that hold leases and reservations are killed with -9: after 30 s
                           nothing of them is left in the server
    herd --clients 64      all ask for one missing prefix at a barrier: each page is written once,
                           and after a restart read from disk once
    hostile                a client attacks the memory that it was given, and its neighbour
    frames --count 10000   mutated, random and poisoned messages at every door
    cuts --count 200       connections that break at any byte, while pages cross them
    crowd --count 1000     so many idle connections, then more than there are descriptors for

    python tests/crash/service_drills.py NAME [--count N] [--directory DIR] [--seed 0]

Each prints one line and exits with 1 when what it is for did not hold.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

SUPPORT = Path(__file__).resolve().parents[1] / "support"
if str(SUPPORT) not in sys.path:  # pytest has it there
    sys.path.append(str(SUPPORT))

import numpy as np  # noqa: E402
from known_pages import PAGE_TOKENS, SPEC, content, load, prompt, save  # noqa: E402
from raw_client import RawClient  # noqa: E402
from server_process import ServerProcess  # noqa: E402

from kvstore.connect import connect  # noqa: E402
from kvstore.kvstore_pb2 import EvictRequest  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.interface import ReservationLike, SessionLike, StoreLike

STOP_S_MAX = 10.0
LEAK_S_MAX = 30.0
CHAIN_PAGES = 3
WRITERS, READERS = 3, 2
LOOK_EACH = 10  # rounds; the last look is at all
OLD_CHAINS_LOOKED_AT = 50
CLIENTS_A_PROCESS = 50
PROCESSES_AT_ONCE = 2
HERD_PAGES = 24
COUNT_DEFAULTS = {"sigterm": 200, "deaths": 1000, "herd": 64, "hostile": 50}
COUNT_DEFAULTS |= {"frames": 10_000, "cuts": 200, "crowd": 1000}


def main() -> None:
    """Run one drill, say what came of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=[*COUNT_DEFAULTS, "dying-clients"])
    parser.add_argument("--count", "--clients", type=int, help="rounds, deaths or clients")
    parser.add_argument("--directory", type=Path, help="where the store is made")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    options = parser.parse_args()
    logging.getLogger("kvstore").addHandler(logging.NullHandler())  # lost servers are the plan
    if options.name == "dying-clients":
        be_clients_until_killed(options.address, options.count, options.seed)
        return
    count = options.count or COUNT_DEFAULTS[options.name]
    with tempfile.TemporaryDirectory(prefix="drill-", dir=options.directory) as folder:
        problems, summary = drill(options.name)(Path(folder) / "store", count, options.seed)
    said = "; ".join(problems) or "ok"
    print(f"{options.name}: {summary}: {said}", flush=True)
    # Threads of clients may still be waiting for servers that are gone.
    os._exit(bool(problems))


def drill(name: str) -> Callable[[Path, int, int], tuple[list[str], str]]:
    """What runs it: gets a directory, a count and a seed; says what was wrong, and a summary."""
    if name == "hostile":
        from service_hostile import hostile

        return hostile
    if name == "frames":
        from service_frames import frames

        return frames
    if name in ("cuts", "crowd"):
        import service_weather

        return {"cuts": service_weather.cuts, "crowd": service_weather.crowd}[name]
    return {"sigterm": sigterm, "deaths": deaths, "herd": herd}[name]


class Load:
    """Clients that store durably and read, across all restarts of their server."""

    def __init__(self, address: str) -> None:
        self.acknowledged: list[int] = []  # seeds of prompts whose durable commit was acknowledged
        self.errors: list[str] = []
        self.loads = 0
        self._lock = threading.Lock()
        self._next = 0
        self._stop = threading.Event()
        self._stores = [connect(address) for _ in range(WRITERS + READERS)]
        work = [self._write] * WRITERS + [self._read] * READERS
        self._threads = [
            threading.Thread(target=self._run, args=(each, store.session(SPEC)))
            for each, store in zip(work, self._stores, strict=True)
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(30.0)
        for store in self._stores:
            store.close()

    def _run(self, work: Callable[[SessionLike], None], session: SessionLike) -> None:
        while not self._stop.is_set():
            try:
                work(session)
            except Exception as exc:
                self.errors.append(repr(exc))
            self._stop.wait(0.002)

    def _write(self, session: SessionLike) -> None:
        with self._lock:
            seed = self._next = self._next + 1
        tokens, done = tokens_of(seed), 0
        while done < CHAIN_PAGES:
            with session.reserve(tokens) as run:
                if not run.count:
                    return
                fill(run, tokens)
                made = run.commit(durable=True)
                if not made.durable:
                    return
                done = run.start + made.pages
        self.acknowledged.append(seed)

    def _read(self, session: SessionLike) -> None:
        if self.acknowledged:
            load(session, tokens_of(random.choice(self.acknowledged)))
            self.loads += 1


def tokens_of(seed: int) -> np.ndarray:
    """The prompt that a writer of Load made of this number."""
    size = CHAIN_PAGES * PAGE_TOKENS
    return np.arange(size, dtype=np.int32) + size * seed


def fill(run: ReservationLike, tokens: np.ndarray) -> None:
    """Write a reservation's pages."""
    for offset, view in enumerate(run.views()):
        view[:] = content(tokens, run.start + offset)


def sigterm(directory: Path, count: int, seed: int) -> tuple[list[str], str]:
    """Stop the server `count` times while clients work, and look up all it had promised."""
    rng = random.Random(seed)
    server = ServerProcess(directory, "--host-bytes=64MiB", "--disk-bytes=4GiB")
    problems: list[str] = []
    slowest_s, begun = 0.0, Load(server.address)
    with server:
        for number in range(count):
            server.start()
            at_start = len(begun.acknowledged)
            time.sleep(rng.uniform(0.0, 0.1) if rng.random() < 0.1 else rng.uniform(0.3, 0.8))
            asked = time.monotonic()
            code = server.terminate()
            slowest_s = max(slowest_s, time.monotonic() - asked)
            if code:
                problems.append(f"round {number}: exit code {code}")
            if number % LOOK_EACH == LOOK_EACH - 1:
                latest, older = begun.acknowledged[at_start:], begun.acknowledged[:at_start]
                some = rng.sample(older, min(OLD_CHAINS_LOOKED_AT, len(older)))
                problems += lost_ones(server, latest + some)
        begun.stop()
        problems += lost_ones(server, begun.acknowledged)
    if slowest_s > STOP_S_MAX:
        problems.append(f"a stop took {slowest_s:.1f} s")
    if not begun.acknowledged or not begun.loads:
        problems.append("there was no load")
    problems += begun.errors[:5]
    summary = (
        f"{count} SIGTERMs under load, slowest exit {slowest_s:.2f} s, "
        f"{len(begun.acknowledged)} durable chains of {CHAIN_PAGES} pages, {begun.loads} loads, "
        f"{sum('lost' in each for each in problems)} lost"
    )
    return problems, summary


def lost_ones(server: ServerProcess, promised: list[int]) -> list[str]:
    """Start the server, read those prompts back, stop it; a line for each that is not whole."""
    server.start()
    lost = []
    with connect(server.address, lookup_deadline_s=5.0) as store, store.session(SPEC) as session:
        for seed in promised:
            pages = load(session, tokens_of(seed))
            if pages != CHAIN_PAGES:
                lost.append(f"lost: chain {seed} has {pages} pages")
        if lost and counters(store)["disk_evictions"]:
            lost.append("the disk is too small for this drill")
    code = server.terminate()
    return lost + ([f"exit code {code} after reading"] if code else [])


def deaths(directory: Path, count: int, seed: int) -> tuple[list[str], str]:
    """Kill clients that hold things; then nothing may be left of them."""
    problems: list[str] = []
    flags = ("--host-bytes=256MiB", "--disk-bytes=0", "--sessions-max=512")
    with ServerProcess(directory, *flags).start() as server:
        with connect(server.address) as store, store.session(SPEC) as session:
            for number in range(64):
                save(session, prompt(number, 4))
        descriptors = steady_descriptors(server)
        held_most = kill_clients(server, count, seed, problems)
        gone_s = settle(server, LEAK_S_MAX)
        after = service(server)
        for name in ("sessions", "matches", "reservations", "staging_bytes"):
            if after[name]:
                problems.append(f"{name}: {after[name]} left")
        problems += left_bytes(server)
        more = steady_descriptors(server) - descriptors
        if more > 0:
            problems.append(f"{more} descriptors left")
        if not held_most:
            problems.append("nothing was reserved")
        code = server.terminate()
        if code:
            problems.append(f"exit code {code}")
    summary = (
        f"{count} clients killed with -9 ({held_most} reservations at once), "
        f"all given back after {gone_s:.1f} s, {len(problems)} leaks"
    )
    return problems, summary


def kill_clients(server: ServerProcess, count: int, seed: int, problems: list[str]) -> int:
    """Start and kill so many clients, processes of many; the most reservations they had at once."""
    held_most, begun = 0, 0
    running: list[subprocess.Popen[bytes]] = []
    while begun < count or running:
        while begun < count and len(running) < PROCESSES_AT_ONCE:
            clients = min(CLIENTS_A_PROCESS, count - begun)
            running.append(start_clients(server.address, clients, seed + begun))
            begun += clients
        process = running.pop(0)
        assert process.stdout is not None
        if process.stdout.readline() != b"holding\n":
            problems.append("clients could not get hold of anything")
        held_most = max(held_most, service(server)["reservations"])
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
    return held_most


def steady_descriptors(server: ServerProcess) -> int:
    """How many the server has, when that has not changed for a second."""
    counted, since = -1, time.monotonic()
    while time.monotonic() - since < 1.0:
        time.sleep(0.05)
        now = len(os.listdir(f"/proc/{server.pid}/fd"))
        if now != counted:
            counted, since = now, time.monotonic()
    return counted


def start_clients(address: str, clients: int, seed: int) -> subprocess.Popen[bytes]:
    """A process of so many clients; it says when all of them hold something."""
    command = [sys.executable, __file__, "dying-clients", "--count", str(clients)]
    command += ["--address", address, "--seed", str(seed)]
    return subprocess.Popen(command, stdout=subprocess.PIPE)


def be_clients_until_killed(address: str, count: int, seed: int) -> None:
    """Hold a lease, a filled and an empty reservation in each of `count` sessions."""
    clients = []
    for number in range(count):
        client = RawClient(address.removeprefix("kvstore://"))
        client.open()
        client.beat()
        assert client.match(prompt(number % 64, 4)).match
        fresh = prompt(1000 + seed % 500 + number, 2)
        reserved = client.reserve(fresh, 0.0)
        if reserved.staging_offsets:  # there is none left for late comers: they would send pages
            client.fill(fresh, reserved)
        clients.append(client)
    print("holding", flush=True)
    stop = threading.Event()
    while not stop.wait(1.0):
        for client in clients:
            client.beat()


def service(server: ServerProcess) -> dict[str, int]:
    """Who is connected and what they hold."""
    with connect(server.address) as store:
        counted: dict[str, int] = store.stats().to_dict()["service"]
        return counted


def settle(server: ServerProcess, within_s: float) -> float:
    """Wait until no session is left; after how many seconds that was."""
    begun = time.monotonic()
    while time.monotonic() - begun < within_s:
        now = service(server)
        if not now["sessions"] and not now["staging_bytes"]:
            break
        time.sleep(0.05)
    return time.monotonic() - begun


def left_bytes(server: ServerProcess) -> list[str]:
    """Remove every page; bytes that are used then are nobody's."""
    client = RawClient(server.address.removeprefix("kvstore://"))
    removed = client.call("Evict", EvictRequest(everything=True, include_pinned=True))
    client.channel.close()
    problems = [f"{removed.kept_leased} pages are leased"] if removed.kept_leased else []
    with connect(server.address) as store:
        stats = store.stats().to_dict()
    problems += [f"{stats['leases']} leases left"] if stats["leases"] else []
    for tier in stats["tiers"]:
        if tier["used_bytes"]:
            problems.append(f"{tier['used_bytes']} bytes of {tier['name']} left")
    return problems


def counters(store: StoreLike) -> dict[str, int]:
    """What the server counts."""
    counted: dict[str, int] = store.stats().to_dict()["counters"]
    return counted


def herd(directory: Path, count: int, seed: int) -> tuple[list[str], str]:
    """Clients store, then after a restart load, one and the same prompt, all at once."""
    tokens = prompt(seed, HERD_PAGES)
    server = ServerProcess(directory, "--host-bytes=256MiB", "--disk-bytes=512MiB")
    problems: list[str] = []
    with server:
        server.start()
        saved, stats = at_once(server, count, lambda session: save(session, tokens, durable=True))
        written = stats["pages_committed"], stats["disk_pages_written"]
        if sum(saved) != HERD_PAGES or written != (HERD_PAGES, HERD_PAGES):
            problems.append(f"{sum(saved)} pages saved; committed, written to disk: {written}")
        server.terminate()
        server.start()
        loaded, stats = at_once(server, count, lambda session: load(session, tokens))
        if loaded != [HERD_PAGES] * count:
            problems.append(f"loaded: {sorted(set(loaded))} of {HERD_PAGES} pages")
        if stats["pages_staged"] != HERD_PAGES:
            problems.append(f"{stats['pages_staged']} pages staged")
        server.terminate()
    summary = (
        f"{count} clients, {HERD_PAGES} pages: {written[1] / HERD_PAGES:g} writes and "
        f"{stats['pages_staged'] / HERD_PAGES:g} disk reads a page, "
        f"{stats['disk_reads']} read calls"
    )
    return problems, summary


def at_once(
    server: ServerProcess, clients: int, work: Callable[[Any], int]
) -> tuple[list[int], dict[str, int]]:
    """What each client's work came to, and what the server counted."""
    stores = [connect(server.address, lookup_deadline_s=10.0) for _ in range(clients)]
    sessions = [store.session(SPEC) for store in stores]
    barrier = threading.Barrier(clients)

    def run(session: SessionLike) -> int:
        barrier.wait()
        return work(session)

    with ThreadPoolExecutor(clients) as pool:
        results = list(pool.map(run, sessions))
    counted = counters(stores[0])
    for store in stores:
        store.close()
    return results, counted


if __name__ == "__main__":
    main()
