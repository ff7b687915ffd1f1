"""Write chains of an open store to a stream: see export_file.py for what it looks like.

Each chain is leased while its pages are read, so that nothing moves; each page is checked against
its checksum before it is written. Trees with a salt are left out, since a salt is not stored and
nobody could ask for them again; so are trees whose spec the store has not met.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from kvstore._version import __version__
from kvstore.export_file import FORMAT, FrameWriter
from kvstore.page_sweep import chain_ends
from kvstore.state import DISK, HOST, NO_PAGE
from kvstore.tiers.checksum import checksum
from kvstore.tiers.file_layer import aligned_buffer
from kvstore.tiers.tier import ReadStatus, TierError, aligned

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from kvstore.state import StoreState, TreeInfo
    from kvstore.tiers.tier import PageRecord

RUN_BYTES = 16 << 20
RUN_PAGES = 256


class Exporter:
    """One export."""

    def __init__(
        self,
        state: StoreState,
        specs: Mapping[bytes, str],
        root_of: Callable[[bytes, str], bytes],
        *,
        tenant: str | None,
        namespace: bytes | None,
        ends: list[int] | None,
    ) -> None:
        """root_of: the root of a namespace and tenant without a salt. ends: last pages of the
        chains that are wanted, instead of all."""
        self._state = state
        self._specs = specs
        self._root_of = root_of
        self._tenant = tenant
        self._namespace = namespace
        self._ends = ends
        self._out = FrameWriter()
        self._runs = self._pages = self._bytes = self._trees = 0
        self._salted = self._unknown = self._damaged = 0

    def run(self) -> Iterator[bytes]:
        """The file, frame by frame."""
        yield self._out.frame(b"FILE", {"format": FORMAT, "kvstore": __version__})
        wanted = []
        for info in self._chosen():
            if info.root != self._root_of(info.namespace, info.tenant):
                self._salted += 1
            elif info.namespace not in self._specs:
                self._unknown += 1
            else:
                wanted.append(info)
        leaves = self._leaves([info.root for info in wanted])
        for info in wanted:
            self._trees += 1
            head = {"tenant": info.tenant, "spec": json.loads(self._specs[info.namespace])}
            yield self._out.frame(b"TREE", head)
            yield from self._tree(info, leaves[info.root])
        yield self._out.frame(
            b"END ",
            {
                "trees": self._trees,
                "runs": self._runs,
                "pages": self._pages,
                "payload_bytes": self._bytes,
                "trees_with_salt": self._salted,
                "trees_without_spec": self._unknown,
                "damaged_pages": self._damaged,
            },
        )

    def _chosen(self) -> list[TreeInfo]:
        state = self._state
        with state.lock:
            state.require_open()
            wanted = None
            if self._ends is not None:
                wanted = {state.index.root_of(end) for end in self._ends}
            return [
                info
                for root, info in state.trees.items()
                if (wanted is None or root in wanted)
                and self._tenant in (None, info.tenant)
                and (self._namespace is None or info.namespace.startswith(self._namespace))
            ]

    def _leaves(self, roots: list[bytes]) -> dict[bytes, list[tuple[int, int]]]:
        """Last pages of the chains that are wanted, with their sequence numbers, by tree."""
        state = self._state
        if self._ends is None:
            return chain_ends(state, roots)
        found: dict[bytes, list[tuple[int, int]]] = {root: [] for root in roots}
        with state.lock:
            table = state.index.table
            for end in self._ends:
                if table.is_live(end) and state.index.root_of(end) in found:
                    found[state.index.root_of(end)].append((end, int(table.sequence[end])))
        return found

    def _tree(self, info: TreeInfo, leaves: list[tuple[int, int]]) -> Iterator[bytes]:
        """Chain by chain, each page once: what chains share comes with the first of them."""
        state = self._state
        written: set[int] = set()  # sequence numbers: a page's id may be another's by now
        for leaf, mark in leaves:
            with state.lock:
                state.require_open()
                table = state.index.table
                if not table.is_live(leaf) or int(table.sequence[leaf]) != mark:
                    continue
                state.index.lease(leaf)
                chain = state.cut_condemned(state.cut_remote(state.index.chain(leaf))).tolist()
            try:
                yield from self._chain(info, chain, written)
            finally:
                with state.lock:
                    if not state.closed:
                        state.index.unlease(leaf)
                        state.retry_condemned()
                        state.changed.notify_all()

    def _chain(self, info: TreeInfo, chain: list[int], written: set[int]) -> Iterator[bytes]:
        with self._state.lock:
            records = [self._state.record(page) for page in chain]
        fresh = [at for at, record in enumerate(records) if record.sequence not in written]
        if not fresh:
            return
        step = max(1, min(RUN_PAGES, RUN_BYTES // info.page_bytes))
        for start in range(fresh[0], len(chain), step):
            run = slice(start, start + step)
            payloads = self._payloads(chain[run], records[run])
            if payloads:
                yield from self._frames(records[: start + len(payloads)], start, payloads)
                written.update(record.sequence for record in records[run][: len(payloads)])
            if len(payloads) < len(records[run]):
                self._damaged += 1
                return

    def _frames(
        self, records: list[PageRecord], start: int, payloads: list[memoryview]
    ) -> Iterator[bytes]:
        head = {
            "start": start,
            "pages": len(payloads),
            "writer": records[-1].writer,
            "extras": {
                str(at): record.extras.hex() for at, record in enumerate(records) if record.extras
            },
        }
        yield self._out.frame(b"RUN ", head, b"".join(record.tokens for record in records))
        for payload in payloads:
            yield self._out.frame(b"PAGE", {}, payload)
        self._runs += 1
        self._pages += len(payloads)
        self._bytes += sum(map(len, payloads))

    def _payloads(self, pages: list[int], records: list[PageRecord]) -> list[memoryview]:
        """The leading pages whose bytes are as they should be, copied."""
        state = self._state
        buffers = [aligned_buffer(aligned(record.payload_bytes)) for record in records]
        with state.lock:
            table = state.index.table
            slots = [int(table.slot[HOST][page]) for page in pages]
            places = [int(table.slot[DISK][page]) for page in pages]
        good = [self._from_host(*each) for each in zip(slots, records, buffers, strict=True)]
        missing = [at for at, done in enumerate(good) if not done and places[at] != NO_PAGE]
        if missing and state.disk is not None:
            try:
                statuses = state.disk.read_many(
                    [places[at] for at in missing],
                    [records[at] for at in missing],
                    [buffers[at] for at in missing],
                )
            except TierError:
                statuses = [ReadStatus.ERROR] * len(missing)
            for at, status in zip(missing, statuses, strict=True):
                good[at] = status is ReadStatus.OK
        sound = good.index(False) if False in good else len(good)
        return [
            buffer[: record.payload_bytes]
            for buffer, record in zip(buffers[:sound], records, strict=False)
        ]

    def _from_host(self, slot: int, record: PageRecord, buffer: memoryview) -> bool:
        host = self._state.host
        if slot < 0 or host is None:
            return False
        target = buffer[: record.payload_bytes]
        target[:] = host.view(slot, record.payload_bytes)
        return bool(checksum(target) == record.checksum)
