"""`kvstore cert`: a small CA, a server certificate and client certificates, for mTLS."""

from __future__ import annotations

import json as json_library
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvstore.errors import ConfigError, InvalidRequest
from kvstore.tenants import role_of

if TYPE_CHECKING:
    from kvstore.identity import Role

Folder = Annotated[
    Path, typer.Argument(help="Where the files are and go.", metavar="DIR", show_default=False)
]
Clients = Annotated[
    list[str] | None,
    typer.Option(
        "--client", help="A client certificate, TENANT:ROLE; can be repeated.", metavar="T:R"
    ),
]


def cert(
    folder: Folder,
    host: Annotated[
        list[str] | None,
        typer.Option(help="A name or address of the server; can be repeated. Default: localhost."),
    ] = None,
    client: Clients = None,
    days: Annotated[int, typer.Option(help="How long the certificates are valid.")] = 90,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Make the certificates of a server and its clients.

    And a CA for them, if DIR has none.
    Running it again renews them under the same CA. With --client and no --host only clients'
    certificates are made where the server has one. Keep ca.key off the servers.
    """
    from kvstore.certificates import (  # needs an extra that the other commands do not
        Authority,
        check_request,
    )

    wanted = [_tenant_and_role(text) for text in client or []]
    hosts = host or ["localhost", "127.0.0.1", "::1"]
    check_request(hosts, wanted, days)  # before a CA is made
    authority = Authority.load_or_create(folder)
    made = []
    if host or not wanted or not (folder / "server.key").exists():
        made.append(authority.issue_server(hosts, days))
    made += [authority.issue_client(tenant, role, days) for tenant, role in wanted]
    paths = [folder / "ca.pem", *(path for each in made for path in (each.certificate, each.key))]
    if json:
        typer.echo(json_library.dumps({"files": [str(path) for path in paths]}))
        return
    for path in paths:
        typer.echo(path)


def _tenant_and_role(text: str) -> tuple[str, Role]:
    tenant, colon, role = text.partition(":")
    if not colon:
        raise InvalidRequest(f"--client: {text[:80]!r} given; write TENANT:ROLE, as acme:writer")
    try:
        return tenant, role_of(role)
    except ConfigError as exc:
        raise InvalidRequest(f"--client: {exc}") from None
