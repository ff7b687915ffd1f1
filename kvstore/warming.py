"""Runs prompts through an engine's OpenAI-compatible API, so that what it computes is stored.

One request a prompt, one token each; a few at a time, each worker on a connection of its own. An
error costs its prompt and is counted; a row of them ends the run, since the engine is gone then.
Must not be here: what a terminal shows, and anything of the store: the engine's adapter stores.
"""

from __future__ import annotations

import http.client
import json
import queue
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from kvstore.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ANSWER_BYTES_MAX = 16 << 20
ERROR_CHARS_MAX = 200
ERRORS_KEPT = 5
ERRORS_IN_A_ROW_MAX = 16
POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class Engine:
    """Where an engine listens, and how to ask it."""

    url: str  # http://HOST:PORT, with or without /v1
    model: str = ""  # empty: the only one that it serves
    api_key: str = field(default="", repr=False)
    timeout_s: float = 600.0

    def connection(self) -> http.client.HTTPConnection:
        """A new one. Raises InvalidRequest for what is no URL."""
        if self.timeout_s <= 0:
            raise InvalidRequest(f"a timeout of {self.timeout_s:g} s; more than 0 is needed")
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InvalidRequest(f"{self.url!r}: http://HOST:PORT or https://HOST:PORT is needed")
        secure = parts.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        try:
            return kind(parts.hostname, parts.port, timeout=self.timeout_s)
        except ValueError as exc:
            raise InvalidRequest(f"{self.url!r}: {exc}") from exc

    def path(self, name: str) -> str:
        """Of a call of the API, as "/v1/models"."""
        base = urlsplit(self.url).path.rstrip("/")
        return f"{base.removesuffix('/v1')}/v1/{name}"

    def ask(self, link: http.client.HTTPConnection, name: str, body: Any = None) -> Any:
        """The JSON that a call answers. Raises OSError, HTTPException or ValueError."""
        headers = {"Content-Type": "application/json"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        content = json.dumps(body).encode() if body is not None else None
        link.request("POST" if content else "GET", self.path(name), content, headers)
        answer = link.getresponse()
        said = answer.read(ANSWER_BYTES_MAX)
        if answer.status != http.HTTPStatus.OK:
            words = said.decode(errors="replace")[:ERROR_CHARS_MAX]
            raise ValueError(f"status {answer.status}: {words}")
        return json.loads(said)

    def served(self) -> str:
        """The one model that the engine serves. InvalidRequest if there are several, or none."""
        link = self.connection()
        try:
            names = [each["id"] for each in self.ask(link, "models")["data"]]
        except OSError as exc:
            why = exc.strerror or exc
            raise InvalidRequest(f"{self.url}: no engine answers there: {why}") from exc
        except (http.client.HTTPException, ValueError, KeyError, TypeError) as exc:
            raise InvalidRequest(f"{self.url}: does not say what it serves: {exc}") from exc
        finally:
            link.close()
        if len(names) != 1:
            raise InvalidRequest(f"{self.url} serves {len(names)} models; name one with --model")
        return str(names[0])


@dataclass(frozen=True, slots=True)
class Warming:
    """How far it is. Tokens are those of prompts that were answered."""

    prompts: int
    done: int = 0
    errors: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0  # found in a cache, the engine's own or the store
    counted: int = 0  # prompts of which the engine said so
    first_errors: tuple[str, ...] = ()
    seconds: float = 0.0
    stopped: bool = False  # before the last prompt

    @property
    def computed_tokens(self) -> int | None:
        """Tokens that were computed, so that they can be stored; None if the engine won't say."""
        return self.prompt_tokens - self.reused_tokens if self.counted == self.done else None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {
            "first_errors": list(self.first_errors),
            "reused_tokens": self.reused_tokens if self.counted == self.done else None,
            "computed_tokens": self.computed_tokens,
        }


def requests_of(content: str, where: str, *, is_jsonl: bool) -> list[dict[str, Any]]:
    """The prompts of a file: one a line. InvalidRequest with the line where one makes no sense.

    Of JSONL a line is {"prompt": text or token ids}, {"messages": [...]}, a text or a list of ids;
    what else an object names, as "cache_salt", is sent along.
    """
    made = []
    for number, line in enumerate(content.split("\n"), start=1):
        if not line.strip():
            continue
        found: Any = line
        if is_jsonl:
            try:
                found = json.loads(line)
            except (ValueError, RecursionError) as exc:
                raise InvalidRequest(f"{where}, line {number}: not JSON: {exc}") from exc
        if isinstance(found, str | list):
            found = {"prompt": found}
        if not isinstance(found, dict) or not (found.get("prompt") or found.get("messages")):
            raise InvalidRequest(
                f'{where}, line {number}: an object with "prompt" or "messages" is needed'
            )
        made.append(found)
    if not made:
        raise InvalidRequest(f"{where}: no prompt in it")
    return made


class Warmer:
    """One run of some prompts through one engine."""

    def __init__(self, engine: Engine, prompts: Sequence[dict[str, Any]], concurrency: int) -> None:
        self._engine = engine if engine.model else replace(engine, model=engine.served())
        self._prompts: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        for each in prompts:
            self._prompts.put(each)
        self._answers: queue.SimpleQueue[tuple[int, int | None] | str | None] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._now = Warming(len(prompts))
        self._workers = min(concurrency, len(prompts))
        self._bad_in_a_row = 0

    def run(self) -> Iterator[Warming]:
        """Progress a prompt, the last with all; closing it ends the run without waiting."""
        started_s = time.monotonic()
        for _ in range(self._workers):
            # A daemon: an engine that hangs must not keep the command from ending.
            threading.Thread(target=self._work, name="kvstore-warm", daemon=True).start()
        working = self._workers
        try:
            while working:
                try:
                    answer = self._answers.get(timeout=POLL_S)
                except queue.Empty:
                    continue
                if answer is None:
                    working -= 1
                    continue
                self._account(answer, time.monotonic() - started_s)
                yield self._now
        finally:
            self._stopping.set()
        left = self._now.prompts - self._now.done - self._now.errors
        self._now = replace(self._now, stopped=left > 0)
        yield self._now

    def _account(self, answer: tuple[int, int | None] | str, seconds: float) -> None:
        now = replace(self._now, seconds=seconds)
        if isinstance(answer, str):
            self._bad_in_a_row += 1
            if self._bad_in_a_row >= ERRORS_IN_A_ROW_MAX:
                self._stopping.set()
            said = (*now.first_errors, answer) if len(now.first_errors) < ERRORS_KEPT else None
            self._now = replace(now, errors=now.errors + 1, first_errors=said or now.first_errors)
            return
        self._bad_in_a_row = 0
        tokens, reused = answer
        self._now = replace(
            now,
            done=now.done + 1,
            prompt_tokens=now.prompt_tokens + tokens,
            reused_tokens=now.reused_tokens + (reused or 0),
            counted=now.counted + (reused is not None),
        )

    def _work(self) -> None:
        link = self._engine.connection()
        try:
            while not self._stopping.is_set():
                try:
                    prompt = self._prompts.get_nowait()
                except queue.Empty:
                    return
                self._answers.put(self._one(link, prompt))
        finally:
            link.close()
            self._answers.put(None)

    def _one(
        self, link: http.client.HTTPConnection, prompt: dict[str, Any]
    ) -> tuple[int, int | None] | str:
        """Tokens of the prompt, and how many of them were reused; else what went wrong."""
        name = "completions" if "prompt" in prompt else "chat/completions"
        body = prompt | {"model": self._engine.model, "max_tokens": 1, "stream": False}
        try:
            return _counts(self._engine.ask(link, name, body))
        except (OSError, http.client.HTTPException, ValueError) as exc:
            with suppress(OSError):
                link.close()  # the next request opens it again
            return f"{type(exc).__name__}: {exc}"[:ERROR_CHARS_MAX]


def _counts(answer: Any) -> tuple[int, int | None]:
    """Out of a completion. ValueError where it is none."""
    try:
        usage = answer["usage"]
        tokens = int(usage["prompt_tokens"])
        details = usage.get("prompt_tokens_details") or {}
        ours = ((answer.get("kv_transfer_params") or {}).get("kvstore") or {}).get("reused_tokens")
        said = [int(each) for each in (details.get("cached_tokens"), ours) if each is not None]
    except (AttributeError, KeyError, TypeError) as exc:
        raise ValueError(f"an answer without usage.prompt_tokens: {exc!r}") from exc
    return tokens, max(said) if said else None
