"""What bench/engine.py measures, and the file that has it while it goes on.

The file is written anew after each workload of a group, so a killed run loses one at most; runs
with the same seed, size, machine and model can be joined. Must not be here: engines, ratios.
"""

from __future__ import annotations

import datetime
import json
import os
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from engine_arms import Answer

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

REFERENCE, OWN = "none", "vllm"
EVERYWHERE = {OWN}  # an arm that stands in each group


@dataclass(slots=True)
class Cell:
    """One workload in one arm."""

    arm: str
    answers: list[Answer] = field(default_factory=list)
    round_s: list[float] = field(default_factory=list)
    kept_pages: int = 0  # of its store, where all that is asked is new
    whole_pages: int = 0  # that there were to keep
    alone: bool = False  # asked prompts of its own: nobody else's answers to compare
    date: str = field(default_factory=lambda: datetime.date.today().isoformat())
    load: float = 0.0  # average of the machine before the run began

    def add(self, answers: Sequence[Answer], seconds: float) -> None:
        self.answers += answers
        self.round_s.append(seconds)

    @property
    def ttft_s(self) -> list[float]:
        return [answer.ttft_s for answer in self.answers]

    @property
    def reused_tokens(self) -> int:
        return sum(answer.reused_tokens for answer in self.answers)


Group = dict[str, Cell]  # by arm; they were asked by turns
Results = dict[str, list[Group]]  # by workload


class OtherRunError(Exception):
    """The file is of a run that this one can't be joined with; the message says why."""


def write(
    file: Path, about: Mapping[str, object], found: Results, notes: Mapping[str, object]
) -> None:
    """The whole file, or the one from before."""
    cells = {
        name: [{arm: asdict(cell) for arm, cell in group.items()} for group in groups]
        for name, groups in found.items()
    }
    made = file.with_name(f"{file.name}.new")
    made.write_text(json.dumps({"about": dict(about), "found": cells, **notes}), encoding="ascii")
    os.replace(made, file)


def read(file: Path, about: Mapping[str, object]) -> tuple[Results, dict[str, Any]]:
    """What an earlier run found, and the rest of its file; OtherRunError if it was another kind."""
    try:
        kept = json.loads(file.read_text(encoding="ascii"))
        differs = {name: kept["about"].get(name) for name in about}
    except (OSError, ValueError, KeyError) as exc:
        raise OtherRunError(f"{file} has no results: {exc!r}") from exc
    if differs != dict(about):
        raise OtherRunError(f"{file} is of {differs}, this run of {dict(about)}: not to be joined")
    found = {
        name: [{arm: _cell(cell) for arm, cell in group.items()} for group in groups]
        for name, groups in kept.pop("found").items()
    }
    return found, kept


def _cell(kept: dict[str, Any]) -> Cell:
    answers = [
        Answer(**each | {"tokens": tuple(each["tokens"]), "margins": tuple(each["margins"])})
        for each in kept.pop("answers")
    ]
    return Cell(**kept, answers=answers)


def joined(old: Results, new: Results) -> Results:
    """A group takes the place of those that had one of its arms, besides the one in all groups."""
    found = {name: list(groups) for name, groups in old.items()}
    for name, groups in new.items():
        fresh = {arm for group in groups for arm in group} - EVERYWHERE
        kept = [group for group in found.get(name, []) if not fresh & set(group)]
        found[name] = kept + groups
    return found
