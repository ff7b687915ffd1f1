"""The policies that a store can be told to use, by name. Those of bench/policies stand beside them.

Objectives: what a policy that weighs cost is to save. Hits count every page alike; compute counts
what prefill of a page costs; ttft lies between, as a long wait is felt more than the work is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.tiers.eviction import LruPolicy
from kvstore.tiers.eviction_arc import ArcPolicy
from kvstore.tiers.eviction_csl import CslPolicy
from kvstore.tiers.eviction_gdsf import GdsfPolicy

if TYPE_CHECKING:
    from kvstore.tiers.eviction import Policy

POLICIES = ("lru", "csl", "arc", "gdsf")
OBJECTIVES = {"hits": 0.0, "ttft": 0.5, "compute": 1.0}


def make_policy(
    name: str, capacity_pages: int, objective: str = "hits", even_pages: float = 60.0
) -> Policy:
    """A policy by name, for a tier of about so many pages.

    even_pages: how deep a page costs twice what the first one does.
    """
    gamma = OBJECTIVES[objective]
    if name == "lru":
        return LruPolicy()
    if name == "arc":
        return ArcPolicy(capacity_pages)
    if name == "gdsf":
        return GdsfPolicy(capacity_pages, gamma, even_pages)
    if name == "csl":
        return CslPolicy(capacity_pages, gamma, even_pages)
    raise ValueError(f"policy {name!r}: one of {', '.join(POLICIES)} is needed")
