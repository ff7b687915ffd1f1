"""The calls of the service that operators and their tools make: list, inspect, explain, evict."""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from kvstore import cli_prompt, documents
from kvstore.errors import InvalidRequest
from kvstore.identity import DEFAULT_TENANT
from kvstore.kvstore_pb2 import Document, EvictReply
from kvstore.removal import Selection

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore import kvstore_pb2 as messages
    from kvstore.rpc_guard import Call
    from kvstore.store import Store

CHAINS_MAX = 10_000
CHAINS_DEFAULT = 50
SORTS = ("size", "age", "idle", "hits")


class OperatorCalls:
    """Functions by method name, for Guard.handlers()."""

    def __init__(self, store: Store, service_stats: Callable[[], dict[str, Any]]) -> None:
        self._store = store
        self._service_stats = service_stats

    def functions(self) -> dict[str, Callable[..., Any]]:
        """What answers each method."""
        return {
            "Evict": self.evict,
            "List": self.list,
            "Inspect": self.inspect,
            "Explain": self.explain,
            "Stats": self.stats,
        }

    def evict(self, request: messages.EvictRequest, call: Call) -> EvictReply:
        """Remove what the request selects, with all below it."""
        root = None
        tenant = request.tenant or None
        namespace = request.namespace_prefix or None
        if request.has_prefix:
            owner = tenant or DEFAULT_TENANT
            space = cli_prompt.choose_namespace(
                self._store, namespace.hex() if namespace else None, owner
            )
            root = self._store.root(space, owner)
        selection = Selection(
            tenant=tenant,
            namespace=namespace,
            prefix=request.tokens if request.has_prefix else None,
            root=root,
            writer=request.writer or None,
            unused_for_s=request.unused_for_s if request.HasField("unused_for_s") else None,
            older_than_s=request.older_than_s if request.HasField("older_than_s") else None,
            everything=request.everything,
        )
        done = self._store.evict(
            selection, dry_run=request.dry_run, include_pinned=request.include_pinned
        )
        return EvictReply(**asdict(done))

    def list(self, request: messages.ListRequest, call: Call) -> Document:
        """Namespaces and chains."""
        sort = request.sort or SORTS[0]
        if sort not in SORTS or request.limit > CHAINS_MAX:
            raise InvalidRequest(f"sort: one of {', '.join(SORTS)}; limit: at most {CHAINS_MAX}")
        chains, total = self._store.chains(limit=request.limit or CHAINS_DEFAULT, sort=sort)
        return _document(documents.listing(self._store.namespaces(), chains, total))

    def inspect(self, request: messages.InspectRequest, call: Call) -> Document:
        """One chain, page by page."""
        if not re.fullmatch(r"[0-9a-f]{1,32}", request.chain):
            raise InvalidRequest("chain: 1 to 32 hex digits that begin its id")
        found = self._store.find_chain(request.chain)
        if len(found) != 1:
            raise InvalidRequest(f"{len(found)} pages' ids begin with {request.chain}")
        spec = self._store.spec_json(bytes.fromhex(found[0][0].namespace))
        return _document(documents.chain_pages(*found[0], spec))

    def explain(self, request: messages.ExplainRequest, call: Call) -> Document:
        """Why a prompt hits or misses."""
        tenant = request.tenant or call.identity.tenant
        digits = request.namespace_prefix.hex() or None
        space = cli_prompt.choose_namespace(self._store, digits, tenant)
        found = self._store.explain(self._store.root(space, tenant), request.tokens)
        return _document(found.to_dict())

    def stats(self, request: messages.StatsRequest, call: Call) -> Document:
        """What is in the store, what happened since the start, and who is connected."""
        return _document(self._store.stats().to_dict() | {"service": self._service_stats()})


def _document(content: dict[str, Any]) -> Document:
    return Document(json=documents.to_json(content))
