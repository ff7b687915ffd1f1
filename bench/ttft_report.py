"""What bench/ttft.py found, as a table, a drawing, and a page of docs/. Pure, but for the date."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from html import escape
from textwrap import fill
from typing import TYPE_CHECKING

from readme_block import SHORT

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

KINDS = {
    "cold": "computed",
    "disk": "kvstore, from disk after kill -9",
    "host": "kvstore, from memory",
    "own": "vLLM's own prefix cache",
}
WIDTH = 112
TITLE = "Time to first token over the length of the prompt, vLLM on a CPU, SmolLM2-135M"
LEFT, RIGHT, TOP, BOTTOM = 56, 700, 74, 330
STYLE = """<style>
text{font:13px system-ui,sans-serif;fill:#1f2328}
.title{font-size:15px;font-weight:600}.note{font-size:12px;fill:#59636e}
path,line{fill:none;stroke-width:2}path.own{stroke-dasharray:7 5}circle{stroke:none}
.grid{stroke:#d1d9e0;stroke-width:1}
.cold{stroke:#8c959f;fill:#8c959f}.own{stroke:#0969da;fill:#0969da}
.host{stroke:#1a7f37;fill:#1a7f37}.disk{stroke:#bc4c00;fill:#bc4c00}path.line{fill:none}
@media(prefers-color-scheme:dark){text{fill:#e6edf3}.note{fill:#9198a1}.grid{stroke:#3d444d}
.cold{stroke:#9198a1;fill:#9198a1}.own{stroke:#4493f8;fill:#4493f8}
.host{stroke:#3fb950;fill:#3fb950}.disk{stroke:#db6d28;fill:#db6d28}path.line{fill:none}}
</style>"""


@dataclass(frozen=True, slots=True)
class Point:
    """Medians at one length."""

    tokens: int
    seconds: Mapping[str, float]  # by kind


def today() -> str:
    """As figures have it."""
    return datetime.date.today().isoformat()


def short(points: Sequence[Point], *, machine: str, date: str, prompts: int) -> str:
    """For the README; true for any outcome."""
    said = (
        f"`make bench-ttft`, vLLM (CPU), SmolLM2-135M, {machine}, no GPU, {date}. Seconds to the "
        f"first token, median of {prompts} prompts; in brackets over computing one:"
    )
    head = " | ".join(f"{point.tokens:,} tokens" for point in points)
    lines = [fill(said, WIDTH), "", f"| | {head} |", "|---" * (1 + len(points)) + "|"]
    for kind, name in KINDS.items():
        cells = [_cell(point, kind) for point in points]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(point: Point, kind: str) -> str:
    text = f"{point.seconds[kind]:.2f}"
    return text if kind == "cold" else f"{text} ({point.seconds[kind] / point.seconds['cold']:.2f})"


def drawing(points: Sequence[Point], *, machine: str, date: str, prompts: int) -> str:
    """A line for each kind, an SVG; readable on light and dark pages, no scripts or fonts."""
    longest = max(point.tokens for point in points)
    slowest = max(max(point.seconds.values()) for point in points)
    step = next(each for each in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50) if slowest / each <= 8)

    def at(tokens: float, seconds: float) -> tuple[float, float]:
        right = LEFT + (RIGHT - LEFT) * tokens / longest
        return round(right, 1), round(BOTTOM - (BOTTOM - TOP) * seconds / slowest, 1)

    parts = [f'<text class="title" x="12" y="26">{escape(TITLE)}</text>', *_legend()]
    parts.append(f'<text class="note" x="12" y="{TOP - 6}">s</text>')
    for number in range(int(slowest / step) + 1):
        y = at(0, number * step)[1]
        parts.append(f'<line class="grid" x1="{LEFT}" y1="{y}" x2="{RIGHT}" y2="{y}"/>')
        label = f"{number * step:g}"
        parts.append(
            f'<text class="note" x="{LEFT - 8}" y="{y + 4}" text-anchor="end">{label}</text>'
        )
    for point in points:
        x = at(point.tokens, 0)[0]
        text = f"{point.tokens:,}"
        parts.append(
            f'<text class="note" x="{x}" y="{BOTTOM + 18}" text-anchor="middle">{text}</text>'
        )
    for kind in KINDS:
        places = [at(point.tokens, point.seconds[kind]) for point in points]
        path = "L".join(f"{x} {y}" for x, y in places)
        parts.append(f'<path class="line {kind}" d="M{path}"/>')
        parts += [f'<circle class="{kind}" cx="{x}" cy="{y}" r="3.5"/>' for x, y in places]
    note = f"tokens of the prompt; medians of {prompts}; {machine}, no GPU, {date}; make bench-ttft"
    parts.append(f'<text class="note" x="12" y="{BOTTOM + 42}">{escape(note)}</text>')
    label = "; ".join(
        f"{point.tokens:,} tokens: "
        + ", ".join(f"{KINDS[kind]} {point.seconds[kind]:.2f} s" for kind in KINDS)
        for point in points
    )
    height = BOTTOM + 56
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 {height}" width="760"'
        f' height="{height}" role="img" aria-label="{escape(TITLE)}. {escape(label)}">'
    )
    return "\n".join([head, STYLE, *parts, "</svg>"]) + "\n"


def _legend() -> list[str]:
    parts, x = [], 12
    for kind, name in KINDS.items():
        parts.append(f'<circle class="{kind}" cx="{x + 5}" cy="45" r="5"/>')
        parts.append(f'<text x="{x + 16}" y="50">{escape(name)}</text>')
        x += round(46 + 6.1 * len(name))
    return parts


PAGE = """# Time to first token over the length of the prompt

Written by `make bench-ttft`; what is asked, and in which order, is said in
[bench/ttft.py](../bench/ttft.py).

![Time to first token over the length of the prompt](ttft.svg)

{short_title}

{short}

## How

Prompts of random tokens, asked one at a time. All stored ones were computed by another engine; its
server was then killed with -9, and the engine that is measured is fresh. Each stored prompt is
asked three times: its pages come from disk, then, after vLLM has emptied its own prefix cache, from
the server's memory, then from that prefix cache. What follows the last whole block is computed each
time. That pages came from where the row says, and that the three answers are equal, is checked.
"""


def page(points: Sequence[Point], *, machine: str, date: str, prompts: int) -> str:
    """The documentation's page."""
    said = short(points, machine=machine, date=date, prompts=prompts)
    return PAGE.format(short_title=SHORT, short=said)
