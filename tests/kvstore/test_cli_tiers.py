"""What tiers mean to `ls` and `evict`, through the real process and a real server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from command import run, run_json
from known_pages import PAGE_BYTES, SPEC, load, prompt, save
from server_process import ServerProcess

from kvstore import Store
from kvstore.connect import connect
from kvstore.errors import InvalidRequest
from kvstore.removal import Selection

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SIZES: Any = {"host_bytes": "4MiB", "disk_bytes": "64MiB"}


@pytest.fixture
def served(tmp_path: Path) -> Iterator[ServerProcess]:
    """A server with 5 and 3 pages on disk, of which the 3 are in memory too."""
    folder = tmp_path / "store"
    with Store.open(folder, **SIZES) as store:
        save(store.session(SPEC), prompt(0, 5), durable=True)
        save(store.session(SPEC), prompt(1, 3), durable=True)
    with ServerProcess(folder) as server:
        server.start()
        with connect(server.address, lookup_deadline_s=5.0) as store:
            assert load(store.session(SPEC), prompt(1, 3)) == 3  # type: ignore[arg-type]
            yield server


def sizes(listing: dict[str, Any]) -> list[tuple[int, int]]:
    return [(each["host_pages"], each["disk_pages"]) for each in listing["chains"]]


@pytest.mark.slow
def test_ls_sorts_and_filters_by_tier(served: ServerProcess) -> None:
    folder = str(served.directory)
    assert sizes(run_json("ls", folder)) == [(0, 5), (3, 3)]
    assert sizes(run_json("ls", folder, "--sort", "host")) == [(3, 3), (0, 5)]
    assert sizes(run_json("ls", folder, "--sort", "disk")) == [(0, 5), (3, 3)]
    only = run_json("ls", folder, "--tier", "host")
    assert (sizes(only), only["chains_total"]) == ([(3, 3)], 1)
    said = run("ls", folder, "--tier", "tape", code=2)
    assert "host, disk" in said


@pytest.mark.slow
def test_evicting_from_a_tier_leaves_the_other_copies(served: ServerProcess) -> None:
    folder = str(served.directory)
    dry = run_json("evict", folder, "--tier", "disk")
    assert (dry["dry_run"], dry["chains"], dry["pages"]) == (True, 2, 8)
    done = run_json("evict", folder, "--tier", "host", "--yes")
    assert (done["chains"], done["pages"], done["payload_bytes"]) == (1, 3, 3 * PAGE_BYTES)
    assert sizes(run_json("ls", folder)) == [(0, 5), (0, 3)]
    with connect(served.address, lookup_deadline_s=5.0) as store:
        session = store.session(SPEC)
        assert load(session, prompt(1, 3)) == 3  # type: ignore[arg-type]
        done = run_json("evict", folder, "--tier", "disk", "--yes")
        assert (done["pages"], done["dry_run"]) == (8, False)
        assert load(session, prompt(1, 3)) == 3, "the copies in memory stay"  # type: ignore[arg-type]
        assert load(session, prompt(0, 5)) == 0, "these were nowhere else"  # type: ignore[arg-type]
    assert run_json("verify", folder)["healthy"]


def test_leases_hold_and_what_is_selected_goes(tmp_path: Path) -> None:
    with Store.open(tmp_path, **SIZES) as store:
        session = store.session(SPEC)
        save(session, prompt(0, 3), durable=True)
        tail = Selection(tier="disk", prefix=prompt(0, 2), root=session.root)
        assert store.evict(tail).pages == 2, "the second page and what is below it"
        assert load(session, prompt(0, 3)) == 3
        assert store.evict(Selection(tier="disk")).pages == 1
        assert store.evict(Selection(tier="disk")).pages == 0
        with session.match(prompt(0, 2)):
            done = store.evict(Selection(tier="host"))
            assert (done.pages, done.kept_leased) == (1, 2)
        store.check()
        assert load(session, prompt(0, 3)) == 2


def test_a_hole_in_memory_keeps_what_is_nowhere_else(tmp_path: Path) -> None:
    """A page that only the arena has, with one below it that only the disk has."""
    with Store.open(tmp_path, **SIZES) as store:
        session = store.session(SPEC)
        save(session, prompt(0, 3), durable=True)
        table = store.state.index.table
        with store.state.lock:
            first, *below = store.state.index.match(session.root, prompt(0, 3)).tolist()
            store.state.leave_host(np.array(below[::-1], np.int32))
            store.state.leave_disk(np.array([first], np.int32))
        store.state.free_unused_slots()
        assert table.state[first] & 3 == 1
        done = store.evict(Selection(tier="host"))
        assert (done.pages, done.kept_above) == (0, 1)
        assert load(session, prompt(0, 3)) == 3
        store.check()


def test_a_tier_that_is_none_and_pins_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="host or disk"):
        Selection(tier="redis")
    with Store.open(None, host_bytes="4MiB") as store:
        with pytest.raises(InvalidRequest, match="pins back"):
            store.evict(Selection(tier="host"), include_pinned=True)
        with pytest.raises(InvalidRequest, match="a tenant only"):
            store.evict(Selection(tenant="default", tier="host"), erase_key=True)
        with pytest.raises(InvalidRequest, match="tier 'tape'"):
            store.chains(tier="tape")
