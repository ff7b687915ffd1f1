"""Empties whole containers, extents of the arena or segments of the disk, to be remade.

Some pages leave in each hold of the lock; who asked for the room calls again until it is there.
Meanwhile nobody takes slots in the container, and it is opened again when it is empty, when it
cannot be emptied after all, or when its asker has not come back for a while. The lock is held
around each call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvstore.prefix_index.page_table import HELD
from kvstore.state import HOST, PIECE_PAGES
from kvstore.tiers.tier import SLOT_INDEX_BITS

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from kvstore.state import StoreState
    from kvstore.tiers.tier import Container

    MayGo = Callable[[NDArray[np.int32]], bool]

SAMPLE_ROWS = 1 << 14  # of the page table with a page there, to tell how warm containers are
CLOSURE_PAGES = 4 * PIECE_PAGES  # that leave in one hold, with those below them elsewhere
TRIED_MAX = 8  # containers, in one hold
DEPTH_MAX = 0xFFFF  # 16 bits are sorted ten times as fast
IDLE_S = 1.0


@dataclass(slots=True)
class Emptying:
    """One container under way."""

    container: Container
    pages: NDArray[np.int32]  # deepest first
    sequences: NDArray[np.uint64]
    last_s: float
    at: int = 0


class Emptier:
    """Of one store; an asker is a tier, a tenant and a size of slots."""

    def __init__(self, state: StoreState, leave: Callable[[int, NDArray[np.int32]], None]) -> None:
        self._state = state
        self._leave = leave
        self._under_way: dict[tuple[int, str, int], Emptying] = {}
        # When one last could not be emptied, by tier and container: others are tried before it.
        self._refused_s: dict[tuple[int, int], float] = {}

    def container(self, asker: tuple[int, str, int]) -> Container | None:
        """What is being emptied for this asker."""
        going = self._under_way.get(asker)
        return going.container if going is not None else None

    def taken_from(self, tier: int, tenant: str, besides: tuple[int, str, int]) -> list[Container]:
        """A tenant's containers that others are about to have, but for this asker."""
        return [
            going.container
            for asker, going in self._under_way.items()
            if asker[0] == tier
            and asker != besides
            and going.container.tenant == tenant != asker[1]
        ]

    def drop_idle(self) -> None:
        """Open containers again whose askers have not come back."""
        oldest_s = self._state.clock() - IDLE_S
        for asker, going in list(self._under_way.items()):
            if going.last_s < oldest_s:
                self.stop(asker)

    def stop(self, asker: tuple[int, str, int]) -> None:
        """Open the container again: it is empty, or stays as it is."""
        going = self._under_way.pop(asker, None)
        if going is not None:
            self._drain(asker[0], going.container, on=False)

    def start(self, asker: tuple[int, str, int], containers: list[Container], may_go: MayGo) -> int:
        """Begin with the container whose warmest page is the coldest; how many pages left it."""
        tier, table = asker[0], self._state.index.table
        busy = {each.container.container_id for each in self._under_way.values()}
        containers = [
            item for item in containers if item.used_slots and item.container_id not in busy
        ]
        if not containers:
            return 0
        homes = table.slot[tier][: table.rows] >> SLOT_INDEX_BITS
        held = set(homes[np.flatnonzero(table.state[: table.rows] & HELD)].tolist())
        warmest, refused_s = self._warmest(tier, homes), self._lately_refused()
        coldest_first = sorted(
            (item for item in containers if item.container_id not in held),
            key=lambda item: (
                (tier, item.container_id) in refused_s,
                warmest.get(item.container_id, np.inf),  # else: nobody knows
                item.used_slots,
            ),
        )
        for container in coldest_first[:TRIED_MAX]:
            inside = np.flatnonzero(homes == container.container_id).astype(np.int32)
            if len(inside) != container.used_slots:  # something is being written or read there
                refused_s[tier, container.container_id] = self._state.clock()
                continue
            depths = np.minimum(table.depth[inside], DEPTH_MAX).astype(np.uint16)
            inside = inside[np.argsort(DEPTH_MAX - depths, kind="stable")]
            self._under_way[asker] = Emptying(
                container, inside, table.sequence[inside], self._state.clock()
            )
            self._drain(tier, container, on=True)
            evicted = self.go_on(asker, may_go)
            if evicted:
                return evicted
        return 0

    def go_on(self, asker: tuple[int, str, int], may_go: MayGo) -> int:
        """Some more pages leave; how many. At 0 it is over: some may not go.

        Where the last ones have left by themselves, one counts: the container is there to be had.
        """
        going, tier = self._under_way.get(asker), asker[0]
        if going is None:
            return 0
        state = self._state
        going.last_s, evicted = state.clock(), 0
        while not evicted and going.at < len(going.pages):
            part = self._still_there(tier, going)
            pages = self._with_descendants(tier, part)
            if pages is None or not may_go(pages):
                break
            order = pages[np.argsort(-state.index.table.depth[pages], kind="stable")]
            victims = state.index.victims(tier, order[:CLOSURE_PAGES], state.clock())
            self._leave(tier, victims)
            evicted = len(victims)
            if evicted == len(order):
                going.at += PIECE_PAGES
            elif not evicted:
                break
        is_over = going.at >= len(going.pages)
        if not evicted and not is_over:
            self._refused_s[tier, going.container.container_id] = going.last_s
        if not evicted or is_over:
            self.stop(asker)
        return evicted or int(self._is_empty(tier, going.container))

    def _lately_refused(self) -> dict[tuple[int, int], float]:
        oldest_s = self._state.clock() - IDLE_S
        late = {each: at_s for each, at_s in self._refused_s.items() if at_s >= oldest_s}
        self._refused_s = late
        return late

    def _is_empty(self, tier: int, container: Container) -> bool:
        medium = self._state.host if tier == HOST else self._state.disk
        there = medium.containers() if medium is not None else []
        return any(
            not item.used_slots for item in there if item.container_id == container.container_id
        )

    def _still_there(self, tier: int, going: Emptying) -> NDArray[np.int32]:
        table = self._state.index.table
        part = slice(going.at, going.at + PIECE_PAGES)
        pages = going.pages[part]
        same = (table.node[pages] >= 0) & (table.sequence[pages] == going.sequences[part])
        same &= table.slot[tier][pages] >> SLOT_INDEX_BITS == going.container.container_id
        still: NDArray[np.int32] = pages[same]
        return still

    def _warmest(self, tier: int, homes: NDArray[np.int64]) -> dict[int, float]:
        """The best score in each container, of a sample of the pages of this tier."""
        rows = np.flatnonzero(homes >= 0).astype(np.int32)
        rows = rows[:: 1 + len(rows) // SAMPLE_ROWS]
        ids, places = np.unique(homes[rows], return_inverse=True)
        best = np.full(len(ids), -np.inf)
        np.maximum.at(best, places, self._state.policy.scores(rows, tier))
        return dict(zip(ids.tolist(), best.tolist(), strict=True))

    def _with_descendants(self, tier: int, pages: NDArray[np.int32]) -> NDArray[np.int32] | None:
        """Pages and all below them in this tier; None when one of them is leased or pinned."""
        state, table = self._state, self._state.index.table
        seen: set[int] = set()
        for page in pages[::-1].tolist():  # the highest of a chain first: that covers the others
            if page not in seen:
                seen.update(state.index.subtree(page).tolist())
        closure = np.fromiter(seen, dtype=np.int32, count=len(seen))
        if np.any(table.state[closure] & HELD):
            return None
        return closure[state.in_tier(closure, tier)]

    def _drain(self, tier: int, container: Container, *, on: bool) -> None:
        medium = self._state.host if tier == HOST else self._state.disk
        if medium is not None:
            medium.drain(container.container_id, on=on)
