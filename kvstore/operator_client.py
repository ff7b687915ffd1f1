"""What an operator asks of a server: the calls of Store that look inside, evict, flush and watch.

Same arguments and same records as the library's. Other than an engine's calls these raise, and say
why: AccessDenied, ServerUnavailable, or what the server itself refused the call with.
"""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING, Any, TypeVar

from kvstore import documents
from kvstore import kvstore_pb2 as pb
from kvstore.client_channel import CallFailed, Failure
from kvstore.client_link import ServerLink
from kvstore.errors import (
    AccessDenied,
    CapacityError,
    ClosedError,
    DirectoryError,
    InvalidRequest,
    KVStoreError,
    ServerUnavailable,
)
from kvstore.event_log import PageEvent
from kvstore.explanation import Explanation
from kvstore.importer import Imported
from kvstore.inspection import Chain, FoundChain, NamespaceUsage, PageFacts
from kvstore.recorder import Recording
from kvstore.recording import BYTES_DEFAULT, Wish
from kvstore.removal import Eviction, Selection
from kvstore.request import (
    checked_chain_id,
    checked_deadline,
    checked_extras,
    checked_sequence,
    checked_tokens,
)
from kvstore.store_stats import Stats, TierStats
from kvstore.tls_trouble import tls_trouble
from kvstore.tree_view import Branch, TreeView
from kvstore.verification import Problem, Verification
from kvstore.wire import CHAINS_MAX, CONTROL_BYTES_MAX, DEADLINE_S_MAX, PIECE_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvstore.client_config import ClientConfig
    from kvstore.private_server import PrivateServer
    from kvstore.request import Extras, Tokens
    from kvstore.server_address import ServerAddress

Record = TypeVar("Record")

DEFAULT_TENANT = "default"
QUESTION_S = 30.0  # a listing of many chains takes seconds
QUESTION_MARGIN_S = 1.0
WATCH_BACKOFF_S = 0.25
PROMPT_BYTES_MAX = CONTROL_BYTES_MAX - (64 << 10)

_ERRORS: dict[Failure, type[KVStoreError]] = {
    Failure.DENIED: AccessDenied,
    Failure.INVALID: InvalidRequest,
    Failure.BUSY: CapacityError,
    Failure.REFUSED: DirectoryError,
}


