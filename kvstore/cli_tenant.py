"""`kvstore tenant`: add, quota, rotate, rm, list. Edits the tenant file; servers notice in seconds.

A new token goes to stdout, alone, or to a 0600 file; it can't be shown again.
"""

from __future__ import annotations

import json as json_library
import os
import sys
from dataclasses import asdict, fields, replace
from pathlib import Path
from time import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvstore import cli_output as output
from kvstore.cli_options import seconds_of
from kvstore.client_config import ClientConfig
from kvstore.errors import ConfigError, InvalidRequest
from kvstore.identity import Role
from kvstore.private_file import replace_private
from kvstore.quantity import format_age, format_bytes, parse_bytes
from kvstore.server_address import parse_address
from kvstore.shares import Tenancy
from kvstore.tenants import Quota, TenantBook, edit_tenants, load_tenants, no_tenant

if TYPE_CHECKING:
    from collections.abc import Callable

_USED = ("host_bytes", "host_share_bytes", "disk_bytes", "disk_share_bytes", "leased_bytes")

tenant_app = typer.Typer(
    name="tenant",
    help="Say who may use a server, and how much of it.\n\nEdits the tenant file.",
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
ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", help="The server's TOML file: shares must fit in its capacities."),
]


@tenant_app.command()
def add(
    file: File,
    name: Name,
    role: RoleName = Role.WRITER,
    expires: Expires = None,
    token_file: TokenFile = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace a token file that is there.")
    ] = False,
    config: ConfigFile = None,
    host_bytes_share: Size = None,
    disk_bytes_share: Size = None,
    host_bytes_max: Size = None,
    disk_bytes_max: Size = None,
    pinned_pages_max: Count = None,
    reservations_max: Count = None,
    sessions_max: Count = None,
    calls_per_s_max: Count = None,
) -> None:
    """Add a tenant and print its first token.

    Makes FILE, 0600, if there is none. For a tenant that is there, adds one more token, as of
    another role. Quotas that are given replace the tenant's; all others stay.
    """
    limits = _limits(locals())
    ttl_s = seconds_of(expires, "--expires") if expires is not None else None
    if token_file is not None and os.path.lexists(token_file) and not force:
        raise InvalidRequest(
            f"--token-file {token_file}: is there already, and may hold a token in use; name "
            "another file, or say --force"
        )

    def edit(book: TenantBook) -> tuple[TenantBook, str]:
        old = book.tenants[name].quota if name in book.tenants else Quota()
        book = book.with_tenant(name, replace(old, **limits))
        _check_shares(book, config)
        return book.with_token(name, role, time(), ttl_s)

    _edit_and_give_token(file, edit, token_file, create=True)


@tenant_app.command()
def quota(
    file: File,
    name: Name,
    host_bytes_share: Size = None,
    disk_bytes_share: Size = None,
    host_bytes_max: Size = None,
    disk_bytes_max: Size = None,
    pinned_pages_max: Count = None,
    reservations_max: Count = None,
    sessions_max: Count = None,
    calls_per_s_max: Count = None,
    config: ConfigFile = None,
) -> None:
    """Change a tenant's quota; what is not given stays. Servers hold it within seconds.

    A tenant above a new, lower bound gives pages up as it stores others.
    """
    limits = _limits(locals())

    def edit(book: TenantBook) -> TenantBook:
        if name not in book.tenants:
            raise InvalidRequest(no_tenant(name, book.tenants))
        if not limits:
            raise InvalidRequest("quota: nothing to change; `kvstore tenant quota --help`")
        changed = book.with_tenant(name, replace(book.tenants[name].quota, **limits))
        _check_shares(changed, config)
        return changed

    edit_tenants(file, edit, create=False)


@tenant_app.command()
def rotate(
    file: File,
    name: Name,
    role: RoleName = Role.WRITER,
    expires: Expires = None,
    grace: Annotated[str, typer.Option(help="How long older tokens of this role stay.")] = "10m",
    token_file: TokenFile = None,
) -> None:
    """Print a new token; the old ones end after --grace.

    Those of the same role, that is.
    """
    ttl_s = seconds_of(expires, "--expires") if expires is not None else None
    grace_s = seconds_of(grace, "--grace")

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
    """Take a tenant and its tokens out.

    Servers refuse them within seconds. Its pages stay until they are evicted: `kvstore evict DIR
    --tenant NAME --yes`; with `--erase-key`, where pages are encrypted, no copy of them can be read
    any more.
    """

    def edit(book: TenantBook) -> TenantBook:
        return book.without_tenant(name) if token is None else book.without_token(name, token)

    edit_tenants(file, edit, create=False)


