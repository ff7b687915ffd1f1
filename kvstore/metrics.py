"""The store and its server as Prometheus metrics: every name and label is said here, once.

Read when somebody looks, from counters that the store keeps anyway. No tenant's name and no token
stands in a label: a tenant is a digest keyed by the store secret, so that nobody can guess it. Who
is shown one tenant's part gets no number that others have any part in.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector

from kvstore._version import __version__
from kvstore.ghost_list import Left
from kvstore.meters import BOUNDS_S, OTHER
from kvstore.state import TIER_NAMES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from kvstore.meters import Histogram
    from kvstore.store import Store
    from kvstore.store_stats import Stats
    from kvstore.tenant_usage import TenantUsage

__all__ = ["CONTENT_TYPE", "METRICS", "Described", "Kind", "StoreMetrics", "tenant_label"]

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
TENANT_DIGITS = 12


class Kind(StrEnum):
    """What a metric is to Prometheus."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Described:
    """One metric. Names end in their unit; a counter's samples have _total on top."""

    name: str
    kind: Kind
    labels: tuple[str, ...]
    help: str

    @property
    def exposed_name(self) -> str:
        """The name that queries use."""
        return self.name + ("_total" if self.kind is Kind.COUNTER else "")


def _table(kind: Kind, rows: dict[str, str]) -> list[Described]:
    """Rows of "name label label": help."""
    found = []
    for key, text in rows.items():
        name, *labels = key.split()
        found.append(Described(f"kvstore_{name}", kind, tuple(labels), text))
    return found


METRICS: tuple[Described, ...] = (
    *_table(
        Kind.COUNTER,
        {
            "requests tenant engine": "Look-ups of prompts.",
            "request_hits tenant engine": "Look-ups that found at least one page.",
            "requested_tokens tenant engine": "Tokens of all prompts that were looked up.",
            "hit_tokens tenant engine tier": "Tokens found, by the fastest tier that had them.",
            "stored_pages tenant engine": "Pages that were stored.",
            "prefill_saved_seconds tenant engine": (
                "Prefill that hits saved, as far as the engine's adapter measures it."
            ),
            "moved_bytes source target": "Bytes of pages that went from one place to another.",
            "left_pages reason": "Pages that left their last tier, by why.",
            "missed_pages reason": (
                "Pages that were stored again soon after they had left: they would have hit."
            ),
            "tier_evictions tier": "Pages that left a tier for others, kept elsewhere or not.",
            "bad_pages kind": "Pages that failed a check when they were read; they were misses.",
            "read_errors tier": "Reads of pages that the medium failed.",
            "write_failures tier": "Pages that a tier did not take.",
            "stage_timeouts": "Stages that did not end before their deadline.",
            "reservations_refused": "Reservations that found no room.",
            "lookups_cut": "Look-ups answered with less than is stored: leases at their limit.",
            "pins_broken": "Pins that ended because another tenant took back its share.",
            "breaker_opened tier": "How often a breaker opened.",
            "hit_pages": "Pages that look-ups found, in any tier.",
            "disk_written_bytes": "Bytes of slots written to disk; a hit costs that / hit_pages.",
            "not_admitted_pages": "Pages that left memory, and the disk was not to have them.",
            "policy_switches": "How often `policy = auto` followed another policy from then on.",
        },
    ),
    *_table(
        Kind.GAUGE,
        {
            "build_info version": "1, with the version that runs.",
            "warm": "1 when all that is on disk can be hit.",
            "pages": "Pages in the index.",
            "trees": "Radix trees: one a namespace, tenant and salt.",
            "index_bytes": "Memory of the index, tokens included.",
            "leases": "Leases that keep pages where they are.",
            "pinned_pages": "Chains that are pinned.",
            "ghost_pages": "Pages that left and are remembered.",
            "tier_capacity_bytes tier": "What a tier may take.",
            "tier_allocated_bytes tier": "What it has taken from the machine.",
            "tier_used_bytes tier": "What pages take in it.",
            "tier_pages tier": "Pages in it.",
            "tier_up tier": "1 when a tier is all that it should be.",
            "breaker_open tier": "1 while a tier is left alone after errors.",
            "policy_following policy": "1 for the policy that says what leaves first.",
            "policy_hit_ratio policy size": (
                "What a policy would hit at a part of the present size, by `policy = auto`."
            ),
            "policy_study_core_ratio": "Part of one core that the policy's thinking takes.",
            "disk_queue_bytes": "Bytes that wait to be written to disk.",
            "staging_used_bytes": "Memory that writers have for pages on their way.",
            "staging_capacity_bytes": "What they may have.",
            "sessions": "Sessions of clients.",
            "session_matches": "Matches that clients hold.",
            "session_reservations": "Reservations that clients hold.",
            "tenant_used_bytes tenant tier": "Bytes of slots that a tenant has in a tier.",
            "tenant_share_bytes tenant tier": "Bytes that a tenant is guaranteed in a tier.",
        },
    ),
    *_table(
        Kind.HISTOGRAM,
        {
            "lookup_duration_seconds": "Look-ups in the store's own index.",
            "stage_duration_seconds": "Bringing a match's pages into memory, where some were not.",
            "load_duration_seconds": "From pages being ready in memory to the end of their lease.",
            "store_duration_seconds": "Copying, checking and publishing a run of pages.",
        },
    ),
)
_FAMILIES: dict[Kind, Callable[..., Metric]] = {
    Kind.COUNTER: CounterMetricFamily,
    Kind.GAUGE: GaugeMetricFamily,
    Kind.HISTOGRAM: HistogramMetricFamily,
}


