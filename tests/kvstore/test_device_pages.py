"""The pool of pages on the engine's device: what comes in, what leaves, what is never given."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

torch = pytest.importorskip("torch", reason="the device tier's memory is torch's")

from kvstore.device_pages import DevicePages  # noqa: E402 - after the importorskip
from kvstore.errors import InvalidRequest  # noqa: E402

PAGE = 4096


def payload(version: Any) -> memoryview:
    return memoryview(repr(version).encode().ljust(PAGE, b"."))


def pool(pages: int) -> DevicePages:
    return DevicePages(pages * PAGE, "cpu", PAGE)


def use(device: DevicePages, versions: list[Any], *, valid: bool = True) -> list[int]:
    """A hit on a chain; which of its pages came from the pool."""
    lease = device.lease(versions)
    before = sorted(lease.held)
    device.fill(lease, {at: payload(v) for at, v in enumerate(versions)}, lambda: valid)
    for at, page in lease.pages().items():
        assert bytes(page.tolist()) == bytes(payload(versions[at]))
    lease.release()
    device.check()
    return before


def test_a_page_comes_in_when_it_is_asked_for_again() -> None:
    device = pool(8)
    assert use(device, [1, 2, 3]) == []
    assert device.stats().pages == 0
    assert use(device, [1, 2, 9]) == []
    assert device.stats().pages == 2
    assert use(device, [1, 2, 3]) == [0, 1]
    stats = device.stats()
    assert (stats.hits, stats.fills, stats.evictions) == (2, 3, 0)


def test_what_was_not_used_longest_leaves_and_never_before_what_follows_it() -> None:
    device = pool(3)
    for _ in range(2):
        use(device, [1, 2, 3])
    for _ in range(2):
        use(device, [1, 8])
    assert device.lease([1, 2, 3, 8]).held == {0: 1, 1: 2, 3: 8}
    assert device.stats().evictions == 1


def test_a_page_that_someone_holds_stays() -> None:
    device = pool(2)
    for _ in range(2):
        use(device, [1, 2])
    holding = device.lease([1, 2])
    pages = holding.pages()
    for _ in range(3):
        assert use(device, [3, 4]) == []
    assert bytes(pages[1].tolist()) == bytes(payload(2))
    holding.release()
    holding.release()
    use(device, [3, 4])
    assert use(device, [3, 4]) == [0, 1]


def test_a_copy_of_pages_that_moved_is_not_kept() -> None:
    device = pool(4)
    use(device, [1])
    use(device, [1], valid=False)
    assert device.stats().pages == 0
    use(device, [1])
    assert use(device, [1]) == [0]


def test_a_page_without_a_version_never_comes_in() -> None:
    device = pool(4)
    for _ in range(3):
        assert use(device, [None, None]) == []
    assert device.stats().pages == 0


def test_a_pool_too_small_for_one_page_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="device_bytes: 4096 given, one page has 8192"):
        DevicePages(4096, "cpu", 4097)


def test_a_pool_that_was_closed_takes_leases_back() -> None:
    device = pool(4)
    for _ in range(2):
        use(device, [1])
    lease = device.lease([1])
    device.close()
    lease.release()


class PoolMachine(RuleBasedStateMachine):
    """The pool against a list: the same pages, the same order of leaving."""

    def __init__(self) -> None:
        super().__init__()
        self.device = pool(4)
        self.model: OrderedDict[int, int] = OrderedDict()  # version -> leases
        self.seen: set[int] = set()
        self.open: list[tuple[Any, list[int]]] = []

    @rule(start=st.integers(0, 3), length=st.integers(1, 4), keep=st.booleans())
    def hit(self, start: int, length: int, keep: bool) -> None:
        chain = [10 * start + at for at in range(length)]
        lease = self.device.lease(chain)
        held = [v for v in chain if v in self.model]
        assert [chain[at] for at in sorted(lease.held)] == held
        wanted = [v for v in chain if v not in self.model and v in self.seen]
        for version in reversed(held):
            self.model[version] += 1
            self.model.move_to_end(version)
        self.seen |= set(chain)
        self.device.fill(lease, {at: payload(v) for at, v in enumerate(chain)}, lambda: True)
        for version in wanted:
            if len(self.model) == 4:
                free = next((v for v, leases in self.model.items() if not leases), None)
                if free is None:
                    break
                del self.model[free]
                self.seen.discard(free)
            self.model[version] = 1
            held.append(version)
        for version in sorted(held, reverse=True):
            self.model.move_to_end(version)
        assert sorted(lease.held.values()) == sorted(held)
        self.open.append((lease, held))
        if not keep:
            self.give_back(len(self.open) - 1)

    @rule(which=st.integers(0, 9))
    def give_back(self, which: int) -> None:
        if which < len(self.open):
            lease, held = self.open.pop(which)
            for at, page in lease.pages().items():
                assert bytes(page.tolist()) == bytes(payload(lease.versions[at]))
            lease.release()
            for version in held:
                self.model[version] -= 1

    @invariant()
    def counts_are_right(self) -> None:
        self.device.check()
        assert self.device.stats().pages == len(self.model)


PoolMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)
TestPool = pytest.mark.slow(PoolMachine.TestCase)
