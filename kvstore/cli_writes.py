"""`kvstore simulate --disk`: what admission and write policies write to disk for what they hit."""

from __future__ import annotations

import json as json_text
from typing import TYPE_CHECKING

import typer
from rich.box import SIMPLE
from rich.table import Table

from kvstore import cli_console
from kvstore.errors import InvalidRequest
from kvstore.simulation_tiers import replay_writes
from kvstore.tiers.admission import ADMISSIONS
from kvstore.tiers.policies import POLICIES, make_policy

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstore.simulation_tiers import Writes
    from kvstore.trace import Trace

WRITE_POLICIES = ("through", "back", "selective")
MEANING = (
    "hits: of all block references, those in memory or on disk; of disk: those that only the disk "
    "had; written a hit: blocks written to disk over blocks hit, the same in bytes."
)


def check_names(
    policies: Sequence[str], write_policies: Sequence[str], admissions: Sequence[str]
) -> None:
    """Raise InvalidRequest for names that a store with a disk does not know."""
    for option, names, known in (
        ("--policy", policies, POLICIES),
        ("--write-policy", write_policies, WRITE_POLICIES),
        ("--admission", admissions, ADMISSIONS),
    ):
        for name in names:
            if name not in known:
                raise InvalidRequest(f"{option}: {name!r} given; one of {', '.join(known)}")


def simulate_writes(
    trace: Trace,
    policies: Sequence[str],
    sizes: Sequence[int],
    disks: Sequence[int],
    write_policies: Sequence[str],
    admissions: Sequence[str],
    tell: Callable[[str, int, int], None],
) -> list[Writes]:
    """Every combination. tell: what runs, references done so far, and of how many in all."""
    runs = [
        (name, size, disk, way, admission)
        for name in policies
        for size in sizes
        for disk in disks
        for way in write_policies
        for admission in admissions
    ]
    found = []
    for number, (name, size, disk, way, admission) in enumerate(runs):
        about = f"{name}, {way}, {admission}"

        def told(at: int, about: str = about, number: int = number) -> None:
            tell(about, number * trace.requests + at, len(runs) * trace.requests)

        made = make_policy(name, size + disk)
        found.append(
            replay_writes(
                trace, made, size, disk, write_policy=way, admission=admission, progress=told
            )
        )
    return found


def show_writes(trace: Trace, results: list[Writes], *, as_json: bool) -> None:
    """A table, or one JSON document."""
    if as_json:
        document = {
            **trace.facts(),
            "meaning": MEANING,
            "results": [each.to_dict() for each in results],
        }
        typer.echo(json_text.dumps(document))
        return
    title = f"{trace.name}: {trace.references:,} references to {trace.unique:,} blocks"
    table = Table(title=title, box=SIMPLE, padding=(0, 1, 0, 0), show_edge=False)
    words = ("policy", "writes", "admission")
    numbers = ("memory", "disk", "hits", "of disk", "written", "a hit")
    for column in (*words, *numbers):
        table.add_column(column, justify="left" if column in words else "right", no_wrap=True)
    for each in results:
        table.add_row(
            each.policy,
            each.write_policy,
            each.admission,
            f"{each.capacity:,}",
            f"{each.disk:,}",
            f"{each.block_ratio:.4f}",
            f"{each.hit_blocks_disk / max(1, each.references):.4f}",
            f"{each.written_blocks:,}",
            f"{each.written_per_hit:.2f}",
        )
    console = cli_console.console()
    console.print(table)
    console.print(MEANING)
