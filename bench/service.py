"""The service over its Unix socket: look-ups, busy look-ups, pages by shared memory and by stream.

match_rpc_ms_p50         match of 8 Ki tokens, one client; budget <= 0.7
match_embedded_ms_p50    the same in the store's own process; budget <= 0.1
match_rpc_128k_ms_p50    match of 128 Ki tokens over the socket; budget <= 2
match_busy_ms_p50, _p99  the first during a rebuild of 1 M pages, and during stores at full speed;
                         the worse of the two counts; budget <= 2, <= 20
host_load_ratio          a client attached to the server matches 2 MiB pages and copies them out of
                         the arena, over one-thread memcpy of the same pages in the same order
                         between private buffers; budget >= 0.8
host_store_ratio         it reserves, fills staging, commits, until a second client's match has all,
                         over the same memcpy; budget >= 0.4
stream_ratio             a client without shared memory fetches pages, over a plain Python socket
                         moving the same bytes into the same kind of buffer; budget >= 0.4

Times are medians of rounds with their 90 % interval; ratios are of interleaved pairs.
With --load there is instead a steady load of so many clients; see service_load.py.

    python bench/service.py [--json] [--tiny] [--rounds 15] [--pages 128] [--rebuild-pages 1000000]
                            [--dir DIR] [--seed 0] [--load 64 --seconds 60 --pause 0.25]
"""

from __future__ import annotations

import argparse
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import restart
from paired import PairedRatio, json_line, machine, paired_ratio
from service_load import PAUSE_S, steady_load
from serving import Serving

from kvstore import CacheSpec, Store
from kvstore.client import RemoteStore
from kvstore.connect import connect
from kvstore.kvstore_pb2 import EvictRequest

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.interface import SessionLike

PAGE_TOKENS = 16
SMALL = CacheSpec.opaque("service", page_tokens=PAGE_TOKENS, page_bytes=4096)
PROMPT_TOKENS, LONG_TOKENS = 8 << 10, 128 << 10
BIG_PAGE_BYTES = 2 << 20
TINY_PAGE_BYTES = 64 << 10
PIECE_BYTES = 1 << 20
STREAM_PAGES = 32
MATCHES_A_ROUND, LONG_MATCHES_A_ROUND = 200, 40
BUSY_S = 20.0
BUSY_PAUSE_S = 0.002  # an engine asks now and then
EVICT_S = 30.0
# Budget, and whether more is better.
BUDGETS = {
    "match_rpc_ms_p50": (0.7, False),
    "match_embedded_ms_p50": (0.1, False),
    "match_rpc_128k_ms_p50": (2.0, False),
    "match_busy_ms_p50": (2.0, False),
    "match_busy_ms_p99": (20.0, False),
    "host_load_ratio": (0.8, True),
    "host_store_ratio": (0.4, True),
    "stream_ratio": (0.4, True),
}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    parser.add_argument("--tiny", action="store_true", help="small and short: a test of the bench")
    parser.add_argument("--rounds", type=int, default=15, help="rounds and pairs of each row")
    parser.add_argument("--pages", type=int, default=128, help="2 MiB pages a load and a store")
    parser.add_argument("--rebuild-pages", type=int, default=1_000_000)
    parser.add_argument("--dir", type=Path, default=Path.cwd(), help="where the stores are made")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--load", type=int, metavar="CLIENTS", help="steady load instead")
    parser.add_argument("--seconds", type=float, default=60.0, help="of the steady load")
    parser.add_argument("--pause", type=float, default=PAUSE_S, help="of a client of the load")
    options = parser.parse_args()
    options.page_bytes, options.busy_s = BIG_PAGE_BYTES, BUSY_S
    if options.tiny:
        options.rounds, options.pages, options.rebuild_pages = 3, 8, 4000
        options.page_bytes, options.busy_s = TINY_PAGE_BYTES, 1.0
    with tempfile.TemporaryDirectory(prefix="service-", dir=options.dir) as folder:
        if options.load:
            raise SystemExit(steady_load(Path(folder), options))
        results, more = measure(Path(folder), options)
    if options.json:
        print(json_line(results, options.seed, **more))
        return
    print(f"{machine()}; seed {options.seed}")
    for key, ratio in results.items():
        budget, at_least = BUDGETS[key]
        print(
            f"{key:22} {ratio.median:7.3f}  90 % [{ratio.low:.3f}, {ratio.high:.3f}], "
            f"budget {'>=' if at_least else '<='} {budget}: "
            + ratio.verdict(budget, at_least=at_least)
        )
    print(", ".join(f"{key} {value}" for key, value in more.items()))


