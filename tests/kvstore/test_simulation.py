"""The simulator against brute force, the real index, golden counts, and real traces if given."""

from __future__ import annotations

import gzip
import json
import os
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_trace import records, small_trace
from typer.testing import CliRunner

from kvstore.belady import replay_belady
from kvstore.cli_commands import app
from kvstore.cli_replay import parse_sizes
from kvstore.errors import InvalidRequest
from kvstore.plot import line_chart
from kvstore.simulation import Replay, replay
from kvstore.simulation_index import IndexReplay
from kvstore.tiers.eviction import LruPolicy
from kvstore.tiers.eviction_hints import HintedPolicy
from kvstore.tiers.policies import POLICIES, make_policy
from kvstore.trace import TraceBuilder, read_trace

TRACES = os.environ.get("TEST_TRACES") or os.environ.get("KVSTORE_TRACES", "")


def brute_lru(trace, capacity):
    """Leaf LRU as a search over all resident blocks."""
    last: dict[int, int] = {}
    hits = []
    for request in range(trace.requests):
        path = trace.blocks[trace.starts[request] : trace.starts[request + 1]].tolist()
        hit = 0
        while hit < len(path) and path[hit] in last:
            last[path[hit]] = request
            hit += 1
        new = path[hit:capacity] if capacity > hit else []
        while len(last) + len(new) > capacity:
            parents = {int(trace.parent[block]) for block in last}
            free = [b for b in last if b not in parents and b not in path[:hit]]
            if not free:
                new = new[: capacity - len(last)]
                break
            del last[min(free, key=last.__getitem__)]
        last.update(dict.fromkeys(new, request))
        hits.append(hit)
    return hits


def trace_of(paths):
    builder = TraceBuilder("generated")
    for number, path in enumerate(paths):
        ids = [hash(tuple(path[: end + 1])) for end in range(len(path))]
        builder.add({"timestamp": 1000 * number, "hash_ids": ids})
    return builder.done()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=40),
    st.integers(1, 12),
)
def test_lru_is_what_a_search_over_all_blocks_finds(paths, capacity):
    trace = trace_of(paths)
    run = Replay(trace, LruPolicy(), capacity)
    found = []
    for request in range(trace.requests):
        found.append(run.step(request))
        run.tree.check()
        assert run.tree.used <= capacity
    assert found == brute_lru(trace, capacity)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=40),
    st.integers(1, 12),
    st.sampled_from(POLICIES),
)
def test_no_policy_hits_more_than_the_bound_or_leaves_a_hole(paths, capacity, name):
    trace = trace_of(paths)
    run = Replay(trace, make_policy(name, capacity), capacity)
    hits = 0
    for request in range(trace.requests):
        hits += run.step(request)
        run.tree.check()
        assert run.tree.used <= capacity
    assert hits <= replay_belady(trace, capacity).hit_blocks


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.slow
def test_the_real_index_hits_the_same_at_every_request(name):
    trace = small_trace(3, 400)
    fast = Replay(trace, make_policy(name, 200), 200)
    real = IndexReplay(trace, make_policy(name, 200), 200)
    for request in range(trace.requests):
        assert fast.step(request) == real.step(request), f"request {request}"
    fast.tree.check()
    real.index.check()
    assert fast.evicted == real.evicted > 100


@pytest.mark.parametrize("name", POLICIES)
def test_hints_that_nobody_gave_change_nothing(name):
    trace = small_trace(4, 200)
    plain = replay(trace, make_policy(name, 150), 150)
    hinted = replay(trace, HintedPolicy(make_policy(name, 150)), 150)
    assert plain.hit_blocks == hinted.hit_blocks


GOLDEN = {"lru": 4187, "csl": 4212, "arc": 4038, "gdsf": 4045, "belady": 4760}


