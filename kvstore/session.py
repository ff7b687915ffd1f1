"""One client's connection to an open store: a spec, a tenant, a salt, a writer's name.

All calls are safe to make from several threads. Its leases and reservations end with it.
"""

from __future__ import annotations

from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

from kvstore.errors import ClosedError
from kvstore.hints import Hints, checked_conversation, end_conversation, hint_stored
from kvstore.identity import PUBLIC_TENANT
from kvstore.lease import Match
from kvstore.prefill import Prefill, PrefillRate
from kvstore.prefix_index.page_key import TOKEN_BYTES, page_keys
from kvstore.prefix_index.page_table import rows_of
from kvstore.request import checked_deadline, checked_extras, checked_tokens
from kvstore.reservation import LIMIT, PRESENT, Reservation, Run
from kvstore.state import BREATH_S, DISK, HOST, NO_PAGE, PIECE_PAGES
from kvstore.tenant_usage import refuse_pin_over_quota

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from kvstore.disk_writer import DiskWriter
    from kvstore.evictor import Evictor
    from kvstore.prefetcher import Prefetcher
    from kvstore.redis_share import RedisShare
    from kvstore.request import Extras, Tokens
    from kvstore.reservation import Chain
    from kvstore.spec import CacheSpec
    from kvstore.stager import Stager
    from kvstore.state import StoreState, TreeInfo

KEY_BYTES = 16
FASTER_BITS = 1 << HOST | 1 << DISK
BEHIND = "disk behind"
MORE = "more"  # pages have left the arena, and more must: only within this module
ROUNDS_A_PIECE = 4  # others may take what has come free; then a reservation makes room at one go
PIECES_AT_ONCE = 16  # of pages that leave then, at most
AT_ONCE_S = 0.002  # after which no more of them leave in that hold
# How often a reservation that found no room looks again: memory may be populated by now, which
# nobody announces.
POLL_S = 0.02