def measure(
    folder: Path, options: argparse.Namespace
) -> tuple[dict[str, PairedRatio], dict[str, object]]:
    """All rows, and what stands beside them."""
    results = matches(folder, options)
    results |= Bulk(folder, options).run()
    busy, more = busy_matches(folder, options)
    results |= busy
    return {key: results[key] for key in BUDGETS}, more


def prompt(tokens: int, seed: int) -> np.ndarray:
    """Random token ids."""
    return np.random.default_rng(seed).integers(0, 50_000, tokens, dtype=np.int32)


def save(session: SessionLike, tokens: np.ndarray, payload: np.ndarray | bytes) -> None:
    """Store what is missing of a prompt, each page with the same payload."""
    while True:
        with session.reserve(tokens, deadline_s=30.0) as run:
            if not run.count:
                assert run.reason == "present", run.reason
                return
            for view in run.views():
                view[:] = payload
            run.commit()


def match_ms(session: SessionLike, tokens: np.ndarray, count: int) -> list[float]:
    """Milliseconds of each of `count` look-ups that hit whole."""
    taken = []
    for _ in range(count):
        begun = time.perf_counter()
        hit = session.match(tokens)
        taken.append((time.perf_counter() - begun) * 1e3)
        assert hit.tokens == len(tokens), f"{hit.tokens} of {len(tokens)} tokens"
        hit.release()
    return taken


def quantile(values: list[float], q: float) -> float:
    """Of a sample; the interval stands elsewhere."""
    return float(np.quantile(values, q))


def medians(rounds: list[float]) -> PairedRatio:
    """The median of rounds with its interval, by the statistics of pairs."""
    return paired_ratio(rounds, [1.0] * len(rounds))


def matches(folder: Path, options: argparse.Namespace) -> dict[str, PairedRatio]:
    """One client, nothing else going on: over the socket and embedded, in turns."""
    short, long = prompt(PROMPT_TOKENS, options.seed), prompt(LONG_TOKENS, options.seed + 1)
    flags = ("--host-bytes=512MiB", "--disk-bytes=0")
    rounds: dict[str, list[float]] = {}
    with (
        Serving(folder / "matches", *flags) as serving,
        connect(serving.address, lookup_deadline_s=5.0) as remote,
        Store.open(None, host_bytes="256MiB") as store,
    ):
        there, here = remote.session(SMALL), store.session(SMALL)
        for session, tokens in ((there, short), (there, long), (here, short)):
            save(session, tokens, bytes(SMALL.page_bytes))
        rows: tuple[tuple[str, SessionLike, np.ndarray, int], ...] = (
            ("match_rpc_ms_p50", there, short, MATCHES_A_ROUND),
            ("match_embedded_ms_p50", here, short, MATCHES_A_ROUND),
            ("match_rpc_128k_ms_p50", there, long, LONG_MATCHES_A_ROUND),
        )
        for number in range(-1, options.rounds):  # the first round warms up
            for key, session, tokens, count in rows:
                taken = match_ms(session, tokens, count)
                if number >= 0:
                    rounds.setdefault(key, []).append(quantile(taken, 0.5))
    return {key: medians(values) for key, values in rounds.items()}


