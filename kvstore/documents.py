"""The JSON documents that `--json` prints and the service answers, and the way back."""

from __future__ import annotations

import json
from dataclasses import MISSING, asdict, fields
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvstore.inspection import Chain, NamespaceUsage

Record = TypeVar("Record")


def listing(
    spaces: Sequence[NamespaceUsage], chains: Sequence[Chain], total: int
) -> dict[str, Any]:
    """Namespaces, and the chains in them that were asked for."""
    return {
        "namespaces": [asdict(space) for space in spaces],
        "chains": [chain.to_dict() for chain in chains],
        "chains_total": total,
    }


def to_json(document: Mapping[str, Any]) -> str:
    """One line, keys in order."""
    return json.dumps(document, sort_keys=True)


def record_of(kind: type[Record], document: Any) -> Record:
    """The record whose asdict() this was; lists are its tuples.

    What a newer server says besides is left out; ValueError where a field is missing.
    """
    if not isinstance(document, dict):
        raise ValueError(f"{kind.__name__}: an object is needed")
    given = {}
    for each in fields(kind):  # type: ignore[arg-type] # a dataclass
        if each.name in document:
            value = document[each.name]
            given[each.name] = tuple(value) if isinstance(value, list) else value
        elif each.default is MISSING and each.default_factory is MISSING:
            raise ValueError(f"{kind.__name__}: {each.name} is missing")
    return kind(**given)
