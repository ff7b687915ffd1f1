"""`kvstore verify`: finds each kind of damage, repairs what can be, and disturbs nobody."""

from __future__ import annotations

import os
import random
from typing import TYPE_CHECKING, Any

import pytest
from command import run, run_json, shape
from known_pages import PAGE_BYTES, SPEC, load, prompt, save
from server_process import ServerProcess

from kvstore import Store
from kvstore.connect import connect
from kvstore.state import HOST

if TYPE_CHECKING:
    from pathlib import Path

    from kvstore.verification import Verification

SCHEMA = {
    "bad_pages": "int",
    "cut_off_pages": "int",
    "dropped_pages": "int",
    "finished": "bool",
    "healthy": "bool",
    "pages": "int",
    "pages_total": "int",
    "payload_bytes": "int",
    "problems": [
        {"kind": "str", "page": "str", "repaired": "bool", "tier": "str", "what": "str"},
    ],
    "problems_total": "int",
    "repaired": "int",
    "seconds": "float",
}
SIZES: dict[str, Any] = {"host_bytes": "8MiB", "disk_bytes": "64MiB"}


def last(store: Any, *, repair: bool = False) -> Verification:
    *_, found = store.verify(repair=repair)
    assert found.finished
    return found


def made(path: Path, chains: int = 4, pages: int = 6) -> Path:
    """A store directory of so many chains, closed."""
    with Store.open(path, **SIZES) as store:
        for seed in range(chains):
            save(store.session(SPEC), prompt(seed, pages), durable=True)
    return path


def flip(file: Path, at: int, bits: int = 0x10) -> None:
    with file.open("r+b") as opened:
        opened.seek(at)
        byte = opened.read(1)[0]
        opened.seek(at)
        opened.write(bytes([byte ^ bits]))


def payload_places(folder: Path) -> list[int]:
    """Offsets in the segment file at which the payloads of the pages of `made` begin."""
    content = (folder / "segment-00000001").read_bytes()
    first = prompt(0, 1).tobytes()
    return [at for at in range(0, len(content), 4096) if content[at : at + 8] == first[:8]]


def test_a_sound_store_is_found_to_be_that(tmp_path: Path) -> None:
    with Store.open(made(tmp_path / "s"), **SIZES) as store:
        assert load(store.session(SPEC), prompt(0, 6)) == 6
        found = last(store)
        assert (found.healthy, found.pages, found.problems) == (True, 24 + 6, ())
        assert found.payload_bytes == 30 * PAGE_BYTES
        assert found.pages_total == 30
        assert not store.state.index.leases


def test_a_flipped_bit_in_a_page_is_found_and_its_page_dropped_on_request(tmp_path: Path) -> None:
    folder = made(tmp_path / "s", chains=1)
    (place, *_) = payload_places(folder)
    flip(folder / "segment-00000001", place + 100)
    with Store.open(folder, **SIZES) as store:
        found = last(store)
        assert (found.bad_pages, found.healthy, found.dropped_pages) == (1, False, 0)
        (problem,) = found.problems
        assert (problem.tier, problem.repaired) == ("disk", False)
        assert "checksum" in problem.what
        assert store.stats().pages == 6, "without repair nothing changes"
        repaired = last(store, repair=True)
        assert (repaired.healthy, repaired.dropped_pages) == (True, 6)
        assert store.explain(prompt(0, 6), namespace=SPEC.namespace).departed[0].why == "damage"
        assert last(store).problems == ()
        store.check()


def test_a_torn_page_is_found(tmp_path: Path) -> None:
    """F3: half of the sectors are as they were before."""
    folder = made(tmp_path / "s", chains=1)
    (place, *_) = payload_places(folder)
    with (folder / "segment-00000001").open("r+b") as segment:
        segment.seek(place + 2048)
        segment.write(bytes(2048))
    with Store.open(folder, **SIZES) as store:
        assert (last(store).bad_pages, last(store, repair=True).healthy) == (1, True)


def test_a_damaged_header_and_a_misdirected_page_are_found(tmp_path: Path) -> None:
    folder = made(tmp_path / "s", chains=2, pages=1)
    segment = folder / "segment-00000001"
    first, second = (at for seed in range(2) for at in _headers_of(segment, seed))
    with segment.open("r+b") as opened:
        opened.seek(first)
        slot = opened.read(8192)
        opened.seek(second)
        opened.write(slot)
    flip(segment, first + 40)
    with Store.open(folder, **SIZES) as store:
        found = last(store)
        assert found.bad_pages == 2
        assert last(store, repair=True).healthy


def _headers_of(segment: Path, seed: int) -> list[int]:
    content = segment.read_bytes()
    head = prompt(seed, 1).tobytes()
    return [at - 4096 for at in range(4096, len(content), 4096) if content[at:].startswith(head)]


