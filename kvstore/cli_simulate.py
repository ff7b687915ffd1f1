"""`kvstore simulate`: replay a trace through policies and sizes; a table, JSON, a plot."""

from __future__ import annotations

import json as json_text
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import Progress, TaskID
from rich.table import Table

from kvstore.belady import replay_belady
from kvstore.cli_writes import WRITE_POLICIES, check_names, show_writes, simulate_writes
from kvstore.errors import InvalidRequest
from kvstore.plot import line_chart
from kvstore.quantity import parse_duration
from kvstore.simulation import replay
from kvstore.simulation_index import replay_index
from kvstore.simulation_tiers import replay_tiers
from kvstore.tiers.admission import ADMISSIONS
from kvstore.tiers.eviction_hints import HintedPolicy
from kvstore.tiers.policies import EVEN_TOKENS, OBJECTIVES, POLICIES, make_policy
from kvstore.trace import read_trace

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.simulation import Hits
    from kvstore.trace import Trace

BOUND = "belady"
SIZES_DEFAULT = "1%,2%,5%,10%,20%,50%"
WEIGHTS = (
    "block: of all block references, those hit; token: the same by tokens; compute: by prefill "
    "work, which grows with position; ttft: the part of its own work that a request was spared, "
    "on average. Hits count from the first request on or after the warm-up."
)

TraceFile = Annotated[Path, typer.Argument(help="Mooncake JSONL, plain or gz; or from `record`.")]
PlotFile = Annotated[
    Path | None, typer.Option(help="Write hit ratio over capacity: .svg, or .png (matplotlib).")
]
DiskSize = Annotated[
    str | None, typer.Option(help="A disk beside memory, in blocks or %: what is written to it.")
]
WritePolicies = Annotated[
    list[str] | None, typer.Option(help=f"With --disk: {', '.join(WRITE_POLICIES)}.")
]
Admissions = Annotated[
    list[str] | None, typer.Option(help=f"With --disk: {', '.join(ADMISSIONS)}.")
]


def simulate(
    trace: TraceFile,
    policy: Annotated[
        list[str] | None,
        typer.Option(help=f"{', '.join(POLICIES)}, or {BOUND} (the bound). Again for more."),
    ] = None,
    capacity: Annotated[
        str, typer.Option(help="Sizes in blocks of the trace, or in % of its unique ones: 1000,5%.")
    ] = SIZES_DEFAULT,
    host_capacity: Annotated[
        str | None, typer.Option(help="Memory before a disk of --capacity; in blocks or %.")
    ] = None,
    host_policy: Annotated[
        str | None, typer.Option(help="What leaves memory first, if not by --policy too.")
    ] = None,
    objective: Annotated[
        str, typer.Option(help=f"What csl and gdsf are to save: {', '.join(OBJECTIVES)}.")
    ] = "hits",
    lookahead: Annotated[
        int, typer.Option(min=0, help="Hint the next uses that so many queued requests show.")
    ] = 0,
    warmup: Annotated[str, typer.Option(help="Count hits only after so long: 0s, 10m.")] = "0s",
    even_tokens: Annotated[
        int, typer.Option(min=1, help="Where attention costs as much as the rest of prefill.")
    ] = int(EVEN_TOKENS),
    real_index: Annotated[
        bool, typer.Option("--real-index", help="Through the store's own index; slower.")
    ] = False,
    disk: DiskSize = None,
    write_policy: WritePolicies = None,
    admission: Admissions = None,
    plot: PlotFile = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document instead of a table.")
    ] = False,
) -> None:
    """Say what other caches would have hit on a trace."""
    names = policy or ["lru", "csl", BOUND]
    _refuse(names, objective, host_policy, host_capacity, real_index or lookahead > 0)
    if plot is not None and plot.suffix not in (".svg", ".png"):
        raise InvalidRequest(f"--plot: {plot} given; a name in .svg or .png is needed")
    if disk is not None:
        if plot is not None or lookahead or real_index or warmup not in ("0", "0s"):
            raise InvalidRequest("--disk: without --plot, --lookahead, --real-index and --warmup")
        ways, filters = write_policy or ["through"], admission or [*ADMISSIONS]
        check_names(policy or ["lru"], ways, filters)
        _simulate_disk(trace, policy or ["lru"], capacity, disk, ways, filters, as_json=json)
        return
    warmup_s = 0.0 if warmup in ("0", "0s") else parse_duration(warmup)
    results: list[Hits] = []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        reading = progress.add_task("reading", total=None)
        found = read_trace(trace, lambda lines: progress.update(reading, completed=lines))
        sizes = parse_sizes(capacity, found.unique)
        memory = parse_sizes(host_capacity, found.unique)[0] if host_capacity else 0
        progress.remove_task(reading)
        task = progress.add_task("replaying", total=found.requests * len(sizes) * len(names))
        for name in names:
            for size in sizes:
                before = len(results) * found.requests
                progress.update(task, description=f"{name}, {size:,} blocks")
                if memory:
                    tiers = _Tiers(memory, host_policy)
                    run = _tiered(name, found, size, tiers, objective, even_tokens)
                else:
                    run = _runner(name, found, size, objective, even_tokens, real_index, lookahead)
                results.append(run(warmup_s, partial(_tell, progress, task, before)))
    if plot is not None:
        _write_plot(plot, found, results)
    _show(found, results, warmup, as_json=json)


