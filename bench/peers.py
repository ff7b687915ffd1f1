"""This store beside what users would pick instead, each in its own process and environment.

Pages: store and load of 256 KiB, 1, 2 and 4 MiB pages from and to a client's private memory, whole
runs of the same bytes: this store attached to its server by shared memory, and embedded; Mooncake
Store over TCP and by its shared-memory client; LMCache's server; Redis or Valkey by redis-py.
Look-up: prompts of 8, 32 and 128 Ki tokens that are known whole: this index given an array, a list,
and through a session; SGLang's radix trees; vLLM's hashing and look-up.

All take turns in each round, starting with another one each time, so that what the machine does
meanwhile meets all of them. Every byte that comes back is compared, outside the clock. Ratios are
of the same round: the peer's seconds over ours, above 1 where ours is faster.

    python bench/peers.py [--json] [--tiny] [--rounds 15] [--mib 64] [--seed 0] [--only NAME,...]
                          [--python NAME=PATH] [--write docs] [--readme README.md]
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paired import PairedRatio, machine, paired_ratio
from peers_environments import Missing, python_of
from peers_report import Result, json_text, table, write_pages
from peers_summary import summary
from readme_block import put_into

WORKER = Path(__file__).with_name("peers") / "worker.py"
# Name as worker.py has it, and the environment that it needs.
PAGE_PEERS = {
    "kvstore-attached": "kvstore",
    "kvstore-embedded": "kvstore",
    "mooncake-shm": "mooncake",
    "mooncake-shm-in-place": "mooncake",
    "mooncake-tcp": "mooncake",
    "lmcache-server": "lmcache",
    "redis-unix": "redis",
    "redis-tcp": "redis",
}
INDEX_PEERS = {
    "kvstore-array": "kvstore",
    "kvstore-list": "kvstore",
    "kvstore-session": "kvstore",
    "sglang-rust-tree": "sglang",
    "sglang-tree": "sglang",
    "vllm-xxhash": "vllm",
    "vllm-sha256": "vllm",
}
OURS_PAGES, OURS_INDEX = "kvstore-attached", "kvstore-array"
PAGE_BYTES = (256 << 10, 1 << 20, 2 << 20, 4 << 20)
PROMPT_TOKENS = (8 << 10, 32 << 10, 128 << 10)
TINY_PAGE_BYTES, TINY_TOKENS = (64 << 10, 256 << 10), (1 << 10,)
ANSWER_S_MAX = 120.0  # a start of vLLM or LMCache on a busy machine; a round takes seconds
BEGUN_S = time.monotonic()


class Failed(Exception):
    """A peer refused, died or gave back other bytes; the message says which."""


class Peer:
    """The process of one peer, and what it has answered."""

    def __init__(self, name: str, python: str, folder: Path, options: argparse.Namespace) -> None:
        folder.mkdir()
        self.name, self.log = name, folder / "worker.log"
        command = [python, str(WORKER), name, str(folder), str(options.seed)]
        command += [str(options.mib << 20), *map(str, options.page_bytes)]
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
                env={
                    **os.environ,
                    "HF_HUB_OFFLINE": "1",
                    "PYTHONHASHSEED": "0",
                    "LMCACHE_DISABLE_BANNER": "1",
                },
            )
        try:
            self.version = str(self._answer("ready"))
        except Failed:
            self.close()
            raise

    def ask(self, do: str, **order: object) -> Any:
        """Its answer to one order."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps({"do": do, **order}) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise Failed("it has ended") from None
        return self._answer("answer")

    def close(self) -> None:
        """Let it end what it has started, and itself."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # and servers of one that broke
        self.process.wait()

    def _answer(self, key: str) -> Any:
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], ANSWER_S_MAX)[0]:
            self.process.kill()
            raise Failed(f"it did not answer within {ANSWER_S_MAX:.0f} s:\n{self._tail()}")
        line = self.process.stdout.readline()
        answer = json.loads(line) if line else {"failed": f"it ended:\n{self._tail()}"}
        if "failed" in answer:
            raise Failed(answer["failed"])
        return answer[key]

    def _tail(self) -> str:
        return self.log.read_text(errors="replace")[-500:]


@dataclass
class Bench:
    """All peers that run here, those that do not with their reasons, and the seconds measured."""

    options: argparse.Namespace
    folder: Path
    skipped: dict[str, str] = field(default_factory=dict)
    peers: dict[str, Peer] = field(default_factory=dict)
    seconds: dict[tuple[str, str, int], dict[int, float]] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)

    def open(self, names: dict[str, str]) -> None:
        """Start each peer; one that can't is skipped, and said so at once."""
        for name, environment in names.items():
            if self.options.only and environment not in self.options.only:
                continue
            try:
                python = python_of(environment, self.options.python)
                self.peers[name] = Peer(name, python, self.folder / name, self.options)
                self.versions[environment] = self.peers[name].version
            except (Missing, Failed, OSError) as exc:
                if name in (OURS_PAGES, OURS_INDEX):
                    raise SystemExit(f"{name}: {exc}") from None
                self.skip(name, str(exc))

    def skip(self, name: str, reason: str) -> None:
        """Go on without a peer, loudly."""
        self.skipped[name] = " ".join(reason.split())[:300]
        say(f"SKIPPED {name}: {self.skipped[name]}")
        if peer := self.peers.pop(name, None):
            peer.close()

    def run(self) -> None:
        """Pages, then look-ups."""
        self.open(PAGE_PEERS)
        say(f"ready for pages: {', '.join(self.peers)}")
        for size in self.options.page_bytes:
            for number in range(-2, self.options.rounds):  # the first rounds warm up
                self.pages(number, size)
            say(f"pages of {size >> 10} KiB: done")
        self.close()
        self.open(INDEX_PEERS)
        say(f"ready for look-ups: {', '.join(self.peers)}")
        for tokens in self.options.tokens:
            for name, peer in list(self.peers.items()):
                self.asked(name, peer, "insert", tokens=tokens)
        for number in range(-1, self.options.rounds):
            for tokens in self.options.tokens:
                for name, peer in self.in_turn(number):
                    taken = self.asked(name, peer, "match", tokens=tokens)
                    self.keep(name, "match", tokens, number, taken)
        self.close()

    def pages(self, number: int, size: int) -> None:
        """One run of each peer, with pages of one size."""
        for name, peer in self.in_turn(number):
            run = (number + 3) * 10_000_000 + size
            taken = self.asked(name, peer, "pages", run=run, size=size)
            for what in ("store", "load"):
                self.keep(name, what, size, number, taken and taken[what])
            if name == OURS_PAGES and name in self.peers:
                copied = self.asked(name, peer, "memcpy", size=size)
                self.keep("memcpy", "store", size, number, copied)
                self.keep("memcpy", "load", size, number, copied)

    def in_turn(self, number: int) -> list[tuple[str, Peer]]:
        """All peers, another one first each time."""
        peers = list(self.peers.items())
        start = number % len(peers)
        return peers[start:] + peers[:start]

    def asked(self, name: str, peer: Peer, do: str, **order: object) -> Any:
        """The answer, or None from a peer that is skipped from now on."""
        try:
            return peer.ask(do, **order)
        except Failed as exc:
            if name in (OURS_PAGES, OURS_INDEX):
                raise SystemExit(f"{name}: {exc}\n{peer.log.read_text()[-2000:]}") from None
            self.skip(name, str(exc))
            return None

    def keep(self, name: str, what: str, size: int, number: int, taken: float | None) -> None:
        """Seconds of one round; the warm-up is not kept."""
        if taken is not None and number >= 0:
            self.seconds.setdefault((name, what, size), {})[number] = taken

    def close(self) -> None:
        """End all peers."""
        while self.peers:
            self.peers.popitem()[1].close()

    def results(self) -> list[Result]:
        """A row for each peer, work and size: seconds, and how many times ours they are."""
        rows = []
        for (name, what, size), rounds in self.seconds.items():
            ours = self.seconds[OURS_INDEX if what == "match" else OURS_PAGES, what, size]
            both = sorted(rounds.keys() & ours.keys())
            if not both or name in self.skipped:
                continue
            taken = [rounds[number] for number in both]
            over = paired_ratio(taken, [ours[number] for number in both])
            rows.append(Result(name, what, size, _medians(taken), over))
        return rows


