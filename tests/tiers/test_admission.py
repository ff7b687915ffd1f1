"""What is written to disk: each filter by its rule, the sketch against exact counts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.tiers.admission import ADMISSIONS, COUNT_MAX, CountMinSketch, make_admission


def keys(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.uint64)


def uses(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


def test_each_admits_what_its_rule_says_of_pages_new_used_and_back() -> None:
    found = {}
    for name in ADMISSIONS:
        made = make_admission(name, 4096)
        assert made.name == name
        made.seen(keys(1, 2, 3))
        made.gone(keys(3))
        made.seen(keys(2, 3))
        made.evicted(keys(*[1] * 2000))
        found[name] = made.admits(keys(1, 2, 3), uses(0, 1, 0)).tolist()
    assert found == {
        "always": [True, True, True],
        "second-touch": [False, True, False],
        "ghost": [False, True, True],
        "frequency": [False, True, True],
    }
    with pytest.raises(ValueError, match="second-touch"):
        make_admission("sometimes", 10)


def test_while_the_disk_has_room_frequency_admits_everything() -> None:
    made = make_admission("frequency", 4096)
    made.seen(keys(1))
    assert made.admits(keys(1), uses(0)).all()
    made.evicted(keys())
    assert made.admits(keys(1), uses(0)).all()


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.integers(0, 300), max_size=20, unique=True), max_size=60))
def test_the_sketch_never_counts_too_little_and_hardly_too_much(batches: list[list[int]]) -> None:
    sketch = CountMinSketch(1024)
    exact: dict[int, int] = {}
    for batch in batches:
        assert not sketch.add(keys(*batch))
        for number in batch:
            exact[number] = exact.get(number, 0) + 1
    if exact:
        counted = sketch.estimate(keys(*exact)).astype(int)
        wanted = np.minimum(list(exact.values()), COUNT_MAX)
        assert (counted >= wanted).all()
        assert int((counted - wanted).sum()) <= 1 + len(exact) // 20


def test_what_was_popular_fades_and_what_is_popular_now_passes_it() -> None:
    sketch = CountMinSketch(1024)
    for _ in range(COUNT_MAX):
        sketch.add(keys(1))
    halved = 0
    for step in range(20):
        halved += sketch.add(np.arange(1000 * step, 1000 * step + 1000, dtype=np.uint64) + 10)
        sketch.add(keys(2))
    assert halved >= 1
    assert sketch.estimate(keys(1))[0] < sketch.estimate(keys(2))[0] <= COUNT_MAX
    assert sketch.nbytes == 4096


def test_the_sketch_keeps_its_size_whatever_it_is_for() -> None:
    assert CountMinSketch(1).nbytes == 4 << 10
    assert CountMinSketch(1 << 40).nbytes == 4 << 22
