"""What `kvstore simulate` does once its options are known: sizes, replays, a table, a plot."""

from __future__ import annotations

import json as json_text
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import typer
from rich.progress import Progress, TaskID
from rich.table import Table

from kvstore import cli_console
from kvstore.belady import replay_belady
from kvstore.cli_simulate import BOUND, SIZES_DEFAULT
from kvstore.cli_writes import check_names, show_writes, simulate_writes
from kvstore.errors import InvalidRequest
from kvstore.plot import line_chart
from kvstore.simulation import replay
from kvstore.simulation_index import replay_index
from kvstore.simulation_tiers import replay_tiers
from kvstore.tiers.eviction_hints import HintedPolicy
from kvstore.tiers.policies import OBJECTIVES, POLICIES, make_policy
from kvstore.trace import read_trace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from kvstore.simulation import Hits
    from kvstore.trace import Trace

WEIGHTS = (
    "block: of all block references, those hit; token: the same by tokens; compute: by prefill "
    "work, which grows with position; ttft: the part of its own work that a request was spared, "
    "on average. Hits count from the first request on or after the warm-up."
)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is to be replayed, and how."""

    policies: list[str]
    capacity: str | None
    host_capacity: str | None
    host_policy: str | None
    objective: str
    lookahead: int
    warmup_s: float
    even_tokens: int
    real_index: bool

    def __post_init__(self) -> None:
        _refuse(
            self.policies,
            self.objective,
            self.host_policy,
            self.host_capacity,
            self.real_index or self.lookahead > 0,
        )


def replay_all(file: Path, wanted: Wanted) -> tuple[Trace, list[Hits]]:
    """Every policy at every size, with a bar for who looks at it."""
    results: list[Hits] = []
    names = wanted.policies
    with _bar() as progress:
        reading = progress.add_task("reading", total=None)
        found = read_trace(file, lambda lines: progress.update(reading, completed=lines))
        sizes = parse_sizes(wanted.capacity, found.unique)
        memory = 0
        if wanted.host_capacity:
            (memory, *_) = parse_sizes(wanted.host_capacity, found.unique, "--host-capacity")
        progress.remove_task(reading)
        task = progress.add_task("replaying", total=found.requests * len(sizes) * len(names))
        for name in names:
            for size in sizes:
                before = len(results) * found.requests
                progress.update(task, description=f"{name}, {size:,} blocks")
                if memory:
                    tiers = _Tiers(memory, wanted.host_policy)
                    run = _tiered(name, found, size, tiers, wanted.objective, wanted.even_tokens)
                else:
                    run = _runner(name, found, size, wanted)
                results.append(run(wanted.warmup_s, partial(_tell, progress, task, before)))
    return found, results


@contextmanager
def _bar() -> Iterator[Progress]:
    """On stderr, for people who look at one; nothing elsewhere, not even a line."""
    screen = cli_console.screen(stderr=True)
    with Progress(console=screen, transient=True, disable=not screen.is_terminal) as progress:
        yield progress


def simulate_disk(
    trace: Path,
    policies: list[str],
    capacity: str | None,
    disk: str,
    write_policies: list[str],
    admissions: list[str],
    *,
    as_json: bool,
) -> None:
    """What each way to write to a disk beside memory writes there, as a table or a document."""
    check_names(policies, write_policies, admissions)
    with _bar() as progress:
        task = progress.add_task("reading", total=None)
        found = read_trace(trace, lambda lines: progress.update(task, completed=lines))
        sizes = parse_sizes(capacity, found.unique)
        disks = parse_sizes(disk, found.unique, "--disk")

        def tell(about: str, at: int, of: int) -> None:
            progress.update(task, description=about, completed=at, total=of)

        results = simulate_writes(found, policies, sizes, disks, write_policies, admissions, tell)
    show_writes(found, results, as_json=as_json)


def _refuse(
    names: list[str],
    objective: str,
    host_policy: str | None,
    host_capacity: str | None,
    one_tier_only: bool,
) -> None:
    """What makes no sense, or not together."""
    for name in names:
        if name not in (*POLICIES, BOUND):
            raise InvalidRequest(
                f"--policy: {name!r} given; one of {', '.join((*POLICIES, BOUND))}"
            )
    if objective not in OBJECTIVES:
        raise InvalidRequest(f"--objective: {objective!r} given; one of {', '.join(OBJECTIVES)}")
    if host_policy is not None and (host_capacity is None or host_policy not in POLICIES):
        raise InvalidRequest(
            f"--host-policy: {host_policy!r} given; one of {', '.join(POLICIES)}, with "
            "--host-capacity"
        )
    if host_capacity is not None and (one_tier_only or BOUND in names):
        raise InvalidRequest(
            "--host-capacity: not with --real-index, --lookahead or --policy belady; name policies"
        )


def _tell(progress: Progress, task: TaskID, before: int, at: int) -> None:
    progress.update(task, completed=before + at)


def parse_sizes(given: str | None, unique: int, option: str = "--capacity") -> list[int]:
    """Numbers of blocks from "1000,5%"; percentages are of the trace's unique blocks.

    None: SIZES_DEFAULT, as far as they differ on a trace of so few blocks.
    """
    if given is None:
        sizes = (int(unique * float(part[:-1]) / 100) for part in SIZES_DEFAULT.split(","))
        return list(dict.fromkeys(max(1, size) for size in sizes))
    found = []
    for part in given.split(","):
        word = part.strip().replace("_", "")
        try:
            size = int(unique * float(word[:-1]) / 100) if word.endswith("%") else int(word)
        except (ValueError, OverflowError) as exc:
            raise InvalidRequest(
                f"{option}: {part!r} is neither a number of blocks nor a %; like 1000 or 5%"
            ) from exc
        if size == 0 and word.endswith("%"):
            raise InvalidRequest(
                f"{option}: {part!r} is less than one of the trace's {unique} blocks; at least "
                f"{-(-100 // unique)}% is needed, or a number of blocks"
            )
        if not 0 < size < 1 << 31:
            raise InvalidRequest(
                f"{option}: {part!r} is {size} blocks; 1 to {(1 << 31) - 1} are needed"
            )
        found.append(size)
    return found


def _runner(
    name: str, trace: Trace, size: int, wanted: Wanted
) -> Callable[[float, Callable[[int], None]], Hits]:
    """What replays one policy at one size, given the warm-up and whom to tell of progress."""

    def run(warmup_s: float, tell: Callable[[int], None]) -> Hits:
        work = float(wanted.even_tokens)
        if name == BOUND:
            return replay_belady(trace, size, warmup_s=warmup_s, even_tokens=work, progress=tell)
        made = make_policy(name, size, wanted.objective, work)
        if wanted.real_index:
            return replay_index(
                trace, made, size, warmup_s=warmup_s, even_tokens=work, progress=tell
            )
        if wanted.lookahead:
            made = HintedPolicy(made)
        return replay(
            trace,
            made,
            size,
            warmup_s=warmup_s,
            even_tokens=work,
            lookahead=wanted.lookahead,
            progress=tell,
        )

    return run


@dataclass(frozen=True, slots=True)
class _Tiers:
    """What stands before the disk."""

    host_pages: int
    host_policy: str | None


def _tiered(
    name: str, trace: Trace, size: int, tiers: _Tiers, objective: str, even_tokens: int
) -> Callable[[float, Callable[[int], None]], Hits]:
    """The same through memory and disk."""

    def run(warmup_s: float, tell: Callable[[int], None]) -> Hits:
        work, other = float(even_tokens), tiers.host_policy
        return replay_tiers(
            trace,
            make_policy(name, size, objective, work),
            tiers.host_pages,
            size,
            host_policy=make_policy(other, tiers.host_pages, objective, work) if other else None,
            warmup_s=warmup_s,
            even_tokens=work,
            progress=tell,
        )

    return run


def show_hits(trace: Trace, results: list[Hits], warmup: str, *, as_json: bool) -> None:
    """A table, or one JSON document."""
    if as_json:
        document = {
            **trace.facts(),
            "warmup": warmup,
            "weights": WEIGHTS,
            "results": [each.to_dict() for each in results],
        }
        typer.echo(json_text.dumps(document))
        return
    table = Table(
        title=f"{trace.name}: {trace.requests:,} requests, {trace.references:,} references to "
        f"{trace.unique:,} blocks of {trace.block_tokens} tokens; warm-up {warmup}"
    )
    memory = max(each.host_capacity for each in results)
    if memory:
        table.title = f"{table.title}; {memory:,} blocks of memory before the disk"
        table.add_column("in memory", justify="right")
    for column in (
        "policy",
        "blocks",
        "% of unique",
        "block hits",
        "token hits",
        "compute",
        "ttft",
    ):
        table.add_column(column, justify="left" if column == "policy" else "right")
    for each in results:
        table.add_row(
            *([f"{each.host_block_ratio:.4f}"] if memory else []),
            each.policy,
            f"{each.capacity:,}",
            f"{100 * each.capacity / trace.unique:.1f}",
            f"{each.block_ratio:.4f}",
            f"{each.token_ratio:.4f}",
            f"{each.compute_ratio:.4f}",
            f"{each.ttft_ratio:.4f}",
        )
    console = cli_console.console()
    console.print(table)
    console.print(WEIGHTS)


def write_plot(file: Path, trace: Trace, results: list[Hits]) -> None:
    """Hit ratio over capacity as a picture: .svg, or .png."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for each in results:
        lines.setdefault(each.policy, []).append((each.capacity, each.block_ratio))
    title, x_label, y_label = trace.name, "capacity in blocks", "block hit ratio"
    try:
        if file.suffix == ".svg":
            file.write_text(line_chart(title, x_label, y_label, lines), encoding="ascii")
            return
        try:
            from matplotlib.figure import Figure
        except ImportError as exc:
            raise InvalidRequest(
                "--plot: .png needs matplotlib (pip install 'kvstore-llm[plot]'); .svg nothing"
            ) from exc
        figure = Figure(figsize=(7.2, 4.4))
        axes = figure.add_subplot(title=title, xlabel=x_label, ylabel=y_label, xscale="log")
        for name, points in lines.items():
            axes.plot(*zip(*sorted(points), strict=True), marker="o", label=name)
        axes.legend()
        figure.savefig(file)
    except OSError as exc:
        raise InvalidRequest(f"--plot: {file}: {exc.strerror}") from exc
