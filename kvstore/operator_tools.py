"""The half of Store that is an operator's: trees, pins by chain, verify, export, import.

Only the door: what each does stands in a module of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore import inspection
from kvstore.errors import InvalidRequest
from kvstore.exporter import Exporter
from kvstore.importer import Importer
from kvstore.recording import BYTES_DEFAULT, Wish
from kvstore.request import checked_chain_id, checked_deadline
from kvstore.tenant_usage import pin_chain
from kvstore.tree_map import tree_map
from kvstore.tree_view import tree_views
from kvstore.verification import Verifier
from kvstore.wire import BRANCHES_MAX

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvstore.disk_writer import DiskWriter
    from kvstore.housekeeper import Housekeeper
    from kvstore.importer import Imported
    from kvstore.namespaces import SpecFolder
    from kvstore.recorder import Recording
    from kvstore.recording import Recordings
    from kvstore.session import Session
    from kvstore.spec import CacheSpec
    from kvstore.state import StoreState
    from kvstore.tree_map import TreeMap
    from kvstore.tree_view import TreeView
    from kvstore.verification import Verification


class OperatorTools:
    """Store inherits it, and has what it uses."""

    state: StoreState
    _specs: SpecFolder
    _writer: DiskWriter | None
    _housekeeper: Housekeeper
    _recordings: Recordings

    def root(self, namespace: bytes, tenant: str = "default", salt: bytes = b"") -> bytes:
        """See Store."""
        raise NotImplementedError

    def session(self, spec: CacheSpec, *, tenant: str = "default", writer: str = "") -> Session:
        """See Store."""
        raise NotImplementedError

    def flush(self, deadline_s: float = 10.0) -> bool:
        """See Store."""
        raise NotImplementedError

    def tree(
        self,
        *,
        tenant: str | None = None,
        namespace: bytes | None = None,
        depth: int | None = None,
        branches: int = 200,
    ) -> list[TreeView]:
        """The radix trees, folded: down to `depth` forks, at most `branches` runs of pages."""
        if not 1 <= branches <= BRANCHES_MAX or (depth is not None and depth < 1):
            raise InvalidRequest(f"tree: depth >= 1 and 1 to {BRANCHES_MAX} branches are wanted")
        return tree_views(
            self.state,
            self._specs.models(),
            tenant=tenant,
            namespace=namespace,
            depth_max=depth if depth is not None else 1 << 30,
            branches_max=branches,
        )

    def tree_map(self) -> TreeMap:
        """Bytes and hits of all trees, their largest runs of pages and what is below them."""
        return tree_map(self.state, self._specs.models())

    def pin_chain(self, chain_id: str, ttl_s: float) -> int:
        """Keep the chain that ends in the one page whose key begins so for `ttl_s` seconds; 0
        takes its pins back. How many pages it has. QuotaError as Session.pin."""
        digits, ttl = checked_chain_id(chain_id), checked_deadline(ttl_s)
        return pin_chain(self.state, digits, ttl)

    def start_recording(self, name: str, bytes_max: int = BYTES_DEFAULT) -> Recording:
        """Record look-ups, anonymised, into a new file of this name in DIR/records, of so many
        bytes at most; for `kvstore simulate`. InvalidRequest where one runs."""
        self.state.require_open()
        return self._recordings.start(Wish(name, bytes_max))

    def stop_recording(self) -> Recording:
        """End it; how far it came. Without one, how far the last came."""
        return self._recordings.stop()

    def recording(self) -> Recording:
        """How far a recording is."""
        return self._recordings.status()

    def verify(self, *, repair: bool = False) -> Iterator[Verification]:
        """Check structure and every page's bytes; progress, the last with `finished`."""
        self.state.require_open()
        return Verifier(self.state, self._writer, self._housekeeper, repair=repair).run()

    def export(
        self,
        *,
        tenant: str | None = None,
        namespace: bytes | None = None,
        chain: str | None = None,
    ) -> Iterator[bytes]:
        """The chains of a tenant and namespace, or one chain, as a file: see exporter.py."""
        self.state.require_open()
        ends = None
        if chain is not None:
            ends = inspection.find_chain(self.state, checked_chain_id(chain))
            if len(ends) != 1:
                raise InvalidRequest(f"export: {inspection.not_one(len(ends), chain)}")
        return Exporter(
            self.state,
            dict(self._specs.texts()),
            self.root,
            tenant=tenant,
            namespace=namespace,
            ends=ends,
        ).run()

    def import_pages(
        self, read: Callable[[int], bytes], *, tenant: str | None = None
    ) -> Iterator[Imported]:
        """Take in what export() wrote; progress, the last with `finished`. See importer.py.

        read: up to so many bytes of the file. tenant: whose the pages become, instead of as in
        the file. Raises InvalidRequest, with its position, where the file is damaged.
        """
        self.state.require_open()
        return Importer(self, tenant).run(read)
