"""The command `kvstore explain`: why would this prompt hit or miss."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003  # typer looks at the annotations
from typing import TYPE_CHECKING, Annotated

import typer

from kvstore import cli_output as output
from kvstore import cli_prompt as prompt
from kvstore.cli_directory import Place
from kvstore.cli_options import (
    AllTenants,
    Extras,
    Json,
    Namespace,
    Salt,
    Tenant,
    Text,
    TextFile,
    Tokenizer,
    Tokens,
    TokensFile,
)
from kvstore.errors import InvalidRequest, SpecError
from kvstore.quantity import format_age
from kvstore.spec import SPEC_JSON_BYTES_MAX, CacheSpec

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.explanation import Elsewhere, Explanation

EMPTY = "holds no tokens, so there is nothing to explain: as 1,2,3 or a JSON list of token ids"
VALUE_CHARS_MAX = 40
DIFFERENCES_MAX = 8  # shown of one namespace


def explain(
    store: Place,
    tokens: Tokens = None,
    tokens_file: TokensFile = None,
    text: Text = None,
    text_file: TextFile = None,
    tokenizer: Tokenizer = None,
    extras: Extras = None,
    namespace: Namespace = None,
    spec: Annotated[
        Path | None, typer.Option(help="A file with the spec, as JSON, instead of --namespace.")
    ] = None,
    tenant: Tenant = None,
    salt: Salt = None,
    all_tenants: AllTenants = True,
    json: Json = False,
) -> None:
    """Say why a prompt hits or misses.

    Its longest match, the first differing token, pages that were here and why they left, and the
    fields that differ where more of it is stored.
    """
    asked = prompt.read(tokens, tokens_file, text, text_file, tokenizer, empty=EMPTY)
    if asked is None:
        raise InvalidRequest("give a prompt: --tokens, --tokens-file, --text or --text-file")
    more = prompt.read_extras(extras)
    if spec is not None and namespace is not None:
        raise InvalidRequest("give --namespace or --spec: a spec names its namespace")
    meant = _spec_in(spec) if spec is not None else None
    with store.opened() as opened:
        tenant = prompt.choose_tenant(opened, tenant)
        if meant is not None:
            space = meant.namespace
        else:
            space = prompt.choose_namespace(opened, namespace, tenant, known_only=False)
        found = opened.explain(
            asked,
            namespace=space,
            tenant=tenant,
            extras=more,
            salt=prompt.read_salt(salt),
            spec_json=meant.to_json() if meant is not None else None,
            all_tenants=all_tenants,
        )
    _show(found, prompt.decoder(tokenizer), as_json=json)


def _spec_in(file: Path) -> CacheSpec:
    try:
        return CacheSpec.from_json(prompt.read_file(file, SPEC_JSON_BYTES_MAX))
    except SpecError as exc:
        raise InvalidRequest(f"--spec {file}: {exc}") from exc


def _show(found: Explanation, decode: Callable[[int], str] | None, *, as_json: bool) -> None:
    if as_json:
        output.print_json(found.to_dict())
        return
    from kvstore.ghost_list import Left

    out = output.console()
    out.print(found.verdict)
    out.print(
        f"prompt: {found.prompt_tokens} tokens, {found.prompt_pages} whole pages; matched: "
        f"{found.matched_tokens} tokens, {found.matched_pages} pages "
        f"({found.host_pages} in memory, {found.disk_pages} on disk)"
    )
    if found.differs_at is not None:
        here, there = str(found.prompt_token), str(found.stored_token)
        if decode is not None and found.prompt_token is not None:
            here += f" {decode(found.prompt_token)}"
        if decode is not None and found.stored_token is not None:
            there += f" {decode(found.stored_token)}"
        out.print(f"token {found.differs_at}: the prompt has {here}, the store has {there}")
    for each in found.departed:
        last = each.first_page + each.pages - 1
        which = f"page {last}" if each.pages == 1 else f"pages {each.first_page} to {last}"
        media = " and ".join(each.tiers)
        words = Left[each.why.upper()].words
        out.print(f"{which}: here until {format_age(each.ago_s)} ago, in {media}; {words}")
    for other in found.elsewhere:
        out.print(_elsewhere_line(other))


def _elsewhere_line(other: Elsewhere) -> str:
    fields = [
        f"{each.field}: {_short(each.here)} here, {_short(each.there)} there"
        for each in other.differs[:DIFFERENCES_MAX]
    ]
    if len(other.differs) > DIFFERENCES_MAX:
        fields.append(f"and {len(other.differs) - DIFFERENCES_MAX} fields more")
    return (
        f"namespace {other.namespace[: output.CHAIN_ID_DIGITS]} ({other.model}, tenant "
        f"{other.tenant}) has {other.matched_tokens} tokens of this prompt; "
        + "; ".join(fields or ["nothing else is known of it"])
    )


def _short(text: str) -> str:
    return text if len(text) <= VALUE_CHARS_MAX else text[: VALUE_CHARS_MAX - 3] + "..."
