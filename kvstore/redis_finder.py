"""Asks Redis for the pages of a prompt that this store lacks, and puts what it has into the index.

In a thread, never under the lock: a look-up waits for the answer at most `redis_lookup_s`, and not
at all while an earlier question hangs, while Redis does not answer, or when this prompt was asked
about a moment ago. What comes back is believed only where each field is what was asked for.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from kvstore.prefix_index.page_key import PAGE_KEY_BYTES, TOKEN_BYTES, page_keys
from kvstore.state import NO_PAGE, REDIS, StoreState, TreeInfo
from kvstore.tiers.tier import PageRecord, TierError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.tiers.redis_record import Sealed
    from kvstore.tiers.redis_tier import RedisTier

LOOKS_WAITING_MAX = 64
# Pages asked for at once, more each time: a prompt that nobody has costs one small question.
ROUND_PAGES = (4, 32, 256, 512)
# A prompt that Redis did not have is not asked about again for so long.
ABSENT_S = 1.0
ABSENT_MAX = 8192
# Nor about a page that was found, but could not be read.
BROKEN_S = 30.0

_log = logging.getLogger("kvstore.redis")


@dataclass(slots=True, eq=False)
class _Look:
    tree: TreeInfo
    tokens: bytes  # whole pages only
    extras: dict[int, bytes]
    start: int  # pages that the store has
    name: tuple[bytes, bytes]  # root, and key of the first page that is missing
    done: threading.Event = field(default_factory=threading.Event)
    found: int = 0


class RedisFinder:
    """Queue and thread. `look` is safe to call from several threads, without the store's lock."""

    def __init__(self, state: StoreState, redis: RedisTier) -> None:
        self._state = state
        self._redis = redis
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._queue: deque[_Look] = deque()
        self._looks: dict[tuple[bytes, bytes], _Look] = {}
        self._absent: OrderedDict[tuple[bytes, bytes], float] = OrderedDict()
        self._busy_since_s: float | None = None
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="kvstore-redis-find", daemon=True)
        self._thread.start()

    def look(
        self, trees: Sequence[tuple[TreeInfo, int]], tokens: bytes, extras: dict[int, bytes]
    ) -> bool:
        """Whether pages of this prompt have come into the index, under one of `trees`, each with
        the number of pages that the store has there. All are asked about at once.

        Where a tree has all whole pages of the prompt, Redis is not asked about it.
        """
        deadline = self._state.clock() + self._state.config.redis_lookup_s
        looks = [self._ask(tree, tokens, extras, start) for tree, start in trees]
        begun = [look for look in looks if look is not None]
        for look in begun:
            if not look.done.wait(max(0.0, deadline - self._state.clock())):
                with self._state.lock:
                    self._state.counters.redis_lookup_timeouts += 1
        return any(look.found > 0 for look in begun)

    def _ask(
        self, tree: TreeInfo, tokens: bytes, extras: dict[int, bytes], start: int
    ) -> _Look | None:
        page_bytes = TOKEN_BYTES * tree.page_tokens
        whole = len(tokens) // page_bytes
        if start >= whole or not self._is_asking_worthwhile():
            return None
        upto = tokens[: (start + 1) * page_bytes]
        name = tree.root, page_keys(tree.root, upto, tree.page_tokens, extras, first=start)
        return self._begin(name, _Look(tree, tokens[: whole * page_bytes], extras, start, name))

    def avoid(self, root: bytes, key: bytes) -> None:
        """A page that was found is damaged or gone: don't find it again for a while."""
        self._note_absent((root, key), BROKEN_S)

    def stop(self, deadline: float) -> None:
        """End the thread."""
        with self._lock:
            self._stopping = True
            self._work.notify_all()
        self._thread.join(max(0.1, deadline - self._state.clock()))

    def _is_asking_worthwhile(self) -> bool:
        if not self._redis.link.ready or not self._state.warm:
            return False
        since = self._busy_since_s
        patience_s = self._state.config.redis_lookup_s
        return since is None or self._state.clock() - since <= patience_s

    def _begin(self, name: tuple[bytes, bytes], look: _Look) -> _Look | None:
        """The look of that name: a new one, or the one that others wait for already."""
        with self._lock:
            joined = self._looks.get(name)
            if joined is not None:
                return joined
            if self._is_absent(name):
                return None
            if len(self._queue) >= LOOKS_WAITING_MAX or self._stopping:
                return None
            self._looks[name] = look
            self._queue.append(look)
            self._work.notify()
            return look

    def _is_absent(self, name: tuple[bytes, bytes]) -> bool:
        return self._absent.get(name, 0.0) > self._state.clock()

    def _note_absent(self, name: tuple[bytes, bytes], for_s: float) -> None:
        until = self._state.clock() + for_s
        with self._lock:
            self._absent[name] = max(until, self._absent.pop(name, 0.0))
            if len(self._absent) > ABSENT_MAX:
                self._absent.popitem(last=False)

    # The thread

    def _run(self) -> None:
        while True:
            with self._lock:
                self._busy_since_s = None
                while not self._queue and not self._stopping:
                    self._work.wait()
                if self._stopping:
                    return
                look = self._queue.popleft()
                self._busy_since_s = self._state.clock()
            try:
                missing = self._find(look)
            except TierError:
                missing = None  # counted by the link; not asked again until it answers
            except Exception:  # our bug; the thread must live on
                _log.exception("looking a prompt up in Redis failed")
                missing = None
            with self._lock:
                del self._looks[look.name]
            if missing is not None:
                self._note_absent(missing, ABSENT_S)
            with self._state.lock:
                counters = self._state.counters
                counters.redis_lookups += 1
                counters.redis_hits += look.found > 0
                counters.redis_pages_found += look.found
            look.done.set()

    def _find(self, look: _Look) -> tuple[bytes, bytes] | None:
        """Ask, page by page in growing rounds; the name of the first page that Redis lacks."""
        tree, start, turn = look.tree, look.start, 0
        page_bytes = TOKEN_BYTES * tree.page_tokens
        whole = len(look.tokens) // page_bytes
        while start < whole:
            stop = min(whole, start + ROUND_PAGES[min(turn, len(ROUND_PAGES) - 1)])
            first = max(0, start - 1)
            upto = look.tokens[: stop * page_bytes]
            keys = _split(page_keys(tree.root, upto, tree.page_tokens, look.extras, first=first))
            above = keys.pop(0) if start else bytes(PAGE_KEY_BYTES)
            found = self._redis.find_many(tree.tenant, tree.root, keys)
            sound: list[Sealed] = []
            for position, page in enumerate(found):
                parent_key = keys[position - 1] if position else above
                key = keys[position]
                if page is None or self._is_absent((tree.root, key)):
                    break
                if not self._is_asked_for(look, page.record, start + position, key, parent_key):
                    break
                sound.append(page)
            inserted = self._insert(look, start, keys, sound)
            if len(sound) < len(keys):
                return tree.root, keys[len(sound)]
            if not inserted:
                return None
            start, turn = stop, turn + 1
        return None

    def _is_asked_for(
        self, look: _Look, record: PageRecord, index: int, key: bytes, parent_key: bytes
    ) -> bool:
        """Whether a page is exactly the next one of this prompt, in this spec."""
        page_bytes = TOKEN_BYTES * look.tree.page_tokens
        max_age_s = self._state.config.max_age_s
        oldest_s = self._state.wall_clock() - max_age_s if max_age_s is not None else 0.0
        return (
            record.page_index == index
            and record.key == key
            and record.parent_key == parent_key
            and record.namespace == look.tree.namespace
            and record.tokens == look.tokens[index * page_bytes : (index + 1) * page_bytes]
            and record.extras == look.extras.get(index, b"")
            and record.payload_bytes == look.tree.page_bytes
            and record.codec == 0
            and record.created_s >= oldest_s
        )

    def _insert(self, look: _Look, start: int, keys: list[bytes], found: list[Sealed]) -> bool:
        """Put found pages into the index; False when it makes no sense to go on."""
        state, tree = self._state, look.tree
        with state.lock:
            if state.closed or not state.warm or not found:
                return False
            here = state.index.match(tree.root, look.tokens, look.extras)
            known = len(here) - start
            if known < 0 or len(state.cut_condemned(here)) < len(here):
                return False  # what was above has gone, or is about to
            fresh, names = found[known:], keys[known : len(found)]
            writing = [(tree.root, name) in state.pending for name in names]
            if any(writing):
                fresh = fresh[: writing.index(True)]
            if not fresh:
                return not any(writing)
            added = self._add(look, int(here[-1]) if len(here) else NO_PAGE, len(here), fresh)
            look.found += added
            return added == len(found) - known

    def _add(self, look: _Look, parent: int, index: int, found: list[Sealed]) -> int:
        """New pages in tier REDIS, as far as there is room for them. The lock is held."""
        state, tree, records = self._state, look.tree, [page.record for page in found]
        room = state.config.redis_bytes - self._redis.usage().used_bytes
        if sum(record.payload_bytes for record in records) > room:
            state.drop_idle_remote(0.0)
            if parent != NO_PAGE and not state.index.table.is_live(parent):
                return 0
        state.trees.setdefault(tree.root, tree)
        first, count = state.take_sequences(len(records)), len(records)
        pages = state.index.insert(
            tree.root,
            tree.page_tokens,
            parent,
            b"".join(record.tokens for record in records),
            {at: record.extras for at, record in enumerate(records) if record.extras},
            b"".join(record.key for record in records),
            np.arange(first, first + count, dtype=np.uint64),
            tree.page_bytes,
            np.frombuffer(b"".join(r.checksum for r in records), np.uint64).reshape(-1, 2),
            state.clock(),
        )
        table = state.index.table
        table.created[pages] = [min(record.created_s, 2**32 - 1) for record in records]
        table.writer[pages] = [state.writer_id(record.writer) for record in records]
        own = [state.record(page) for page in pages.tolist()]
        slots = self._redis.adopt(list(zip(found, own, strict=True)))
        state.index.set_tier(pages[: len(slots)], REDIS, slots)
        if len(slots) < count:
            state.index.remove(pages[len(slots) :][::-1])
        return len(slots)


def _split(keys: bytes) -> list[bytes]:
    return [keys[at : at + PAGE_KEY_BYTES] for at in range(0, len(keys), PAGE_KEY_BYTES)]
