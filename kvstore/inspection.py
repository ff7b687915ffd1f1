"""Looking inside: namespaces, chains and their pages. Changes nothing.

What walks over a whole store does so in pieces, so that no look-up waits for it.
"""

from __future__ import annotations

import functools
import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvstore.errors import InvalidRequest
from kvstore.page_sweep import NODES_A_HOLD, each_end, each_page
from kvstore.prefix_index.page_key import PAGE_KEY_BYTES, TOKEN_BYTES
from kvstore.state import DISK, HOST, TIER_NAMES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

    from kvstore.state import StoreState, TreeInfo


SORTS = ("size", "age", "idle", "hits", "host", "disk")
TIERS_LISTED = {"host": HOST, "disk": DISK}
CHAINS_A_HOLD = 16  # walked page by page
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


def check_order(limit: int, sort: str, tier: str | None) -> None:
    """Refuse, with InvalidRequest, what chains() does not know."""
    if sort not in SORTS or not isinstance(limit, int) or limit < 0:
        raise InvalidRequest(f"chains: sort is one of {', '.join(SORTS)}, limit >= 0")
    if tier is not None and tier not in TIERS_LISTED:
        raise InvalidRequest(f"tier {tier!r}: one of {', '.join(TIERS_LISTED)} is needed")


def namespaces(state: StoreState, models: dict[bytes, str]) -> list[NamespaceUsage]:
    """Every tree that has pages, the largest first. `models`: names by namespace.

    Counted in pieces, while pages come and go: exact where nothing changes meanwhile.
    """
    sums: dict[bytes, _Sums] = {}
    waiting: list[_Piece] = []

    def copy_pages(live: NDArray[np.int32]) -> None:
        table = state.index.table
        columns = table.payload_bytes[live].astype(np.int64), table.state[live]
        waiting.append(_Piece(*_infos(state, live), *columns))

    def copy_ends(ends: NDArray[np.int32]) -> None:
        waiting.append(_Piece(*_infos(state, ends)))

    def add_up() -> None:
        while waiting:
            waiting.pop().add_to(sums)

    each_page(state, copy_pages, add_up)
    each_end(state, copy_ends, then=add_up)
    rows = [
        NamespaceUsage(
            namespace=found.info.namespace.hex(),
            tenant=found.info.tenant,
            root=root[:8].hex(),
            model=models.get(found.info.namespace, "?"),
            page_tokens=found.info.page_tokens,
            page_bytes=found.info.page_bytes,
            chains=found.chains,
            pages=found.pages,
            payload_bytes=found.payload_bytes,
            host_pages=found.host_pages,
            disk_pages=found.disk_pages,
        )
        for root, found in sums.items()
        if found.pages
    ]
    return sorted(rows, key=lambda row: -row.payload_bytes)


@dataclass(slots=True)
class _Sums:
    """What a walk has found of one tree so far."""

    info: TreeInfo
    chains: int = 0
    pages: int = 0
    payload_bytes: int = 0
    host_pages: int = 0
    disk_pages: int = 0


@dataclass(frozen=True, slots=True)
class _Piece:
    """What was copied in one hold of the lock: pages, or ends of chains where sizes are missing."""

    infos: list[TreeInfo]
    places: NDArray[np.intp]  # by page, which of them is its tree's
    sizes: NDArray[np.int64] | None = None
    states: NDArray[np.uint8] | None = None

    def add_to(self, sums: dict[bytes, _Sums]) -> None:
        """Without the lock, and without a step a page."""
        many = len(self.infos)
        counts = np.bincount(self.places, minlength=many).tolist()
        if self.sizes is None or self.states is None:
            for info, chains in zip(self.infos, counts, strict=True):
                sums.setdefault(info.root, _Sums(info)).chains += chains
            return
        sizes = np.zeros(many, np.int64)
        np.add.at(sizes, self.places, self.sizes)
        host, disk = (
            np.bincount(self.places[self.states >> tier & 1 == 1], minlength=many)
            for tier in (HOST, DISK)
        )
        for number, info in enumerate(self.infos):
            found = sums.setdefault(info.root, _Sums(info))
            found.pages += counts[number]
            found.payload_bytes += int(sizes[number])
            found.host_pages += int(host[number])
            found.disk_pages += int(disk[number])


def _infos(state: StoreState, pages: NDArray[np.int32]) -> tuple[list[TreeInfo], NDArray[np.intp]]:
    roots, places = state.index.by_tree(pages)
    return [state.trees[root] for root in roots], places


