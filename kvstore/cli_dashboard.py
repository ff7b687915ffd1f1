"""The command `kvstore dashboard`: where the dashboard of a running server is."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 # typer looks at the annotations
from typing import Annotated

import typer

from kvstore.dashboard_listen import ADDRESS_NAME
from kvstore.errors import ConfigError, DirectoryError
from kvstore.private_file import read_private
from kvstore.server_address import SCHEME

ADDRESS_BYTES_MAX = 4096


def dashboard(
    directory: Annotated[Path, typer.Argument(help="The store's directory.", metavar="DIR")],
    open_it: Annotated[bool, typer.Option("--open", help="Open it in a browser too.")] = False,
) -> None:
    """Say where the dashboard of the server of DIR is.

    The address has the key that opens it.
    The server has to run with --dashboard-listen. Keep the address to yourself: who has it sees
    prompts.
    """
    if str(directory).startswith(SCHEME.rstrip("/")):
        raise ConfigError(f"{directory}: the directory of a server on this host is needed")
    if not directory.is_dir():
        wrong = "this is a file" if directory.exists() else "there is no such directory"
        raise DirectoryError(f"{directory}: {wrong}; a store's directory is needed")
    note = directory / ADDRESS_NAME
    if not note.exists():
        raise DirectoryError(
            f"{directory}: no dashboard is served there; start its server with "
            "--dashboard-listen 127.0.0.1:9465"
        )
    address = read_private("dashboard", note, ADDRESS_BYTES_MAX).decode().strip()
    typer.echo(address)
    if open_it:
        if not address.startswith("http"):
            raise ConfigError(
                f"{address} is a Unix socket: ssh -L 9465:PATH HOST makes it a port elsewhere"
            )
        typer.launch(address)
