"""The command `kvstore tree`: the radix trees, folded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from kvstore import cli_output as output
from kvstore import cli_prompt as prompt
from kvstore.cli_directory import Place
from kvstore.cli_options import Json, Namespace, Tokenizer
from kvstore.quantity import format_bytes
from kvstore.wire import BRANCHES_MAX

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.tree import Tree

    from kvstore.tree_view import Branch, TreeView

TEXT_CHARS = 60
TOKENS_SHOWN = 6


def tree(
    store: Place,
    namespace: Namespace = None,
    tenant: Annotated[str | None, typer.Option(help="Only this tenant's trees.")] = None,
    depth: Annotated[
        int | None, typer.Option(min=1, max=1 << 20, help="How many forks deep.")
    ] = None,
    limit: Annotated[
        int, typer.Option(min=1, max=BRANCHES_MAX, help="How many branches at most.")
    ] = 200,
    tokenizer: Tokenizer = None,
    json: Json = False,
) -> None:
    """Show the radix trees: what prompts share, and where they part.

    A run of pages without a fork is one line: its pages, size, hits and first tokens; with
    --tokenizer as text.
    """
    with store.opened() as opened:
        space = prompt.namespace_prefix(opened, namespace)
        if tenant is not None:
            prompt.check_tenant(opened, tenant)
        found = opened.tree(tenant=tenant, namespace=space, depth=depth, branches=limit)
    if json:
        output.print_json({"trees": [each.to_dict() for each in found]})
        return
    out, decode = output.console(), prompt.text_decoder(tokenizer)
    if not found:
        out.print("The store is empty.")
    for each in found:
        out.print(_drawn(each, decode))
        if each.is_cut:
            out.print("There are more branches; --limit shows them, --depth folds deeper ones.")


def _drawn(view: TreeView, decode: Callable[[list[int]], str] | None) -> Tree:
    from rich.text import Text as Words
    from rich.tree import Tree

    top = Tree(
        Words(
            f"{view.namespace[: output.CHAIN_ID_DIGITS]} {view.model}, tenant {view.tenant}: "
            f"{view.pages} pages of {view.page_tokens} tokens"
        )
    )
    line = [top]  # the branch last drawn at each depth
    for branch in view.branches:
        del line[branch.depth + 1 :]
        line.append(line[-1].add(Words(_line(branch, view.page_tokens, decode))))
    return top


def _line(branch: Branch, page_tokens: int, decode: Callable[[list[int]], str] | None) -> str:
    if decode is not None:
        head = repr(decode(list(branch.tokens_head)))
        head = head if len(head) <= TEXT_CHARS else head[:TEXT_CHARS] + "..."
    else:
        head = " ".join(map(str, branch.tokens_head[:TOKENS_SHOWN])) + " ..."
    first, last = branch.first_page, branch.first_page + branch.pages - 1
    where = f"page {first}" if first == last else f"pages {first}-{last}"
    parts = [
        f"{where}, {branch.pages * page_tokens} tokens, {format_bytes(branch.payload_bytes)}",
        f"{branch.host_pages} in memory, {branch.disk_pages} on disk",
        f"{branch.hits} hits",
    ]
    if branch.pinned:
        parts.append("pinned")
    if branch.folded_pages:
        parts.append(f"{branch.folded_pages} pages folded below")
    return f"{branch.chain_id[: output.CHAIN_ID_DIGITS]}  {', '.join(parts)}: {head}"
