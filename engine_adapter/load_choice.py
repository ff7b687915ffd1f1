"""Load or recompute: measured speeds of prefill, of copies and of the disk decide.

Pure: it is told what was measured and answers with arithmetic. Until something was measured it
assumes what favours loading, because a load measures itself. Must not be here: clocks, requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

COPY_S_SYNC_MAX = 0.030
WEIGHT_NEW = 0.3  # of a new measurement in the running mean
PREFILL_TOKENS_MIN = 64  # smaller steps say little about prefill
COPY_BYTES_MIN = 1 << 20
COPY_BYTES_A_SECOND = 1.5e9  # before the first copy
STAGE_BYTES_A_SECOND = 0.5e9
ASYNC_OVERHEAD_S = 0.008  # two steps of an engine
# A look-up takes 2 ms; where 14 processes wanted 2 cores, 0.8 % took more than 20 ms, none 100 ms.
LOOKUP_S_MIN, LOOKUP_S_MAX = 0.020, 0.100
LOOKUP_S_ALWAYS = 1.0  # who wants to load whatever it takes waits longer
LOOKUP_SHARE = 0.05  # of what recomputing takes: more than this is not worth waiting for
STAGE_S_DEFAULT = 2.0  # while prefill was not measured
STAGE_S_MIN, STAGE_S_MAX = 0.02, 10.0
LOAD_S_MIN, LOAD_S_MAX = 0.5, 30.0
# Loading what is predicted to take longer than this share of recomputing is not worth the traffic.
WORTH_SHARE = 1.0


class LoadMode(StrEnum):
    """Who decides."""

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class Choice:
    """How many leading pages to load, whether the step may wait for them, and why."""

    pages: int
    sync: bool
    reason: str


class LoadChoice:
    """For one engine. Floats only: background threads may read while the engine's thread tells."""

    def __init__(self, mode: LoadMode, page_bytes: int, page_tokens: int) -> None:
        """`page_bytes`: of a whole page, all ranks; they copy at the same time."""
        self.mode = mode
        self._page_bytes = page_bytes
        self._page_tokens = page_tokens
        self.prefill_tokens_a_second = 0.0  # 0 = not measured
        self.copy_bytes_a_second = 0.0
        self.stage_bytes_a_second = 0.0

    def prefilled(self, tokens: int, seconds: float) -> None:
        """A step computed so many prompt tokens."""
        if tokens >= PREFILL_TOKENS_MIN and seconds > 0:
            self.prefill_tokens_a_second = _mean(self.prefill_tokens_a_second, tokens / seconds)

    def copied(self, count_bytes: int, seconds: float) -> None:
        """One rank copied so many bytes of pages from the arena."""
        if count_bytes >= COPY_BYTES_MIN and seconds > 0:
            self.copy_bytes_a_second = _mean(self.copy_bytes_a_second, count_bytes / seconds)

    def staged(self, pages: int, seconds: float) -> None:
        """So many pages came from disk."""
        if pages > 0 and seconds > 0:
            rate = pages * self._page_bytes / seconds
            self.stage_bytes_a_second = _mean(self.stage_bytes_a_second, rate)

    def recompute_s(self, tokens: int) -> float | None:
        """How long prefill of `tokens` takes; None while nothing was measured."""
        rate = self.prefill_tokens_a_second
        return tokens / rate if rate else None

    def copy_s(self, pages: int) -> float:
        """How long copying `pages` into the engine takes."""
        return pages * self._page_bytes / (self.copy_bytes_a_second or COPY_BYTES_A_SECOND)

    def stage_s(self, pages: int) -> float:
        """How long bringing `pages` from disk takes."""
        return pages * self._page_bytes / (self.stage_bytes_a_second or STAGE_BYTES_A_SECOND)

    def lookup_deadline_s(self, tokens: int) -> float:
        """How long a prompt waits for the answer of a look-up; others go on meanwhile."""
        if self.mode is LoadMode.ALWAYS:
            return LOOKUP_S_ALWAYS
        again = self.recompute_s(tokens)
        if again is None:
            return LOOKUP_S_MAX
        return min(max(LOOKUP_SHARE * again, LOOKUP_S_MIN), LOOKUP_S_MAX)

    def stage_deadline_s(self, pages: int) -> float:
        """How long to wait for `pages` from disk: no longer than recomputing them takes."""
        again = self.recompute_s(pages * self._page_tokens)
        return min(max(STAGE_S_DEFAULT if again is None else again, STAGE_S_MIN), STAGE_S_MAX)

    def load_deadline_s(self, pages: int) -> float:
        """How long a load may take before its request is better off recomputing."""
        again = self.recompute_s(pages * self._page_tokens) or LOAD_S_MIN
        return min(max(again, 4 * self.copy_s(pages), LOAD_S_MIN), LOAD_S_MAX)

    def worth_staging(self, pages: int) -> bool:
        """Whether disk is predicted to be faster than prefill."""
        again = self.recompute_s(pages * self._page_tokens)
        if self.mode is not LoadMode.AUTO or again is None:
            return self.mode is not LoadMode.NEVER
        return self.stage_s(pages) + self.copy_s(pages) <= WORTH_SHARE * again

    def decide(self, ready_pages: int, local_tokens: int) -> Choice:
        """What to load of `ready_pages` in the arena when the engine has `local_tokens` itself."""
        if self.mode is LoadMode.NEVER:
            return Choice(0, sync=False, reason="never: settings")
        wanted = ready_pages * self._page_tokens - local_tokens
        if wanted <= 0:
            return Choice(0, sync=False, reason="the engine has it" if ready_pages else "miss")
        pages = -(-wanted // self._page_tokens)
        copy_s = self.copy_s(pages)
        sync = copy_s <= COPY_S_SYNC_MAX
        again = self.recompute_s(wanted)
        if self.mode is LoadMode.ALWAYS or again is None:
            reason = "always: settings" if self.mode is LoadMode.ALWAYS else "not measured yet"
            return Choice(ready_pages, sync, reason)
        cost_s = copy_s + (0.0 if sync else ASYNC_OVERHEAD_S)
        if cost_s > WORTH_SHARE * again:
            return Choice(0, sync=False, reason="recomputing is faster")
        return Choice(ready_pages, sync, "loading is faster")


def _mean(old: float, new: float) -> float:
    return new if not old else old + WEIGHT_NEW * (new - old)
