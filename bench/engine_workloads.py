"""Prompts of the field's workloads for an engine, from a seed: what is asked first, what then.

Own code after published definitions: long documents after vLLM's long document QA and LMCache's
long-doc-qa (each document once, then again tile by tile or shuffled), chats after CachedAttention
and LMCache's multi-round-qa (all users' turns in rounds, each with all that was said), a shared
system prompt after SGLang's generated shared prefixes, RAG after RAGCache (documents by Zipf's law
in front of the question; their order counts), and prompts that nobody asks twice. What "the model
said" in a chat is text as well, so that every arm is asked exactly the same. Pure.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

HEADER_TOKENS = 8  # random ones in front of each text: no two begin alike
TOKEN_IDS = range(1000, 40_000)
Prompt = list[int]
Round = list[Prompt]  # what one engine is asked before the next one has its turn


@dataclass(frozen=True, slots=True)
class Size:
    """How much is asked; lengths in tokens."""

    documents: int = 6
    document: int = 2600
    repeats: int = 4
    compared: int = 1  # rounds of documents that are also asked without a cache, which is slow
    question: int = 40
    users: int = 6
    turns: int = 6
    turn: int = 330  # what the user says and what it was answered
    prefixes: int = 2
    prefix: int = 1536
    prefix_rounds: int = 2
    prefix_batch: int = 3  # questions to each prefix in a round
    prefix_question: int = 100
    passages: int = 6
    passage: int = 640
    retrieved: int = 3
    rag_rounds: int = 2
    rag_batch: int = 6
    unique_rounds: int = 5  # the first one is not counted
    unique_batch: int = 4
    unique_lead: int = 2
    unique: int = 1000
    unique_pairs: int = 12  # of the engine with our connector, on and off
    answer: int = 8


TINY = Size(
    documents=2,
    document=300,
    repeats=1,
    question=20,
    users=2,
    turns=2,
    turn=150,
    prefixes=1,
    prefix=270,
    prefix_rounds=1,
    prefix_batch=1,
    prefix_question=20,
    passages=3,
    passage=140,
    retrieved=2,
    rag_rounds=1,
    rag_batch=2,
    unique_rounds=3,
    unique_batch=2,
    unique_lead=1,
    unique=140,
    unique_pairs=2,
    answer=2,
)


@dataclass(frozen=True, slots=True)
class Workload:
    """`fill` is asked to have something stored, `ask` is measured."""

    name: str
    title: str
    fill: tuple[Round, ...]
    ask: tuple[Round, ...]
    together: bool = False  # the prompts of a round at once, else one after the other
    lead: int = 0  # so many of a round are asked right before the others, and are not counted
    compared: int | None = None  # rounds that are asked without a cache; None: all


class Texts:
    """Pieces of one long text, each behind a few random tokens."""

    def __init__(self, text: Sequence[int], seed: str) -> None:
        self._text = text
        self.rng = random.Random(seed)

    def take(self, tokens: int) -> Prompt:
        """A piece of so many tokens that nothing else begins with."""
        header = self.rng.choices(TOKEN_IDS, k=min(HEADER_TOKENS, tokens))
        start = self.rng.randrange(len(self._text) - tokens)
        return [*header, *self._text[start : start + tokens - len(header)]]

    def many(self, count: int, tokens: int) -> list[Prompt]:
        return [self.take(tokens) for _ in range(count)]


def make_workloads(text: Sequence[int], size: Size, seed: int) -> list[Workload]:
    """All of them, in the order in which they are asked."""
    tile = documents(Texts(text, f"documents {seed}"), size)
    shuffled = [prompt for each in tile.ask for prompt in each]
    texts = Texts(text, f"random {seed}")
    again = [[*prompt[: size.document], *texts.take(size.question)] for prompt in shuffled]
    texts.rng.shuffle(again)
    rounds = [again[at : at + size.documents] for at in range(0, len(again), size.documents)]
    return [
        tile,
        replace(tile, name="random", title="Long documents, random", ask=tuple(rounds)),
        chats(Texts(text, f"chats {seed}"), size),
        shared_prefix(Texts(text, f"prefix {seed}"), size),
        retrieval(Texts(text, f"rag {seed}"), size),
        unique(Texts(text, f"unique {seed}"), size),
    ]


def documents(texts: Texts, size: Size) -> Workload:
    """Each document with a question, then all of them again, with others, in the same order."""
    found = texts.many(size.documents, size.document)
    fill, *ask = (
        [[*document, *texts.take(size.question)] for document in found]
        for _ in range(1 + size.repeats)
    )
    return Workload(
        "tile", "Long documents, tile by tile", (fill,), tuple(ask), compared=size.compared
    )


def chats(texts: Texts, size: Size) -> Workload:
    """Turn by turn, all users; the second half of the turns is measured."""
    users = [texts.many(size.turns, size.turn) for _ in range(size.users)]
    histories = [list(accumulate(turns)) for turns in users]
    rounds = [[history[turn] for history in histories] for turn in range(size.turns)]
    half = size.turns // 2
    return Workload("chat", "Chats, growing history", tuple(rounds[:half]), tuple(rounds[half:]))


def shared_prefix(texts: Texts, size: Size) -> Workload:
    """A few system prompts, and questions behind them."""
    prefixes = texts.many(size.prefixes, size.prefix)

    def asked(count: int) -> Round:
        found = [
            [*prefix, *texts.take(size.prefix_question)]
            for prefix in prefixes
            for _ in range(count)
        ]
        texts.rng.shuffle(found)
        return found

    ask = [asked(size.prefix_batch) for _ in range(size.prefix_rounds)]
    return Workload("system", "Shared system prompt", (asked(1),), tuple(ask))


def retrieval(texts: Texts, size: Size) -> Workload:
    """Some passages in front of each question, the popular ones more often."""
    passages = texts.many(size.passages, size.passage)
    weights = [1 / rank for rank in range(1, size.passages + 1)]

    def asked(count: int) -> Round:
        found = []
        for _ in range(count):
            chosen: list[int] = []
            while len(chosen) < size.retrieved:
                [one] = texts.rng.choices(range(size.passages), weights)
                if one not in chosen:
                    chosen.append(one)
            context = [token for one in chosen for token in passages[one]]
            found.append(context + texts.take(size.question))
        return found

    ask = [asked(size.rag_batch) for _ in range(size.rag_rounds)]
    return Workload("rag", "RAG", (asked(size.rag_batch),), tuple(ask))


def unique(texts: Texts, size: Size) -> Workload:
    """Nothing is there, all of it is saved: at the end as much is still to save as at the begin."""
    count = size.unique_lead + size.unique_batch
    rounds = tuple(texts.many(count, size.unique) for _ in range(size.unique_rounds))
    return Workload(
        "unique", "100 % unique prompts", (), rounds, together=True, lead=size.unique_lead
    )


def fills(workloads: Sequence[Workload]) -> list[Round]:
    """What is asked first for all of them, once where several build on the same."""
    found: list[Round] = []
    for workload in workloads:
        found += [each for each in workload.fill if each not in found]
    return found


def reusable(workloads: Sequence[Workload], block: int) -> dict[str, int]:
    """Tokens of each workload in a prefix cache from which nothing leaves; the last is computed."""
    seen = {name for each in fills(workloads) for prompt in each for name in _blocks(prompt, block)}
    found = {}
    for workload in workloads:
        found[workload.name] = 0
        for prompt in (prompt for each in workload.ask for prompt in each):
            names = _blocks(prompt, block)
            useful = names[: (len(prompt) - 1) // block]
            hits = next((at for at, name in enumerate(useful) if name not in seen), len(useful))
            found[workload.name] += hits * block
            seen |= set(names)
    return found


def _blocks(prompt: Prompt, block: int) -> list[int]:
    return [hash(tuple(prompt[:end])) for end in range(block, len(prompt) + 1, block)]
