"""An engine without a model: speaks as demo_vllm_worker.py does, and keeps pages in a real store.

    python modelless_engine.py -m kvstore.engine_adapter.demo_vllm_worker '{"engine": {...}}'

Its pages hold nothing; its answers are a function of the prompt. Its own prefix cache holds whole
blocks, as vLLM's does. What waits between an answer and its save is none: a save is done by then.
"""

from __future__ import annotations

import json
import sys
import time
import zlib
from typing import TYPE_CHECKING, Any

from kvstore import CacheSpec
from kvstore.connect import connect

if TYPE_CHECKING:
    from kvstore.interface import SessionLike

BLOCK = 128
PAGE_BYTES = 4096
OPEN_S_MAX = 60.0


class Engine:
    """What it was told about caching, and its own cache."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._caches = settings.get("enable_prefix_caching", True)
        self._blocks: set[tuple[int, ...]] = set()
        self._session: SessionLike | None = None
        self._is_on = True
        extra = settings.get("kv_transfer_config", {}).get("kv_connector_extra_config")
        if extra is not None:
            sizes = {name: extra[name] for name in ("host_bytes", "disk_bytes") if name in extra}
            store = connect(extra["store"], open_wait_s=OPEN_S_MAX, lookup_deadline_s=5.0, **sizes)
            spec = CacheSpec.opaque("modelless", page_tokens=BLOCK, page_bytes=PAGE_BYTES)
            self._session = store.session(spec)

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """One request, as VllmEngine.run() gives it back."""
        begun_s = time.perf_counter()
        tokens, wishes = request["tokens"], request.get("params", {}).get("kvstore", {})
        useful = (len(tokens) - 1) // BLOCK * BLOCK  # the last token is always computed
        own = self._own(tokens[:useful])
        stored, disk = self._load(tokens[:useful]) if wishes.get("load", True) else (0, 0)
        if wishes.get("store", True):
            self._save(tokens)
        if self._caches:
            ends = range(BLOCK, len(tokens) + 1, BLOCK)
            self._blocks |= {tuple(tokens[:end]) for end in ends}
        first = zlib.crc32(repr(tokens).encode())
        count = request.get("max_tokens", 1)
        return {
            "ttft_s": time.perf_counter() - begun_s,
            "cached_tokens": max(own, stored),
            "tokens": [first % 50_000 + place for place in range(count)],
            "margins": [1.0] * count,
            "params": {"kvstore": {"reused_tokens": stored, "reused_disk_tokens": disk}},
        }

    def reset(self) -> None:
        self._blocks.clear()

    def _own(self, tokens: list[int]) -> int:
        found = 0
        while found < len(tokens) and tuple(tokens[: found + BLOCK]) in self._blocks:
            found += BLOCK
        return found

    def _load(self, tokens: list[int]) -> tuple[int, int]:
        if self._session is None or not self._is_on:
            return 0, 0
        with self._session.match(tokens) as hit:
            from_disk = sum(tier == "disk" for tier in hit.tiers)
            return BLOCK * hit.stage(10.0), BLOCK * from_disk

    def switch_connector(self, on: bool) -> None:
        self._is_on = on

    def _save(self, tokens: list[int]) -> None:
        if self._session is None or not self._is_on:
            return
        with self._session.reserve(tokens, deadline_s=5.0) as run:
            if run.count:
                run.commit()


def main() -> None:
    engine = Engine(json.loads(sys.argv[-1])["engine"])

    def say(event: str, **more: Any) -> None:
        sys.stdout.write(json.dumps({"event": event} | more) + "\n")
        sys.stdout.flush()

    say("ready")
    for line in sys.stdin:
        asked = json.loads(line)
        if asked["do"] == "run":
            say("run", answers=[engine.answer(each) for each in asked["requests"]], cpu_s=0.0)
        elif asked["do"] == "call":
            getattr(engine, asked["name"])(**asked["arguments"])
            say("call")
        else:
            engine.reset()
            say("reset", done=True)


if __name__ == "__main__":
    main()
