"""What the commands print: a table for people, or one JSON document."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from kvstore import documents
from kvstore.quantity import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstore.inspection import Chain, Explanation, FoundChain, NamespaceUsage
    from kvstore.removal import Eviction
    from kvstore.store_stats import Stats

CHAIN_ID_DIGITS = 16
_REDIS_COUNTERS = ("pages_written", "pages_present", "dropped", "pages_read")


def show_listing(
    spaces: Sequence[NamespaceUsage], chains: Sequence[Chain], total: int, *, as_json: bool
) -> None:
    """`kvstore ls`."""
    if as_json:
        _json(documents.listing(spaces, chains, total))
        return
    console = _console()
    if not spaces:
        console.print("The store is empty.")
        return
    table = _table("namespace", "tenant", "model", *_RIGHT_SPACES)
    for space in spaces:
        table.add_row(
            space.namespace[:CHAIN_ID_DIGITS],
            space.tenant,
            space.model,
            *map(str, (space.chains, space.pages)),
            format_bytes(space.payload_bytes),
            *map(str, (space.host_pages, space.disk_pages)),
        )
    console.print(table)
    several = len({space.tenant for space in spaces}) > 1
    table = _table("chain", *(("tenant",) if several else ()), "model", *_RIGHT_CHAINS, "writer")
    for chain in chains:
        table.add_row(
            chain.chain_id[:CHAIN_ID_DIGITS],
            *((chain.tenant,) if several else ()),
            chain.model,
            *map(str, (chain.pages, chain.tokens)),
            format_bytes(chain.payload_bytes),
            *map(str, (chain.host_pages, chain.disk_pages, chain.hits)),
            age(chain.age_s),
            chain.writer,
        )
    console.print(table)
    if total > len(chains):
        console.print(f"{total - len(chains)} more chains; --limit shows them.")


def show_stats(found: Stats, *, as_json: bool) -> None:
    """`kvstore stats`."""
    if as_json:
        _json(found.to_dict())
        return
    console = _console()
    table = _table("tier", *_right("pages", "used", "allocated", "capacity"), "state")
    for tier in found.tiers:
        table.add_row(
            tier.name,
            str(tier.pages),
            format_bytes(tier.used_bytes),
            format_bytes(tier.allocated_bytes),
            format_bytes(tier.capacity_bytes),
            tier.state,
        )
    console.print(table)
    if any(tier.name == "redis" for tier in found.tiers):
        console.print(_redis_line(found.counters))
    if found.encryption != "off":
        console.print(f"encryption at rest: {found.encryption}")
    console.print(
        f"{found.pages} pages in {found.trees} trees; the index takes "
        f"{format_bytes(found.index_bytes)}. The arena and the counters begin with the process "
        "that opens the store: --json shows them."
    )
    if found.service:
        console.print(
            f"A server holds it: {found.service.get('sessions', 0)} sessions with "
            f"{found.service.get('matches', 0)} matches and "
            f"{found.service.get('reservations', 0)} reservations."
        )
        if found.service.get("warning"):
            console.print(f"warning: {found.service['warning']}")


def _redis_line(counters: dict[str, int]) -> str:
    number = {name: counters.get(f"redis_{name}", 0) for name in _REDIS_COUNTERS}
    return (
        "redis: the row shows this process's handles to pages there, not what Redis holds; since "
        f"the start {number['pages_written']} pages written, {number['pages_present']} there "
        f"already, {number['dropped']} not written, {number['pages_read']} read."
    )


def show_flush(done: bool, *, as_json: bool) -> None:
    """`kvstore flush`."""
    if as_json:
        _json({"done": done})
    elif done:
        _console().print("All that was committed is on disk.")
    else:
        _console().print("Not all of it is on disk yet; --deadline waits for longer.")


def show_chain(found: FoundChain, *, as_json: bool) -> None:
    """`kvstore inspect`."""
    if as_json:
        _json(found.to_dict())
        return
    chain, console = found.chain, _console()
    console.print(
        f"chain {chain.chain_id}: {chain.pages} pages, {chain.tokens} tokens, "
        f"{format_bytes(chain.payload_bytes)}, tenant {chain.tenant}, model {chain.model}"
    )
    console.print(f"namespace {chain.namespace}")
    if found.spec:
        shown = {key: value for key, value in found.spec.items() if key != "groups"}
        console.print("spec " + ", ".join(f"{key}={value}" for key, value in shown.items()))
    table = _table("page", "key", "tiers", *_right("size", "first token", "hits"), "checksum")
    for page in found.pages:
        table.add_row(
            str(page.page_index),
            page.key[:CHAIN_ID_DIGITS],
            "+".join(page.tiers),
            format_bytes(page.payload_bytes),
            str(page.first_token),
            str(page.hits),
            page.checksum[:CHAIN_ID_DIGITS],
        )
    console.print(table)


def show_explanation(
    found: Explanation, decode: Callable[[int], str] | None, *, as_json: bool
) -> None:
    """`kvstore explain`."""
    if as_json:
        _json(found.to_dict())
        return
    console = _console()
    console.print(found.verdict)
    console.print(
        f"prompt: {found.prompt_tokens} tokens, {found.prompt_pages} whole pages; matched: "
        f"{found.matched_tokens} tokens, {found.matched_pages} pages "
        f"({found.host_pages} in memory, {found.disk_pages} on disk)"
    )
    if found.differs_at is not None:
        assert found.prompt_token is not None
        assert found.stored_token is not None
        here, there = str(found.prompt_token), str(found.stored_token)
        if decode is not None:
            here += f" {decode(found.prompt_token)}"
            there += f" {decode(found.stored_token)}"
        console.print(f"token {found.differs_at}: the prompt has {here}, the store has {there}")
    for namespace in found.other_namespaces:
        console.print(f"namespace {namespace[:CHAIN_ID_DIGITS]} has more of this prompt")


def show_eviction(done: Eviction, *, as_json: bool) -> None:
    """`kvstore evict`."""
    if as_json:
        _json(asdict(done))
        return
    what = f"{done.pages} pages of {done.chains} chains, {format_bytes(done.payload_bytes)}"
    kept = done.kept_leased + done.kept_pinned
    console = _console()
    if done.dry_run:
        console.print(f"Dry run: {what} would go. Add --yes to do it.")
    else:
        console.print(f"Evicted {what}.")
        if done.redis_pages:
            console.print(f"{done.redis_pages} of them were deleted in Redis too.")
    if kept:
        console.print(f"{done.kept_leased} pages stay (in use), {done.kept_pinned} (pinned).")


def age(seconds: float) -> str:
    """A duration as people say it: 5s, 12m, 3h, 4d."""
    for unit, size in (("d", 86_400), ("h", 3_600), ("m", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f}{unit}"
    return f"{seconds:.0f}s"


def _right(*names: str) -> tuple[str, ...]:
    return tuple(f">{name}" for name in names)


_RIGHT_SPACES = _right("chains", "pages", "size", "in host", "on disk")
_RIGHT_CHAINS = _right("pages", "tokens", "size", "in host", "on disk", "hits", "age")


def _console() -> Console:
    """Colours and width as the terminal has them; plain and wide into a pipe."""
    console = Console(highlight=False, markup=False)
    return console if console.is_terminal else Console(highlight=False, markup=False, width=160)


def _table(*columns: str) -> Table:
    """A plain table; a name that begins with ">" is a column of numbers."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in columns:
        right = name.startswith(">")
        table.add_column(name.lstrip(">"), justify="right" if right else "left", no_wrap=right)
    return table


def _json(document: dict[str, Any]) -> None:
    _console().file.write(documents.to_json(document) + "\n")
