"""What a caller may know of a prompt, as one record, from any API down to the policy.

    Hints(priority=1, pin_ttl_s=600.0, conversation="chat-17").give(session, tokens)

A hint never makes another tenant's pages leave. Must not be here: what a policy makes of one
(tiers/eviction_hints.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstore.errors import InvalidRequest
from kvstore.request import checked_deadline
from kvstore.tiers.eviction_hints import PRIORITY_MAX, PRIORITY_MIN

if TYPE_CHECKING:
    from kvstore.interface import SessionLike
    from kvstore.request import Extras, Tokens
    from kvstore.session import Session

CONVERSATION_CHARS_MAX = 128


@dataclass(frozen=True, slots=True)
class Hints:
    """next_use_s: asked for again in so many seconds. priority: -2..2, they leave before or after
    others. done: won't come back. conversation: its name, so that its end can be told. pin_ttl_s:
    stays so long. Raises InvalidRequest for what makes no sense.
    """

    next_use_s: float | None = None
    priority: int | None = None
    done: bool = False
    conversation: str = ""
    pin_ttl_s: float = 0.0

    def __post_init__(self) -> None:
        if self.next_use_s is not None:
            checked_deadline(self.next_use_s)
        least, most, given = PRIORITY_MIN, PRIORITY_MAX, self.priority
        if given is not None and (type(given) is not int or not least <= given <= most):
            raise InvalidRequest(f"priority: {given!r} given; a whole number in {least}..{most}")
        if type(self.done) is not bool:
            raise InvalidRequest(f"done: {self.done!r} given; true or false")
        checked_conversation(self.conversation)
        checked_deadline(self.pin_ttl_s)

    @property
    def for_policy(self) -> bool:
        """Whether there is more than a pin."""
        known = self.next_use_s is not None or self.priority is not None
        return known or self.done or bool(self.conversation)

    def give(self, session: SessionLike, tokens: Tokens, extras: Extras | None = None) -> int:
        """Tell a session of a prompt all that is known of it; how many pages it has stored."""
        pages = 0
        if self.pin_ttl_s:
            pages = session.pin(tokens, self.pin_ttl_s, extras)
        if self.for_policy:
            pages = session.hint(
                tokens,
                extras,
                next_use_s=self.next_use_s,
                priority=self.priority,
                done=self.done,
                conversation=self.conversation,
            )
        return pages


def checked_conversation(name: object, *, needed: bool = False) -> str:
    """The name of a conversation, as given by a caller."""
    most = CONVERSATION_CHARS_MAX
    if not isinstance(name, str) or len(name) > most or (needed and not name):
        raise InvalidRequest(f"conversation: {name!r:.80} given; a text of 1 to {most} characters")
    return name


def hint_stored(session: Session, tokens: bytes, extras: dict[int, bytes], hints: Hints) -> int:
    """Session.hint once its arguments are checked; the store's lock is held."""
    state = session.state
    pages = session.stored(tokens, extras)
    if hints.conversation:
        state.conversations.note(state.index, session.root, hints.conversation, pages)
    state.policy.hint(pages, next_use_s=hints.next_use_s, priority=hints.priority, done=hints.done)
    return len(pages)


def end_conversation(session: Session, name: str) -> int:
    """Session.end_conversation; the store's lock is held."""
    state = session.state
    pages = state.conversations.end(state.index, session.root, name)
    for page in pages.tolist():
        state.index.unpin(page)
    state.policy.hint(pages, done=True)
    return len(pages)
