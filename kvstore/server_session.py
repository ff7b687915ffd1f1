"""One client's session in the server: its matches and reservations by number, and their limits.

Leased pages, each counted once, stay within `limit_bytes`, so that staging them does; pages being
written stay within the session's staging. What a call works on cannot end under it: a match that is
being read and a reservation that is being committed end after that call.
"""

from __future__ import annotations

import itertools
import logging
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvstore.errors import CapacityError, ClosedError, InvalidRequest
from kvstore.identity import PUBLIC_TENANT
from kvstore.lease import LEASE_LIMIT, TENANT_LEASE_LIMIT
from kvstore.prefix_index.page_key import TOKEN_BYTES
from kvstore.staging_pool import StagingSlots
from kvstore.tenant_holds import HeldPages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence, Set

    import numpy as np
    from numpy.typing import NDArray

    from kvstore.identity import Identity
    from kvstore.lease import Match
    from kvstore.reservation import Commit, Reservation
    from kvstore.session import Session
    from kvstore.tenant_holds import TenantHolds
    from kvstore.tiers.host_tier import Staging

MATCHES_MAX = 4096
RESERVATIONS_MAX = 1024
TAKEN_BACK_MAX = 4096  # numbers of calls that were given up before they came
PROMPT_BYTES_MAX = 64 << 20  # of tokens kept so that longer prompts can go on from them
# A reservation that nobody fills ends after so long. Who writes to staging lives, as its heartbeats
# say, and may have an engine whose steps take most of a minute: two pass until its pages are there.
UPLOAD_S_MAX, STAGED_S_MAX = 30.0, 600.0

_log = logging.getLogger("kvstore.server")


class UnknownHandle(ClosedError):
    """A session, match or reservation that this client does not have, or has no more."""


@dataclass(slots=True, eq=False)
class HeldMatch:
    """A match that the client has; number 0: it has none of it. `pages`: what is counted for it."""

    number: int
    match: Match
    pages: NDArray[np.int32]
    tokens: bytes
    extras: dict[int, bytes]
    call: int = 0  # the client's number of the call that made it
    users: int = 0
    released: bool = False


@dataclass(slots=True, eq=False)
class HeldReservation:
    """A reservation that the client has. `offsets`: its pages in the session's staging.

    Where all was stored already it has no pages: the client may still wait until they are durable.
    """

    number: int
    reservation: Reservation
    offsets: list[int] = field(default_factory=list)
    since_s: float = 0.0
    call: int = 0


