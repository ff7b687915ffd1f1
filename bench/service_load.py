"""A steady load of many clients on one server; part of bench/service.py, and its client processes.

    python bench/service.py --load 64 --seconds 60 [--pause 0]

Clients live in a few processes, since on a small machine a process for each measures the machine.
Each looks prompts up, compares the bytes of what hits, stores what misses. Wanted: no error, and
private memory and descriptors of the server that do not grow.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

import numpy as np
from serving import Serving

from kvstore import CacheSpec
from kvstore.connect import connect

if TYPE_CHECKING:
    from pathlib import Path

    from kvstore.interface import SessionLike

PAGE_TOKENS, PAGE_BYTES = 16, 16 << 10
SPEC = CacheSpec.opaque("load", page_tokens=PAGE_TOKENS, page_bytes=PAGE_BYTES)
PROCESSES = 4
PROMPTS = 2000
PAGES_A_PROMPT = 16
PAUSE_S = 0.25  # of each client between its requests, unless said otherwise
WARM_UP_SHARE = 0.25  # of the seconds, until memory is looked at first
LOOKS = 6  # at the server's memory and descriptors after that
GROWTH_BYTES_MAX = 16 << 20
SETTLE_S = 5.0


def steady_load(folder: Path, options: argparse.Namespace) -> int:
    """Run it and print a line; 1 when something was not as wanted."""
    # Both tiers fill while it warms up, so that all that comes later is a steady state.
    flags = ("--host-bytes=192MiB", "--disk-bytes=256MiB")
    with Serving(folder / "load", *flags) as serving:
        serving.wait_said()
        time.sleep(1.0)
        descriptors = serving.descriptors()
        children = []
        for number in range(PROCESSES):
            clients = len(range(number, options.load, PROCESSES))
            command = [sys.executable, __file__, "--clients", str(clients)]
            command += ["--address", serving.address, "--seconds", str(options.seconds)]
            command += ["--seed", str(options.seed * 1000 + number)]
            command += ["--pause", str(options.pause)]
            children.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        time.sleep(options.seconds * WARM_UP_SHARE)
        private, open_ones = [serving.private_bytes()], [serving.descriptors()]
        for _ in range(LOOKS):
            time.sleep(options.seconds * (0.98 - WARM_UP_SHARE) / LOOKS)
            private.append(serving.private_bytes())
            open_ones.append(serving.descriptors())
        counted = [json.loads(child.communicate()[0].splitlines()[-1]) for child in children]
        time.sleep(SETTLE_S if options.seconds > SETTLE_S else 1.0)
        after = serving.descriptors()
    total = {key: sum(each[key] for each in counted) for key in counted[0]}
    worst_ms = max(each["match_ms_p99"] for each in counted)
    total["match_ms_p99"] = worst_ms
    total |= {"clients": options.load, "seconds": options.seconds}
    total |= {"private_mib": [round(n / 2**20, 1) for n in private]}
    total |= {"descriptors": [descriptors, *open_ones, after]}
    grew = private[-1] - private[0] > GROWTH_BYTES_MAX or after > descriptors
    is_good = not total["errors"] and not grew and total["matches"] > 0
    total["verdict"] = "kept" if is_good else "MISSED"
    print(json.dumps(total) if options.json else ", ".join(f"{k} {v}" for k, v in total.items()))
    return 0 if is_good else 1


class Client:
    """One of many in this process; counts what happens."""

    def __init__(self, address: str, seed: int, pause_s: float) -> None:
        self.rng = np.random.default_rng(seed)
        self.pause_s = pause_s
        self.store = connect(address, lookup_deadline_s=5.0)
        self.session: SessionLike = self.store.session(SPEC)
        self.matches = self.hit_pages = self.stored_pages = 0
        self.errors: list[str] = []
        self.taken_ms: list[float] = []

    def run(self, until: float) -> None:
        """Work until then."""
        time.sleep(float(self.rng.uniform(0, self.pause_s)))
        while time.monotonic() < until:
            try:
                self.request(prompt(int(self.rng.integers(PROMPTS))))
            except Exception as exc:
                self.errors.append(repr(exc))
            time.sleep(self.pause_s)

    def request(self, tokens: np.ndarray) -> None:
        """What an engine does for one prompt."""
        begun = time.perf_counter()
        hit = self.session.match(tokens)
        self.taken_ms.append((time.perf_counter() - begun) * 1e3)
        with hit:
            self.matches += 1
            pages = hit.stage()
            copies = [bytes(view) for view in hit.views(0, pages)]
            if not pages or hit.valid():
                self.hit_pages += pages
                wrong = [p for p in range(pages) if copies[p] != payload(tokens, p)]
                if wrong:
                    self.errors.append(f"wrong bytes in pages {wrong}")
        if pages == PAGES_A_PROMPT:
            return
        with self.session.reserve(tokens) as run:
            for offset, view in enumerate(run.views()):
                view[:] = payload(tokens, run.start + offset)
            if run.count:
                self.stored_pages += run.commit().pages

    def finish(self) -> None:
        """Close, after taking over what the client itself counted as failed."""
        failed = {
            name: count
            for name, count in self.store.client_counters().items()  # type: ignore[attr-defined]
            if count and name.startswith("calls_")
        }
        self.errors += [f"{name}: {count}" for name, count in failed.items()]
        self.store.close()


def prompt(number: int) -> np.ndarray:
    """The tokens of one of PROMPTS prompts."""
    return np.arange(PAGES_A_PROMPT * PAGE_TOKENS, dtype=np.int32) + 1_000_000 * (number + 1)


def payload(tokens: np.ndarray, page: int) -> bytes:
    """Page bytes that follow from the page's own tokens."""
    own = tokens[page * PAGE_TOKENS : (page + 1) * PAGE_TOKENS].tobytes()
    return own * (PAGE_BYTES // len(own))


def be_clients(options: argparse.Namespace) -> None:
    """So many clients in threads of this process; prints what they counted."""
    seed = options.seed * 100
    clients = [Client(options.address, seed + n, options.pause) for n in range(options.clients)]
    until = time.monotonic() + options.seconds
    threads = [threading.Thread(target=client.run, args=(until,)) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for client in clients:
        client.finish()
    errors = [error for client in clients for error in client.errors]
    for error in errors[:5]:
        print(error, file=sys.stderr)
    taken = [ms for client in clients for ms in client.taken_ms]
    summary = {
        "matches": sum(client.matches for client in clients),
        "hit_pages": sum(client.hit_pages for client in clients),
        "stored_pages": sum(client.stored_pages for client in clients),
        "errors": len(errors),
        "match_ms_p99": round(float(np.quantile(taken, 0.99)), 2),
    }
    print(json.dumps(summary))


def store_until_stopped(address: str, page_bytes: int) -> None:
    """Store new pages as fast as it goes."""
    spec = CacheSpec.opaque("stores", page_tokens=PAGE_TOKENS, page_bytes=page_bytes)
    source = np.ones(page_bytes, np.uint8)
    with connect(address) as store, store.session(spec) as session:
        number = 0
        while True:
            number += 1
            with session.reserve(prompt(number % 2000), deadline_s=1.0) as run:
                for view in run.views():
                    np.copyto(np.frombuffer(view, np.uint8), source)
                if run.count:
                    run.commit()
            if number == 1:
                print("storing", flush=True)


def main() -> None:
    """One client process, as bench/service.py starts it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--address")
    parser.add_argument("--clients", type=int)
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--pause", type=float, default=PAUSE_S)
    parser.add_argument("--store", metavar="ADDRESS")
    parser.add_argument("--page-bytes", type=int)
    options = parser.parse_args()
    if options.store:
        store_until_stopped(options.store, options.page_bytes)
    be_clients(options)


if __name__ == "__main__":
    main()
