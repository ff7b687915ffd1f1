"""What keeping a page saves for each byte that it takes: the objectives of policies.

Prefill of a token costs 1 + position / even_tokens: at that position attention costs as much as
all the rest of the model. `hits` counts tokens alike; `compute` counts that work, in seconds where
engines measured what a token takes; `ttft` a page's part of the work of the prompt that it came
with, so that the mean prompt waits less, be it long or short. Worth is over bytes, where pages of a
store have different sizes. It has no unit: a token at the beginning of a prompt, in pages as the
first that came, of an engine as the first that measured, is worth 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    from kvstore.tiers.eviction import Run, Scores

OBJECTIVES = ("hits", "ttft", "compute")
# About 30 K for a model of 8 B parameters, 3 K for one of 135 M.
EVEN_TOKENS = 30_000.0
TTFT_TOKENS = 8192.0  # a page of a prompt of so much work is worth as much for ttft as for compute


class PageCost:
    """One objective, and the size of page that all others are compared with."""

    def __init__(self, objective: str = "hits", even_tokens: float = EVEN_TOKENS) -> None:
        if objective not in OBJECTIVES:
            raise ValueError(f"objective {objective!r}: one of {', '.join(OBJECTIVES)} is needed")
        self.objective = objective
        self._even = even_tokens
        self._bytes_per_token = 0.0  # of the first page whose size was told
        self._token_s = 0.0  # of the first page whose engine measured it

    def weighs(self, run: Run) -> bool:
        """Whether these pages can be worth something else than 1."""
        return self.objective != "hits" or self._density(run) != 1.0

    def of(self, run: Run) -> Scores:
        """The worth of one use of each page of a run, for its bytes."""
        density = self._density(run)
        if self.objective == "hits":
            return np.full(len(run.depths), density)
        work = self.work(run.depths, run.page_tokens)
        if self.objective == "compute":
            return density * work * self._pace(run)
        end = int(run.depths[-1]) + 1 if len(run.depths) else 0
        whole = self.work_until(end * run.page_tokens)
        return density * work * (TTFT_TOKENS / max(whole, 1.0))

    def work(self, depths: npt.NDArray[np.integer], page_tokens: int) -> Scores:
        """Prefill work of a page for each of its tokens."""
        places = depths.astype(np.float64) + 0.5
        found: Scores = 1.0 + places * (page_tokens / self._even)
        return found

    def work_until(self, tokens: float) -> float:
        """Prefill work of a prompt of so many tokens."""
        return tokens * (1.0 + tokens / (2 * self._even))

    def _density(self, run: Run) -> float:
        """Tokens a byte, over those of the first page."""
        if not run.page_bytes:
            return 1.0
        bytes_per_token = run.page_bytes / run.page_tokens
        self._bytes_per_token = self._bytes_per_token or bytes_per_token
        return self._bytes_per_token / bytes_per_token

    def _pace(self, run: Run) -> float:
        """Seconds of a token, over those of the first page; alike where nobody measured."""
        if not run.token_s:
            return 1.0
        self._token_s = self._token_s or run.token_s
        return run.token_s / self._token_s
