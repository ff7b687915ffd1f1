"""What an adapter holds: store, session, match, reservation, in this process or in a server.

Session and its kin satisfy these as well as the remote ones, so that a caller cannot tell. Only
shapes live here. A remote call answers a miss where a local one would raise for a lost store.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator
    from typing import Any, Self

    from kvstore.event_log import PageEvent
    from kvstore.explanation import Explanation
    from kvstore.importer import Imported
    from kvstore.inspection import Chain, FoundChain, NamespaceUsage
    from kvstore.recorder import Recording
    from kvstore.removal import Eviction, Selection
    from kvstore.request import Extras, Tokens
    from kvstore.reservation import Commit
    from kvstore.spec import CacheSpec
    from kvstore.store_stats import Stats
    from kvstore.tree_view import TreeView
    from kvstore.verification import Verification


class MatchLike(Protocol):
    """The longest stored chain of a prompt, leased until release()."""

    @property
    def reason(self) -> str:
        """Why it may be shorter than what is stored: "lease limit", "unreachable", ...; else ""."""

    @property
    def pages(self) -> int:
        """Length of the chain in pages."""

    @property
    def tokens(self) -> int:
        """Length of the chain in tokens."""

    @property
    def versions(self) -> list[Hashable]:
        """A name for each page's bytes that no other page has or will have; None: has none now."""

    @property
    def tiers(self) -> list[str]:
        """The fastest tier of each page: "host" or "disk"."""

    @property
    def host_pages(self) -> int:
        """How many leading pages can be read now."""

    def stage(self, deadline_s: float | None = None) -> int:
        """Bring pages into memory; how many leading pages can be read now."""

    def views(self, start: int = 0, stop: int | None = None) -> list[memoryview]:
        """Read-only bytes of pages [start, stop), `spec.page_bytes` each, until release()."""

    def valid(self) -> bool:
        """Call after copying out of views; False: they had moved, drop what was copied."""

    def release(self) -> None:
        """End the lease; doing it again does nothing."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc: object) -> None: ...


class ReservationLike(Protocol):
    """Pages to write; leaving without a commit gives them up."""

    reason: str  # why there is nothing, or less than asked: "present", "in progress", "full", ...

    @property
    def start(self) -> int:
        """Page index of the first page to write; all before it are stored already."""

    @property
    def count(self) -> int:
        """How many pages to write."""

    def views(self) -> list[memoryview]:
        """Writable bytes, `spec.page_bytes` a page, until commit or abort."""

    def commit(self, *, durable: bool = False, deadline_s: float | None = None) -> Commit:
        """Publish the pages. With `durable`, wait until they and their ancestors are on disk.

        deadline_s: how long to wait; 10 with `durable` and 2 without, unless given.
        """

    def abort(self) -> None:
        """Give the pages up; nothing was ever visible. Doing it again does nothing."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc: object) -> None: ...


