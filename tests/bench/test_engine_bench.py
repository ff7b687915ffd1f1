"""bench/engine.py: what it asks, what it calls wrong; and it runs, tiny, where there is a vLLM."""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"
MODELLESS = BENCH.parent / "tests" / "support" / "modelless_engine.py"
TEXT = range(50_000)
ALL = ("none", "vllm", "lmcache", "embedded", "service", "restart")


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Its modules by name; they import each other as scripts do."""
    monkeypatch.syspath_prepend(str(BENCH))
    return lambda name: importlib.import_module(name)


def made(bench: Any, seed: int = 0) -> dict[str, Any]:
    workloads = bench("engine_workloads")
    found = workloads.make_workloads(TEXT, workloads.Size(), seed)
    return {each.name: each for each in found}


def shared(one: list[int], other: list[int]) -> int:
    """How many leading tokens two prompts have in common."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (mine, theirs) in pairs if mine != theirs), min(len(one), len(other)))


def test_the_same_seed_asks_the_same_and_another_one_does_not(bench: Any) -> None:
    assert made(bench, 3) == made(bench, 3)
    assert made(bench, 3)["tile"] != made(bench, 4)["tile"]


def test_documents_come_again_in_the_order_of_their_workload_with_new_questions(bench: Any) -> None:
    size = bench("engine_workloads").Size()
    workloads = made(bench)
    [fill] = workloads["tile"].fill
    for asked in workloads["tile"].ask:
        for first, again in zip(fill, asked, strict=True):
            assert shared(first, again) == size.document
    stored = [prompt[: size.document] for prompt in fill]
    shuffled = [prompt[: size.document] for each in workloads["random"].ask for prompt in each]
    assert sorted(shuffled) == sorted(stored * size.repeats)
    assert shuffled != stored * size.repeats


def test_chats_go_on_where_they_were_and_nothing_unique_begins_like_another(bench: Any) -> None:
    workloads = made(bench)
    chat, unique = workloads["chat"], workloads["unique"]
    rounds = [*chat.fill, *chat.ask]
    for before, after in pairwise(rounds):
        for history, longer in zip(before, after, strict=True):
            assert longer[: len(history)] == history
            assert len(longer) > len(history)
    everything = [prompt for w in workloads.values() for each in w.ask for prompt in each]
    for prompt in (prompt for each in unique.ask for prompt in each):
        assert max(shared(prompt, other) for other in everything if other is not prompt) < 8


