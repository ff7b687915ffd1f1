"""The store's side of the planner: every call to the store, in threads of its own.

What is asked returns at once; answers wait in a queue until the engine's thread takes them. An
answer is tagged with the epoch of the session that gave it: once another server answers, what the
old one said becomes a miss. Invariant: whatever a thread gets from the store is given back, also
when nobody waits for it any more. Must not be here: decisions, engine types.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter, deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvstore.engine_adapter.plan_records import Chain, Committed, Found, Room
from kvstore.engine_adapter.transfer_plan import Grant

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.engine_adapter.load_choice import LoadChoice
    from kvstore.engine_adapter.plan_records import StoreEvent
    from kvstore.hints import Hints

LOOKUP_THREADS, STAGE_THREADS, SAVE_THREADS = 2, 4, 2
COMMIT_THREADS = 2  # of their own: what waits for room would keep others from making it
RESERVE_S_MAX = 1.0  # its thread may wait
COMMIT_S_MAX = 10.0
GRANT_S_MAX = 20.0  # older grants are thrown away: the server forgets theirs after 30
UNREACHABLE = "unreachable"

_log = logging.getLogger("kvstore.vllm")


class Crew:
    """Some daemon threads that do what is put in their queue; an error is counted and logged."""

    def __init__(self, name: str, threads: int, failed: Callable[[str, Exception], None]) -> None:
        self._name = name
        self._failed = failed
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name=f"kvstore-{name}", daemon=True)
            for _ in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def do(self, task: Callable[[], None]) -> None:
        """Queue a task."""
        self._tasks.put(task)

    def stop(self) -> None:
        """End the threads when they are through with their queue."""
        for _ in self._threads:
            self._tasks.put(None)

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                task()
            except Exception as error:  # one bad answer must not end the thread
                self._failed(self._name, error)


class Lookups:
    """A StorePort around one session with a server on this host. One engine's thread uses it."""

    def __init__(self, choice: LoadChoice) -> None:
        self._choice = choice
        self._session: Any = None
        self._lock = threading.Lock()
        self._events: deque[tuple[int, StoreEvent]] = deque()
        self._grants: deque[tuple[float, Grant]] = deque()  # when it was asked for
        self._news = threading.Event()
        self._tickets: dict[int, tuple[int, Any]] = {}  # epoch and match; None while it is asked
        self._rooms: dict[int, Any] = {}
        self._is_granting = False
        self._logged: set[str] = set()
        self.counters: Counter[str] = Counter()
        self._lookup_crew = Crew("lookup", LOOKUP_THREADS, self._failed)
        self._stage_crew = Crew("stage", STAGE_THREADS, self._failed)
        self._save_crew = Crew("save", SAVE_THREADS, self._failed)
        self._commit_crew = Crew("commit", COMMIT_THREADS, self._failed)

    def use(self, session: Any) -> None:
        """The session to ask, a RemoteSession; until then, everything is a miss."""
        self._session = session
        self._news.set()

    @property
    def epoch(self) -> int:
        """Of the session that answers now; 0 if none does."""
        session = self._session
        return int(session.epoch) if session is not None else 0

    def ask_grant(self, ranks: int) -> None:
        """Have tokens made with which the workers attach to the session's memory, once each.

        They are worth nothing after a while: ask again when workers have not attached.
        """
        epoch = self.epoch
        if epoch and not self._is_granting:
            self._is_granting = True
            self._save_crew.do(lambda: self._get_grant(ranks, epoch))

    def take_grant(self) -> Grant | None:
        """The newest grant that is still of use and was not taken yet."""
        taken = None
        while self._grants:
            asked_s, grant = self._grants.popleft()
            if grant.epoch == self.epoch and time.monotonic() - asked_s < GRANT_S_MAX:
                taken = grant
        return taken

    def wait(self, wait_s: float) -> bool:
        """Until there is news, at most so long; whether there is."""
        return self._news.wait(wait_s)

    def drain(self, epoch: int) -> list[StoreEvent]:
        """Answers since the last call; those of another epoch have become misses."""
        self._news.clear()
        found = []
        while self._events:
            of, event = self._events.popleft()
            found.append(event if of == epoch else self._stale(event))
        return found

    def look_up(self, ticket: int, chain: Chain) -> None:
        """See StorePort."""
        with self._lock:
            self._tickets[ticket] = (0, None)
        self._lookup_crew.do(lambda: self._look_up(ticket, chain))

    def places(self, ticket: int, start: int, stop: int) -> list[tuple[int, int]]:
        """See StorePort."""
        epoch, match = self._tickets.get(ticket, (0, None))
        if match is None or epoch != self.epoch or stop > match.host_pages:
            return []
        slots, generations = match.places(start, stop)
        return list(zip(slots.tolist(), generations.tolist(), strict=True))

    def release(self, ticket: int) -> None:
        """See StorePort."""
        with self._lock:
            _, match = self._tickets.pop(ticket, (0, None))
        if match is not None:
            match.release()

    def reserve(self, job: int, chain: Chain) -> None:
        """See StorePort."""
        self._save_crew.do(lambda: self._reserve(job, chain))

    def commit(self, job: int) -> None:
        """See StorePort."""
        self._commit_crew.do(lambda: self._commit(job))

    def abort(self, job: int) -> None:
        """See StorePort."""
        reservation = self._rooms.pop(job, None)
        if reservation is not None:
            self._commit_crew.do(reservation.abort)

    def pin(self, chain: Chain, ttl_s: float) -> None:
        """See StorePort."""
        session = self._session
        if session is None:
            return
        if ttl_s > 0:
            self._save_crew.do(lambda: session.pin(chain.tokens, ttl_s, chain.extras))
        else:
            self._save_crew.do(lambda: session.unpin(chain.tokens, chain.extras))

    def hint(self, chain: Chain, hints: Hints) -> None:
        """See StorePort."""
        session = self._session
        if session is not None:
            self._save_crew.do(lambda: _give(session, chain, hints))

    def end_conversation(self, name: str) -> None:
        """See StorePort."""
        session = self._session
        if session is not None:
            self._save_crew.do(lambda: session.end_conversation(name))

    def prefilled(self, tokens: int, before: int, seconds: float) -> None:
        """An engine computed a prompt: for what its pages are worth. Waits for nobody."""
        session = self._session
        if session is not None and seconds > 0:
            session.report_prefill(int(tokens), int(before), seconds)

    def saved(self, seconds: float) -> None:
        """So much prefill was not needed: for the metrics. Waits for nobody."""
        session = self._session
        if session is not None:
            session.report_saved(seconds)

    def held(self) -> dict[str, int]:
        """What is not given back yet."""
        return {"tickets": len(self._tickets), "reservations": len(self._rooms)}

    def close(self) -> None:
        """End the threads and the session."""
        for crew in (self._lookup_crew, self._stage_crew, self._save_crew, self._commit_crew):
            crew.stop()
        session, self._session = self._session, None
        if session is not None:
            session.close()

    def _post(self, epoch: int, event: StoreEvent) -> None:
        self._events.append((epoch, event))
        self._news.set()

    def _stale(self, event: StoreEvent) -> StoreEvent:
        self.counters["answers_of_a_lost_server"] += 1
        if isinstance(event, Found):
            return Found(event.ticket, reason=UNREACHABLE)
        if isinstance(event, Room):
            self.abort(event.job)
            return Room(event.job, reason=UNREACHABLE)
        return event

    def _look_up(self, ticket: int, chain: Chain) -> None:
        session, epoch = self._session, self.epoch
        if ticket not in self._tickets:
            return
        found, match = Found(ticket), None
        try:
            if session is not None and epoch:
                match = session.match(chain.tokens, chain.extras)
                disk = match.tiers.count("disk")
                missing = match.pages - match.host_pages
                staging = missing > 0 and self._choice.worth_staging(missing)
                ready, why = match.host_pages, match.reason
                found = Found(ticket, match.pages, ready, staging, disk, reason=why)
        finally:
            kept = self._keep(ticket, epoch, match)
            self._post(epoch, found)
        if kept and found.staging:
            self._stage_crew.do(lambda: self._stage(found, epoch, match))

    def _keep(self, ticket: int, epoch: int, match: Any) -> bool:
        """Remember a match for its asker; release it if that one is gone."""
        if match is None:
            return False
        with self._lock:
            wanted = ticket in self._tickets
            if wanted:
                self._tickets[ticket] = (epoch, match)
        if not wanted:
            match.release()
        return wanted

    def _stage(self, found: Found, epoch: int, match: Any) -> None:
        ready = found.ready
        if found.ticket not in self._tickets:
            return
        try:
            begin_s = time.monotonic()
            missing = found.pages - ready
            ready = match.stage(self._choice.stage_deadline_s(missing))
            self._choice.staged(ready - found.ready, time.monotonic() - begin_s)
        finally:
            late = ready < found.pages
            self._post(epoch, replace(found, ready=ready, staging=False, late=late))

    def _reserve(self, job: int, chain: Chain) -> None:
        session, epoch = self._session, self.epoch
        room = Room(job, reason=UNREACHABLE)
        try:
            if session is not None and epoch:
                made = session.reserve(chain.tokens, chain.extras, deadline_s=RESERVE_S_MAX)
                offsets = tuple(made.offsets.tolist())
                if made.count and len(offsets) == made.count:
                    self._rooms[job] = made
                else:  # also of what was stored already the server keeps something
                    made.abort()
                room = Room(job, made.start, offsets, made.reason)
        finally:
            self._post(epoch, room)

    def _commit(self, job: int) -> None:
        made = self._rooms.pop(job, None)
        pages, reason = 0, UNREACHABLE
        try:
            if made is not None:
                done = made.commit(deadline_s=COMMIT_S_MAX)
                pages, reason = done.pages, done.reason
        finally:
            self._post(self.epoch, Committed(job, pages, reason))

    def _get_grant(self, ranks: int, epoch: int) -> None:
        session, asked_s = self._session, time.monotonic()
        try:
            made = session.attach_tokens(ranks) if session is not None else None
        finally:
            self._is_granting = False
        if made is not None and made.epoch == epoch:
            self._grants.append((asked_s, Grant(epoch, str(made.path), tuple(made.tokens))))
            self._news.set()

    def _failed(self, what: str, error: Exception) -> None:
        self.counters["store_errors"] += 1
        kind = f"{what}: {type(error).__name__}"
        if kind not in self._logged:
            self._logged.add(kind)
            _log.warning("%s: %s; taken for a miss, said once", what, error, exc_info=True)


def _give(session: Any, chain: Chain, hints: Hints) -> None:
    hints.give(session, chain.tokens, chain.extras)
