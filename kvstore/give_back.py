"""Gives leases and reservations back to a server in the background, many in one call.

An engine that ends a match waits for no round trip. What can't be delivered now is kept and tried
again until its session is over, which gives everything back anyway.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.live_session import LiveSession

GATHER_S = 0.01  # how long something may wait for company
PENDING_MAX = 256  # then it does not wait
RETRY_S = 0.1


class GiveBack:
    """One queue for all sessions of a client. Thread-safe; only settle() and stop() wait."""

    def __init__(self, send: Callable[[LiveSession, str, list[int]], bool]) -> None:
        """`send(session, method, ids)` makes the call, False if it has to be made again."""
        self.gather_s = GATHER_S
        self.released = 0  # leases that the server has taken back; only grows
        self._send = send
        self._items: deque[tuple[LiveSession, str, int]] = deque()
        self._some = threading.Event()
        self._hurry = threading.Event()
        self._stopped = False
        self._lock = threading.Lock()
        self._turn = threading.Condition()  # guards these two
        self._turns_begun = self._turns_ended = 0
        self._thread: threading.Thread | None = None

    def release(self, session: LiveSession, match: int) -> None:
        """End the lease of a match soon."""
        self._add(session, "Release", match)

    def abort(self, session: LiveSession, reservation: int) -> None:
        """Give a reservation up that the server would not take at once."""
        self._add(session, "Abort", reservation)
        self._hurry.set()

    def take_back(self, session: LiveSession, call: int) -> None:
        """Give up whatever a call made, or will make, for whose reply nobody waits any more."""
        self._add(session, "TakeBack", call)
        self._hurry.set()

    def hurry(self) -> None:
        """Something is about to need what is given back."""
        if self._items:
            self._hurry.set()

    def settle(self, wait_s: float) -> None:
        """Deliver now what there is, and wait until that was tried, at most so long."""
        with self._turn:
            turn = self._turns_begun
            if self._items:  # of which a turn that has begun may have taken none
                turn += 1
                self._hurry.set()
                self._some.set()
            if not self._stopped:
                self._turn.wait_for(lambda: self._turns_ended >= turn, max(0.0, wait_s))

    def stop(self, wait_s: float) -> None:
        """Deliver what there is and end; sessions that end do the rest."""
        self._stopped = True
        self._hurry.set()
        self._some.set()
        if self._thread is not None:
            self._thread.join(wait_s)

    def _add(self, session: LiveSession, method: str, number: int) -> None:
        self._items.append((session, method, number))
        if self._thread is None:
            self._start()
        if not self._some.is_set():
            self._some.set()
        if len(self._items) > PENDING_MAX:
            self._hurry.set()

    def _start(self) -> None:
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="kvstore-give-back", daemon=True
                )
                self._thread.start()

    def _run(self) -> None:
        while True:
            self._some.wait()
            if not self._stopped:
                self._hurry.wait(self.gather_s)
            self._hurry.clear()
            self._some.clear()
            with self._turn:
                self._turns_begun += 1
            delivered = self._deliver()
            with self._turn:
                self._turns_ended += 1
                self._turn.notify_all()
            if self._stopped:
                return
            if not delivered:
                self._hurry.wait(RETRY_S)
                self._some.set()

    def _deliver(self) -> bool:
        """One call a session and kind; False when something has to be tried again."""
        groups: dict[tuple[LiveSession, str], list[int]] = defaultdict(list)
        for _ in range(len(self._items)):
            session, method, number = self._items.popleft()
            if not session.over.is_set():
                groups[session, method].append(number)
        done = True
        for (session, method), numbers in groups.items():
            if self._send(session, method, numbers):
                self.released += len(numbers) if method != "Abort" else 0
            elif not session.over.is_set():
                self._items.extend((session, method, number) for number in numbers)
                done = False
        return done
