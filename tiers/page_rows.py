"""What a disk tier holds at start, as numpy columns, one group a prefix tree: food for the index.

Invariant: every row's parent is a row of the same group, one page earlier in its chain; rows for
which that is not so are reported as orphans and never handed out. Pure: no I/O.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvstore.tiers.catalog import RECORD
from kvstore.tiers.catalog_scan import gather

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    from kvstore.tiers.catalog_scan import Scan

ROOT_LEVEL = -1  # parent row of the first page of a chain
_MISSING = -2
_HASH_FACTOR = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True)
class RootRows:
    """Pages of one tree, one row each, in slot order."""

    root: bytes
    tenant: str
    namespace: bytes
    page_tokens: int
    slots: npt.NDArray[np.int64]
    sequences: npt.NDArray[np.uint64]
    parent_rows: npt.NDArray[np.int32]  # row in this group; -1 for the first page of a chain
    page_index: npt.NDArray[np.int32]
    tokens: npt.NDArray[np.int32]  # (n, page_tokens)
    extras: dict[int, bytes]  # by row; rows without extras are absent
    keys: npt.NDArray[np.uint64]  # (n, 2): the 16 bytes as they are
    payload_bytes: npt.NDArray[np.uint32]
    checksums: npt.NDArray[np.uint64]  # (n, 2): the 16 bytes of the digest as they are
    created_s: npt.NDArray[np.uint32]
    codecs: npt.NDArray[np.uint16]
    writer_ids: npt.NDArray[np.uint32]
    writers: dict[int, str]

    def __len__(self) -> int:
        return len(self.slots)


def root_rows(scan: Scan) -> tuple[list[RootRows], npt.NDArray[np.int64]]:
    """The rows of a scan tree by tree, and the slots of rows that no chain reaches.

    The smaller trees come first, so that most tenants hit early.
    """
    fixed = scan.fixed
    known = np.isin(fixed["root_id"], np.fromiter(scan.roots, np.uint32, len(scan.roots)))
    known &= np.isin(fixed["writer_id"], np.fromiter(scan.writers, np.uint32, len(scan.writers)))
    known &= (fixed["token_bytes"] % 4 == 0) & (fixed["token_bytes"] > 0)
    orphans = [fixed["slot"][~known]]
    groups = []
    for rows in _split(fixed, np.flatnonzero(known), _tree_numbers(scan)):
        parents = _parents(fixed, rows)
        parents[_older_twins(fixed, rows)] = _MISSING
        lost = _lost(parents)
        if lost.any():
            orphans.append(fixed["slot"][rows[lost]])
            renumbered = np.cumsum(~lost) - 1
            rows, parents = rows[~lost], parents[~lost]
            parents = np.where(parents >= 0, renumbered[parents], parents)
        if len(rows):
            groups.append(_group(scan, rows, parents.astype(np.int32)))
    return groups, np.concatenate(orphans)


def _tree_numbers(scan: Scan) -> npt.NDArray[np.uint64]:
    """A number for each row that is equal for rows of one tree.

    Not its root id: a tree with plain and encrypted pages has several.
    """
    first: dict[tuple[bytes, str, bytes], int] = {}
    same = {number: first.setdefault(root, number) for number, root in scan.roots.items()}
    numbers: npt.NDArray[np.uint64] = scan.fixed["root_id"].astype(np.uint64)
    if len(first) < len(same):
        for number, known in same.items():
            if number != known:
                numbers[scan.fixed["root_id"] == number] = known
    return numbers


def _split(
    fixed: npt.NDArray[Any], rows: npt.NDArray[np.int64], trees: npt.NDArray[np.uint64]
) -> Iterator[npt.NDArray[np.int64]]:
    """Rows by (tree, token count), ascending within a group, small groups first."""
    if not len(rows):
        return
    group = trees[rows] << np.uint64(32)
    group |= fixed["token_bytes"][rows].astype(np.uint64)
    order = np.argsort(group, kind="stable")
    edges = np.flatnonzero(np.diff(group[order])) + 1
    yield from sorted(np.split(rows[order], edges), key=len)


def _parents(fixed: npt.NDArray[Any], rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Position of each row's parent in `rows`; ROOT_LEVEL or _MISSING where there is none."""
    sequences = fixed["sequence"][rows]
    wanted = fixed["parent_sequence"][rows]
    depth = fixed["page_index"][rows].astype(np.int64)
    order = np.argsort(sequences, kind="stable")
    at = np.searchsorted(sequences[order], wanted)
    parents = order[np.minimum(at, len(rows) - 1)]
    fits = (sequences[parents] == wanted) & (depth[parents] + 1 == depth)
    parents = np.where(fits, parents, _MISSING)
    parents[(wanted == 0) & (depth == 0)] = ROOT_LEVEL
    return parents


