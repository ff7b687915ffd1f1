"""Moves pages between memory and slots: runs of neighbouring slots in one call, verified on reads.

Invariant: a page is reported written only if every byte of its slot was accepted by the kernel, and
read only if header and payload on disk are those of the page asked for. Payload bytes go straight
between the caller's memory and the disk where its alignment allows O_DIRECT, else through a bounce
buffer. Works on open segments; knows no catalog and no slot states.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvstore.tiers.checksum import checksum
from kvstore.tiers.file_layer import (
    IOV_MAX,
    address_of,
    aligned_buffer,
    read_fully,
    write_fully,
)
from kvstore.tiers.segment import decode_page_header, encode_page_header, same_page
from kvstore.tiers.tier import ALIGNMENT_BYTES, PageRecord, ReadStatus, aligned

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstore.tiers.file_layer import FileLayer
    from kvstore.tiers.io_pool import Batch, IoPool
    from kvstore.tiers.segment_set import Segment

RUN_BYTES_MAX = 2 << 20  # neighbouring slots are joined up to this much; one page may be larger
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
        self.verify_payloads = True  # a bench turns this off to price it; nothing else may

    def start_write(self, tasks: Sequence[PageTask]) -> PendingWrite:
        """Queue writes of each page's slot; their end is waited for later. Syncs nothing."""
        runs = _runs(tasks)
        return PendingWrite(
            tasks, runs, self._pool.start([_call(self._write_run, r) for r in runs])
        )

    def read(self, tasks: Sequence[PageTask]) -> list[ReadStatus]:
        """Fill each task's buffer; returns what became of each."""
        runs = _runs(tasks)
        answers = self._pool.run([_call(self._read_run, run) for run in runs])
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

    # -- private: these run in the pool's threads -------------------------------------------------

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
            copy[:size] = payload
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
            raise OSError(errno.EIO, f"{segment.path}: {got} of {wanted} bytes, the file is short")
        statuses = []
        for index, task in enumerate(run):
            landings[index].finish(task)
            header = headers[index * shape.header_bytes : (index + 1) * shape.header_bytes]
            statuses.append(self._verify(task, header))
        return statuses

    def _verify(self, task: PageTask, header: memoryview) -> ReadStatus:
        expected = encode_page_header(task.page, task.slot, self._store_uuid, len(header))
        if expected is None or header[: len(expected)] != expected:
            found = decode_page_header(header, task.slot, self._store_uuid)
            if found is None:
                return ReadStatus.CORRUPT if any(header[:8]) else ReadStatus.STALE
            if not same_page(found, task.page):
                return ReadStatus.STALE
        if not self.verify_payloads:
            return ReadStatus.OK
        payload = task.payload[: task.page.payload_bytes]
        sound = checksum(payload) == task.page.checksum
        return ReadStatus.OK if sound else ReadStatus.CORRUPT


@dataclass(slots=True)
class _Landing:
    """Where an aligned payload is read to; `bounce` is copied to `start` of the buffer after."""

    blocks: list[memoryview]
    bounce: memoryview | None = None
    start: int = 0

    def finish(self, task: PageTask) -> None:
        if self.bounce is not None:
            size = task.page.payload_bytes
            task.payload[self.start : size] = self.bounce[: size - self.start]


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


def _call(function: Callable[[list[PageTask]], Any], run: list[PageTask]) -> Callable[[], Any]:
    return lambda: function(run)
