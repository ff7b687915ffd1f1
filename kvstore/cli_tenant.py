"""`kvstore tenant`: add, rotate, rm, list. Edits the tenant file; servers notice within seconds.

A new token goes to stdout, alone, or to a 0600 file; it can't be shown again.
"""

from __future__ import annotations

import json as json_library
import sys
from dataclasses import asdict, replace
from pathlib import Path
from time import time
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from kvstore.cli_output import age
from kvstore.errors import ConfigError, InvalidRequest
from kvstore.identity import Role
from kvstore.private_file import replace_private
from kvstore.quantity import parse_bytes, parse_duration
from kvstore.tenants import Quota, TenantBook, edit_tenants, load_tenants

if TYPE_CHECKING:
    from collections.abc import Callable

tenant_app = typer.Typer(
    name="tenant",
    help="Who may use a server, as what, and how much of it: edits the tenant file.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

File = Annotated[Path, typer.Argument(help="The tenant file.", metavar="FILE", show_default=False)]
Name = Annotated[str, typer.Argument(help="The tenant.", metavar="NAME", show_default=False)]
RoleName = Annotated[Role, typer.Option("--role", help="What the token may do.")]
Expires = Annotated[
    str | None, typer.Option("--expires", help="The token ends after: 12h, 90d. Default: never.")
]
TokenFile = Annotated[
    Path | None,
    typer.Option("--token-file", help="Write the token here, 0600, instead of printing it."),
]
Size = Annotated[str | None, typer.Option(help="A size, as 8GiB; `none` takes the bound away.")]
Count = Annotated[str | None, typer.Option(help="A number; `none` takes the bound away.")]


@tenant_app.command()
def add(
    file: File,
    name: Name,
    role: RoleName = Role.WRITER,
    expires: Expires = None,
    token_file: TokenFile = None,
    host_bytes_share: Size = None,
    disk_bytes_share: Size = None,
    host_bytes_max: Size = None,
    disk_bytes_max: Size = None,
    pinned_pages_max: Count = None,
    reservations_max: Count = None,
    sessions_max: Count = None,
    calls_per_s_max: Count = None,
) -> None:
    """Add a tenant and print its first token; makes FILE, 0600, if there is none.

    For a tenant that is there, adds one more token, as of another role. Quotas that are given
    replace the tenant's; all others stay.
    """
    limits = {
        **_parsed(_size, "host_bytes_share", host_bytes_share),
        **_parsed(_size, "disk_bytes_share", disk_bytes_share),
        **_parsed(_size, "host_bytes_max", host_bytes_max),
        **_parsed(_size, "disk_bytes_max", disk_bytes_max),
        **_parsed(_count, "pinned_pages_max", pinned_pages_max),
        **_parsed(_count, "reservations_max", reservations_max),
        **_parsed(_count, "sessions_max", sessions_max),
        **_parsed(_count, "calls_per_s_max", calls_per_s_max),
    }
    ttl_s = parse_duration(expires) if expires is not None else None

    def edit(book: TenantBook) -> tuple[TenantBook, str]:
        quota = book.tenants[name].quota if name in book.tenants else Quota()
        book = book.with_tenant(name, replace(quota, **limits))
        return book.with_token(name, role, time(), ttl_s)

    _edit_and_give_token(file, edit, token_file, create=True)


@tenant_app.command()
def rotate(
    file: File,
    name: Name,
    role: RoleName = Role.WRITER,
    expires: Expires = None,
    grace: Annotated[str, typer.Option(help="How long older tokens of this role stay.")] = "10m",
    token_file: TokenFile = None,
) -> None:
    """Print a new token of a tenant; its older ones of the same role end after --grace."""
    ttl_s = parse_duration(expires) if expires is not None else None
    grace_s = parse_duration(grace)

    def edit(book: TenantBook) -> tuple[TenantBook, str]:
        return book.with_rotated(name, role, time(), ttl_s, grace_s)

    _edit_and_give_token(file, edit, token_file, create=False)


@tenant_app.command()
def rm(
    file: File,
    name: Name,
    token: Annotated[
        str | None, typer.Option(help="Revoke only the token with this id; see `list`.")
    ] = None,
) -> None:
    """Take a tenant and its tokens out; servers refuse them within seconds.

    Its pages stay until they are evicted: `kvstore evict DIR --tenant NAME --yes`.
    """

    def edit(book: TenantBook) -> TenantBook:
        return book.without_tenant(name) if token is None else book.without_token(name, token)

    edit_tenants(file, edit, create=False)


@tenant_app.command("list")
def list_tenants(
    file: File,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Show tenants, their quotas, and their tokens by id; a token itself is in no file."""
    book = load_tenants(file)
    tenants: list[dict[str, Any]] = []
    for tenant in book.tenants.values():
        tokens = [asdict(each) | {"expired": each.is_expired(time())} for each in tenant.tokens]
        for each in tokens:
            del each["digest"]
        tenants.append({"name": tenant.name, "quota": asdict(tenant.quota), "tokens": tokens})
    if json:
        typer.echo(json_library.dumps({"tenants": tenants}))
        return
    _show(tenants, time())


def _edit_and_give_token(
    file: Path,
    edit: Callable[[TenantBook], tuple[TenantBook, str]],
    token_file: Path | None,
    *,
    create: bool,
) -> None:
    """The token is given out after the tenant file has it: whoever reads it can use it."""
    given = []

    def edit_and_keep(book: TenantBook) -> TenantBook:
        changed, token = edit(book)
        given.append(token)
        return changed

    edit_tenants(file, edit_and_keep, create=create)
    if token_file is None:
        typer.echo(given[0])
        if sys.stdout.isatty():
            typer.echo("This token is not shown again.", err=True)
        return
    try:
        replace_private(token_file, given[0].encode() + b"\n")
    except OSError as exc:
        raise ConfigError(
            f"--token-file {token_file}: {exc.strerror}; the new token is lost: rotate again"
        ) from exc


def _show(tenants: list[dict[str, Any]], wall_now: float) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("tenant", "role", "token", "created", "ends", "quota"):
        table.add_column(column)
    for tenant in tenants:
        quota = " ".join(
            f"{key}={value}" for key, value in tenant["quota"].items() if value is not None
        )
        rows = [
            (each["role"], each["id"], _ago(wall_now - each["created"]), _end(each, wall_now))
            for each in tenant["tokens"]
        ] or [("", "no token", "", "")]
        for number, row in enumerate(rows):
            table.add_row("" if number else tenant["name"], *row, "" if number else quota)
    Console(width=None if sys.stdout.isatty() else 200).print(table)


def _ago(seconds: float) -> str:
    return f"{age(max(0.0, seconds))} ago"


def _end(token: dict[str, Any], wall_now: float) -> str:
    if token["expires"] is None:
        return "never"
    return "expired" if token["expired"] else f"in {age(token['expires'] - wall_now)}"


def _parsed(parse: Callable[[str], int], name: str, text: str | None) -> dict[str, int | None]:
    """The setting if it was given; "none" takes a bound away."""
    if text is None:
        return {}
    try:
        return {name: None if text == "none" else parse(text)}
    except ConfigError as exc:
        raise InvalidRequest(f"--{name.replace('_', '-')}: {exc}") from None


def _size(text: str) -> int:
    return parse_bytes(text)


def _count(text: str) -> int:
    if not text.isdecimal() or not text.isascii():
        raise ConfigError(f"{text[:60]!r} is not a whole number")
    return int(text)
