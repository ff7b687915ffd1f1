"""Check a whole store: its structure, and every page's bytes in memory and on disk.

Pages are read in the order of their slots, two batches at a time, each leased while it is read, so
that look-ups, stores and evictions go on. Without repair nothing changes. With it, a damaged copy
is replaced by a good one from the other tier, or its page is dropped with all below it, and slots
that no page owns are given back.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from kvstore.accounts import check_index
from kvstore.ghost_list import why_left
from kvstore.page_sweep import each_page
from kvstore.state import DISK, HOST, TIER_NAMES
from kvstore.tiers.checksum import checksum
from kvstore.tiers.file_layer import contiguous_buffer
from kvstore.tiers.tier import ReadStatus, TierError, aligned

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from kvstore.disk_writer import DiskWriter
    from kvstore.housekeeper import Housekeeper
    from kvstore.state import StoreState
    from kvstore.tiers.tier import PageRecord

BATCH_BYTES = 32 << 20
BATCH_PAGES = 1024
READERS = 2
PROBLEMS_MAX = 100  # described one by one
PROGRESS_S = 0.2

_WORDS = {
    ReadStatus.CORRUPT: "its bytes fail their checksum",
    ReadStatus.STALE: "its slot holds another page",
    ReadStatus.ERROR: "it cannot be read",
    ReadStatus.LOCKED: "its key is gone",
}


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is not as it should be."""

    kind: str  # "page", "structure", "start", "slots"
    what: str
    repaired: bool
    page: str = ""  # hex of its key
    tier: str = ""


@dataclass(frozen=True, slots=True)
class Verification:
    """How far it is; the last one has `finished`."""

    pages_total: int  # copies of pages: one in both tiers counts twice
    pages: int = 0
    payload_bytes: int = 0
    bad_pages: int = 0
    repaired: int = 0  # problems, of all kinds
    dropped_pages: int = 0  # by the repair, those below bad ones included
    cut_off_pages: int = 0  # of an eviction that was cut off: nothing wrong, a repair finishes it
    problems_total: int = 0
    problems: tuple[Problem, ...] = ()
    seconds: float = 0.0
    finished: bool = False

    @property
    def healthy(self) -> bool:
        """Whether nothing is wrong now."""
        return self.problems_total == self.repaired

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"healthy": self.healthy}


@dataclass(slots=True)
class _Batch:
    tier: int
    pages: NDArray[np.int32]
    sequences: NDArray[np.uint64]
    held: list[int] = field(default_factory=list)  # those of the pages that were still there
    held_sequences: list[int] = field(default_factory=list)
    statuses: list[ReadStatus] = field(default_factory=list)
    payload_bytes: int = 0


