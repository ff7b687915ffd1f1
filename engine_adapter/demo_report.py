"""What the demo leaves behind: a table for the terminal and a small SVG for a page."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from datetime import date
from html import escape
from pathlib import Path

from rich.table import Table

BAR_WIDTH = 430  # of the slowest run, in pixels
ROW_HEIGHT = 34


@dataclass(frozen=True, slots=True)
class Row:
    """One run as it is shown."""

    run: str
    ttft_s: float
    reused_tokens: int
    prompt_tokens: int
    tier: str
    same_answer: bool | None  # None: it is what the others are compared with


def results_table(rows: list[Row]) -> Table:
    """The runs, one a line."""
    table = Table(title="Time to first token, one prompt, three times")
    table.add_column("run", no_wrap=True)
    for name in ("TTFT", "tokens\nreused", "computed"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("from\ntier")
    table.add_column("same\nanswer")
    for row in rows:
        computed = row.prompt_tokens - row.reused_tokens
        same = {None: "-", True: "yes", False: "NO"}[row.same_answer]
        table.add_row(
            row.run,
            f"{row.ttft_s:.2f} s",
            f"{row.reused_tokens:,}",
            f"{computed:,}",
            row.tier or "-",
            same,
            style="bold" if row.reused_tokens else "",
        )
    return table


def results_svg(rows: list[Row], model: str) -> str:
    """The runs as bars; readable on light and dark pages, without scripts or fonts of its own."""
    slowest = max(row.ttft_s for row in rows)
    height = 66 + ROW_HEIGHT * len(rows) + 24
    title = f"Time to first token of {model}, {rows[0].prompt_tokens:,}-token prompt"
    label = "; ".join(f"{row.run}: {row.ttft_s:.2f} s" for row in rows)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 {height}" width="720"'
        f' height="{height}" role="img" aria-label="{escape(title)}. {escape(label)}">',
        "<style>",
        "text{font:14px system-ui,sans-serif;fill:#1f2328}",
        ".title{font-weight:600}.note{font-size:12px;fill:#59636e}",
        ".cold{fill:#8c959f}.warm{fill:#1a7f37}",
        "@media(prefers-color-scheme:dark){text{fill:#e6edf3}.note{fill:#9198a1}",
        ".cold{fill:#656c76}.warm{fill:#3fb950}}",
        "</style>",
        f'<text class="title" x="12" y="26">{escape(title)}</text>',
    ]
    for number, row in enumerate(rows):
        top = 46 + ROW_HEIGHT * number
        width = max(2.0, BAR_WIDTH * row.ttft_s / slowest)
        kind = "warm" if row.reused_tokens else "cold"
        text = f"{row.ttft_s:.2f} s"
        if row.reused_tokens:
            text += f"  ({rows[0].ttft_s / row.ttft_s:.0f} x faster)"
        parts += [
            f'<text x="12" y="{top + 16}">{escape(row.run)}</text>',
            f'<rect class="{kind}" x="170" y="{top}" width="{width:.1f}" height="22" rx="3"/>',
            f'<text x="{178 + width:.1f}" y="{top + 16}">{escape(text)}</text>',
        ]
    parts += [f'<text class="note" x="12" y="{height - 14}">{escape(machine())}</text>', "</svg>"]
    return "\n".join(parts) + "\n"


def machine() -> str:
    """Processor, cores and date: no figure without them."""
    name = platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
                break
    except OSError:
        pass
    cores = len(os.sched_getaffinity(0))
    return f"kvstore demo on {name}, {cores} cores, no GPU, {date.today().isoformat()}"