@pytest.mark.parametrize("name", GOLDEN)
def test_hit_counts_stay_what_they_were(name):
    """Golden: a change of these numbers is a change of a policy, to be meant and explained."""
    trace = small_trace()
    if name == "belady":
        hits = replay_belady(trace, 150).hit_blocks
    else:
        hits = replay(trace, make_policy(name, 150), 150).hit_blocks
    assert hits == GOLDEN[name]


def test_hits_are_weighed_by_blocks_tokens_and_work_from_the_warm_up_on():
    builder = TraceBuilder("weighed")
    for time_ms, ids, length in ((0, [1, 2], 700), (1000, [1, 2], 700), (2000, [1], 512)):
        builder.add({"timestamp": time_ms, "hash_ids": ids, "input_length": length})
    trace = builder.done()
    whole = replay(trace, LruPolicy(), 10)
    assert (whole.hit_blocks, whole.references, whole.hit_tokens, whole.tokens) == (
        3,
        5,
        1212,
        1912,
    )
    late = replay(trace, LruPolicy(), 10, warmup_s=1.5)
    assert (late.requests, late.hit_blocks, late.references) == (1, 1, 1)
    assert late.compute_ratio == pytest.approx(1.0)


def write_lines(file: Path, lines: list[object]) -> Path:
    text = "".join(json.dumps(line) + "\n" for line in lines)
    file.write_bytes(gzip.compress(text.encode()) if file.suffix == ".gz" else text.encode())
    return file


def test_a_trace_is_read_plain_and_zipped_alike(tmp_path):
    lines = records(2, 50)
    plain = read_trace(write_lines(tmp_path / "a.jsonl", lines))
    zipped = read_trace(write_lines(tmp_path / "a.jsonl.gz", lines))
    assert plain.blocks.tolist() == zipped.blocks.tolist()
    assert (np.diff(plain.times_s) > 0).all()


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ({"timestamp": 1}, "hash_ids are needed"),
        ({"timestamp": 1, "hash_ids": [1, 1]}, "twice"),
        ({"timestamp": 1, "hash_ids": [9, 2]}, "comes after another"),
        ({"timestamp": 1, "hash_ids": [5], "input_length": 3, "block_tokens": 0}, "block_tokens"),
        ([1], "not a JSON object"),
    ],
)
def test_what_is_no_trace_is_refused_with_its_line(tmp_path, line, why):
    file = write_lines(tmp_path / "bad.jsonl", [{"timestamp": 0, "hash_ids": [1, 2]}, line])
    with pytest.raises(InvalidRequest, match=f"line 2: .*{why}"):
        read_trace(file)


def test_sizes_are_numbers_or_parts_of_the_unique_blocks():
    assert parse_sizes("1000, 5%,1_000", 40_000) == [1000, 2000, 1000]
    for bad in ("0", "x", "-5%", "1e400%"):
        with pytest.raises(InvalidRequest, match="--capacity"):
            parse_sizes(bad, 40_000)


