"""What is written to disk, on virtual time: bounds that must hold, the real store, the command."""

from __future__ import annotations

import json

import numpy as np
import pytest
from small_trace import records, small_trace
from typer.testing import CliRunner

from kvstore.cli_commands import app
from kvstore.errors import InvalidRequest
from kvstore.simulation import replay
from kvstore.simulation_tiers import replay_writes
from kvstore.spec import CacheSpec
from kvstore.store import Store
from kvstore.tiers.admission import ADMISSIONS
from kvstore.tiers.eviction import LruPolicy


def test_a_disk_for_everything_hits_everything_and_writes_each_block_once():
    trace = small_trace(3, 400)
    ceiling = replay(trace, LruPolicy(), trace.unique).hit_blocks
    for way in ("through", "back"):
        found = replay_writes(trace, LruPolicy(), 100, trace.unique, write_policy=way)
        assert found.hit_blocks == ceiling
        assert found.written_blocks <= trace.unique
    assert found.written_per_hit == found.written_blocks / found.hit_blocks


def test_filters_write_less_and_say_what_that_costs():
    trace = small_trace(3, 600)
    found = {
        name: replay_writes(trace, LruPolicy(), 60, 300, admission=name) for name in ADMISSIONS
    }
    always = found.pop("always")
    for name, each in found.items():
        assert each.written_blocks < always.written_blocks, name
        assert each.written_per_hit < always.written_per_hit, name
        assert each.hit_blocks > 0.5 * always.hit_blocks, name


@pytest.mark.slow
@pytest.mark.parametrize("admission", ADMISSIONS)
def test_the_store_writes_what_the_simulator_says(tmp_path, admission):
    trace = small_trace(5, 300)
    spec = CacheSpec.opaque("trace", page_tokens=1, page_bytes=4032)
    hits = 0
    with Store.open(
        tmp_path / "s", host_bytes="512KiB", disk_bytes="256MiB", policy="lru", admission=admission
    ) as store:
        session = store.session(spec)
        for request in range(trace.requests):
            path = trace.blocks[trace.starts[request] : trace.starts[request + 1]]
            with session.match(path) as found:
                hits += found.pages
                found.stage(10.0)
                while True:
                    with session.reserve(path, deadline_s=5.0) as run:
                        if not run.count:
                            break
                        run.commit()
            assert store.flush(20.0)
        written = store.stats().counters["disk_pages_written"]
        held = len(np.flatnonzero(store.state.in_tier(store.state.index.table.live(), 0)))
        store.check()
    said = replay_writes(trace, LruPolicy(), held, trace.unique, admission=admission)
    assert written == pytest.approx(said.written_blocks, rel=0.08)
    assert hits == pytest.approx(said.hit_blocks, rel=0.08)


def test_the_command_shows_each_filter_and_refuses_names_it_does_not_know(tmp_path):
    file = tmp_path / "trace.jsonl"
    file.write_text("".join(json.dumps(each) + "\n" for each in records(3, 100)))
    asked = ["simulate", str(file), "--capacity", "20", "--disk", "50%"]
    shown = CliRunner().invoke(app, asked)
    assert shown.exit_code == 0, shown.output
    assert all(name in shown.stdout for name in ADMISSIONS)
    answer = CliRunner().invoke(
        app, [*asked, "--json", "--admission", "ghost", "--write-policy", "back"]
    )
    (row,) = json.loads(answer.stdout)["results"]
    assert (row["admission"], row["write_policy"]) == ("ghost", "back")
    assert row["written_per_hit"] == row["written_blocks"] / row["hit_blocks"]
    for wrong in (["--admission", "x"], ["--write-policy", "x"], ["--policy", "belady"]):
        refused = CliRunner().invoke(app, [*asked, *wrong])
        assert isinstance(refused.exception, InvalidRequest)
