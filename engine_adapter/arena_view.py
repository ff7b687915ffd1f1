"""A session's memory in a process that only copies: pages by slot, staging by offset.

Several sessions may be attached, each under its epoch. Memory that was mapped stays readable when
its server dies; what cannot be had is NotThere, never a signal.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from kvstore.shared_memory import Attachment, SharedMemoryError, attach, place_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore.engine_adapter.transfer_plan import Grant
    from kvstore.shared_memory import MappedExtent

# Only a server that hangs lets this pass; then what it was asked for is not there.
ANSWER_S_MAX = 0.25
ATTACH_S_MAX = 2.0
ATTACHED_MAX = 16  # sessions; the oldest goes first

_log = logging.getLogger("kvstore.vllm")


class NotThere(Exception):
    """A page or staging that cannot be had, in a word or two."""


class ArenaView:
    """Thread-safe; views that it gave stay good after close()."""

    def __init__(self, server_uid: int | None = None) -> None:
        """`server_uid`: whose server to trust; None is this process's own user."""
        self._server_uid = server_uid
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
        return True

    @contextlib.contextmanager
    def page(self, epoch: int, slot: int, generation: int, size: int) -> Iterator[memoryview]:
        """A page's bytes to copy; NotThere on leaving if they were not that page's all the time."""
        container, index = place_of(slot)
        extent = self._extent(epoch, container)
        generations = extent.generations  # keeps the extent mapped
        try:
            if generation % 2 or int(generations[index]) != generation:
                raise NotThere("moved")
            view = extent.view(index, size)
        except (ValueError, IndexError) as exc:
            raise NotThere("no such slot") from exc
        yield view
        if int(generations[index]) != generation or not _is_live(extent):
            raise NotThere("moved")

    @contextlib.contextmanager
    def staging(self, epoch: int, offset: int, size: int) -> Iterator[memoryview]:
        """Staging memory to write; NotThere."""
        attachment = self._attached.get(epoch)
        if attachment is None or attachment.staging is None:
            raise NotThere("not attached")
        try:
            view = attachment.staging.view(offset, size)
        except ValueError as exc:
            raise NotThere("no such staging") from exc
        yield view

    def close(self) -> None:
        """Let go of all; what is being copied stays mapped until that is done."""
        with self._lock:
            attached, self._attached = self._attached, {}
            self.epoch = 0
        for each in attached.values():
            each.close()

    def _extent(self, epoch: int, container: int) -> MappedExtent:
        attachment = self._attached.get(epoch)
        if attachment is None:
            raise NotThere("not attached")
        extent = attachment.extents.get(container)
        if extent is None:
            with self._lock:
                extent = attachment.extents.get(container) or self._refreshed(epoch, container)
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


def _is_live(extent: MappedExtent) -> bool:
    try:
        return extent.is_live
    except ValueError:  # unmapped just now: what was copied was right, but nobody can say so
        return False