def test_rag_and_system_prompts_repeat_what_was_stored(bench: Any) -> None:
    size = bench("engine_workloads").Size()
    workloads = made(bench)
    stored = [prompt for each in workloads["system"].fill for prompt in each]
    for prompt in (prompt for each in workloads["system"].ask for prompt in each):
        assert max(shared(prompt, other) for other in stored) == size.prefix
    stored = [prompt for each in workloads["rag"].fill for prompt in each]
    asked = [prompt for each in workloads["rag"].ask for prompt in each]
    alike = [max(shared(prompt, other) for other in stored) // size.passage for prompt in asked]
    assert any(alike)
    assert len({*alike}) > 1, "the order of the passages counts"


def test_a_workload_alone_brings_what_it_builds_on_and_all_of_them_ask_it_once(bench: Any) -> None:
    fills, workloads = bench("engine_workloads").fills, made(bench)
    for name, workload in workloads.items():
        stored = [prompt for each in fills([workload]) for prompt in each]
        hits = [
            max((shared(prompt, other) for other in stored), default=0)
            for each in workload.ask
            for prompt in each
        ]
        assert (max(hits) > 128) == (name != "unique"), name
    both = [workloads["tile"], workloads["random"]]
    assert fills(both) == list(workloads["tile"].fill)


def test_what_a_cache_without_limit_reuses_is_counted_in_whole_blocks(bench: Any) -> None:
    workload = bench("engine_workloads").Workload
    long, other = list(range(300)), [7, *range(299)]
    asked = [long, [*long[:200], 1, 2], long[:256], other, [*other, 5]]
    found = bench("engine_workloads").reusable(
        [workload("a", "A", ([long],), (asked,)), workload("b", "B", (), ([[*long]],))], 128
    )
    # The last token is always computed: of 256 stored ones the second block is computed again.
    assert found == {"a": 256 + 128 + 128 + 0 + 256, "b": 256}


def test_an_answer_is_wrong_only_where_both_were_sure(bench: Any) -> None:
    report, answer = bench("engine_report"), bench("engine_arms").Answer
    reference = answer(1.0, 10, 0, 0, (1, 2, 3), (0.9, 0.9, 0.9))
    assert not report.is_wrong(reference, reference)
    assert report.is_wrong(replace(reference, tokens=(1, 5, 3)), reference)
    close = replace(reference, tokens=(1, 5, 9), margins=(0.9, 0.1, 0.9))
    assert not report.is_wrong(close, reference), "what follows a close call is another text"
    assert report.is_wrong(replace(reference, tokens=(1, 2)), reference)


def results(bench: Any, times: dict[str, float], reused: dict[str, int]) -> Any:
    """One workload, six prompts, and so many seconds and reused tokens an arm."""
    results, answer = bench("engine_results"), bench("engine_arms").Answer
    cells = {}
    for arm, ttft_s in times.items():
        cells[arm] = results.Cell(arm)
        each = answer(ttft_s, 1000, reused[arm], 0, (1, 2), (0.9, 0.9))
        cells[arm].add([each] * 6, 6 * ttft_s)
    return {"tile": [cells]}


def test_budgets_are_kept_or_missed_and_peers_have_none(bench: Any) -> None:
    report = bench("engine_report")
    times = {"none": 9.0, "vllm": 1.0, "lmcache": 2.0, "embedded": 1.2, "restart": 1.4}
    reused = {"none": 0, "vllm": 900, "lmcache": 768, "embedded": 896, "restart": 450}
    lines = report.verdicts(report.ratios_of(results(bench, times, reused)))
    said = {line.split()[0]: line for line in lines}
    assert said["engine_tile_embedded_over_vllm"].endswith("kept")
    assert said["engine_tile_restart_over_vllm"].endswith("MISSED")
    assert said["engine_tile_lmcache_over_vllm"].endswith("no budget")
    assert said["engine_tile_restart_hits"].endswith("MISSED")


def test_a_store_that_did_not_keep_all_that_was_new_misses_its_budget(bench: Any) -> None:
    report = bench("engine_report")
    for kept, said in ((700, "kept"), (693, "kept"), (680, "MISSED")):
        found = {
            "unique": results(bench, {"vllm": 1.0, "embedded": 1.0}, {"vllm": 0, "embedded": 0})
        }
        found["unique"] = found["unique"]["tile"]
        cell = found["unique"][0]["embedded"]
        cell.kept_pages, cell.whole_pages = kept, 700
        lines = {line.split()[0]: line for line in report.verdicts(report.ratios_of(found))}
        assert lines["engine_unique_embedded_saved"].endswith(said)


def test_a_reference_that_had_to_let_blocks_go_is_told(bench: Any) -> None:
    report = bench("engine_report")
    rows = report.rows_of(
        results(bench, {"none": 1.0, "vllm": 1.0}, {"none": 0, "vllm": 90}), "none"
    )
    assert report.not_unlimited(rows, {"tile": 6 * 90}) == []
    [said] = report.not_unlimited(rows, {"tile": 6 * 90 + 128})
    assert "540 tokens of tile" in said


def test_results_come_back_from_their_file_and_join_by_workload_and_arms(
    bench: Any, tmp_path: Path
) -> None:
    kept = bench("engine_results")
    file, about = tmp_path / "results.json", {"seed": 0, "machine": "here"}
    first = results(bench, {"none": 9.0, "vllm": 1.0, "embedded": 1.2}, dict.fromkeys(ALL, 7))
    second = results(bench, {"vllm": 1.0, "service": 1.4}, dict.fromkeys(ALL, 8))
    old = {"tile": first["tile"] + second["tile"], "chat": first["tile"]}
    kept.write(file, about, old, {"skipped": {"lmcache": "not here"}})
    again, notes = kept.read(file, about)
    assert again == old
    assert notes["skipped"] == {"lmcache": "not here"}
    new = results(bench, {"vllm": 1.1, "service": 1.3}, dict.fromkeys(ALL, 9))
    found = kept.joined(again, new)
    assert found["chat"] == first["tile"]
    assert found["tile"] == [*first["tile"], *new["tile"]], "that of the same arms is replaced"


@pytest.mark.parametrize("about", [{"seed": 1, "machine": "here"}, {"seed": 0, "machine": "there"}])
def test_results_of_another_kind_of_run_are_not_joined(
    bench: Any, tmp_path: Path, about: dict[str, object]
) -> None:
    kept = bench("engine_results")
    file = tmp_path / "results.json"
    kept.write(file, {"seed": 0, "machine": "here"}, {}, {})
    with pytest.raises(kept.OtherRunError, match="not to be joined"):
        kept.read(file, about)


def test_the_short_form_has_a_line_for_each_workload_and_tells_hits_after_a_restart(
    bench: Any,
) -> None:
    report, workloads = bench("engine_report"), made(bench)
    times = {"none": 9.0, "vllm": 1.0, "embedded": 1.2, "restart": 1.4}
    group = results(bench, times, {"none": 0, "vllm": 900, "embedded": 896, "restart": 873})
    ratios = report.ratios_of({"tile": group["tile"], "unique": group["tile"]})
    said = report.short(ratios, [workloads["tile"], workloads["unique"]], "Here")
    assert "| | no cache | kvstore, a directory | kvstore, after kill -9 |" in said
    assert "| Long documents, tile by tile | 9.00 | 1.20 | 1.40 |" in said
    assert "| 100 % unique prompts | 9.00 | 1.20 | 1.40 |" in said, "times, not speeds"
    assert "it reuses 97 % of the tokens" in said
    assert "**Missed**: `engine_tile_restart_over_vllm` 1.400 (<= 1.3)" in said
    assert "embedded_over_vllm` 1.200" not in said, "within its budget"


def test_the_readme_says_of_engines_what_their_page_says(bench: Any) -> None:
    block, page = bench("readme_block"), BENCH.parent / "docs" / "engine.md"
    said = block.block_of((BENCH.parent / "README.md").read_text(), "engine.md")
    short = block.short_of(page.read_text()) if page.exists() else ""
    assert said == (f"{bench('engine').PICTURE}\n\n{short}" if short else "")


def test_a_reference_that_was_asked_less_is_compared_with_what_it_was_asked(bench: Any) -> None:
    report = bench("engine_report")
    found = results(bench, {"none": 9.0, "vllm": 1.0}, {"none": 0, "vllm": 900})
    [cells] = found["tile"]
    del cells["none"].answers[2:]
    ratio = report.ratios_of(found)["engine_tile_none_over_vllm"]
    assert (ratio.median, ratio.pairs) == (9.0, 2)
    none, own = report.rows_of(found, "none")
    assert (own.same, own.compared, own.asked) == (2, 2, 6)
    text = report.table([none, own], list(made(bench).values()))
    assert "6 prompts, 6,000 tokens" in text
    assert "| 2 of 2 |" in text
    cells["vllm"].alone = True
    assert report.rows_of(found, "none")[1].same is None, "its prompts were others"


def test_without_a_reference_no_answer_is_called_the_same(bench: Any) -> None:
    report = bench("engine_report")
    found = results(bench, {"vllm": 1.0, "embedded": 1.0}, {"vllm": 900, "embedded": 896})
    rows = report.rows_of(found, "none")
    assert {row.same for row in rows} == {None}
    assert "| 90 % | - | - |" in report.table(rows, list(made(bench).values()))


def test_the_drawing_is_well_formed_and_fits_light_and_dark_pages(bench: Any) -> None:
    report = bench("engine_report")
    times, reused = {"none": 2.0, "vllm": 0.5}, {"none": 0, "vllm": 900}
    rows = report.rows_of(results(bench, times, reused), "none")
    text = report.drawing(rows, list(made(bench).values()), "a machine & more")
    bars = [each for each in ET.fromstring(text).iter() if each.tag.endswith("rect")]  # noqa: S314 - our own
    assert [float(each.attrib["width"]) for each in bars] == [430.0, 107.5]
    assert "a machine &amp; more" in text
    assert "prefers-color-scheme:dark" in text
    assert "script" not in text


def run(directory: Path, environment: dict[str, str], *options: str) -> tuple[Any, str]:
    """The one line and what was said beside it."""
    command = [sys.executable, str(BENCH / "engine.py"), "--json", "--tiny", "--dir", directory]
    done = subprocess.run([*command, *options], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


@pytest.fixture
def stores(tmp_path: Path) -> Path:
    """A folder that nobody else writes to."""
    folder = tmp_path / "stores"
    folder.mkdir()
    return folder


@pytest.fixture
def modelless(tmp_path: Path) -> list[str]:
    """Options for engines without a model, and for a tokenizer of bytes."""
    tokenizers = pytest.importorskip("tokenizers", reason="prompts are pieces of a text")
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel

    letters = {letter: 1000 + number for number, letter in enumerate(sorted(ByteLevel.alphabet()))}
    tokenizer = tokenizers.Tokenizer(BPE(vocab=letters, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{MODELLESS}" "$@"\n')
    python.chmod(0o755)
    return ["--python", str(python), "--model", str(tmp_path)]


def check(line: Any, said: str) -> None:
    """All arms were asked, and reused what they must; LMCache was skipped, loudly."""
    assert "SKIPPED: LMCACHE" in said
    cells = {(each["workload"], each["arm"]): each for each in line["cells"]}
    assert {arm for _, arm in cells} == {"none", "vllm", "embedded", "service", "restart"}
    for arm in ("vllm", "embedded", "service", "restart"):
        assert cells["tile", arm]["reused_tokens"] == 2 * 256, arm
        assert cells["chat", arm]["reused_tokens"] == 2 * 128, arm
    assert cells["tile", "none"]["reused_tokens"] == 0
    assert cells["tile", "restart"]["disk_tokens"] == 2 * 256
    assert cells["tile", "embedded"]["disk_tokens"] == 0
    assert cells["unique", "embedded"]["reused_tokens"] == 0
    assert {each["wrong"] for each in line["cells"]} == {0}
    assert line["engine_tile_restart_hits"] == 1.0
    assert line["engine_unique_embedded_over_vllm"] > 0
    assert line["engine_unique_embedded_saved"] == 1.0
    assert not [key for key in line if key.startswith("engine_unique_service")], "the same code"
    assert line["notes"] == ["Skipped: lmcache: " + line["skipped"]["lmcache"]], "room for all"


@pytest.mark.slow
def test_all_arms_are_asked_and_the_killed_one_hits_without_any_model(
    tmp_path: Path, stores: Path, modelless: list[str], bench: Any
) -> None:
    environment = dict(os.environ) | {"BENCH_LMCACHE_PYTHON": "/nonexistent/python"}
    readme, block = tmp_path / "README.md", bench("readme_block")
    readme.write_text((BENCH.parent / "README.md").read_text())
    more = ["--write", str(tmp_path), "--readme", str(readme)]
    check(*run(stores, environment, *more, *modelless))
    assert ET.parse(tmp_path / "engine.svg").getroot().tag.endswith("svg")  # noqa: S314 - our own
    page = (tmp_path / "engine.md").read_text()
    assert block.block_of(readme.read_text(), "engine.md").endswith(block.short_of(page))
    assert "| Chats, growing history | " in block.short_of(page)
    assert "Skipped: lmcache" in page
    for table in re.findall(r"(?:^\|.*\n)+", page, re.MULTILINE):
        assert len({line.count("|") for line in table.splitlines()}) == 1, table
    assert len(re.findall(r"^\| .*TTFT mean", page, re.MULTILINE)) == 6
    assert list(stores.iterdir()) == [], "it cleans up"


@pytest.mark.slow
def test_a_run_that_is_broken_off_leaves_what_it_has_and_another_one_joins_it(
    tmp_path: Path, stores: Path, modelless: list[str]
) -> None:
    environment = dict(os.environ) | {"BENCH_LMCACHE_PYTHON": "/nonexistent/python"}
    kept, more = tmp_path / "results.json", ["--arms", "none,vllm,embedded"]
    command = [sys.executable, str(BENCH / "engine.py"), "--tiny", "--dir", str(stores), *modelless]
    command += ["--results", str(kept), "--write", str(tmp_path), *more]
    broken = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert broken.stderr is not None
    for line in broken.stderr:
        if "Chats, growing history: asked" in line:
            broken.send_signal(signal.SIGTERM)
            break
    said, _ = broken.communicate()
    assert broken.returncode != 0
    assert "broken off: KeyboardInterrupt('SIGTERM')" in said
    assert list(stores.iterdir()) == [], "it cleans up"
    assert {"tile", "random", "chat"} <= set(json.loads(kept.read_text())["found"])
    assert not (tmp_path / "engine.md").exists(), "no page of a part"
    alone = ["--results", str(kept), "--join", "--workloads", "unique", *more, *modelless]
    line, _ = run(stores, environment, *alone)
    assert {"tile", "chat", "unique"} <= {each["workload"] for each in line["cells"]}
    assert "the rest" not in line["skipped"]
    more = ["--results", str(kept), "--no-run", "--write", str(tmp_path)]
    again, _ = run(stores, environment, *more, *modelless)
    assert again["cells"] == line["cells"]
    assert "100 % unique prompts" in (tmp_path / "engine.md").read_text()


@pytest.mark.slow
@pytest.mark.skipif((BENCH.parent / ".venv-vllm").exists(), reason="there is a vLLM")
def test_without_vllm_the_bench_says_so_and_gives_no_number(tmp_path: Path) -> None:
    without = {name: v for name, v in os.environ.items() if name != "TEST_VLLM_PYTHON"}
    line, said = run(tmp_path, without)
    assert "NO VLLM" in said
    assert line["skipped"] == {"all": "no vLLM"}
    assert "cells" not in line


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not os.environ.get("TEST_VLLM_PYTHON"), reason="NO VLLM: make test-vllm")
def test_real_engines_hit_after_a_restart(stores: Path) -> None:
    more = ["--model", os.environ["TEST_VLLM_MODEL"]] if "TEST_VLLM_MODEL" in os.environ else []
    environment = dict(os.environ) | {"BENCH_LMCACHE_PYTHON": "/nonexistent/python"}
    check(*run(stores, environment, "--load", "always", *more))
    assert list(stores.iterdir()) == [], "it cleans up"