def _simulate_disk(
    trace: Path,
    policies: list[str],
    capacity: str,
    disk: str,
    write_policies: list[str],
    admissions: list[str],
    *,
    as_json: bool,
) -> None:
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("reading", total=None)
        found = read_trace(trace, lambda lines: progress.update(task, completed=lines))
        sizes, disks = parse_sizes(capacity, found.unique), parse_sizes(disk, found.unique)

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


def parse_sizes(text: str, unique: int) -> list[int]:
    """Numbers of blocks from "1000,5%"; percentages are of the trace's unique blocks."""
    sizes = []
    for part in text.split(","):
        word = part.strip().replace("_", "")
        try:
            size = int(unique * float(word[:-1]) / 100) if word.endswith("%") else int(word)
        except (ValueError, OverflowError) as exc:
            raise InvalidRequest(f"--capacity: {part!r} is neither a number nor a %") from exc
        if not 0 < size < 1 << 31:
            raise InvalidRequest(f"--capacity: {part!r} is {size} blocks; at least 1 is needed")
        sizes.append(size)
    return sizes


def _runner(
    name: str,
    trace: Trace,
    size: int,
    objective: str,
    even_tokens: int,
    real_index: bool,
    lookahead: int,
) -> Callable[[float, Callable[[int], None]], Hits]:
    """What replays one policy at one size, given the warm-up and whom to tell of progress."""

    def run(warmup_s: float, tell: Callable[[int], None]) -> Hits:
        work = float(even_tokens)
        if name == BOUND:
            return replay_belady(trace, size, warmup_s=warmup_s, even_tokens=work, progress=tell)
        made = make_policy(name, size, objective, work)
        if real_index:
            return replay_index(
                trace, made, size, warmup_s=warmup_s, even_tokens=work, progress=tell
            )
        if lookahead:
            made = HintedPolicy(made)
        return replay(
            trace,
            made,
            size,
            warmup_s=warmup_s,
            even_tokens=work,
            lookahead=lookahead,
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


def _show(trace: Trace, results: list[Hits], warmup: str, *, as_json: bool) -> None:
    if as_json:
        document = {
            "trace": trace.name,
            "requests": trace.requests,
            "references": trace.references,
            "unique_blocks": trace.unique,
            "block_tokens": trace.block_tokens,
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
    console = Console()
    console.print(table)
    console.print(WEIGHTS)


def _write_plot(file: Path, trace: Trace, results: list[Hits]) -> None:
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
