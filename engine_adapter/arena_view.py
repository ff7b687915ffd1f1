"""A session's memory in a process that only copies: pages by slot, staging by offset.

Several sessions may be attached, each under its epoch. Memory that was mapped stays readable when
its server dies; what cannot be had is NotThere, never a signal. Where a device reads the arena in
place, extents are registered with it. Invariant: none is let go of while reading() goes on.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstore.shared_memory import Attachment, SharedMemoryError, attach, place_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from kvstore.engine_adapter.pinned_arena import PinnedArena
    from kvstore.engine_adapter.transfer_plan import Grant
    from kvstore.shared_memory import MappedExtent

# Only a server that hangs lets this pass; then what it was asked for is not there.
ANSWER_S_MAX = 0.25
ATTACH_S_MAX = 2.0
ATTACHED_MAX = 16  # sessions; the oldest goes first

_log = logging.getLogger("kvstore.vllm")


class NotThere(Exception):
    """A page or staging that cannot be had, in a word or two."""


@dataclass(frozen=True, slots=True)
class ArenaPage:
    """A page's bytes to copy. They were that page's if it has not `moved` when the copy is done.

    `in_place`: a device may read them where they are.
    """

    memory: memoryview
    in_place: bool
    _extent: MappedExtent
    _generations: NDArray[Any]  # keeps the extent mapped
    _index: int
    _generation: int

    @property
    def moved(self) -> bool:
        """Whether these bytes may be another page's by now."""
        return int(self._generations[self._index]) != self._generation or not _is_live(self._extent)


class ArenaView:
    """Thread-safe; memory that it gave stays mapped after close()."""

    def __init__(self, server_uid: int | None = None) -> None:
        """`server_uid`: whose server to trust; None is this process's own user."""
        self._server_uid = server_uid
        self._pins: PinnedArena | None = None
        self._pin_later: Callable[[], object] = _nothing
        self._reading = 0
        self._unsettled = False
        # What a device may read, all of each mapping; replaced, never changed, when it grows.
        self._registered: dict[MappedExtent, memoryview] = {}
        self._attached: dict[int, Attachment] = {}
        self._silent: set[int] = set()  # epochs whose server does not answer any more
        self._lock = threading.Lock()
        self.epoch = 0  # of the session attached last, 0 when it is of no more use

    def attach(self, grant: Grant, rank: int) -> bool:
        """Map the memory of a session with this rank's token; False, and a log line, if not."""
        if grant.epoch in self._attached:
            self.epoch = grant.epoch
            return True
        try:
            made = attach(
                Path(grant.path),
                grant.tokens[rank],
                server_uid=self._server_uid,
                timeout_s=ATTACH_S_MAX,
            )
            made.set_timeout(ANSWER_S_MAX)
        except (SharedMemoryError, OSError, ValueError, IndexError) as exc:
            _log.warning("kvstore: rank %d cannot map the server's memory: %s", rank, exc)
            return False
        with self._lock:
            self._attached[grant.epoch] = made
            self.epoch = grant.epoch
            surplus = list(self._attached)[:-ATTACHED_MAX]
            dropped = [self._attached.pop(epoch) for epoch in surplus]
        for old in dropped:
            old.close()
        self._pin_later()
        return True

    def use_pins(self, pins: PinnedArena, pin_later: Callable[[], object]) -> None:
        """Register extents with a device. `pin_later` has settle_pins() called, beside the copies.

        It takes about 0.1 s a GiB; pages of what is not registered yet can be copied all the same.
        """
        self._pins, self._pin_later = pins, pin_later

    def settle_pins(self) -> None:
        """Register extents that are new; let go of those that are gone, once nobody reads.

        From one thread.
        """
        if self._pins is None:
            return
        wanted: dict[MappedExtent, memoryview] = {}
        with self._lock:
            for attachment in self._attached.values():
                for extent in attachment.extents.values():
                    with contextlib.suppress(ValueError):  # unmapped just now
                        wanted[extent] = extent.memory
            gone = {key: each for key, each in self._registered.items() if key not in wanted}
            self._unsettled = bool(gone and self._reading)
            if self._reading:
                gone = {}
            self._registered = {k: v for k, v in self._registered.items() if k not in gone}
        for memory in gone.values():  # nobody finds them any more
            self._pins.unpin(memory)
        for extent, memory in wanted.items():
            if extent not in self._registered and self._pins.pin(memory):
                with self._lock:
                    self._registered = {**self._registered, extent: memory}

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """While pages are asked for and copied: what they lie in stays registered."""
        with self._lock:
            self._reading += 1
        try:
            yield
        finally:
            with self._lock:
                self._reading -= 1
                settle = self._unsettled and not self._reading
            if settle:
                self._pin_later()

    def page(self, epoch: int, slot: int, generation: int, size: int) -> ArenaPage:
        """A page as it is now; NotThere."""
        container, index = place_of(slot)
        extent = self._extent(epoch, container)
        generations = extent.generations
        try:
            if generation % 2 or int(generations[index]) != generation:
                raise NotThere("moved")
            memory = extent.view(index, size)
        except (ValueError, IndexError) as exc:
            raise NotThere("no such slot") from exc
        return ArenaPage(memory, extent in self._registered, extent, generations, index, generation)

    def staging(self, epoch: int, offset: int, size: int) -> memoryview:
        """Staging memory to write; NotThere."""
        attachment = self._attached.get(epoch)
        if attachment is None or attachment.staging is None:
            raise NotThere("not attached")
        try:
            return attachment.staging.view(offset, size)
        except ValueError as exc:
            raise NotThere("no such staging") from exc

    def close(self) -> None:
        """Let go of all; what is being copied stays mapped until that is done."""
        with self._lock:
            attached, self._attached = self._attached, {}
            self.epoch = 0
            idle, registered = not self._reading, self._registered
            self._registered = {}
        for each in attached.values():
            each.close()
        if self._pins is not None and idle:  # else a copy hangs, and the process is ending
            for memory in registered.values():
                self._pins.unpin(memory)

    def _extent(self, epoch: int, container: int) -> MappedExtent:
        attachment = self._attached.get(epoch)
        if attachment is None:
            raise NotThere("not attached")
        extent = attachment.extents.get(container)
        if extent is None:
            with self._lock:
                extent = attachment.extents.get(container) or self._refreshed(epoch, container)
            self._pin_later()
        return extent

    def _refreshed(self, epoch: int, container: int) -> MappedExtent:
        """An extent that is new since the last look."""
        attachment = self._attached.get(epoch)
        if attachment is None or epoch in self._silent:
            raise NotThere("no such extent")
        try:
            attachment.refresh()
        except (SharedMemoryError, OSError, ValueError, RuntimeError) as exc:
            # Half an answer may be under way. What is mapped stays; a new session is needed.
            self._silent.add(epoch)
            if self.epoch == epoch:
                self.epoch = 0
            _log.warning("kvstore: the server's memory cannot be mapped further: %s", exc)
            raise NotThere("no such extent") from exc
        extent = attachment.extents.get(container)
        if extent is None:
            raise NotThere("no such extent")
        return extent


def _nothing() -> None:
    """Where no device reads the arena."""


def _is_live(extent: MappedExtent) -> bool:
    try:
        return extent.is_live
    except ValueError:  # unmapped just now: what was copied was right, but nobody can say so
        return False
