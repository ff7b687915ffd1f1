"""Kills an encrypted store again and again, looks for its prompts in every file, deletes a key.

    python tests/crash/encryption_drill.py --json

Exit status 0 only if no marker was found in any file of the encrypted store (segments, catalog,
quarantine, reserve, settings, log), each marker was found in a plain store that lived the same
life, every acknowledged page of both tenants was read back right before the key was deleted, none
of its tenant's after, and all of the other tenant's.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from kvstore import CacheSpec, Store
from kvstore.key_folder import KeyFolder
from kvstore.removal import Selection
from kvstore.tenant import load_secret

PAGE_TOKENS = 8
PAGE_BYTES = 16_384
SPEC = CacheSpec.opaque("encryption-drill", page_tokens=PAGE_TOKENS, page_bytes=PAGE_BYTES)
TENANTS = ("red-TENANT-MARK", "blue-TENANT-MARK")
PAGES = 5
PAYLOAD_MARK = b"PAYLOAD-MARK-of-the-drill"
TOKEN_MARK = b"TOKENS-MARK!"  # as three token ids, int32 little-endian
EXTRAS_MARK = b"EXTRAS-MARK-of-the-drill"
WRITER_MARK = "WRITER-MARK-of-the-drill"
MARKS = {
    "payload": PAYLOAD_MARK,
    "tokens": TOKEN_MARK,
    "extras": EXTRAS_MARK,
    "writer": WRITER_MARK.encode(),
    "tenant": b"TENANT-MARK",
}
# The disk is too small for all that is written, so that pages are evicted and slots used again.
DISK_BYTES = 8 << 20
KEPT_PROMPTS = 10  # of each tenant, asked for again and again, so that they stay
LIVE_S_MAX = 1.5


def prompt(number: int) -> np.ndarray:
    """Tokens of one prompt; each page holds the mark and its own number."""
    tokens = np.zeros((PAGES, PAGE_TOKENS), "<i4")
    tokens[:, :3] = np.frombuffer(TOKEN_MARK, "<i4")
    tokens[:, 3] = number
    tokens[:, 4] = np.arange(PAGES)
    return tokens.reshape(-1).astype(np.int32)


def extras(number: int) -> dict[int, bytes]:
    """The second page of a prompt has some."""
    return {1: EXTRAS_MARK + number.to_bytes(4, "little")}


def content(tenant: str, number: int, page: int) -> bytes:
    """The bytes of one page."""
    own = f"{tenant} {number} {page} ".encode()
    return (PAYLOAD_MARK + own) * (PAGE_BYTES // len(PAYLOAD_MARK + own) + 1)


def opened(directory: Path, *, encrypt: bool) -> Store:
    """The store under test."""
    return Store.open(directory, host_bytes=2 << 20, disk_bytes=DISK_BYTES, encrypt=encrypt)


def save(store: Store, tenant: str, number: int) -> bool:
    """Store a prompt; whether all of it is acknowledged as durable."""
    session = store.session(SPEC, tenant=tenant, writer=WRITER_MARK)
    with session.reserve(prompt(number), extras(number), deadline_s=10) as run:
        if not run.count:
            return False
        for offset, view in enumerate(run.views()):
            view[:] = content(tenant, number, run.start + offset)[:PAGE_BYTES]
        return run.commit(durable=True, deadline_s=20).durable and run.start + run.count == PAGES


def read(store: Store, tenant: str, number: int) -> int:
    """Pages of a prompt that hit; wrong bytes end the drill."""
    session = store.session(SPEC, tenant=tenant)
    with session.match(prompt(number), extras(number)) as hit:
        pages = hit.stage(30.0)
        for page, view in enumerate(hit.views(0, pages)):
            if bytes(view) != content(tenant, number, page)[:PAGE_BYTES]:
                raise SystemExit(f"WRONG BYTES: {tenant} {number} page {page}")
        return pages


def live(directory: Path, cycle: int, encrypt: bool) -> None:
    """The child: works until it is killed, and says what was acknowledged."""
    log = directory.with_suffix(".log")
    logging.basicConfig(filename=log, level=logging.DEBUG)
    rng = random.Random(cycle)
    store = opened(directory, encrypt=encrypt)
    sys.stdout.write("open\n")
    for number in range(KEPT_PROMPTS):
        for tenant in TENANTS:
            if save(store, tenant, number):
                sys.stdout.write(f"{tenant} {number}\n")
                sys.stdout.flush()
    other = 1000 * (cycle + 1)
    while True:
        other += 1
        for tenant in TENANTS:
            save(store, tenant, other)
            read(store, tenant, rng.randrange(KEPT_PROMPTS))
        if other % 7 == 0:
            tokens = prompt(other)[:PAGE_TOKENS]
            root = store.root(SPEC.namespace, TENANTS[0])
            store.evict(Selection(prefix=tokens, root=root))


def run_child(directory: Path, cycle: int, encrypt: bool, live_s: float) -> set[tuple[str, int]]:
    """One life, ended with kill -9; the prompts that it acknowledged."""
    command = [sys.executable, __file__, "--live", str(directory), "--cycle", str(cycle)]
    command += [] if encrypt else ["--plain"]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    line = child.stdout.readline()
    time.sleep(live_s if line else 0)
    died = child.poll()
    child.send_signal(signal.SIGKILL)
    rest = child.stdout.read().splitlines()
    child.wait()
    if died is not None:
        raise SystemExit(f"the store ended by itself with {died}")
    return {(tenant, int(number)) for tenant, number in (item.split() for item in rest)}


def found_marks(directory: Path) -> tuple[dict[str, int], int, int]:
    """Occurrences by mark, files, and bytes of the store, its keys and its log."""
    counts = dict.fromkeys(MARKS, 0)
    files = [path for path in directory.rglob("*") if path.is_file()]
    files.append(directory.with_suffix(".log"))
    total = 0
    for path in files:
        data = path.read_bytes()
        total += len(data)
        for name, mark in MARKS.items():
            counts[name] += data.count(mark)
    return counts, len(files), total


def lives(directory: Path, cycles: int, seed: int, *, encrypt: bool) -> dict[str, Any]:
    """All lives of one store; what was found on its disk after each, and what it acknowledged."""
    rng = random.Random(seed)
    worst = dict.fromkeys(MARKS, 0)
    acknowledged: set[tuple[str, int]] = set()
    files = total = 0
    for cycle in range(cycles):
        if cycle and cycle % 3 == 0:  # the catalog is lost: rebuilt from headers, the old one kept
            os.truncate(directory / "catalog" / "data.mdb", 8192)
        acknowledged |= run_child(directory, cycle, encrypt, rng.uniform(0.3, LIVE_S_MAX))
        counts, files, total = found_marks(directory)
        worst = {name: max(worst[name], count) for name, count in counts.items()}
    return {"marks": worst, "files": files, "bytes": total, "acknowledged": acknowledged}


def restore(directory: Path) -> None:
    """Store again what was evicted meanwhile; to read is to make others the oldest."""
    wanted = [(tenant, number) for tenant in TENANTS for number in range(KEPT_PROMPTS)]
    with opened(directory, encrypt=True) as store:
        for _ in range(5):
            for tenant, number in wanted:
                read(store, tenant, number)
            for tenant, number in wanted:
                save(store, tenant, number)
                read(store, tenant, number)


def readable(directory: Path) -> tuple[dict[str, int], dict[str, int], int, str]:
    """Pages of the kept prompts that hit, by tenant; counters; bytes of slots in use."""
    with opened(directory, encrypt=True) as store:
        pages = {
            tenant: sum(read(store, tenant, number) for number in range(KEPT_PROMPTS))
            for tenant in TENANTS
        }
        stats = store.stats()
        store.check()
        [disk] = [tier for tier in stats.tiers if tier.name == "disk"]
        return pages, stats.counters, disk.used_bytes, stats.encryption


def drill(scratch: Path, cycles: int, seed: int) -> dict[str, Any]:
    """The whole story, as facts."""
    encrypted, plain = scratch / "encrypted", scratch / "plain"
    life = lives(encrypted, cycles, seed, encrypt=True)
    control = lives(plain, 2, seed, encrypt=False)
    restore(encrypted)
    before, _, used_before, state = readable(encrypted)
    red, blue = TENANTS
    folder = KeyFolder(encrypted / "keys", load_secret(encrypted / "secret"))
    of_red, files = folder.find(red), sorted(folder.folder.glob("*.key"))
    [doomed] = [path for path in files if path.read_bytes() == of_red]
    doomed.unlink()
    after, counters, used_after, _ = readable(encrypted)
    again, _, _, _ = readable(encrypted)
    marks_after, _, _ = found_marks(encrypted)
    return {
        "drill": "encryption",
        "kills": cycles,
        "encryption": state,
        "keys": len(files),
        "files_searched": life["files"],
        "bytes_searched": life["bytes"],
        "markers_found": sum(life["marks"].values()) + sum(marks_after.values()),
        "markers_found_in_plain_control": control["marks"],
        "acknowledged_prompts": len(life["acknowledged"]),
        "pages_readable_before": before,
        "pages_readable_after_key_deletion": after[red],
        "pages_readable_after_one_more_start": again[red],
        "other_tenant_readable": after[blue],
        "other_tenant_before": before[blue],
        "key_missing_counted": counters["key_missing"],
        "disk_used_bytes_before": used_before,
        "disk_used_bytes_after": used_after,
        "seed": seed,
    }


def verdict(facts: dict[str, Any]) -> list[str]:
    """What is not as it must be."""
    kept = KEPT_PROMPTS * PAGES
    checks = {
        "markers were found": facts["markers_found"] == 0,
        "a marker is not even in the plain store": all(
            facts["markers_found_in_plain_control"].values()
        ),
        "pages were missing before": facts["pages_readable_before"] == dict.fromkeys(TENANTS, kept),
        "pages of a deleted key are readable": facts["pages_readable_after_key_deletion"] == 0
        and facts["pages_readable_after_one_more_start"] == 0,
        "the other tenant lost pages": facts["other_tenant_readable"] == kept,
        "nothing was counted": facts["key_missing_counted"] >= kept,
        "no space came back": facts["disk_used_bytes_after"] < facts["disk_used_bytes_before"],
        "nothing was acknowledged": facts["acknowledged_prompts"] > 0,
    }
    return [name for name, good in checks.items() if not good]


def main() -> int:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cycles", type=int, default=8, help="lives that end with kill -9")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="the facts as one JSON object")
    parser.add_argument("--directory", type=Path, help="where to work (default: a temporary one)")
    parser.add_argument("--live", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--cycle", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--plain", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.live:
        live(given.live, given.cycle, not given.plain)
        return 0
    with tempfile.TemporaryDirectory(dir=given.directory, prefix="encryption-drill-") as scratch:
        facts = drill(Path(scratch), given.cycles, given.seed)
    wrong = verdict(facts)
    if given.json:
        sys.stdout.write(json.dumps(facts | {"wrong": wrong}) + "\n")
    else:
        for name, value in facts.items():
            sys.stdout.write(f"{name:36} {value}\n")
        sys.stdout.write(("WRONG: " + "; ".join(wrong) if wrong else "all as it must be") + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
