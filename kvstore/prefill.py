"""How long engines compute prompts, as they measure it: what their pages are worth for `compute`.

An engine's session adds up what it reports between heartbeats; the store makes of it the seconds of
one token at the beginning of a prompt, by which pages that this session commits are weighed. So
sums travel, and only the store has to know how work grows with position. What a session reports
touches its own tenant's pages alone, as tenants' pages are not compared. Pure: no clocks, no locks.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite, log2

from kvstore.errors import InvalidRequest

WORK_TOKENS_MIN = 1024.0  # before that, a rate says little
WORK_TOKENS_MAX = float(1 << 17)  # then what was measured so far counts half
TOKEN_S_MIN, TOKEN_S_MAX = 1e-8, 100.0
STEPS_PER_OCTAVE = 4  # rates that are nearly alike are one to policies


@dataclass(frozen=True, slots=True)
class Prefill:
    """Prompts that were computed, added up."""

    tokens: float = 0.0
    positions: float = 0.0  # of each of these tokens in its prompt, all together
    seconds: float = 0.0

    @staticmethod
    def of(tokens: int, before: int, seconds: float) -> Prefill:
        """Of a prompt `tokens` were computed that follow `before` others. Raises InvalidRequest."""
        counts = (tokens, before)
        if any(type(each) is not int for each in counts) or tokens < 1 or before < 0:
            raise InvalidRequest(f"{tokens!r} tokens after {before!r} given; whole numbers needed")
        if not isinstance(seconds, int | float) or not 0 < seconds < float("inf"):
            raise InvalidRequest(f"{seconds!r} seconds given; a finite number > 0 is needed")
        return Prefill(float(tokens), tokens * (before + tokens / 2), float(seconds))

    @property
    def is_sound(self) -> bool:
        """Whether all three can be true; what comes over the wire may not be."""
        finite = isfinite(self.tokens + self.positions + self.seconds)
        return finite and self.tokens > 0 and self.positions >= 0 and self.seconds > 0

    def __add__(self, other: Prefill) -> Prefill:
        return Prefill(
            self.tokens + other.tokens,
            self.positions + other.positions,
            self.seconds + other.seconds,
        )


class PrefillRate:
    """The seconds of a token of one engine, from sums, the newer ones first."""

    def __init__(self, even_tokens: float) -> None:
        """even_tokens: where attention costs as much as the rest, see tiers/page_cost.py."""
        self._even = even_tokens
        self._work = 0.0  # in tokens at the beginning of a prompt
        self._seconds = 0.0

    def add(self, more: Prefill) -> None:
        """Take in what was measured; nonsense is left out."""
        if not more.is_sound:
            return
        self._work += more.tokens + more.positions / self._even
        self._seconds += more.seconds
        if self._work > WORK_TOKENS_MAX:
            keep = WORK_TOKENS_MAX / 2 / self._work
            self._work, self._seconds = self._work * keep, self._seconds * keep

    @property
    def token_s(self) -> float:
        """Of a token at the beginning of a prompt; 0 while too little was measured."""
        if self._work < WORK_TOKENS_MIN:
            return 0.0
        exact = min(max(self._seconds / self._work, TOKEN_S_MIN), TOKEN_S_MAX)
        return float(2.0 ** (round(log2(exact) * STEPS_PER_OCTAVE) / STEPS_PER_OCTAVE))
