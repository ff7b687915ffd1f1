"""The command `kvstore doctor`: what is wrong on this machine, and what to do about it."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003  # typer looks at the annotations
from typing import Annotated

import typer

from kvstore import cli_output as output
from kvstore.cli_options import Json
from kvstore.doctor import BAD, WARN, examine
from kvstore.quantity import format_bytes


def doctor(
    directory: Annotated[
        Path | None, typer.Argument(help="A store's directory, there or to be.", metavar="DIR")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="A TOML file with settings.")] = None,
    json: Json = False,
) -> None:
    """Check limits, memory, disk, versions and settings.

    Says what to do about each.

    Exit code 1 when something is a problem; a warning is none.
    """

    def settings() -> str:
        from kvstore.config import load_config
        from kvstore.server_config import ServerConfig

        flags = {"directory": directory} if directory is not None else {}
        found = load_config(flags, config, kind=ServerConfig)
        return (
            f"host_bytes {format_bytes(found.host_bytes)}, disk_bytes "
            f"{format_bytes(found.disk_bytes)}, listen {found.address}"
        )

    asked = settings if config is not None or directory is not None else None
    found = examine(directory, asked)
    problems = sum(each.state == BAD for each in found)
    warnings = sum(each.state == WARN for each in found)
    if json:
        findings = [each.to_dict() for each in found]
        output.print_json({"findings": findings, "problems": problems, "warnings": warnings})
    else:
        table = output.table_of("what", "", "found")
        for each in found:
            table.add_row(each.name, each.state, each.found)
            if each.advice:
                table.add_row("", "", f"-> {each.advice}")
        out = output.console()
        out.print(table)
        out.print(f"{output.counted(problems, 'problem')}, {output.counted(warnings, 'warning')}.")
    if problems:
        raise typer.Exit(1)
