"""A trace of requests to a cache: Mooncake JSONL, plain or gz, as columns.

A line is {"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [...]}; an
id names a block of tokens and all before it. Look-ups that `kvstore record` wrote have the same
form. Invariant: blocks are numbered by first use, and each has one parent wherever it occurs.
"""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvstore.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

BLOCK_TOKENS = 512  # of Mooncake's traces; a line may say otherwise: "block_tokens"
LINE_BYTES_MAX = 16 << 20
# Requests of one time stand in order: each is this much later than the one before it.
STEP_S = 1e-6
NO_BLOCK = -1
PROGRESS_LINES = 1000


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of time; request i asks for blocks[starts[i]:starts[i + 1]]."""

    name: str
    times_s: npt.NDArray[np.float64]
    starts: npt.NDArray[np.int64]
    blocks: npt.NDArray[np.int32]
    tokens: npt.NDArray[np.int32]  # of each block reference
    parent: npt.NDArray[np.int32]  # of each block; NO_BLOCK at the beginning of a prompt
    tenants: npt.NDArray[np.int32]  # of each request
    block_tokens: int

    @property
    def requests(self) -> int:
        return len(self.times_s)

    @property
    def unique(self) -> int:
        """Different blocks."""
        return len(self.parent)

    @property
    def references(self) -> int:
        return len(self.blocks)

    def facts(self) -> dict[str, str | int]:
        """How a JSON document on the trace begins."""
        return {
            "trace": self.name,
            "requests": self.requests,
            "references": self.references,
            "unique_blocks": self.unique,
            "block_tokens": self.block_tokens,
        }

    def depths(self) -> npt.NDArray[np.int32]:
        """How many blocks stand before each reference in its request."""
        before = np.repeat(self.starts[:-1], np.diff(self.starts))
        return (np.arange(self.references) - before).astype(np.int32)

    def head(self, requests: int) -> Trace:
        """The first requests only."""
        requests = min(requests, self.requests)
        end = int(self.starts[requests])
        blocks = self.blocks[:end]
        return Trace(
            f"{self.name}, first {requests}",
            self.times_s[:requests],
            self.starts[: requests + 1],
            blocks,
            self.tokens[:end],
            self.parent[: int(blocks.max()) + 1 if end else 0],
            self.tenants[:requests],
            self.block_tokens,
        )


def read_trace(path: Path, progress: Callable[[int], None] | None = None) -> Trace:
    """The trace in a file. InvalidRequest, with the line, for what is not one.

    `progress` is told the lines read so far, now and then.
    """
    builder = TraceBuilder(path.name)
    try:
        for number, line in enumerate(_lines(path), 1):
            if line.strip():
                try:
                    builder.add(_record(line))
                except ValueError as exc:
                    raise InvalidRequest(f"{path}, line {number}: {exc}") from exc
            if progress is not None and number % PROGRESS_LINES == 0:
                progress(number)
    except (OSError, EOFError) as exc:
        why = getattr(exc, "strerror", None) or exc  # gzip has no errno
        raise InvalidRequest(f"trace {path}: cannot be read: {why}") from exc
    if not builder.requests:
        raise InvalidRequest(f"trace {path}: no requests in it; `kvstore record` makes traces")
    return builder.done()


class TraceBuilder:
    """Makes a trace request by request."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._number: dict[Any, int] = {}
        self._tenants: dict[str, int] = {}
        self._parent: list[int] = []
        self._blocks: list[int] = []
        self._tokens: list[int] = []
        self._starts = [0]
        self._times: list[float] = []
        self._of_tenant: list[int] = []
        self._block_tokens = 0

    @property
    def requests(self) -> int:
        return len(self._times)

    def add(self, record: dict[str, Any]) -> None:
        """One request. ValueError says what is wrong with it; then nothing was added."""
        ids, length = record.get("hash_ids"), record.get("input_length")
        time_ms = record.get("timestamp")
        if not isinstance(ids, list) or not isinstance(time_ms, int | float):
            raise ValueError("timestamp and hash_ids are needed")
        if not all(type(each) in (int, str) for each in ids):
            raise ValueError("hash_ids: whole numbers or texts are needed")
        if len(set(ids)) != len(ids):
            raise ValueError("an id occurs twice in one request")
        size = record.get("block_tokens", self._block_tokens or BLOCK_TOKENS)
        if not isinstance(size, int) or size < 1 or size != (self._block_tokens or size):
            raise ValueError(f"block_tokens {size!r}: one number for the whole trace is needed")
        if length is None:
            length = len(ids) * size
        if not isinstance(length, int) or not (len(ids) - 1) * size < length <= len(ids) * size:
            # A recorded prompt may have a rest that fills no page; then its ids are whole.
            if not isinstance(length, int) or length < len(ids) * size:
                raise ValueError(f"input_length {length!r} does not fit {len(ids)} ids")
            length = len(ids) * size
        self._add(ids, length, float(time_ms) / 1000, str(record.get("tenant", "")), size)

    def _add(self, ids: list[Any], length: int, time_s: float, tenant: str, size: int) -> None:
        numbers, parent, fresh = [], NO_BLOCK, len(self._parent)
        for each in ids:
            number = self._number.get((tenant, each) if tenant else each, fresh)
            if number < len(self._parent):
                if self._parent[number] != parent:
                    raise ValueError(f"id {each!r} comes after another id than before")
            else:
                fresh += 1
            numbers.append(number)
            parent = number
        for at, (each, number) in enumerate(zip(ids, numbers, strict=True)):
            if number >= len(self._parent):
                self._number[(tenant, each) if tenant else each] = number
                self._parent.append(numbers[at - 1] if at else NO_BLOCK)
        self._blocks += numbers
        if ids:
            self._tokens += [size] * (len(ids) - 1) + [length - size * (len(ids) - 1)]
        self._starts.append(len(self._blocks))
        last = self._times[-1] if self._times else -1.0
        self._times.append(max(time_s, last + STEP_S))
        self._of_tenant.append(self._tenants.setdefault(tenant, len(self._tenants)))
        self._block_tokens = size

    def done(self) -> Trace:
        return Trace(
            self._name,
            np.array(self._times, np.float64),
            np.array(self._starts, np.int64),
            np.array(self._blocks, np.int32),
            np.array(self._tokens, np.int32),
            np.array(self._parent, np.int32),
            np.array(self._of_tenant, np.int32),
            self._block_tokens or BLOCK_TOKENS,
        )


def _lines(path: Path) -> Iterator[bytes]:
    with path.open("rb") as raw:
        zipped = raw.read(2) == b"\x1f\x8b"
        raw.seek(0)
        with gzip.open(raw) if zipped else raw as lines:
            while line := lines.readline(LINE_BYTES_MAX):
                yield line


def _record(line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as exc:
        raise ValueError(f"is not JSON: {exc}") from exc
    if not isinstance(record, dict):
        raise ValueError("is not a JSON object")
    return record
