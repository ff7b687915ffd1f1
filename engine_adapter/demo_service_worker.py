"""One engine of the service demo: a model that shares a server with others, and does as it is told.

Orders come as JSON lines on stdin, answers go as JSON lines to stdout, until stdin ends. It never
looks after the server: whether there is one, or was, is the client's business. Must not be here:
what people see.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import transformers

from kvstore.connect import connect
from kvstore.engine_adapter.demo_worker import NEW_TOKENS_MAX, QUESTIONS, answer, prompts
from kvstore.engine_adapter.transformers_adapter import TransformersAdapter
from kvstore.errors import KVStoreError
from kvstore.weights import weights_digest

if TYPE_CHECKING:
    from kvstore.engine_adapter.model_spec import HfModel

# Three models on few cores: a look-up may wait for a processor longer than for the server.
LOOKUP_DEADLINE_S = 0.25


@dataclass(frozen=True, slots=True)
class Task:
    """What the parent wants."""

    model: str
    name: str
    address: str
    directory: str  # for what this host remembers of the weights
    dtype: str
    prompt_tokens: int


def work(task: Task) -> None:
    """Load the model, then answer the question each time that a line asks for it."""
    start = time.perf_counter()
    tokenizer = transformers.AutoTokenizer.from_pretrained(task.model, local_files_only=True)
    model: HfModel = transformers.AutoModelForCausalLM.from_pretrained(
        task.model, dtype=getattr(torch, task.dtype), local_files_only=True
    )
    model.eval()
    room = getattr(model.config, "max_position_embeddings", task.prompt_tokens)
    ids = prompts(tokenizer, min(task.prompt_tokens, room - NEW_TOKENS_MAX))[0]
    with connect(task.address, lookup_deadline_s=LOOKUP_DEADLINE_S) as store:
        adapter = TransformersAdapter(
            store,
            model,
            weights=weights_digest(task.model, Path(task.directory)),
            name=task.name,
            writer="demo-service",
        )
        # The first tokens of a process are slow whatever they are; nobody waits for these.
        with torch.inference_mode():
            model.generate(
                ids[:, :16], attention_mask=torch.ones_like(ids[:, :16]), max_new_tokens=2
            )
        pages = -(-(ids.shape[1] + NEW_TOKENS_MAX) // adapter.spec.page_tokens)
        send(
            "loaded",
            seconds=time.perf_counter() - start,
            prompt_tokens=ids.shape[1],
            prompt_bytes=pages * adapter.spec.page_bytes,
            question=QUESTIONS[0],
        )
        for line in sys.stdin:
            result = answer(adapter, tokenizer, ids, json.loads(line)["run"], _ignore)
            send("done", **asdict(result), failed=adapter.counters().loads_failed)


def send(event: str, **values: object) -> None:
    """Say what happened."""
    _events.write(json.dumps({"event": event, **values}) + "\n")
    _events.flush()


def _ignore(event: str, **values: object) -> None:
    """The text as it grows: here only the whole answer counts."""


_events = sys.stdout


def main() -> None:
    """Keep stdout for events alone: libraries that print do so on stderr."""
    global _events
    _events = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    try:
        work(Task(**json.loads(sys.argv[1])))
    except (KVStoreError, OSError) as exc:  # the world's doing: a sentence is enough
        send("failed", text=str(exc))
        sys.exit(1)


if __name__ == "__main__":
    main()
