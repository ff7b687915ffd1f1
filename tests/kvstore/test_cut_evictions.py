"""An eviction that a kill cuts off: what it had wiped is gone and no damage, the rest is served."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from command import run, run_json
from disk_pages import Chains, Stored, read, write
from known_pages import PAGE_BYTES, SPEC, content, load, prompt, save

from kvstore import Store
from kvstore.tiers.disk_tier import DiskTier
from kvstore.tiers.tier import SLOT_INDEX_MASK, ReadStatus

if TYPE_CHECKING:
    from pathlib import Path

SIZES: dict[str, Any] = {"host_bytes": "8MiB", "disk_bytes": "64MiB"}
CHAINS, PAGES = 3, 6
WIPED = 8  # headers that are wiped before the kill, the deepest pages first

EVICTION = """
import os, signal, sys
from kvstore import Store
from kvstore.removal import Selection
from kvstore.tiers.file_layer import FileLayer

class Fatal(FileLayer):
    wipes = 0

    def pwritev(self, descriptor, buffers, offset):
        if not any(buffers[0][:8]):  # no magic: a header is wiped
            self.wipes += 1
            if self.wipes > int(sys.argv[2]):
                os.kill(os.getpid(), signal.SIGKILL)
        return super().pwritev(descriptor, buffers, offset)

store = Store.open(sys.argv[1], files=Fatal(), host_bytes="8MiB", disk_bytes="64MiB")
store.evict(Selection(everything=True))
"""


@pytest.fixture(params=["raw", "lossless", "encrypted"])
def cut_off(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A directory in which `evict --all` was killed between two headers."""
    settings = {"raw": {}, "lossless": {"disk_codec": "lossless"}, "encrypted": {"encrypt": True}}
    with Store.open(tmp_path / "s", **SIZES, **settings[request.param]) as store:
        for seed in range(CHAINS):
            save(store.session(SPEC), prompt(seed, PAGES), durable=True)
    command = [sys.executable, "-c", EVICTION, str(tmp_path / "s"), str(WIPED)]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    return tmp_path / "s"


@pytest.mark.slow
def test_verify_finishes_an_eviction_that_was_cut_off_and_calls_it_no_damage(cut_off: Path) -> None:
    found = run_json("verify", str(cut_off))
    assert (found["healthy"], found["problems"]) == (True, [])
    assert (found["cut_off_pages"], found["pages"]) == (WIPED, CHAINS * PAGES)
    assert f"{WIPED} pages of an eviction that was cut off" in run("verify", str(cut_off))
    said = run("verify", str(cut_off), "--repair")
    assert f"{WIPED} pages of an eviction that was cut off are gone" in said
    assert "WRONG" not in said
    found = run_json("verify", str(cut_off))
    assert (found["cut_off_pages"], found["pages"]) == (0, CHAINS * PAGES - WIPED)


@pytest.mark.slow
def test_pages_that_a_repair_cannot_drop_yet_are_counted_once(tmp_path: Path) -> None:
    """The next batch is read meanwhile, and its leases keep pages: each was counted with all below
    it, and again by itself.
    """
    pages = 3000
    with Store.open(tmp_path / "s", **SIZES) as store:
        for seed in range(pages // 100):
            assert save(store.session(SPEC), prompt(seed, 100), durable=True) == 100
    command = [sys.executable, "-c", EVICTION, str(tmp_path / "s"), str(pages - 10)]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    found = run_json("verify", str(tmp_path / "s"), "--repair")
    assert (found["cut_off_pages"], found["pages_total"]) == (pages - 10, pages)


@pytest.mark.slow
def test_pages_of_a_cut_off_eviction_are_misses_that_an_operator_asked_for(
    cut_off: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They were 'stale', counted as damage, and each had a warning."""
    caplog.set_level(logging.INFO, "kvstore")
    with Store.open(cut_off, **SIZES) as store:
        hits = [load(store.session(SPEC), prompt(seed, PAGES)) for seed in range(CHAINS)]
        assert sum(hits) == CHAINS * PAGES - WIPED
        counters = store.stats().to_dict()["counters"]
        assert (counters["stale_pages"], counters["corrupt_pages"]) == (0, 0)
        assert counters["left_operator"] == WIPED
        assert counters["left_damage"] == 0
        assert [save(store.session(SPEC), prompt(seed, PAGES)) for seed in range(CHAINS)] == [
            PAGES - count for count in hits
        ]
    said = [each.getMessage() for each in caplog.records if "cut off" in each.getMessage()]
    counts = [int(each.removeprefix("disk tier: ").partition(" ")[0]) for each in said]
    assert sum(counts) == WIPED, said
    assert not [each for each in caplog.records if each.levelno > logging.INFO]


def wipe(tmp_path: Path, item: Stored, *, header: bytes = b"\0" * 4096, flip: bool = False) -> None:
    [segment] = (tmp_path / "tier").glob("segment-*")
    with segment.open("r+b") as file:
        at = 4096 + (item.slot & SLOT_INDEX_MASK) * (4096 + len(item.payload))
        assert file.seek(at) == at
        assert file.read(8) == b"KVPAGE\r\n"
        file.seek(at)
        file.write(header)
        if flip:
            byte = file.read(1)[0]
            file.seek(at + 4096)
            file.write(bytes([byte ^ 1]))
        os.fsync(file.fileno())


def test_a_header_of_zeros_is_an_eviction_only_over_the_pages_own_bytes(tmp_path: Path) -> None:
    tier = DiskTier.open([tmp_path / "tier"], 64 << 20, load=True, direct=False)
    stored = Chains().chain(4)
    write(tier, stored)
    wipe(tmp_path, stored[0])
    wipe(tmp_path, stored[1], flip=True)
    wipe(tmp_path, stored[2], header=b"\0" * 8)
    found = [read(tier, item) for item in stored]
    assert found == [ReadStatus.WIPED, ReadStatus.STALE, ReadStatus.CORRUPT, ReadStatus.OK]
    assert (tier.counters.wiped_pages, tier.counters.stale_pages) == (1, 1)
    tier.close()


@pytest.mark.slow
def test_a_repair_wipes_the_headers_of_all_pages_below_a_wiped_one(tmp_path: Path) -> None:
    with Store.open(tmp_path / "s", **SIZES) as store:
        save(store.session(SPEC), prompt(0, PAGES), durable=True)
    segment = tmp_path / "s" / "segment-00000001"
    headers = segment.read_bytes().count(b"KVPAGE\r\n")
    assert headers == PAGES
    place = segment.read_bytes().index(content(prompt(0, PAGES), 0)[:PAGE_BYTES])
    with segment.open("r+b") as file:
        file.seek(place - 4096)
        file.write(bytes(4096))
    found = run_json("verify", str(tmp_path / "s"), "--repair")
    assert (found["cut_off_pages"], found["healthy"]) == (PAGES, True)
    assert segment.read_bytes().count(b"KVPAGE\r\n") == 0
