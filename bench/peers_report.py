"""What bench/peers.py found, as tables, as a line of JSON, as a page and as a picture.

The picture is readable on light and on dark, since its colours follow the reader's scheme.
"""

from __future__ import annotations

import datetime
import json
import math
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from readme_block import SHORT

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from paired import PairedRatio

LABELS = {
    "memcpy": "plain memcpy, one thread (the limit)",
    "kvstore-attached": "kvstore, client of a server",
    "kvstore-embedded": "kvstore, embedded",
    "mooncake-shm": "Mooncake, shared memory",
    "mooncake-shm-in-place": "Mooncake, pages in its own pool",
    "mooncake-tcp": "Mooncake, TCP",
    "lmcache-server": "LMCache server, shared memory",
    "redis-unix": "Redis/Valkey, Unix socket",
    "redis-tcp": "Redis/Valkey, TCP",
    "kvstore-array": "kvstore index, from an array",
    "kvstore-list": "kvstore index, from a list",
    "kvstore-session": "kvstore session (look-up and lease)",
    "sglang-rust-tree": "SGLang Rust tree core, from an array",
    "sglang-tree": "SGLang radix tree, from an array",
    "vllm-xxhash": "vLLM, xxhash and look-up, from a list",
    "vllm-sha256": "vLLM, sha256 and look-up, from a list",
}
TITLES = {
    "store": "Store: private memory to where others find it",
    "load": "Load: from there to private memory",
    "match": "Look-up of a prompt that is known whole",
}
PICTURED = {"store": 2 << 20, "load": 2 << 20, "match": 128 << 10}
NOT_PEERS = ("memcpy", "kvstore")


@dataclass(frozen=True, slots=True)
class Result:
    """Seconds of one peer, work and size, and how many times ours they are, round by round."""

    name: str
    what: str  # store, load, match
    size: int  # bytes of a page, or tokens of a prompt
    seconds: PairedRatio
    over_ours: PairedRatio

    @property
    def is_peer(self) -> bool:
        """Whether it is somebody else's."""
        return not self.name.startswith(NOT_PEERS)


def table(
    results: Sequence[Result],
    skipped: Mapping[str, str],
    versions: Mapping[str, str],
    about: Mapping[str, object],
) -> str:
    """All of it in Markdown, which reads well in a terminal too."""
    parts = [
        f"{about['machine']}; {datetime.date.today().isoformat()}; load average {about['load']}; "
        f"medians of {about['rounds']} rounds of {about['mib']} MiB. "
        f"In brackets: times our seconds, with its 90 % interval; above 1 ours is faster.",
        "Versions: " + ", ".join(versions.values()) + ".",
    ]
    parts += [_one_table(what, results, int(str(about["mib"])) << 20) for what in TITLES]
    parts.append(verdict(results))
    if skipped:
        lines = [f"- SKIPPED {LABELS.get(n, n)} ({n}): {why}" for n, why in skipped.items()]
        parts.append("\n".join(lines))
    return "\n\n".join(part for part in parts if part)


def verdict(results: Sequence[Result]) -> str:
    """Where ours is ahead of a peer, where it is behind, and where the runs do not tell."""
    peers = [each for each in results if each.is_peer]
    ahead = [each for each in peers if each.over_ours.low > 1.0]
    lines = [f"Ours ahead in {len(ahead)} of {len(peers)} comparisons with peers."]
    for word, chosen in (
        ("behind", [e for e in peers if e.over_ours.high < 1.0]),
        ("not resolved", [e for e in peers if e.over_ours.low <= 1.0 <= e.over_ours.high]),
    ):
        if chosen:
            names = "; ".join(
                f"{LABELS[e.name]}, {e.what} of {size_text(e)}: {e.over_ours.median:.2f}"
                for e in chosen
            )
            lines.append(f"{word.capitalize()}: {names}.")
    return "\n".join(lines)


def _one_table(what: str, results: Sequence[Result], run_bytes: int) -> str:
    rows = [each for each in results if each.what == what]
    if not rows:
        return ""
    sizes = sorted({each.size for each in rows})
    unit = "milliseconds" if what == "match" else "GB/s"
    head = [f"{TITLES[what]}, {unit}"] + [
        size_text(next(e for e in rows if e.size == s)) for s in sizes
    ]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for name in [name for name in LABELS if any(each.name == name for each in rows)]:
        cells = {each.size: _cell(each, run_bytes) for each in rows if each.name == name}
        lines.append("| " + " | ".join([LABELS[name], *(cells.get(s, "-") for s in sizes)]) + " |")
    return "\n".join(lines)


def _cell(result: Result, run_bytes: int) -> str:
    over = result.over_ours
    ours = over.median == over.low == over.high == 1.0
    ratio = "" if ours else f" ({over.median:.2f} [{over.low:.2f}, {over.high:.2f}])"
    return f"{figure(result, run_bytes)}{ratio}"


def figure(result: Result, run_bytes: int) -> str:
    """Milliseconds of a look-up, else GB/s."""
    if result.what == "match":
        return f"{result.seconds.median * 1e3:.3f}"
    return f"{run_bytes / result.seconds.median / 1e9:.2f}"