class Verifier:
    """One run over one open store."""

    def __init__(
        self,
        state: StoreState,
        writer: DiskWriter | None,
        housekeeper: Housekeeper,
        *,
        repair: bool,
    ) -> None:
        self._state = state
        self._writer = writer
        self._housekeeper = housekeeper
        self._repair = repair
        self._memory = threading.local()
        self._cut_off: set[int] = set()  # sequence numbers
        self._now = Verification(0)

    def run(self) -> Iterator[Verification]:
        """Progress every PROGRESS_S; ends early, and changes nothing more, when it is closed."""
        started_s = said_s = time.monotonic()
        self._look_at_start()
        self._look_at_structure()
        batches = self._batches()
        self._now = replace(self._now, pages_total=sum(len(each.pages) for each in batches))
        with ThreadPoolExecutor(READERS, "kvstore-verify") as pool:
            waiting = deque(batches)
            running = deque(
                pool.submit(self._read, waiting.popleft())
                for _ in range(min(READERS, len(batches)))
            )
            try:
                while running:
                    done = running.popleft().result()
                    if waiting:
                        running.append(pool.submit(self._read, waiting.popleft()))
                    self._account(done)
                    if time.monotonic() - said_s > PROGRESS_S:
                        said_s = time.monotonic()
                        yield replace(self._now, seconds=said_s - started_s)
            finally:
                for each in running:
                    each.cancel()
        self._look_at_slots()
        yield replace(self._now, seconds=time.monotonic() - started_s, finished=True)

    # Structure

    def _look_at_start(self) -> None:
        """What opening the directory found, and has set right."""
        disk = self._state.disk
        if disk is None:
            return
        if disk.problem:
            self._add(Problem("start", f"the disk tier: {disk.problem}", repaired=False))
        if disk.catalog_problem:
            what = "the catalog was unusable, and is rebuilt from page headers: "
            self._add(Problem("start", what + disk.catalog_problem, repaired=True))
        dropped = disk.counters.records_dropped
        if dropped:
            what = f"{dropped} records of the catalog were unsound or had no page; dropped"
            self._add(Problem("start", what, repaired=True))

    def _look_at_structure(self) -> None:
        state = self._state
        try:
            check_index(state)
            self._housekeeper.check_accounting()
            if state.host is not None:
                state.host.check()
            if state.disk is not None:
                state.disk.check()
            if state.redis is not None:
                state.redis.check()
        except (AssertionError, TierError) as exc:
            self._add(Problem("structure", str(exc) or repr(exc), repaired=False))

    def _look_at_slots(self) -> None:
        if not self._repair:
            return
        if self._now.cut_off_pages:
            try:
                self._state.free_wiped_slots()  # what lay below wiped pages is wiped with this
            except TierError as exc:
                self._add(Problem("slots", f"not wiped from disk: {exc}", repaired=False))
        given_back = self._housekeeper.recover_slots() + self._housekeeper.recover_slots()
        if given_back:
            what = f"{given_back} slots were in use and of no page; given back"
            self._add(Problem("slots", what, repaired=True))

    def _add(self, problem: Problem) -> None:
        now = self._now
        listed = now.problems
        if len(listed) < PROBLEMS_MAX:
            listed = (*listed, problem)
        self._now = replace(
            now,
            problems=listed,
            problems_total=now.problems_total + 1,
            repaired=now.repaired + problem.repaired,
        )

    # Pages

    def _batches(self) -> list[_Batch]:
        """All copies of pages, in the order of their slots, in batches of one tier."""
        state = self._state
        made: list[_Batch] = []
        for tier, medium in ((DISK, state.disk), (HOST, state.host)):
            if medium is None:
                continue
            pages, sequences, slots, sizes = self._copies(tier)
            order = np.argsort(slots, kind="stable")
            pages, sequences = pages[order], sequences[order]
            made += [
                _Batch(tier, pages[part], sequences[part])
                for part in _parts(sizes[order].astype(np.int64))
            ]
        return made

    def _copies(self, tier: int) -> list[NDArray[Any]]:
        """Pages of a tier, and their sequence numbers, slots and sizes."""
        state, table = self._state, self._state.index.table
        parts: list[tuple[NDArray[Any], ...]] = []

        def look(live: NDArray[np.int32]) -> None:
            mine = live[state.in_tier(live, tier)]
            columns = (table.sequence, table.slot[tier], table.payload_bytes)
            parts.append((mine, *(column[mine] for column in columns)))

        each_page(state, look)
        return [np.concatenate(column) for column in zip(*parts, strict=True)]

    def _read(self, batch: _Batch) -> _Batch:
        """Read what is still there; runs in a thread of its own."""
        state, tier = self._state, batch.tier
        held = batch.held
        records: list[PageRecord] = []
        places: list[int] = []
        pages, sequences = batch.pages.tolist(), batch.sequences.tolist()
        try:
            for part in state.pieces(len(pages)):
                with state.lock:
                    state.require_open()
                    for page, sequence in zip(pages[part], sequences[part], strict=True):
                        if self._is_there(page, sequence, tier):
                            state.index.lease(page)
                            held.append(page)
                            batch.held_sequences.append(sequence)
                            records.append(state.record(page))
                            places.append(int(state.index.table.slot[tier][page]))
            if tier == DISK:
                batch.statuses = self._read_disk(places, records)
            else:
                batch.statuses = self._read_host(places, records)
        finally:
            for part in state.pieces(len(held)):
                with state.lock:
                    if not state.closed:
                        for page in held[part]:
                            state.index.unlease(page)
                        state.retry_condemned()
                        state.changed.notify_all()
        batch.payload_bytes = sum(record.payload_bytes for record in records)
        return batch

    def _is_there(self, page: int, sequence: int, tier: int) -> bool:
        table = self._state.index.table
        same = table.is_live(page) and int(table.sequence[page]) == sequence
        return same and bool(table.state[page] >> tier & 1)

    def _read_disk(self, places: list[int], records: list[PageRecord]) -> list[ReadStatus]:
        disk = self._state.disk
        assert disk is not None
        size = sum(aligned(record.payload_bytes) for record in records)
        memory: memoryview | None = getattr(self._memory, "buffer", None)
        if memory is None or len(memory) < size:
            memory = self._memory.buffer = contiguous_buffer(max(size, BATCH_BYTES))
        buffers, at = [], 0
        for record in records:
            end = at + aligned(record.payload_bytes)
            buffers.append(memory[at:end])
            at = end
        try:
            return disk.read_many(places, records, buffers)
        except TierError:
            return [ReadStatus.ERROR] * len(records)

    def _read_host(self, places: list[int], records: list[PageRecord]) -> list[ReadStatus]:
        host = self._state.host
        assert host is not None
        return [
            ReadStatus.OK
            if checksum(host.view(place, record.payload_bytes)) == record.checksum
            else ReadStatus.CORRUPT
            for place, record in zip(places, records, strict=True)
        ]

    def _account(self, batch: _Batch) -> None:
        self._now = replace(
            self._now,
            pages=self._now.pages + len(batch.held),
            payload_bytes=self._now.payload_bytes + batch.payload_bytes,
            # Pages that left meanwhile need no check any more.
            pages_total=max(self._now.pages_total, self._now.pages + len(batch.held)),
        )
        rows = zip(batch.held, batch.held_sequences, batch.statuses, strict=True)
        for page, sequence, status in rows:
            if status is ReadStatus.WIPED:
                self._finish_eviction(page, sequence)
            elif status is not ReadStatus.OK:
                self._bad(page, sequence, batch.tier, status)

    def _bad(self, page: int, sequence: int, tier: int, status: ReadStatus) -> None:
        state = self._state
        outcome, dropped, key = "", 0, ""
        with state.lock:
            if not self._is_there(page, sequence, tier):
                return  # a look-up found it too, and dropped it
            key = state.index.table.key_of(page).hex()
            state.counters.corrupt_pages += status is ReadStatus.CORRUPT
            if self._repair and status is not ReadStatus.ERROR:
                outcome, dropped = self._mend(page, tier, status)
        name = TIER_NAMES[tier]
        what = f"page {key[:16]} in {name}: {_WORDS[status]}" + (f"; {outcome}" if outcome else "")
        self._now = replace(
            self._now,
            bad_pages=self._now.bad_pages + 1,
            dropped_pages=self._now.dropped_pages + dropped,
        )
        self._add(Problem("page", what, repaired=bool(outcome), page=key, tier=name))

    def _finish_eviction(self, page: int, sequence: int) -> None:
        """The page was wiped, and a kill came before its record was deleted."""
        state = self._state
        with state.lock:
            if not self._is_there(page, sequence, DISK):
                return
            self._cut_off.add(sequence)
            if self._repair:
                # Those that are being read now stay until then, and are met again.
                below = state.index.subtree(page)
                self._cut_off.update(state.index.table.sequence[below].tolist())
                state.drop_subtree(page, why_left(ReadStatus.WIPED))
        self._now = replace(self._now, cut_off_pages=len(self._cut_off))

    def _mend(self, page: int, tier: int, status: ReadStatus) -> tuple[str, int]:
        """Take the good copy, else drop the page; what was done, and how many pages that took."""
        state = self._state
        if tier == DISK and self._good_in_host(page) and self._writer is not None:
            state.leave_disk(np.array([page], np.int32))
            state.unwritten.add(page)
            if self._writer.enqueue([page]):
                state.unwritten.discard(page)
                return "written again from memory", 0
            return "kept in memory", 0
        below: NDArray[np.int32] = state.index.subtree(page)
        if state.drop_subtree(page, why_left(status)):
            return "dropped with all below it", len(below)
        return "dropped with all below it as soon as nobody reads there", len(below)

    def _good_in_host(self, page: int) -> bool:
        state, table = self._state, self._state.index.table
        if state.host is None or not table.state[page] >> HOST & 1:
            return False
        view = state.host.view(int(table.slot[HOST][page]), int(table.payload_bytes[page]))
        return bool(checksum(view) == table.checksum[page].tobytes())


def _parts(sizes: NDArray[np.int64]) -> Iterator[slice]:
    """Runs of up to BATCH_PAGES pages and about BATCH_BYTES."""
    start = size = 0
    for position, each in enumerate(sizes.tolist()):
        if position > start and (size + each > BATCH_BYTES or position - start >= BATCH_PAGES):
            yield slice(start, position)
            start, size = position, 0
        size += each
    if start < len(sizes):
        yield slice(start, len(sizes))
