"""A planner between a store that writes down what it is asked and a pool that counts pins."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvstore.engine_adapter.load_choice import LoadChoice, LoadMode
from kvstore.engine_adapter.load_planner import Sizes
from kvstore.engine_adapter.plan_records import Chain, Committed, Policy, Room
from kvstore.engine_adapter.planner import Planner
from kvstore.engine_adapter.transfer_plan import (
    SaveDone,
    WorkerReport,
)

if TYPE_CHECKING:
    from kvstore.hints import Hints

BLOCK, PAGE = 4, 8


@dataclass
class Request:
    """Tokens 0, 1, 2, ..."""

    id: str
    length: int

    def chain(self, pages: int) -> Chain:
        assert pages * PAGE <= self.length
        return Chain(bytes(4 * pages * PAGE), {})


@dataclass
class Store:
    """Writes down what it is asked."""

    calls: list[tuple[object, ...]] = field(default_factory=list)
    lost: bool = False

    def look_up(self, ticket: int, chain: Chain) -> None:
        self.calls.append(("look_up", ticket, len(chain.tokens) // (4 * PAGE)))

    def places(self, ticket: int, start: int, stop: int) -> list[tuple[int, int]]:
        return [] if self.lost else [(100 + page, 2) for page in range(start, stop)]

    def release(self, ticket: int) -> None:
        self.calls.append(("release", ticket))

    def reserve(self, job: int, chain: Chain) -> None:
        self.calls.append(("reserve", job, len(chain.tokens) // (4 * PAGE)))

    def commit(self, job: int) -> None:
        self.calls.append(("commit", job))

    def abort(self, job: int) -> None:
        self.calls.append(("abort", job))

    def pin(self, chain: Chain, ttl_s: float) -> None:
        self.calls.append(("pin", len(chain.tokens) // (4 * PAGE), ttl_s))

    def hint(self, chain: Chain, hints: Hints) -> None:
        self.calls.append(("hint", len(chain.tokens) // (4 * PAGE), hints))

    def end_conversation(self, name: str) -> None:
        self.calls.append(("end", name))


@dataclass
class Pool:
    """Counts pins. `told`: of each block that is not in use by another since."""

    pinned: list[int] = field(default_factory=list)
    told: dict[int, object] = field(default_factory=dict)

    def holds(self, blocks: object) -> list[object]:
        return [
            self.told.setdefault(block, object())
            for block in list(blocks)  # type: ignore[call-overload]
        ]

    def pin(self, blocks: object) -> None:
        self.pinned += list(blocks)  # type: ignore[call-overload]

    def unpin(self, blocks: object) -> None:
        for block in list(blocks):  # type: ignore[call-overload]
            self.pinned.remove(block)


def planner(
    *, sync: bool = False, pins: int = 100, ranks: int = 1, mode: LoadMode = LoadMode.ALWAYS
) -> tuple[Planner, Store, Pool]:
    choice = LoadChoice(mode, 1 << 20, PAGE)
    choice.copy_bytes_a_second = 1e12 if sync else 1.0
    store, pool = Store(), Pool()
    made = Planner(Sizes(PAGE, BLOCK, ranks), store, pool, choice, pinned_blocks_max=pins)
    return made, store, pool


def blocks_of_next_save(
    made: Planner, job: int, start: int, pages: int, reason: str = ""
) -> list[int]:
    """The blocks that it copies, once it is published."""
    made.event(Room(job, start, tuple(range(pages)), reason), 0.0)
    [save] = made.take(0.0).saves
    made.report(WorkerReport(saves=(SaveDone(job, True),)), 0.0)
    made.event(Committed(job, pages), 0.0)
    made.take(0.1)
    return [block for page in save.pages for block in page.blocks]


def ended_over_the_cap() -> tuple[Planner, Store, Pool]:
    """Five pages in one step and the end; two may be pinned at a time."""
    made, store, pool = planner(pins=4)
    made.arrive(Request("a", 5 * PAGE + 2), Policy(load=False))
    made.allocated("a", list(range(1, 12)), 0)
    made.step("a", None, 0, 5 * PAGE + 2, 0.0)
    made.finished("a", list(range(1, 12)), 5 * PAGE + 2, well=True, now=0.0)
    assert pool.pinned == [1, 2, 3, 4]
    return made, store, pool


def saved(made: Planner, job: int, start: int, pages: int) -> None:
    """Room, copies and commit of a save."""
    made.event(Room(job, start, tuple(range(pages))), 0.0)
    (save,) = made.take(0.0).saves
    made.report(WorkerReport(saves=(SaveDone(save.job, True),)), 0.0)
    made.event(Committed(job, pages), 0.0)
