"""One process of the demo: loads the model, opens the store, answers the question some times.

It is told what to do by one JSON object as its argument and says what happens in JSON lines on its
stdout; then it waits to be killed, or for its stdin to close. Must not be here: what people see.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers.generation.streamers import BaseStreamer

from kvstore import Store
from kvstore.engine_adapter.model_spec import model_spec
from kvstore.engine_adapter.transformers_adapter import TransformersAdapter
from kvstore.errors import KVStoreError
from kvstore.quantity import format_bytes
from kvstore.removal import Selection
from kvstore.weights import weights_digest

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TextIO

    from kvstore.engine_adapter.model_spec import HfModel

TENANT = "demo"
PROMPT_TOKENS_MAX = 3000
NEW_TOKENS_MAX = 48
# The first is asked; the other is for `kvstore explain` to show what it would reuse.
QUESTIONS = (
    "How do I get the number of items in a dictionary d?",
    "How do I remove all items from a dictionary d?",
)
LOAD_DEADLINE_S = 30.0
HOST_BYTES_MIN = 512 << 20
DISK_BYTES_MIN = 2 << 30


@dataclass(frozen=True, slots=True)
class Task:
    """What the parent wants."""

    model: str
    name: str
    directory: str
    dtype: str
    runs: list[str]
    prompt_file: str  # where to leave the token ids of another question about the same text
    forget: bool  # begin with a store that has nothing of the demo


@dataclass(frozen=True, slots=True)
class RunResult:
    """One answer and what it took."""

    run: str
    ttft_s: float  # from before the look-up to the first token
    load_s: float
    prompt_tokens: int
    reused_tokens: int
    tiers: dict[str, int]
    answer: list[int]
    saved_pages: int
    saved_durably: bool
    save_s: float


class TextSender(BaseStreamer):
    """Sends the answer's text as it grows, and remembers when it began."""

    def __init__(self, tokenizer: Any, send: Callable[..., None]) -> None:
        self.first_token_at: float | None = None
        self._tokenizer = tokenizer
        self._send = send
        self._tokens: list[int] = []
        self._sent = 0
        self._prompt_seen = False

    def put(self, value: torch.Tensor) -> None:
        """The prompt comes first, then each token."""
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        if self.first_token_at is None:
            self.first_token_at = time.perf_counter()
        self._tokens += value.flatten().tolist()
        text = self._text()
        if not text.endswith("\ufffd"):  # a character of several tokens is not whole yet
            self._flush(text)

    def end(self) -> None:
        """The answer is complete."""
        self._flush(self._text())

    def _text(self) -> str:
        text: str = self._tokenizer.decode(self._tokens, skip_special_tokens=True)
        return text

    def _flush(self, text: str) -> None:
        self._send("text", text=text[self._sent :])
        self._sent = len(text)


