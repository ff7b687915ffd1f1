"""Memory before a disk, replayed: whole chains, one tier by itself, the command."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_trace import records, small_trace, trace_of
from typer.testing import CliRunner

from kvstore.cli_commands import app
from kvstore.cli_writes import WRITE_POLICIES
from kvstore.prefix_index.page_table import HOST
from kvstore.simulation import replay
from kvstore.simulation_tiers import TieredReplay, replay_tiers
from kvstore.tiers.admission import ADMISSIONS
from kvstore.tiers.eviction import LruPolicy
from kvstore.tiers.policies import CANDIDATES, POLICIES, make_policy


@settings(max_examples=120, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=40),
    st.integers(1, 8),
    st.integers(1, 14),
    st.sampled_from(POLICIES),
    st.sampled_from([None, *CANDIDATES]),
    st.sampled_from(WRITE_POLICIES),
    st.sampled_from(ADMISSIONS),
)
def test_both_tiers_hold_whole_chains_within_their_sizes(
    paths, memory, disk, name, other, way, admission
):
    trace = trace_of(paths)
    run = TieredReplay(
        trace,
        make_policy(name, disk),
        memory,
        disk,
        host_policy=make_policy(other, memory) if other else None,
        write_policy=way,
        admission=admission,
    )
    hits = 0
    for request in range(trace.requests):
        before = {tier: tree.resident.copy() for tier, tree in run.trees.items()}
        path = trace.blocks[trace.starts[request] : trace.starts[request + 1]].tolist()
        depth = {
            tier: next((at for at, block in enumerate(path) if not here[block]), len(path))
            for tier, here in before.items()
        }
        assert run.step(request) == (max(depth.values()), depth[HOST])
        hits += max(depth.values())
        run.check()
        if memory >= len(path):
            assert run.trees[HOST].hit(trace.blocks[trace.starts[request] :][: len(path)]) == len(
                path
            )
    ceiling = replay(trace, LruPolicy(), trace.unique + 1).hit_blocks
    assert run.hits_disk <= run.hits == hits <= ceiling


@pytest.mark.parametrize("name", ["lru", "gdsf"])
def test_a_disk_alone_decides_what_is_hit_and_memory_what_is_hit_there(name):
    """With a memory policy of its own, each tier of LRU's kind is as it would be by itself."""
    trace = small_trace(3, 300)
    both = replay_tiers(
        trace, make_policy(name, 400), 100, 400, host_policy=make_policy("lru", 100)
    )
    alone = replay(trace, make_policy(name, 400), 400)
    memory = replay(trace, make_policy("lru", 100), 100)
    assert both.host_capacity == 100
    assert both.hit_blocks == pytest.approx(alone.hit_blocks, rel=0.001)
    assert both.host_block_ratio == pytest.approx(memory.block_ratio, abs=0.001)
    assert both.policy == f"lru > {name}"


@pytest.mark.slow
def test_one_policy_for_both_tiers_hits_what_it_hits_with_the_disk_alone():
    trace = small_trace(4, 500)
    for name in CANDIDATES:
        both = replay_tiers(trace, make_policy(name, 400), 100, 400)
        alone = replay(trace, make_policy(name, 400), 400)
        assert both.block_ratio == pytest.approx(alone.block_ratio, abs=0.02), name
        assert 0.3 * both.block_ratio < both.host_block_ratio < both.block_ratio, name


def test_the_command_takes_memory_before_a_disk_and_refuses_what_it_cannot_replay(tmp_path):
    file = tmp_path / "t.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in records(1, 150)))
    asked = ["simulate", str(file), "--capacity", "30%", "--host-capacity", "5%"]
    done = CliRunner().invoke(app, [*asked, "--policy", "csl", "--host-policy", "lru", "--json"])
    assert done.exit_code == 0, done.output
    (found,) = json.loads(done.stdout)["results"]
    assert found["policy"] == "lru > csl"
    assert 0 < found["host_block_ratio"] < found["block_ratio"]
    table = CliRunner().invoke(app, [*asked, "--policy", "lru"])
    assert "memory" in table.stdout
    assert CliRunner().invoke(app, [*asked, "--policy", "belady"]).exit_code != 0
    assert CliRunner().invoke(app, [*asked[:4], "--host-policy", "lru"]).exit_code != 0
