"""What the planner knows of a request, a load and a save, and whom it asks for the rest.

Plain records and two faces: the store's side (answers come later, as events) and the engine's block
pool (answers at once). Must not be here: engine types, threads, decisions.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol, TypeAlias

from kvstore.hints import Hints

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

NO_HINTS = Hints()
NULL_BLOCK = 0  # an engine's block that holds nothing
NOT_YET = float("-inf")  # a time


@dataclass(frozen=True, slots=True)
class Chain:
    """Whole pages of a prompt: int32 little-endian tokens, extras by page index."""

    tokens: bytes
    extras: Mapping[int, bytes]


@dataclass(frozen=True, slots=True)
class Policy:
    """What one request may do with the store."""

    load: bool = True
    store: bool = True
    pin_ttl_s: float = 0.0
    session: str = ""
    ends_session: bool = False
    hints: Hints = NO_HINTS  # for the store's policy; pins are above
    note: str = ""  # why not, for the answer to the client

    @property
    def tells(self) -> bool:
        """Whether the store is told something of the chain when it is stored."""
        return bool(self.pin_ttl_s) or self.hints.for_policy


class RequestView(Protocol):
    """A request as its engine holds it now; tokens that were confirmed don't change."""

    @property
    def id(self) -> str:
        """What the engine calls it."""

    @property
    def length(self) -> int:
        """Tokens whose ids are known, prompt and output."""

    def chain(self, pages: int) -> Chain:
        """The first `pages` whole pages."""


@dataclass(frozen=True, slots=True)
class Found:
    """What a look-up found; a second one for the same ticket follows while `staging`."""

    ticket: int
    pages: int = 0
    ready: int = 0  # leading pages in the arena
    staging: bool = False
    disk_pages: int = 0  # of `pages`, when they were found
    late: bool = False  # staging ended without all of them
    reason: str = ""  # why the store may have more than `pages`


@dataclass(frozen=True, slots=True)
class Room:
    """A reservation: where pages [start, start + len(offsets)) are to be written."""

    job: int
    start: int = 0
    offsets: tuple[int, ...] = ()
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Committed:
    """How many pages of a save are visible now."""

    job: int
    pages: int
    reason: str = ""


StoreEvent: TypeAlias = "Found | Room | Committed"


class StorePort(Protocol):
    """The store as the planner asks it: nothing here waits, answers come as events."""

    def look_up(self, ticket: int, chain: Chain) -> None:
        """Find and lease; a Found follows."""

    def places(self, ticket: int, start: int, stop: int) -> Sequence[tuple[int, int]]:
        """Slot and generation of each page; empty if the lease is lost."""

    def release(self, ticket: int) -> None:
        """End a look-up and its lease, whether it was answered or not."""

    def reserve(self, job: int, chain: Chain) -> None:
        """Room for what of this chain nobody has; a Room follows."""

    def commit(self, job: int) -> None:
        """Publish a reservation; a Committed follows."""

    def abort(self, job: int) -> None:
        """Give a reservation up; nothing follows."""

    def pin(self, chain: Chain, ttl_s: float) -> None:
        """Keep a chain; with 0 seconds, take back all pins on it."""

    def hint(self, chain: Chain, hints: Hints) -> None:
        """Tell what is known of a chain."""

    def end_conversation(self, name: str) -> None:
        """The pages that are only this conversation's leave first."""


class BlockPort(Protocol):
    """The engine's block pool: a pinned block keeps its bytes, whoever gives it up."""

    def pin(self, blocks: Iterable[int]) -> None:
        """Hold each block once more."""

    def unpin(self, blocks: Iterable[int]) -> None:
        """Hold each block once less."""

    def holds(self, blocks: Iterable[int]) -> list[object]:
        """For each an object that stays the same one until the block is given to somebody else to
        fill; None if that can't be told.
        """


class Phase(StrEnum):
    """Where a request stands."""

    WAITING = "waiting"  # not scheduled yet, or again
    LOADING = "loading"
    RUNNING = "running"


@dataclass(slots=True)
class RequestState:
    """One request. `version` changes whenever its block table does not go on as before."""

    view: RequestView
    policy: Policy
    phase: Phase = Phase.WAITING
    ticket: int = 0
    found: Found | None = None
    found_s: float = 0.0  # when it was told
    asks: int = 0
    asked_s: float = -1.0  # when the engine first wanted to know, in this attempt
    begun_s: float = -2.0  # and when no other look-ups were before its own any more
    plan: LoadPlan | None = None
    job: int = 0  # of a load that is not answered yet
    bypass: str = ""  # why nothing is loaded for it any more
    blocks: list[int] = field(default_factory=list)
    version: int = 0
    confirmed: int = 0  # tokens whose KV will be right after the step last planned
    planned_pages: int = 0
    stored_pages: int = 0  # the store is known to have had them
    save: int = 0  # the one save that is under way
    reused_tokens: int = 0
    reused_disk_tokens: int = 0
    reason: str = "never asked"  # about the last decision to load


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Tokens [local, local + external) shall come from the store."""

    local: int
    external: int
    sync: bool


@dataclass(slots=True)
class Load:
    """A load that some ranks have not answered."""

    job: int
    request: str
    ticket: int
    ranks: int
    blocks: frozenset[int]
    ok: bool = True
    reason: str = ""


class SavePhase(StrEnum):
    """Where a save stands."""

    RESERVING = "reserving"
    HELD = "held"  # others write these pages, or staging is full: asked again later
    COPYING = "copying"
    GATED = "gated"  # copied, but a load that it builds on is not known to be good
    COMMITTING = "committing"


@dataclass(slots=True)
class Save:
    """Pages [first, stop) of a request on their way to the store. Pinned: blocks by page."""

    job: int
    request: str
    version: int
    policy: Policy
    chain: Chain
    first: int
    stop: int
    pinned: dict[int, tuple[int, ...]]
    loads: set[int] = field(default_factory=set)
    phase: SavePhase = SavePhase.RESERVING
    start: int = 0  # of what was reserved
    count: int = 0
    ranks: int = 0
    ok: bool = True
    dropped: bool = False
    tail: Save | None = None  # follows when this one is done
    attempts: int = 0
    retry_s: float = 0.0
    others_since_s: float = NOT_YET  # others write its next page
    pause_s: float = 0.0  # between two questions whether they still do
    for_staging: bool = False  # what it waits for while it is held

    def with_tails(self) -> Iterable[Save]:
        """It and all that follow it."""
        each: Save | None = self
        while each is not None:
            yield each
            each = each.tail


@dataclass(slots=True)
class Leaver:
    """A request that ended before all its full pages were saved. Its blocks may be reused.

    `holds`: of its blocks at the end, see BlockPort; `loads`: those that are not known to be good.
    """

    state: RequestState
    full: int
    holds: list[object]
    loads: set[int]
    until_s: float
