"""A load by layers seen by two threads: the one that copies and the one that computes."""

from __future__ import annotations

import threading

from kvstore.engine_adapter.layer_gate import LayerGate

STEPS = [("a", "b"), ("b", "c"), ("d",)]


def asked(gate: LayerGate, layer: str) -> tuple[threading.Thread, list[object]]:
    """A thread that waits for a layer, and what it was told."""
    told: list[object] = []
    thread = threading.Thread(target=lambda: told.append(gate.wait(layer)))
    thread.start()
    return thread, told


def test_a_layer_is_there_with_the_last_step_that_brings_it() -> None:
    gate = LayerGate(STEPS)
    gate.open("first")
    assert gate.wait("a") == "first"
    thread, told = asked(gate, "b")
    other, told_other = asked(gate, "d")
    gate.open("second")
    thread.join(10)
    assert told == ["second"]
    assert other.is_alive()
    assert not told_other
    gate.open("third")
    other.join(10)
    assert told_other == ["third"]
    assert gate.unasked == {"c"}


def test_an_unknown_layer_waits_for_all() -> None:
    """It shares another's memory, maybe that of the last."""
    gate = LayerGate(STEPS)
    gate.open(1)
    gate.open(2)
    thread, told = asked(gate, "shares")
    assert thread.is_alive()
    gate.open(3)
    thread.join(10)
    assert told == [3]


def test_nobody_waits_for_a_load_that_is_over() -> None:
    gate = LayerGate(STEPS)
    gate.open(1)
    thread, told = asked(gate, "d")
    gate.end()
    thread.join(10)
    assert told == [None]
    assert gate.wait("a") == 1
    assert gate.wait("c") is None
    assert gate.ended.is_set()


def test_a_load_of_no_steps_lets_everybody_through() -> None:
    gate = LayerGate([])
    gate.end()
    assert gate.wait("a") is None
    assert gate.unasked == set()
