"""What codecs scored: the records, each budget's verdict, and the tables for people.

Must not be here: the model, codecs, clocks.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

READINGS = FLOAT32, BFLOAT16 = "float32", "bfloat16"
BUDGETS = {"int8": 0.001, "int4": 0.02}  # nats
RATIO_LEAST = 1.35
ERRORS_KEPT = 2.0  # standard errors that a budget must lie above a mean to be kept


@dataclass
class Reading:
    """What the model said over decoded caches, token by token, beside the exact cache."""

    tokens_a_prompt: int
    kl: list[float] = field(default_factory=list)
    same: list[bool] = field(default_factory=list)
    away: list[float] = field(default_factory=list)  # KL from the float32 answer, exact cache

    def row(self, exact_away: Sequence[float]) -> dict[str, float]:
        """`exact_away`: what the exact cache, read in this dtype, is away from that answer."""
        added = np.subtract(self.away, exact_away)
        return {
            "kl_mean": round(statistics.fmean(self.kl), 7),
            "kl_error": round(self._error(self.kl), 7),
            "kl_max": round(max(self.kl), 6),
            "greedy_agreement": round(statistics.fmean(self.same), 5),
            "kl_added": round(float(added.mean()), 7),
            "kl_added_error": round(self._error(added), 7),
        }

    def _error(self, values: Any) -> float:
        """The standard error of the mean. Tokens of one prompt are not independent: prompts are."""
        means = np.reshape(values, (-1, self.tokens_a_prompt)).mean(1)
        return float(means.std(ddof=1) / math.sqrt(len(means)))


@dataclass
class Score:
    """What was seen of one codec, over all prompts."""

    tokens_a_prompt: int
    raw_bytes: int = 0
    encoded_bytes: int = 0
    encode_s: list[float] = field(default_factory=list)  # a GB, page by page
    decode_s: list[float] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)  # mean magnitude, page by page
    error_max: float = 0.0
    exact: bool = True
    read: dict[str, Reading] = field(init=False)

    def __post_init__(self) -> None:
        self.read = {dtype: Reading(self.tokens_a_prompt) for dtype in READINGS}

    def row(self) -> dict[str, float | bool]:
        return {
            "ratio": round(self.raw_bytes / self.encoded_bytes, 4),
            "encode_gb_s": round(1 / statistics.median(self.encode_s), 3),
            "decode_gb_s": round(1 / statistics.median(self.decode_s), 3),
            "bit_exact": self.exact,
            "error_max": round(self.error_max, 5),
            "error_mean": round(statistics.fmean(self.errors), 6),
        }


def verdicts(rows: dict[str, dict[str, Any]]) -> list[str]:
    """Each budget and whether it was kept, in both readings."""
    ratio, exact = rows["lossless"]["ratio"], rows["lossless"]["bit_exact"]
    lines = [
        f"lossless ratio {ratio}, budget >= {RATIO_LEAST}: {word(ratio >= RATIO_LEAST)}",
        f"lossless bit-exact: {word(exact)}",
    ]
    noise = rows["nudged"][BFLOAT16]["kl_mean"]
    for name, budget in BUDGETS.items():
        for label, dtype, key in (
            ("KL in float32", FLOAT32, "kl"),
            ("KL added in bfloat16", BFLOAT16, "kl_added"),
            (f"KL in bfloat16, where roundings alone give {noise},", BFLOAT16, "kl"),
        ):
            read = rows[name][dtype]
            mean = read["kl_mean" if key == "kl" else key]
            error = read[f"{key}_error"]
            found = verdict(mean, error, budget)
            lines.append(f"{name} {label} {mean} +- {error}, budget <= {budget}: {found}")
    return lines


def verdict(mean: float, error: float, budget: float) -> str:
    """Of a mean and its standard error, and what it may be at most."""
    if abs(mean - budget) <= ERRORS_KEPT * error:
        return "not resolved, take more prompts"
    return word(mean < budget)


def word(kept: bool) -> str:
    return "kept" if kept else "MISSED"


def tables(rows: dict[str, dict[str, Any]]) -> Iterator[str]:
    """The lines of one table for sizes, speeds and errors, and one for each reading."""
    heads = ["times smaller", "GB/s encode", "GB/s decode", "bit-exact", "error max", "error mean"]
    sized = {name: row for name, row in rows.items() if "ratio" in row}
    yield from table("codec", heads, {name: values(row) for name, row in sized.items()})
    heads = ["KL mean", "+-", "KL max", "same token", "KL added", "+-"]
    for dtype, columns in ((FLOAT32, 4), (BFLOAT16, 6)):  # in float32 all of the KL is added
        yield ""
        read = {name: values(row[dtype])[:columns] for name, row in rows.items()}
        yield from table(f"read in {dtype}", heads[:columns], read)


def values(row: dict[str, Any]) -> list[str]:
    cells = [value for value in row.values() if not isinstance(value, dict)]
    return [str(value).lower() if isinstance(value, bool) else f"{value:.5g}" for value in cells]


def table(title: str, heads: Sequence[str], rows: dict[str, list[str]]) -> Iterator[str]:
    """Columns of one width, numbers to the right."""
    yield f"{title:18}" + "".join(f"{head:>15}" for head in heads)
    for name, cells in rows.items():
        yield f"{name:18}" + "".join(f"{cell:>15}" for cell in cells)