class ServerSession:
    """Made by SessionRegistry.open(). Safe to call from several threads."""

    def __init__(
        self,
        name: bytes,
        identity: Identity,
        session: Session,
        *,
        is_shared: bool,
        staging: Staging | None,
        staging_bytes: int,
        limit_bytes: int,
        holds: TenantHolds,
        clock: Callable[[], float],
        gone: Callable[[ServerSession], None],
    ) -> None:
        """`is_shared`: its client maps our memory. `gone` is called once, when the session has
        ended and nothing of it is in use.
        """
        self.name = name
        self.identity = identity
        self.session = session
        self.is_shared = is_shared
        self.staging = staging
        self.last_sign_s = clock()
        self._limit_bytes = limit_bytes
        self._holds = holds
        self._clock = clock
        self._gone = gone
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._matches: dict[int, HeldMatch] = {}
        self._reservations: dict[int, HeldReservation] = {}
        self._slots = StagingSlots(staging_bytes, session.spec.page_bytes)
        self._page_token_bytes = TOKEN_BYTES * session.spec.page_tokens
        self._prompt_bytes = 0
        self._leased = HeldPages()
        self._commits = 0
        self._ended = False
        self._is_cut_told = False
        self._taken_back: dict[int, None] = {}  # calls that are to make nothing, in order

    def sign_of_life(self) -> None:
        """The client is there."""
        self.last_sign_s = self._clock()

    def match(
        self, tokens: bytes, extras: dict[int, bytes], after: int, call: int = 0
    ) -> HeldMatch:
        """Look up and lease; number 0 when nothing matched, or nothing of it may be leased.

        `after`: go on from that match's chain. `call`: see take_back().
        """
        tokens, extras = self.longer(after, tokens, extras)
        found = self.session.match(tokens, extras)
        if not found.pages:
            found.release()
            return HeldMatch(0, found, found.page_ids, b"", {})
        return self._hold(found, tokens, extras, call)

    def longer(
        self, after: int, tokens: bytes, extras: dict[int, bytes]
    ) -> tuple[bytes, dict[int, bytes]]:
        """A prompt that goes on from an earlier match's chain; as it is without one (0)."""
        if not after:
            return tokens, extras
        with self._lock:
            earlier = self._match(after)
        return earlier.tokens + tokens, earlier.extras | extras

    @contextmanager
    def using(self, number: int) -> Iterator[HeldMatch]:
        """A match that stays leased until the block is left, even if it is released meanwhile."""
        with self._lock:
            held = self._match(number)
            held.users += 1
        try:
            yield held
        finally:
            with self._lock:
                held.users -= 1
                last = held.released and held.users == 0
            if last:
                held.match.release()

    def stage(self, number: int, deadline_s: float) -> Match:
        """Bring a match's pages into memory."""
        with self.using(number) as held:
            held.match.stage(deadline_s)
            return held.match

    def release(self, numbers: Sequence[int]) -> None:
        """End those leases; unknown ones are ended already."""
        with self._lock:
            ending = [self._matches.pop(n) for n in numbers if n in self._matches]
            for held in ending:
                held.released = True
                self._prompt_bytes -= len(held.tokens)
                self._leased.remove(held.pages, self.session.spec.page_bytes)
                self._holds.unlease(held.pages, self.session.spec.page_bytes)
            idle = [held for held in ending if held.users == 0]
        for held in idle:
            held.match.release()

    def take_back(self, calls: Sequence[int]) -> None:
        """Give up what these calls made, and what they will have made when they end: their client
        has not waited for the reply, and knows nothing of it.
        """
        unknown = {call for call in calls if call}
        with self._lock:
            self._taken_back |= dict.fromkeys(sorted(unknown))
            for old in list(self._taken_back)[:-TAKEN_BACK_MAX]:
                del self._taken_back[old]
            matches = [n for n, each in self._matches.items() if each.call in unknown]
            reservations = [n for n, each in self._reservations.items() if each.call in unknown]
        self.release(matches)
        for number in reservations:
            self.abort(number)

    def reserve(
        self,
        tokens: bytes,
        extras: dict[int, bytes],
        deadline_s: float,
        after: int = 0,
        call: int = 0,
    ) -> HeldReservation:
        """Slots to write, as many as fit in staging; number 0 when there is nothing to write.

        `after`: the prompt goes on from that match's chain. `call`: see take_back().
        """
        tokens, extras = self.longer(after, tokens, extras)
        with self._lock:
            self._require_open()
            if len(self._reservations) >= RESERVATIONS_MAX:
                raise CapacityError(f"{RESERVATIONS_MAX} reservations are open in this session")
            self._holds.begin_reservation()
            # Nobody else gets them meanwhile; what this prompt can't need stays for others.
            limit = min(self._slots.free, len(tokens) // self._page_token_bytes)
            offsets = self._slots.take(limit)
        wanted = number = 0
        try:
            made = self.session.reserve(tokens, extras, deadline_s=deadline_s, limit=limit)
            wanted = made.count
            number = next(self._numbers) if wanted or made.reason == "present" else 0
        finally:
            with self._lock:
                self._slots.give_back(offsets[wanted:])
                if not number:
                    self._holds.end_reservation()
        held = HeldReservation(number, made, offsets[:wanted], self._clock(), call)
        with self._lock:
            if not self._ended and call not in self._taken_back:
                if number:
                    self._reservations[number] = held
                return held
            if number:
                self._slots.give_back(held.offsets)
                self._holds.end_reservation()
        made.abort()
        raise UnknownHandle("the session has ended, or this call was taken back")

    @contextmanager
    def writing(self, number: int) -> Iterator[HeldReservation]:
        """Take a reservation to commit it; it is given up when the block did not."""
        with self._lock:
            self._require_open()
            held = self._reservations.pop(number, None)
            if held is None:
                raise UnknownHandle("no such reservation: committed, given up or too old")
            self._commits += 1
        try:
            yield held
        finally:
            held.reservation.abort()
            with self._lock:
                self._slots.give_back(held.offsets)
                self._holds.end_reservation()
                self._commits -= 1
                last = self._ended and self._commits == 0
            if last:
                self._finish()

    def commit(self, number: int, *, durable: bool, deadline_s: float) -> Commit:
        """Copy a reservation's pages out of staging and publish them."""
        with self.writing(number) as held:
            if held.offsets and self.staging is None:
                raise InvalidRequest("this session has no staging: write by WritePages")
            size, staging = self.session.spec.page_bytes, self.staging
            sources = [staging.view(at, size) for at in held.offsets] if staging else []
            try:
                return held.reservation.commit(
                    durable=durable, deadline_s=deadline_s, sources=sources
                )
            finally:
                for source in sources:
                    source.release()

    def abort(self, number: int) -> None:
        """Give a reservation up; an unknown one has ended already."""
        with self._lock:
            held = self._reservations.pop(number, None)
            if held is not None:
                self._slots.give_back(held.offsets)
                self._holds.end_reservation()
        if held is not None:
            held.reservation.abort()

    def sweep(self) -> int:
        """Give up reservations that have been open for too long; how many."""
        with self._lock:
            now = self._clock()
            held = self._reservations.items()
            old = [n for n, each in held if now - each.since_s > self._lasts_s(each)]
        for number in old:
            self.abort(number)
        return len(old)

    def give_back_leases(self, tenants: Set[str]) -> int:
        """End the leases on pages of these tenants, as far as this session may read them; how many.

        What a client copies meanwhile it drops, if the page has moved: its generation tells.
        """
        readable = {self.identity.tenant}
        if self.session.public_root is not None:
            readable.add(PUBLIC_TENANT)
        with self._lock:
            numbers = list(self._matches) if readable & tenants else []
        self.release(numbers)
        return len(numbers)

    def end(self) -> None:
        """Release and give up all that is not being worked on this moment; no call works after."""
        with self._lock:
            if self._ended:
                return
            self._ended = True
            reservations, matches = list(self._reservations), list(self._matches)
            self._commits += 1  # `gone` comes last
        for number in reservations:
            self.abort(number)
        self.release(matches)
        with self._lock:
            self._commits -= 1
            last = self._commits == 0
        if last:
            self._finish()

    @property
    def counts(self) -> tuple[int, int]:
        """Open matches and reservations."""
        return len(self._matches), len(self._reservations)

    def _lasts_s(self, held: HeldReservation) -> float:
        return STAGED_S_MAX if self.staging and held.offsets else UPLOAD_S_MAX

    def _finish(self) -> None:
        self._gone(self)
        self.staging = None  # its memory is free now, and not when this object is collected

    def _require_open(self) -> None:
        if self._ended:
            raise UnknownHandle("the session has ended")

    def _match(self, number: int) -> HeldMatch:
        self._require_open()
        held = self._matches.get(number)
        if held is None:
            raise UnknownHandle("no such match: released, or of another session")
        return held

    def _hold(self, found: Match, tokens: bytes, extras: dict[int, bytes], call: int) -> HeldMatch:
        """Give a match its number, shortened to what the session may hold."""
        try:
            with self._lock:
                self._require_open()
                if call in self._taken_back:
                    raise UnknownHandle("this call was taken back")
                if len(self._matches) >= MATCHES_MAX:
                    raise CapacityError(f"{MATCHES_MAX} matches are open in this session")
                if self._prompt_bytes + len(tokens) > PROMPT_BYTES_MAX:
                    raise CapacityError("too many long matches are open in this session")
                if not self._count(found):
                    return HeldMatch(0, found, found.page_ids, b"", {})
                tokens = tokens[: TOKEN_BYTES * found.tokens]
                number = next(self._numbers)
                held = HeldMatch(number, found, found.page_ids, tokens, extras, call)
                self._matches[held.number] = held
                self._prompt_bytes += len(tokens)
                return held
        except BaseException:
            found.release()
            raise

    def _count(self, found: Match) -> int:
        """Count a match's pages and shorten it to those that fit; how many are left."""
        pages, page_bytes = found.page_ids, self.session.spec.page_bytes
        own = self._leased.fitting(pages, page_bytes, self._limit_bytes)
        fitting = self._holds.lease(pages[:own], page_bytes)
        self._leased.add(pages[:fitting], page_bytes)
        found.keep(fitting, LEASE_LIMIT if fitting == own else TENANT_LEASE_LIMIT)
        if found.reason and not self._is_cut_told:
            self._is_cut_told = True
            _log.warning(
                "a look-up was answered with %d of %d stored pages: %s, %d bytes are leased; raise "
                "host_bytes, or let fewer prompts wait at a time (said once a session)",
                fitting,
                len(pages),
                found.reason,
                self._leased.held_bytes,
            )
        return fitting
