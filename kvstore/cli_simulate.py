"""The options of `kvstore simulate`; what it does with them is in cli_replay.py.

Names of policies stand here again, so that --help need not load them; a test compares.
"""

from __future__ import annotations

from pathlib import Path  # typer looks at the annotations
from typing import Annotated

import typer

from kvstore.cli_options import Json, seconds_of
from kvstore.errors import InvalidRequest

BOUND = "belady"
SIZES_DEFAULT = "1%,2%,5%,10%,20%,50%"
POLICIES = "lru, csl, arc, gdsf, auto"
OBJECTIVES = "hits, ttft, compute"
WRITE_POLICIES = "through, back, selective"
ADMISSIONS = "always, second-touch, ghost, frequency"
EVEN_TOKENS = 30_000

TraceFile = Annotated[
    Path, typer.Argument(help="Mooncake JSONL, plain or gz; or from `record`.", metavar="TRACE")
]
PlotFile = Annotated[
    Path | None, typer.Option(help="Write hit ratio over capacity: .svg, or .png (matplotlib).")
]
DiskSize = Annotated[
    str | None, typer.Option(help="A disk beside memory, in blocks or %: what is written to it.")
]
WritePolicies = Annotated[list[str] | None, typer.Option(help=f"With --disk: {WRITE_POLICIES}.")]
Admissions = Annotated[list[str] | None, typer.Option(help=f"With --disk: {ADMISSIONS}.")]


def simulate(
    trace: TraceFile,
    policy: Annotated[
        list[str] | None,
        typer.Option(help=f"{POLICIES}, or {BOUND} (the bound). Again for more."),
    ] = None,
    capacity: Annotated[
        str | None,
        typer.Option(
            help="Sizes in blocks of the trace, or in % of its unique ones, as 1000,5%; by default "
            f"{SIZES_DEFAULT}."
        ),
    ] = None,
    host_capacity: Annotated[
        str | None, typer.Option(help="Memory before a disk of --capacity; in blocks or %.")
    ] = None,
    host_policy: Annotated[
        str | None, typer.Option(help="What leaves memory first, if not by --policy too.")
    ] = None,
    objective: Annotated[
        str, typer.Option(help=f"What csl and gdsf are to save: {OBJECTIVES}.")
    ] = "hits",
    lookahead: Annotated[
        int, typer.Option(min=0, help="Hint the next uses that so many queued requests show.")
    ] = 0,
    warmup: Annotated[str, typer.Option(help="Count hits only after so long: 0s, 10m.")] = "0s",
    even_tokens: Annotated[
        int, typer.Option(min=1, help="Where attention costs as much as the rest of prefill.")
    ] = EVEN_TOKENS,
    real_index: Annotated[
        bool, typer.Option("--real-index", help="Through the store's own index; slower.")
    ] = False,
    disk: DiskSize = None,
    write_policy: WritePolicies = None,
    admission: Admissions = None,
    plot: PlotFile = None,
    json: Json = False,
) -> None:
    """Say what other caches would have hit on a trace."""
    from kvstore import cli_replay

    if plot is not None and plot.suffix not in (".svg", ".png"):
        raise InvalidRequest(f"--plot: {plot} given; a name in .svg or .png is needed")
    wanted = cli_replay.Wanted(
        policies=policy or ["lru", "csl", BOUND],
        capacity=capacity,
        host_capacity=host_capacity,
        host_policy=host_policy,
        objective=objective,
        lookahead=lookahead,
        warmup_s=0.0 if warmup in ("0", "0s") else seconds_of(warmup, "--warmup"),
        even_tokens=even_tokens,
        real_index=real_index,
    )
    if disk is not None:
        if plot is not None or lookahead or real_index or wanted.warmup_s:
            raise InvalidRequest("--disk: without --plot, --lookahead, --real-index and --warmup")
        ways, filters = write_policy or ["through"], admission or ADMISSIONS.split(", ")
        names = policy or ["lru"]
        cli_replay.simulate_disk(trace, names, capacity, disk, ways, filters, as_json=json)
        return
    found, results = cli_replay.replay_all(trace, wanted)
    if plot is not None:
        cli_replay.write_plot(plot, found, results)
    cli_replay.show_hits(found, results, warmup, as_json=json)
