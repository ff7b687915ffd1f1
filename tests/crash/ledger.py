"""The ledger: what the store promised, one line a promise, in a file that outlives the process.

The child appends each line with one write, before (B, S, E, D, F) or after (A, G) the step it
speaks of; the parent reads them all and knows which pages must be hits after the next start.

    B keys   a durable save of these pages begins       A keys   ... was acknowledged
    S keys   a plain save of these pages begins         G keys   an operator's eviction has ended
    E keys   pages leave the disk                       D keys   pages are dropped: damaged
    F keys   a byte of the first is flipped; the rest hang below it
    X slot:sequence   where that byte lies
    Q names           quarantined catalogs when all was last verified; "unfinished": a rebuild ended

A page is required from A on, until E or F; a D of a required page is a loss. An E between B and A
counts as after A: the page may have left before the acknowledgement was written.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

END = "."  # ends each line, so that a torn one is known


class LedgerWriter:
    """Appends lines; safe to use from several threads."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.write(self._descriptor, b"\n")  # after what may be a torn line

    def note(self, code: str, items: Iterable[str]) -> None:
        """One line; nothing is written when there are no items."""
        words = [code, *items, END]
        if len(words) > 2:
            os.write(self._descriptor, (" ".join(words) + "\n").encode())


@dataclass(slots=True)
class Ledger:
    """What the lines so far amount to."""

    required: set[str] = field(default_factory=set)  # must be hits
    gone: set[str] = field(default_factory=set)  # evicted by an operator: must be misses
    flipped: set[str] = field(default_factory=set)  # slot:sequence of damaged slots
    quarantines: set[str] = field(default_factory=set)
    acknowledged: int = 0  # pages, counted each time
    evicted: int = 0
    lost_in_run: list[str] = field(default_factory=list)  # required pages dropped as damaged
    _begun: set[str] = field(default_factory=set)
    _read_bytes: int = 0

    def read(self, path: Path) -> None:
        """Take in what was appended since the last call."""
        if not path.exists():
            return
        with path.open("rb") as stream:
            stream.seek(self._read_bytes)
            content = stream.read()
        self._read_bytes += len(content)
        for line in content.decode().splitlines():
            words = line.split()
            if len(words) > 2 and words[-1] == END:
                self.take(words[0], set(words[1:-1]))

    def take(self, code: str, items: set[str]) -> None:
        """One line."""
        if code in "BS":
            self.gone -= items
        if code == "B":
            self._begun |= items
        elif code == "A":
            self.required |= items & self._begun
            self.acknowledged += len(items)
        elif code == "E":
            self.required -= items
            self._begun -= items
            self.evicted += len(items)
        elif code == "D":
            self.lost_in_run += sorted(items & self.required)
            self.required -= items
        elif code == "F":
            self.required -= items
        elif code == "G":
            self.gone |= items - self.required
        elif code == "X":
            self.flipped |= items
        elif code == "Q":
            self.quarantines = items
