"""The commands `kvstore pin` and `kvstore unpin`: keep a chain for a while, or no longer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from kvstore import cli_output as output
from kvstore.cli_directory import Place, is_here
from kvstore.cli_options import Chain, Json, seconds_of
from kvstore.errors import InvalidRequest

if TYPE_CHECKING:
    from kvstore.interface import OperatorLike


def pin(
    store: Place,
    chain: Chain,
    ttl: Annotated[str, typer.Option(help="For how long: 10m, 2h, 7d.")] = "1h",
    json: Json = False,
) -> None:
    """Keep a chain in the store for a while, however cold it gets.

    Pins end with the server that holds them, so a server has to.
    """
    seconds = seconds_of(ttl, "--ttl")
    if seconds <= 0:
        raise InvalidRequest(f"--ttl: {ttl} given; more than 0 s is needed, or `kvstore unpin`")
    pages = _ask(store, chain, seconds)
    if json:
        output.print_json({"pages": pages, "ttl_s": seconds})
        return
    stay = "stays" if pages == 1 else "stay"
    output.console().print(f"{output.counted(pages, 'page')} {stay} for {ttl}.")


def unpin(store: Place, chain: Chain, json: Json = False) -> None:
    """Take back the pins on a chain."""
    pages = _ask(store, chain, 0.0)
    if json:
        output.print_json({"pages": pages})
        return
    output.console().print(f"{output.counted(pages, 'page')} may leave again.")


def _ask(store: Place, chain: str, ttl_s: float) -> int:
    from kvstore.request import checked_chain_id

    digits = checked_chain_id(chain)
    with store.opened() as opened:
        _refuse_alone(opened)
        return opened.pin_chain(digits, ttl_s)


def _refuse_alone(opened: OperatorLike) -> None:
    if is_here(opened):
        raise InvalidRequest(
            "no server holds this directory, and pins end with the process that made them: "
            "`kvstore serve DIR` first"
        )