class OperatorClient:
    """The operator's half of a connection; RemoteStore adds sessions. Thread-safe; close it."""

    def __init__(
        self, address: ServerAddress, config: ClientConfig, private: PrivateServer | None = None
    ) -> None:
        """Returns at once, whether there is a server or not. Raises ConfigError."""
        self.config = config
        self._link = ServerLink(address, config, private)
        self._closing = threading.Event()

    def namespaces(self) -> list[NamespaceUsage]:
        """Every (namespace, tenant, salt) that has pages, the largest first."""
        found = self._document("List", pb.ListRequest(limit=1))
        return self._records(NamespaceUsage, found, "namespaces")

    def chains(
        self, *, limit: int = 50, sort: str = "size", tier: str | None = None
    ) -> tuple[list[Chain], int]:
        """See OperatorLike."""
        if not isinstance(limit, int) or not 0 <= limit <= CHAINS_MAX:
            raise InvalidRequest(f"chains: limit is {limit!r}; a server lists up to {CHAINS_MAX}")
        found = self._document("List", pb.ListRequest(limit=max(1, limit), sort=sort, tier=tier))
        return self._records(Chain, found, "chains")[:limit], int(found["chains_total"])

    def find_chain(self, chain_id: str) -> list[FoundChain]:
        """Chains that end in a page whose key begins with these hex digits, page by page."""
        request = pb.InspectRequest(chain=checked_chain_id(chain_id), several=True)
        found = self._document("Inspect", request)
        return [
            FoundChain(
                chain=self._record(Chain, each["chain"]),
                pages=tuple(self._records(PageFacts, each, "pages")),
                spec=each["spec"],
            )
            for each in found["found"]
        ]

    def explain(
        self,
        tokens: Tokens,
        *,
        namespace: bytes,
        tenant: str = DEFAULT_TENANT,
        extras: Extras | None = None,
        salt: bytes = b"",
        spec_json: str | None = None,
        all_tenants: bool = True,
    ) -> Explanation:
        """Why this prompt hits or misses among a tenant's pages of one namespace."""
        values, more = _prompt(tokens, extras)
        request = pb.ExplainRequest(
            tokens=values,
            namespace_prefix=namespace,
            tenant=tenant,
            extras=more,
            salt=salt,
            spec_json=spec_json or "",
            own_tenant_only=not all_tenants,
        )
        document = self._document("Explain", request)
        try:
            return Explanation.from_dict(document)
        except (KeyError, ValueError) as exc:
            raise self._other_version(exc) from exc

    def evict(
        self,
        selection: Selection,
        *,
        dry_run: bool = False,
        include_pinned: bool = False,
        erase_key: bool = False,
    ) -> Eviction:
        """Remove pages by prefix, tenant, namespace, writer or age, with all below them."""
        if not isinstance(selection, Selection):
            raise InvalidRequest("evict: a Selection is needed, from kvstore.removal")
        if selection.root is not None:
            raise InvalidRequest("evict: a server names trees by namespace and tenant, not by root")
        values, more = _prompt(selection.prefix, selection.extras)
        request = pb.EvictRequest(
            tenant=selection.tenant or "",
            namespace_prefix=selection.namespace or b"",
            tokens=values,
            has_prefix=selection.prefix is not None,
            extras=more,
            writer=selection.writer or "",
            unused_for_s=selection.unused_for_s,
            older_than_s=selection.older_than_s,
            everything=selection.everything,
            dry_run=dry_run,
            include_pinned=include_pinned,
            erase_key=erase_key,
            tier=selection.tier or "",
        )
        reply = self._question("Evict", request, DEADLINE_S_MAX)
        return Eviction(
            chains=reply.chains,
            pages=reply.pages,
            payload_bytes=reply.payload_bytes,
            kept_leased=reply.kept_leased,
            kept_pinned=reply.kept_pinned,
            dry_run=reply.dry_run,
            redis_pages=reply.redis_pages,
            kept_above=reply.kept_above,
        )

    def tree(
        self,
        *,
        tenant: str | None = None,
        namespace: bytes | None = None,
        depth: int | None = None,
        branches: int = 200,
    ) -> list[TreeView]:
        """The radix trees, folded: down to `depth` forks, at most `branches` runs of pages."""
        request = pb.TreeRequest(
            tenant=tenant or "", namespace_prefix=namespace or b"", depth=depth, branches=branches
        )
        found = self._document("Tree", request)
        return [
            self._record(TreeView, each | {"branches": self._records(Branch, each, "branches")})
            for each in found["trees"]
        ]

    def pin_chain(self, chain_id: str, ttl_s: float) -> int:
        """Keep a chain for so long, 0: no longer; how many pages it has."""
        request = pb.PinChainRequest(
            chain=checked_chain_id(chain_id), ttl_s=checked_deadline(ttl_s)
        )
        return int(self._question("PinChain", request, QUESTION_S).pages)

    def start_recording(self, name: str, bytes_max: int = BYTES_DEFAULT) -> Recording:
        """Record look-ups, anonymised, into a new file of this name in the server's DIR/records."""
        wish = Wish(name, bytes_max)
        request = pb.RecordRequest(start=wish.name, bytes_max=wish.bytes_max)
        return self._record(Recording, self._document("Record", request))

    def stop_recording(self) -> Recording:
        """End it; how far it came."""
        return self._record(Recording, self._document("Record", pb.RecordRequest(stop=True)))

    def recording(self) -> Recording:
        """How far a recording is."""
        return self._record(Recording, self._document("Record", pb.RecordRequest()))

    def verify(self, *, repair: bool = False) -> Iterator[Verification]:
        """Check structure and every page's bytes; progress, the last with `finished`."""
        for each in self._stream("Verify", pb.VerifyRequest(repair=repair)):
            found = json.loads(each.json)
            found.pop("healthy", None)
            problems = self._records(Problem, found, "problems")
            yield self._record(Verification, found | {"problems": problems})

    def export(
        self,
        *,
        tenant: str | None = None,
        namespace: bytes | None = None,
        chain: str | None = None,
    ) -> Iterator[bytes]:
        """The chains of a tenant and namespace, or one chain, as a file."""
        request = pb.ExportRequest(
            tenant=tenant or "", namespace_prefix=namespace or b"", chain=chain or ""
        )
        yield from self._stream("Export", request.SerializeToString())

    def import_pages(
        self, read: Callable[[int], bytes], *, tenant: str | None = None
    ) -> Iterator[Imported]:
        """Take in what export() wrote; progress, the last with `finished`."""

        def pieces() -> Iterator[bytes]:
            yield pb.ImportHeader(tenant=tenant or "").SerializeToString()
            while piece := read(PIECE_BYTES):
                yield piece

        for each in self._stream("Import", pieces()):
            yield self._record(Imported, json.loads(each.json))

    def stats(self) -> Stats:
        """Bytes, pages and counters of the server now."""
        found = self._document("Stats", pb.StatsRequest())
        return self._record(Stats, found | {"tiers": self._records(TierStats, found, "tiers")})

    def flush(self, deadline_s: float = 10.0) -> bool:
        """Wait until all that was committed is on disk; False when `deadline_s` passed first."""
        wait_s = min(checked_deadline(deadline_s), DEADLINE_S_MAX - QUESTION_MARGIN_S)
        request = pb.FlushRequest(deadline_s=wait_s)
        return bool(self._question("Flush", request, wait_s + QUESTION_MARGIN_S).done)

    def watch(self, after_sequence: int = 0) -> Iterator[PageEvent]:
        """What comes into a tier and leaves it from this call on, or after an event's number.

        Of this credential's tenant, or of all for an admin. When the server is gone, the iterator
        waits for it and goes on after the last number; what was missed meanwhile is an event
        "lost". Ends with close(), or when the iterator is closed.
        """
        position = checked_sequence(after_sequence)
        stream = self._watching(position)
        if not position:  # so that nothing is missed from here on
            try:
                position = next(self._link.channel.replies(stream)).sequence
            except CallFailed as exc:
                raise self._error(exc) from exc
        return self._follow(stream, position)

    def close(self) -> bool:
        """End the connection; the server goes on."""
        self._closing.set()
        self._link.close()
        return True

    def _follow(self, stream: Any, position: int) -> Iterator[PageEvent]:
        try:
            while not self._closing.is_set():
                try:
                    for event in self._link.channel.replies(stream):
                        position = event.sequence
                        if event.kind != "watching":
                            yield PageEvent(
                                position, event.tenant, event.kind, event.medium, event.keys
                            )
                except CallFailed as exc:
                    if not self._closing.is_set() and exc.failure in _ERRORS:
                        raise self._error(exc) from exc
                if not self._closing.wait(WATCH_BACKOFF_S):
                    stream = self._watching(position)
        finally:
            stream.cancel()

    def _watching(self, position: int) -> Any:
        self._require_open()
        return self._link.channel.watch(pb.WatchRequest(after_sequence=position))

    def _stream(self, name: str, request: Any) -> Iterator[Any]:
        """What a streaming call replies; it ends when this iterator is closed."""
        self._require_open()
        reason = self._link.why_unreachable()
        if reason:
            raise self._unavailable(reason)
        try:
            yield from self._link.channel.stream(name, request)
        except CallFailed as exc:
            raise self._error(exc) from exc

    def _document(self, name: str, request: Any) -> dict[str, Any]:
        reply = self._question(name, request, QUESTION_S)
        try:
            document = json.loads(reply.json)
        except ValueError as exc:
            raise ServerUnavailable(f"server {self._link.address}: {name}: {exc}") from exc
        assert isinstance(document, dict)
        return document

    def _records(self, kind: type[Record], document: dict[str, Any], name: str) -> list[Record]:
        return [self._record(kind, each) for each in document.get(name, ())]

    def _record(self, kind: type[Record], document: Any) -> Record:
        try:
            return documents.record_of(kind, document)
        except ValueError as exc:
            raise self._other_version(exc) from exc

    def _other_version(self, exc: Exception) -> ServerUnavailable:
        return ServerUnavailable(f"server {self._link.address} is of another version: {exc}")

    def _question(self, name: str, request: Any, timeout_s: float) -> Any:
        self._require_open()
        reason = self._link.why_unreachable()
        if reason:
            raise self._unavailable(reason)
        local = self._link.address.socket is not None  # and somebody listens there
        try:
            return self._link.channel.call(name, request, timeout_s, wait_for_ready=local)
        except CallFailed as exc:
            raise self._error(exc) from exc

    def _require_open(self) -> None:
        if self._closing.is_set():
            raise ClosedError("the connection is closed")

    def _error(self, exc: CallFailed) -> KVStoreError:
        """What an operator sees of a failed call: the server's own words where it spoke."""
        kind = _ERRORS.get(exc.failure)
        if kind is AccessDenied:
            return AccessDenied(f"server {self._link.address}: {exc.details}")
        if kind is not None:
            return kind(exc.details or str(exc))
        trouble = tls_trouble(exc.details, self._link.address, self.config)
        if trouble:
            return ServerUnavailable(f"server {self._link.address}: {trouble} ({exc.details})")
        return self._unavailable(str(exc))

    def _unavailable(self, reason: str) -> ServerUnavailable:
        return ServerUnavailable(
            f"server {self._link.address}: {reason}; is it running? `kvstore serve DIR` starts one"
        )


def _prompt(tokens: Tokens | None, extras: Extras | None) -> tuple[bytes, pb.Extras | None]:
    """An operator's prompt goes in one message; a longer one would name something else if cut."""
    if tokens is None:
        return b"", None
    values, more = checked_tokens(tokens), checked_extras(extras)
    size = len(values) + sum(map(len, more.values()))
    if size > PROMPT_BYTES_MAX:
        raise InvalidRequest(
            f"a prompt of {size} bytes; {PROMPT_BYTES_MAX} is the limit of one question to a "
            "server: name a shorter beginning"
        )
    return values, pb.Extras(page_index=list(more), content=list(more.values()))