def size_text(result: Result) -> str:
    """256 KiB, 2 MiB, 128 Ki tokens."""
    if result.what == "match":
        return f"{result.size >> 10} Ki tokens"
    return f"{result.size >> 20} MiB" if result.size >= 1 << 20 else f"{result.size >> 10} KiB"


def json_text(
    results: Sequence[Result],
    skipped: Mapping[str, str],
    versions: Mapping[str, str],
    seed: int,
    about: Mapping[str, object],
) -> str:
    """One line."""
    rows = [
        {
            "peer": each.name,
            "what": each.what,
            "size": each.size,
            "seconds": float(f"{each.seconds.median:.4g}"),
            "seconds_spread": [float(f"{each.seconds.low:.4g}"), float(f"{each.seconds.high:.4g}")],
            "times_ours": round(each.over_ours.median, 3),
            "times_ours_spread": [round(each.over_ours.low, 3), round(each.over_ours.high, 3)],
        }
        for each in results
    ]
    line = {"results": rows, "skipped": dict(skipped), "versions": dict(versions), "seed": seed}
    return json.dumps(line | {"date": datetime.date.today().isoformat()} | dict(about))


def write_pages(
    folder: Path,
    said: str,
    results: Sequence[Result],
    skipped: Mapping[str, str],
    versions: Mapping[str, str],
    about: Mapping[str, object],
) -> None:
    """peers.md and peers.svg; `said` is the summary, which the README has, too."""
    page = f"""# Beside what you would pick instead

Written by `make bench-peers`; [bench/peers.py](../bench/peers.py) says what is compared, and how.
More on peers, with sources: [comparison.md](comparison.md).

![This store beside its peers](peers.svg)

{SHORT}

{said}

## All figures

{table(results, skipped, versions, about)}
"""
    (folder / "peers.md").write_text(page)
    (folder / "peers.svg").write_text(picture(results, int(str(about["mib"])) << 20, about))


STYLE = """<style>
text{font:13px system-ui,sans-serif;fill:#1f2328}
.title{font-weight:600;font-size:14px}.note{font-size:12px;fill:#59636e}
.peer{fill:#8c959f}.ours{fill:#1a7f37}.limit{fill:#c9d1d9}
@media(prefers-color-scheme:dark){text{fill:#e6edf3}.note{fill:#9198a1}
.peer{fill:#656c76}.ours{fill:#3fb950}.limit{fill:#3d444d}}
</style>"""
WIDTH, LEFT, BAR_MAX, ROW, BAR = 760, 270, 380, 22, 15


def picture(results: Sequence[Result], run_bytes: int, about: Mapping[str, object]) -> str:
    """Bars of all at one size: pages longer is better, look-ups shorter is better."""
    parts: list[str] = []
    y = 8
    for what in TITLES:
        sizes = {each.size for each in results if each.what == what}
        if not sizes:
            continue
        size = PICTURED[what] if PICTURED[what] in sizes else max(sizes)
        rows = [each for each in results if each.what == what and each.size == size]
        rows.sort(key=lambda each: list(LABELS).index(each.name))
        better = (
            "ms, shorter is better, logarithmic" if what == "match" else "GB/s, longer is better"
        )
        y += 20
        title = f"{TITLES[what]} ({size_text(rows[0])}; {better})"
        parts.append(f'<text class="title" x="12" y="{y}">{escape(title)}</text>')
        y += 8
        for row, length in zip(rows, _lengths(rows), strict=True):
            kind = "ours" if row.name.startswith("kvstore") else "peer"
            kind = "limit" if row.name == "memcpy" else kind
            parts.append(f'<text x="12" y="{y + 13}">{escape(LABELS[row.name])}</text>')
            parts.append(
                f'<rect class="{kind}" x="{LEFT}" y="{y + 2}" width="{length:.1f}" '
                f'height="{BAR}" rx="3"/>'
            )
            text = figure(row, run_bytes)
            parts.append(f'<text x="{LEFT + length + 8:.1f}" y="{y + 13}">{text}</text>')
            y += ROW
        y += 6
    note = f"make bench-peers, {about['machine']}, no GPU, {datetime.date.today().isoformat()}"
    parts.append(f'<text class="note" x="12" y="{y + 16}">{escape(note)}</text>')
    height = y + 28
    label = escape("This store beside its peers. " + verdict(results), quote=True)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
            f'width="{WIDTH}" height="{height}" role="img" aria-label="{label}">',
            STYLE,
            *parts,
            "</svg>",
            "",
        ]
    )


def _lengths(rows: Sequence[Result]) -> list[float]:
    """Of bars: rates in proportion, times by their logarithm."""
    if rows[0].what == "match":
        logs = [math.log10(each.seconds.median) for each in rows]
        low, span = min(logs) - 0.3, max(logs) - min(logs) + 0.3
        return [BAR_MAX * (value - low) / span for value in logs]
    rates = [1 / each.seconds.median for each in rows]
    return [BAR_MAX * rate / max(rates) for rate in rates]
