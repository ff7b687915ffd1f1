"""What the scheduler side asks of the workers in one step, and what they answer.

Plain frozen records that any engine may send between its processes. Invariant: a job is answered
exactly once by every rank, whatever happens to it (LoadDone, SaveDone). No engine types, no I/O.
"""

from __future__ import annotations

from dataclasses import dataclass, field

SKIP_BLOCK = -1
"""Instead of a block id: nothing is copied there (already computed, or beyond the hit)."""
CANCELLED = "cancelled"
"""The reason of a load that its own engine called off."""


@dataclass(frozen=True, slots=True)
class PageLoad:
    """One page in the arena and the engine's blocks that it fills; SKIP_BLOCK leaves one out."""

    slot: int
    generation: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LoadJob:
    """Pages to copy for one request; `deadline_s` runs from its receipt by the worker."""

    job: int
    request: str
    pages: tuple[PageLoad, ...]
    sync: bool
    deadline_s: float


@dataclass(frozen=True, slots=True)
class PageSave:
    """One full page: its engine blocks and its offset in the session's staging memory."""

    offset: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SaveJob:
    """Pages to copy to staging after this step's forward; their blocks stay pinned until done."""

    job: int
    pages: tuple[PageSave, ...]


@dataclass(frozen=True, slots=True)
class Grant:
    """With what each rank attaches to the session's memory; a token a rank, good once."""

    epoch: int
    path: str
    tokens: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """All that the workers do for one step.

    `epoch` names the session whose memory the jobs mean. `cancelled` are loads whose request is
    gone: still answered. `fenced` are saves whose blocks are about to be reused: done before the
    step's forward begins. `weights` are the changes of each rank's weights that the plan knows of.
    """

    epoch: int = 0
    grant: Grant | None = None
    loads: tuple[LoadJob, ...] = ()
    saves: tuple[SaveJob, ...] = ()
    cancelled: tuple[int, ...] = ()
    fenced: tuple[int, ...] = ()
    weights: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LoadDone:
    """One rank's answer to a LoadJob; `bad_blocks` hold no valid bytes."""

    job: int
    request: str
    ok: bool
    bad_blocks: tuple[int, ...] = ()
    bytes: int = 0
    seconds: float = 0.0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class SaveDone:
    """One rank's answer to a SaveJob."""

    job: int
    ok: bool
    bytes: int = 0
    seconds: float = 0.0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """What ranks have to say after a step; reports of several ranks are joined by `merged`."""

    loads: tuple[LoadDone, ...] = ()
    saves: tuple[SaveDone, ...] = ()
    attached_epoch: dict[int, int] = field(default_factory=dict)  # rank -> epoch
    counters: dict[str, float] = field(default_factory=dict)
    weights: dict[int, int] = field(default_factory=dict)  # rank -> changes, when there are new
    weights_why: str = ""

    def merged(self, other: WorkerReport) -> WorkerReport:
        """Both reports as one: answers are listed, counters added, the other's epochs win."""
        counters = dict(self.counters)
        for name, amount in other.counters.items():
            counters[name] = counters.get(name, 0.0) + amount
        return WorkerReport(
            self.loads + other.loads,
            self.saves + other.saves,
            {**self.attached_epoch, **other.attached_epoch},
            counters,
            {**self.weights, **other.weights},
            self.weights_why or other.weights_why,
        )
