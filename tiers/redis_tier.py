"""Pages in a Redis or Valkey that several stores share: sealed, in pieces, each with a TTL.

A slot is a handle of this process: which page, under which name, sealed how. Redis itself is not
ours to fill or to empty: it evicts by its own memory limit, other stores write there, a page may
vanish any time and is then a miss. So the capacity bounds what is referred to from here, `forget`
lets go of a handle and leaves the page to the others; only `free_many` and `erase` delete.
"""

from __future__ import annotations

import itertools
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvstore.tiers import redis_record
from kvstore.tiers.checksum import checksum
from kvstore.tiers.redis_link import TIMEOUT_S, Command, RedisLink, Refusal
from kvstore.tiers.redis_record import PIECE_BYTES, RecordError, Sealed
from kvstore.tiers.tier import (
    ALIGNMENT_BYTES,
    SLOT_INDEX_BITS,
    Container,
    PageRecord,
    ReadStatus,
    TierError,
    Usage,
    aligned,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvstore.tiers.redis_address import RedisAddress

# Bytes of payload in one round trip: what is in flight is in memory three times.
BATCH_BYTES = 2 << 20
HANDLES_MAX = 1 << 17
FULL_PAUSE_S = 5.0  # without writes, after Redis said that its memory is full
PIECE_TTL_MORE_S = 60  # pieces outlive their header
KEYS_A_TRIP = 512


@dataclass(slots=True)
class _Handle:
    payload_bytes: int
    page: Sealed | None = None  # None until written


@dataclass(slots=True)
class RedisCounters:
    """What came back wrong; each only grows."""

    bad_headers: int = 0  # not sealed by us, or of another page
    bad_payloads: int = 0
    missing_pieces: int = 0
    refused_writes: int = 0


class RedisTier:
    """The tier contract over one Redis; see the module's docstring for what its slots are."""

    def __init__(
        self,
        address: RedisAddress,
        capacity_bytes: int,
        key_of: Callable[[str], bytes],
        *,
        password: str = "",
        ttl_s: float = 86_400.0,
        timeout_s: float = TIMEOUT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`key_of` gives a tenant's secret for names and seals: 16 to 64 bytes, the same in all
        stores that share. timeout_s: a call ends after so long a silence."""
        self.link = RedisLink(address, password, timeout_s=timeout_s)
        self.counters = RedisCounters()
        self._capacity_bytes = capacity_bytes
        self._key_of = key_of
        self._ttl_s = max(1, int(ttl_s))
        self._clock = clock
        self._lock = threading.Lock()
        self._handles: dict[int, _Handle] = {}
        self._used_bytes = 0
        self._numbers = itertools.count(1)
        self._full_until_s = 0.0
        self._is_full = False  # by what Redis last said to a write

    @property
    def state(self) -> str:
        """ "ok", or what is wrong."""
        if self.link.ready and self._is_full:
            return "full: Redis refused the last writes (OOM); raise its maxmemory"
        return self.link.state

    @property
    def takes_writes(self) -> bool:
        """Whether a write is worth a try now."""
        return self.link.ready and self._clock() >= self._full_until_s

    # The contract

    def reserve(self, tenant: str, payload_bytes: int, count: int) -> list[int]:
        """See Tier."""
        size = _counted(payload_bytes)
        with self._lock:
            room = min(
                (self._capacity_bytes - self._used_bytes) // size,
                HANDLES_MAX - len(self._handles),
            )
            slots = [next(self._numbers) for _ in range(max(0, min(count, room)))]
            for slot in slots:
                self._handles[slot] = _Handle(payload_bytes)
            self._used_bytes += size * len(slots)
        return slots

    def write_many(
        self, slots: Sequence[int], pages: Sequence[PageRecord], payloads: Sequence[memoryview]
    ) -> list[bool]:
        """See Tier. True: Redis took it; it keeps it until the TTL, or as it sees fit."""
        self._expect_writable(slots, pages, payloads)
        kept: list[bool] = []
        for start, stop in _batches(pages):
            kept += self._write_batch(pages[start:stop], payloads[start:stop], slots[start:stop])
        return kept

    def read_many(
        self, slots: Sequence[int], pages: Sequence[PageRecord], buffers: Sequence[memoryview]
    ) -> list[ReadStatus]:
        """See Tier. STALE also where Redis has let go of the page meanwhile."""
        for page, buffer in zip(pages, buffers, strict=True):
            if buffer.nbytes < page.payload_bytes:
                raise ValueError(f"a buffer of {buffer.nbytes} bytes for {page.payload_bytes}")
        if len(slots) != len(pages):
            raise ValueError(f"{len(slots)} slots for {len(pages)} pages")
        statuses: list[ReadStatus] = []
        for start, stop in _batches(pages):
            part = slice(start, stop)
            statuses += self._read_batch(slots[part], pages[part], buffers[part])
        return statuses

    def free_many(self, slots: Sequence[int]) -> None:
        """See Tier. Deletes the pages for all who share them; forget() does not."""
        records = [handle.page.record for handle in self._release(slots) if handle.page]
        try:
            self.erase([(record.tenant, record.root, record.key) for record in records])
        except TierError:
            return  # out of reach: nobody has a handle here any more, and the TTL ends it

    def usage(self) -> Usage:
        """See Tier."""
        with self._lock:
            used, slots = self._used_bytes, len(self._handles)
        return Usage(self._capacity_bytes, used, used, slots, 0)

    def check(self) -> None:
        """See Tier."""
        with self._lock:
            counted = sum(_counted(handle.payload_bytes) for handle in self._handles.values())
            if counted != self._used_bytes or counted > self._capacity_bytes:
                raise TierError(
                    f"redis tier: {counted} bytes of handles, {self._used_bytes} counted, "
                    f"{self._capacity_bytes} allowed"
                )

    def containers(self) -> list[Container]:
        """Slots in runs of numbers; they can't be emptied one by one, as nothing is gained."""
        with self._lock:
            homes: dict[int, int] = {}
            for slot in self._handles:
                homes[slot >> SLOT_INDEX_BITS] = homes.get(slot >> SLOT_INDEX_BITS, 0) + 1
        size = 1 << SLOT_INDEX_BITS
        return [Container(n, "", ALIGNMENT_BYTES, size, used) for n, used in homes.items()]

    def close(self) -> None:
        """End the connections. What Redis has stays there."""
        self.link.close()

    # What only this tier can

    def find_many(self, tenant: str, root: bytes, keys: Sequence[bytes]) -> list[Sealed | None]:
        """What Redis says it has of pages of one tree; seals are checked, contents are the
        caller's to compare. Raises TierError when it can't be asked."""
        return self._found([(tenant, root, key) for key in keys])

    def adopt(self, pages: Sequence[tuple[Sealed, PageRecord]]) -> list[int]:
        """Slots for pages that were found, each to be asked for by the record beside it; fewer
        when full."""
        slots: list[int] = []
        for found, record in pages:
            got = self.reserve(record.tenant, record.payload_bytes, 1)
            if not got:
                break
            self._handles[got[0]].page = Sealed(record, found.seal)
            slots += got
        return slots

    def forget(self, slots: Sequence[int]) -> None:
        """Give slots back without deleting anything; does no I/O."""
        self._release(slots)

    def renew(self, pages: Sequence[PageRecord]) -> list[bool]:
        """Which pages Redis has already, whoever wrote them and whole; their TTL begins anew."""
        found = self._found([(page.tenant, page.root, page.key) for page in pages])
        plans = [
            self._keys_of(each) if each and _same_page(each.record, page) else []
            for each, page in zip(found, pages, strict=True)
        ]
        return self._renewed(plans)

    def erase(self, pages: Sequence[tuple[str, bytes, bytes]]) -> int:
        """Delete pages, by (tenant, root, key), for all who share them; how many were there.

        Raises TierError when Redis can't be asked: then something may be left.
        """
        gone = 0
        for start in range(0, len(pages), KEYS_A_TRIP):
            part = pages[start : start + KEYS_A_TRIP]
            plans = [
                self._keys_of(each) if each else [self._name(*page)]
                for each, page in zip(self._found(part), part, strict=True)
            ]
            # The header of each goes first: what has a piece less is a miss anyway.
            replies = self.link.run([("DEL", key) for keys in plans for key in keys])
            heads = itertools.accumulate((len(keys) for keys in plans[:-1]), initial=0)
            gone += sum(replies[head] == 1 for head in heads)
        return gone

    def _found(self, places: Sequence[tuple[str, bytes, bytes]]) -> list[Sealed | None]:
        """Sealed headers by (tenant, root, key); None where there is none, or a bad one."""
        found: list[Sealed | None] = []
        for start in range(0, len(places), KEYS_A_TRIP):
            part = places[start : start + KEYS_A_TRIP]
            values = self.link.run([("GET", self._name(*place)) for place in part])
            found += [
                self._decoded(place, value) for place, value in zip(part, values, strict=True)
            ]
        return found

    def _decoded(self, place: tuple[str, bytes, bytes], value: Any) -> Sealed | None:
        tenant, root, key = place
        if value is None:
            return None
        try:
            if not isinstance(value, bytes):
                raise RecordError(f"no header: {value}")
            found = redis_record.decode(self._key_of(tenant), root, tenant, value)
            if found.record.key != key:
                raise RecordError("the header of another page")
        except RecordError:
            self.counters.bad_headers += 1
            return None
        return found

    def _name(self, tenant: str, root: bytes, key: bytes) -> bytes:
        return redis_record.header_key(self._key_of(tenant), root, key)

    def _keys_of(self, page: Sealed) -> list[bytes]:
        """A page's header and pieces, the header first."""
        record = page.record
        name = self._name(record.tenant, record.root, record.key)
        return [name, *redis_record.piece_keys(name, page.seal, record.payload_bytes)]

    def _renewed(self, plans: Sequence[Sequence[bytes]]) -> list[bool]:
        commands: list[Command] = []
        for keys in plans:
            for position, key in enumerate(keys):
                more = PIECE_TTL_MORE_S if position else 0
                commands.append(("EXPIRE", key, self._ttl_s + more))
        replies, at = self.link.run(commands), 0
        renewed: list[bool] = []
        for keys in plans:
            renewed.append(bool(keys) and all(said == 1 for said in replies[at : at + len(keys)]))
            at += len(keys)
        return renewed

    def _expect_writable(
        self, slots: Sequence[int], pages: Sequence[PageRecord], payloads: Sequence[memoryview]
    ) -> None:
        for slot, page, payload in zip(slots, pages, payloads, strict=True):
            with self._lock:
                handle = self._handles.get(slot)
            if handle is None or handle.page is not None:
                raise ValueError(f"slot {slot} is not reserved")
            if page.payload_bytes > min(aligned(handle.payload_bytes), payload.nbytes):
                raise ValueError(
                    f"page of {page.payload_bytes} bytes: the slot has {handle.payload_bytes}, "
                    f"the payload {payload.nbytes}"
                )

    def _write_batch(
        self,
        pages: Sequence[PageRecord],
        payloads: Sequence[memoryview],
        slots: Sequence[int],
    ) -> list[bool]:
        """Pieces first, then the headers of the pages that got all of theirs."""
        if not self.takes_writes:
            return [False] * len(pages)
        made: list[Sealed] = []
        pieces: list[Command] = []
        spans: list[range] = []
        for page, payload in zip(pages, payloads, strict=True):
            content = payload.cast("B")[: page.payload_bytes]
            secret = self._key_of(page.tenant)
            made.append(Sealed(page, redis_record.payload_seal(secret, content)))
            begin = len(pieces)
            for number, key in enumerate(self._keys_of(made[-1])[1:]):
                piece = content[number * PIECE_BYTES : (number + 1) * PIECE_BYTES]
                pieces.append(("SET", key, piece, b"EX", self._ttl_s + PIECE_TTL_MORE_S))
            spans.append(range(begin, len(pieces)))
        try:
            said = self.link.run(pieces)
            whole = [all(self._took(said[each]) for each in span) for span in spans]
            headers = [self._header_command(each) for each in itertools.compress(made, whole)]
            answers = iter(self.link.run(headers))
        except TierError:
            return [False] * len(pages)
        kept = [ok and self._took(next(answers)) for ok in whole]
        if all(kept):
            self._is_full = False
        with self._lock:
            for slot, sealed, ok in zip(slots, made, kept, strict=True):
                if ok and slot in self._handles:
                    self._handles[slot].page = sealed
        return kept

    def _header_command(self, page: Sealed) -> Command:
        secret = self._key_of(page.record.tenant)
        value = redis_record.encode(secret, page)
        return ("SET", self._keys_of(page)[0], value, b"EX", self._ttl_s)

    def _took(self, reply: Any) -> bool:
        if not isinstance(reply, Refusal):
            return True
        self.counters.refused_writes += 1
        if reply.is_full:
            self._full_until_s = self._clock() + FULL_PAUSE_S
            self._is_full = True
        return False

    def _read_batch(
        self,
        slots: Sequence[int],
        pages: Sequence[PageRecord],
        buffers: Sequence[memoryview],
    ) -> list[ReadStatus]:
        with self._lock:
            handles = [self._handles.get(slot) for slot in slots]
        plans = [
            self._keys_of(handle.page)[1:]
            if handle is not None and handle.page is not None and handle.page.record == page
            else []
            for handle, page in zip(handles, pages, strict=True)
        ]
        try:
            replies = self.link.run([("GET", key) for keys in plans for key in keys])
        except TierError:
            return [ReadStatus.ERROR if keys else ReadStatus.STALE for keys in plans]
        statuses: list[ReadStatus] = []
        at = 0
        for handle, page, keys, buffer in zip(handles, pages, plans, buffers, strict=True):
            values, at = replies[at : at + len(keys)], at + len(keys)
            sealed = handle.page if handle is not None else None
            if not keys or sealed is None:
                statuses.append(ReadStatus.STALE)
            else:
                statuses.append(self._fill(page, sealed.seal, values, buffer.cast("B")))
        return statuses

    def _fill(
        self, page: PageRecord, seal: bytes, values: Sequence[Any], buffer: memoryview
    ) -> ReadStatus:
        """Put a page together, and believe it only when it is what was sealed."""
        if any(value is None for value in values):
            self.counters.missing_pieces += 1
            return ReadStatus.STALE
        sizes = [
            min(PIECE_BYTES, page.payload_bytes - start)
            for start in range(0, page.payload_bytes, PIECE_BYTES)
        ]
        sound = all(
            isinstance(value, bytes) and len(value) == size
            for value, size in zip(values, sizes, strict=True)
        )
        if sound:
            for number, value in enumerate(values):
                buffer[number * PIECE_BYTES :][: len(value)] = value
            content = buffer[: page.payload_bytes]
            found = redis_record.payload_seal(self._key_of(page.tenant), content)
            if found == seal and checksum(content) == page.checksum:
                return ReadStatus.OK
        self.counters.bad_payloads += 1
        return ReadStatus.CORRUPT

    def _release(self, slots: Sequence[int]) -> list[_Handle]:
        with self._lock:
            unknown = [slot for slot in slots if slot not in self._handles]
            if unknown or len(set(slots)) != len(slots):
                raise ValueError(f"slots {unknown[:3]} are not in use, or named twice")
            gone = [self._handles.pop(slot) for slot in slots]
            self._used_bytes -= sum(_counted(handle.payload_bytes) for handle in gone)
        return gone


def _counted(payload_bytes: int) -> int:
    """What a page counts for."""
    return aligned(payload_bytes)


def _same_page(found: PageRecord, wanted: PageRecord) -> bool:
    """Whether a header names the page that is wanted; another store's bytes may differ."""
    names = ("key", "parent_key", "namespace", "page_index", "tokens", "extras", "payload_bytes")
    return all(getattr(found, name) == getattr(wanted, name) for name in names)


def _batches(pages: Sequence[PageRecord]) -> Iterator[tuple[int, int]]:
    """[start, stop) of pages for one round trip each."""
    start, size = 0, 0
    for position, page in enumerate(pages):
        if position > start and size + page.payload_bytes > BATCH_BYTES:
            yield start, position
            start, size = position, 0
        size += page.payload_bytes
    if start < len(pages):
        yield start, len(pages)