def tenant_label(secret: bytes, tenant: str) -> str:
    """What a tenant is called in labels: the same on all servers of one store secret."""
    if tenant == OTHER:
        return OTHER
    named = hashlib.blake2b(tenant.encode(), key=secret, digest_size=16, person=b"kvstore-metrics")
    return named.hexdigest()[:TENANT_DIGITS]


class StoreMetrics:
    """What an exporter shows of one store, and of its server where there is one."""

    def __init__(self, store: Store, service: Callable[[], dict[str, Any]] | None = None) -> None:
        """service: who is connected, as Server.service_stats says."""
        self._store = store
        self._service = service
        self._registry = CollectorRegistry()
        self._registry.register(_Adapter(self.families))
        ProcessCollector(registry=self._registry)

    def render(self, tenant: str | None = None) -> bytes:
        """The exposition, in Prometheus' text format: of all, or one tenant's part."""
        if tenant is None:
            return bytes(generate_latest(self._registry))
        registry = CollectorRegistry()
        registry.register(_Adapter(lambda: self.families_of(tenant)))
        return bytes(generate_latest(registry))

    def families_of(self, tenant: str) -> list[Metric]:
        """What one tenant did and has."""
        values = _Values()
        self._rows(values, tenant)
        self._usage(values, [self._store.tenant_usage(tenant)])
        values.put("build_info", 1, __version__)
        values.put("warm", self._store.warm)
        return [_family(each, values) for each in METRICS if each.name in values.samples]

    def families(self) -> list[Metric]:
        """All metrics of METRICS, with the values of now."""
        values = _Values()
        stats = self._store.stats()
        self._traffic(values)
        self._rows(values)
        self._usage(values, self._store.tenant_usages())
        _of_stats(values, stats)
        for tier, is_open in self._store.breakers().items():
            values.put("breaker_open", is_open, tier)
        if self._service is not None:
            _of_service(values, self._service())
        return [_family(each, values) for each in METRICS]

    def _traffic(self, values: _Values) -> None:
        state = self._store.state
        with state.lock:
            meters = state.meters
            moved = dict(meters.moved)
            for name in ("lookup", "stage", "load", "store"):
                values.histograms[f"kvstore_{name}_duration_seconds"] = getattr(meters, name).copy()
            values.put("ghost_pages", len(state.ghosts))
        for (source, target), size in moved.items():
            values.put("moved_bytes", size, source, target)

    def _rows(self, values: _Values, only: str | None = None) -> None:
        """What each tenant's engines asked for and got, or one tenant's."""
        state = self._store.state
        with state.lock:
            rows = [
                (tenant, engine, row, list(row.hit_tokens))
                for tenant, engine, row in state.meters.traffic(only)
            ]
        for tenant, engine, row, hit_tokens in rows:
            who = tenant_label(state.secret, tenant), engine
            values.put("requests", row.requests, *who)
            values.put("request_hits", row.hits, *who)
            values.put("requested_tokens", row.tokens, *who)
            values.put("stored_pages", row.stored_pages, *who)
            values.put("prefill_saved_seconds", row.prefill_saved_s, *who)
            for tier, tokens in zip(TIER_NAMES, hit_tokens, strict=True):
                values.put("hit_tokens", tokens, *who, tier)

    def _usage(self, values: _Values, usages: list[TenantUsage]) -> None:
        secret = self._store.state.secret
        for usage in usages:
            tenant = tenant_label(secret, usage.tenant)
            values.put("tenant_used_bytes", usage.host_bytes, tenant, "host")
            values.put("tenant_used_bytes", usage.disk_bytes, tenant, "disk")
            for tier in ("host", "disk"):
                share = getattr(usage, f"{tier}_share_bytes")
                if share is not None:
                    values.put("tenant_share_bytes", share, tenant, tier)


