"""A reservation: slots being written, invisible until committed.

A run of pages starts under a visible page, which stays leased, or at the start of a prompt, or
after a run that the same session is still writing; then it can only be published after that one.
Its pages become visible together, and only after their bytes have been checksummed.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

from kvstore.errors import InvalidRequest
from kvstore.request import checked_deadline
from kvstore.state import HOST, NO_PAGE
from kvstore.tiers.checksum import checksum, copy_and_checksum

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from kvstore.session import Session


PRESENT = "present"
LIMIT = "limit"
COMMIT_S, DURABLE_COMMIT_S = 2.0, 10.0  # how long commit() waits unless the call says otherwise
OUT_OF_ORDER = "the run before it was not committed"
Chain = tuple[bytes, dict[int, bytes]]  # whole pages of tokens, extras by page index
NOTHING: Chain = (b"", {})


@dataclass(frozen=True, slots=True)
class Run:
    """The pages of a reservation: where they start and what names them."""

    start: int  # page index of the first one
    parent: int  # page id, NO_PAGE at the start of a prompt
    tokens: bytes  # int32 little-endian, whole pages
    extras: dict[int, bytes]  # by position in the run
    keys: bytes  # 16 a page
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Commit:
    """What commit() did."""

    pages: int  # visible now
    durable: bool  # they and all their ancestors are on disk
    reason: str = ""  # why fewer, or why not durable


def commit_deadline(deadline_s: float | None, *, durable: bool) -> float:
    """How long a commit may wait; InvalidRequest."""
    if deadline_s is None:
        return DURABLE_COMMIT_S if durable else COMMIT_S
    return checked_deadline(deadline_s)


class Reservation:
    """What Session.reserve() gave. Fill its views, then commit; leaving without a commit aborts."""

    def __init__(
        self,
        session: Session,
        run: Run,
        reason: str,
        chain: Chain = NOTHING,
        before: Reservation | None = None,
    ) -> None:
        """`chain`: the tokens and extras of a prompt of which all was present. `before`: the open
        run that this one follows. The lock is held."""
        self._session = session
        self._state = session.state
        self._run = run
        self._open = bool(run.slots)
        self._views: list[memoryview] = []
        self._chain = chain
        self._before = before  # until it is published
        self._after: list[Reservation] = []
        self._copying = False  # commit() uses the slots
        self._dropped = False  # not by its owner
        self.reason = reason
        if before is not None:
            before._after.append(self)

    @property
    def start(self) -> int:
        """Page index of the first page to write; all before it are stored already."""
        return self._run.start

    @property
    def count(self) -> int:
        """How many pages to write; 0 with a `reason` when there is nothing to do."""
        return len(self._run.slots)

    @property
    def keys(self) -> bytes:
        """The keys of its pages, 16 bytes each."""
        return self._run.keys

    @property
    def first_key(self) -> bytes:
        """The key of its first page."""
        return self._run.keys[:16]

    def views(self) -> list[memoryview]:
        """Writable bytes, `spec.page_bytes` a page. They end with commit or abort.

        After that a view raises ValueError; an array made from one must not be written any more.
        """
        self._state.require_open()
        if not self._open or self._state.host is None:
            return []
        size = self._session.spec.page_bytes
        made = [self._state.host.view(slot, size) for slot in self._run.slots]
        self._views += made
        return made

    def commit(
        self,
        *,
        durable: bool = False,
        deadline_s: float | None = None,
        sources: Sequence[memoryview] | None = None,
    ) -> Commit:
        """Publish the pages. With `durable`, wait until they and their ancestors are on disk.

        deadline_s: how long it waits for the disk, 10 unless given; without `durable` it waits for
        nothing. sources: bytes of each page, to be copied in first; what is checksummed is the
        copy, so that memory which somebody else still writes may be given.
        Where all was "present" already, there is nothing to publish, but `durable` still waits.
        Nothing is published, with a reason, where the run before this one was not.
        Raises InvalidRequest when the reservation was given up, or never had anything to commit.
        """
        state = self._state
        deadline = state.clock() + commit_deadline(deadline_s, durable=durable)
        started_s = perf_counter()
        with state.lock:
            state.require_open()
            if self._before is not None:
                self._drop()
            if self._dropped:
                return Commit(0, durable=False, reason=OUT_OF_ORDER)
            if not self._open and self.reason != PRESENT:
                raise InvalidRequest("this reservation is empty, committed or aborted already")
            self._copying = self._open
        try:
            checksums = self._checksums(sources)
        finally:
            with state.lock:
                self._copying = False
                if self._dropped and not state.closed:
                    self._give_up()
        writer, ticket = self._session.disk_writer, None
        with state.lock:
            state.require_open()
            if self._dropped:
                return Commit(0, durable=False, reason=OUT_OF_ORDER)
            published = self._open
            self._open = False
            self._withdraw_views()
            last = self._publish(checksums) if published else self._session.last_page(self._chain)
            if durable and writer is not None and last != NO_PAGE:
                ticket = writer.ticket([last])
            if published:
                self._settle()
                state.meters.store.observe(perf_counter() - started_s)
        count = len(self._run.slots) if published else 0
        if ticket is None or writer is None:
            reason = "this store has no disk tier" if durable else ""
            return Commit(count, durable=False, reason=reason)
        if writer.wait(ticket, deadline):
            return Commit(count, durable=True)
        reason = "the deadline passed"
        if not ticket.remaining:
            reason = writer.why_lost(self._session.tenant)
        return Commit(count, durable=False, reason=reason)

    def abort(self) -> None:
        """Give the slots back; nothing was ever visible. Doing it again does nothing.

        Runs of this session that follow it are given up with it.
        """
        with self._state.lock:
            if not self._open or self._state.closed:
                return
            if self._copying:  # another thread commits it; it gives up in a moment
                self._dropped = True
            else:
                self._give_up()

    def __enter__(self) -> Reservation:
        return self

    def __exit__(self, *exc: object) -> None:
        self.abort()

    def _drop(self) -> None:
        """Give it up where its owner does not expect it. The lock is held."""
        if self._open:
            self._dropped = True
            self.abort()

    def _give_up(self) -> None:
        self._open = False
        self._withdraw_views()
        if self._state.host is not None:
            self._state.host.free_many(list(self._run.slots))
        self._settle()

    def _withdraw_views(self) -> None:
        """What was handed out for writing must not change a published page, or a freed slot."""
        for view in self._views:
            with contextlib.suppress(BufferError):  # an array of the caller's still looks at it
                view.release()
        self._views = []

    def _checksums(self, sources: Sequence[memoryview] | None) -> NDArray[np.uint64]:
        views = self.views()
        if sources is None:
            sums = [checksum(view) for view in views]
        else:
            pairs = zip(sources, views, strict=True)
            sums = [copy_and_checksum(source, view) for source, view in pairs]
        return np.frombuffer(b"".join(sums), dtype=np.uint64).reshape(-1, 2)

    def _publish(self, checksums: NDArray[np.uint64]) -> int:
        """Make the pages visible and queue them for the disk; the last one's id."""
        state, run, count = self._state, self._run, len(self._run.slots)
        assert state.host is not None
        first = state.take_sequences(count)
        state.trees.setdefault(self._session.root, self._session.tree)
        slots = list(run.slots)
        state.host.publish_many(slots)
        pages = state.index.insert(
            self._session.root,
            self._session.spec.page_tokens,
            run.parent,
            run.tokens,
            run.extras,
            run.keys,
            np.arange(first, first + count, dtype=np.uint64),
            self._session.spec.page_bytes,
            checksums,
            state.clock(),
            self._session.writer_id,
            self._session.prefill.token_s,
        )
        state.index.set_tier(pages, HOST, np.array(slots, dtype=np.int64))
        state.index.table.created[pages] = int(state.wall_clock())
        state.counters.pages_committed += count
        self._session.traffic.stored_pages += count
        state.meters.move("writer", "host", count * self._session.spec.page_bytes)
        state.ghosts.back(run.keys)
        writer = self._session.disk_writer
        if writer is not None:
            wanted = state.admission.stored(pages)
            queued = len(wanted) and writer.enqueue(wanted.tolist())
            # Not np.setdiff1d: its first call imports for 35 ms, and the lock is held here.
            left = set(pages.tolist())
            state.unwritten.update(left.difference(wanted.tolist()) if queued else left)
        for behind in self._after:
            behind._follow(int(pages[-1]))
        if self._session.share is not None:
            self._session.share.writer.enqueue(pages.tolist())
        return int(pages[-1])

    def _follow(self, parent: int) -> None:
        """The run before this one is published: its last page is leased for this one now."""
        if self._open:
            self._state.index.lease(parent)
            self._run, self._before = replace(self._run, parent=parent), None

    def _settle(self) -> None:
        """Forget what was pending and let the parent go. The lock is held."""
        state = self._state
        for behind in self._after:
            if behind._before is self:  # not published, so neither will it be
                behind._drop()
        self._after = []
        for position in range(len(self._run.slots)):
            key = self._run.keys[16 * position : 16 * position + 16]
            state.pending.discard((self._session.root, key))
        if self._run.parent != NO_PAGE:
            state.index.unlease(self._run.parent)
        state.retry_condemned()
        state.changed.notify_all()
        self._session.forget(self)