class Bulk:
    """This process is the client: private buffers, and sessions with and without shared memory."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self.folder, self.options = folder, options
        self.pages, size = options.pages, options.page_bytes
        self.spec = CacheSpec.opaque("bulk", page_tokens=PAGE_TOKENS, page_bytes=size)
        rng = np.random.default_rng(options.seed)
        self.order = rng.permutation(self.pages).tolist()
        self.source = rng.integers(0, 256, (self.pages, size), np.uint8)
        self.target = np.ones((self.pages, size), np.uint8)
        self.tokens = prompt(self.pages * PAGE_TOKENS, options.seed)
        self.stored = 0

    def run(self) -> dict[str, PairedRatio]:
        """The three ratios."""
        # A session may lease a quarter of the arena; half as much again is for staging.
        need = self.pages * self.options.page_bytes
        flags = (f"--host-bytes={8 * need + (256 << 20)}", "--disk-bytes=0")
        with Serving(self.folder / "bulk", *flags) as serving:
            self.store = connect(serving.address, lookup_deadline_s=5.0)
            assert isinstance(self.store, RemoteStore)
            self.session = self.store.session(self.spec)
            self.other = connect(serving.address, lookup_deadline_s=5.0)
            self.second = self.other.session(self.spec)
            self.plain = connect(serving.address, lookup_deadline_s=5.0, shared_memory=False)
            self.streaming = self.plain.session(self.spec)
            serving.wait_said()
            self.fill(self.tokens, range(self.pages))
            rows: dict[str, tuple[Callable[[], float], Callable[[], float]]] = {
                "host_load_ratio": (self.memcpy_s, self.load_s),
                "host_store_ratio": (self.memcpy_s, self.store_s),
            }
            results = {key: self.pairs(*row) for key, row in rows.items()}
            with PlainSocket(min(STREAM_PAGES, self.pages) * self.options.page_bytes) as peer:
                results["stream_ratio"] = self.pairs(peer.move_s, self.stream_s)
            for store in (self.store, self.other, self.plain):
                store.close()
        return results

    def pairs(self, limit_s: Callable[[], float], measured_s: Callable[[], float]) -> PairedRatio:
        """Runs side by side, in turns; the first pair warms up."""
        limits, measured = [], []
        for pair in range(-1, self.options.rounds):
            if pair % 2:
                ours, limit = measured_s(), limit_s()
            else:
                limit, ours = limit_s(), measured_s()
            if pair >= 0:
                limits.append(limit)
                measured.append(ours)
        return paired_ratio(limits, measured)

    def memcpy_s(self) -> float:
        """The limit: the same pages in the same order between private buffers."""
        begun = time.perf_counter()
        for page in self.order:
            np.copyto(self.target[page], self.source[page])
        return time.perf_counter() - begun

    def load_s(self) -> float:
        """From the look-up to the last byte in private memory, all of them known to be right."""
        begun = time.perf_counter()
        with self.session.match(self.tokens) as hit:
            assert hit.stage() == self.pages
            views = hit.views()
            for page in self.order:
                np.copyto(self.target[page], np.frombuffer(views[page], np.uint8))
            assert hit.valid()
        taken = time.perf_counter() - begun
        del views
        last = self.order[-1]
        assert (self.target[last] == self.source[last]).all()
        return taken

    def store_s(self) -> float:
        """From the first reservation until a second client's look-up has all of it."""
        self.stored += 1
        tokens = prompt(self.pages * PAGE_TOKENS, self.options.seed + 1000 + self.stored)
        begun = time.perf_counter()
        self.fill(tokens, self.order)
        with self.second.match(tokens) as hit:
            assert hit.pages == self.pages
        taken = time.perf_counter() - begun
        request = EvictRequest(tokens=tokens[:PAGE_TOKENS].tobytes(), has_prefix=True)
        gone, begun = 0, time.perf_counter()
        while gone < self.pages:  # the lease of the last look-up ends a moment later
            assert time.perf_counter() - begun < EVICT_S, f"only {gone} pages could be removed"
            gone += self.store._link.channel.call("Evict", request, EVICT_S).pages
        return taken

    def fill(self, tokens: np.ndarray, order: Any) -> None:
        """Store a prompt; page i has the bytes of source page order[i]."""
        stored = 0
        while stored < self.pages:
            with self.session.reserve(tokens, deadline_s=10.0) as run:
                assert run.count, run.reason
                for view, page in zip(run.views(), order[stored:], strict=False):
                    np.copyto(np.frombuffer(view, np.uint8), self.source[page])
                stored += run.commit().pages

    def stream_s(self) -> float:
        """From the look-up to the last byte in private memory, by ReadPages."""
        pages = min(STREAM_PAGES, self.pages)
        begun = time.perf_counter()
        with self.streaming.match(self.tokens[: pages * PAGE_TOKENS]) as hit:
            assert hit.stage(30.0) == pages
            views = hit.views()
        taken = time.perf_counter() - begun
        assert views[-1] == self.source[pages - 1].data
        return taken


