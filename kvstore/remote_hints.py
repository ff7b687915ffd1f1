"""The half of RemoteSession that tells a server what to keep: pins, hints, ends of conversations.

A prompt longer than one message is named by a match of what is stored of it; see PromptPart. Like
all calls of an engine, one that nobody answers is a 0, and no exception.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvstore import kvstore_pb2 as pb
from kvstore.hints import Hints, checked_conversation
from kvstore.prompt_lookups import PIN_DEADLINE_S, extras_message
from kvstore.request import checked_deadline, checked_extras, checked_tokens

if TYPE_CHECKING:
    from collections.abc import Callable

    from google.protobuf.message import Message

    from kvstore.live_session import LiveSession
    from kvstore.prompt_lookups import PromptLookups
    from kvstore.request import Extras, Tokens


class RemoteHints:
    """RemoteSession inherits it, and has what it uses."""

    lookups: PromptLookups

    def usable(self) -> LiveSession | None:
        """See RemoteSession."""
        raise NotImplementedError

    def ask(self, live: LiveSession, name: str, request: Message | bytes, timeout_s: float) -> Any:
        """See RemoteSession."""
        raise NotImplementedError

    def pin(self, tokens: Tokens, ttl_s: float, extras: Extras | None = None) -> int:
        """Keep the stored chain of this prompt for `ttl_s` seconds; how many pages it has."""
        values, more = checked_tokens(tokens), checked_extras(extras)
        ttl_s = checked_deadline(ttl_s)
        return self._tell("Pin", pb.PinRequest, values, more, ttl_s=ttl_s)

    def unpin(self, tokens: Tokens, extras: Extras | None = None) -> int:
        """Take back every pin on the stored chain of this prompt; how many pages it has."""
        values, more = checked_tokens(tokens), checked_extras(extras)
        return self._tell("Unpin", pb.UnpinRequest, values, more)

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
        """Tell what is known of the stored chain of this prompt; how many pages it has. See
        Session.hint."""
        Hints(next_use_s, priority, done, conversation)
        values, more = checked_tokens(tokens), checked_extras(extras)
        return self._tell(
            "Hint",
            pb.HintRequest,
            values,
            more,
            next_use_s=next_use_s,
            priority=priority,
            done=done,
            conversation=conversation,
        )

    def end_conversation(self, name: str) -> int:
        """It won't go on: the pages that are only its own leave first; how many they are."""
        checked_conversation(name, needed=True)
        live = self.usable()
        if live is None:
            return 0
        request = pb.HintRequest(session=live.id, conversation=name, ends_conversation=True)
        reply = self.ask(live, "Hint", request, PIN_DEADLINE_S)
        return 0 if reply is None else reply.pages

    def _tell(
        self,
        name: str,
        request: Callable[..., Message],
        tokens: bytes | memoryview,
        extras: dict[int, bytes],
        **fields: Any,
    ) -> int:
        """One call about the stored chain of a prompt; how many pages it has."""
        live = self.usable()
        if live is None:
            return 0
        with self.lookups.end_of(live, tokens, extras) as part:
            message = request(
                session=live.id,
                tokens=bytes(part.tokens),
                extras=extras_message(part.extras),
                after_match=part.after,
                **fields,
            )
            reply = self.ask(live, name, message, PIN_DEADLINE_S)
        return 0 if reply is None else reply.pages
