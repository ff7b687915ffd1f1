"""How fast `kvstore verify` reads: all pages of a store on disk, checksummed, over the disk itself.

    verify_ratio   bytes a second of verify over those of reading the same segment files whole, with
                   O_DIRECT, 1 MiB at a time, as many in flight as the store has threads

10,000 pages of 256 KiB, in runs of 50; pairs are interleaved and start with nothing in memory.

    python bench/verify.py [--json] [--tiny] [--pairs 5] [--pages 10000] [--page-bytes 262144]
                           [--dir DIR] [--seed 1]
"""

from __future__ import annotations

import argparse
import mmap
import os
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from paired import PairedRatio, json_line, machine, paired_ratio

from kvstore import CacheSpec, Store

BUDGET = 0.7
BLOCK_BYTES = 1 << 20
RUN_PAGES = 50
PAGE_TOKENS = 16
THREADS = 4


def fill(path: Path, pages: int, page_bytes: int, seed: int) -> None:
    """A store directory with so many pages."""
    rng = np.random.default_rng(seed)
    spec = CacheSpec.opaque("bench", page_tokens=PAGE_TOKENS, page_bytes=page_bytes)
    source = rng.integers(0, 256, page_bytes, dtype=np.uint8)
    disk_bytes = int(pages * (page_bytes + 8192) * 1.3) + (256 << 20)
    with Store.open(path, host_bytes=256 << 20, disk_bytes=disk_bytes) as store:
        session = store.session(spec)
        stored = 0
        while stored < pages:
            tokens = rng.integers(0, 1 << 30, RUN_PAGES * PAGE_TOKENS).astype(np.int32)
            with session.reserve(tokens, deadline_s=30.0) as run:
                for view in run.views():
                    np.copyto(np.frombuffer(view, np.uint8), source)
                stored += run.commit(durable=True).pages
        assert store.stats().tiers[1].pages >= pages


def read_whole(path: Path) -> tuple[int, float]:
    """Bytes and seconds of reading all segments."""
    blocks = [
        (file, at)
        for file in sorted(path.glob("segment-*"))
        for at in range(0, file.stat().st_size, BLOCK_BYTES)
    ]

    def read(part: list[tuple[Path, int]]) -> int:
        memory, size, name, descriptor = mmap.mmap(-1, BLOCK_BYTES), 0, None, -1
        for file, at in part:
            if file != name:
                if descriptor >= 0:
                    os.close(descriptor)
                name, descriptor = file, os.open(file, os.O_RDONLY | os.O_DIRECT)
            size += os.preadv(descriptor, [memory], at)
        if descriptor >= 0:
            os.close(descriptor)
        return size

    begin = time.perf_counter()
    share = -(-len(blocks) // THREADS)
    with ThreadPoolExecutor(THREADS) as pool:
        parts = [blocks[start : start + share] for start in range(0, len(blocks), share)]
        size = sum(pool.map(read, parts))
    return size, time.perf_counter() - begin


def verify(path: Path) -> tuple[int, float]:
    """Bytes of payload and seconds of one verify."""
    with Store.open(path, host_bytes=1 << 20) as store:
        *_, found = store.verify()
        assert found.healthy, found.problems
        return found.payload_bytes, found.seconds


def main() -> int:
    """Run it as the docstring says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--pages", type=int, default=10_000)
    parser.add_argument("--page-bytes", type=int, default=256 << 10)
    parser.add_argument("--dir", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if options.tiny:
        options.pairs, options.pages, options.page_bytes = 2, 200, 8192
    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        path = Path(folder) / "store"
        fill(path, options.pages, options.page_bytes, options.seed)
        limits, measured = [], []
        for pair in range(options.pairs):
            order = [read_whole, verify] if pair % 2 else [verify, read_whole]
            for each in order:
                size, seconds = each(path)
                (limits if each is read_whole else measured).append(seconds / size)
    found: PairedRatio = paired_ratio(limits, measured)
    if options.json:
        more = {"pages": options.pages, "page_bytes": options.page_bytes}
        print(json_line({"verify_ratio": found}, options.seed, **more))
        return 0
    print(machine())
    print(
        f"verify_ratio {found.median:.3f} [{found.low:.3f}, {found.high:.3f}]  budget {BUDGET}: "
        f"{found.verdict(BUDGET, at_least=True)}"
    )
    rates = (f"{1 / each / 2**20:.0f}" for each in measured)
    print(f"MiB/s: verify {', '.join(rates)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
