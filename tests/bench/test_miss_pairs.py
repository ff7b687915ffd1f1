"""bench/miss_pairs.py: whose seconds are counted, in which order, and that all must be stored."""

from __future__ import annotations

import importlib
import itertools
import sys
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"
MODELLESS = BENCH.parent / "tests" / "support" / "modelless_engine.py"


@pytest.fixture
def pairs(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module; it imports others as scripts do."""
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("miss_pairs")


def test_turns_go_on_off_off_on_and_the_first_pair_is_not_counted(pairs: Any) -> None:
    order: list[bool] = []

    def turn(on: bool) -> Any:
        order.append(on)
        return pairs.Turn(float(len(order)), 1.0, 1.0, 0.0, 0, [], [])

    found = pairs.by_turns(turn, 3)
    assert order == [False, True, True, False, False, True, True, False]
    assert [each.seconds for each in found.on] == [3.0, 6.0, 7.0]
    assert [each.seconds for each in found.off] == [4.0, 5.0, 8.0]


def test_the_second_of_spinning_counts_for_nobody_and_the_server_for_its_turn(pairs: Any) -> None:
    on = pairs.Turn(2.0, 4.0, 1.1, 0.1, 7, [], [])
    off = pairs.Turn(1.9, 4.0, 1.0, 0.0, 0, [], [])
    found = pairs.Turns([on] * 5, [off] * 5)
    assert found.cpu_s() == (pytest.approx([4.2] * 5), pytest.approx([4.0] * 5))
    throughput, cpu = found.ratios()
    assert throughput.median == pytest.approx(0.95)
    assert cpu.median == pytest.approx(1.05)
    assert found.server_share() == pytest.approx(0.025)


def test_a_process_that_computes_is_not_quiet(pairs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    used = itertools.count()
    monkeypatch.setattr(pairs, "cpu_seconds", lambda processes: float(next(used)))
    monkeypatch.setattr(pairs, "QUIET_S_MAX", 0.2)
    with pytest.raises(pairs.EngineError, match="not quiet"):
        pairs.wait_quiet([1])


@pytest.mark.slow
def test_a_turn_that_stored_less_than_it_has_ends_the_bench(pairs: Any, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{MODELLESS}" "$@"\n')
    python.chmod(0o755)
    number = itertools.count(1000)
    sizes = {"host_bytes": "64MiB", "disk_bytes": "64MiB"}
    with (
        open(tmp_path / "log", "w", encoding="utf-8") as log,
        pairs.Switched(tmp_path / "store", tmp_path, log, sizes, python=str(python)) as engine,
    ):
        engine.wait_ready()

        def prompts(tokens: int) -> list[int]:
            return [next(number), *range(tokens - 1)]

        found = engine.measure(prompts, pairs.TINY, 1)
        assert [turn.pages for turn in (*found.on, *found.off)] == [pairs.TINY.pages, 0]
        assert found.off[0].server_cpu_s == 0.0
        assert found.on[0].asked != found.off[0].asked
        side = engine._side
        engine.engine.call("switch_connector", on=False)
        with pytest.raises(pairs.EngineError, match="0 pages were stored in a turn that has 2"):
            side.turn(prompts, pairs.TINY, saves=True)