def chains(
    state: StoreState,
    models: dict[bytes, str],
    *,
    limit: int,
    sort: str = "size",
    tier: str | None = None,
) -> tuple[list[Chain], int]:
    """The first `limit` chains by one of SORTS, and how many there are. "host" and "disk": those
    with most pages there first. tier: only chains that have a page there.

    Found in pieces, while pages come and go; a chain that has gone when its turn comes is left out.
    """
    table = state.index.table
    keys: dict[str, Callable[[NDArray[np.int32]], NDArray[Any]]] = {
        "size": lambda ends: -table.depth[ends].astype(np.int64),
        "age": lambda ends: table.created[ends],
        "idle": lambda ends: table.last_use[ends],
        "hits": lambda ends: -table.hits[ends].astype(np.int64),
    }
    for name, number in TIERS_LISTED.items():
        keys[name] = functools.partial(_fewest_in, state, number)
    wanted = TIERS_LISTED[tier] if tier is not None else None
    pages: list[NDArray[np.int32]] = []
    sequences: list[NDArray[np.uint64]] = []
    ranks: list[NDArray[Any]] = []

    def note(ends: NDArray[np.int32]) -> None:
        if wanted is not None:
            ends = ends[_fewest_in(state, wanted, ends) < 0]
        pages.append(ends)
        sequences.append(table.sequence[ends])
        ranks.append(keys[sort](ends))

    walks = wanted is not None or sort in TIERS_LISTED
    each_end(state, note, CHAINS_A_HOLD if walks else NODES_A_HOLD)
    ids, marks = np.concatenate(pages), np.concatenate(sequences)
    found = []
    order = np.argsort(np.concatenate(ranks), kind="stable")[:limit].tolist()
    for part in state.pieces(len(order)):
        with state.lock:
            state.require_open()
            for position in order[part]:
                end = int(ids[position])
                if table.is_live(end) and table.sequence[end] == marks[position]:
                    info = state.trees[state.index.root_of(end)]
                    found.append(_chain(state, models, end, info))
    return found, len(ids)


def _fewest_in(state: StoreState, tier: int, ends: NDArray[np.int32]) -> NDArray[np.int64]:
    """Minus how many pages of each of these chains are in a tier."""
    counts = (
        np.count_nonzero(state.in_tier(state.index.chain(end), tier)) for end in ends.tolist()
    )
    return -np.fromiter(counts, np.int64, len(ends))


def find_chain(state: StoreState, chain_id: str) -> list[int]:
    """Pages whose key begins with `chain_id` (hex), at most FOUND_MAX."""
    whole = np.frombuffer(bytes.fromhex(chain_id[: len(chain_id) // 2 * 2]), np.uint8)
    found: list[int] = []

    def look(live: NDArray[np.int32]) -> None:
        keys = np.ascontiguousarray(state.index.table.key[live]).view(np.uint8)
        keys = keys.reshape(len(live), PAGE_KEY_BYTES)
        fits = (keys[:, : len(whole)] == whole).all(axis=1)
        if len(chain_id) % 2:
            fits &= keys[:, len(whole)] >> 4 == int(chain_id[-1], 16)
        found.extend(live[fits].tolist())

    each_page(state, look)
    return found[:FOUND_MAX]


def not_one(count: int, chain_id: str) -> str:
    """In a sentence, that so many pages were found instead of one."""
    if not count:
        return f"no page's id begins with {chain_id}; `kvstore ls` shows chains"
    return f"{count} pages' ids begin with {chain_id}; one is needed, so give more digits of it"


def found_chains(
    state: StoreState, chain_id: str, specs: Mapping[bytes, str], models: dict[bytes, str]
) -> list[FoundChain]:
    """The chains that end in pages whose key begins with `chain_id`. `specs`: JSON by namespace."""
    found = []
    for page in find_chain(state, chain_id):
        with state.lock:
            state.require_open()
            if not state.index.table.is_live(page):  # gone since it was found
                continue
            info = state.trees[state.index.root_of(page)]
            chain, pages = _chain(state, models, page, info), state.index.chain(page)
            if not chain.chain_id.startswith(chain_id.lower()):  # another page stands there now
                continue
            state.index.lease(page)
        try:
            facts = []
            for part in state.pieces(len(pages)):
                with state.lock:
                    facts += [_facts(state, each) for each in pages[part].tolist()]
        finally:
            _let_go(state, page)
        spec = specs.get(info.namespace)
        found.append(FoundChain(chain, tuple(facts), json.loads(spec) if spec else None))
    return found


def _let_go(state: StoreState, page: int) -> None:
    with state.lock:
        if not state.closed:
            state.index.unlease(page)
            state.retry_condemned()
            state.changed.notify_all()


def chain_to(state: StoreState, models: dict[bytes, str], page: int) -> Chain:
    """The chain that ends in this live page; others may go on from there. The lock is held."""
    return _chain(state, models, page, state.trees[state.index.root_of(page)])


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
        first_token=int.from_bytes(tokens[:TOKEN_BYTES], "little"),
        leased=state.is_leased(page),
        pinned=state.is_pinned(page),
        extras_bytes=len(state.index.extras_of(page)),
    )
