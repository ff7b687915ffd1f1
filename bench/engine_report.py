"""What bench/engine.py found, as rows, ratios with budgets, a table, and a drawing. Pure.

An answer is wrong if it parts from the reference where both were sure of their choice: chunks of
other sizes round differently, and then a close call may go the other way, in vLLM's own cache too.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from html import escape
from textwrap import fill
from typing import TYPE_CHECKING

import numpy as np
from engine_arms import ARMS, Embedded
from engine_results import OWN
from paired import PairedRatio, paired_ratio
from readme_block import SHORT

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from engine_arms import Answer
    from engine_results import Cell, Results
    from engine_workloads import Workload

CLEAR_MARGIN = 0.25  # of log probability
TTFT_BUDGET, UNIQUE_BUDGET, HITS_BUDGET, SAVED_BUDGET = 1.3, 0.97, 0.9, 0.99
UNIQUE = "unique"
WIDTH = 112
BUDGETED = ("tile", "random", "chat")
LABEL_WIDTH, BAR_WIDTH, ROW_HEIGHT, GAP = 204, 430, 19, 34


@dataclass(frozen=True, slots=True)
class Row:
    """The same in numbers."""

    workload: str
    arm: str
    asked: int
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    prompt_tokens: int
    reused_tokens: int
    disk_tokens: int
    compared: int  # with the reference's answers: as many as that one was asked
    same: int | None  # equal ones, if there was one
    wrong: int


def rows_of(found: Results, reference: str) -> list[Row]:
    """One for each workload in each arm of each group."""
    rows = []
    for workload, groups in found.items():
        expected = next((group[reference] for group in groups if reference in group), None)
        rows += [row_of(workload, cell, expected) for group in groups for cell in group.values()]
    return rows


def row_of(workload: str, cell: Cell, reference: Cell | None) -> Row:
    """`reference` was asked the same; None: answers are compared with nothing."""
    expected = reference.answers if reference is not None and not cell.alone else []
    pairs = list(zip(cell.answers, expected, strict=False))
    p50, p99 = np.percentile(cell.ttft_s, [50, 99], method="inverted_cdf")
    return Row(
        workload,
        cell.arm,
        len(cell.answers),
        float(np.mean(cell.ttft_s)),
        float(p50),
        float(p99),
        sum(answer.prompt_tokens for answer in cell.answers),
        cell.reused_tokens,
        sum(answer.disk_tokens for answer in cell.answers),
        len(pairs),
        sum(mine.tokens == theirs.tokens for mine, theirs in pairs) if pairs else None,
        sum(is_wrong(mine, theirs) for mine, theirs in pairs),
    )


def is_wrong(mine: Answer, theirs: Answer) -> bool:
    """Whether they part at a place where neither was close to the other's choice."""
    if len(mine.tokens) != len(theirs.tokens):
        return True
    for place, (one, other) in enumerate(zip(mine.tokens, theirs.tokens, strict=True)):
        if one != other:
            return min(mine.margins[place], theirs.margins[place]) >= CLEAR_MARGIN
    return False


def ratios_of(found: Results) -> dict[str, PairedRatio]:
    """The keys that the bench's docstring names, as far as their arms ran."""
    ratios: dict[str, PairedRatio] = {}
    for workload, groups in found.items():
        for group in groups:
            own = group.get(OWN)
            for arm, cell in group.items():
                if cell.whole_pages:
                    kept = exactly(cell.kept_pages / cell.whole_pages, len(cell.answers))
                    ratios[f"engine_{workload}_{arm}_saved"] = kept
                if own is None or arm == OWN:
                    continue
                if workload == UNIQUE:
                    ratio = paired_ratio(own.round_s, cell.round_s)  # work done a second
                else:
                    count = len(cell.ttft_s)  # without a cache not all are asked
                    ratio = paired_ratio(cell.ttft_s, own.ttft_s[:count])
                ratios[f"engine_{workload}_{arm}_over_{OWN}"] = ratio
            if "restart" in group and own is not None and own.reused_tokens:
                share = group["restart"].reused_tokens / own.reused_tokens
                ratios[f"engine_{workload}_restart_hits"] = exactly(share, len(own.answers))
    return ratios


def exactly(share: float, count: int) -> PairedRatio:
    """A share that was counted, not measured."""
    return PairedRatio(share, share, share, count)


def not_unlimited(rows: Sequence[Row], reusable: Mapping[str, int]) -> list[str]:
    """Where vLLM's own cache reused less than one without a limit: it is no reference there."""
    return [
        f"vLLM's own cache reused {row.reused_tokens:,} tokens of {row.workload}, and could have "
        f"reused {reusable[row.workload]:,}: it had to let blocks go, give it more (OWN_BLOCKS)"
        for row in rows
        if row.arm == OWN and row.reused_tokens < reusable.get(row.workload, 0)
    ]


def verdicts(ratios: dict[str, PairedRatio]) -> list[str]:
    """A line for each."""
    return [
        f"{key:34} {ratio.median:7.3f}  90 % [{ratio.low:.3f}, {ratio.high:.3f}], "
        + verdict_of(key, ratio)
        for key, ratio in ratios.items()
    ]


