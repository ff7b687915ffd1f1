"""Drills of tenants on one real server: what a neighbour can take, and what it can learn.

    flood --seconds 60     tenant a writes for so long, and at least ten times the memory; tenant b
                           reads its hot set meanwhile: hit rate >= 0.95, p99 <= 2 x that of before.
                           Beside it, what the same flood costs when it goes into another server
    probe --count 10000    tenant c times look-ups of prompts that tenant b has, and of prompts that
                           nobody has: no hits, and an AUC <= 0.55 of telling them apart; its own
                           stored prompts are the control, which must hit

    python tests/crash/tenant_drills.py [NAME] [--seconds N] [--count N] [--json]

Without a name runs both. Exits with 1 when what a drill is for did not hold.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

SUPPORT = Path(__file__).resolve().parents[1] / "support"
if str(SUPPORT) not in sys.path:  # pytest has it there
    sys.path.append(str(SUPPORT))

import numpy as np  # noqa: E402
from server_process import ServerProcess  # noqa: E402

from kvstore import CacheSpec  # noqa: E402
from kvstore.connect import connect  # noqa: E402
from kvstore.identity import Role  # noqa: E402
from kvstore.tenants import Quota, TenantBook, edit_tenants  # noqa: E402

if TYPE_CHECKING:
    from kvstore.interface import SessionLike, StoreLike

PAGE_TOKENS = 16
PAGE_BYTES = 64 << 10
SPEC = CacheSpec.opaque("tenants", page_tokens=PAGE_TOKENS, page_bytes=PAGE_BYTES)
HOST_BYTES = 64 << 20
DISK_BYTES = 256 << 20
CHAIN_PAGES = 16
HOT_CHAINS = 12  # 12 MiB: within b's half of the arena
FLOODS = 10  # times the memory
PACE_S = 0.005  # between b's reads: it serves requests, it does not race
PROBE_CHAINS = 8
HIT_RATE_MIN = 0.95
P99_RATIO_MAX = 2.0
AUC_MAX = 0.55
TENANTS = ("a", "b", "c")


def main() -> None:
    """Run the drills, print their figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", nargs="?", choices=["flood", "probe", "be-a"])
    parser.add_argument("--seconds", type=float, default=60.0, help="of the flood")
    parser.add_argument("--count", type=int, default=10_000, help="timed probes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="one object in one line")
    parser.add_argument("--directory", type=Path, help="where the store is made")
    parser.add_argument("--address", help=argparse.SUPPRESS)
    parser.add_argument("--token", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    logging.getLogger("kvstore").addHandler(logging.NullHandler())
    if options.name == "be-a":
        be_a(options.address, options.token, options.seconds)
        return
    found: dict[str, Any] = {"seed": options.seed}
    problems: list[str] = []
    with tempfile.TemporaryDirectory(prefix="drill-", dir=options.directory) as folder:
        service = Service(Path(folder))
        with service.server.start():
            if options.name in (None, "flood"):
                problems += flood(service, options.seconds, found)
            if options.name in (None, "probe"):
                problems += probe(service, options.count, options.seed, found)
    found["problems"] = problems
    if options.json:
        print(json.dumps(found))
    else:
        for name, value in found.items():
            print(f"{name:24} {value}")
    sys.exit(bool(problems))


class Service:
    """A server with a tenant file, and a token of each tenant."""

    def __init__(self, folder: Path) -> None:
        self.tokens: dict[str, Path] = {}
        file = folder / "tenants.json"

        def edit(book: TenantBook) -> TenantBook:
            for tenant in TENANTS:
                quota = Quota(host_bytes_share=8 << 20) if tenant == "c" else Quota()
                book, token = book.with_tenant(tenant, quota).with_token(
                    tenant, Role.WRITER, 0.0, None
                )
                self.tokens[tenant] = folder / f"{tenant}.token"
                self.tokens[tenant].touch(mode=0o600)
                self.tokens[tenant].write_text(token)
            return book

        edit_tenants(file, edit, create=True)
        flags = f"--host-bytes={HOST_BYTES}", f"--disk-bytes={DISK_BYTES}"
        self.server = ServerProcess(folder / "store", *flags, f"--tenants-file={file}")
        self.elsewhere = ServerProcess(folder / "other", *flags, f"--tenants-file={file}")

    def connect(self, tenant: str) -> StoreLike:
        return connect(self.server.address, token_file=self.tokens[tenant], lookup_deadline_s=5.0)


def flood(service: Service, seconds: float, found: dict[str, Any]) -> list[str]:
    """T10: what tenant b notices of a neighbour that writes all it can."""
    with service.connect("b") as store, store.session(SPEC) as session:
        hot = [prompt(number, CHAIN_PAGES) for number in range(HOT_CHAINS)]
        for tokens in hot:
            store_pages(session, tokens)
        session.flush(30.0)
        quiet, _ = read_for(session, hot, max(1.0, seconds / 4), threading.Event())
        # The control: the same flood into another server. What it costs, the machine costs.
        with service.elsewhere.start():
            elsewhere, _, _ = beside_a(session, hot, service.elsewhere, service, seconds / 2)
        busy, hit_pages, written = beside_a(session, hot, service.server, service, seconds)
    rate = hit_pages / (len(busy) * CHAIN_PAGES)
    p99 = [float(np.percentile(each, 99)) * 1000 for each in (quiet, busy, elsewhere)]
    p50 = [float(np.percentile(each, 50)) * 1000 for each in (quiet, busy, elsewhere)]
    found |= {
        "flood_written_mib": written >> 20,
        "flood_times_memory": round(written / HOST_BYTES, 1),
        "reads_quiet": len(quiet),
        "reads_during_flood": len(busy),
        "hit_rate": round(rate, 4),
        "p50_ms_quiet": round(p50[0], 3),
        "p50_ms_flood": round(p50[1], 3),
        "p99_ms_quiet": round(p99[0], 3),
        "p99_ms_flood": round(p99[1], 3),
        "p50_ms_flood_elsewhere": round(p50[2], 3),
        "p99_ms_flood_elsewhere": round(p99[2], 3),
        "p99_over_elsewhere": round(p99[1] / p99[2], 2),
        "p99_ratio": round(p99[1] / p99[0], 2),
    }
    problems = []
    if written < FLOODS * HOST_BYTES:
        problems.append(f"only {written >> 20} MiB were written, {FLOODS} times the memory asked")
    if rate < HIT_RATE_MIN:
        problems.append(f"hit rate {rate:.3f} < {HIT_RATE_MIN}")
    if p99[1] > P99_RATIO_MAX * p99[0]:
        problems.append(f"p99 {p99[1]:.2f} ms > {P99_RATIO_MAX:g} x {p99[0]:.2f} ms")
    return problems


def beside_a(
    session: SessionLike,
    hot: list[np.ndarray],
    server: ServerProcess,
    service: Service,
    seconds: float,
) -> tuple[list[float], int, int]:
    """Read while a process of tenant a floods that server; times, pages that hit, bytes written."""
    command = [sys.executable, __file__, "be-a", "--seconds", str(seconds)]
    command += ["--address", server.address, "--token", str(service.tokens["a"])]
    writer = subprocess.Popen(command, stdout=subprocess.PIPE)
    done = threading.Event()
    waiter = threading.Thread(target=lambda: (writer.wait(), done.set()))
    waiter.start()
    busy, hit_pages = read_for(session, hot, 10 * seconds + 60, done)
    waiter.join()
    assert writer.stdout is not None
    return busy, hit_pages, int(writer.stdout.read() or 0)


def be_a(address: str, token: Path, seconds: float) -> None:
    """Write for so long, and at least ten times the memory; say how many bytes."""
    written, number = 0, 0
    begun = time.monotonic()
    with connect(address, token_file=token) as store, store.session(SPEC) as session:
        while time.monotonic() - begun < seconds or (
            written < FLOODS * HOST_BYTES and time.monotonic() - begun < 10 * seconds + 30
        ):
            written += store_pages(session, prompt(100_000 + number, CHAIN_PAGES)) * PAGE_BYTES
            number += 1
    print(written)


def read_for(
    session: SessionLike, prompts: list[np.ndarray], seconds: float, done: threading.Event
) -> tuple[list[float], int]:
    """Seconds of each read of a whole chain into private memory, and the pages that hit."""
    took, pages = [], 0
    buffer = bytearray(PAGE_BYTES)
    until = time.monotonic() + seconds
    while time.monotonic() < until and not done.is_set():
        tokens = prompts[len(took) % len(prompts)]
        begun = time.perf_counter()
        with session.match(tokens) as hit:
            there = hit.stage(1.0)
            for page, view in enumerate(hit.views(0, there)):
                buffer[:] = view
                assert buffer[:64] == content(tokens, page)[:64], "wrong bytes"
            pages += there if hit.valid() else 0
        took.append(time.perf_counter() - begun)
        done.wait(PACE_S)
    return took, pages


def probe(service: Service, count: int, seed: int, found: dict[str, Any]) -> list[str]:
    """T6: what tenant c learns by the clock of prompts that tenant b has stored."""
    stored = [prompt(200_000 + number, 4) for number in range(PROBE_CHAINS)]
    nobodys = [prompt(300_000 + number, 4) for number in range(PROBE_CHAINS)]
    own = [prompt(400_000 + number, 4) for number in range(PROBE_CHAINS)]
    order = random.Random(seed)
    kinds = {"theirs": stored, "nobodys": nobodys, "own": own}
    took: dict[str, list[float]] = {kind: [] for kind in kinds}
    hits = dict.fromkeys(kinds, 0)
    with service.connect("b") as owner, owner.session(SPEC) as theirs:
        for tokens in stored:
            store_pages(theirs, tokens)
    with service.connect("c") as prober, prober.session(SPEC) as session:
        for tokens in own:
            store_pages(session, tokens)
        for number in range(count // len(kinds)):
            for kind in order.sample(list(kinds), len(kinds)):
                begun = time.perf_counter()
                with session.match(kinds[kind][number % PROBE_CHAINS]) as hit:
                    took[kind].append(time.perf_counter() - begun)
                    hits[kind] += hit.pages > 0
    cross, control = auc(took["theirs"], took["nobodys"]), auc(took["own"], took["nobodys"])
    found |= {
        "probes": sum(map(len, took.values())),
        "hits_own": hits["own"],
        "hits_of_others": hits["theirs"],
        "auc_of_others": round(cross, 4),
        "auc_own_control": round(control, 4),
    }
    problems = []
    if hits["theirs"] or hits["nobodys"]:
        problems.append(f"{hits['theirs']} hits on another tenant's prompts")
    if hits["own"] != len(took["own"]):
        problems.append(f"only {hits['own']} of {len(took['own'])} control probes hit")
    if cross > AUC_MAX and len(took["own"]) >= 1000:  # fewer probes tell nothing of so small a gap
        problems.append(f"AUC {cross:.3f} > {AUC_MAX}")
    return problems


def auc(ones: list[float], others: list[float]) -> float:
    """How well a threshold tells one from the other, in either direction: 0.5 is not at all."""
    order = np.argsort(np.array(ones + others), kind="stable")
    ranks = np.empty(len(order))
    ranks[order] = np.arange(1, len(order) + 1)
    above = ranks[: len(ones)].sum() - len(ones) * (len(ones) + 1) / 2
    share = float(above / (len(ones) * len(others)))
    return max(share, 1 - share)


def prompt(seed: int, pages: int) -> np.ndarray:
    """A prompt of whole pages that no other seed shares."""
    return np.arange(pages * PAGE_TOKENS, dtype=np.int32) + 4096 * seed


def content(tokens: np.ndarray, page: int) -> bytes:
    """The bytes of a page: they follow from its tokens."""
    seen = tokens[page * PAGE_TOKENS : (page + 1) * PAGE_TOKENS].tobytes()
    return seen * (PAGE_BYTES // len(seen))


def store_pages(session: SessionLike, tokens: np.ndarray) -> int:
    """Store what is missing of a prompt; how many pages."""
    saved = 0
    while True:
        with session.reserve(tokens, deadline_s=2.0) as run:
            if not run.count:
                return saved
            for offset, view in enumerate(run.views()):
                view[:] = content(tokens, run.start + offset)
            saved += run.commit().pages


if __name__ == "__main__":
    main()
