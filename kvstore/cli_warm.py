"""The command `kvstore warm`: run prompts through an engine, so that its cache knows them."""

from __future__ import annotations

import time
from pathlib import Path  # noqa: TC003  # typer looks at the annotations
from typing import TYPE_CHECKING, Annotated

import typer

from kvstore import cli_output as output
from kvstore import cli_prompt as prompt
from kvstore.cli_directory import Place
from kvstore.cli_options import Json, seconds_of
from kvstore.client_config import ClientConfig
from kvstore.errors import InvalidRequest
from kvstore.private_file import read_private
from kvstore.quantity import format_age

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.warming import Warmer, Warming

CONCURRENCY_MAX = 256
KEY_BYTES_MAX = 4096
BROKEN_OFF = 130
SETTLE_S = 1.0
SETTLE_S_MAX = 10.0


def warm(
    url: Annotated[str, typer.Argument(help="The engine's API: http://HOST:PORT.", metavar="URL")],
    file: Annotated[
        Path,
        typer.Argument(help="A prompt a line, or JSONL (see --jsonl); - is stdin.", metavar="FILE"),
    ],
    model: Annotated[
        str, typer.Option(help="The model's name there; by default the only one it serves.")
    ] = "",
    concurrency: Annotated[
        int, typer.Option(min=1, max=CONCURRENCY_MAX, help="Requests at a time.")
    ] = 4,
    jsonl: Annotated[
        bool | None,
        typer.Option(
            "--jsonl/--lines",
            help='Lines are {"prompt": TEXT or [IDS]} or {"messages": [...]}; other fields are '
            "sent along. By default so for a name that ends in .jsonl.",
        ),
    ] = None,
    store: Annotated[
        str | None,
        typer.Option(
            help="The engine's store, to say what was added: a directory or a kvstore:// address.",
            metavar="STORE",
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(help="A file (0600) with the key of the API.")
    ] = None,
    timeout: Annotated[str, typer.Option(help="For one request: 90s, 10m.")] = "10m",
    json: Json = False,
) -> None:
    """Run prompts through an engine's API to fill its cache.

    The API is OpenAI's, as vLLM and SGLang serve it; one token is generated a prompt. Exit code 1
    when a prompt failed; the others are done.
    """
    from kvstore.warming import Engine, Warmer, requests_of

    timeout_s = seconds_of(timeout, "--timeout")
    is_jsonl = jsonl if jsonl is not None else file.suffix == ".jsonl"
    content = prompt.read_file(file, prompt.PROMPT_CHARS_MAX)
    prompts = requests_of(content, str(file), is_jsonl=is_jsonl)
    key = ""
    if api_key_file is not None:
        key = read_private("--api-key-file", api_key_file, KEY_BYTES_MAX).decode().strip()
    committed = _counter(store)
    before = committed()
    warmer = Warmer(Engine(url, model, key, timeout_s), prompts, concurrency)
    now, broken_off = _run(warmer, len(prompts))
    stored = _settled(committed) - before if before is not None else None
    if json:
        output.print_json(now.to_dict() | {"stored_pages": stored, "interrupted": broken_off})
    else:
        _show(now, stored, broken_off)
    if broken_off:
        raise typer.Exit(BROKEN_OFF)
    if now.errors or now.stopped:
        raise typer.Exit(1)


def _run(warmer: Warmer, prompts: int) -> tuple[Warming, bool]:
    """How it ended, and whether with Ctrl-C: what was done by then counts."""
    from kvstore.warming import Warming

    now = Warming(prompts)
    with output.progress("warm", "prompts") as show:
        try:
            for now in warmer.run():
                show(now.done + now.errors, now.prompts)
        except KeyboardInterrupt:
            return now, True
    return now, False


def _settled(committed: Callable[[], int | None]) -> int:
    """What it counts once it stands still: engines store behind the answer."""
    deadline, last = time.monotonic() + SETTLE_S_MAX, committed()
    while time.monotonic() < deadline:
        time.sleep(SETTLE_S)
        now = committed()
        if now == last:
            break
        last = now
    return last or 0


def _counter(store: str | None) -> Callable[[], int | None]:
    """Reads how many pages the server of a store has taken."""
    if store is None:
        return lambda: None
    place = Place(store, ClientConfig())

    def committed() -> int | None:
        with place.opened() as opened:
            found = opened.stats()
        if not found.service:
            raise InvalidRequest(f"--store {store}: no server holds it; is it the engine's?")
        return int(found.counters["pages_committed"])

    return committed


def _show(now: Warming, stored: int | None, broken_off: bool) -> None:
    out = output.console()
    ended = " before it was broken off" if broken_off else ""
    out.print(
        f"{now.done} of {now.prompts} prompts, {now.prompt_tokens} tokens in "
        f"{format_age(now.seconds)}{ended}; {now.errors} failed."
    )
    computed = now.computed_tokens
    if not now.done:
        pass
    elif computed is None:
        out.print("The engine does not say how many tokens it found in a cache.")
    else:
        out.print(f"{now.reused_tokens} tokens were in a cache already, {computed} were computed.")
    if stored is not None:
        out.print(f"{stored} pages came to the store meanwhile.")
    for each in now.first_errors:
        out.print(f"failed: {each}")
    if now.stopped and not broken_off:
        out.print("Gave up: only errors for a while. Is the engine running?")
