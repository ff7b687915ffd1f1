"""The documents behind the dashboard: what each view shows, to whom, and how often it is made anew.

Changes nothing. Whatever walks over the store is made at most once in a while for all who look,
less often where it takes long. Every answer is bounded, however large the store is.
"""

from __future__ import annotations

import threading
import time
from dataclasses import asdict, astuple
from typing import TYPE_CHECKING, Any

from kvstore import cli_prompt
from kvstore._version import __version__
from kvstore.dashboard_history import COLUMNS, EVERY_S, History, Reading
from kvstore.errors import InvalidRequest
from kvstore.ghost_list import Left
from kvstore.identity import Role
from kvstore.state import TIER_NAMES
from kvstore.tiers.arena_use import NOTHING

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kvstore.identity import Identity
    from kvstore.meters import Traffic
    from kvstore.store import Store

CHAINS_SHOWN = 10
TENANTS_SHOWN = 50
STATE_EVERY_S = 2.0
WALK_EVERY_S = 15.0
WALK_SHARE = 0.02  # of the time, at most, for what walks over the store
TOKENS_MAX = 1 << 18  # of a prompt to explain
NO_TOKENIZER = "text needs a server with --dashboard-tokenizer; give ids"
TROUBLES = (
    *("corrupt_pages", "stale_pages", "key_missing", "disk_read_errors", "disk_write_failures"),
    *("redis_bad_pages", "redis_errors", "stage_timeouts", "reservations_refused", "lookups_cut"),
    "pins_broken",
)


