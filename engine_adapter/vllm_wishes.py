"""What a client may ask of the store with one request of vLLM: kv_transfer_params["kvstore"].

A wish that makes no sense is a line in the log, and as if it were not there: no request fails for
one. Must not be here: vLLM's types.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvstore.engine_adapter.plan_records import NO_HINTS, Policy
from kvstore.errors import InvalidRequest
from kvstore.hints import Hints

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvstore.engine_adapter.vllm_settings import VllmSettings

OPTIONS = frozenset(
    ("load", "store", "pin_ttl_s", "session", "session_end", "priority", "next_use_s", "done")
)
NO_LOADS = "nothing is loaded here: kv_role, or the setting load"
_WHERE = "kv_transfer_params.kvstore"


def policy_of(
    wishes: Mapping[str, Any],
    settings: VllmSettings,
    warn: Callable[[str], None],
    *,
    may_load: bool,
    may_store: bool,
) -> Policy:
    """What one request may do, and what the store is told of its chain."""
    unknown = sorted(set(map(str, wishes)) - OPTIONS)
    if unknown:
        warn(f"unknown {_WHERE}: " + ", ".join(unknown)[:200])
    session, ends = str(wishes.get("session") or ""), wishes.get("session_end") is True
    hints = _hints(wishes, session, ends, warn)
    return Policy(
        load=may_load and wishes.get("load") is not False,
        store=may_store and wishes.get("store") is not False,
        pin_ttl_s=_pin_ttl_s(wishes, settings, session, ends, warn),
        session=hints.conversation or (session if ends else ""),
        ends_session=ends,
        hints=hints,
        note="not wanted" if wishes.get("load") is False else "" if may_load else NO_LOADS,
    )


def _pin_ttl_s(
    wishes: Mapping[str, Any],
    settings: VllmSettings,
    session: str,
    ends: bool,
    warn: Callable[[str], None],
) -> float:
    if ends:
        return 0.0
    ttl = wishes.get("pin_ttl_s", settings.session_pin_s if session else 0)
    if isinstance(ttl, bool) or not isinstance(ttl, int | float) or not ttl >= 0:
        warn(f"{_WHERE}: pin_ttl_s must be seconds >= 0")
        return 0.0
    return min(float(ttl), settings.pin_ttl_s_max)


def _hints(
    wishes: Mapping[str, Any], session: str, ends: bool, warn: Callable[[str], None]
) -> Hints:
    """For the policy. The last turn of a session won't come back, and is nobody's turn any more."""
    try:
        return Hints(
            next_use_s=wishes.get("next_use_s"),
            priority=wishes.get("priority"),
            done=wishes.get("done", False) or ends,
            conversation="" if ends else session,
        )
    except InvalidRequest as error:
        warn(f"{_WHERE}: {error}")
        return NO_HINTS
