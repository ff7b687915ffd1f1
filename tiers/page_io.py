"""Moves pages between memory and slots: runs of neighbouring slots in one call, verified on reads.

Invariant: a page is reported written only if every byte of its slot was accepted by the kernel, and
read only if header and payload on disk are those of the page asked for. Payload bytes go straight
between the caller's memory and the disk, or through a bounce buffer where alignment or speed want
that (`io_route.py`). Works on open segments; knows no catalog and no slot states.
"""

from __future__ import annotations

import errno
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvstore.tiers.checksum import checksum, copy_and_checksum
from kvstore.tiers.file_layer import (
    IOV_MAX,
    address_of,
    aligned_buffer,
    contiguous_buffer,
    copy_bytes,
    read_fully,
    write_fully,
)
from kvstore.tiers.io_route import Route, RouteChooser
from kvstore.tiers.segment import decode_page_header, encode_page_header, same_page
from kvstore.tiers.tier import ALIGNMENT_BYTES, PageRecord, ReadStatus, aligned

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstore.tiers.file_layer import FileLayer
    from kvstore.tiers.io_pool import Batch, IoPool
    from kvstore.tiers.segment_set import Segment

    Way = Callable[[Sequence["PageTask"]], Any]

RUN_BYTES_MAX = 2 << 20  # neighbouring slots are joined up to this much; one page may be larger
BOUNCE_BYTES_MAX = 8 << 20  # a thread; larger pages always go straight
BUFFERS_A_PAGE = 4  # header, payload, its last partial block, the rest of the slot
RUN_PAGES_MAX = IOV_MAX // BUFFERS_A_PAGE

_zeros = aligned_buffer(1 << 20)  # written behind payloads that are shorter than their slot
_scratch = aligned_buffer(1 << 20)  # what is read there, by all threads, never looked at


@dataclass(slots=True)
class PageTask:
    """One page of a batch: where, what, and the caller's memory."""

    position: int  # in the caller's lists
    slot: int
    segment: Segment
    page: PageRecord
    payload: memoryview


@dataclass(slots=True)
class PendingWrite:
    """Pages on their way to the disk."""

    tasks: Sequence[PageTask]
    runs: list[list[PageTask]]
    batch: Batch

    def wait(self) -> list[OSError | None]:
        """The error, or None, of each task, when all writes have ended."""
        errors: dict[int, OSError | None] = {}
        for run, answer in zip(self.runs, self.batch.wait(), strict=True):
            if isinstance(answer, Exception) and not isinstance(answer, OSError):
                raise answer
            for task in run:
                errors[task.position] = answer
        return [errors[task.position] for task in self.tasks]


