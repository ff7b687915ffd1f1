"""The whole store against a set: any order of calls, restarts included, never gives wrong bytes."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from typing import TYPE_CHECKING

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from known_pages import PAGE_BYTES, PAGE_TOKENS, SPEC

from kvstore import Store
from kvstore.removal import Selection

if TYPE_CHECKING:
    from kvstore.lease import Match
    from kvstore.reservation import Reservation
    from kvstore.session import Session

TENANTS = ("default", "other")
# Chains over an alphabet of three pages: they share prefixes and part in the middle of runs.
CHAINS = st.lists(st.integers(0, 2), min_size=0, max_size=6).map(tuple)


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
        self.store = Store.open(self.folder.name, host_bytes=160 << 10, disk_bytes=24 << 20)
        self.sessions: dict[str, Session] = {
            tenant: self.store.session(SPEC, tenant=tenant) for tenant in TENANTS
        }

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

    @rule(tenant=st.sampled_from(TENANTS), chain=CHAINS)
    def evict_prefix(self, tenant: str, chain: tuple[int, ...]) -> None:
        root = self.store.root(SPEC.namespace, tenant)
        prefix = tokens_of(chain)[:-1]
        done = self.store.evict(Selection(prefix=prefix, root=root), include_pinned=True)
        if done.kept_leased == 0:
            gone = {item for item in self.stored[tenant] if item[: len(chain)] == chain}
            self.stored[tenant] -= gone

    @rule(tenant=st.sampled_from(TENANTS))
    def evict_tenant(self, tenant: str) -> None:
        done = self.store.evict(Selection(tenant=tenant), include_pinned=True)
        if done.kept_leased == 0:
            self.stored[tenant].clear()

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


@pytest.mark.slow
def test_no_order_of_calls_gives_wrong_bytes() -> None:
    settings_used = settings(
        max_examples=12,
        stateful_step_count=30,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(StoreMachine, settings=settings_used)