class StopAtBlankLine(transformers.StoppingCriteria):
    """One paragraph is enough of an answer."""

    def __init__(self, tokenizer: Any, prompt_tokens: int) -> None:
        self._tokenizer = tokenizer
        self._start = prompt_tokens

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Whether each row is done."""
        text = self._tokenizer.decode(input_ids[0, self._start :])
        return torch.full((input_ids.shape[0],), "\n\n" in text.strip(" "), dtype=torch.bool)


def prompts(tokenizer: Any, tokens_max: int) -> list[torch.Tensor]:
    """The questions, [1, tokens] each, after as many whole lines of one long text as fit.

    The text ships with Python: its manual's page on dictionaries.
    """
    from pydoc_data.topics import topics

    lines = str(topics["typesmapping"]).strip().splitlines(keepends=True)

    def ask(question: str, count: int) -> torch.Tensor:
        content = "".join(lines[:count]).rstrip() + "\n\n" + question
        if not tokenizer.chat_template:
            ids: torch.Tensor = tokenizer(content + "\nAnswer:", return_tensors="pt").input_ids
            return ids
        chat = [{"role": "user", "content": content}]
        ids = tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
        ).input_ids
        return ids

    fits, too_many = 1, len(lines) + 1
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        if ask(QUESTIONS[0], middle).shape[1] <= tokens_max:
            fits = middle
        else:
            too_many = middle
    return [ask(question, fits) for question in QUESTIONS]


def answer(
    adapter: TransformersAdapter, tokenizer: Any, ids: torch.Tensor, run: str, send: Any
) -> RunResult:
    """Ask once; look-up and load count as part of the wait for the first token."""
    streamer = TextSender(tokenizer, send)
    stop = transformers.StoppingCriteriaList([StopAtBlankLine(tokenizer, ids.shape[1])])
    start = time.perf_counter()
    cache = adapter.cache(ids, torch.ones_like(ids))
    output = adapter.model.generate(
        ids,
        **cache.arguments(),
        max_new_tokens=NEW_TOKENS_MAX,
        do_sample=False,
        streamer=streamer,
        stopping_criteria=stop,
    )
    answered = time.perf_counter()
    saved = cache.save(output, durable=True)
    done = time.perf_counter()
    return RunResult(
        run=run,
        ttft_s=(streamer.first_token_at or answered) - start,
        load_s=cache.load_s,
        prompt_tokens=ids.shape[1],
        reused_tokens=cache.reused_tokens[0],
        tiers=cache.tiers,
        answer=output[0, ids.shape[1] :].tolist(),
        saved_pages=saved.pages,
        saved_durably=saved.durable,
        save_s=done - answered,
    )


def work(task: Task, send: Callable[..., None]) -> None:
    """Everything, up to the moment when the parent decides how this process ends."""
    start = time.perf_counter()
    tokenizer = transformers.AutoTokenizer.from_pretrained(task.model, local_files_only=True)
    model: HfModel = transformers.AutoModelForCausalLM.from_pretrained(
        task.model, dtype=getattr(torch, task.dtype), local_files_only=True
    )
    model.eval()
    room = getattr(model.config, "max_position_embeddings", PROMPT_TOKENS_MAX)
    ids, other = prompts(tokenizer, min(PROMPT_TOKENS_MAX, room - NEW_TOKENS_MAX))
    unknown = model_spec(model, weights="files:" + "0" * 64)
    pages = -(-(ids.shape[1] + NEW_TOKENS_MAX) // unknown.page_tokens)
    need = pages * unknown.page_bytes
    with Store.open(
        task.directory,
        host_bytes=max(HOST_BYTES_MIN, 4 * need),
        disk_bytes=max(DISK_BYTES_MIN, 8 * need),
    ) as store:
        adapter = TransformersAdapter(
            store,
            model,
            weights=weights_digest(task.model, Path(task.directory)),
            name=task.name,
            tenant=TENANT,
            writer="demo",
            load_deadline_s=LOAD_DEADLINE_S,
        )
        if task.forget:
            store.evict(Selection(tenant=TENANT))
        Path(task.prompt_file).write_text(json.dumps(other[0].tolist()), encoding="utf-8")
        # The first tokens of a process are slow whatever they are; nobody waits for these.
        with torch.inference_mode():
            model.generate(
                ids[:, :16], attention_mask=torch.ones_like(ids[:, :16]), max_new_tokens=2
            )
        send(
            "loaded",
            seconds=time.perf_counter() - start,
            prompt_tokens=ids.shape[1],
            question=QUESTIONS[0],
            page_tokens=adapter.spec.page_tokens,
            page_bytes=format_bytes(adapter.spec.page_bytes),
            threads=torch.get_num_threads(),
        )
        for run in task.runs:
            send("run", name=run)
            send("done", **asdict(answer(adapter, tokenizer, ids, run, send)))
        longest = store.chains(limit=1)[0]
        send("ready", chain=longest[0].chain_id if longest else "")
        sys.stdin.read()


def _event_sender(stream: TextIO) -> Callable[..., None]:
    def send(event: str, **values: object) -> None:
        stream.write(json.dumps({"event": event, **values}) + "\n")
        stream.flush()

    return send


def main() -> None:
    """Keep stdout for events alone: libraries that print do so on stderr."""
    events = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    send = _event_sender(events)
    try:
        work(Task(**json.loads(sys.argv[1])), send)
    except (KVStoreError, OSError) as exc:  # the world's doing: a sentence is enough
        send("failed", text=str(exc))
        sys.exit(1)


if __name__ == "__main__":
    main()
