"""F5: whatever bits of a catalog flip, its store opens, says so, and gives no wrong byte.

A damaged LMDB file can kill the process that reads it, so each store is opened in a child, which
also stores and reopens: damage that only a write meets must not break it either.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from known_pages import SPEC, load, prompt, save

from kvstore import Store
from kvstore.removal import Selection

SIZES: dict[str, Any] = {"host_bytes": "8MiB", "disk_bytes": "64MiB"}
CHAINS, PAGES = 8, 30
NEW = prompt(90, 5)
LMDB_PAGE = 4096


def make(folder: Path) -> Path:
    """A store with eight writers, a free list, and leaves under a branch."""
    with Store.open(folder, **SIZES) as store:
        for chain in range(CHAINS):
            save(store.session(SPEC, writer=f"w{chain}"), prompt(chain, PAGES), durable=True)
        gone = Selection(prefix=prompt(CHAINS - 1, 5), root=store.root(SPEC.namespace))
        assert store.evict(gone).pages == PAGES - 4
    return folder


def damage(catalog: Path, seed: int) -> None:
    """Flip 1 to 256 bits: anywhere, in the meta pages, in page heads, or in what is in use."""
    rng = random.Random(seed)
    content = bytearray(catalog.read_bytes())
    used = [at for at, byte in enumerate(content) if byte]
    pages = len(content) // LMDB_PAGE
    places = [
        lambda: rng.randrange(len(content)),
        lambda: rng.randrange(2) * LMDB_PAGE + rng.randrange(160),
        lambda: rng.randrange(pages) * LMDB_PAGE + rng.randrange(64),
        lambda: rng.choice(used),
    ]
    place = places[seed % len(places)]
    for _ in range(rng.choice([1, 2, 8, 256])):
        content[place()] ^= 1 << rng.randrange(8)
    catalog.write_bytes(content)


def open_and_use(folder: Path) -> dict[str, Any]:
    """What a store is like that was damaged: every byte that hits is compared by `load`."""
    with Store.open(folder, **SIZES) as store:
        *_, found = store.verify()
        session = store.session(SPEC)
        hits = sum(load(session, prompt(chain, PAGES)) for chain in range(CHAINS))
        save(session, NEW, durable=True)
        store.check()
    with Store.open(folder, **SIZES) as store:
        *_, again = store.verify()
        new = load(store.session(SPEC), NEW)
        store.check()
    said = [each.what for each in found.problems]
    return {"hits": hits, "new": new, "said": said, "healthy": again.healthy}


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("first_seed", [100, 200, 300, 400])
def test_a_store_opens_whatever_bits_of_its_catalog_flip(tmp_path: Path, first_seed: int) -> None:
    whole = make(tmp_path / "whole")
    stored = CHAINS * PAGES - (PAGES - 4)
    folders = []
    for seed in range(first_seed, first_seed + 6):
        folders.append(tmp_path / f"seed-{seed}")
        shutil.copytree(whole, folders[-1])
        damage(folders[-1] / "catalog" / "data.mdb", seed)
    done = subprocess.run(
        [sys.executable, __file__, *map(str, folders)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    answers = done.stdout.splitlines()
    assert (done.returncode, len(answers)) == (0, len(folders)), done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    for folder, answer in zip(folders, answers, strict=True):
        found = json.loads(answer)
        assert found["new"] == 5, f"{folder.name}: what is stored afterwards stays: {found}"
        assert found["hits"] <= stored + PAGES - 4, folder.name
        assert found["hits"] >= stored or found["said"], f"{folder.name}: what is lost is said"
        assert all("\n" not in line for line in found["said"])


@pytest.mark.slow
@pytest.mark.parametrize("prefix", [b"S", b"R", b"W", b"M"])
def test_a_record_that_many_pages_share_costs_none_of_them(tmp_path: Path, prefix: bytes) -> None:
    """A bad record of a segment took the whole file with it, that of a root all of its pages."""
    import lmdb

    folder = make(tmp_path / "store")
    with lmdb.open(str(folder / "catalog")) as catalog, catalog.begin(write=True) as transaction:
        key = next(key for key, _ in transaction.cursor() if key[:1] == prefix)
        value = bytearray(transaction.get(key))
        value[-1] ^= 1
        transaction.put(key, bytes(value))
    with Store.open(folder, **SIZES) as store:
        *_, found = store.verify()
        assert "rebuilt from page headers" in found.problems[0].what
        assert found.healthy
        session = store.session(SPEC)
        assert [load(session, prompt(chain, PAGES)) for chain in range(CHAINS - 1)] == [PAGES] * (
            CHAINS - 1
        )


if __name__ == "__main__":
    for each in sys.argv[1:]:
        sys.stdout.write(json.dumps(open_and_use(Path(each))) + "\n")
        sys.stdout.flush()
