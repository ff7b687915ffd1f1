"""The whole store against a set: any order of calls, restarts included, never gives wrong bytes."""

from __future__ import annotations

import secrets
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    rule,
    run_state_machine_as_test,
)
from known_pages import PAGE_BYTES, PAGE_TOKENS, SPEC
from redis_server import RedisProcess

from kvstore import Store
from kvstore.removal import Selection

if TYPE_CHECKING:
    from kvstore.lease import Match
    from kvstore.reservation import Reservation
    from kvstore.session import Session

TENANTS = ("default", "other")
# Chains over an alphabet of three pages: they share prefixes and part in the middle of runs.
CHAINS = st.lists(st.integers(0, 2), min_size=0, max_size=6).map(tuple)
LONG_CHAINS = st.lists(st.integers(0, 2), min_size=3, max_size=6).map(tuple)


def tokens_of(chain: tuple[int, ...]) -> np.ndarray:
    pages = [np.full(PAGE_TOKENS, 10 + item, np.int32) for item in chain]
    return np.concatenate([*pages, np.array([7], np.int32)])


def bytes_of(tenant: str, chain: tuple[int, ...]) -> bytes:
    seed = f"{tenant}:{chain}".encode()
    return (seed * (PAGE_BYTES // len(seed) + 1))[:PAGE_BYTES]


@dataclass(eq=False)
class OpenRun:
    """A reservation that is being written; it follows `before`, if that is set."""

    tenant: str
    chain: tuple[int, ...]
    made: Reservation
    before: OpenRun | None
    state: str = "open"  # "published", "gone"

    @property
    def stop(self) -> int:
        return self.made.start + self.made.count

    def is_doomed(self) -> bool:
        return self.state == "gone" or (self.before is not None and self.before.is_doomed())


class StoreMachine(RuleBasedStateMachine):
    """`stored` over-approximates: eviction for room may take any page, and only that."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.stored: dict[str, set[tuple[int, ...]]] = {tenant: set() for tenant in TENANTS}
        self.held: list[tuple[str, tuple[int, ...], Match]] = []
        self.runs: list[OpenRun] = []
        self.open()

    def open(self) -> None:
        self.store = Store.open(
            self.folder.name, host_bytes=160 << 10, disk_bytes=24 << 20, **self.settings()
        )
        self.sessions: dict[str, Session] = {
            tenant: self.store.session(SPEC, tenant=tenant) for tenant in TENANTS
        }

    def settings(self) -> dict[str, Any]:
        return {}

    def evicted(self, tenant: str, chain: tuple[int, ...]) -> None:
        """All below a chain is gone."""
        gone = {item for item in self.stored[tenant] if item[: len(chain)] == chain}
        self.stored[tenant] -= gone

    def teardown(self) -> None:
        self.store.close()
        self.folder.cleanup()

    @rule(
        tenant=st.sampled_from(TENANTS), chain=CHAINS, commit=st.booleans(), durable=st.booleans()
    )
    def save(self, tenant: str, chain: tuple[int, ...], commit: bool, durable: bool) -> None:
        with self.sessions[tenant].reserve(tokens_of(chain), deadline_s=0.0) as run:
            for offset, view in enumerate(run.views()):
                view[:] = bytes_of(tenant, chain[: run.start + offset + 1])
            if run.reason == "present":
                assert all(chain[: n + 1] in self.stored[tenant] for n in range(len(chain)))
            before = self.before(tenant, chain, run.start) if run.count else None
            if before is not None:
                assert not commit or run.commit(durable=durable).pages == 0, "it comes too early"
            elif run.count and commit:
                done = run.commit(durable=durable)
                assert done.pages == run.count
                assert done.durable == durable
                for page in range(run.start + run.count):
                    self.stored[tenant].add(chain[: page + 1])

    def before(self, tenant: str, chain: tuple[int, ...], start: int) -> OpenRun | None:
        """The open run of the same session at whose end this one starts."""
        for run in self.runs:
            fits = run.tenant == tenant and chain[:start] == run.chain[: run.stop]
            if fits and run.stop == start and run.state == "open" and not run.is_doomed():
                return run
        return None

    @rule(tenant=st.sampled_from(TENANTS), chain=CHAINS)
    def begin(self, tenant: str, chain: tuple[int, ...]) -> None:
        if len(self.runs) >= 5:
            return
        made = self.sessions[tenant].reserve(tokens_of(chain), deadline_s=0.0)
        if made.count:
            for offset, view in enumerate(made.views()):
                view[:] = bytes_of(tenant, chain[: made.start + offset + 1])
            before = self.before(tenant, chain, made.start)
            self.runs.append(OpenRun(tenant, chain, made, before))

    @rule(choice=st.integers(0, 4), commit=st.booleans())
    def finish(self, choice: int, commit: bool) -> None:
        if not self.runs:
            return
        run = self.runs.pop(choice % len(self.runs))
        if not commit:
            run.made.abort()
            run.state = "gone"
            return
        fails = run.is_doomed() or (run.before is not None and run.before.state == "open")
        done = run.made.commit()
        assert done.pages == (0 if fails else run.made.count), (run, done)
        run.state = "gone" if fails else "published"
        for page in range(0 if fails else run.stop):
            self.stored[run.tenant].add(run.chain[: page + 1])

    @rule(tenant=st.sampled_from(TENANTS), chain=CHAINS, hold=st.booleans())
    def load(self, tenant: str, chain: tuple[int, ...], hold: bool) -> None:
        hit = self.sessions[tenant].match(tokens_of(chain))
        self.compare(tenant, chain, hit)
        if hold and len(self.held) < 3:
            self.held.append((tenant, chain, hit))
        else:
            hit.release()

    @rule()
    def look_again_at_what_is_held(self) -> None:
        for tenant, chain, hit in self.held:
            self.compare(tenant, chain, hit)

    def compare(self, tenant: str, chain: tuple[int, ...], hit: Match) -> None:
        assert hit.pages <= len(chain)
        for page, view in enumerate(hit.views(0, hit.stage(5.0))):
            assert chain[: page + 1] in self.stored[tenant]
            assert bytes(view) == bytes_of(tenant, chain[: page + 1])

    @rule()
    def release(self) -> None:
        for _, _, hit in self.held:
            hit.release()
        self.held.clear()

    @rule(tenant=st.sampled_from(TENANTS), chain=CHAINS)
    def pin(self, tenant: str, chain: tuple[int, ...]) -> None:
        self.sessions[tenant].pin(tokens_of(chain), ttl_s=1000.0)

    @rule(tenant=st.sampled_from(TENANTS), chain=CHAINS)
    def unpin(self, tenant: str, chain: tuple[int, ...]) -> None:
        self.sessions[tenant].unpin(tokens_of(chain))

    @rule(tenant=st.sampled_from(TENANTS), chain=CHAINS.filter(bool))
    def evict_prefix(self, tenant: str, chain: tuple[int, ...]) -> None:
        root = self.store.root(SPEC.namespace, tenant)
        prefix = tokens_of(chain)[:-1]
        done = self.store.evict(Selection(prefix=prefix, root=root), include_pinned=True)
        if done.kept_leased == 0:
            self.evicted(tenant, chain)

    @rule(tenant=st.sampled_from(TENANTS))
    def evict_tenant(self, tenant: str) -> None:
        done = self.store.evict(Selection(tenant=tenant), include_pinned=True)
        if done.kept_leased == 0:
            self.evicted(tenant, ())

    @rule()
    def flush(self) -> None:
        assert self.store.flush(10.0)

    @rule()
    def restart(self) -> None:
        self.release()
        self.runs.clear()  # closing gives them up
        assert self.store.close()
        self.open()

    @invariant()
    def all_accounts_agree(self) -> None:
        self.store.check()


class SharingMachine(StoreMachine):
    """The same beside another store that shares a Redis; what one evicts the other may have."""

    server: RedisProcess

    def __init__(self) -> None:
        self.server.ask("FLUSHALL")
        self.secret_folder = tempfile.TemporaryDirectory()
        self.secret = Path(self.secret_folder.name) / "secret"
        self.secret.touch(0o600)
        self.secret.write_text(secrets.token_hex(32))
        self.peer = Store.open(None, host_bytes=96 << 10, **self.settings())
        self.peers = {tenant: self.peer.session(SPEC, tenant=tenant) for tenant in TENANTS}
        super().__init__()

    def settings(self) -> dict[str, Any]:
        return {"redis_url": self.server.url, "secret_file": self.secret, "redis_lookup_s": 0.05}

    def evicted(self, tenant: str, chain: tuple[int, ...]) -> None:
        """The peer may bring it back."""

    @rule(tenant=st.sampled_from(TENANTS), chain=CHAINS)
    def save_at_the_peer(self, tenant: str, chain: tuple[int, ...]) -> None:
        with self.peers[tenant].reserve(tokens_of(chain), deadline_s=0.0) as run:
            for offset, view in enumerate(run.views()):
                view[:] = bytes_of(tenant, chain[: run.start + offset + 1])
            if run.count:
                run.commit()
                for page in range(run.start + run.count):
                    self.stored[tenant].add(chain[: page + 1])

    @rule(tenant=st.sampled_from(TENANTS), chain=LONG_CHAINS, hold=st.booleans())
    def store_here_and_load_there(self, tenant: str, chain: tuple[int, ...], hold: bool) -> None:
        self.evict_tenant(tenant)
        self.save_at_the_peer(tenant, chain)
        self.write_all_and_forget_what_was_missing()
        self.load(tenant, chain, hold)

    @rule(tenant=st.sampled_from(TENANTS), chain=CHAINS)
    def load_at_the_peer(self, tenant: str, chain: tuple[int, ...]) -> None:
        with self.peers[tenant].match(tokens_of(chain)) as hit:
            self.compare(tenant, chain, hit)

    @rule()
    def write_all_and_forget_what_was_missing(self) -> None:
        for store in (self.store, self.peer):
            store._share.writer.flush(time.monotonic() + 1.0)
            store._share.finder._absent.clear()

    @rule(idle_s=st.sampled_from([0.0, 60.0]))
    def forget_what_only_redis_has(self, idle_s: float) -> None:
        for store in (self.store, self.peer):
            with store.state.lock:
                store.state.drop_idle_remote(idle_s)

    @rule(everything=st.booleans())
    def redis_loses_pages(self, everything: bool) -> None:
        for key in self.server.pages()[:: 1 if everything else 3]:
            self.server.ask("DEL", key)

    @invariant()
    def the_peers_accounts_agree(self) -> None:
        self.peer.check()

    def teardown(self) -> None:
        for store in (self.store, self.peer):
            SharingMachine.found += store.stats().counters["redis_pages_read"]
        super().teardown()
        self.peer.close()
        self.secret_folder.cleanup()

    found = 0  # pages that came through Redis, over all runs


def run_machine(machine: type[StoreMachine]) -> None:
    settings_used = settings(
        max_examples=12,
        stateful_step_count=30,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(machine, settings=settings_used)


@pytest.mark.slow
def test_no_order_of_calls_gives_wrong_bytes() -> None:
    run_machine(StoreMachine)


@pytest.mark.slow
def test_no_order_of_calls_of_two_stores_that_share_gives_wrong_bytes(tmp_path: Path) -> None:
    with RedisProcess(tmp_path / "redis") as server:
        SharingMachine.server = server
        run_machine(SharingMachine)
    assert SharingMachine.found
