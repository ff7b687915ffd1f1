"""The policies that a store can be told to use, by name; bench/policies has more to compare."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.tiers.eviction import LruPolicy
from kvstore.tiers.eviction_arc import ArcPolicy
from kvstore.tiers.eviction_auto import AutoPolicy
from kvstore.tiers.eviction_csl import CslPolicy
from kvstore.tiers.eviction_gdsf import GdsfPolicy
from kvstore.tiers.page_cost import EVEN_TOKENS, OBJECTIVES, PageCost

if TYPE_CHECKING:
    from kvstore.tiers.eviction import Policy

__all__ = ["EVEN_TOKENS", "OBJECTIVES", "POLICIES", "make_policy"]

POLICIES = ("lru", "csl", "arc", "gdsf", "auto")
# Of these auto follows the best, csl until another is.
CANDIDATES = ("csl", "lru", "arc", "gdsf")


def make_policy(
    name: str, capacity_pages: int, objective: str = "hits", even_tokens: float = EVEN_TOKENS
) -> Policy:
    """A policy by name, for a tier of about so many pages; objectives are page_cost's."""
    cost = PageCost(objective, even_tokens)
    if name == "lru":
        return LruPolicy()
    if name == "arc":
        return ArcPolicy(capacity_pages)
    if name == "gdsf":
        return GdsfPolicy(capacity_pages, cost)
    if name == "csl":
        return CslPolicy(capacity_pages, cost)
    if name == "auto":

        def made(each: str, pages: int) -> Policy:
            return make_policy(each, pages, objective, even_tokens)

        return AutoPolicy(made, CANDIDATES, capacity_pages, cost)
    raise ValueError(f"policy {name!r}: one of {', '.join(POLICIES)} is needed")
