"""The store: joins prefix index, arena, disk and policy behind match, reserve and evict.

    with Store.open("/var/cache/kv", host_bytes="2GiB") as store:
        session = store.session(CacheSpec.opaque("demo", page_tokens=16, page_bytes=4096))
        with session.reserve(tokens) as run: ...
        with session.match(tokens) as hit: ...

One store owns its directory; a second one on it is refused. All calls are thread-safe.
"""

from __future__ import annotations

import logging
import secrets
import time
import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from kvstore import inspection, removal
from kvstore.config import StoreConfig
from kvstore.disk_admission import DiskAdmission
from kvstore.disk_writer import DiskWriter
from kvstore.errors import CapacityError, DirectoryError, InvalidRequest
from kvstore.event_log import EventLog
from kvstore.evictor import Evictor
from kvstore.explanation import Explanation, Question, explain
from kvstore.housekeeper import Housekeeper
from kvstore.identity import DEFAULT_TENANT, PUBLIC_TENANT
from kvstore.key_folder import remember_opening
from kvstore.namespaces import SpecFolder
from kvstore.operator_tools import OperatorTools
from kvstore.page_policy import PagePolicy
from kvstore.prefetcher import Prefetcher
from kvstore.prefix_index.index import PrefixIndex
from kvstore.quantity import format_bytes
from kvstore.recorder import Recorder
from kvstore.recording import Recordings
from kvstore.redis_share import RedisShare
from kvstore.removal import Selection
from kvstore.request import (
    checked_chain_id,
    checked_deadline,
    checked_extras,
    checked_sequence,
    checked_tokens,
)
from kvstore.session import Session
from kvstore.shares import Tenancy
from kvstore.spec import CacheSpec
from kvstore.stager import Stager
from kvstore.state import SEQUENCE_BITS, StoreState, TreeInfo
from kvstore.store_opening import open_disk, open_host
from kvstore.store_stats import Stats, stats_of
from kvstore.tenant import check_salt, tenant_secret, tree_root
from kvstore.tenant_usage import usage, usages
from kvstore.tiers.tier import ALIGNMENT_BYTES
from kvstore.warm_start import WarmStart

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Mapping

    from kvstore.event_log import PageEvent
    from kvstore.removal import Eviction
    from kvstore.request import Extras, Tokens
    from kvstore.tenant_usage import TenantUsage
    from kvstore.tenants import Quota
    from kvstore.tiers.file_layer import FileLayer
    from kvstore.tiers.host_tier import HostTier

CLOSE_DEADLINE_S = 10.0
WARM_DEADLINE_S = 600.0
USUAL_PAGE_BYTES = 1 << 20

_log = logging.getLogger("kvstore.store")


