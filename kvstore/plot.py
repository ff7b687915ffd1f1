"""A line chart as SVG text: ratios over sizes, a line a name. Knows no files; needs no library."""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

WIDTH, HEIGHT = 720, 440
LEFT, RIGHT, TOP, BOTTOM = 60, 150, 40, 50
COLORS = ("#1b6ca8", "#d1495b", "#2e8b57", "#b8860b", "#6a4c93", "#444444", "#00868b", "#c0392b")


def line_chart(
    title: str, x_label: str, y_label: str, lines: Mapping[str, Sequence[tuple[float, float]]]
) -> str:
    """Points (x > 0, y in 0..1) of each line; x is drawn by its logarithm."""
    xs = [x for points in lines.values() for x, _ in points]
    low, high = math.log10(min(xs)), math.log10(max(xs))
    span = (high - low) or 1.0
    top = max(0.1, math.ceil(max(y for pts in lines.values() for _, y in pts) * 10) / 10)

    def at(x: float, y: float) -> tuple[float, float]:
        right = LEFT + (math.log10(x) - low) / span * (WIDTH - LEFT - RIGHT)
        return round(right, 1), round(HEIGHT - BOTTOM - y / top * (HEIGHT - TOP - BOTTOM), 1)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
        f'viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _text(WIDTH / 2, 22, title, "middle"),
        _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 12, x_label, "middle"),
        _text(8, TOP - 12, y_label, "start"),
    ]
    for tenth in range(round(top * 10) + 1):
        y = at(min(xs), tenth / 10)[1]
        parts.append(f'<path d="M{LEFT} {y}H{WIDTH - RIGHT}" stroke="#ddd" fill="none"/>')
        parts.append(_text(LEFT - 8, y + 4, f"{tenth / 10:.1f}", "end"))
    for x in sorted(set(xs)):
        parts.append(_text(at(x, 0)[0], HEIGHT - BOTTOM + 18, f"{x:,.0f}", "middle"))
    for number, (name, points) in enumerate(lines.items()):
        color = COLORS[number % len(COLORS)]
        places = [at(x, y) for x, y in sorted(points)]
        path = "L".join(f"{x} {y}" for x, y in places)
        parts.append(f'<path d="M{path}" stroke="{color}" stroke-width="2" fill="none"/>')
        parts += [f'<circle cx="{x}" cy="{y}" r="3" fill="{color}"/>' for x, y in places]
        line_y = TOP + 18 * number
        parts.append(f'<circle cx="{WIDTH - RIGHT + 16}" cy="{line_y - 4}" r="5" fill="{color}"/>')
        parts.append(_text(WIDTH - RIGHT + 28, line_y, name, "start"))
    return "\n".join([*parts, "</svg>", ""])


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(text)}</text>'
