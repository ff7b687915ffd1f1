"""The command `kvstore verify`: check everything, read every page, repair what can be."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from kvstore import cli_output as output
from kvstore.cli_directory import Place
from kvstore.cli_options import Json
from kvstore.quantity import format_bytes

if TYPE_CHECKING:
    from kvstore.verification import Verification


def verify(
    store: Place,
    repair: Annotated[
        bool,
        typer.Option(
            "--repair", help="Replace damaged copies by good ones; drop pages that have none."
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Check a store's structure and every page's checksum.

    Exit code 1 when something is wrong that is not repaired. Pages of an eviction that a kill cut
    off are no damage; --repair finishes it. What opening a directory has to
    set right (a damaged catalog is rebuilt from page headers) it does with or without --repair.
    """
    last: Verification | None = None
    with store.opened() as opened, output.progress("verify") as show:
        for last in opened.verify(repair=repair):
            show(last.pages, last.pages_total)
    assert last is not None
    if json:
        output.print_json(last.to_dict())
    else:
        _show(last, repair=repair)
    if not last.healthy:
        raise typer.Exit(1)


def _show(found: Verification, *, repair: bool) -> None:
    out = output.console()
    rate = found.payload_bytes / found.seconds if found.seconds else 0.0
    out.print(
        f"{found.pages} pages read, {format_bytes(found.payload_bytes)} in {found.seconds:.1f} s "
        f"({format_bytes(int(rate))}/s)"
    )
    for each in found.problems:
        out.print(f"{'repaired' if each.repaired else 'WRONG'}: {each.what}")
    if found.problems_total > len(found.problems):
        out.print(f"and {found.problems_total - len(found.problems)} more")
    if found.dropped_pages:
        out.print(f"{found.dropped_pages} pages were dropped; they are misses now")
    if found.cut_off_pages:
        what = f"{found.cut_off_pages} pages of an eviction that was cut off"
        if repair:
            out.print(f"{what} are gone: it is finished now")
        else:
            out.print(f"{what} are misses, not damage: --repair finishes it")
    if not found.problems_total:
        out.print("All is well.")
    elif found.healthy:
        out.print("All that was wrong is repaired.")
    elif not repair:
        out.print("--repair mends what can be mended.")
