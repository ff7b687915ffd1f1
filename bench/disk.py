"""The SSD tier against the disk's own speed: read_many and write_many over fio; cost of checks.

    disk_write_ratio   write_many with all syncs and commits / fio write
    disk_read_ratio    read_many into the arena, everything verified / fio read
    checksum_share     1 - rate with / rate without the payload's checksum

2 MiB pages, O_DIRECT, 4 GiB a run, same block size and depth for both. Runs are interleaved and
change places, so that a disk whose speed drifts is as slow for one as for the other; what is
reported is the median of the paired ratios with its 90 % interval. Without fio a plain loop of
threads with pread and pwrite takes its place, and the result says so.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from paired import PairedRatio, json_line, machine, paired_ratio

from kvstore.tiers.checksum import checksum
from kvstore.tiers.disk_tier import DiskTier
from kvstore.tiers.file_layer import aligned_buffer
from kvstore.tiers.host_tier import HostTier
from kvstore.tiers.tier import PageRecord, ReadStatus

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.tiers.cipher import Cipher

MIB = 1 << 20
BUDGETS = {"disk_read_ratio": 0.9, "disk_write_ratio": 0.9, "checksum_share": 0.05}
# Every other pair runs in this order: ours first, writes still before reads.
TURNED = (1, 0, 4, 3, 2)


@dataclass(frozen=True)
class Load:
    """How much is moved, in what pieces, how many at once."""

    page_bytes: int
    pages: int
    depth: int
    call_pages: int  # pages of one read_many call

    @property
    def total_bytes(self) -> int:
        return self.page_bytes * self.pages


class Peer:
    """The disk itself: fio, or threads with plain system calls where there is no fio."""

    def __init__(self, path: Path, load: Load) -> None:
        self.path, self.load = path, load
        self.fio = shutil.which("fio")
        self.name = "fio, libaio" if self.fio else "NO FIO: pread/pwrite threads"

    def seconds(self, kind: str) -> float:
        """How long one run of `read` or `write` takes."""
        if self.fio is None:
            return self._seconds_of_threads(kind)
        command = [
            self.fio,
            "--name=peer",
            f"--filename={self.path}",
            f"--size={self.load.total_bytes}",
            f"--rw={kind}",
            f"--bs={self.load.page_bytes}",
            "--ioengine=libaio",
            f"--iodepth={self.load.depth}",
            "--direct=1",
            "--output-format=json",
        ]
        done = subprocess.run(command, capture_output=True, check=True, text=True)
        answer = json.loads(done.stdout[done.stdout.index("{") :])
        return self.load.total_bytes / float(answer["jobs"][0][kind]["bw_bytes"])

    def _seconds_of_threads(self, kind: str) -> float:
        load = self.load
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        counter = iter(range(load.pages))
        lock = threading.Lock()

        def work() -> None:
            buffer = aligned_buffer(load.page_bytes)
            while True:
                with lock:
                    page = next(counter, None)
                if page is None:
                    return
                if kind == "write":
                    os.pwritev(descriptor, [buffer], page * load.page_bytes)
                else:
                    os.preadv(descriptor, [buffer], page * load.page_bytes)

        threads = [threading.Thread(target=work) for _ in range(load.depth)]
        begin = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        elapsed = time.perf_counter() - begin
        os.close(descriptor)
        return elapsed


class Ours:
    """A disk tier whose pages come from and go to a real arena."""

    def __init__(
        self, directory: Path, load: Load, seed: int, cipher: Cipher | None = None
    ) -> None:
        self.load = load
        capacity = load.total_bytes * 9 // 8 + 64 * MIB
        self.tier = DiskTier.open(
            [directory], capacity, io_threads=load.depth, load=True, cipher=cipher
        )
        arena_bytes = (load.call_pages + 8) * (load.page_bytes + 8192) * 5 // 4
        self.arena = HostTier(max(arena_bytes, 64 * MIB), boot_epoch=1)
        slots = self.arena.reserve("bench", load.page_bytes, load.call_pages)
        assert len(slots) == load.call_pages, "the arena is too small"
        self.buffers = [self.arena.view(slot, load.page_bytes) for slot in slots]
        rng = np.random.default_rng(seed)
        self.payloads = [self._payload(rng) for _ in range(load.call_pages)]
        self.checksums = [checksum(payload) for payload in self.payloads]
        self.sequence = 0
        self.slots: list[int] = []
        self.pages: list[PageRecord] = []

    def _payload(self, rng: np.random.Generator) -> memoryview:
        payload = aligned_buffer(self.load.page_bytes)
        payload[:] = rng.bytes(self.load.page_bytes)
        return payload

    def write(self) -> float:
        """Seconds for writing all pages into slots that were just freed."""
        load = self.load
        for place, payload in zip(self.buffers, self.payloads, strict=True):
            place[:] = payload
        begin = time.perf_counter()
        if self.slots:
            self.tier.free_many(self.slots)
        self.slots = self.tier.reserve("bench", load.page_bytes, load.pages)
        assert len(self.slots) == load.pages, self.tier.last_refusal
        self.pages = [self._page(number) for number in range(load.pages)]
        sources = [self.buffers[number % load.call_pages] for number in range(load.pages)]
        done = self.tier.write_many(self.slots, self.pages, sources)
        assert all(done), self.tier.last_refusal
        return time.perf_counter() - begin

    def _page(self, number: int) -> PageRecord:
        self.sequence += 1
        return PageRecord(
            root=b"r" * 32,
            tenant="bench",
            namespace=b"n" * 16,
            key=self.sequence.to_bytes(16, "little"),
            parent_key=bytes(16),
            sequence=self.sequence,
            parent_sequence=0,
            page_index=0,
            tokens=bytes(64),
            extras=b"",
            payload_bytes=self.load.page_bytes,
            checksum=self.checksums[number % self.load.call_pages],
        )

    def read(self, *, verified: bool = True) -> float:
        """Seconds for reading all pages into the arena."""
        load = self.load
        self.tier.verify_payloads(verified)
        begin = time.perf_counter()
        for start in range(0, load.pages, load.call_pages):
            end = min(start + load.call_pages, load.pages)
            statuses = self.tier.read_many(
                self.slots[start:end], self.pages[start:end], self.buffers[: end - start]
            )
            assert set(statuses) == {ReadStatus.OK}, statuses
        return time.perf_counter() - begin

    def close(self) -> None:
        self.buffers.clear()
        self.tier.close()
        self.arena.close()


def measure(
    directory: Path, load: Load, pairs: int, seed: int
) -> tuple[dict[str, PairedRatio], dict[str, object]]:
    """The three rows, and the rates in MiB/s that they come from."""
    ours = Ours(directory / "store", load, seed)
    peer = Peer(directory / "peer.dat", load)
    seconds: dict[str, list[float]] = {
        name: [] for name in ("peer_write", "write", "peer_read", "read", "read_unverified")
    }
    runs: list[tuple[str, Callable[[], float]]] = [
        ("peer_write", lambda: peer.seconds("write")),
        ("write", ours.write),
        ("peer_read", lambda: peer.seconds("read")),
        ("read", ours.read),
        ("read_unverified", lambda: ours.read(verified=False)),
    ]
    try:
        ours.write()  # every block of both is written once before anything is measured
        peer.seconds("write")
        for number in range(pairs):
            for name, run in runs if number % 2 == 0 else [runs[at] for at in TURNED]:
                seconds[name].append(run())
    finally:
        ours.close()
    kept = paired_ratio(seconds["read_unverified"], seconds["read"])
    ratios = {
        "disk_write_ratio": paired_ratio(seconds["peer_write"], seconds["write"]),
        "disk_read_ratio": paired_ratio(seconds["peer_read"], seconds["read"]),
        "checksum_share": PairedRatio(1 - kept.median, 1 - kept.high, 1 - kept.low, kept.pairs),
    }
    rates: dict[str, object] = {
        f"{name}_mib_s": round(load.total_bytes / MIB / statistics.median(taken))
        for name, taken in seconds.items()
    }
    return ratios, rates | {"peer": peer.name}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    parser.add_argument("--tiny", action="store_true", help="a few MiB, for tests")
    parser.add_argument("--dir", type=Path, help="where to write; default: a temporary folder here")
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--gib", type=float, default=4.0, help="GiB a run")
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--call-pages", type=int, default=128, help="pages a read_many call")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    load = Load(2 * MIB, int(options.gib * 512), options.depth, options.call_pages)
    pairs = options.pairs
    if options.tiny:
        load, pairs = Load(256 << 10, 32, 2, 8), 2
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-", dir=options.dir or ".") as folder:
        ratios, facts = measure(Path(folder), load, pairs, options.seed)
    facts |= {"gib_a_run": load.total_bytes / (1 << 30), "depth": load.depth}
    if str(facts["peer"]).startswith("NO FIO"):
        sys.stderr.write("fio is NOT INSTALLED: compared with plain pread/pwrite threads\n")
    if options.json:
        sys.stdout.write(json_line(ratios, options.seed, **facts) + "\n")
        return
    for key, ratio in ratios.items():
        verdict = ratio.verdict(BUDGETS[key], at_least=key != "checksum_share")
        sys.stdout.write(
            f"{key:18} {ratio.median:6.3f}  [{ratio.low:.3f}, {ratio.high:.3f}] of {ratio.pairs}; "
            f"budget {BUDGETS[key]}: {verdict}\n"
        )
    sys.stdout.write(f"{machine()}; seed {options.seed}; {facts}\n")


if __name__ == "__main__":
    main()