def verdict_of(key: str, ratio: PairedRatio) -> str:
    """Its budget, if it is ours and has one, and whether it was kept."""
    aim = budget_of(key)
    if not aim:
        return "no budget"
    word, budget = aim.split()
    said = ratio.verdict(float(budget), at_least=word == ">=")
    if ratio.low == ratio.high == float(budget):
        said = "kept"  # counted, and just as many
    return f"budget {aim}: {said}"


def budget_of(key: str) -> str:
    """As ">= 0.97", if it is ours and has one."""
    _, workload, arm, *_ = key.split("_")
    if not is_ours(arm):
        return ""
    if key.endswith("_hits"):
        return f">= {HITS_BUDGET}"
    if key.endswith("_saved"):
        return f">= {SAVED_BUDGET}"
    if workload == UNIQUE:
        return f">= {UNIQUE_BUDGET}"
    return f"<= {TTFT_BUDGET}" if workload in BUDGETED else ""


def is_ours(arm: str) -> bool:
    """Whether its store is this one."""
    return issubclass(ARMS[arm], Embedded)


def table(rows: Sequence[Row], workloads: Sequence[Workload]) -> str:
    """In Markdown, seconds; p99 of fewer than 100 prompts is that of the slowest."""
    titles = {workload.name: workload.title for workload in workloads}
    head = "TTFT mean | p50 | p99 | tokens reused | of these from disk | same answer"
    lines = []
    for name, title in titles.items():
        mine = [row for row in rows if row.workload == name]
        if not mine:
            continue
        most = max(mine, key=lambda row: row.asked)
        asked = f"{title}: {most.asked} prompts, {most.prompt_tokens:,} tokens"
        lines += [f"| {asked} | {head} |", "|---|---|---|---|---|---|---|"]
        for row in mine:
            share = f"{100 * row.reused_tokens / row.prompt_tokens:.0f} %"
            from_disk = f"{row.disk_tokens:,}" if is_ours(row.arm) else "-"
            same = "-" if row.same is None else f"{row.same} of {row.compared}"
            same += f", {row.wrong} WRONG" if row.wrong else ""
            called = name_of(row, mine, ARMS[row.arm].title)
            lines.append(
                f"| {called} | {row.ttft_mean_s:.3f} | {row.ttft_p50_s:.3f} "
                f"| {row.ttft_p99_s:.3f} | {share} | {from_disk} | {same} |"
            )
        lines.append("")
    return "\n".join(lines)


def name_of(row: Row, rows: Sequence[Row], name: str) -> str:
    """What to call it: an arm that stood in two groups is there twice, each by its neighbours."""
    return name if row is next(each for each in rows if each.arm == row.arm) else f"{name}, again"


def drawing(rows: Sequence[Row], workloads: Sequence[Workload], note: str) -> str:
    """Median TTFT as bars, an SVG; readable on light and dark pages, no scripts or fonts."""
    slowest = max((row.ttft_p50_s for row in rows), default=1.0)
    title = "Median time to first token, vLLM on a CPU, SmolLM2-135M"
    parts, top = [f'<text class="title" x="12" y="26">{escape(title)}</text>'], 44
    for workload in workloads:
        mine = [row for row in rows if row.workload == workload.name]
        if not mine:
            continue
        parts.append(f'<text class="group" x="12" y="{top + 14}">{escape(workload.title)}</text>')
        top += 22
        for row in mine:
            label = name_of(row, mine, ARMS[row.arm].short)
            parts += bar(row, label, top, BAR_WIDTH * row.ttft_p50_s / slowest)
            top += ROW_HEIGHT
        top += GAP - ROW_HEIGHT
    parts.append(f'<text class="note" x="12" y="{top + 16}">{escape(note)}</text>')
    label = "; ".join(
        f"{row.workload}, {ARMS[row.arm].title}: {row.ttft_p50_s:.2f} s" for row in rows
    )
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 {top + 30}" width="760"'
        f' height="{top + 30}" role="img" aria-label="{escape(title)}. {escape(label)}">'
    )
    return "\n".join([head, STYLE, *parts, "</svg>"]) + "\n"


STYLE = """<style>
text{font:13px system-ui,sans-serif;fill:#1f2328}
.title{font-size:15px;font-weight:600}.group{font-weight:600}.note{font-size:12px;fill:#59636e}
.none{fill:#8c959f}.own{fill:#0969da}.peer{fill:#bc4c00}.ours{fill:#1a7f37}
@media(prefers-color-scheme:dark){text{fill:#e6edf3}.note{fill:#9198a1}
.none{fill:#656c76}.own{fill:#4493f8}.peer{fill:#db6d28}.ours{fill:#3fb950}}
</style>"""
KINDS = {"none": "none", "vllm": "own", "lmcache": "peer"}


