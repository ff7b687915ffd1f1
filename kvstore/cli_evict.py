"""The command `kvstore evict`: chains by prefix, namespace, tenant, writer, age or tier."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Annotated

import typer

from kvstore import cli_output as output
from kvstore import cli_prompt as prompt
from kvstore.cli_directory import Place
from kvstore.cli_options import (
    Extras,
    Json,
    Namespace,
    Text,
    TextFile,
    Tokenizer,
    Tokens,
    TokensFile,
    Yes,
    seconds_of,
)
from kvstore.errors import InvalidRequest

if TYPE_CHECKING:
    from kvstore.interface import OperatorLike
    from kvstore.removal import Selection

CHAINS_LOOKED_AT = 10_000  # for their writers


def evict(
    store: Place,
    namespace: Namespace = None,
    tenant: Annotated[str | None, typer.Option(help="Only this tenant's pages.")] = None,
    writer: Annotated[str | None, typer.Option(help="Only what this writer stored.")] = None,
    older_than: Annotated[
        str | None, typer.Option(help="Only what was stored longer ago: 90s, 10m, 2h, 7d.")
    ] = None,
    tier: Annotated[
        str | None,
        typer.Option(
            help="Only from there: host or disk. Pages that are nowhere else are gone.",
            metavar="TIER",
        ),
    ] = None,
    tokens: Tokens = None,
    tokens_file: TokensFile = None,
    text: Text = None,
    text_file: TextFile = None,
    tokenizer: Tokenizer = None,
    extras: Extras = None,
    everything: Annotated[bool, typer.Option("--all", help="All pages of the store.")] = False,
    include_pinned: Annotated[
        bool, typer.Option("--include-pinned", help="Pinned pages too.")
    ] = False,
    erase_key: Annotated[
        bool, typer.Option("--erase-key", help="Delete the tenant's key too; needs --tenant alone.")
    ] = False,
    yes: Yes = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    json: Json = False,
) -> None:
    """Evict chains by prefix, namespace, tenant, writer, age or tier.

    A dry run when more than one chain would go, unless --yes is given.
    """
    from kvstore.removal import Selection

    if erase_key and tenant is None:
        raise InvalidRequest("--erase-key: whose key? It needs --tenant, and no other selection")
    asked = prompt.read(tokens, tokens_file, text, text_file, tokenizer)
    more = prompt.read_extras(extras)
    older_than_s = seconds_of(older_than, "--older-than") if older_than is not None else None
    with store.opened() as opened:
        if asked is None:
            space = prompt.namespace_prefix(opened, namespace)
        else:
            tenant = "default" if tenant is None else tenant
            space = prompt.choose_namespace(opened, namespace, tenant)
        selection = Selection(
            tenant=tenant,
            namespace=space,
            prefix=asked,
            extras=more,
            writer=writer,
            older_than_s=older_than_s,
            everything=everything,
            tier=tier,
        )
        evict_now = functools.partial(
            opened.evict, selection, include_pinned=include_pinned, erase_key=erase_key
        )
        only_say = dry_run or (erase_key and not yes)
        done = evict_now(dry_run=only_say or not yes)
        if done.dry_run and not only_say and done.pages > 0 and done.chains <= 1:
            done = evict_now(dry_run=False)
        if not (done.pages or done.kept_leased or done.kept_pinned or erase_key):
            _refuse_what_is_not_here(opened, selection)
    output.show_eviction(done, as_json=json)


def _refuse_what_is_not_here(opened: OperatorLike, selection: Selection) -> None:
    """InvalidRequest for a tenant, writer or prompt that nothing here has; an age may fit none."""
    if selection.tenant is not None:
        prompt.check_tenant(opened, selection.tenant)
    if selection.writer is not None:
        chains, _ = opened.chains(limit=CHAINS_LOOKED_AT)
        writers = {each.writer for each in chains} - {""}
        if not chains:
            raise InvalidRequest("the store is empty: nobody has stored what is here")
        if not writers:
            raise InvalidRequest(
                f"writer {selection.writer} has stored nothing that is here; no page here has a "
                "writer's name"
            )
        if selection.writer not in writers:
            raise InvalidRequest(
                f"writer {selection.writer} has stored nothing that is here; "
                + prompt.did_you_mean(selection.writer, writers)
            )
    if selection.prefix is not None and selection.older_than_s is None and selection.tier is None:
        extras = " and these extras" if selection.extras else ""
        raise InvalidRequest(
            f"no prompt here begins with these {len(selection.prefix)} tokens{extras}; "
            "`kvstore explain` says where they part from what is stored"
        )