def test_the_command_prints_json_and_draws_a_plot(tmp_path):
    file = write_lines(tmp_path / "t.jsonl", records(1))
    plot = tmp_path / "plot.svg"
    asked = [
        "simulate",
        str(file),
        "--policy",
        "lru",
        "--policy",
        "belady",
        "--capacity",
        "150,20%",
    ]
    done = CliRunner().invoke(app, [*asked, "--json", "--plot", str(plot)])
    assert done.exit_code == 0, done.output
    results = json.loads(done.stdout)["results"]
    assert [each["policy"] for each in results] == ["lru", "lru", "belady", "belady"]
    assert results[0]["hit_blocks"] == GOLDEN["lru"]
    drawn = ElementTree.fromstring(plot.read_text())  # noqa: S314 - our own file
    texts = [each.text for each in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert {"lru", "belady", "block hit ratio", "150"} <= set(texts)
    assert len(list(drawn.iter("{http://www.w3.org/2000/svg}circle"))) == 2 * 2 + 2
    table = CliRunner().invoke(app, asked)
    assert "belady" in table.stdout
    assert "warm-up" in table.stdout


def test_a_png_plot_is_a_picture_and_other_endings_are_refused(tmp_path):
    pytest.importorskip("matplotlib", reason="NO MATPLOTLIB: pip install 'kvstore-llm[plot]'")
    file = write_lines(tmp_path / "t.jsonl", records(1, 60))
    asked = ["simulate", str(file), "--capacity", "10,50%", "--plot"]
    done = CliRunner().invoke(app, [*asked, str(tmp_path / "plot.png")])
    assert done.exit_code == 0, done.output
    content = (tmp_path / "plot.png").read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = (int.from_bytes(content[at : at + 4], "big") for at in (16, 20))
    assert (width, height) == (720, 440)
    for wrong in (["plot.pdf"], [str(tmp_path / "no" / "folder.svg")], ["a.svg", "--disk", "9"]):
        refused = CliRunner().invoke(app, [*asked, *wrong])
        assert isinstance(refused.exception, InvalidRequest), refused.output


def test_progress_is_told_while_a_trace_is_read_and_replayed(tmp_path):
    file = write_lines(tmp_path / "t.jsonl", records(1, 1200))
    lines, requests = [], []
    trace = read_trace(file, lines.append)
    replay(trace, LruPolicy(), 50, progress=requests.append)
    assert lines == [1000]
    assert requests == [0, 500, 1000]


def test_a_chart_escapes_names_and_keeps_points_inside():
    chart = line_chart("a<b", "x", "y", {"p&q": [(10.0, 0.2), (1000.0, 0.9)]})
    assert "a&lt;b" in chart
    assert "p&amp;q" in chart
    assert 'cx="60.0"' in chart
    assert 'cx="570.0"' in chart


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not TRACES, reason="NO TRACES: TEST_TRACES names no folder of them")
@pytest.mark.parametrize(
    ("name", "sizes", "lru", "belady"),
    [
        (
            "conversation",
            (1000, 10_000, 30_000, 50_000, 100_000),
            (0.0445, 0.2116, 0.3257, 0.3546, 0.3637),
            (0.1907, 0.3664, 0.3664, 0.3664, 0.3664),
        ),
        (
            "synthetic",
            (1000, 10_000, 30_000),
            (0.0841, 0.4239, 0.6242),
            (0.2767, 0.6180, 0.6396),
        ),
    ],
)
def test_published_traces_give_known_ratios(name, sizes, lru, belady):
    trace = read_trace(Path(TRACES) / f"{name}_trace.jsonl")
    for size, by_lru, by_belady in zip(sizes, lru, belady, strict=True):
        assert replay(trace, LruPolicy(), size).block_ratio == pytest.approx(by_lru, abs=2e-4)
        assert replay_belady(trace, size).block_ratio == pytest.approx(by_belady, abs=2e-4)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not TRACES, reason="NO TRACES: TEST_TRACES names no folder of them")
@pytest.mark.parametrize(
    ("name", "parts", "bars"),
    [
        ("conversation", (2, 5, 10, 20), (0.138, 0.216, 0.288, 0.342)),
        ("synthetic", (5, 10, 25, 50), (0.163, 0.275, 0.455, 0.589)),
    ],
)
def test_the_default_policy_passes_its_bars_on_published_traces(name, parts, bars):
    trace = read_trace(Path(TRACES) / f"{name}_trace.jsonl")
    for part, bar in zip(parts, bars, strict=True):
        size = trace.unique * part // 100
        found = replay(trace, make_policy("csl", size), size).block_ratio
        assert found >= bar, f"{part} %: {found:.4f}"
        assert found >= replay(trace, LruPolicy(), size).block_ratio - 0.003


def test_hints_of_a_queue_beat_statistics_and_a_longer_queue_beats_a_shorter_one():
    trace = small_trace(4, 400)
    plain, near, far = (
        replay(trace, HintedPolicy(LruPolicy()), 80, lookahead=queue).hit_blocks
        for queue in (0, 8, 64)
    )
    assert plain < near < far <= replay_belady(trace, 80).hit_blocks