def bar(row: Row, label: str, top: int, width: float) -> list[str]:
    """Its name, itself, and its number."""
    kind = KINDS.get(row.arm, "ours")
    text = f"{row.ttft_p50_s:.2f} s"
    return [
        f'<text x="24" y="{top + 12}">{escape(label)}</text>',
        f'<rect class="{kind}" x="{LABEL_WIDTH}" y="{top}" width="{max(width, 2):.1f}"'
        ' height="15" rx="2"/>',
        f'<text x="{LABEL_WIDTH + 8 + max(width, 2):.1f}" y="{top + 12}">{text}</text>',
    ]


def short(ratios: Mapping[str, PairedRatio], workloads: Sequence[Workload], where: str) -> str:
    """Ratios by workload and arm, for the README; true for any outcome."""
    asked = [arm for arm in ARMS if arm != OWN and any(f"_{arm}_over_" in key for key in ratios)]
    first = (
        f"{where}. Time to first token over that of vLLM's own prefix cache with room for all, "
        "median of the same prompts; for those that are 100 % unique the time for all of them:"
    )
    head = " | ".join(ARMS[arm].short for arm in asked)
    lines = [fill(first, WIDTH), "", f"| | {head} |", "|---" * (1 + len(asked)) + "|"]
    for workload in workloads:
        cells = []
        for arm in asked:
            ratio = ratios.get(f"engine_{workload.name}_{arm}_over_{OWN}")
            cells.append(_cell(ratio, inverse=workload.name == UNIQUE) if ratio else "-")
        lines.append(f"| {workload.title} | {' | '.join(cells)} |")
    hits = [ratios[key].median for key in ratios if key.endswith("_restart_hits")]
    if hits:
        said = (
            f"After kill -9 of engine and server it reuses {low_to_high(hits)} of the tokens that "
            "vLLM's own cache reuses without any restart, which leaves that one nothing."
        )
        lines += ["", fill(said, WIDTH)]
    for word in ("MISSED", "not resolved"):
        keys = [key for key, ratio in ratios.items() if word in verdict_of(key, ratio)]
        said = "; ".join(f"`{key}` {ratios[key].median:.3f} ({budget_of(key)})" for key in keys)
        if said:
            lines += ["", fill(f"**{word.capitalize()}**: {said}.", WIDTH)]
    return "\n".join(lines)


def _cell(ratio: PairedRatio, *, inverse: bool) -> str:
    return f"{1 / ratio.median if inverse else ratio.median:.2f}"


def low_to_high(shares: Sequence[float]) -> str:
    """97 to 100 %."""
    low, high = (f"{100 * share:.0f}" for share in (min(shares), max(shares)))
    return f"{low} %" if low == high else f"{low} to {high} %"


PAGE = """# vLLM under the field's workloads

Written by `make bench-engine`; what is asked, and in which order, is said in
[bench/engine_workloads.py](../bench/engine_workloads.py), what is compared in
[bench/engine.py](../bench/engine.py).

![Median time to first token of each workload in each arm](engine.svg)

{short_title}

{short}

## How

SmolLM2-135M in bf16, {versions}, {machine}, no GPU; {date}; seed {seed}; load average before it
began {load}.

Times are seconds from handing a prompt in to its first token. Engines with a store forget their own
prefix cache before each prompt, so what they reuse comes from the store; "room for all" is a prefix
cache from which nothing had to leave. Neither vLLM's own cache nor LMCache's memory survives the
restart that the last arm had; there a page comes from disk once, and from memory when it is asked
for again. "Same answer": as without a cache, 8 tokens, greedy; one that parts from it where both
were sure would be marked WRONG. p99 of fewer than 100 prompts is the slowest one. Prompts are asked
one at a time, but for the unique ones: those come several at once, behind others that are not
counted, so that saving the ones before is paid for in the time of those that are. Engines lived in
two groups, one after the other; vLLM's own cache was in both ("again"), and ratios are within one.
What saving unique prompts costs is measured in one engine more, whose connector is switched on and
off by turns ([bench/miss_pairs.py](../bench/miss_pairs.py)): two engines differ by more than that.
Long documents are asked once without a cache, as the others the first time; answers to those are
compared.

## All figures

{table}
| ratio | median | 90 % interval | |
|---|---|---|---|
{verdicts}
"""


def page(  # what it is made of
    rows: Sequence[Row],
    workloads: Sequence[Workload],
    ratios: dict[str, PairedRatio],
    notes: Sequence[str],
    **where: object,
) -> str:
    """The documentation's page; `where`: short, versions, machine, date, seed, load."""
    lines = [
        f"| `{key}` | {ratio.median:.3f} | {ratio.low:.3f} to {ratio.high:.3f} "
        f"| {verdict_of(key, ratio)} |"
        for key, ratio in ratios.items()
    ]
    text = PAGE.format(
        table=table(rows, workloads), verdicts="\n".join(lines), short_title=SHORT, **where
    )
    return text + "".join(f"\n{note}\n" for note in notes)


def as_dicts(rows: Sequence[Row]) -> list[dict[str, object]]:
    """For JSON."""
    return [asdict(row) for row in rows]
