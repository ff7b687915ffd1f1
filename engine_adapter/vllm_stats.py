"""What the plug-in counts, in vLLM's own metrics: one class for both roles, plain numbers only."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

# Counters under these names get a help text in /metrics; others are kept in the log line only.
COUNTERS = {
    "lookups": "Requests for which the store was asked.",
    "lookups_cut": "Look-ups answered with less than is stored: leases at their limit.",
    "hit_tokens": "Prompt tokens taken from the store.",
    "hit_disk_tokens": "Of these, tokens that were on disk when the request came.",
    "asked_tokens": "Prompt tokens of the requests for which the store was asked.",
    "loads_ok": "Loads that every rank finished.",
    "loads_failed": "Loads that were given up and recomputed.",
    "loads_by_layer": "Loads of a rank whose layers came while the forward computed.",
    "load_bytes": "Bytes copied from the store into the KV cache.",
    "save_bytes": "Bytes copied from the KV cache to the store.",
    "pages_saved": "Pages published in the store.",
    "pages_present": "Pages that others had stored already.",
    "saves_failed": "Saves that a rank could not finish.",
    "saves_refused": "Saves for which the store had no room or no answer.",
    "saves_over_pin_cap": "Times that full pages waited because too many blocks were pinned.",
    "pages_lost": "Full pages that were not saved, for whatever reason; the log names it.",
    "pages_left_behind": "Full pages of ended requests whose blocks were reused before their turn.",
    "store_errors": "Calls to the store that failed in an unexpected way.",
    "hook_errors": "Errors in this plug-in, each turned into a miss.",
}
# Only ever grows, by what is told: in /metrics a gauge, as that is what it is.
GAUGES = {"pinned_blocks_peak": "The most blocks that were pinned at a time until they are saved."}


class KVStoreStats(KVConnectorStats):  # type: ignore[misc]
    """Counts since the last call: name -> number."""

    def reset(self) -> None:
        """Start at zero."""
        self.data: dict[str, Any] = {}

    def aggregate(self, other: Any) -> KVStoreStats:
        """Add another one's counts."""
        for name, amount in other.data.items():
            self.data[name] = self.data.get(name, 0) + amount
        return self

    def reduce(self) -> dict[str, int | float]:
        """For vLLM's log line."""
        return {name: self.data[name] for name in COUNTERS if self.data.get(name)}

    def is_empty(self) -> bool:
        return not any(self.data.values())


class KVStorePromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """The same counts as Prometheus counters `vllm:kvstore_...`."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {
            name: self._by_engine(name, text, labelnames)
            for name, text in (COUNTERS | GAUGES).items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one record's counts."""
        for name, amount in transfer_stats_data.items():
            counter = self._counters.get(name, {}).get(engine_idx)
            if counter is not None and amount > 0:
                counter.inc(amount)

    def _by_engine(self, name: str, text: str, labelnames: list[str]) -> dict[int, Any]:
        kind = self._gauge_cls if name in GAUGES else self._counter_cls
        counter = kind(name=f"vllm:kvstore_{name}", documentation=text, labelnames=labelnames)
        values = self.per_engine_labelvalues
        return {engine: counter.labels(*labels) for engine, labels in values.items()}


def changes(now: dict[str, float], before: dict[str, float]) -> dict[str, float]:
    """What grew between two snapshots."""
    grown = {name: amount - before.get(name, 0) for name, amount in now.items()}
    return {name: amount for name, amount in grown.items() if amount}