class Session:
    """Made by Store.session(). Close it, or close the store, to give everything back."""

    def __init__(
        self,
        state: StoreState,
        spec: CacheSpec,
        tree: TreeInfo,
        writer: str,
        *,
        evictor: Evictor,
        stager: Stager | None,
        disk_writer: DiskWriter | None,
        public_root: bytes | None = None,
        share: RedisShare | None = None,
        prefetcher: Prefetcher | None = None,
    ) -> None:
        self.state = state
        self.spec = spec
        self.root = tree.root
        self.tenant = tree.tenant
        self.stager = stager
        self.disk_writer = disk_writer
        self.share = share
        self._prefetcher = prefetcher
        self.tree = tree
        self.public_root = public_root  # of a tree to find pages in, too
        self._public_tree = (
            replace(tree, root=public_root, tenant=PUBLIC_TENANT) if public_root else None
        )
        self._evictor = evictor
        self._held: set[Match | Reservation] = set()
        self._runs: dict[bytes, Reservation] = {}  # open ones by the key of their first page
        self._closed = False
        self.prefill = PrefillRate(state.config.even_tokens)
        with state.lock:
            self.writer_id = state.writer_id(writer)
            self.traffic = state.meters.of(self.tenant, writer)

    def match(self, tokens: Tokens, extras: Extras | None = None) -> Match:
        """Find the longest stored chain of a prompt and lease it, in one step.

        tokens: int32 ids, shape [n], as an array, a sequence or little-endian bytes. extras: bytes
        that also decide a page's KV, by page index. Raises InvalidRequest for malformed input.
        """
        values, more = checked_tokens(tokens), checked_extras(extras)
        found = self._match(values, more)
        if self.share is not None and found.tokens < self._whole_tokens(values):
            trees = self._trees_to_look_in(values, more, found.pages)
            if self.share.finder.look(trees, values, more):
                shorter, found = found, self._match(values, more, counted=found.pages)
                shorter.release()
        return found

    def _whole_tokens(self, values: bytes) -> int:
        count = len(values) // TOKEN_BYTES
        return count - count % self.spec.page_tokens

    def _trees_to_look_in(
        self, values: bytes, more: dict[int, bytes], found: int
    ) -> list[tuple[TreeInfo, int]]:
        """Where Redis may have more of this prompt, and how many pages the store has there."""
        if self._public_tree is None:
            return [(self.tree, found)]
        with self.state.lock:
            match = self.state.index.match
            return [
                (tree, len(match(tree.root, values, more)))
                for tree in (self.tree, self._public_tree)
            ]

    def _match(self, values: bytes, more: dict[int, bytes], *, counted: int | None = None) -> Match:
        """Look up and lease; `counted`: the pages of this same look-up that are counted already."""
        state, counters, known = self.state, self.state.counters, counted or 0
        started_s = perf_counter()
        with state.lock:
            self.require_open()
            pages = self._found(values, more)
            if counted is None:
                counters.lookups += 1
                counters.lookup_tokens += len(values) // TOKEN_BYTES
                if state.recorder is not None:
                    size = self.spec.page_tokens
                    state.recorder.add(state.clock(), self.root, values, size, more)
                self.traffic.requests += 1
                self.traffic.tokens += len(values) // TOKEN_BYTES
            if len(pages):
                state.index.lease(int(pages[-1]))
                state.index.touch(pages[known:], state.clock())
                self._note_hit(pages[known:])
                counters.lookup_hits += not known
                self.traffic.hits += not known
            if counted is None:
                state.meters.lookup.observe(perf_counter() - started_s)
            found = Match(self, pages)
            if len(pages) and self._whole_tokens(values) == len(pages) * self.spec.page_tokens:
                found.is_whole = True
                self.look_ahead(int(pages[-1]))
            if len(pages):  # a miss holds nothing, and its release would say nothing
                self._held.add(found)
        return found

    def _note_hit(self, pages: NDArray[np.int32]) -> None:
        """Count pages that were found; some of them are worth a place on disk now."""
        counters, held = self.state.counters, self.state.index.table.state[rows_of(pages)]
        self.traffic.hit(held, self.tree.page_tokens)
        counters.hit_tokens += len(pages) * self.spec.page_tokens
        counters.hit_pages += len(pages)
        counters.hit_pages_disk += int(np.count_nonzero(held & FASTER_BITS == 1 << DISK))
        wanted = self.state.admission.touched(pages)
        if len(wanted) and self.disk_writer is not None:
            self.disk_writer.demote(wanted)

    def reserve(
        self,
        tokens: Tokens,
        extras: Extras | None = None,
        *,
        deadline_s: float = 0.25,
        limit: int | None = None,
    ) -> Reservation:
        """Slots for the pages of this prompt that nobody has stored or is storing.

        The run starts after the longest stored chain, or after what this session itself is writing
        there: such runs are committed in order, and giving one up drops those after it. It is
        empty, with a reason, when all is "present", when another writer has the next page ("in
        progress"), when no room could be made within `deadline_s` seconds ("full"), when the
        tenant has all that its quota allows and none of it can leave ("quota: ..."), or while the
        store is still reading its catalog ("warming up"); it is shorter than asked, with a reason,
        when room ran out, or when there are more than `limit` pages to write ("limit").
        """
        values, more = checked_tokens(tokens), checked_extras(extras)
        wait_s = checked_deadline(deadline_s)
        page_tokens = self.spec.page_tokens
        total = len(values) // (TOKEN_BYTES * page_tokens)
        values = values[: total * TOKEN_BYTES * page_tokens]
        keys = page_keys(self.root, values, page_tokens, more)
        state = self.state
        with state.lock:
            self.require_open()
            deadline = state.clock() + wait_s
            rounds = ROUNDS_A_PIECE * (1 + total // PIECE_PAGES)
            while True:
                made = self._try_reserve(values, more, keys, total, limit, at_once=rounds <= 0)
                if made.reason == MORE:
                    rounds -= 1
                    if rounds < 0 and state.clock() >= deadline:
                        made.reason = self._why_no_slots()
                        break
                    state.changed.wait(BREATH_S)
                    self.require_open()
                    continue
                left = deadline - state.clock()
                populating = made.reason == "full" and not state.host_populated
                if left <= 0 or made.reason not in ("full", BEHIND):
                    break
                if made.count and not populating:
                    break
                made.abort()  # all of it may fit once the memory is there
                state.changed.wait(min(left, POLL_S))
                self.require_open()
            if made.count:
                self._held.add(made)
                self._runs[made.first_key] = made
            elif made.reason not in (PRESENT, LIMIT, "in progress"):
                state.counters.reservations_refused += 1
            return made

    def report_saved(self, prefill_s: float) -> None:
        """For the metrics: how much prefill the last match saved, as the engine measures it."""
        saved_s = checked_deadline(prefill_s)
        with self.state.lock:
            self.traffic.prefill_saved_s += saved_s

    def report_prefill(self, tokens: int, before: int, seconds: float) -> None:
        """Computing `tokens` of a prompt that follow `before` others took so long: pages that this
        session commits are weighed by it where the store's objective is "compute"."""
        self.add_prefill(Prefill.of(tokens, before, seconds))

    def add_prefill(self, more: Prefill) -> None:
        """The same of several prompts; nonsense is left out."""
        with self.state.lock:
            self.prefill.add(more)

    def flush(self, deadline_s: float = 10.0) -> bool:
        """Wait until all that was committed is on disk; False when `deadline_s` passed first."""
        self.require_open()
        deadline = self.state.clock() + checked_deadline(deadline_s)
        return self.disk_writer is not None and self.disk_writer.flush(deadline)

    def pin(self, tokens: Tokens, ttl_s: float, extras: Extras | None = None) -> int:
        """Keep the stored chain of this prompt for `ttl_s` seconds; how many pages it has.

        Pins end with the store. Pinning again replaces the time. QuotaError when the tenant would
        hold more pages by pins than its pinned_pages_max.
        Pages that only Redis has are not this store's to keep.
        """
        ttl = checked_deadline(ttl_s)
        values, more = checked_tokens(tokens), checked_extras(extras)
        with self.state.lock:
            self.require_open()
            pages = self.state.cut_remote(self.stored(values, more))
            refuse_pin_over_quota(self.state, self.tenant, pages)
            if len(pages):
                self.state.index.pin(int(pages[-1]), self.state.clock() + ttl)
            return len(pages)

    def unpin(self, tokens: Tokens, extras: Extras | None = None) -> int:
        """Take back every pin on the stored chain of this prompt; how many pages it has."""
        values, more = checked_tokens(tokens), checked_extras(extras)
        with self.state.lock:
            self.require_open()
            pages = self.state.index.match(self.root, values, more)
            for page in pages.tolist():
                self.state.index.unpin(page)
            return len(pages)

    def hint(
        self,
        tokens: Tokens,
        extras: Extras | None = None,
        *,
        next_use_s: float | None = None,
        priority: int | None = None,
        done: bool = False,
        conversation: str = "",
    ) -> int:
        """Tell what is known of the stored chain of this prompt; how many pages it has.

        next_use_s: it will be asked for in so many seconds, as a queue knows; such pages leave
        last. priority: -2..2, they leave before or after others. done: it won't come back, and
        leaves first. conversation: whose turn it is, for end_conversation(). A hint never makes
        another tenant's pages leave, and of pages that others share it is the last word that
        counts, until they are used again.
        """
        hints = Hints(next_use_s, priority, done, conversation)
        values, more = checked_tokens(tokens), checked_extras(extras)
        with self.state.lock:
            self.require_open()
            return hint_stored(self, values, more, hints)

    def end_conversation(self, name: str) -> int:
        """It won't go on: its pages leave first, unpinned, but those that other prompts go on
        from; how many they are."""
        checked_conversation(name, needed=True)
        with self.state.lock:
            self.require_open()
            return end_conversation(self, name)

    def close(self) -> None:
        """Release all matches, abort all reservations. Later calls raise ClosedError."""
        with self.state.lock:
            self._closed = True
            held = list(self._held)
        for item in held:
            if isinstance(item, Match):
                item.release()
            else:
                item.abort()

    def last_page(self, chain: Chain) -> int:
        """The deepest page of a stored chain, NO_PAGE if it has gone. The lock is held."""
        tokens, extras = chain
        pages = self.state.cut_remote(self.stored(tokens, extras))
        whole = len(tokens) // (TOKEN_BYTES * self.spec.page_tokens)
        return int(pages[-1]) if whole and len(pages) == whole else NO_PAGE

    def look_ahead(self, last: int) -> None:
        """A prompt that ends in this page was found whole: read on, if that is wanted and the page
        is in memory itself. The lock is held."""
        if self._prefetcher is not None and self.state.index.table.state[last] >> HOST & 1:
            self._prefetcher.after(last, self.spec.page_bytes)

    def require_open(self) -> None:
        """Raise unless this session may be used."""
        self.state.require_open()
        if self._closed:
            raise ClosedError("this session is closed; ask the store for another")

    def forget(self, item: Match | Reservation) -> None:
        """A match or reservation has ended."""
        with self.state.lock:
            self._held.discard(item)
            if isinstance(item, Reservation):
                self._runs.pop(item.first_key, None)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def stored(self, tokens: bytes, extras: dict[int, bytes]) -> NDArray[np.int32]:
        """The longest chain of a prompt that a look-up may find. The lock is held."""
        return self.state.cut_condemned(self.state.index.match(self.root, tokens, extras))

    def _found(self, tokens: bytes, extras: dict[int, bytes]) -> NDArray[np.int32]:
        """The longest chain that this session may read: its own, unless a public one is longer."""
        mine = self.stored(tokens, extras)
        if self.public_root is None:
            return mine
        state = self.state
        public = state.cut_condemned(state.index.match(self.public_root, tokens, extras))
        return public if len(public) > len(mine) else mine

    def _try_reserve(
        self,
        tokens: bytes,
        extras: dict[int, bytes],
        keys: bytes,
        total: int,
        limit: int | None,
        *,
        at_once: bool,
    ) -> Reservation:
        """One attempt; the lock is held."""
        state = self.state
        page_bytes = TOKEN_BYTES * self.spec.page_tokens
        if not state.warm:
            return self._nothing(0, "warming up")
        found = state.index.match(self.root, tokens, extras)
        own = state.cut_remote(found)
        if len(own) < len(found) and not state.drop_remote(int(found[len(own)])):
            return self._nothing(len(own), "in progress")  # somebody brings these pages here
        found, start = own, len(own)
        if start >= total:
            run = Run(start, NO_PAGE, b"", {}, b"", ())
            return Reservation(self, run, PRESENT, (tokens, extras))
        if state.condemned and len(state.cut_condemned(found)) < start:
            return self._nothing(start, "in progress")
        parent = int(found[-1]) if start else NO_PAGE
        before, start = self._own_run(keys, start)
        stop = self._free_until(keys, start, total)
        if stop == start:
            return self._nothing(start, "in progress")
        is_limited = limit is not None and stop - start > limit
        if limit is not None and is_limited:
            stop = start + limit
            if limit <= 0:
                return self._nothing(start, LIMIT)
        queued = self._disk_takes(stop - start)
        if not queued:
            return self._nothing(start, BEHIND)
        is_behind, stop = queued < stop - start, start + queued
        if before is not None:
            parent = NO_PAGE  # it gets one when the run before it is published
        if parent != NO_PAGE:
            state.index.lease(parent)
        slots, is_more = self._take_slots(stop - start, at_once)
        if not slots:
            if parent != NO_PAGE:
                state.index.unlease(parent)
            return self._nothing(start, MORE if is_more else self._why_no_slots())
        reason = LIMIT if is_limited else ("in progress" if stop < total else "")
        if is_behind:
            reason = BEHIND
        if len(slots) < stop - start:
            reason = self._why_no_slots()
        stop = start + len(slots)
        run = Run(
            start=start,
            parent=parent,
            tokens=tokens[start * page_bytes : stop * page_bytes],
            extras={page - start: extras[page] for page in extras if start <= page < stop},
            keys=keys[start * KEY_BYTES : stop * KEY_BYTES],
            slots=tuple(slots),
        )
        for key in _split(run.keys):
            state.pending.add((self.root, key))
        return Reservation(self, run, reason, before=before)

    def _nothing(self, start: int, reason: str) -> Reservation:
        return Reservation(self, Run(start, NO_PAGE, b"", {}, b"", ()), reason)

    def _own_run(self, keys: bytes, start: int) -> tuple[Reservation | None, int]:
        """The last of this session's open runs that follow each other from `start` on, and its
        end."""
        last = None
        while run := self._runs.get(keys[start * KEY_BYTES : (start + 1) * KEY_BYTES]):
            end = start + run.count
            if keys[start * KEY_BYTES : end * KEY_BYTES] != run.keys:
                break
            last, start = run, end
        return last, start

    def _free_until(self, keys: bytes, start: int, total: int) -> int:
        """The first page from `start` on that another reservation is writing."""
        for page in range(start, total):
            key = keys[page * KEY_BYTES : (page + 1) * KEY_BYTES]
            if (self.root, key) in self.state.pending:
                return page
        return total

    def _disk_takes(self, pages: int) -> int:
        """How many of so many pages may be queued for the disk: what is there may be lost with this
        process. Runs get shorter only for a tenant that has nothing there; others wait."""
        writer, size = self.disk_writer, self.spec.page_bytes
        if writer is None or writer.dirty_bytes == 0:
            return pages
        fit = writer.room(self.tenant) // size
        if fit >= pages:
            return pages
        return 0 if writer.dirty_of(self.tenant) else max(1, fit)

    def _why_no_slots(self) -> str:
        return self._evictor.why_no_host(self.tenant, self.spec.page_bytes)

    def _take_slots(self, count: int, at_once: bool) -> tuple[list[int], bool]:
        """Slots, as many as there is room for; or none, when only a piece of the pages that must
        go for them has left, and more can. at_once: some pieces leave in this hold of the lock, and
        what has come free for them by then is taken."""
        size, host = self.spec.page_bytes, self.state.host
        slots = self._evictor.take_host(self.tenant, size, count)
        pieces, until_s = 0, self.state.clock() + AT_ONCE_S
        while len(slots) < count:
            wanted = min(count - len(slots), PIECE_PAGES)
            if not self._evictor.make_room_host(self.tenant, size, wanted):
                break
            slots += self._evictor.take_host(self.tenant, size, count - len(slots))
            pieces += 1
            is_time = self.state.clock() < until_s
            if len(slots) < count and at_once and pieces < PIECES_AT_ONCE and is_time:
                continue
            if len(slots) < count and not (at_once and slots):
                if slots and host is not None:
                    host.free_many(slots)
                return [], True
            break
        return slots, False


def _split(keys: bytes) -> Iterable[bytes]:
    return (keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES))
