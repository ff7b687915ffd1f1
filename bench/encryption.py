"""What encryption at rest costs: the same disk tier and the same store, plain and encrypted.

    encrypted_write_ratio   write_many of 2 MiB pages, encrypted / plain, all syncs and commits
    encrypted_read_ratio    read_many into the arena, everything verified, encrypted / plain
    encrypted_start_ratio   opening a store of 100,000 small pages until all hit, encrypted / plain

Ratios of rates: 1.0 costs nothing. Runs are interleaved and change places; what is reported is the
median of the paired ratios with its 90 % interval.

    python bench/encryption.py [--json] [--tiny] [--pairs 10] [--gib 1] [--dir DIR] [--seed 1]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from disk import Load, Ours
from paired import PairedRatio, json_line, machine, paired_ratio
from restart import PAYLOAD_BYTES, SPEC, chains

from kvstore import Store
from kvstore.tiers.cipher import Cipher

MIB = 1 << 20
KINDS = ("plain", "encrypted")
SLOT_BYTES = 8192
START = """
import resource, sys, time
from kvstore import Store
begin = time.perf_counter()
store = Store.open(sys.argv[1], host_bytes=1 << 24)
taken = time.perf_counter() - begin
used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
print(taken, sum(each.ru_utime + each.ru_stime for each in used), store.stats().pages)
store.close()
"""


class OneKey:
    """A key for the only tenant, in memory."""

    def __init__(self) -> None:
        self._key = os.urandom(32)

    def key_for(self, tenant: str) -> bytes:
        return self._key

    def find(self, tenant: str) -> bytes | None:
        return self._key

    def erase(self, tenant: str) -> None:
        raise NotImplementedError("nothing is erased in a bench")


def measure_pages(
    directory: Path, load: Load, pairs: int, seed: int
) -> tuple[dict[str, PairedRatio], dict[str, object]]:
    """Rates of writing and reading large pages."""
    cipher = Cipher([], OneKey(), writes=True)
    tiers = {
        "plain": Ours(directory / "plain", load, seed),
        "encrypted": Ours(directory / "encrypted", load, seed, cipher),
    }
    seconds: dict[str, list[float]] = {f"{kind}_{op}": [] for kind in KINDS for op in ("w", "r")}
    try:
        for tier in tiers.values():
            tier.write()  # every block is written once before anything is measured
        for number in range(pairs):
            order = KINDS if number % 2 == 0 else KINDS[::-1]
            for kind in order:
                seconds[f"{kind}_w"].append(tiers[kind].write())
            for kind in order:
                seconds[f"{kind}_r"].append(tiers[kind].read())
    finally:
        for tier in tiers.values():
            tier.close()
    ratios = {
        "encrypted_write_ratio": paired_ratio(seconds["plain_w"], seconds["encrypted_w"]),
        "encrypted_read_ratio": paired_ratio(seconds["plain_r"], seconds["encrypted_r"]),
    }
    names = {"w": "write", "r": "read"}
    rates: dict[str, object] = {
        f"{name[:-2]}_{names[name[-1]]}_mib_s": round(
            load.total_bytes / MIB / statistics.median(taken)
        )
        for name, taken in seconds.items()
    }
    return ratios, rates


def build(directory: Path, pages: int, seed: int, *, encrypt: bool) -> None:
    """A store of so many small pages, all on disk."""
    disk_bytes = pages * SLOT_BYTES * 2 + 256 * MIB
    with Store.open(
        directory, host_bytes=64 * MIB, disk_bytes=disk_bytes, encrypt=encrypt
    ) as store:
        session = store.session(SPEC)
        for tokens in chains(pages, seed):
            while True:
                with session.reserve(tokens, deadline_s=30) as run:
                    if not run.count:
                        break
                    for view in run.views():
                        view[:] = bytes(PAYLOAD_BYTES)
                    run.commit()
            if store.stats().dirty_bytes > 32 * MIB:
                store.flush(60)
        store.flush(60)


def start(directory: Path) -> tuple[float, float, int]:
    """Seconds until a new process has a store warm, seconds of processor, and its pages."""
    command = [sys.executable, "-c", START, str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    taken, used, pages = done.stdout.split()
    return float(taken), float(used), int(pages)


def measure_starts(
    directory: Path, pages: int, pairs: int, seed: int
) -> tuple[PairedRatio, dict[str, object]]:
    """Warm starts."""
    for kind in KINDS:
        build(directory / f"store-{kind}", pages, seed, encrypt=kind == "encrypted")
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    processor: dict[str, list[float]] = {kind: [] for kind in KINDS}
    found = {}
    for number in range(pairs + 1):
        for kind in KINDS if number % 2 == 0 else KINDS[::-1]:
            taken, used, found[kind] = start(directory / f"store-{kind}")
            if number:  # the first one fills the page cache
                seconds[kind].append(taken)
                processor[kind].append(used)
    facts: dict[str, object] = {
        f"{kind}_start_s": round(statistics.median(taken), 3) for kind, taken in seconds.items()
    }
    facts |= {
        f"{kind}_start_cpu_s": round(statistics.median(used), 3) for kind, used in processor.items()
    }
    facts |= {f"{kind}_start_pages": count for kind, count in found.items()}
    return paired_ratio(seconds["plain"], seconds["encrypted"]), facts


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    parser.add_argument("--tiny", action="store_true", help="a few MiB, for tests")
    parser.add_argument("--dir", type=Path, help="where to write; default: a temporary folder here")
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--gib", type=float, default=1.0, help="GiB a run")
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--pages", type=int, default=100_000, help="pages of the warm start")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    load, pairs = Load(2 * MIB, int(options.gib * 512), options.depth, 128), options.pairs
    if options.tiny:
        load, pairs, options.pages = Load(256 << 10, 32, 2, 8), 2, 500
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-", dir=options.dir or ".") as folder:
        ratios, facts = measure_pages(Path(folder), load, pairs, options.seed)
        starts, more = measure_starts(Path(folder), options.pages, pairs, options.seed)
    ratios["encrypted_start_ratio"] = starts
    facts |= more | {"gib_a_run": load.total_bytes / (1 << 30), "depth": load.depth}
    if options.json:
        sys.stdout.write(json_line(ratios, options.seed, **facts) + "\n")
        return
    for key, ratio in ratios.items():
        sys.stdout.write(
            f"{key:22} {ratio.median:6.3f}  [{ratio.low:.3f}, {ratio.high:.3f}] of {ratio.pairs}\n"
        )
    sys.stdout.write(f"{machine()}; seed {options.seed}; {facts}\n")


if __name__ == "__main__":
    main()
