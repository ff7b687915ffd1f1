"""The benches of eviction, tiny: every comparator runs, and none passes the bound."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from small_trace import records

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.fixture
def trace(tmp_path):
    file = tmp_path / "t.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in records(1, 300)))
    return file


def bench(name, *arguments):
    command = [sys.executable, str(BENCH / name), *map(str, arguments), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)
    return json.loads(done.stdout)


@pytest.mark.slow
def test_every_policy_lies_between_nothing_and_the_bound(trace):
    found = bench("eviction.py", trace, "--capacity", "60,200")["block"]
    assert len(found) == 14
    for name, ratios in found.items():
        assert 0.2 < ratios[0] <= found["belady"][0], name
        assert ratios[0] <= ratios[1] + 0.01, name


@pytest.mark.slow
def test_the_real_store_hits_what_the_simulator_says(trace):
    found = bench("eviction_store.py", trace, "--memory", "--capacity", "200", "--policy", "lru")[
        "results"
    ]["lru"]
    assert abs(found["off"]) <= 0.005
    assert found["evicted"] > 100


def run_bench(name, *arguments):
    command = [sys.executable, str(BENCH / name), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("workload", ["agents", "private", "subagents", "fan-out"])
def test_csl_loses_nothing_to_lru_on_agent_sessions(workload):
    """Policies that protect what was used often lose there: such pages are about to be useless."""
    found = json.loads(
        run_bench(
            "eviction.py",
            *("--workload", workload, "--requests", "1200", "--capacity", "5%,10%"),
            *("--policy", "lru", "--policy", "csl", "--json"),
        )
    )["block"]
    for lru, csl in zip(found["lru"], found["csl"], strict=True):
        assert csl >= lru - 0.003


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_csl_holds_on_long_coding_sessions_where_frequency_loses_points(seed):
    names = ("lru", "csl", "lfu-da", "slru")
    chosen = [word for name in names for word in ("--policy", name)]
    trace = ("--workload", "coding", "--seed", seed)
    found = json.loads(run_bench("eviction.py", *trace, "--capacity", "4%", *chosen, "--json"))
    ratio = {name: found["block"][name][0] for name in names}
    assert ratio["lfu-da"] < ratio["lru"] - 0.04
    assert ratio["slru"] < ratio["lru"] - 0.03
    assert ratio["csl"] >= ratio["lru"] - 0.003


@pytest.mark.slow
def test_csl_holds_on_sessions_with_the_tails_that_were_published():
    names = ("lru", "csl", "lfu-da", "slru")
    chosen = [word for name in names for word in ("--policy", name)]
    trace = ("--workload", "sessions", "--capacity", "2%,5%,10%,20%")
    block = json.loads(run_bench("eviction.py", *trace, *chosen, "--json"))["block"]
    for lru, csl in zip(block["lru"], block["csl"], strict=True):
        assert csl >= lru - 0.003
    assert block["lfu-da"][0] < block["lru"][0] - 0.01
    assert block["slru"][0] < block["lru"][0] - 0.01


def test_sessions_are_as_long_and_as_far_apart_as_published():
    """Steps of a session and tokens appended a step, p50 and p90, against the sources' figures."""
    code = (
        "import random, statistics as s, agent_sessions as a; r = random.Random(1); "
        "print(*[s.quantiles([each.draw(r) for _ in range(4000)], n=10)[at] for each, at in "
        "((a.STEPS, 4), (a.STEPS, 8), (a.APPENDED_TOKENS, 4), (a.APPENDED_TOKENS, 8))])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=BENCH, capture_output=True, text=True, check=True
    )
    found = [float(each) for each in done.stdout.split()]
    for value, published in zip(found, (16, 150, 800, 4500), strict=True):
        assert 0.85 * published < value < 1.15 * published


@pytest.mark.slow
@pytest.mark.parametrize("workload", ["scan", "loop", "documents", "chats"])
def test_csl_is_at_least_lru_on_scans_loops_and_documents(workload):
    found = json.loads(
        run_bench(
            "eviction.py",
            *("--workload", workload, "--requests", "700", "--capacity", "10%"),
            *("--policy", "lru", "--policy", "csl", "--json"),
        )
    )["block"]
    for lru, csl in zip(found["lru"], found["csl"], strict=True):
        assert csl >= lru - 0.003


def test_a_workload_is_the_same_for_the_same_seed():
    lines = run_bench("workloads.py", "subagents", "--requests", "40").splitlines()
    assert lines == run_bench("workloads.py", "subagents", "--requests", "40").splitlines()
    assert (
        lines
        != run_bench("workloads.py", "subagents", "--requests", "40", "--seed", "2").splitlines()
    )
    assert json.loads(lines[0])["hash_ids"]


@pytest.mark.slow
def test_the_benches_of_auto_and_of_what_a_policy_costs_run():
    found = bench("shadow.py", "--workload", "loop", "--capacity", "10%")["results"][0]
    assert found["error_max"] < 0.25
    assert found["shadow_us_per_reference"] > 0.0
    cost = bench("policy_cost.py", "--lookups", "50")["policies"]
    assert all(0 < each["policy_us_p50"] < each["lookup_us_p50"] for each in cost.values())