def _older_twins(fixed: npt.NDArray[Any], rows: npt.NDArray[np.int64]) -> list[int]:
    """Positions of rows that name the same page as a row of a higher sequence.

    A rebuild from headers finds them: what a kill left unpublished, or an eviction left in a slot
    that was not written since. A page is written again only when its older self was no one's any
    more, so the newest is the one that durable pages hang under.
    """
    keys, above = fixed["key"][rows], fixed["parent_sequence"][rows]
    mixed = keys[:, 0] ^ (above * _HASH_FACTOR)
    ordered = np.sort(mixed)
    if not (ordered[1:] == ordered[:-1]).any():
        return []
    order = np.argsort(mixed, kind="stable")
    same = mixed[order[1:]] == mixed[order[:-1]]
    suspects = np.union1d(order[1:][same], order[:-1][same])
    newest: dict[tuple[bytes, int], int] = {}
    older = []
    for row in suspects.tolist():
        name = keys[row].tobytes(), int(above[row])
        known = newest.setdefault(name, row)
        if fixed["sequence"][rows[row]] > fixed["sequence"][rows[known]]:
            newest[name] = row
            older.append(known)
        elif row != known:
            older.append(row)
    return older


def _lost(parents: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Rows that hang below a missing parent, at any distance: found by pointer doubling."""
    lost: npt.NDArray[np.bool_] = parents == _MISSING
    if not lost.any():
        return lost
    ancestor = np.where(parents < 0, np.arange(len(parents)), parents)
    while True:
        lost = lost | lost[ancestor]
        further = ancestor[ancestor]
        if (further == ancestor).all():
            return lost
        ancestor = further


def _group(scan: Scan, rows: npt.NDArray[np.int64], parents: npt.NDArray[np.int32]) -> RootRows:
    part = scan.fixed[rows]
    root, tenant, namespace = scan.roots[int(part["root_id"][0])]
    token_bytes = int(part["token_bytes"][0])
    starts = scan.offsets[rows] + RECORD.size
    tokens = gather(scan.blob, starts, scan.lengths[rows], token_bytes)
    extras = {}
    for row in np.flatnonzero(part["extras_bytes"]).tolist():
        start = int(starts[row]) + token_bytes
        extras[row] = scan.blob[start : start + int(part["extras_bytes"][row])].tobytes()
    return RootRows(
        root=root,
        tenant=tenant,
        namespace=namespace,
        page_tokens=token_bytes // 4,
        slots=np.ascontiguousarray(part["slot"]),
        sequences=np.ascontiguousarray(part["sequence"]),
        parent_rows=parents,
        page_index=part["page_index"].astype(np.int32),
        tokens=tokens.view("<i4"),
        extras=extras,
        keys=np.ascontiguousarray(part["key"]),
        payload_bytes=np.ascontiguousarray(part["payload_bytes"]),
        checksums=np.ascontiguousarray(part["checksum"]),
        created_s=np.ascontiguousarray(part["created_s"]),
        codecs=np.ascontiguousarray(part["codec"]),
        writer_ids=np.ascontiguousarray(part["writer_id"]),
        writers=scan.writers,
    )