def _medians(taken: list[float]) -> PairedRatio:
    return paired_ratio(taken, [1.0] * len(taken))


def say(text: str) -> None:
    """What it is at, and how long it took to get there."""
    print(f"[{time.monotonic() - BEGUN_S:4.0f} s] {text}", file=sys.stderr, flush=True)


def main() -> None:
    """Measure, print, and write where it was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    parser.add_argument("--tiny", action="store_true", help="small and short: a test of the bench")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--mib", type=int, default=64, help="MiB that a run stores and loads")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="environments, by commas; kvstore is always in")
    parser.add_argument("--python", action="append", default=[], metavar="NAME=PATH")
    parser.add_argument("--dir", type=Path, help="where servers keep sockets and logs")
    parser.add_argument("--write", type=Path, help="write peers.md and peers.svg into this folder")
    parser.add_argument("--readme", type=Path, help="a page that has the summary between its marks")
    options = parser.parse_args()
    options.page_bytes, options.tokens = PAGE_BYTES, PROMPT_TOKENS
    if options.tiny:
        options.rounds, options.mib = 2, 2
        options.page_bytes, options.tokens = TINY_PAGE_BYTES, TINY_TOKENS
    options.only = {"kvstore", *options.only.split(",")} if options.only else set()
    options.python = dict(each.split("=", 1) for each in options.python)
    before = os.getloadavg()
    with tempfile.TemporaryDirectory(prefix="peers-", dir=options.dir) as folder:
        bench = Bench(options, Path(folder))
        try:
            bench.run()
        finally:
            bench.close()
    load = f"{before[0]:.1f} to {os.getloadavg()[0]:.1f}"
    about = {"machine": machine(), "load": load, "rounds": options.rounds, "mib": options.mib}
    results = bench.results()
    if options.json:
        print(json_text(results, bench.skipped, bench.versions, options.seed, about))
    else:
        print(table(results, bench.skipped, bench.versions, about))
    where = f"`make bench-peers`, {machine()}, no GPU, {datetime.date.today().isoformat()}"
    said = summary(results, bench.skipped, f"{where}, load average {load}", sizes_text(options))
    if options.write:
        write_pages(options.write, said, results, bench.skipped, bench.versions, about)
    if options.readme:
        put_into(options.readme, "peers.md", said)


def sizes_text(options: argparse.Namespace) -> str:
    """Over what a range of ratios goes."""
    first, last = (
        f"{size >> 20} MiB" if size >> 20 else f"{size >> 10} KiB"
        for size in (options.page_bytes[0], options.page_bytes[-1])
    )
    tokens = [count >> 10 for count in options.tokens]
    return f"pages of {first} to {last}, prompts of {tokens[0]} to {tokens[-1]} Ki tokens"


if __name__ == "__main__":
    main()