class SessionLike(Protocol):
    """One client's work with pages of one spec. Its leases and reservations end with it."""

    @property
    def spec(self) -> CacheSpec:
        """What makes the bytes of its pages interchangeable."""

    def match(self, tokens: Tokens, extras: Extras | None = None) -> MatchLike:
        """Find the longest stored chain of a prompt and lease it, in one step."""

    def reserve(
        self, tokens: Tokens, extras: Extras | None = None, *, deadline_s: float = 0.25
    ) -> ReservationLike:
        """Room for the pages of this prompt that nobody has stored or is storing."""

    def report_saved(self, prefill_s: float) -> None:
        """For the metrics: how much prefill the last match saved, as the engine measures it."""

    def report_prefill(self, tokens: int, before: int, seconds: float) -> None:
        """Computing `tokens` of a prompt that follow `before` others took so long: pages that this
        session commits are weighed by it where the store's objective is "compute"."""

    def flush(self, deadline_s: float = 10.0) -> bool:
        """Wait until all that was committed is on disk; False when `deadline_s` passed first."""

    def pin(self, tokens: Tokens, ttl_s: float, extras: Extras | None = None) -> int:
        """Keep the stored chain of this prompt for `ttl_s` seconds; how many pages it has."""

    def unpin(self, tokens: Tokens, extras: Extras | None = None) -> int:
        """Take back every pin on the stored chain of this prompt; how many pages it has."""

    def hint(
        self,
        tokens: Tokens,
        extras: Extras | None = None,
        *,
        next_use_s: float | None = None,
        priority: int | None = None,
        done: bool = False,
        conversation: str = "",
    ) -> int:
        """Tell what is known of the stored chain of this prompt; how many pages it has."""

    def end_conversation(self, name: str) -> int:
        """It won't go on: the pages that are only its own leave first; how many they are."""

    def close(self) -> None:
        """Release all matches, abort all reservations."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc: object) -> None: ...


class OperatorLike(Protocol):
    """A store as an operator sees it: Store, or a connection to a server. All calls may raise."""

    def namespaces(self) -> list[NamespaceUsage]:
        """Every (namespace, tenant, salt) that has pages, the largest first."""

    def chains(
        self, *, limit: int = 50, sort: str = "size", tier: str | None = None
    ) -> tuple[list[Chain], int]:
        """Stored chains by "size", "age", "idle", "hits", or pages in "host" or "disk", and how
        many there are in all. tier: only those with a page there."""

    def find_chain(self, chain_id: str) -> list[FoundChain]:
        """Chains that end in a page whose key begins with these hex digits, page by page."""

    def explain(
        self,
        tokens: Tokens,
        *,
        namespace: bytes,
        tenant: str = "default",
        extras: Extras | None = None,
        salt: bytes = b"",
        spec_json: str | None = None,
        all_tenants: bool = True,
    ) -> Explanation:
        """Why this prompt hits or misses among a tenant's pages of one namespace."""

    def evict(
        self,
        selection: Selection,
        *,
        dry_run: bool = False,
        include_pinned: bool = False,
        erase_key: bool = False,
    ) -> Eviction:
        """Remove pages by prefix, tenant, namespace, writer or age, with all below them."""

    def tree(
        self,
        *,
        tenant: str | None = None,
        namespace: bytes | None = None,
        depth: int | None = None,
        branches: int = 200,
    ) -> list[TreeView]:
        """The radix trees, folded: down to `depth` forks, at most `branches` runs of pages."""

    def pin_chain(self, chain_id: str, ttl_s: float) -> int:
        """Keep a chain for so long, 0: no longer; how many pages it has."""

    def start_recording(self, name: str, bytes_max: int = ...) -> Recording:
        """Record look-ups, anonymised, into a new file of this name in DIR/records."""

    def stop_recording(self) -> Recording:
        """End it; how far it came. Without one, how far the last came."""

    def recording(self) -> Recording:
        """How far a recording is."""

    def verify(self, *, repair: bool = False) -> Iterator[Verification]:
        """Check structure and every page's bytes; progress, the last with `finished`."""

    def export(
        self,
        *,
        tenant: str | None = None,
        namespace: bytes | None = None,
        chain: str | None = None,
    ) -> Iterator[bytes]:
        """The chains of a tenant and namespace, or one chain, as a file."""

    def import_pages(
        self, read: Callable[[int], bytes], *, tenant: str | None = None
    ) -> Iterator[Imported]:
        """Take in what export() wrote; progress, the last with `finished`."""

    def stats(self) -> Stats:
        """Bytes, pages and counters now."""

    def flush(self, deadline_s: float = 10.0) -> bool:
        """Wait until all that was committed is on disk; False when `deadline_s` passed first."""

    def watch(self, after_sequence: int = 0) -> Iterator[PageEvent]:
        """What comes into a tier and leaves it from this call on, or after an event's number."""


class StoreLike(Protocol):
    """Where sessions come from: Store, or a connection to a server."""

    def session(
        self,
        spec: CacheSpec,
        *,
        tenant: str = "default",
        salt: bytes = b"",
        writer: str = "",
        public: bool = ...,
    ) -> SessionLike:
        """Work with pages of `spec`. `salt` keeps prompts apart within a tenant.

        public: look-ups also find the tenant "public"'s pages; by default, over a server only.
        """

    def stats(self) -> Any:
        """Bytes, pages and counters now; has to_dict()."""

    def close(self) -> object:
        """End all sessions and let the store go."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc: object) -> None: ...
