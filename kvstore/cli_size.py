"""The command `kvstore size`: how much of a model's KV fits where."""

from __future__ import annotations

import json as json_module
from pathlib import Path  # noqa: TC003  # typer looks at the annotations
from typing import Annotated

import typer

from kvstore import cli_output as output
from kvstore import cli_prompt as prompt
from kvstore.cli_options import Json, bytes_of
from kvstore.errors import InvalidRequest
from kvstore.model_size import model_size
from kvstore.quantity import format_bytes

CONFIG_CHARS_MAX = 1 << 20
PROMPT_TOKENS = 8192


def size(
    model: Annotated[
        Path, typer.Argument(help="A config.json, or a folder that holds one.", metavar="MODEL")
    ],
    kv_dtype: Annotated[
        str | None, typer.Option(help="Of the KV, if not the model's: bfloat16, float8_e4m3fn, ...")
    ] = None,
    block_tokens: Annotated[int, typer.Option(min=1, help="The engine's block.")] = 16,
    memory: Annotated[
        list[str] | None, typer.Option(help="How much fits in it: 8GiB. More than once.")
    ] = None,
    json: Json = False,
) -> None:
    """Say how large a model's KV is, and what fits.

    Bytes a token, tokens a GiB, the size of a page.
    """
    given = [bytes_of(each, "--memory") for each in memory or ("8GiB", "64GiB", "1TiB")]
    file = model / "config.json" if model.is_dir() else model
    if not file.exists() and str(file) != "-":
        wrong = "has no config.json" if model.is_dir() else "there is no such file or folder"
        raise InvalidRequest(
            f"{model}: {wrong}; give a model's folder or its config.json (nothing is downloaded)"
        )
    text = prompt.read_file(file, CONFIG_CHARS_MAX)
    try:
        config = json_module.loads(text)
    except (ValueError, RecursionError) as exc:
        raise InvalidRequest(f"{file}: not JSON: {exc}") from exc
    if not isinstance(config, dict):
        raise InvalidRequest(f"{file}: not a model's config.json")
    found = model_size(config, kv_dtype=kv_dtype, block_tokens=block_tokens)
    fits = [
        {
            "bytes": each,
            "tokens": each // found.page_bytes * found.page_tokens,
            "pages": each // found.page_bytes,
            "prompts": each // found.page_bytes * found.page_tokens // PROMPT_TOKENS,
        }
        for each in given
    ]
    if json:
        output.print_json(found.to_dict() | {"fits": fits})
        return
    out = output.console()
    out.print(
        f"{found.model}: {found.layers} layers, {found.attention}, {found.kv_heads} KV heads of "
        f"{found.head_dim}, {found.kv_dtype}"
    )
    out.print(
        f"{format_bytes(found.bytes_per_token)} a token, {found.tokens_per_gib:,} tokens a GiB; "
        f"pages of {found.page_tokens} tokens, {format_bytes(found.page_bytes)}"
    )
    if found.sliding_layers:
        out.print(
            f"{found.sliding_layers} layers look back {found.sliding_window} tokens only; what is "
            "given here keeps them whole, as a prefix cache has to"
        )
    table = output.table_of("with", *output.right("tokens", "pages", f"prompts of {PROMPT_TOKENS}"))
    for each in fits:
        counts = (f"{each[key]:,}" for key in ("tokens", "pages", "prompts"))
        table.add_row(format_bytes(each["bytes"]), *counts)
    out.print(table)
