"""How a client asks a server for the longest stored chain of a prompt, whatever its length.

A prompt longer than one message goes on from a match of what comes before. An answer that leases
cut short is asked for once more, if some of them were on their way back. Must not be here: what a
match is to its user, calls about other things.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstore import kvstore_pb2 as pb
from kvstore.client_channel import with_tokens
from kvstore.lease import LEASE_LIMIT, TENANT_LEASE_LIMIT
from kvstore.prefix_index.page_key import TOKEN_BYTES
from kvstore.wire import CONTROL_BYTES_MAX

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore.client_link import ServerLink
    from kvstore.live_session import LiveSession

# Of tokens and extras in one call.
PROMPT_BYTES_MAX = CONTROL_BYTES_MAX - (64 << 10)
EXTRA_BYTES = 16  # what a page's extras take besides their content
PIN_DEADLINE_S = 1.0  # of a call about a prompt, and of the look-up of a long one


@dataclass(frozen=True, slots=True)
class PromptPart:
    """What one call says of a prompt; the first page that it does not is `stop`."""

    after: int  # the match that it goes on from, 0 for none
    tokens: bytes | memoryview
    extras: dict[int, bytes]  # by page of the whole prompt
    stop: int
    is_cut: bool  # there is more of the prompt


class PromptLookups:
    """Of one session. Thread-safe."""

    def __init__(self, link: ServerLink, page_tokens: int) -> None:
        self._link = link
        self._page_bytes = TOKEN_BYTES * page_tokens

    def longest(
        self,
        live: LiveSession,
        tokens: bytes | memoryview,
        extras: dict[int, bytes],
        wait_s: float,
    ) -> pb.MatchReply | None:
        """The longest chain of a prompt; in several calls when it is longer than a message.

        Without a match there may be a reason; None: no answer came.
        """
        deadline = time.monotonic() + wait_s
        found: pb.MatchReply | None = None
        while True:
            part = self._part(tokens, extras, found)
            left_s = deadline - time.monotonic() if found else wait_s
            if left_s <= 0:
                return found
            reply = self._uncut(live, part, left_s)
            if reply is None:
                return found
            if not reply.match:
                if found is None:
                    return reply
                found.reason = reply.reason
                return found
            if found is not None:
                self._link.give_back.release(live, found.match)
            found = reply
            if not part.is_cut or found.pages < part.stop:
                return found

    @contextmanager
    def end_of(
        self, live: LiveSession, tokens: bytes | memoryview, extras: dict[int, bytes]
    ) -> Iterator[PromptPart]:
        """A prompt for one call; what is stored of a longer one is named by a match, leased so
        long."""
        part = self._part(tokens, extras, None)
        found = self.longest(live, tokens, extras, PIN_DEADLINE_S) if part.is_cut else None
        if found is not None and not found.match:
            found = None
        try:
            yield part if found is None else self._part(tokens, extras, found)
        finally:
            if found is not None:
                self._link.give_back.release(live, found.match)

    def _uncut(self, live: LiveSession, part: PromptPart, wait_s: float) -> pb.MatchReply | None:
        """The answer to one call. To a second one where leases cut the first short that this
        client has ended, and that the server did not know to be over.
        """
        give_back, asked_s = self._link.give_back, time.monotonic()
        released = give_back.released
        first = self._match(live, part, wait_s)
        if first is None or first.reason not in (LEASE_LIMIT, TENANT_LEASE_LIMIT):
            return first
        # The second gets as much time as the first took, at least: one that can't be answered in
        # time would be held against the server.
        took_s = time.monotonic() - asked_s
        give_back.settle(wait_s - 2 * took_s)
        left_s = asked_s + wait_s - time.monotonic()
        if give_back.released == released or left_s < took_s:
            return first
        second = self._match(live, part, left_s)  # while the first keeps its pages from leaving
        if second is None or second.pages < first.pages:
            first, second = second, first
        if first is not None and first.match:
            give_back.release(live, first.match)
        return second

    def _match(self, live: LiveSession, part: PromptPart, wait_s: float) -> pb.MatchReply | None:
        head = pb.MatchRequest(session=live.id, extras=extras_message(part.extras))
        head.after_match, head.call = part.after, live.next_call()
        request = with_tokens(head, part.tokens)
        reply: pb.MatchReply | None = self._link.ask(live, "Match", request, wait_s, head.call)
        return reply

    def _part(
        self, tokens: bytes | memoryview, extras: dict[int, bytes], found: pb.MatchReply | None
    ) -> PromptPart:
        """As much of a prompt after what was found as one call may carry, cut in whole pages."""
        if found is None:
            size = len(tokens) + sum(EXTRA_BYTES + len(each) for each in extras.values())
            if size <= PROMPT_BYTES_MAX:
                return PromptPart(0, tokens, extras, 0, is_cut=False)
        page_bytes = self._page_bytes
        start = stop = found.pages if found is not None else 0
        room, whole = PROMPT_BYTES_MAX, len(tokens) // page_bytes
        while stop < whole:
            room -= page_bytes + (len(extras[stop]) + EXTRA_BYTES if stop in extras else 0)
            if room < 0:
                break
            stop += 1
        return PromptPart(
            after=found.match if found is not None else 0,
            tokens=tokens[start * page_bytes : stop * page_bytes],
            extras={page: each for page, each in extras.items() if start <= page < stop},
            stop=stop,
            is_cut=start < stop < whole,
        )


def extras_message(extras: dict[int, bytes]) -> pb.Extras | None:
    """Extras of a call; None where there are none."""
    return pb.Extras(page_index=list(extras), content=list(extras.values())) if extras else None
