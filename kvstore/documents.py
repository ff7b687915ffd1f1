"""The JSON documents of listings: what `--json` prints and what the service answers."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.inspection import Chain, NamespaceUsage, PageFacts


def listing(
    spaces: Sequence[NamespaceUsage], chains: Sequence[Chain], total: int
) -> dict[str, Any]:
    """Namespaces, and the chains in them that were asked for."""
    return {
        "namespaces": [asdict(space) for space in spaces],
        "chains": [chain.to_dict() for chain in chains],
        "chains_total": total,
    }


def chain_pages(chain: Chain, pages: Sequence[PageFacts], spec: str | None) -> dict[str, Any]:
    """One chain page by page, and its namespace's spec."""
    return {
        "chain": chain.to_dict(),
        "pages": [asdict(page) for page in pages],
        "spec": json.loads(spec) if spec else None,
    }


def to_json(document: dict[str, Any]) -> str:
    """One line, keys in order."""
    return json.dumps(document, sort_keys=True)
