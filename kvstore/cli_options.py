"""Options that several commands have, said once; sizes and durations, refused by their option."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvstore.errors import ConfigError, InvalidRequest
from kvstore.quantity import parse_bytes, parse_duration
from kvstore.wire import CHAINS_MAX

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of a table.")]
Limit = Annotated[int, typer.Option(min=1, max=CHAINS_MAX, help="How many rows at most.")]
Sort = Annotated[
    str,
    typer.Option(help="size, age, idle, hits, or host or disk: pages there.", metavar="ORDER"),
]
Salt = Annotated[
    str | None,
    typer.Option(
        help="The salt that the prompt came with (vLLM: cache_salt); hex:DIGITS for bytes.",
        metavar="TEXT",
    ),
]
Chain = Annotated[
    str, typer.Argument(help="Hex digits that begin a chain's id; see `ls`.", metavar="CHAIN")
]
Namespace = Annotated[
    str | None, typer.Option(help="Hex digits that begin the namespace's name; see `ls`.")
]
Tenant = Annotated[
    str | None,
    typer.Option(help="Whose pages; by default the only tenant's that has any, else default's."),
]
Tokens = Annotated[
    str | None, typer.Option("--tokens", help="Token ids of a prompt: 1,2,3", metavar="IDS")
]
TokensFile = Annotated[
    Path | None,
    typer.Option("--tokens-file", help="A file with token ids: JSON list, or numbers; - is stdin."),
]
Extras = Annotated[
    str | None,
    typer.Option("--extras", help='Extras of the prompt: {"PAGE": "HEX"}.', metavar="JSON"),
]
Text = Annotated[str | None, typer.Option("--text", help="A prompt as text; needs --tokenizer.")]
TextFile = Annotated[
    Path | None, typer.Option("--text-file", help="A file with a prompt; needs --tokenizer.")
]
Tokenizer = Annotated[
    Path | None, typer.Option("--tokenizer", help="tokenizer.json, or a folder that holds one.")
]
AllTenants = Annotated[
    bool, typer.Option(help="Look for the prompt among other tenants' pages too.")
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do it, whatever it is.")]


def seconds_of(text: str, option: str) -> float:
    """A duration as it was given for an option; InvalidRequest, which names the option."""
    try:
        return parse_duration(text)
    except ConfigError as exc:
        raise InvalidRequest(f"{option}: {exc}") from None


def bytes_of(text: str, option: str) -> int:
    """A size, in the same way."""
    try:
        return parse_bytes(text)
    except ConfigError as exc:
        raise InvalidRequest(f"{option}: {exc}") from None
