"""Looking inside: namespaces, chains, why a prompt hits or misses. Changes nothing."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvstore.prefix_index.page_key import TOKEN_BYTES
from kvstore.state import DISK, HOST, NO_PAGE, TIER_NAMES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from numpy.typing import NDArray

    from kvstore.state import StoreState, TreeInfo


SORTS = ("size", "age", "idle", "hits")
FOUND_MAX = 20  # chains that one beginning of an id may name


@dataclass(frozen=True, slots=True)
class NamespaceUsage:
    """One (namespace, tenant, salt): pages that can stand for each other."""

    namespace: str  # hex
    tenant: str
    root: str  # hex, the first 8 bytes: enough to tell salts apart
    model: str
    page_tokens: int
    page_bytes: int
    chains: int
    pages: int
    payload_bytes: int
    host_pages: int
    disk_pages: int


@dataclass(frozen=True, slots=True)
class Chain:
    """One chain from its first page to a page without descendants."""

    chain_id: str  # hex of the last page's key
    namespace: str
    tenant: str
    model: str
    pages: int
    tokens: int
    payload_bytes: int  # of all its pages, shared ones too
    host_pages: int
    disk_pages: int
    hits: int  # of the last page, since the store was opened
    idle_s: float  # since the last page was asked for; since it was stored, after a restart
    age_s: float  # since the last page was stored
    writer: str
    leased: bool
    pinned: bool

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class PageFacts:
    """One page of a chain."""

    page_index: int
    key: str
    tiers: tuple[str, ...]
    host_slot: int | None
    disk_slot: int | None
    payload_bytes: int
    checksum: str
    hits: int
    created_s: int
    writer: str
    first_token: int
    leased: bool
    pinned: bool
    extras_bytes: int


@dataclass(frozen=True, slots=True)
class FoundChain:
    """The chain that ends in one page, page by page, and the spec of its namespace."""

    chain: Chain
    pages: tuple[PageFacts, ...]
    spec: dict[str, Any] | None  # None: this store has not met it since it has the pages

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


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
    other_namespaces: tuple[str, ...]  # where this prompt has a longer chain

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def namespaces(state: StoreState, models: dict[bytes, str]) -> list[NamespaceUsage]:
    """Every tree that has pages, the largest first. `models`: names by namespace."""
    rows = []
    with state.lock:
        state.require_open()
        table = state.index.table
        for root, info in state.trees.items():
            pages = tree_pages(state, root)
            if len(pages) == 0:
                continue
            rows.append(
                NamespaceUsage(
                    namespace=info.namespace.hex(),
                    tenant=info.tenant,
                    root=root[:8].hex(),
                    model=models.get(info.namespace, "?"),
                    page_tokens=info.page_tokens,
                    page_bytes=info.page_bytes,
                    chains=sum(1 for _ in state.index.leaves(root)),
                    pages=len(pages),
                    payload_bytes=int(table.payload_bytes[pages].sum()),
                    host_pages=int(np.count_nonzero(state.in_tier(pages, HOST))),
                    disk_pages=int(np.count_nonzero(state.in_tier(pages, DISK))),
                )
            )
    return sorted(rows, key=lambda row: -row.payload_bytes)


def tree_pages(state: StoreState, root: bytes) -> NDArray[np.int32]:
    """All pages of one tree, parents first."""
    parts = [state.index.subtree(top) for top in state.root_pages(root)]
    return np.concatenate(parts) if parts else np.empty(0, np.int32)


def chains(
    state: StoreState, models: dict[bytes, str], *, limit: int, sort: str = "size"
) -> tuple[list[Chain], int]:
    """The first `limit` chains by "size", "age", "idle" or "hits", and how many there are."""
    with state.lock:
        state.require_open()
        table = state.index.table
        keys: dict[str, Callable[[int], float]] = {
            "size": lambda end: -int(table.depth[end]),
            "age": lambda end: int(table.created[end]),
            "idle": lambda end: float(table.last_use[end]),
            "hits": lambda end: -int(table.hits[end]),
        }
        key = keys[sort]
        ends = sorted(_ends(state), key=lambda pair: key(pair[0]))
        return [_chain(state, models, end, info) for end, info in ends[:limit]], len(ends)


def find_chain(state: StoreState, chain_id: str) -> list[int]:
    """Pages whose key begins with `chain_id` (hex), at most FOUND_MAX."""
    whole = np.frombuffer(bytes.fromhex(chain_id[: len(chain_id) // 2 * 2]), np.uint8)
    with state.lock:
        state.require_open()
        live = state.index.table.live()
        keys = np.ascontiguousarray(state.index.table.key[live]).view(np.uint8)
        keys = keys.reshape(len(live), -1)
        fits = (keys[:, : len(whole)] == whole).all(axis=1)
        if len(chain_id) % 2:
            fits &= keys[:, len(whole)] >> 4 == int(chain_id[-1], 16)
        found: list[int] = live[fits][:FOUND_MAX].tolist()
        return found


def found_chains(
    state: StoreState, chain_id: str, specs: Mapping[bytes, str], models: dict[bytes, str]
) -> list[FoundChain]:
    """The chains that end in pages whose key begins with `chain_id`. `specs`: JSON by namespace."""
    found = []
    with state.lock:
        for page in find_chain(state, chain_id):
            info = state.trees[state.index.root_of(page)]
            spec = specs.get(info.namespace)
            found.append(
                FoundChain(
                    chain=_chain(state, models, page, info),
                    pages=tuple(_facts(state, each) for each in state.index.chain(page).tolist()),
                    spec=json.loads(spec) if spec else None,
                )
            )
    return found


def explain(
    state: StoreState, root: bytes, tokens: bytes, extras: dict[int, bytes] | None = None
) -> Explanation:
    """Longest stored chain of a prompt in one tree, and where the closest chain differs."""
    with state.lock:
        state.require_open()
        page_tokens = state.trees[root].page_tokens
        found = state.index.match(root, tokens, extras)
        in_host = int(np.count_nonzero(state.in_tier(found, HOST)))
        position, stored = _first_difference(state, root, tokens, found)
        others = _longer_elsewhere(state, root, tokens, extras, len(found) * page_tokens)
        count = len(tokens) // TOKEN_BYTES
        return Explanation(
            prompt_tokens=count,
            prompt_pages=count // page_tokens,
            matched_pages=len(found),
            matched_tokens=len(found) * page_tokens,
            host_pages=in_host,
            disk_pages=int(
                np.count_nonzero(~state.in_tier(found, HOST) & state.in_tier(found, DISK))
            ),
            verdict=_verdict(count, page_tokens, len(found), position),
            differs_at=position,
            prompt_token=_token(tokens, position) if position is not None else None,
            stored_token=stored,
            other_namespaces=tuple(others),
        )


def _verdict(count: int, page_tokens: int, matched: int, position: int | None) -> str:
    whole = count // page_tokens
    if whole == 0:
        return f"miss: a prompt of {count} tokens is shorter than a page of {page_tokens}"
    if matched == whole:
        return f"hit: all {whole} whole pages are stored"
    hit = f"hit on {matched} of {whole} pages" if matched else "miss"
    if position is None:
        return f"{hit}: nothing is stored beyond token {matched * page_tokens}"
    return f"{hit}: the closest stored chain differs at token {position}"


def _token(tokens: bytes, position: int) -> int:
    return int.from_bytes(tokens[TOKEN_BYTES * position :][:TOKEN_BYTES], "little")


def _first_difference(
    state: StoreState, root: bytes, tokens: bytes, found: NDArray[np.int32]
) -> tuple[int | None, int | None]:
    """Where the stored page that agrees longest with what follows the match differs from it."""
    page_bytes = TOKEN_BYTES * state.trees[root].page_tokens
    rest = tokens[len(found) * page_bytes :][:page_bytes]
    last = int(found[-1]) if len(found) else NO_PAGE
    below = state.index.children(last) if last != NO_PAGE else state.root_pages(root)
    best, stored = -1, None
    wanted = np.frombuffer(rest, dtype="<i4")
    for child in below:
        there = np.frombuffer(state.index.tokens_of(int(child)), dtype="<i4")[: len(wanted)]
        equal = there == wanted
        agrees = len(equal) if equal.all() else int(np.argmin(equal))
        if agrees > best and agrees < len(wanted):
            best, stored = agrees, int(there[agrees])
    if best < 0:
        return None, None
    return len(found) * page_bytes // TOKEN_BYTES + best, stored


def _longer_elsewhere(
    state: StoreState, root: bytes, tokens: bytes, extras: dict[int, bytes] | None, here: int
) -> list[str]:
    """Namespaces of the same tenant in which this prompt has a longer chain."""
    tenant = state.trees[root].tenant
    longer = set()
    for other, info in state.trees.items():
        if other == root or info.tenant != tenant:
            continue
        if len(state.index.match(other, tokens, extras)) * info.page_tokens > here:
            longer.add(info.namespace.hex())
    return sorted(longer)


def _ends(state: StoreState) -> Iterator[tuple[int, TreeInfo]]:
    for root, info in state.trees.items():
        for end in state.index.leaves(root):
            yield int(end), info


def _chain(state: StoreState, models: dict[bytes, str], end: int, info: TreeInfo) -> Chain:
    table = state.index.table
    pages = state.index.chain(end)
    return Chain(
        chain_id=table.key[end].tobytes().hex(),
        namespace=info.namespace.hex(),
        tenant=info.tenant,
        model=models.get(info.namespace, "?"),
        pages=len(pages),
        tokens=len(pages) * info.page_tokens,
        payload_bytes=int(table.payload_bytes[pages].sum()),
        host_pages=int(np.count_nonzero(state.in_tier(pages, HOST))),
        disk_pages=int(np.count_nonzero(state.in_tier(pages, DISK))),
        hits=int(table.hits[end]),
        idle_s=max(0.0, state.clock() - float(table.last_use[end])),
        age_s=max(0.0, state.wall_clock() - int(table.created[end])),
        writer=state.writers[int(table.writer[end])],
        leased=state.is_leased(end),
        pinned=state.is_pinned(end),
    )


def _facts(state: StoreState, page: int) -> PageFacts:
    table = state.index.table
    in_host, in_disk = (bool((table.state[page] >> tier) & 1) for tier in (HOST, DISK))
    tokens = state.index.tokens_of(page)
    return PageFacts(
        page_index=int(table.depth[page]),
        key=table.key[page].tobytes().hex(),
        tiers=tuple(
            name for tier, name in enumerate(TIER_NAMES) if (table.state[page] >> tier) & 1
        ),
        host_slot=int(table.slot[HOST][page]) if in_host else None,
        disk_slot=int(table.slot[DISK][page]) if in_disk else None,
        payload_bytes=int(table.payload_bytes[page]),
        checksum=table.checksum[page].tobytes().hex(),
        hits=int(table.hits[page]),
        created_s=int(table.created[page]),
        writer=state.writers[int(table.writer[page])],
        first_token=_token(tokens, 0),
        leased=state.is_leased(page),
        pinned=state.is_pinned(page),
        extras_bytes=len(state.index.extras_of(page)),
    )
