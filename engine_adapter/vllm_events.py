"""KV events for a router: which of vLLM's blocks lie in the store since now.

Pages are told as the blocks they are made of, under vLLM's own hashes, so that whoever listens can
join them with the engine's events; `medium` is STORAGE. Only if vLLM's events are on. Must not be
here: vLLM's types, which vllm_probe.py has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvstore.engine_adapter.vllm_probe import stored_event

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvstore.engine_adapter.load_planner import Sizes
    from kvstore.engine_adapter.plan_records import Save


class PageEvents:
    """Published saves in, events out; used by the engine's thread."""

    def __init__(self, vllm_config: Any, sizes: Sizes) -> None:
        events = getattr(vllm_config, "kv_events_config", None)
        self.enabled = bool(getattr(events, "enable_kv_cache_events", False))
        self._sizes = sizes
        self._gone: dict[str, Any] = {}  # requests that ended with saves under way
        self._events: list[Any] = []

    def leave(self, request: Any) -> None:
        """A request ends; what it saves may be published later."""
        if self.enabled:
            self._gone[request.request_id] = request

    def note(self, published: list[tuple[Save, int]], requests: Mapping[str, Any]) -> None:
        """Make events of saves that were published; `requests` are those that did not end."""
        for save, pages in published if self.enabled else ():
            request = requests.get(save.request) or self._gone.get(save.request)
            if request is not None:
                self._note(request, save.start, save.start + pages)

    def forget_gone(self) -> None:
        """No save is under way."""
        self._gone.clear()

    def take(self) -> list[Any]:
        """Events since the last call."""
        events, self._events = self._events, []
        return events

    def _note(self, request: Any, start: int, stop: int) -> None:
        size = self._sizes.block_tokens
        first, end = start * self._sizes.blocks_a_page, stop * self._sizes.blocks_a_page
        hashes = list(request.block_hashes[:end])
        if len(hashes) < end:
            return  # it hashes blocks of another size, or lost some
        tokens = list(request.all_token_ids[first * size : end * size])
        parent = hashes[first - 1] if first else None
        self._events.append(stored_event(request, hashes[first:], parent, tokens, size))