class PageIo:
    """Reads and writes batches of pages through an IoPool."""

    def __init__(self, files: FileLayer, pool: IoPool, store_uuid: bytes) -> None:
        self._files = files
        self._pool = pool
        self._store_uuid = store_uuid
        self._bounce = threading.local()
        self.read_routes = RouteChooser()
        self.write_routes = RouteChooser()
        self.verify_payloads = True  # a bench turns this off to price it; nothing else may

    def start_write(self, tasks: Sequence[PageTask]) -> PendingWrite:
        """Queue writes of each page's slot; their end is waited for later. Syncs nothing."""
        runs = _runs(tasks)
        ways = (self._write_run, self._write_bounced)
        calls = self._calls(runs, ways, self.write_routes)
        return PendingWrite(tasks, runs, self._pool.start(calls))

    def read(self, tasks: Sequence[PageTask]) -> list[ReadStatus]:
        """Fill each task's buffer; returns what became of each."""
        runs = _runs(tasks)
        ways = (self._read_run, self._read_bounced)
        answers = self._pool.run(self._calls(runs, ways, self.read_routes))
        statuses: dict[int, ReadStatus] = {}
        for run, answer in zip(runs, answers, strict=True):
            if isinstance(answer, Exception) and not isinstance(answer, OSError):
                raise answer
            for index, task in enumerate(run):
                failed = isinstance(answer, OSError)
                statuses[task.position] = ReadStatus.ERROR if failed else answer[index]
        return [statuses[task.position] for task in tasks]

    def erase(self, segment: Segment, slots: Sequence[int]) -> None:
        """Overwrite the headers of slots with zeros. Raises OSError; syncs nothing."""
        header = _zeros[: segment.shape.header_bytes]
        for slot in slots:
            offset = segment.shape.offset(slot)
            write_fully(self._files, segment.descriptor, [header], offset)

    def _calls(
        self, runs: list[list[PageTask]], ways: Sequence[Way], chooser: RouteChooser
    ) -> list[Callable[[], Any]]:
        """A call for each run, all by the way that the chooser says, timed if it wants that."""
        route, noted = Route.STRAIGHT, False
        if runs:
            route, noted = chooser.choose(len(runs), _span(runs[0]))
        return [_call(run, route, ways, chooser if noted else None) for run in runs]

    # -- private: these run in the pool's threads -------------------------------------------------

    def _bounce_buffer(self, size: int) -> memoryview:
        held: memoryview | None = getattr(self._bounce, "buffer", None)
        if held is None or len(held) < size:
            held = self._bounce.buffer = contiguous_buffer(max(size, RUN_BYTES_MAX * 5 // 4))
        return held[:size]

    def _write_bounced(self, run: Sequence[PageTask]) -> None:
        segment, shape = run[0].segment, run[0].segment.shape
        block = self._bounce_buffer(_span(run))
        at = 0
        for task in run:
            encoded = encode_page_header(task.page, task.slot, self._store_uuid, shape.header_bytes)
            assert encoded is not None, "the tier refuses pages that do not fit their header"
            size = task.page.payload_bytes
            payload_at = at + shape.header_bytes
            end = min(at + shape.slot_bytes, len(block))
            block[at : at + len(encoded)] = encoded
            _clear(block[at + len(encoded) : payload_at])
            copy_bytes(block[payload_at : payload_at + size], task.payload[:size])
            _clear(block[payload_at + size : end])
            at = end
        write_fully(self._files, segment.descriptor, [block], shape.offset(run[0].slot))

    def _read_bounced(self, run: Sequence[PageTask]) -> list[ReadStatus]:
        segment, shape = run[0].segment, run[0].segment.shape
        block = self._bounce_buffer(_span(run))
        got = read_fully(self._files, segment.descriptor, [block], shape.offset(run[0].slot))
        if got < len(block):
            raise _short(segment, got, len(block))
        statuses = []
        for index, task in enumerate(run):
            at = index * shape.slot_bytes
            payload = block[at + shape.header_bytes :][: task.page.payload_bytes]
            target = task.payload[: task.page.payload_bytes]
            digest = None
            if self.verify_payloads:  # while the copy is in the processor's cache
                digest = copy_and_checksum(payload, target)
            else:
                copy_bytes(target, payload)
            statuses.append(self._verify(task, block[at : at + shape.header_bytes], digest))
        return statuses

    def _write_run(self, run: Sequence[PageTask]) -> None:
        shape = run[0].segment.shape
        headers = aligned_buffer(shape.header_bytes * len(run))
        buffers: list[memoryview] = []
        for index, task in enumerate(run):
            header = headers[index * shape.header_bytes : (index + 1) * shape.header_bytes]
            encoded = encode_page_header(task.page, task.slot, self._store_uuid, shape.header_bytes)
            assert encoded is not None, "the tier refuses pages that do not fit their header"
            header[: len(encoded)] = encoded
            buffers.append(header)
            buffers.extend(self._payload_blocks(task))
            if index + 1 < len(run):
                buffers.extend(_pieces(_zeros, _gap(task)))
        segment = run[0].segment
        write_fully(self._files, segment.descriptor, buffers, shape.offset(run[0].slot))

    def _payload_blocks(self, task: PageTask) -> list[memoryview]:
        """The payload as whole aligned blocks, the last one padded with zeros."""
        size = task.page.payload_bytes
        payload = task.payload[:size]
        if address_of(payload) % ALIGNMENT_BYTES and task.segment.direct:
            copy = aligned_buffer(aligned(size))
            copy_bytes(copy[:size], payload)
            return [copy]
        whole = size - size % ALIGNMENT_BYTES
        if whole == size:
            return [payload]
        tail = aligned_buffer(ALIGNMENT_BYTES)
        tail[: size - whole] = payload[whole:]
        return [payload[:whole], tail] if whole else [tail]

    def _read_run(self, run: Sequence[PageTask]) -> list[ReadStatus]:
        segment = run[0].segment
        shape = segment.shape
        headers = aligned_buffer(shape.header_bytes * len(run))
        buffers: list[memoryview] = []
        landings = [_landing(task) for task in run]
        for index, task in enumerate(run):
            buffers.append(headers[index * shape.header_bytes : (index + 1) * shape.header_bytes])
            buffers.extend(landings[index].blocks)
            if index + 1 < len(run):
                buffers.extend(_pieces(_scratch, _gap(task)))
        wanted = sum(map(len, buffers))
        got = read_fully(self._files, segment.descriptor, buffers, shape.offset(run[0].slot))
        if got < wanted:
            raise _short(segment, got, wanted)
        statuses = []
        for index, task in enumerate(run):
            landings[index].finish(task)
            header = headers[index * shape.header_bytes : (index + 1) * shape.header_bytes]
            statuses.append(self._verify(task, header))
        return statuses

    def _verify(
        self, task: PageTask, header: memoryview, digest: bytes | None = None
    ) -> ReadStatus:
        """Compare header and payload, whose digest may be known already, with what was asked."""
        expected = encode_page_header(task.page, task.slot, self._store_uuid, len(header))
        if expected is None or header[: len(expected)] != expected:
            found = decode_page_header(header, task.slot, self._store_uuid)
            if found is None:
                return ReadStatus.CORRUPT if any(header[:8]) else ReadStatus.STALE
            if not same_page(found, task.page):
                return ReadStatus.STALE
        if not self.verify_payloads:
            return ReadStatus.OK
        if digest is None:
            digest = checksum(task.payload[: task.page.payload_bytes])
        return ReadStatus.OK if digest == task.page.checksum else ReadStatus.CORRUPT


@dataclass(slots=True)
class _Landing:
    """Where an aligned payload is read to; `bounce` is copied to `start` of the buffer after."""

    blocks: list[memoryview]
    bounce: memoryview | None = None
    start: int = 0

    def finish(self, task: PageTask) -> None:
        if self.bounce is not None:
            size = task.page.payload_bytes
            copy_bytes(task.payload[self.start : size], self.bounce[: size - self.start])


def _landing(task: PageTask) -> _Landing:
    size = task.page.payload_bytes
    room = aligned(size)
    if task.segment.direct and address_of(task.payload) % ALIGNMENT_BYTES:
        bounce = aligned_buffer(room)
        return _Landing([bounce], bounce)
    if len(task.payload) >= room:
        return _Landing([task.payload[:room]])
    whole = size - size % ALIGNMENT_BYTES
    tail = aligned_buffer(ALIGNMENT_BYTES)
    return _Landing([task.payload[:whole], tail], tail, whole)


def _runs(tasks: Sequence[PageTask]) -> list[list[PageTask]]:
    """Tasks in slot order, cut where slots are no neighbours and at RUN_BYTES_MAX."""
    runs: list[list[PageTask]] = []
    limit = 0
    previous = -1
    for task in sorted(tasks, key=lambda task: task.slot):
        if not runs or task.slot != previous + 1 or len(runs[-1]) >= limit:
            runs.append([])
            limit = max(1, min(RUN_PAGES_MAX, RUN_BYTES_MAX // task.segment.shape.slot_bytes))
        runs[-1].append(task)
        previous = task.slot
    return runs


def _gap(task: PageTask) -> int:
    """Bytes between the end of a page's payload and the next slot."""
    return task.segment.shape.payload_capacity - aligned(task.page.payload_bytes)


def _pieces(source: memoryview, size: int) -> list[memoryview]:
    """Views of `source` that make up `size` bytes."""
    return [source[: min(len(source), size - at)] for at in range(0, size, len(source))]


def _clear(piece: memoryview) -> None:
    for start in range(0, len(piece), len(_zeros)):
        copy_bytes(piece[start : start + len(_zeros)], _zeros[: len(piece) - start])


def _span(run: Sequence[PageTask]) -> int:
    """Bytes from the start of a run's first slot to the end of its last page, whole blocks."""
    shape = run[0].segment.shape
    last = shape.header_bytes + aligned(run[-1].page.payload_bytes)
    return (len(run) - 1) * shape.slot_bytes + last


def _short(segment: Segment, got: int, wanted: int) -> OSError:
    return OSError(errno.EIO, f"{segment.path}: {got} of {wanted} bytes, the file is short")


def _call(
    run: list[PageTask], route: Route, ways: Sequence[Way], chooser: RouteChooser | None
) -> Callable[[], Any]:
    size = _span(run)
    if size > BOUNCE_BYTES_MAX or not run[0].segment.direct:
        route, chooser = Route.STRAIGHT, None  # the page cache copies anyway

    def call() -> Any:
        begin = time.perf_counter()
        answer = ways[route](run)
        if chooser is not None:
            chooser.note(route, size, time.perf_counter() - begin)
        return answer

    return call
