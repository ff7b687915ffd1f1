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
import datetime
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvstore.tiers.checksum import checksum
from kvstore.tiers.disk_tier import DiskTier
from kvstore.tiers.file_layer import aligned_buffer
from kvstore.tiers.host_tier import HostTier
from kvstore.tiers.tier import PageRecord, ReadStatus

if TYPE_CHECKING:
    from collections.abc import Callable

MIB = 1 << 20
BUDGETS = {"disk_read_ratio": 0.9, "disk_write_ratio": 0.9, "checksum_share": 0.05}
# Every other pair runs in this order: ours first, writes still before reads.
TURNED = (1, 0, 4, 3, 2)
BOOTSTRAP_ROUNDS = 10_000


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

    def rate(self, kind: str) -> float:
        """Bytes a second of `read` or `write`."""
        if self.fio is None:
            return self._rate_of_threads(kind)
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
        return float(answer["jobs"][0][kind]["bw_bytes"])

    def _rate_of_threads(self, kind: str) -> float:
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
        return load.total_bytes / elapsed


class Ours:
    """A disk tier whose pages come from and go to a real arena."""

    def __init__(self, directory: Path, load: Load, seed: int) -> None:
        self.load = load
        capacity = load.total_bytes * 9 // 8 + 64 * MIB
        self.tier = DiskTier.open([directory], capacity, io_threads=load.depth, load=True)
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
        """Bytes a second of writing all pages into slots that were just freed."""
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
        return load.total_bytes / (time.perf_counter() - begin)

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
        """Bytes a second of reading all pages into the arena."""
        load = self.load
        self.tier.verify_payloads(verified)
        begin = time.perf_counter()
        for start in range(0, load.pages, load.call_pages):
            end = min(start + load.call_pages, load.pages)
            statuses = self.tier.read_many(
                self.slots[start:end], self.pages[start:end], self.buffers[: end - start]
            )
            assert set(statuses) == {ReadStatus.OK}, statuses
        return load.total_bytes / (time.perf_counter() - begin)

    def close(self) -> None:
        self.buffers.clear()
        self.tier.close()
        self.arena.close()


def measure(directory: Path, load: Load, pairs: int, seed: int) -> dict[str, object]:
    """All rows of the bench as one flat record."""
    ours = Ours(directory / "store", load, seed)
    peer = Peer(directory / "peer.dat", load)
    try:
        ours.write()  # every block of both is written once before anything is measured
        peer.rate("write")
        rates: dict[str, list[float]] = {name: [] for name in ("pw", "ow", "pr", "or", "ou")}
        for number in range(pairs):
            runs: list[tuple[str, Callable[[], float]]] = [
                ("pw", lambda: peer.rate("write")),
                ("ow", ours.write),
                ("pr", lambda: peer.rate("read")),
                ("or", ours.read),
                ("ou", lambda: ours.read(verified=False)),
            ]
            for name, run in runs if number % 2 == 0 else [runs[at] for at in TURNED]:
                rates[name].append(run())
    finally:
        ours.close()
    write = summary([o / p for o, p in zip(rates["ow"], rates["pw"], strict=True)], seed)
    read = summary([o / p for o, p in zip(rates["or"], rates["pr"], strict=True)], seed)
    share = summary([1 - o / u for o, u in zip(rates["or"], rates["ou"], strict=True)], seed)
    result: dict[str, object] = {}
    for key, found in (
        ("disk_write_ratio", write),
        ("disk_read_ratio", read),
        ("checksum_share", share),
    ):
        result[key] = round(found[1], 3)
        result[f"{key}_interval"] = [round(found[0], 3), round(found[2], 3)]
        result[f"{key}_verdict"] = verdict(key, found)
    for key, name in (
        ("peer_write", "pw"),
        ("write", "ow"),
        ("peer_read", "pr"),
        ("read", "or"),
        ("read_unverified", "ou"),
    ):
        result[f"{key}_mib_s"] = [round(rate / MIB) for rate in rates[name]]
    result["peer"] = peer.name
    return result


def summary(ratios: list[float], seed: int) -> tuple[float, float, float]:
    """(5 %, median, 95 %) of the median of `ratios`, by bootstrap."""
    values = np.array(ratios)
    rng = np.random.default_rng(seed)
    picks = rng.integers(0, len(values), (BOOTSTRAP_ROUNDS, len(values)))
    low, high = np.percentile(np.median(values[picks], axis=1), [5, 95])
    return float(low), float(np.median(values)), float(high)


def verdict(key: str, found: tuple[float, float, float]) -> str:
    """Whether the budget is kept; an interval that spans it resolves nothing."""
    low, _, high = found
    budget = BUDGETS[key]
    if low < budget < high:
        return "not resolved"
    kept = found[1] <= budget if key == "checksum_share" else found[1] >= budget
    return "kept" if kept else "missed"


def main() -> int:
    """Run it; 0 unless a budget was missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    parser.add_argument("--tiny", action="store_true", help="a few MiB, for tests")
    parser.add_argument("--dir", type=Path, help="where to write; default: a temporary folder here")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--gib", type=float, default=4.0, help="GiB a run")
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--call-pages", type=int, default=64, help="pages a read_many call")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    load = Load(2 * MIB, int(options.gib * 512), options.depth, options.call_pages)
    if options.tiny:
        load = Load(256 << 10, 32, 2, 8)
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-", dir=options.dir or ".") as folder:
        result = measure(Path(folder), load, 2 if options.tiny else options.pairs, options.seed)
    result |= {
        "machine": f"{os.cpu_count()} CPUs, {platform.machine()}, Linux {platform.release()}",
        "date": datetime.date.today().isoformat(),
        "seed": options.seed,
        "gib_a_run": load.total_bytes / (1 << 30),
        "depth": load.depth,
    }
    if str(result["peer"]).startswith("NO FIO"):
        sys.stderr.write("fio is not installed: compared with plain pread/pwrite threads\n")
    if options.json:
        sys.stdout.write(json.dumps(result) + "\n")
    else:
        for key, value in result.items():
            sys.stdout.write(f"{key:28} {value}\n")
    missed = any(result[f"{key}_verdict"] == "missed" for key in BUDGETS)
    return 1 if missed and not options.tiny else 0


if __name__ == "__main__":
    sys.exit(main())
