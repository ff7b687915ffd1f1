"""Why a prompt hits or misses: the longest match, where it ends, and what would have gone on.

Three things end a match: other tokens, pages that left, pages that are there under another spec or
tenant; each is named. Changes nothing. The lock is held for one tree at a time.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from kvstore import documents
from kvstore.ghost_list import Left
from kvstore.prefix_index.page_key import PAGE_KEY_BYTES, TOKEN_BYTES, page_keys
from kvstore.quantity import format_age
from kvstore.state import DISK, HOST, NO_PAGE, TIER_NAMES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

    from kvstore.ghost_list import Ghost
    from kvstore.state import StoreState, TreeInfo

ELSEWHERE_MAX = 20
SAME_TIME_S = 1.0  # pages that left within it left together
UNKNOWN = "?"


@dataclass(frozen=True, slots=True)
class Difference:
    """One field in which two specs differ, dotted where it is inside another."""

    field: str
    here: str
    there: str


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """Where more of this prompt is stored, and why that is not for this spec and tenant."""

    namespace: str
    tenant: str
    model: str
    matched_tokens: int
    differs: tuple[Difference, ...]


@dataclass(frozen=True, slots=True)
class Departed:
    """Pages of this prompt that were here and left: [first_page, first_page + pages)."""

    first_page: int
    pages: int
    ago_s: float
    why: str  # a name of Left, in lower case
    tiers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a prompt hits or misses."""

    prompt_tokens: int
    prompt_pages: int
    matched_pages: int
    matched_tokens: int
    host_pages: int
    disk_pages: int
    verdict: str
    differs_at: int | None  # token position of the first difference with the closest chain
    prompt_token: int | None
    stored_token: int | None
    other_namespaces: tuple[str, ...]  # of `elsewhere`
    extras_differ_at: int | None = None  # page whose tokens are there, with other extras
    elsewhere: tuple[Elsewhere, ...] = ()  # the longest first
    departed: tuple[Departed, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, document: Any) -> Explanation:
        """The record whose to_dict() this was; ValueError for anything else."""
        found = documents.record_of(cls, document)
        elsewhere = [
            documents.record_of(
                Elsewhere,
                each | {"differs": [documents.record_of(Difference, d) for d in each["differs"]]},
            )
            for each in document.get("elsewhere", ())
        ]
        departed = [documents.record_of(Departed, e) for e in document.get("departed", ())]
        values = {each.name: getattr(found, each.name) for each in fields(cls)}
        return cls(**values | {"elsewhere": tuple(elsewhere), "departed": tuple(departed)})


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt, and for which spec and tenant it is asked."""

    tokens: bytes
    extras: dict[int, bytes]
    root: bytes
    plain_root: bytes  # of the same without a salt
    namespace: bytes
    tenant: str
    page_tokens: int
    all_tenants: bool


def explain(state: StoreState, asked: Question, specs: Mapping[bytes, str]) -> Explanation:
    """See Explanation. `specs`: JSON by namespace, the asked one's among them if it is known."""
    with state.lock:
        state.require_open()
        found = state.index.match(asked.root, asked.tokens, asked.extras)
        in_host = state.in_tier(found, HOST)
        on_disk = state.in_tier(found, DISK)
        position, stored, extras_at = _first_difference(state, asked, found)
    matched = len(found) * asked.page_tokens
    departed = _departed(state, asked, len(found))
    elsewhere = _elsewhere(state, asked, specs, matched)
    return Explanation(
        prompt_tokens=len(asked.tokens) // TOKEN_BYTES,
        prompt_pages=len(asked.tokens) // TOKEN_BYTES // asked.page_tokens,
        matched_pages=len(found),
        matched_tokens=matched,
        host_pages=int(np.count_nonzero(in_host)),
        disk_pages=int(np.count_nonzero(~in_host & on_disk)),
        verdict=_verdict(asked, len(found), position, extras_at, departed, elsewhere),
        differs_at=position,
        prompt_token=_token(asked.tokens, position) if position is not None else None,
        stored_token=stored,
        other_namespaces=tuple(sorted({each.namespace for each in elsewhere})),
        extras_differ_at=extras_at,
        elsewhere=tuple(elsewhere),
        departed=tuple(departed),
    )


def differences(here: Any, there: Any, path: str = "") -> Iterator[Difference]:
    """Fields in which two JSON documents differ, the innermost that say so."""
    if isinstance(here, dict) and isinstance(there, dict):
        for name in sorted(here.keys() | there.keys()):
            inner = f"{path}.{name}" if path else name
            yield from differences(here.get(name), there.get(name), inner)
    elif isinstance(here, list) and isinstance(there, list) and len(here) == len(there):
        for number, pair in enumerate(zip(here, there, strict=True)):
            yield from differences(*pair, f"{path}[{number}]")
    elif here != there:
        yield Difference(path, _said(here), _said(there))


