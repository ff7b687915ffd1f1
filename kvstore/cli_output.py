"""What the commands print: a table for people, or one JSON document."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from kvstore import documents
from kvstore.policy_words import sentences
from kvstore.quantity import format_age, format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from rich.console import Console
    from rich.table import Table

    from kvstore.inspection import Chain, FoundChain, NamespaceUsage
    from kvstore.removal import Eviction
    from kvstore.store_stats import Stats

CHAIN_ID_DIGITS = 16
_REDIS_COUNTERS = ("pages_written", "pages_present", "dropped", "pages_read")


def show_listing(
    spaces: Sequence[NamespaceUsage], chains: Sequence[Chain], total: int, *, as_json: bool
) -> None:
    """`kvstore ls`."""
    if as_json:
        print_json(documents.listing(spaces, chains, total))
        return
    out = console()
    if not spaces:
        out.print("The store is empty.")
        return
    table = table_of("namespace", "tenant", "model", *_RIGHT_SPACES)
    for space in spaces:
        table.add_row(
            space.namespace[:CHAIN_ID_DIGITS],
            space.tenant,
            space.model,
            *map(str, (space.chains, space.pages)),
            format_bytes(space.payload_bytes),
            *map(str, (space.host_pages, space.disk_pages)),
        )
    out.print(table)
    several = len({space.tenant for space in spaces}) > 1
    table = table_of("chain", *(("tenant",) if several else ()), "model", *_RIGHT_CHAINS, "writer")
    for chain in chains:
        table.add_row(
            chain.chain_id[:CHAIN_ID_DIGITS],
            *((chain.tenant,) if several else ()),
            chain.model,
            *map(str, (chain.pages, chain.tokens)),
            format_bytes(chain.payload_bytes),
            *map(str, (chain.host_pages, chain.disk_pages, chain.hits)),
            format_age(chain.age_s),
            chain.writer,
        )
    out.print(table)
    if total > len(chains):
        out.print(f"{counted(total - len(chains), 'more chain')}; --limit shows them.")


def show_stats(found: Stats, *, as_json: bool) -> None:
    """`kvstore stats`."""
    if as_json:
        print_json(found.to_dict())
        return
    out = console()
    table = table_of("tier", *right("pages", "used", "allocated", "capacity"), "state")
    for tier in found.tiers:
        table.add_row(
            tier.name,
            str(tier.pages),
            format_bytes(tier.used_bytes),
            format_bytes(tier.allocated_bytes),
            format_bytes(tier.capacity_bytes),
            tier.state,
        )
    out.print(table)
    if any(tier.name == "redis" for tier in found.tiers):
        out.print(_redis_line(found.counters))
    if found.encryption != "off":
        out.print(f"encryption at rest: {found.encryption}")
    out.print(
        f"{found.pages} pages in {found.trees} trees; the index takes "
        f"{format_bytes(found.index_bytes)}. The arena and the counters begin with the process "
        "that opens the store: --json shows them."
    )
    if found.counters.get("disk_bytes_written"):
        out.print(
            f"{format_bytes(found.counters['disk_bytes_written'])} written to disk since the "
            f"start, {format_bytes(round(found.disk_bytes_per_hit))} for each page that hit; "
            f"{found.counters['pages_not_admitted']} pages were not admitted to it."
        )
    place = "disk" if any(tier.name == "disk" for tier in found.tiers) else "memory"
    for sentence in sentences(found.policy, place):
        out.print(sentence)
    if found.service:
        out.print(
            f"A server holds it: {found.service.get('sessions', 0)} sessions with "
            f"{found.service.get('matches', 0)} matches and "
            f"{found.service.get('reservations', 0)} reservations."
        )
        if found.service.get("warning"):
            out.print(f"warning: {found.service['warning']}")


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
        print_json({"done": done})
    elif done:
        console().print("All that was committed is on disk.")
    else:
        console().print("Not all of it is on disk yet; --deadline waits for longer.")


def show_chain(found: FoundChain, *, as_json: bool) -> None:
    """`kvstore inspect`."""
    if as_json:
        print_json(found.to_dict())
        return
    chain, out = found.chain, console()
    out.print(
        f"chain {chain.chain_id}: {counted(chain.pages, 'page')}, {chain.tokens} tokens, "
        f"{format_bytes(chain.payload_bytes)}, tenant {chain.tenant}, model {chain.model}"
    )
    out.print(f"namespace {chain.namespace}")
    if found.spec:
        shown = {key: value for key, value in found.spec.items() if key != "groups"}
        out.print("spec " + ", ".join(f"{key}={value}" for key, value in shown.items()))
    table = table_of("page", "key", "tiers", *right("size", "first token", "hits"), "checksum")
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
    out.print(table)


def show_eviction(done: Eviction, *, as_json: bool) -> None:
    """`kvstore evict`."""
    if as_json:
        print_json(asdict(done))
        return
    what = f"{counted(done.pages, 'page')} of {counted(done.chains, 'chain')}"
    what = f"{what}, {format_bytes(done.payload_bytes)}"
    kept = done.kept_leased + done.kept_pinned
    out = console()
    if not (done.pages or kept or done.kept_above):
        out.print("Nothing to evict: no page fits that.")
    elif done.dry_run:
        out.print(f"Dry run: {what} would go. Add --yes to do it.")
    else:
        out.print(f"Evicted {what}.")
        if done.redis_pages:
            out.print(f"{done.redis_pages} of them were deleted in Redis too.")
    if kept:
        out.print(f"{done.kept_leased} pages stay (in use), {done.kept_pinned} (pinned).")
    if done.kept_above:
        out.print(f"{done.kept_above} pages stay: pages below them are in the other tier.")


def counted(number: int, noun: str) -> str:
    """A number with its noun: 1 page, 2 pages."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def right(*names: str) -> tuple[str, ...]:
    """Names of columns of numbers, for table_of()."""
    return tuple(f">{name}" for name in names)


_RIGHT_SPACES = right("chains", "pages", "size", "in host", "on disk")
_RIGHT_CHAINS = right("pages", "tokens", "size", "in host", "on disk", "hits", "age")


def console() -> Console:
    """Stdout, as cli_console.py makes it."""
    from kvstore import cli_console

    return cli_console.console()


def table_of(*columns: str) -> Table:
    """A plain table; a name that begins with ">" is a column of numbers."""
    from kvstore import cli_console

    table = cli_console.plain_table()
    for name in columns:
        number = name.startswith(">")
        table.add_column(name.lstrip(">"), justify="right" if number else "left", no_wrap=number)
    return table


def print_json(document: dict[str, Any]) -> None:
    """One document, one line, on stdout."""
    sys.stdout.write(documents.to_json(document) + "\n")


@contextmanager
def progress(what: str, unit: str = "pages") -> Iterator[Callable[[float, float], None]]:
    """A bar on stderr for people who look at one: call it with how much is done, and of how much.

    Nothing where stderr is no terminal.
    """
    from kvstore import cli_console

    screen = cli_console.screen(stderr=True)
    if not screen.is_terminal:
        yield lambda done, total: None
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[said]}"))
    with Progress(*columns, TimeRemainingColumn(), console=screen, transient=True) as bar:
        task = bar.add_task(what, total=None, said="")

        def show(done: float, total: float) -> None:
            if unit == "bytes":
                said = format_bytes(int(done)) + (
                    f" of {format_bytes(int(total))}" if total else ""
                )
            else:
                said = f"{done:.0f} of {total:.0f} {unit}"
            bar.update(task, completed=done, total=total or None, said=said)

        yield show
