"""A match on a server: the longest stored chain of a prompt, leased there until release().

Pages are read where the server keeps them, through shared memory, or come as a stream into private
memory when they are staged. In shared memory the lease holds a page in its place, and the slot's
generation proves it: it moves with the page, also when the server has died since. So copy first,
then ask valid().
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from kvstore.errors import InvalidRequest
from kvstore.kvstore_pb2 import ReadPagesHeader, StageRequest
from kvstore.request import checked_deadline
from kvstore.tiers.tier import SLOT_INDEX_BITS, SLOT_INDEX_MASK

if TYPE_CHECKING:
    from collections.abc import Hashable

    from numpy.typing import NDArray

    from kvstore.kvstore_pb2 import MatchReply, Places
    from kvstore.live_session import LiveSession
    from kvstore.remote_session import RemoteSession
    from kvstore.shared_memory import MappedExtent

STAGE_DEADLINE_S_MAX = 59.0
STAGE_MARGIN_S = 0.25  # for the answer to get here
FETCH_S_MIN = 0.05

_NO_GENERATIONS = np.zeros(0, np.uint64)


class Window:
    """Leading pages of a chain in mapped extents; holding it keeps them mapped."""

    def __init__(self, live: LiveSession, places: Places) -> None:
        slots = np.frombuffer(places.host_slots, "<i8")
        self._wanted = np.frombuffer(places.host_generations, "<u8")
        absent = slots < 0
        there = int(np.argmax(absent)) if absent.any() else len(slots)
        containers = slots[:there] >> SLOT_INDEX_BITS
        self._indices = slots[:there] & SLOT_INDEX_MASK
        # An array of generations keeps its extent mapped, also when the session ends meanwhile.
        self._extents: dict[int, tuple[MappedExtent, NDArray[np.uint64]]] = {}
        for container in np.unique(containers).tolist():
            extent = live.extent(container)
            generations = _NO_GENERATIONS if extent is None else extent.generations
            if extent is not None and len(generations) == extent.slots > 0:
                self._extents[container] = extent, generations
            else:
                there = min(there, int(np.argmax(containers == container)))
        self._containers = containers[:there]
        moved = ~self._unmoved(0, there)
        self.pages = int(np.argmax(moved)) if moved.any() else there

    def views(self, start: int, stop: int, page_bytes: int) -> list[memoryview]:
        """Bytes of pages [start, stop), read-only."""
        extents = self._extents
        places = zip(
            self._containers[start:stop].tolist(), self._indices[start:stop].tolist(), strict=True
        )
        return [extents[container][0].view(index, page_bytes) for container, index in places]

    def is_valid(self, start: int, stop: int) -> bool:
        """Whether no page of [start, stop) has moved since the server named it."""
        if not all(extent.is_live for extent, _ in self._extents.values()):
            return False
        return bool(self._unmoved(start, stop).all())

    def _unmoved(self, start: int, stop: int) -> NDArray[np.bool_]:
        now = np.zeros(stop - start, np.uint64)
        containers, indices = self._containers[start:stop], self._indices[start:stop]
        if len(self._extents) == 1:
            [(_, generations)] = self._extents.values()
            now = generations[indices]
        else:
            for container, (_, generations) in self._extents.items():
                of_this = containers == container
                now[of_this] = generations[indices[of_this]]
        same: NDArray[np.bool_] = (now == self._wanted[start:stop]) & (now % 2 == 0)
        return same


class RemoteMatch:
    """What RemoteSession.match() found. Release it, or use it in a `with` statement."""

    def __init__(
        self,
        session: RemoteSession,
        live: LiveSession | None,
        reply: MatchReply | None,
        reason: str = "",
    ) -> None:
        """A miss has neither `live` nor `reply`. `reason`: why more may be stored."""
        self._session = session
        self._live = live
        self._id = reply.match if reply is not None else 0
        self.pages = reply.pages if reply is not None else 0
        self.reason = reason
        self._places = reply.places if reply is not None else None
        self._window: Window | None = None
        self._fetched: NDArray[np.uint8] | None = None
        self._fetched_pages = 0
        self._seen = (0, 0)  # the pages that views() gave out

    @property
    def tokens(self) -> int:
        """Length of the chain in tokens."""
        return self.pages * self._session.spec.page_tokens

    @property
    def versions(self) -> list[Hashable]:
        """A name for each page's bytes that no other page has; None for what is in no arena now.

        It is the place and its generation, so a page that was out of the arena has a new one.
        """
        if self._places is None or self._live is None:
            return []
        slots = np.frombuffer(self._places.host_slots, "<i8").tolist()
        generations = np.frombuffer(self._places.host_generations, "<u8").tolist()
        return [
            (self._live.epoch, slot, generation) if slot >= 0 else None
            for slot, generation in zip(slots, generations, strict=True)
        ]

    @property
    def tiers(self) -> list[str]:
        """Where each page was when the server last said: "host", or "disk" for any slower tier."""
        if self._places is None:
            return []
        slots = np.frombuffer(self._places.host_slots, "<i8")
        return ["host" if slot >= 0 else "disk" for slot in slots.tolist()]

    @property
    def host_pages(self) -> int:
        """How many leading pages can be read now; without shared memory, those that stage() got."""
        if self._live is None or self._places is None or self._session.is_forked():
            return 0
        if not self._live.is_shared:
            return self._fetched_pages
        if self._window is None:
            self._window = Window(self._live, self._places)
        return self._window.pages

    def stage(self, deadline_s: float | None = None) -> int:
        """Bring the chain's pages where they can be read; how many leading pages are there now.

        Returns after at most `deadline_s` seconds (ClientConfig.stage_deadline_s unless given).
        """
        wait_s = self._session.stage_deadline_s if deadline_s is None else deadline_s
        deadline = time.monotonic() + min(checked_deadline(wait_s), STAGE_DEADLINE_S_MAX)
        there = self.host_pages
        if self._live is None or there == self.pages or not self._id:
            return there
        if not self._live.is_shared and "disk" not in self.tiers:
            return self._fetch(self._live, self.pages, deadline)
        left_s = max(0.0, deadline - time.monotonic())
        request = StageRequest(session=self._live.id, match=self._id, deadline_s=left_s)
        reply = self._session.ask(self._live, "Stage", request, left_s + STAGE_MARGIN_S)
        if reply is None:
            return there
        self._places, self._window = reply.places, None
        if self._live.is_shared:
            return self.host_pages
        return self._fetch(self._live, min(reply.host_pages, self.pages), deadline)

    def views(self, start: int = 0, stop: int | None = None) -> list[memoryview]:
        """Read-only bytes of pages [start, stop), `spec.page_bytes` each; stage() them first."""
        there = self.host_pages
        stop = there if stop is None else stop
        if not 0 <= start <= stop <= there:
            raise InvalidRequest(f"views [{start}, {stop}) of a match with {there} pages in memory")
        if start == stop:
            return []
        size = self._session.spec.page_bytes
        seen_start, seen_stop = self._seen if self._seen[1] else (start, stop)
        self._seen = min(seen_start, start), max(seen_stop, stop)
        if self._window is not None:
            return self._window.views(start, stop, size)
        assert self._fetched is not None
        whole = self._fetched.data.toreadonly()
        return [whole[page * size : (page + 1) * size] for page in range(start, stop)]

    def places(self, start: int, stop: int) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
        """Slots and generations of pages [start, stop), for other processes that copy them.

        They check the generations after the copy. InvalidRequest unless the pages are in memory
        that is shared.
        """
        there = self.host_pages
        if self._window is None or self._places is None:
            there = 0
        if not 0 <= start <= stop <= there:
            raise InvalidRequest(f"places [{start}, {stop}) of a match with {there} shared pages")
        if start == stop:
            return np.zeros(0, np.int64), np.zeros(0, np.uint64)
        assert self._places is not None
        slots = np.frombuffer(self._places.host_slots, "<i8")[start:stop]
        generations = np.frombuffer(self._places.host_generations, "<u8")[start:stop]
        return slots.astype(np.int64), generations.astype(np.uint64)

    def valid(self) -> bool:
        """Whether all that was copied out of views until now is right; else drop it."""
        if self._live is None or self._session.is_forked():
            return False
        return self._window is None or self._window.is_valid(*self._seen)

    def release(self) -> None:
        """End the lease, without waiting for the server; doing it again does nothing."""
        live, number = self._live, self._id
        self._live, self._id, self._places = None, 0, None
        self.pages = 0
        self._window = self._fetched = None
        self._fetched_pages = 0
        if live is not None and number and not self._session.is_forked():
            self._session.give_back.release(live, number)

    def __enter__(self) -> RemoteMatch:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()

    def _fetch(self, live: LiveSession, stop: int, deadline: float) -> int:
        """Read pages [0, stop) of the stream into private memory; how many came whole."""
        size = self._session.spec.page_bytes
        start = self._fetched_pages
        if stop <= start:
            return start
        buffer = np.empty(stop * size, np.uint8)
        if self._fetched is not None:
            buffer[: start * size] = self._fetched[: start * size]
        header = ReadPagesHeader(session=live.id, match=self._id, start=start, stop=stop)
        timeout_s = max(FETCH_S_MIN, deadline - time.monotonic())
        got = self._session.read_pages(live, header, buffer.data[start * size :], timeout_s)
        self._fetched, self._fetched_pages = buffer, start + got // size
        return self._fetched_pages
