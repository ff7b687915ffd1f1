"""`auto`: follows the policy that hits most, and says what each would hit at other sizes.

It tells the policy that it follows all that happens, and notes what was asked for of a sample of
pages. In its study, without the lock, shadows of all policies answer that (shadow_set.py), at the
size that the store has and at half, twice and four times that; then a contest decides (contest.py).

A new policy is told what is stored piece by piece, while the old one still decides: when each page
was used last, and how often. What was known of pages that had gone, it lacks; csl begins with what
its shadow has learnt.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from kvstore.tiers.eviction import NO_PARENT, PAGES_FIRST, Policy, Run, Study, grown
from kvstore.tiers.eviction_csl import CslPolicy
from kvstore.tiers.shadow import Asked, in_sample, mixed
from kvstore.tiers.shadow_set import Counted, ShadowSet

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.tiers.eviction import Ids, Keys, Scores
    from kvstore.tiers.page_cost import PageCost
    from kvstore.tiers.shadow_set import Point

EVENTS_MAX = 4096  # that wait for a study; what comes after them is not looked at
STUDY_EVENTS = 32
PIECE_ROWS = 1 << 14
KINDS_MAX = 255
HOT_USES = 64  # a page that was asked for so often is a hit for anybody
_FULL_WEIGHT = 0.2  # of a new observation of how many pages the full store has
_NO_KEYS = np.empty(0, np.uint64)


@dataclass(frozen=True, slots=True)
class AutoReport:
    """What auto knows."""

    following: str
    switches: int = 0
    capacity_pages: int = 0  # of the full store; 0 until it was: till then all would hit the same
    sampled_pages: int = 0
    sampled_part: float = 1.0
    skipped: int = 0  # look-ups and commits that came too fast to be looked at
    curves: dict[str, tuple[Point, ...]] = field(default_factory=dict)


class AutoPolicy(Policy):
    """See above."""

    name = "auto"
    moves = True

    def __init__(
        self,
        make: Callable[[str, int], Policy],
        names: tuple[str, ...],
        pages: int,
        cost: PageCost,
    ) -> None:
        """make: a policy by name, for about so many pages. The first of the names is followed until
        another is better."""
        self._make = make
        self._pages = pages
        self._cost = cost
        self._inner = make(names[0], pages)
        self._next: Policy | None = None  # it is being told what is stored
        self._told = 0  # rows so far
        self.shadows = ShadowSet(make, names, names[0], cost)
        self.report = AutoReport(names[0])
        self._bits = 0
        self._left_out = 0
        self._live = 0
        self._full = 0.0
        self._leaving = False
        self._asked = self._hot = 0.0  # by worth, see Counted
        self._skipped = 0
        self._events: list[Asked] = []
        self._open: dict[
            int, int
        ] = {}  # a page that a noted chain ended in: the place of its event
        # Tokens, bytes and seconds a token of a page: their number.
        self._kinds: dict[tuple[int, int, float], int] = {}
        self._uses = np.zeros(PAGES_FIRST, np.uint8)  # 0: no page in this row
        self._last = np.zeros(PAGES_FIRST)
        self._hash = np.zeros(PAGES_FIRST, np.uint64)
        self._sampled = np.zeros(PAGES_FIRST, bool)
        self._depth = np.zeros(PAGES_FIRST, np.int32)
        self._parent = np.zeros(PAGES_FIRST, np.int32)
        self._kind = np.zeros(PAGES_FIRST, np.uint8)
        self._known = np.zeros(PAGES_FIRST, bool)  # to the next policy

    @property
    def following(self) -> str:
        """The policy that decides now."""
        return self._inner.name

    def insert(self, pages: Ids, keys: Keys, run: Run, now: float) -> None:
        self._inner.insert(pages, keys, run, now)
        self._enter(pages, keys, run, now)
        if self._next is not None:
            self._next.insert(pages, keys, run, now)
            self._known[pages] = True
        self._count(pages)
        self._note(pages, now, self._open.pop(int(run.parents[0]), None))

    def restore(self, pages: Ids, keys: Keys, run: Run, last: Scores) -> None:
        self._inner.restore(pages, keys, run, last)
        self._enter(pages, keys, run, last)
        self._known[pages] = False

    def touch(self, pages: Ids, now: float) -> None:
        self._inner.touch(pages, now)
        if self._next is not None:
            self._tell(pages[~self._known[pages]])
            self._next.touch(pages, now)
        uses = self._uses[pages]
        self._uses[pages] = uses + (uses < 255)
        self._last[pages] = now
        self._count(pages)
        self._note(pages, now, None)

    def scores(self, pages: Ids, now: float, tier: int = 0) -> Scores:
        return self._inner.scores(pages, now, tier)

    def left(self, pages: Ids, now: float, tier: int = 0) -> None:
        self._inner.left(pages, now, tier)
        self._leaving = True

    def remove(self, pages: Ids, keys: Keys, now: float) -> None:
        self._inner.remove(pages, keys, now)
        if self._next is not None:
            mine = self._known[pages]
            if mine.any():
                self._next.remove(pages[mine], keys[mine], now)
        if self._leaving:  # for want of room: so this is how much there is
            self._leaving = False
            weight = _FULL_WEIGHT if self._full else 1.0
            self._full += weight * (self._live - self._full)
        self._live -= len(pages)
        self._uses[pages] = 0
        self._sampled[pages] = False
        if self._open:
            for page in pages.tolist():
                self._open.pop(page, None)

    def study(self, now: float) -> Study | None:
        inner = self._inner.study(now)
        after = self._next.study(now) if self._next is not None else None
        idle = inner is None and after is None and self._next is None
        if idle and len(self._events) < STUDY_EVENTS:
            return None
        events, self._events = self._events, []
        self._open.clear()
        return _AutoStudy(self, events, [each for each in (inner, after) if each is not None])

    def _enter(self, pages: Ids, keys: Keys, run: Run, last: Scores | float) -> None:
        """Fill in the rows of new pages."""
        if int(pages.max()) >= len(self._uses):
            for name in ("uses", "last", "hash", "sampled", "depth", "parent", "kind", "known"):
                setattr(self, f"_{name}", grown(getattr(self, f"_{name}"), pages))
        hashes = mixed(keys)
        self._uses[pages] = 1
        self._last[pages] = last
        self._hash[pages] = hashes
        self._sampled[pages] = in_sample(hashes, self._bits)
        self._depth[pages] = run.depths
        self._parent[pages] = run.parents
        about = (run.page_tokens, run.page_bytes, run.token_s)
        kind = self._kinds.setdefault(about, len(self._kinds))
        self._kind[pages] = min(kind, KINDS_MAX)
        self._live += len(pages)

    def _count(self, pages: Ids) -> None:
        """Pages of one chain were asked for."""
        hot = self._uses[pages] >= HOT_USES
        if self._cost.objective == "hits":
            self._asked += len(pages)
            self._hot += int(hot.sum())
            return
        tokens, size, token_s = self._kind_of(int(self._kind[pages[0]]))
        run = Run(self._depth[pages], self._parent[pages], tokens, 0, size, token_s)
        worth = self._cost.of(run)
        self._asked += float(worth.sum())
        self._hot += float(worth[hot].sum())

    def _kind_of(self, number: int) -> tuple[int, int, float]:
        return list(self._kinds)[number]

    def _note(self, pages: Ids, now: float, place: int | None) -> None:
        """What the shadows are to be asked; `place`: of the event that this one goes on."""
        chosen = pages[self._sampled[pages]]
        last = int(pages[-1])
        if len(self._events) >= EVENTS_MAX:
            self._skipped += 1
            return
        if not len(chosen):
            self._open[last] = -1 if place is None else place
            return
        end, keys, depths = int(self._depth[last]) + 1, self._hash[chosen], self._depth[chosen]
        hot = self._uses[chosen] >= HOT_USES
        if place is not None and place >= 0:
            asked = self._events[place]
            self._events[place] = replace(
                asked,
                keys=np.concatenate([asked.keys, keys]),
                depths=np.concatenate([asked.depths, depths]),
                hot=np.concatenate([asked.hot, hot]),
                end_depth=end,
            )
        else:
            above = _NO_KEYS if place == -1 else self._above(int(self._parent[pages[0]]))
            tokens, size, token_s = self._kind_of(int(self._kind[last]))
            place = len(self._events)
            self._events.append(Asked(now, above, keys, depths, end, tokens, size, hot, token_s))
        self._open[last] = place

    def _above(self, page: int) -> Keys:
        """Sampled pages of the chain that ends in a page, first page first."""
        found: list[int] = []
        while page != NO_PARENT:
            if self._sampled[page]:
                found.append(int(self._hash[page]))
            page = int(self._parent[page])
        return np.array(found[::-1], np.uint64)

    # A change of policy

    def _adopt(self, winner: str | None) -> None:
        """After a study: what it found, and a piece of the change that is under way."""
        if self._bits != self.shadows.bits:
            self._bits = self.shadows.bits
            self._sampled &= in_sample(self._hash, self._bits)
        if len(self.shadows.left_out) > self._left_out:
            hashes = np.array(list(self.shadows.left_out), np.uint64)
            self._left_out = len(hashes)
            self._sampled &= ~np.isin(self._hash, hashes)
        if winner is not None and winner != self._inner.name:
            self._next = self._make(winner, self._pages)
            if isinstance(self._next, CslPolicy):
                learnt = self.shadows.shadow(winner).policy
                assert isinstance(learnt, CslPolicy)
                self._next.learn_from(learnt)
            self._known[:] = False
            self._told = 0
        elif winner is not None:  # back to the one that still decides
            self._next = None
        if self._next is not None:
            rows = np.arange(self._told, min(self._told + PIECE_ROWS, len(self._uses)))
            self._told += len(rows)
            self._tell(rows[(self._uses[rows] > 0) & ~self._known[rows]].astype(np.int32))
            if self._told >= len(self._uses):
                self._inner, self._next = self._next, None

    def _tell(self, pages: Ids) -> None:
        """Let the next policy know pages that it does not know yet."""
        assert self._next is not None
        for number, (tokens, size, token_s) in enumerate(self._kinds):
            mine = pages[self._kind[pages] == number]
            if len(mine):
                uses = self._uses[mine]
                depths, parents = self._depth[mine], self._parent[mine]
                run = Run(depths, parents, tokens, tokens, size, token_s, uses)
                self._next.restore(mine, self._hash[mine], run, self._last[mine])
                self._known[mine] = True


class _AutoStudy(Study):
    """What was asked for since the last one, on its way through the shadows."""

    def __init__(self, auto: AutoPolicy, events: list[Asked], others: list[Study]) -> None:
        self._auto = auto
        self._events = events
        self._others = others
        self._size = Counted(auto._asked, auto._hot), auto._live, auto._full
        self._winner: str | None = None

    def work(self) -> None:
        for each in self._others:
            each.work()
        self._winner = self._auto.shadows.run(self._events, *self._size)

    def adopt(self) -> None:
        auto, shadows = self._auto, self._auto.shadows
        for each in self._others:
            each.adopt()
        auto._adopt(self._winner)
        auto.report = AutoReport(
            following=shadows.contest.following,
            switches=shadows.contest.switches,
            capacity_pages=round(shadows.capacity),
            sampled_pages=shadows.pages,
            sampled_part=2.0**-shadows.bits,
            skipped=auto._skipped,
            curves=shadows.curves(),
        )
