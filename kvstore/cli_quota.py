"""The command `kvstore quota`: what each tenant has, beside what it may have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvstore import cli_output as output
from kvstore.cli_directory import Place, is_here
from kvstore.cli_options import Json
from kvstore.quantity import format_bytes

if TYPE_CHECKING:
    from kvstore.interface import OperatorLike


def quota(store: Place, json: Json = False) -> None:
    """Show each tenant's bytes, shares and bounds. `kvstore tenant quota` changes them."""
    with store.opened() as opened:
        found = _usages(opened)
    if json:
        output.print_json({"tenants": found})
        return
    out = output.console()
    if not found:
        out.print("No tenant has pages or a quota.")
        return
    names = output.right("pages", "memory", "share", "disk", "share", "pinned")
    table = output.table_of("tenant", *names, "bounds")
    for each in found:
        bounds = " ".join(f"{key}={value}" for key, value in each["quota"].items())
        table.add_row(
            each["tenant"],
            str(each["pages"]),
            format_bytes(each["host_bytes"]),
            _share(each["host_share_bytes"]),
            format_bytes(each["disk_bytes"]),
            _share(each["disk_share_bytes"]),
            str(each["pinned_pages"]),
            bounds,
        )
    out.print(table)


def _usages(opened: OperatorLike) -> list[dict[str, Any]]:
    if is_here(opened):
        return [each.to_dict() for each in opened.tenant_usages()]
    return list(opened.stats().tenants)


def _share(size: int | None) -> str:
    return "-" if size is None else format_bytes(size)
