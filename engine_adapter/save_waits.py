"""How long a save waits for others: those that write its pages, and those that fill the staging.

Pages that others write are nearly always stored within a second, and an engine in a long step takes
two steps. So they are asked for again, more rarely the longer it takes, and after a while without
pins: the blocks may be there still when it turns out that nobody wrote them. Pure: time comes with
each call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.engine_adapter.plan_records import NOT_YET, SavePhase

if TYPE_CHECKING:
    from kvstore.engine_adapter.plan_records import Save

RETRY_S = 0.05
OTHERS_S_MAX, OTHERS_PINNED_S, OTHERS_RETRY_S_MAX = 30.0, 2.0, 1.0
ATTEMPTS_MAX = 20  # while the staging is full of others' pages
STAGING_S = 1.0  # to ask again at the latest; the end of any save that fills staging comes before


def waits_for_others(save: Save, now: float) -> bool:
    """Hold a save whose next page somebody else is writing; False when it has waited enough."""
    if save.others_since_s == NOT_YET:
        save.others_since_s, save.pause_s = now, RETRY_S
    if now - save.others_since_s > OTHERS_S_MAX:
        return False
    save.phase, save.for_staging = SavePhase.HELD, False
    save.retry_s = now + save.pause_s
    save.pause_s = min(2 * save.pause_s, OTHERS_RETRY_S_MAX)
    return True


def needs_pins(save: Save, now: float) -> bool:
    """Whether a save that waits for others still has the better claim to its pins."""
    return now - save.others_since_s <= OTHERS_PINNED_S


def waits_for_staging(save: Save, now: float, *, is_filled: bool) -> bool:
    """Hold a save for which there is no staging; `is_filled`: by saves of this engine."""
    if not is_filled:
        save.attempts += 1
    if save.attempts > ATTEMPTS_MAX:
        return False
    save.phase, save.for_staging = SavePhase.HELD, True
    save.retry_s = now + (STAGING_S if is_filled else RETRY_S)
    return True
