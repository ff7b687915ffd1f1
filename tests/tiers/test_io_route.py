"""Straight or by bounce memory: the choice, and that both move the same bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from disk_pages import Chains, read, write

from kvstore.tiers.disk_tier import DiskTier
from kvstore.tiers.io_route import RUNS_MIN, TRIAL_EVERY, Route, RouteChooser
from kvstore.tiers.segment import segment_name
from kvstore.tiers.tier import ReadStatus

if TYPE_CHECKING:
    from pathlib import Path

MIB = 1 << 20


def measure(chooser: RouteChooser, batches: int, seconds: tuple[float, float]) -> list[Route]:
    """Run large batches that take so long a run by each way; the ways taken."""
    taken = []
    for _ in range(batches):
        route, noted = chooser.choose(RUNS_MIN, MIB)
        assert noted
        taken.append(route)
        for _ in range(RUNS_MIN):
            chooser.note(route, MIB, seconds[route])
    return taken


def test_both_ways_are_tried_and_the_faster_is_taken() -> None:
    for seconds, winner in (((2.0, 1.0), Route.BOUNCE), ((1.0, 2.0), Route.STRAIGHT)):
        taken = measure(chooser := RouteChooser(), 40, seconds)
        assert taken[:2] == [Route.STRAIGHT, Route.BOUNCE]
        assert set(taken[2:]) == {winner}
        assert chooser.best is winner


def test_a_copy_must_pay_for_itself() -> None:
    assert set(measure(RouteChooser(), 40, (1.05, 1.0))[2:]) == {Route.STRAIGHT}


def test_a_disk_that_changes_is_noticed() -> None:
    chooser = RouteChooser()
    measure(chooser, 10, (1.0, 2.0))
    taken = measure(chooser, 40 * TRIAL_EVERY, (4.0, 2.0))
    assert chooser.best is Route.BOUNCE
    assert taken[-2] is Route.BOUNCE


def test_small_batches_are_not_timed() -> None:
    chooser = RouteChooser()
    assert chooser.choose(RUNS_MIN - 1, MIB) == (Route.STRAIGHT, False)
    assert chooser.choose(RUNS_MIN, MIB - 1) == (Route.STRAIGHT, False)


class Always(RouteChooser):
    """Takes one way and counts."""

    def __init__(self, route: Route) -> None:
        super().__init__()
        self.route = route
        self.noted = 0

    def choose(self, runs: int, run_bytes: int) -> tuple[Route, bool]:
        return self.route, True

    def note(self, route: Route, run_bytes: int, seconds: float) -> None:
        assert route is self.route
        self.noted += 1


def take(tier: DiskTier, writes: Route, reads: Route) -> None:
    tier._page_io.write_routes = Always(writes)
    tier._page_io.read_routes = Always(reads)


@pytest.mark.parametrize("size", [1, 4096, 5000, 40_000, 41_000, 700_000])
def test_both_ways_write_and_read_the_same_bytes(tmp_path: Path, size: int) -> None:
    """Sizes with and without a partial last block and a gap to the next slot."""
    segments = {}
    for writes in Route:
        tier = DiskTier.open([tmp_path / writes.name], 64 * MIB, load=True)
        pages = Chains().chain(5, size=size)
        # Old bytes in every slot, so that what is not written would show.
        old = Chains(boot=5).chain(5, size=size)
        assert all(write(tier, old))
        tier.free_many([item.slot for item in old])
        tier.commit_frees()
        take(tier, writes, Route.STRAIGHT)
        assert all(write(tier, pages))
        for reads in Route:
            take(tier, writes, reads)
            assert all(read(tier, item) is ReadStatus.OK for item in pages)
            buffers = [bytearray(size) for _ in pages]
            statuses = tier.read_many(
                [item.slot for item in pages],
                [item.page for item in pages],
                [memoryview(buffer) for buffer in buffers],
            )
            assert set(statuses) == {ReadStatus.OK}
            assert [bytes(buffer) for buffer in buffers] == [item.payload for item in pages]
            assert tier._page_io.read_routes.noted > 0  # type: ignore[attr-defined]
        shape = next(iter(tier._segments)).shape
        content = (tmp_path / writes.name / segment_name(1)).read_bytes()
        starts = [shape.offset(item.slot) for item in pages]
        segments[writes] = [content[s + 96 : s + shape.slot_bytes] for s in starts]
        tier.close()
    for one, other in zip(segments[Route.STRAIGHT][:-1], segments[Route.BOUNCE][:-1], strict=True):
        assert one == other


def test_a_damaged_page_is_noticed_by_either_way(tmp_path: Path) -> None:
    tier = DiskTier.open([tmp_path / "d"], 64 * MIB, load=True)
    pages = Chains().chain(4, size=9000)
    assert all(write(tier, pages))
    shape = next(iter(tier._segments)).shape
    with open(tmp_path / "d" / segment_name(1), "r+b") as stream:
        for item, at in ((pages[1], 4096 + 8999), (pages[2], 50)):
            stream.seek(shape.offset(item.slot) + at)
            byte = stream.read(1)[0]
            stream.seek(shape.offset(item.slot) + at)
            stream.write(bytes([byte ^ 1]))
    for reads in Route:
        take(tier, Route.STRAIGHT, reads)
        statuses = [read(tier, item) for item in pages]
        assert statuses[0] is statuses[3] is ReadStatus.OK
        assert ReadStatus.OK not in statuses[1:3]
    tier.close()
