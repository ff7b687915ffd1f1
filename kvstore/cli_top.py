"""The command `kvstore top`: what happens in a store, live, until Ctrl-C."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvstore import cli_output as output
from kvstore.cli_directory import Place
from kvstore.cli_options import Json, seconds_of
from kvstore.quantity import format_bytes

if TYPE_CHECKING:
    from rich.console import RenderableType

    from kvstore.interface import OperatorLike
    from kvstore.store_stats import Stats

CHAINS = 10
_RATES = ("lookups", "lookup_hits", "lookup_tokens", "hit_tokens", "pages_committed")
_MORE = ("pages_staged", "disk_pages_written", "host_evictions", "disk_evictions")
_LEFT = ("left_", "missed_")


def top(
    store: Place,
    interval: Annotated[str, typer.Option(help="How often to look: 1s, 5s.")] = "2s",
    count: Annotated[
        int | None, typer.Option(min=1, help="How often at all; until Ctrl-C without it.")
    ] = None,
    json: Json = False,
) -> None:
    """Show hits, bytes, evictions and busy chains, live.

    With --json, or into a pipe, one document or block each time.
    """
    from rich.live import Live

    from kvstore import cli_console

    wait_s = max(0.1, seconds_of(interval, "--interval"))
    before: Stats | None = None
    screen = cli_console.screen()
    is_live = screen.is_terminal and not json
    with store.opened() as opened, Live(console=screen, auto_refresh=False) as live:
        if not is_live:
            live.stop()
        seen = 0
        started_s = time.monotonic()
        while count is None or seen < count:
            if seen:
                time.sleep(wait_s)
            stats, now_s = opened.stats(), time.monotonic()
            rates = _rates(before, stats, now_s - started_s)
            if json:
                output.print_json({"rates": rates, "stats": stats.to_dict()})
            elif is_live:
                live.update(_page(opened, stats, rates), refresh=True)
            else:
                output.console().print(_page(opened, stats, rates))
            before, started_s, seen = stats, now_s, seen + 1


def _rates(before: Stats | None, now: Stats, seconds: float) -> dict[str, float]:
    """Counters a second since the last look; none at the first."""
    if before is None or seconds <= 0:
        return {}
    names = [*_RATES, *_MORE, *(name for name in now.counters if name.startswith(_LEFT))]
    return {name: (now.counters[name] - before.counters[name]) / seconds for name in names}


def _page(opened: OperatorLike, stats: Stats, rates: dict[str, float]) -> RenderableType:
    from rich.console import Group
    from rich.text import Text as Words

    tiers = output.table_of("tier", *output.right("pages", "used", "capacity", "full"), "state")
    for tier in stats.tiers:
        full = tier.used_bytes / tier.capacity_bytes if tier.capacity_bytes else 0.0
        used, most = format_bytes(tier.used_bytes), format_bytes(tier.capacity_bytes)
        tiers.add_row(tier.name, str(tier.pages), used, most, f"{full:.0%}", tier.state)
    chains = output.table_of("chain", "model", *output.right("pages", "hits", "idle"), "writer")
    for chain in opened.chains(limit=CHAINS, sort="hits")[0]:
        chains.add_row(
            chain.chain_id[: output.CHAIN_ID_DIGITS],
            chain.model,
            *map(str, (chain.pages, chain.hits)),
            f"{chain.idle_s:.0f}s",
            chain.writer,
        )
    return Group(Words(_headline(stats, rates)), tiers, Words(_why(rates)), chains)


def _headline(stats: Stats, rates: dict[str, float]) -> str:
    service: dict[str, Any] = stats.service
    parts = [f"{stats.pages} pages", f"{format_bytes(stats.dirty_bytes)} wait for the disk"]
    if service:
        parts.append(f"{service.get('sessions', 0)} sessions")
    if rates:
        asked, hit = rates["lookup_tokens"], rates["hit_tokens"]
        ratio = hit / asked if asked else 0.0
        parts.append(f"{rates['lookups']:.1f} look-ups/s, {ratio:.0%} of {asked:.0f} tokens/s hit")
        parts.append(f"{rates['pages_committed']:.1f} pages/s stored")
    return ", ".join(parts)


def _why(rates: dict[str, float]) -> str:
    left = {name: rate for name, rate in rates.items() if name.startswith(_LEFT) and rate}
    if not left:
        return "nothing leaves"
    return ", ".join(f"{name.replace('_', ' ')} {rate:.1f}/s" for name, rate in left.items())