class Kept:
    """A document that is made at most once in so often; who comes meanwhile gets the last one."""

    def __init__(
        self,
        make: Callable[[], dict[str, Any]],
        every_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._make = make
        self._clock = clock
        self._every_s = every_s
        self._lock = threading.Lock()
        self._made: dict[str, Any] | None = None
        self._good_until_s = 0.0

    def now(self) -> dict[str, Any]:
        """The document; others wait while it is made."""
        with self._lock:
            began_s = self._clock()
            if self._made is None or began_s >= self._good_until_s:
                self._made = self._make()
                done_s = self._clock()
                self._good_until_s = done_s + max(self._every_s, (done_s - began_s) / WALK_SHARE)
            return self._made


class DashboardData:
    """What is shown of one store and of its server."""

    def __init__(
        self,
        store: Store,
        service_stats: Callable[[], dict[str, Any]],
        tokenizer: Path | None = None,
    ) -> None:
        """service_stats: who is connected. tokenizer: for prompts as text; ConfigError if bad."""
        self._store = store
        self._service_stats = service_stats
        self._text = cli_prompt.text_decoder(tokenizer)
        self._encode = cli_prompt.text_encoder(tokenizer)
        self._started_s = time.time()
        self.history = History()
        self._state = Kept(self._whole_state, STATE_EVERY_S)
        self._chains = Kept(self._make_chains, WALK_EVERY_S)
        self._tree = Kept(self._make_tree, WALK_EVERY_S)

    def sample(self) -> None:
        """Note a reading; every EVERY_S."""
        self.history.add(self._reading())

    def state(self, identity: Identity) -> dict[str, Any]:
        """What there is now: all of it for an admin, else the caller's own part."""
        if identity.role is Role.ADMIN:
            return self._state.now() | {"role": identity.role}
        reading = self._reading(identity.tenant)
        return self._head() | {
            "role": identity.role,
            "reading": astuple(reading),
            "tenants": [self._tenant(identity.tenant)],
            "tenants_in_all": 1,
        }

    def rows(self, after_s: float) -> dict[str, Any]:
        """Readings since a time."""
        return {"columns": COLUMNS, "every_s": EVERY_S, "rows": self.history.rows(after_s)}

    def chains(self) -> dict[str, Any]:
        """The chains that nobody asked for longest."""
        return self._chains.now()

    def tree(self) -> dict[str, Any]:
        """The map of all trees, and the chains that hit most; see tree_map.py."""
        return self._tree.now()

    def explain(self, asked: dict[str, Any], identity: Identity) -> dict[str, Any]:
        """Why a prompt hits or misses. asked: tokens or text, and where; InvalidRequest."""
        tokens = self._tokens(_text_of(asked, "tokens"), _text_of(asked, "text"))
        tenant = _text_of(asked, "tenant") or identity.tenant
        digits = _text_of(asked, "namespace") or None
        namespace = cli_prompt.choose_namespace(self._store, digits, tenant, known_only=False)
        found = self._store.explain(
            tokens, namespace=namespace, tenant=tenant, all_tenants=identity.role is Role.ADMIN
        )
        words = None
        if self._text is not None and found.differs_at is not None:
            given = [each for each in (found.prompt_token, found.stored_token) if each is not None]
            words = [self._text([token]) for token in given]
        return found.to_dict() | {"tenant": tenant, "namespace": namespace.hex(), "words": words}

    def _tokens(self, tokens: str, text: str) -> list[int]:
        if tokens and text:
            raise InvalidRequest("give token ids or text, not both")
        if text:
            if self._encode is None:
                raise InvalidRequest(NO_TOKENIZER)
            found = self._encode(text)
        else:
            found = self._numbers(tokens)
        if not 0 < len(found) <= TOKENS_MAX:
            raise InvalidRequest(f"{len(found)} tokens given; 1 to {TOKENS_MAX} are wanted")
        return found

    def _numbers(self, tokens: str) -> list[int]:
        try:
            return cli_prompt.numbers(tokens, "token ids")
        except InvalidRequest as exc:
            if self._encode is not None:
                raise
            raise InvalidRequest(f"{exc}; {NO_TOKENIZER}") from exc

    def _head(self) -> dict[str, Any]:
        return {
            "version": __version__,
            "now_s": time.time(),
            "started_s": self._started_s,
            "warm": self._store.warm,
            "columns": COLUMNS,
            "has_tokenizer": self._text is not None,
        }

    def _whole_state(self) -> dict[str, Any]:
        store, state = self._store, self._store.state
        with state.lock:
            state.require_open()
            counters = state.counters.to_dict() | state.ghosts.counts()
            there = {
                "pages": len(state.index),
                "runs": state.index.nodes,
                "trees": len(state.trees),
                "leases": state.index.leases,
                "pinned": len(state.index.pins),
            }
        shown, in_all = self._tenants()
        return self._head() | {
            "reading": astuple(self._reading()),
            "there": there,
            "tiers": self._tiers(),
            "breakers": store.breakers(),
            "service": self._service_stats(),
            "reasons": [
                {
                    "reason": why.name.lower(),
                    "words": why.words,
                    "left": counters[f"left_{why.name.lower()}"],
                    "missed": counters[f"missed_{why.name.lower()}"],
                }
                for why in Left
            ],
            "troubles": {name: counters[name] for name in TROUBLES if counters[name]},
            "tenants": shown,
            "tenants_in_all": in_all,
        }

    def _tiers(self) -> list[dict[str, Any]]:
        state, rows = self._store.state, []
        problems = {
            "disk": state.disk.problem if state.disk is not None else "",
            "redis": state.redis.state if state.redis is not None else "",
        }
        for name, medium in zip(TIER_NAMES, (state.host, state.disk, state.redis), strict=True):
            if medium is not None:
                usage = asdict(medium.usage())
                rows.append(usage | {"name": name, "state": problems.get(name) or "ok"})
        return rows

    def _reading(self, tenant: str | None = None) -> Reading:
        """Now: of the whole store, or what one tenant did."""
        state = self._store.state
        with state.lock:
            state.require_open()
            traffic = [row for _, _, row in state.meters.traffic(tenant)]
            gone = {
                "left_pages": int(state.ghosts.left.sum()),
                "missed_pages": int(state.ghosts.missed.sum()),
            }
            pages = len(state.index)
        done = _sum_of(traffic)
        if tenant is not None:
            return Reading(time_s=time.time(), **done)
        used = {f"{tier['name']}_bytes": tier["used_bytes"] for tier in self._tiers()}
        return Reading(time_s=time.time(), **done, **gone, pages=pages, **used)

    def _tenants(self) -> tuple[list[dict[str, Any]], int]:
        """Those that have most, and how many there are. Looked at one by one, in short holds."""
        state = self._store.state
        with state.lock:
            state.require_open()
            names = {*state.tenancy.quotas, *(info.tenant for info in state.trees.values())}
            host = state.host.tenant_use() if state.host is not None else {}
            size = {
                name: host.get(name, NOTHING).used_bytes + state.disk_use.get(name, 0)
                for name in names
            }
        largest = sorted(names, key=lambda name: (-size[name], name))[:TENANTS_SHOWN]
        found = []
        for name in largest:
            found.append(self._tenant(name))
            state.breathe()
        return found, len(names)

    def _tenant(self, name: str) -> dict[str, Any]:
        state = self._store.state
        with state.lock:
            traffic = [row for _, _, row in state.meters.traffic(name)]
        done = _sum_of(traffic)
        return self._store.tenant_usage(name).to_dict() | {
            "requests": done["requests"],
            "tokens": done["tokens"],
            "hit_tokens": sum(done[f"{tier}_hit_tokens"] for tier in TIER_NAMES),
        }

    def _make_chains(self) -> dict[str, Any]:
        cold, in_all = self._store.chains(limit=CHAINS_SHOWN, sort="idle")
        return {"cold": [each.to_dict() for each in cold], "in_all": in_all}

    def _make_tree(self) -> dict[str, Any]:
        found = self._store.tree_map()
        boxes = [each.to_dict() for each in found.boxes]
        if self._text is not None:
            for box in boxes:
                box["text"] = self._text(list(box["tokens_head"])) if box["tokens_head"] else ""
        return {
            "boxes": boxes,
            "total_bytes": found.total_bytes,
            "total_pages": found.total_pages,
            "runs": found.runs,
            "hot": [each.to_dict() for each in found.hottest],
        }


def _sum_of(traffic: list[Traffic]) -> dict[str, Any]:
    """What these rows say together, by fields of Reading."""
    return {
        "requests": sum(row.requests for row in traffic),
        "hits": sum(row.hits for row in traffic),
        "tokens": sum(row.tokens for row in traffic),
        "stored_pages": sum(row.stored_pages for row in traffic),
        "saved_s": sum(row.prefill_saved_s for row in traffic),
    } | {
        f"{name}_hit_tokens": sum(row.hit_tokens[tier] for row in traffic)
        for tier, name in enumerate(TIER_NAMES)
    }


def _text_of(asked: dict[str, Any], name: str) -> str:
    value = asked.get(name, "")
    if not isinstance(value, str):
        raise InvalidRequest(f"{name}: text is wanted")
    return value