class _Values:
    """Samples by metric: label values to number."""

    def __init__(self) -> None:
        self.samples: dict[str, dict[tuple[str, ...], float]] = defaultdict(dict)
        self.histograms: dict[str, Histogram] = {}

    def put(self, name: str, value: float, *labels: str) -> None:
        """One sample; two of the same labels are one."""
        row = self.samples[f"kvstore_{name}"]
        row[labels] = row.get(labels, 0.0) + float(value)


class _Adapter(Collector):
    """What the client library asks."""

    def __init__(self, families: Callable[[], Iterable[Metric]]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        yield from self._families()

    def describe(self) -> Iterator[Metric]:
        """Nothing: so that registering it asks nothing of the store."""
        return iter(())


def _of_stats(values: _Values, stats: Stats) -> None:
    counters = stats.counters
    for why in Left:
        name = why.name.lower()
        values.put("left_pages", counters[f"left_{name}"], name)
        values.put("missed_pages", counters[f"missed_{name}"], name)
    values.put("tier_evictions", counters["host_evictions"], "host")
    values.put("tier_evictions", counters["disk_evictions"], "disk")
    values.put("bad_pages", counters["corrupt_pages"], "corrupt")
    values.put("bad_pages", counters["stale_pages"], "stale")
    values.put("bad_pages", counters["key_missing"], "key_missing")
    values.put("bad_pages", counters["redis_bad_pages"], "redis")
    values.put("read_errors", counters["disk_read_errors"], "disk")
    values.put("read_errors", counters["redis_errors"], "redis")
    values.put("write_failures", counters["disk_write_failures"], "disk")
    values.put("write_failures", counters["redis_dropped"], "redis")
    values.put("breaker_opened", counters["redis_breaker_opened"], "redis")
    for name in ("stage_timeouts", "reservations_refused", "lookups_cut", "pins_broken"):
        values.put(name, counters[name])
    values.put("hit_pages", counters["hit_pages"])
    values.put("disk_written_bytes", counters["disk_bytes_written"])
    values.put("not_admitted_pages", counters["pages_not_admitted"])
    values.put("build_info", 1, __version__)
    for name in ("warm", "pages", "trees", "index_bytes", "leases", "pinned_pages"):
        values.put(name, getattr(stats, name))
    _of_policy(values, stats.policy)
    values.put("disk_queue_bytes", stats.dirty_bytes)
    for tier in stats.tiers:
        values.put("tier_capacity_bytes", tier.capacity_bytes, tier.name)
        values.put("tier_allocated_bytes", tier.allocated_bytes, tier.name)
        values.put("tier_used_bytes", tier.used_bytes, tier.name)
        values.put("tier_pages", tier.pages, tier.name)
        values.put("tier_up", tier.state == "ok", tier.name)


def _of_policy(values: _Values, policy: dict[str, Any]) -> None:
    values.put("policy_following", 1, policy.get("following", policy["name"]))
    values.put("policy_switches", policy.get("switches", 0))
    values.put("policy_study_core_ratio", policy["study_share"])
    for name, points in policy.get("curves", {}).items():
        for point in points:
            values.put("policy_hit_ratio", point["hit_ratio"], name, f"{point['factor']:g}")


def _of_service(values: _Values, service: dict[str, Any]) -> None:
    values.put("sessions", service["sessions"])
    values.put("session_matches", service["matches"])
    values.put("session_reservations", service["reservations"])
    values.put("staging_used_bytes", service["staging_bytes"])
    values.put("staging_capacity_bytes", service["staging_capacity_bytes"])


def _family(described: Described, values: _Values) -> Metric:
    family: Any = _FAMILIES[described.kind](described.name, described.help, labels=described.labels)
    if described.kind is Kind.HISTOGRAM:
        found = values.histograms[described.name]
        buckets, total = [], 0
        for bound, count in zip((*map(repr, BOUNDS_S), "+Inf"), found.counts, strict=True):
            total += count
            buckets.append((bound, total))
        family.add_metric([], buckets, found.sum_s)
    else:
        for labels, value in values.samples.get(described.name, {}).items():
            family.add_metric(list(labels), value)
    return family  # type: ignore[no-any-return]
