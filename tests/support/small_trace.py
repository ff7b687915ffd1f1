"""A small synthetic trace of chats and documents, made from a seed: for tests of policies."""

from __future__ import annotations

import random

from kvstore.trace import Trace, TraceBuilder

BLOCK_TOKENS = 512


def records(seed: int, requests: int = 600) -> list[dict[str, object]]:
    """Lines of a Mooncake trace: chats that go on or stop, documents asked about, a flood."""
    rng = random.Random(seed)
    lines: list[dict[str, object]] = []
    chats: list[list[int]] = []
    documents = [[10_000 + 100 * d + b for b in range(rng.randint(4, 20))] for d in range(12)]
    fresh, now = 1_000_000, 0
    for _ in range(requests):
        now += rng.randint(0, 2_000)
        kind = rng.random()
        if kind < 0.45 and chats:
            path = list(rng.choice(chats[-20:]))
        elif kind < 0.65:
            path = list(documents[min(rng.randint(0, 11), rng.randint(0, 11))])
        else:
            path = [1, 2]
        new = rng.randint(1, 6)
        path += range(fresh, fresh + new)
        fresh += new
        if kind < 0.9:
            chats.append(path)
        lines.append(
            {
                "timestamp": now,
                "input_length": len(path) * BLOCK_TOKENS - rng.randint(0, BLOCK_TOKENS - 1),
                "output_length": 1,
                "hash_ids": path,
            }
        )
    return lines


def small_trace(seed: int = 1, requests: int = 600) -> Trace:
    builder = TraceBuilder(f"seed {seed}")
    for line in records(seed, requests):
        builder.add(line)
    return builder.done()


def trace_of(paths: list[list[int]]) -> Trace:
    """A request a second; equal beginnings of paths are equal blocks."""
    builder = TraceBuilder("generated")
    for number, path in enumerate(paths):
        ids = [hash(tuple(path[: end + 1])) for end in range(len(path))]
        builder.add({"timestamp": 1000 * number, "hash_ids": ids})
    return builder.done()