@tenant_app.command("list")
def list_tenants(
    file: File,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    server: Annotated[
        str | None,
        typer.Option(help="Ask this running server what each has now: a directory or an address."),
    ] = None,
    server_token_file: Annotated[
        Path | None, typer.Option(help="A token to ask with; an admin's shows every tenant.")
    ] = None,
    ca: Annotated[Path | None, typer.Option(help="Certificates of the CA to believe, PEM.")] = None,
    cert: Annotated[Path | None, typer.Option(help="This client's certificate, PEM.")] = None,
    key: Annotated[Path | None, typer.Option(help="Its key, PEM.")] = None,
    insecure_network: Annotated[
        bool, typer.Option("--insecure-network", help="Talk to a network address without TLS.")
    ] = False,
    server_uid: Annotated[
        int | None, typer.Option(help="The user whose server to trust on a Unix socket.")
    ] = None,
) -> None:
    """Show tenants, their quotas, and tokens by id.

    A token itself is in no file.
    """
    book = load_tenants(file)
    access = ClientConfig(
        token_file=server_token_file,
        ca_file=ca,
        cert_file=cert,
        key_file=key,
        insecure_network=insecure_network,
        server_uid=server_uid,
    )
    now = _usage_at(server, access) if server is not None else {}
    tenants: list[dict[str, Any]] = []
    for tenant in book.tenants.values():
        tokens = [asdict(each) | {"expired": each.is_expired(time())} for each in tenant.tokens]
        for each in tokens:
            del each["digest"]
        entry = {"name": tenant.name, "quota": asdict(tenant.quota), "tokens": tokens}
        tenants.append(entry | ({"usage": now[tenant.name]} if tenant.name in now else {}))
    if json:
        typer.echo(json_library.dumps({"tenants": tenants}))
        return
    _show(tenants, time())
    if now:
        _show_usage(now)


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
    table = output.table_of("tenant", "role", "token", "created", "ends", "quota")
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
    output.console().print(table)


def _show_usage(now: dict[str, dict[str, Any]]) -> None:
    names = ("memory", "share", "disk", "share", "pinned", "sessions", "leased")
    table = output.table_of("tenant", *output.right(*names))
    for name, found in sorted(now.items()):
        size = {key: format_bytes(found[key] or 0) for key in _USED}
        table.add_row(
            name,
            size["host_bytes"],
            size["host_share_bytes"],
            size["disk_bytes"],
            size["disk_share_bytes"],
            str(found["pinned_pages"]),
            str(found["sessions"]),
            size["leased_bytes"],
        )
    output.console().print(table)


def _usage_at(server: str, access: ClientConfig) -> dict[str, dict[str, Any]]:
    """What each tenant has at a running server, by name."""
    from kvstore.client import RemoteStore  # grpc, which no other command of these needs

    with RemoteStore(parse_address(server), access) as store:
        found = store.stats().to_dict()["tenants"]
    return {each["tenant"]: each for each in found}


def _limits(given: dict[str, Any]) -> dict[str, int | None]:
    """The settings of a quota among a command's options, as far as they were given."""
    found: dict[str, int | None] = {}
    for each in fields(Quota):
        parse = _size if "_bytes_" in each.name else _count
        found |= _parsed(parse, each.name, given[each.name])
    return found


def _check_shares(book: TenantBook, config: Path | None) -> None:
    """Refuse shares that the server with these settings would refuse; a server always does."""
    if config is not None:
        from kvstore.config import load_config
        from kvstore.server_config import ServerConfig

        found = load_config({}, config, kind=ServerConfig)
        Tenancy.of(book.quotas, found.arena_bytes, found.disk_bytes)


def _ago(seconds: float) -> str:
    return f"{format_age(max(0.0, seconds))} ago"


def _end(token: dict[str, Any], wall_now: float) -> str:
    if token["expires"] is None:
        return "never"
    return "expired" if token["expired"] else f"in {format_age(token['expires'] - wall_now)}"


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