class Store(OperatorTools):
    """An open store. Make one with Store.open(); close it, or use it in a `with` statement."""

    def __init__(
        self,
        config: StoreConfig,
        *,
        files: FileLayer | None = None,
        for_a_look: bool = False,
        lock_wait_s: float = 0.0,
    ) -> None:
        """Open what `config` describes. `files` replaces the file layer, for tests.

        Raises DirectoryError when the directory can't be used, CapacityError when the machine has
        not what is asked.
        """
        disk, secret, at_rest = open_disk(
            config, files, for_a_look=for_a_look, lock_wait_s=lock_wait_s
        )
        try:
            host = open_host(config, disk)
            index = PrefixIndex(pages_expected=config.pages_expected(ALIGNMENT_BYTES))
            usual_pages = config.pages_expected(USUAL_PAGE_BYTES)
            policy = PagePolicy(
                config.policy,
                usual_pages,
                time.monotonic,
                config.objective,
                config.even_tokens,
                host_policy=config.host_policy,
                host_pages=config.host_bytes // USUAL_PAGE_BYTES,
            )
            index.policy = policy
            admission = DiskAdmission(config, index.table, usual_pages)
            self.state = StoreState(
                config, index, host, disk, policy, admission, secret or secrets.token_bytes(32)
            )
            if disk is not None:
                remember_opening(config, self.state.secret, at_rest)
        except BaseException:
            if disk is not None:
                disk.close()
            raise
        state = self.state
        self.config = config
        if config.record_file is not None:
            state.recorder = Recorder(config.record_file)
        self.events = EventLog(state)
        self._specs = SpecFolder(config.directory if disk is not None else None)
        self._writer = DiskWriter(state, disk) if disk is not None else None
        demote = self._writer.demote if self._writer is not None else _keep_nothing
        self._evictor = Evictor(state, demote)
        self._stager = Stager(state, disk, host, self._evictor) if disk is not None else None
        self._prefetcher = (
            Prefetcher(state, self._stager, config.prefetch_bytes)
            if self._stager is not None and config.prefetch_bytes
            else None
        )
        self._share = self._open_share(host) if config.redis_url else None
        self._sessions: weakref.WeakSet[Session] = weakref.WeakSet()
        self._warm_start: WarmStart | None = None
        if disk is not None and self._writer is not None:
            state.next_sequence = (disk.boot_number << SEQUENCE_BITS) + 1
            self._writer.start(self._evictor)
            self._warm_start = WarmStart(state, disk)
        self._recordings = Recordings(state)
        self._housekeeper = Housekeeper(state, self._writer, self._recordings)

    @classmethod
    def open(
        cls,
        directory: str | os.PathLike[str] | None = None,
        *,
        wait_warm: bool = True,
        for_a_look: bool = False,
        lock_wait_s: float = 0.0,
        files: FileLayer | None = None,
        **settings: Any,
    ) -> Store:
        """Open the store in `directory`, made if it is missing; None keeps all in memory.

        settings: fields of StoreConfig (`host_bytes="2GiB"`, `disk_bytes="100GiB"`, ...); a store
        that exists keeps its `disk_bytes` and `disk_directories` unless they are given. With
        `wait_warm` the call returns when every stored chain can be hit again (about 5 s a million
        pages); without it, at once, and look-ups are misses until then. `for_a_look`: this process
        may be ended at any moment, which will not be taken for a sign of a bad catalog. Others who
        only look there are waited for up to `lock_wait_s`.
        """
        given = {name: value for name, value in settings.items() if value is not None}
        config = StoreConfig(directory=directory, **given)
        store = cls(config, files=files, for_a_look=for_a_look, lock_wait_s=lock_wait_s)
        if wait_warm:
            try:
                store.wait_warm(WARM_DEADLINE_S)
            except BaseException:
                store.close()
                raise
        return store

    @property
    def warm(self) -> bool:
        """Whether all that is on disk can be hit."""
        return self.state.warm

    def wait_warm(self, deadline_s: float) -> bool:
        """Wait until all that is on disk can be hit; False when `deadline_s` passed first.

        Raises DirectoryError when the directory can't be used after all.
        """
        deadline = self.state.clock() + checked_deadline(deadline_s)
        with self.state.lock:
            while not self.state.warm and not self.state.closed:
                left = deadline - self.state.clock()
                if left <= 0:
                    return False
                self.state.changed.wait(left)
        if self._warm_start is not None and self._warm_start.error:
            raise DirectoryError(f"{self.config.directory}: {self._warm_start.error}")
        return self.state.warm

    def session(
        self,
        spec: CacheSpec,
        *,
        tenant: str = DEFAULT_TENANT,
        salt: bytes = b"",
        writer: str = "",
        public: bool = False,
    ) -> Session:
        """Work with pages of `spec` as `tenant`. `salt` keeps prompts apart within a tenant.

        writer: a name to remember with each page, so that a bad writer's pages can be evicted.
        public: look-ups also find what the tenant "public" has stored; not with a salt, which asks
        for prompts to be kept apart.
        """
        self.state.require_open()
        if not isinstance(spec, CacheSpec):
            raise InvalidRequest("session: a CacheSpec is needed")
        check_salt(salt)
        if not isinstance(writer, str) or not writer.isascii() or len(writer) > 64:
            raise InvalidRequest(f"writer: {writer!r} given; at most 64 ASCII characters")
        if self.state.host is not None and not self.state.host.fits(spec.page_bytes):
            raise CapacityError(
                f"a page of {format_bytes(spec.page_bytes)} does not fit in host_bytes = "
                f"{format_bytes(self.config.host_bytes)}; raise host_bytes"
            )
        tree = self._tree(spec, tenant, salt)
        self._specs.remember(spec)
        session = Session(
            self.state,
            spec,
            tree,
            writer,
            evictor=self._evictor,
            stager=self._stager,
            disk_writer=self._writer,
            public_root=self._public_root(spec, tenant) if public and not salt else None,
            share=self._share,
            prefetcher=self._prefetcher,
        )
        self._sessions.add(session)
        return session

    def flush(self, deadline_s: float = CLOSE_DEADLINE_S) -> bool:
        """Wait until all that was committed is on disk; False when `deadline_s` passed first."""
        self.state.require_open()
        deadline = self.state.clock() + checked_deadline(deadline_s)
        return self._writer is not None and self._writer.flush(deadline)

    def evict(
        self,
        selection: Selection,
        *,
        dry_run: bool = False,
        include_pinned: bool = False,
        erase_key: bool = False,
    ) -> Eviction:
        """Remove pages by prefix, tenant, namespace, writer or age, with all below them.

        A prefix is one of the tree `root`, else of the whole `namespace` and the `tenant`.
        With `erase_key`, first delete the key of the tenant that alone is selected, so that nothing
        that is left of its pages on any disk or in a backup can be read; its pins do not hold then.
        """
        self.state.require_open()
        if not isinstance(selection, Selection):
            raise InvalidRequest("evict: a Selection is needed, from kvstore.removal")
        if selection.prefix is not None and selection.root is None and selection.namespace:
            root = self.root(selection.namespace, selection.tenant or DEFAULT_TENANT)
            selection = replace(selection, root=root)
        if include_pinned and selection.tier is not None:
            raise InvalidRequest(
                "evict: pinned pages stay in their tiers; take the pins back first"
            )
        if erase_key:
            removal.erase_key(self.state, selection, dry_run=dry_run)
            include_pinned = True
        return removal.evict(
            self.state,
            self._writer,
            selection,
            dry_run=dry_run,
            include_pinned=include_pinned,
            share=self._share,
        )

    def set_quotas(self, quotas: Mapping[str, Quota]) -> None:
        """What each tenant is guaranteed and may have, from now on; see kvstore.tenants.Quota.

        Raises ConfigError, and changes nothing, when a tier has less than is promised of it.
        """
        config = self.config
        made = Tenancy.of(quotas, config.host_bytes, config.disk_bytes)
        with self.state.lock:
            self.state.tenancy = made

    def tenant_usage(self, tenant: str) -> TenantUsage:
        """What one tenant has now, beside its quota and shares."""
        return usage(self.state, tenant)

    def tenant_usages(self) -> list[TenantUsage]:
        """The same of every tenant that has a quota or pages."""
        return usages(self.state)

    def root(self, namespace: bytes, tenant: str = DEFAULT_TENANT, salt: bytes = b"") -> bytes:
        """The name of one radix tree, for Selection.root and explain()."""
        return tree_root(tenant_secret(self.state.secret, tenant), namespace, salt)

    def namespaces(self) -> list[inspection.NamespaceUsage]:
        """Every (namespace, tenant, salt) that has pages, the largest first."""
        return inspection.namespaces(self.state, self._specs.models())

    def spec_json(self, namespace: bytes) -> str | None:
        """The canonical JSON of a namespace's spec, if this store has seen it."""
        return self._specs.json_of(namespace)

    def chains(
        self, *, limit: int = 50, sort: str = "size", tier: str | None = None
    ) -> tuple[list[inspection.Chain], int]:
        """See OperatorLike."""
        inspection.check_order(limit, sort, tier)
        models = self._specs.models()
        return inspection.chains(self.state, models, limit=limit, sort=sort, tier=tier)

    def find_chain(self, chain_id: str) -> list[inspection.FoundChain]:
        """Chains that end in a page whose key begins with these hex digits, page by page."""
        digits = checked_chain_id(chain_id)
        texts, models = self._specs.texts(), self._specs.models()
        return inspection.found_chains(self.state, digits, texts, models)

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
        """Why this prompt hits or misses among a tenant's pages of one namespace.

        spec_json: the namespace's spec, where this store may not have met it. all_tenants: also
        say which other tenants have more of the prompt.
        """
        self.state.require_open()
        values, more = checked_tokens(tokens), checked_extras(extras)
        root, plain = self.root(namespace, tenant, salt), self.root(namespace, tenant)
        specs = self._specs.texts_with(namespace, spec_json)
        info = self.state.trees.get(root)
        if info is None and namespace not in specs:
            raise InvalidRequest(
                "explain: this store has no pages of that namespace, tenant and salt"
            )
        page_tokens = (
            info.page_tokens if info else CacheSpec.from_json(specs[namespace]).page_tokens
        )
        asked = Question(values, more, root, plain, namespace, tenant, page_tokens, all_tenants)
        return explain(self.state, asked, specs)

    def watch(self, after_sequence: int = 0, *, tenant: str | None = None) -> Iterator[PageEvent]:
        """What comes into a tier and leaves it from this call on, or after an event's number.

        Ends when the store is closed. See PageEvent for "lost". tenant: only that one's events.
        """
        self.state.require_open()
        return self.events.follow(checked_sequence(after_sequence), tenant)

    def stats(self) -> Stats:
        """Bytes, pages and counters now."""
        state = self.state
        with state.lock:
            state.require_open()
            if self._share is not None:
                self._share.count()
            dirty = self._writer.dirty_bytes if self._writer is not None else 0
        return stats_of(state, dirty)

    def breakers(self) -> dict[str, bool]:
        """By tier: whether it is left alone for a while, after errors in a row."""
        found = {}
        if self._stager is not None:
            found["disk"] = self._stager.open_breaker
        if self._share is not None:
            found["redis"] = self._share.stager.open_breaker
        return found

    def check(self) -> None:
        """Walk index and tiers, recount, compare; raises AssertionError or TierError."""
        state = self.state
        with state.lock:
            state.require_open()
            state.index.check()
            self._housekeeper.check_accounting()
            if state.host is not None:
                state.host.check()
        if state.disk is not None:
            state.disk.check()
        if state.redis is not None:
            state.redis.check()

    def _write_what_stayed(self) -> None:
        """Queue what the write policy kept in memory so far, as if it were evicted now."""
        state = self.state
        if self._writer is None or not state.admission.keeps_back:
            return
        with state.lock:
            waiting = np.array(sorted(state.unwritten), np.int32)
            self._writer.enqueue(state.admission.worth_writing(waiting).tolist())

    def close(self, deadline_s: float = CLOSE_DEADLINE_S) -> bool:
        """Flush and close; False when the disk did not take all within `deadline_s` seconds."""
        state = self.state
        with state.lock:
            if state.closed:
                return True
        deadline = state.clock() + checked_deadline(deadline_s)
        for session in list(self._sessions):
            session.close()
        if self._warm_start is not None:
            self._warm_start.stop(deadline)
        self._housekeeper.stop(deadline)
        done = self._stager.stop(deadline) if self._stager is not None else True
        if self._share is not None:
            self._share.stop(deadline)
        self._recordings.close()
        if self._writer is not None:
            self._write_what_stayed()
            done = self._writer.stop(deadline) and done
            state.free_unused_slots()
        with state.lock:
            state.closed = True
            state.changed.notify_all()
        if not done:
            _log.error("the disk did not keep up: closed with pages that are in memory only")
        if state.disk is not None:
            state.disk.close()
        if state.host is not None:
            state.host.close()
        return done

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _public_root(self, spec: CacheSpec, tenant: str) -> bytes | None:
        if tenant == PUBLIC_TENANT:
            return None
        return self.root(spec.namespace, PUBLIC_TENANT)

    def _open_share(self, host: HostTier) -> RedisShare:
        try:
            return RedisShare(self.state, host, self._evictor, self._writer)
        except BaseException:
            if self.state.disk is not None:
                self.state.disk.close()
            raise

    def _tree(self, spec: CacheSpec, tenant: str, salt: bytes) -> TreeInfo:
        state = self.state
        root = self.root(spec.namespace, tenant, salt)
        info = TreeInfo(root, tenant, spec.namespace, spec.page_tokens, spec.page_bytes)
        with state.lock:
            return state.trees.setdefault(root, info)


def _keep_nothing(pages: object) -> int:
    """Demotion in a store without a disk: there is nowhere to go."""
    return 0
