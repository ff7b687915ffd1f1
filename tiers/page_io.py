"""Moves pages between memory and slots: runs of neighbouring slots in one call, verified on reads.

Invariant: a page is reported written only if every byte of its slot was accepted by the kernel, and
read only if header and payload on disk are those of the page asked for. Payload bytes go straight
between the caller's memory and the disk, or through a bounce buffer where alignment or speed want
that (`io_route.py`); encrypted pages always through one, where encryption takes the place of the
copy. Works on open segments; knows no catalog and no slot states.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from kvstore.tiers.checksum import checksum, copy_and_checksum
from kvstore.tiers.cipher import TAG_BYTES
from kvstore.tiers.encrypted_page import (
    encrypt_header,
    is_encrypted,
    payload_bound,
    read_encrypted_header,
)
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
from kvstore.tiers.packed_page import as_packed, is_packed, pack, stored_bytes, unpack
from kvstore.tiers.segment import decode_page_header, encode_page_header, same_page
from kvstore.tiers.tier import ALIGNMENT_BYTES, PageRecord, ReadStatus, TierError, aligned

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstore.tiers.cipher import Cipher
    from kvstore.tiers.file_layer import FileLayer
    from kvstore.tiers.io_pool import Batch, IoPool
    from kvstore.tiers.segment_set import Segment

    Way = Callable[[Sequence["PageTask"]], Any]

log = logging.getLogger("kvstore.tiers.disk")

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
    target: memoryview | None = None  # of a read of a packed page, whose payload is a scratch

    @property
    def size(self) -> int:
        """Bytes of payload in the slot."""
        return stored_bytes(self.page, self.segment.shape)


def read_task(
    position: int, slot: int, segment: Segment, page: PageRecord, buffer: memoryview
) -> PageTask:
    """A task that reads a page into the buffer, by way of another if it must be packed there."""
    if not is_packed(page, segment.shape):
        return PageTask(position, slot, segment, page, buffer)
    scratch = aligned_buffer(segment.shape.payload_capacity)
    return PageTask(position, slot, segment, as_packed(page), scratch, buffer)


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
        self.cipher: Cipher | None = None  # given before the first read or write
        self._bounce = threading.local()
        self.read_routes = RouteChooser()
        self.write_routes = RouteChooser()
        self.verify_payloads = True  # a bench turns this off to price it; nothing else may

    def start_write(self, tasks: Sequence[PageTask]) -> PendingWrite:
        """Queue writes of each page's slot; their end is waited for later. Syncs nothing."""
        runs = _runs(tasks)
        ways = (self._write_run, self._write_bounced)
        calls: Sequence[Callable[[], Any]]
        if self.cipher is not None and self.cipher.writes:
            calls = [partial(self._write_encrypted, run) for run in runs]
        else:
            calls = self._calls(runs, ways, self.write_routes)
        return PendingWrite(tasks, runs, self._pool.start(calls))

    def read(self, tasks: Sequence[PageTask]) -> list[ReadStatus]:
        """Fill each task's buffer; returns what became of each."""
        runs = _runs(tasks)
        ways = (self._read_run, self._read_bounced)
        calls: Sequence[Callable[[], Any]]
        if self.cipher is not None:  # a slot tells what it holds only when it is read
            calls = [partial(self._read_bounced, run) for run in runs]
        else:
            calls = self._calls(runs, ways, self.read_routes)
        answers = self._pool.run(calls)
        statuses: dict[int, ReadStatus] = {}
        for run, answer in zip(runs, answers, strict=True):
            if isinstance(answer, Exception) and not isinstance(answer, OSError):
                raise answer
            for index, task in enumerate(run):
                failed = isinstance(answer, OSError)
                statuses[task.position] = ReadStatus.ERROR if failed else answer[index]
        return [statuses[task.position] for task in tasks]

    def pack(self, payloads: Sequence[memoryview]) -> list[memoryview | None]:
        """Payloads packed for smaller slots, in the pool's threads; None for what saves none.

        Reserve and write a packed one with its own length, under `as_packed(page)`.
        """
        answers = self._pool.run([partial(pack, payload) for payload in payloads])
        failed = [answer for answer in answers if isinstance(answer, Exception)]
        if failed:
            log.warning("%d pages stay unpacked: the first failed with %s", len(failed), failed[0])
        return [answer if isinstance(answer, memoryview) else None for answer in answers]

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
        if size > BOUNCE_BYTES_MAX:  # encrypted; others go straight then
            return contiguous_buffer(size)
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
            size = task.size
            payload_at = at + shape.header_bytes
            end = min(at + shape.slot_bytes, len(block))
            block[at : at + len(encoded)] = encoded
            _clear(block[at + len(encoded) : payload_at])
            copy_bytes(block[payload_at : payload_at + size], task.payload[:size])
            _clear(block[payload_at + size : end])
            at = end
        write_fully(self._files, segment.descriptor, [block], shape.offset(run[0].slot))

    def _write_encrypted(self, run: Sequence[PageTask]) -> None:
        """As `_write_bounced`. A payload's tag, which belongs into the header, lands behind it."""
        segment, shape = run[0].segment, run[0].segment.shape
        span = _span(run)
        block = self._bounce_buffer(span + ALIGNMENT_BYTES)
        at = 0
        for task in run:
            size = task.size
            payload_at = at + shape.header_bytes
            end = min(at + shape.slot_bytes, span)
            place = block[payload_at : payload_at + size + TAG_BYTES]
            encoded = self._encrypt(task, place)
            block[at : at + len(encoded)] = encoded
            _clear(block[at + len(encoded) : payload_at])
            _clear(block[payload_at + size : end])
            at = end
        write_fully(self._files, segment.descriptor, [block[:span]], shape.offset(run[0].slot))

    def _encrypt(self, task: PageTask, place: memoryview) -> bytes:
        """Encrypt a page's payload into `place`, its tag behind it; returns the header."""
        assert self.cipher is not None
        page, header_bytes = task.page, task.segment.shape.header_bytes
        try:
            key = self.cipher.key_of(page.tenant)
        except TierError as error:
            raise OSError(errno.EIO, str(error)) from error
        bound = payload_bound(page, self._store_uuid)
        nonce = key.encrypt_into(task.payload[: task.size], bound, place)
        plain = encode_page_header(page, task.slot, self._store_uuid, header_bytes)
        assert plain is not None, "the tier refuses pages that do not fit their header"
        seal = nonce + bytes(place[task.size :])
        encoded = encrypt_header(plain, key, seal, header_bytes)
        assert encoded is not None, "the tier refuses pages that do not fit their header"
        return encoded

    def _decrypt(self, task: PageTask, header: memoryview, place: memoryview) -> ReadStatus:
        """Decrypt and verify an encrypted page. Its payload is in `place`, with room for a tag."""
        found = read_encrypted_header(header, task.slot, self._store_uuid)
        if found is None:
            return ReadStatus.CORRUPT
        key = self.cipher.known(found.key_id) if self.cipher is not None else None
        if key is None:
            return ReadStatus.LOCKED
        plain = found.decrypt(key)
        if plain is None:
            return ReadStatus.CORRUPT
        page = decode_page_header(plain, task.slot, self._store_uuid)
        if page is None:
            return ReadStatus.CORRUPT
        if not same_page(page, task.page):
            return ReadStatus.STALE
        target = task.payload[: task.size]
        place[task.size :] = found.payload_tag
        bound = payload_bound(page, self._store_uuid)
        if not key.decrypt_into(found.payload_nonce, place, bound, target):
            return ReadStatus.CORRUPT
        if task.target is not None:
            return unpack(target, page, task.target, self.verify_payloads)
        if self.verify_payloads and checksum(target) != page.checksum:
            return ReadStatus.CORRUPT
        return ReadStatus.OK

    def _read_bounced(self, run: Sequence[PageTask]) -> list[ReadStatus]:
        segment, shape = run[0].segment, run[0].segment.shape
        span = _span(run)
        room = self._bounce_buffer(span + ALIGNMENT_BYTES)
        block = room[:span]
        got = read_fully(self._files, segment.descriptor, [block], shape.offset(run[0].slot))
        if got < len(block):
            raise _short(segment, got, len(block))
        statuses: list[ReadStatus] = []
        for index in reversed(range(len(run))):  # a tag may take the place of the next header
            task, at = run[index], index * shape.slot_bytes
            header, payload_at = block[at : at + shape.header_bytes], at + shape.header_bytes
            if is_encrypted(header):
                end = payload_at + task.size + TAG_BYTES
                statuses.append(self._decrypt(task, header, room[payload_at:end]))
                continue
            payload = block[payload_at : payload_at + task.size]
            target = task.payload[: task.size]
            digest = None
            if (
                self.verify_payloads and task.target is None
            ):  # while the copy is in the processor's cache
                digest = copy_and_checksum(payload, target)
            else:
                copy_bytes(target, payload)
            statuses.append(self._verify(task, header, digest))
        return statuses[::-1]

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
        size = task.size
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
            if is_encrypted(header):  # and this tier has no keys at all
                return ReadStatus.LOCKED
            if found is None:
                return ReadStatus.CORRUPT if any(header) else self._headless(task)
            if not same_page(found, task.page):
                return ReadStatus.STALE
        if task.target is not None:
            return unpack(task.payload[: task.size], task.page, task.target, self.verify_payloads)
        if not self.verify_payloads:
            return ReadStatus.OK
        if digest is None:
            digest = checksum(task.payload[: task.size])
        return ReadStatus.OK if digest == task.page.checksum else ReadStatus.CORRUPT

    def _headless(self, task: PageTask) -> ReadStatus:
        """A header of zeros: over the page's own payload it is what `erase` leaves, else damage.

        An encrypted payload can't be told without its header: there, that it is no zeros has to do.
        """
        payload = task.payload[: task.size]
        if task.target is not None:
            whole = unpack(payload, task.page, task.target, verify=True) is ReadStatus.OK
        else:
            whole = checksum(payload) == task.page.checksum
        encrypted = self.cipher is not None and any(payload)
        return ReadStatus.WIPED if whole or encrypted else ReadStatus.STALE


@dataclass(slots=True)
class _Landing:
    """Where an aligned payload is read to; `bounce` is copied to `start` of the buffer after."""

    blocks: list[memoryview]
    bounce: memoryview | None = None
    start: int = 0

    def finish(self, task: PageTask) -> None:
        if self.bounce is not None:
            size = task.size
            copy_bytes(task.payload[self.start : size], self.bounce[: size - self.start])


def _landing(task: PageTask) -> _Landing:
    size = task.size
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
    return task.segment.shape.payload_capacity - aligned(task.size)


def _pieces(source: memoryview, size: int) -> list[memoryview]:
    """Views of `source` that make up `size` bytes."""
    return [source[: min(len(source), size - at)] for at in range(0, size, len(source))]


def _clear(piece: memoryview) -> None:
    for start in range(0, len(piece), len(_zeros)):
        copy_bytes(piece[start : start + len(_zeros)], _zeros[: len(piece) - start])


def _span(run: Sequence[PageTask]) -> int:
    """Bytes from the start of a run's first slot to the end of its last page, whole blocks."""
    shape = run[0].segment.shape
    last = shape.header_bytes + aligned(run[-1].size)
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