class PlainSocket:
    """The peer of a stream: a process that sends bytes when asked, over a Unix socket."""

    CODE = """
import socket, sys
connection, size, piece = socket.socket(fileno=int(sys.argv[1])), *map(int, sys.argv[2:])
source = memoryview(bytearray(b"x" * size))
while connection.recv(1):
    for start in range(0, size, piece):
        connection.sendall(source[start : start + piece])
"""

    def __init__(self, size: int) -> None:
        self.size = size
        self.ours, theirs = socket.socketpair()
        command = [sys.executable, "-c", self.CODE, str(theirs.fileno()), str(size)]
        command.append(str(PIECE_BYTES))
        self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        theirs.close()

    def move_s(self) -> float:
        """Seconds to get all bytes into a fresh buffer, as the client of a store does."""
        begun = time.perf_counter()
        target = np.empty(self.size, np.uint8).data
        self.ours.sendall(b"!")
        got = 0
        while got < self.size:
            got += self.ours.recv_into(target[got:])
        return time.perf_counter() - begun

    def __enter__(self) -> PlainSocket:
        return self

    def __exit__(self, *exc: object) -> None:
        self.ours.close()
        self.process.wait(30)


def busy_matches(
    folder: Path, options: argparse.Namespace
) -> tuple[dict[str, PairedRatio], dict[str, object]]:
    """Look-ups while the server rebuilds its index, then while another process stores."""
    quiet = {"pages": options.rebuild_pages, "seed": options.seed, "json": True}
    restart.build(folder, argparse.Namespace(**quiet))
    flags = ("--host-bytes=1GiB",)
    tokens = prompt(PROMPT_TOKENS, options.seed)
    with Serving(folder / "store", *flags) as serving, connect(serving.address) as remote:
        session = remote.session(SMALL)
        serving.wait_said()
        save(session, tokens, bytes(SMALL.page_bytes))
        assert session.flush(30.0)
    with (
        Serving(folder / "store", *flags) as serving,
        connect(serving.address, lookup_deadline_s=5.0) as remote,
    ):
        session = remote.session(SMALL)
        rebuild = taken_until(session, tokens, lambda: serving.is_warm)
        command = [sys.executable, __file__.replace("service.py", "service_load.py"), "--store"]
        command += [serving.address, "--page-bytes", str(options.page_bytes)]
        storing = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert storing.stdout is not None
        assert storing.stdout.readline() == b"storing\n"
        until = threading.Event()
        threading.Timer(options.busy_s, until.set).start()
        stores = taken_until(session, tokens, until.is_set)
        assert storing.poll() is None, "the storing client failed"
        storing.terminate()
        storing.communicate()
    results = {}
    for name, q in (("p50", 0.5), ("p99", 0.99)):
        worse = max((rebuild, stores), key=lambda each, q=q: quantile(each, q))
        groups = np.array_split(np.array(worse), max(1, min(options.rounds, len(worse) // 100)))
        results[f"match_busy_ms_{name}"] = medians([quantile(g.tolist(), q) for g in groups])
    more: dict[str, object] = {}
    for name, taken in (("rebuild", rebuild), ("stores", stores)):
        more[f"{name}_matches"] = len(taken)
        more[f"{name}_ms"] = [round(quantile(taken, q), 3) for q in (0.5, 0.99, 1.0)]
    return results, more


def taken_until(
    session: SessionLike, tokens: np.ndarray, is_over: Callable[[], bool]
) -> list[float]:
    """Milliseconds of look-ups until something is over; hits or misses, as they are then."""
    taken = []
    while not taken or not is_over():
        begun = time.perf_counter()
        hit = session.match(tokens)
        taken.append((time.perf_counter() - begun) * 1e3)
        hit.release()
        time.sleep(BUSY_PAUSE_S)
    return taken


if __name__ == "__main__":
    main()