def test_a_good_copy_in_memory_is_written_over_a_bad_one_on_disk(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    with Store.open(folder, **SIZES) as store:
        session = store.session(SPEC)
        save(session, prompt(0, 6), durable=True)
        flip(folder / "segment-00000001", payload_places(folder)[0] + 9)
        found = last(store, repair=True)
        assert (found.bad_pages, found.dropped_pages, found.healthy) == (1, 0, True)
        assert "written again" in found.problems[0].what
        assert store.flush(10.0)
        assert last(store).problems == ()
        assert load(session, prompt(0, 6)) == 6
        store.check()
    with Store.open(folder, **SIZES) as store:
        assert load(store.session(SPEC), prompt(0, 6)) == 6


def test_a_flipped_bit_in_memory_is_found(tmp_path: Path) -> None:
    with Store.open(tmp_path / "s", **SIZES) as store:
        session = store.session(SPEC)
        save(session, prompt(0, 3), durable=True)
        state = store.state
        page = int(state.index.match(session.root, prompt(0, 3).tobytes())[1])
        assert state.host is not None
        state.host.view(int(state.index.table.slot[HOST][page]), 64)[7] ^= 1
        found = last(store, repair=True)
        assert (found.bad_pages, found.problems[0].tier) == (1, "host")
        assert load(session, prompt(0, 3)) == 1
        store.check()


@pytest.mark.parametrize("seed", range(4))
def test_a_flipped_bit_in_the_catalog_is_found_or_harmless(tmp_path: Path, seed: int) -> None:
    """F5: one bit of a page in use; what opening drops is said."""
    folder = made(tmp_path / "s")
    catalog = folder / "catalog" / "data.mdb"
    rng = random.Random(seed)
    content = catalog.read_bytes()
    used = [at for at in range(8192, len(content)) if content[at]]
    for at in rng.sample(used, 1):
        flip(catalog, at, 1 << rng.randrange(8))
    with Store.open(folder, **SIZES) as store:
        found = last(store)
        assert {each.kind for each in found.problems} <= {"start"}
        assert found.healthy, "opening sets it right"
        assert found.problems or store.stats().pages == 24, "what is lost is said"
        hits = [load(store.session(SPEC), prompt(chain, 6)) for chain in range(4)]
        assert sum(hits) == store.stats().pages
        store.check()


def test_a_catalog_that_is_cut_or_empty_is_said_to_be_rebuilt(tmp_path: Path) -> None:
    """F6."""
    for number, size in enumerate((0, 5000)):
        folder = made(tmp_path / f"s{number}")
        os.truncate(folder / "catalog" / "data.mdb", size)
        with Store.open(folder, **SIZES) as store:
            found = last(store)
            (problem,) = found.problems
            assert (problem.kind, problem.repaired, found.pages) == ("start", True, 24)
            assert "rebuilt from page headers" in problem.what


def test_a_segment_that_is_cut_is_found(tmp_path: Path) -> None:
    """F6, offline and while the store is open."""
    folder = made(tmp_path / "s")
    segment = folder / "segment-00000001"
    with Store.open(folder, **SIZES) as store:
        os.truncate(segment, segment.stat().st_size // 64)
        found = last(store)
        assert found.bad_pages > 0
        assert not found.healthy
        last(store, repair=True)
        store.state.index.check()
    with Store.open(folder, **SIZES) as store:
        found = last(store)
        assert all(load(store.session(SPEC), prompt(seed, 6)) in range(7) for seed in range(4))


def test_pages_that_leave_while_it_runs_are_no_problem(tmp_path: Path) -> None:
    from kvstore.removal import Selection

    with Store.open(made(tmp_path / "s", chains=40, pages=40), **SIZES) as store:
        steps = store.verify()
        store.evict(Selection(prefix=prompt(3, 1), root=store.root(SPEC.namespace)))
        *_, found = steps
        assert found.healthy
        assert found.pages == 39 * 40


def test_ending_early_gives_everything_back(tmp_path: Path) -> None:
    with Store.open(made(tmp_path / "s", chains=40, pages=40), **SIZES) as store:
        steps = store.verify()
        next(steps)
        steps.close()  # type: ignore[attr-defined] # it is a generator
        assert not store.state.index.leases


@pytest.mark.slow
def test_the_command_says_it_with_its_exit_code_on_a_directory_and_a_server(
    tmp_path: Path,
) -> None:
    folder = made(tmp_path / "s", chains=2)
    assert "All is well." in run("verify", str(folder))
    with ServerProcess(folder) as server:
        server.start()
        with connect(server.address, lookup_deadline_s=5.0) as remote:
            assert last(remote).healthy
        for place in payload_places(folder)[:1]:
            flip(folder / "segment-00000001", place + 5)
        found = run_json("verify", str(folder), code=1)
        assert shape(found) == SCHEMA
        assert found["bad_pages"] == 1
        assert "--repair" in run_any("verify", str(folder))
        assert run_json("verify", str(folder), "--repair")["healthy"] is True
        assert "All is well." in run("verify", str(folder))


def run_any(*arguments: str) -> str:
    import subprocess
    import sys

    done = subprocess.run(
        [sys.executable, "-m", "kvstore.cli", *arguments], capture_output=True, text=True
    )
    assert done.returncode == 1
    return done.stdout
