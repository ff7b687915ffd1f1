"""The calls of the service that operators and their tools make: list, inspect, explain, evict."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from kvstore import cli_prompt, documents
from kvstore.errors import InvalidRequest
from kvstore.export_file import PieceReader
from kvstore.identity import DEFAULT_TENANT, Role
from kvstore.inspection import SORTS
from kvstore.kvstore_pb2 import Document, EvictReply, ImportHeader, PinReply
from kvstore.removal import Selection
from kvstore.servicer import extras_of
from kvstore.store_stats import Stats
from kvstore.tenant import NAMESPACE_BYTES
from kvstore.wire import CHAINS_MAX, PIECE_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvstore import kvstore_pb2 as messages
    from kvstore.rpc_guard import Call
    from kvstore.session_registry import SessionRegistry
    from kvstore.store import Store
    from kvstore.tenant_usage import TenantUsage

CHAINS_DEFAULT = 50
BRANCHES_DEFAULT = 200


class OperatorCalls:
    """Functions by method name, for Guard.handlers()."""

    def __init__(
        self,
        store: Store,
        registry: SessionRegistry,
        service_stats: Callable[[], dict[str, Any]],
    ) -> None:
        self._store = store
        self._registry = registry
        self._service_stats = service_stats

    def functions(self) -> dict[str, Callable[..., Any]]:
        """What answers each method."""
        return {
            "Evict": self.evict,
            "List": self.list,
            "Inspect": self.inspect,
            "Explain": self.explain,
            "Stats": self.stats,
            "Tree": self.tree,
            "PinChain": self.pin_chain,
            "Record": self.record,
            "Verify": self.verify,
            "Export": self.export,
            "Import": self.import_pages,
        }

    def evict(self, request: messages.EvictRequest, call: Call) -> EvictReply:
        """Remove what the request selects, with all below it."""
        tenant = request.tenant or None
        namespace = request.namespace_prefix or None
        if request.has_prefix:
            tenant = tenant or DEFAULT_TENANT
            digits = namespace.hex() if namespace else None
            namespace = cli_prompt.choose_namespace(self._store, digits, tenant)
        selection = Selection(
            tenant=tenant,
            namespace=namespace,
            prefix=request.tokens if request.has_prefix else None,
            extras=extras_of(request.extras),
            writer=request.writer or None,
            unused_for_s=request.unused_for_s if request.HasField("unused_for_s") else None,
            older_than_s=request.older_than_s if request.HasField("older_than_s") else None,
            everything=request.everything,
            tier=request.tier or None,
        )
        done = self._store.evict(
            selection,
            dry_run=request.dry_run,
            include_pinned=request.include_pinned,
            erase_key=request.erase_key,
        )
        return EvictReply(**asdict(done))

    def list(self, request: messages.ListRequest, call: Call) -> Document:
        """Namespaces and chains."""
        sort = request.sort or SORTS[0]
        if request.limit > CHAINS_MAX:
            raise InvalidRequest(f"limit: {request.limit} chains; at most {CHAINS_MAX} are listed")
        chains, total = self._store.chains(
            limit=request.limit or CHAINS_DEFAULT, sort=sort, tier=request.tier or None
        )
        return _document(documents.listing(self._store.namespaces(), chains, total))

    def inspect(self, request: messages.InspectRequest, call: Call) -> Document:
        """One chain, page by page."""
        found = self._store.find_chain(request.chain)
        if request.several:
            return _document({"found": [each.to_dict() for each in found]})
        if len(found) != 1:
            raise InvalidRequest(f"{len(found)} pages' ids begin with {request.chain}")
        return _document(found[0].to_dict())

    def explain(self, request: messages.ExplainRequest, call: Call) -> Document:
        """Why a prompt hits or misses."""
        tenant = request.tenant or call.identity.tenant
        spec, space = request.spec_json or None, request.namespace_prefix
        if len(space) != NAMESPACE_BYTES:
            space = cli_prompt.choose_namespace(self._store, space.hex() or None, tenant)
        found = self._store.explain(
            request.tokens,
            namespace=space,
            tenant=tenant,
            extras=extras_of(request.extras),
            salt=request.salt,
            spec_json=spec,
            all_tenants=call.identity.role is Role.ADMIN and not request.own_tenant_only,
        )
        return _document(found.to_dict())

    def tree(self, request: messages.TreeRequest, call: Call) -> Document:
        """The radix trees, folded."""
        views = self._store.tree(
            tenant=request.tenant or None,
            namespace=request.namespace_prefix or None,
            depth=request.depth or None,
            branches=request.branches or BRANCHES_DEFAULT,
        )
        return _document({"trees": [each.to_dict() for each in views]})

    def pin_chain(self, request: messages.PinChainRequest, call: Call) -> PinReply:
        """Keep a chain, or keep it no longer."""
        return PinReply(pages=self._store.pin_chain(request.chain, request.ttl_s))

    def record(self, request: messages.RecordRequest, call: Call) -> Document:
        """Record look-ups, end that, or say how far it is."""
        store = self._store
        if request.start:
            return _document(store.start_recording(request.start, request.bytes_max).to_dict())
        found = store.stop_recording() if request.stop else store.recording()
        return _document(found.to_dict())

    def verify(self, request: messages.VerifyRequest, call: Call) -> Iterator[Document]:
        """Check everything; ends early when nobody listens any more."""
        for found in self._store.verify(repair=request.repair):
            call.confirm()
            yield _document(found.to_dict())

    def export(self, request: messages.ExportRequest, call: Call) -> Iterator[bytes]:
        """The file of an export, in pieces."""
        for frame in self._store.export(
            tenant=request.tenant or None,
            namespace=request.namespace_prefix or None,
            chain=request.chain or None,
        ):
            call.confirm()
            for start in range(0, len(frame), PIECE_BYTES):
                yield frame[start : start + PIECE_BYTES]

    def import_pages(self, pieces: Iterator[bytes], call: Call) -> Iterator[Document]:
        """Read such a file in."""
        header = next(pieces, None)
        if header is None:
            raise InvalidRequest("Import: a header is missing")
        tenant = ImportHeader.FromString(header).tenant or None
        for found in self._store.import_pages(PieceReader(pieces), tenant=tenant):
            call.confirm()
            yield _document(found.to_dict())

    def stats(self, request: messages.StatsRequest, call: Call) -> Document:
        """What is in the store, what happened since the start, and who is connected.

        To others than operators: what their own tenant has, and no number of anybody else.
        """
        if call.identity.role is not Role.ADMIN:
            return _document(self._own_stats(call.identity.tenant).to_dict())
        tenants = [self._tenant(each) for each in self._store.tenant_usages()]
        found = replace(self._store.stats(), service=self._service_stats(), tenants=tenants)
        return _document(found.to_dict())

    def _own_stats(self, tenant: str) -> Stats:
        mine = self._store.tenant_usage(tenant)
        return Stats(
            directory="",
            warm=self._store.warm,
            pages=mine.pages,
            nodes=0,
            index_bytes=0,
            trees=0,
            leases=0,
            pinned_pages=mine.pinned_pages,
            dirty_bytes=0,
            tiers=(),
            counters={},
            tenants=[self._tenant(mine)],
        )

    def _tenant(self, found: TenantUsage) -> dict[str, Any]:
        return found.to_dict() | self._registry.held_by(found.tenant)


def _document(content: dict[str, Any]) -> Document:
    return Document(json=documents.to_json(content))
