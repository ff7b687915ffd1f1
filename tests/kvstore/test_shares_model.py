"""Any order of stores, loads, pins, leases and quotas: who loses what, against a brute-force count.

What each tenant has is counted from the extents before and after every step; the rule of shares is
then asked of the difference, without any code of the store that decides.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from known_pages import PAGE_BYTES, SPEC, prompt

from kvstore import Store
from kvstore.errors import QuotaError
from kvstore.tenants import Quota

if TYPE_CHECKING:
    from kvstore.lease import Match
    from kvstore.session import Session

TENANTS = ("a", "b", "c")
HOST_BYTES = 512 << 10
CHAIN_PAGES = 4
PARTS = st.one_of(st.none(), st.integers(0, 8))
BOUNDS = st.one_of(st.none(), st.none(), st.integers(0, 12))


class SharesMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.store = Store.open(None, host_bytes=HOST_BYTES)
        host = self.store.state.host
        assert host is not None
        host.wait_populated(10.0)
        self.host = host
        self.sessions: dict[str, Session] = {
            tenant: self.store.session(SPEC, tenant=tenant) for tenant in TENANTS
        }
        self.quotas: dict[str, Quota] = {}
        self.held: list[Match] = []

    def teardown(self) -> None:
        for match in self.held:
            match.release()
        self.store.close()

    # The brute-force count

    def extents(self) -> dict[str, list[int]]:
        """Ids of the extents with pages of each tenant."""
        found: dict[str, list[int]] = {tenant: [] for tenant in TENANTS}
        for item in self.host.containers():
            if item.used_slots:
                found[item.tenant].append(item.container_id)
        return found

    def guaranteed(self) -> dict[str, int]:
        """Whole extents of each tenant: its share in eighths, as there are eight."""
        if not self.quotas:
            return dict.fromkeys(TENANTS, 0)
        said = {name: quota.host_bytes_share for name, quota in self.quotas.items()}
        left = HOST_BYTES - sum(share or 0 for share in said.values())
        silent = sum(share is None for share in said.values())
        found = {}
        for name, share in said.items():
            most = self.quotas[name].host_bytes_max
            part = left // silent if share is None else share
            if share is None and most is not None:
                part = min(part, most)
            found[name] = part * 8 // HOST_BYTES
        return found

    def used_pages(self, tenant: str) -> int:
        return sum(item.used_slots for item in self.host.containers() if item.tenant == tenant)

    # Steps

    @initialize(parts=st.tuples(PARTS, PARTS, PARTS), bounds=st.tuples(BOUNDS, BOUNDS, BOUNDS))
    def begin(self, parts: tuple[int | None, ...], bounds: tuple[int | None, ...]) -> None:
        self.change_quotas(parts, bounds)
        for tenant in TENANTS:  # more than there is room for: from here on somebody gives
            self.store_chains(tenant, 0, 20)

    @rule(parts=st.tuples(PARTS, PARTS, PARTS), bounds=st.tuples(BOUNDS, BOUNDS, BOUNDS))
    def change_quotas(self, parts: tuple[int | None, ...], bounds: tuple[int | None, ...]) -> None:
        if sum(part or 0 for part in parts) > 8:
            parts = tuple(part // 3 if part is not None else None for part in parts)
        eighth = HOST_BYTES // 8
        self.quotas = {}
        for tenant, part, bound in zip(TENANTS, parts, bounds, strict=True):
            share = part * eighth if part is not None else None
            most = bound * eighth // 2 if bound is not None else None
            if share is not None and most is not None:
                share = min(share, most)
            self.quotas[tenant] = Quota(
                host_bytes_share=share, host_bytes_max=most, pinned_pages_max=bound
            )
        self.store.set_quotas(self.quotas)

    @rule(
        tenant=st.sampled_from(TENANTS), first=st.integers(0, 30), chains=st.sampled_from((1, 20))
    )
    def store_chains(self, tenant: str, first: int, chains: int) -> None:
        for seed in range(first, first + chains):
            self.store_one(tenant, seed)

    def store_one(self, tenant: str, seed: int) -> None:
        before, guaranteed = self.extents(), self.guaranteed()
        most = self.quotas[tenant].host_bytes_max
        pages_before = self.used_pages(tenant)
        with self.sessions[tenant].reserve(prompt(seed, CHAIN_PAGES), deadline_s=0.1) as run:
            reason, stored = run.reason, run.count
            if stored:
                run.commit()
        if most is not None:
            assert self.used_pages(tenant) * PAGE_BYTES <= max(most, pages_before * PAGE_BYTES)
        after = self.extents()
        losers = {}
        for other in TENANTS:
            lost = set(before[other]) - set(after[other])
            if other == tenant or not lost:
                continue
            losers[other] = len(lost)
            assert len(before[other]) > guaranteed[other], f"{other} was within its share"
            assert len(after[other]) >= guaranteed[other], f"{other} was taken below its share"
        over = {name: len(before[name]) - guaranteed[name] for name in TENANTS}
        if losers and not self.held and len(losers) == 1 and sum(losers.values()) == 1:
            (loser,) = losers
            others = [over[name] for name in TENANTS if name != tenant]
            assert over[loser] == max(others), "not the one furthest above its share"
        below = len(before[tenant]) < guaranteed[tenant]
        bounded = most is not None and (pages_before + CHAIN_PAGES) * PAGE_BYTES > most
        bounded |= most is not None and len(before[tenant]) * HOST_BYTES // 8 >= most
        if below and not bounded and not self.held and not self.store.state.index.pins:
            own = self.used_pages(tenant) - pages_before
            assert own == stored, f"{tenant}, below its share, lost {stored - own} of its own"
        is_within = len(before[tenant]) < guaranteed[tenant]
        has_most = most is not None and len(before[tenant]) * HOST_BYTES // 8 >= most
        if reason == "full" and is_within and not has_most and not self.held:
            assert self.store.state.host_populated is False or losers, (
                f"{tenant} is below its share, nothing is held, and it found no room: {over}"
            )

    @rule(tenant=st.sampled_from(TENANTS), seed=st.integers(0, 49), hold=st.booleans())
    def read(self, tenant: str, seed: int, hold: bool) -> None:
        match = self.sessions[tenant].match(prompt(seed, CHAIN_PAGES))
        if hold and len(self.held) < 4:
            self.held.append(match)
        else:
            match.release()

    @rule()
    def release(self) -> None:
        for match in self.held:
            match.release()
        self.held.clear()

    @rule(tenant=st.sampled_from(TENANTS), seed=st.integers(0, 49))
    def pin(self, tenant: str, seed: int) -> None:
        most = self.quotas[tenant].pinned_pages_max
        before = self.store.tenant_usage(tenant).pinned_pages
        try:
            self.sessions[tenant].pin(prompt(seed, CHAIN_PAGES), 1000.0)
        except QuotaError:
            assert most is not None
            assert before + CHAIN_PAGES > most
        after = self.store.tenant_usage(tenant).pinned_pages
        assert most is None or after <= max(most, before)

    @rule(tenant=st.sampled_from(TENANTS), seed=st.integers(0, 49))
    def unpin(self, tenant: str, seed: int) -> None:
        self.sessions[tenant].unpin(prompt(seed, CHAIN_PAGES))

    @invariant()
    def all_accounts_agree(self) -> None:
        self.store.check()
        use = self.host.tenant_use()
        for tenant in TENANTS:
            counted = self.used_pages(tenant) * PAGE_BYTES
            assert (use[tenant].used_bytes if tenant in use else 0) == counted


class UnheldMachine(SharesMachine):
    """Without pins and leases: then a tenant below its share always gets what it asks for."""

    def read(self, tenant: str, seed: int, hold: bool) -> None:
        """No rule."""

    def pin(self, tenant: str, seed: int) -> None:
        """No rule."""


@pytest.mark.slow
@pytest.mark.parametrize("machine", [SharesMachine, UnheldMachine])
def test_no_order_of_calls_takes_a_page_of_a_tenant_within_its_share(
    machine: type[SharesMachine],
) -> None:
    used = settings(
        max_examples=10,
        stateful_step_count=12,
        phases=(Phase.explicit, Phase.generate),
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(machine, settings=used)
