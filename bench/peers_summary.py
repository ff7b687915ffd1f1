"""What bench/peers.py found, in a few sentences that are true for any outcome. Pure."""

from __future__ import annotations

from textwrap import fill
from typing import TYPE_CHECKING

from peers_report import size_text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from peers_report import Result

WIDTH = 112
WORK = {"store": "Stores", "load": "Loads", "match": "Look-ups, from an array of tokens"}
PEERS = {
    "mooncake-tcp": "Mooncake over TCP",
    "mooncake-shm": "Mooncake by shared memory",
    "mooncake-shm-in-place": "Mooncake with pages that lie in its own pool",
    "lmcache-server": "LMCache's server",
    "redis-unix": "Redis/Valkey by a Unix socket",
    "redis-tcp": "Redis/Valkey over TCP",
    "sglang-tree": "SGLang's radix tree",
    "sglang-rust-tree": "SGLang's Rust tree core",
    "vllm-xxhash": "vLLM's xxhash and look-up",
    "vllm-sha256": "vLLM's sha256 and look-up",
}
OTHER_OURS = {
    "kvstore-list": "A look-up from a list of Python ints",
    "kvstore-session": "A whole `session.match`, which also takes a lease,",
}


def summary(results: Sequence[Result], skipped: Mapping[str, str], where: str, sizes: str) -> str:
    """A line for each kind of work, then what is slower than a peer, then who is missing."""
    found = [*(_of_work(what, results) for what in WORK)]
    found += [_of_other(name, results) for name in OTHER_OURS]
    found += [f"Not measured: {PEERS.get(name, name)}: {why}" for name, why in skipped.items()]
    first = fill(f"{where}. In brackets how many times as fast as that peer, {sizes}:", WIDTH)
    items = [fill(f"- {text}", WIDTH, subsequent_indent="  ") for text in found if text]
    return "\n".join([first, "", *items])


def _of_work(what: str, results: Sequence[Result]) -> str:
    groups: dict[str, list[str]] = {}
    for name, called in PEERS.items():
        rows = [each for each in results if each.name == name and each.what == what]
        if rows:
            span = _span([each.over_ours.median for each in rows])
            groups.setdefault(_standing(rows), []).append(f"{called} ({span})")
    said = "; ".join(f"{word} {', '.join(names)}" for word, names in sorted(groups.items()))
    return f"{WORK[what]}: {said}." if said else ""


def _standing(rows: Sequence[Result]) -> str:
    ahead = any(each.over_ours.low > 1.0 for each in rows)
    behind = any(each.over_ours.high < 1.0 for each in rows)
    open_ = any(each.over_ours.low <= 1.0 <= each.over_ours.high for each in rows)
    if ahead and behind:
        return "ahead or **behind**, by size:"
    if ahead or behind:
        word = "ahead of" if ahead else "**behind**"
        return f"{word}, or not told apart from," if open_ else word
    return "not told apart from"


def _of_other(name: str, results: Sequence[Result]) -> str:
    """Peers that are faster than a slower way to ask ours, by medians of the same rounds."""
    matches = [each for each in results if each.what == "match"]
    own = {each.size: each.seconds.median for each in matches if each.name == name}
    slower, seen = [], False
    for peer, called in PEERS.items():
        rows = [each for each in matches if each.name == peer and each.size in own]
        ratios = {size_text(e).split()[0]: e.seconds.median / own[e.size] for e in rows}
        seen |= bool(rows)
        if behind := {size: ratio for size, ratio in ratios.items() if ratio < 1.0}:
            sizes = f"{', '.join(behind)} Ki tokens"
            slower.append(f"{called} given an array ({_span([*behind.values()])} at {sizes})")
    if not seen:
        return ""
    said = f"**behind** {', '.join(slower)}" if slower else "ahead of all of them, too"
    return f"{OTHER_OURS[name]} is {said}."


def _span(ratios: Sequence[float]) -> str:
    low, high = _short(min(ratios)), _short(max(ratios))
    return low if low == high else f"{low} to {high}"


def _short(ratio: float) -> str:
    return f"{ratio:.0f}" if ratio >= 10 else f"{ratio:.2g}"