def _said(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def _verdict(
    asked: Question,
    matched: int,
    position: int | None,
    extras_at: int | None,
    departed: list[Departed],
    elsewhere: list[Elsewhere],
) -> str:
    count = len(asked.tokens) // TOKEN_BYTES
    whole = count // asked.page_tokens
    if whole == 0:
        return f"miss: a prompt of {count} tokens is shorter than a page of {asked.page_tokens}"
    if matched == whole:
        return f"hit: all {whole} whole pages are stored"
    hit = f"hit on {matched} of {whole} pages" if matched else "miss"
    if departed and departed[0].first_page == matched:
        first = departed[0]
        words = Left[first.why.upper()].words
        more = "more pages" if matched else "pages"
        return (
            f"{hit}: {first.pages} {more} would have hit until {format_age(first.ago_s)} ago, "
            f"when they were {words}"
        )
    if position is not None:
        return f"{hit}: the closest stored chain differs at token {position}"
    if extras_at is not None:
        return f"{hit}: page {extras_at} is stored with other extras"
    if elsewhere:
        names = ", ".join(each.field for each in elsewhere[0].differs) or "something unknown"
        return f"{hit}: {elsewhere[0].matched_tokens} tokens are stored where this differs: {names}"
    return f"{hit}: nothing is stored beyond token {matched * asked.page_tokens}"


def _token(tokens: bytes, position: int) -> int:
    return int.from_bytes(tokens[TOKEN_BYTES * position :][:TOKEN_BYTES], "little")


def _first_difference(
    state: StoreState, asked: Question, found: NDArray[np.int32]
) -> tuple[int | None, int | None, int | None]:
    """Where the stored page that agrees longest with what follows the match differs from it: the
    token's position and the stored token; the page, if only the extras differ."""
    page_bytes = TOKEN_BYTES * asked.page_tokens
    rest = asked.tokens[len(found) * page_bytes :][:page_bytes]
    last = int(found[-1]) if len(found) else NO_PAGE
    below = state.index.children(last) if last != NO_PAGE else state.root_pages(asked.root)
    best, stored = -1, None
    wanted = np.frombuffer(rest, dtype="<i4")
    for child in below:
        there = np.frombuffer(state.index.tokens_of(int(child)), dtype="<i4")[: len(wanted)]
        equal = there == wanted
        agrees = len(equal) if equal.all() else int(np.argmin(equal))
        if agrees == asked.page_tokens:  # and yet it did not match
            return None, None, len(found)
        if agrees > best and agrees < len(wanted):
            best, stored = agrees, int(there[agrees])
    if best < 0:
        return None, None, None
    return len(found) * asked.page_tokens + best, stored, None


def _departed(state: StoreState, asked: Question, matched: int) -> list[Departed]:
    """Pages beyond the match that the ghost list knows, as runs that left together."""
    keys = page_keys(asked.root, asked.tokens, asked.page_tokens, asked.extras, first=matched)
    with state.lock:
        ghosts = state.ghosts.find(keys)
        now = state.wall_clock()
    assert len(ghosts) == len(keys) // PAGE_KEY_BYTES
    runs: list[tuple[int, list[Ghost]]] = []
    for page, ghost in enumerate(ghosts, start=matched):
        if ghost is None:
            continue
        if runs:
            start, run = runs[-1]
            last = run[-1]
            together = abs(last.when_s - ghost.when_s) <= SAME_TIME_S
            same = (last.why, last.tiers) == (ghost.why, ghost.tiers)
            if start + len(run) == page and together and same:
                run.append(ghost)
                continue
        runs.append((page, [ghost]))
    return [
        Departed(
            first_page=start,
            pages=len(run),
            ago_s=max(0.0, now - run[0].when_s),
            why=run[0].why.name.lower(),
            tiers=tuple(name for bit, name in enumerate(TIER_NAMES) if run[0].tiers >> bit & 1),
        )
        for start, run in runs
    ]


def _elsewhere(
    state: StoreState, asked: Question, specs: Mapping[bytes, str], here: int
) -> list[Elsewhere]:
    """Trees in which this prompt has a longer chain than `here` tokens."""
    with state.lock:
        others = [
            (root, info)
            for root, info in state.trees.items()
            if root != asked.root and (asked.all_tenants or info.tenant == asked.tenant)
        ]
    longer = []
    for root, info in others:
        with state.lock:
            matched = len(state.index.match(root, asked.tokens, asked.extras)) * info.page_tokens
        if matched > here:
            longer.append(_named(asked, info, matched, specs))
    longer.sort(key=lambda each: (-each.matched_tokens, each.namespace, each.tenant))
    return longer[:ELSEWHERE_MAX]


def _named(asked: Question, info: TreeInfo, matched: int, specs: Mapping[bytes, str]) -> Elsewhere:
    here, there = specs.get(asked.namespace), specs.get(info.namespace)
    found: list[Difference] = []
    if info.tenant != asked.tenant:
        found.append(Difference("tenant", asked.tenant, info.tenant))
    if info.namespace != asked.namespace:
        if here is None or there is None:
            found.append(Difference("spec", here or UNKNOWN, there or UNKNOWN))
        else:
            found += differences(json.loads(here), json.loads(there))
    elif info.tenant == asked.tenant:
        here_salt = "none" if asked.root == asked.plain_root else "the one given"
        there_salt = "none" if info.root == asked.plain_root else "another"
        found.append(Difference("salt", here_salt, there_salt))
    model = json.loads(there)["model"] if there is not None else UNKNOWN
    return Elsewhere(info.namespace.hex(), info.tenant, model, matched, tuple(found))
